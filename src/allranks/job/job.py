"""The job file's keys, their defaults and rules, and how the layers of a job combine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from allranks.errors import AllranksError
from allranks.job.problems import problems_of, unknown_key
from allranks.job.task_source import find_task
from allranks.job.values import (
    CommandText,
    Duration,
    DurationText,
    EnvName,
    EnvText,
    LayoutText,
    NameText,
    SlurmFeatures,
    SlurmJobs,
    SlurmMemory,
    SlurmName,
    SlurmNodes,
    SlurmText,
    SlurmTime,
    Template,
)
from allranks.job.yaml_lines import (
    EXCLUSIVE,
    Dumper,
    Layer,
    Origin,
    Problem,
    error_of,
    merge,
    read_file,
    read_overrides,
)
from allranks.layout import Layout

DEFAULT_TASK = "spiral"

# The lowest layers. Not in the model: a higher layer must be able to clear one key of a pair, and
# to add to `env` without losing what is in it.
BUILT_IN = {"env": {"NCCL_DEBUG": "WARN"}}
BUILT_IN_TASK = {"batch_size": 128, "epochs": 20}

SECTIONS = ("options", "optimizer", "pipeline", "data", "checkpoint", "probe", "slurm", "env")
COMMAND_ONLY = ("launcher", "last", "resume", "stage")
TASK_ONLY = (
    *("options", "batch_size", "batch_size_per_rank", "micro_batch_size", "epochs", "steps"),
    *("seed", "precision", "compile", "optimizer", "checkpoint", "log_every"),
    *("activation_checkpointing", "lr_scaling", "compress", "pipeline"),
)
# Changing one of these on a resume changes what is computed.
MATHEMATICS = (
    *("task", "options", "command", "batch_size", "batch_size_per_rank", "seed", "optimizer"),
    *("lr_scaling", "compress"),
)

OFFLOAD = "optimizer.offload"  # changes where it is computed


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose value differs between two jobs, and whether it changes what is computed."""

    key: str
    ours: Any
    theirs: Any
    mathematics: bool


Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A frozen mapping that allows only its own keys, and converts no values."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        defer_build=True,  # built once, as part of Job: every command starts sooner
    )


class Optimizer(Section):
    """How the weights are updated."""

    name: Literal["adamw", "sgd"] = Field(default="adamw", description="the update rule")
    lr: PositiveFloat = Field(default=1e-3, description="the highest learning rate of the schedule")
    weight_decay: NonNegativeFloat = Field(
        default=0.01, description="decoupled in adamw, L2 in sgd"
    )
    momentum: Fraction = Field(default=0.9, description="for sgd; adamw ignores it")
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = Field(
        default=(0.9, 0.999), description="for adamw; sgd ignores them"
    )
    warmup: float = Field(
        default=0.05, ge=0, le=1, description="fraction of the steps in which the rate rises"
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="how the rate falls after the warm-up"
    )
    clip: PositiveFloat | None = Field(
        default=1.0, description="largest global gradient norm; null: off"
    )
    offload: bool = Field(default=False, description="keep its state in host memory: slower")


class Pipeline(Section):
    """How the stages of a model that is divided by pp work together."""

    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = Field(
        default="1f1b", description="in which order stages compute"
    )
    micro_batches: PositiveInt | None = Field(
        default=None,
        description="null: from micro_batch_size, or 4 per stage; 1: stages take turns",
    )


class Data(Section):
    """How samples reach the ranks."""

    num_workers: Literal["auto"] | NonNegativeInt = Field(
        default="auto", description="loader processes per rank; auto: from the available CPUs"
    )
    prefetch: PositiveInt = Field(default=4, description="batches loaded ahead")
    stage: Literal["local"] | None = Field(
        default=None, description="local: copy the data to each node's own disk first"
    )


class Checkpoint(Section):
    """When the state is saved."""

    every: PositiveInt | DurationText = Field(
        default=Duration(600), description="a time (30s, 10m, 1h) or a number of steps (500)"
    )
    keep: PositiveInt = Field(default=3, description="how many of the newest are kept")


class Probe(Section):
    """What ranks record about their own steps."""

    trace: bool = Field(
        default=True,
        description="trace a few steps, to see what limits the run",
    )


class Slurm(Section):
    """What to ask sbatch for; null: leave it out."""

    account: SlurmName | None = Field(default=None, description="who is billed")
    partition: SlurmName | None = Field(default=None, description="which queue")
    qos: SlurmName | None = Field(default=None, description="quality of service")
    constraint: SlurmFeatures | None = Field(
        default=None, description="features that the nodes must have"
    )
    reservation: SlurmName | None = Field(default=None, description="use a reservation")
    exclude: SlurmNodes | None = Field(default=None, description="nodes to leave out")
    dependency: SlurmJobs | None = Field(default=None, description="start after other jobs")
    exclusive: bool = Field(default=False, description="whole nodes, shared with nobody")
    time: SlurmTime | None = Field(default=None, description="time limit, such as 12:00:00 or 2h")
    gpu: SlurmName | Annotated[tuple[SlurmName, ...], Field(strict=False)] | None = Field(
        default=None, description="type of GPU, or a list of acceptable types"
    )
    gpus: NonNegativeInt | None = Field(
        default=None, description="GPUs per node; null: from the layout; 0: a job without GPUs"
    )
    gpu_request: Literal["gres", "gpus-per-node"] = Field(
        default="gres", description="how to request GPUs at this site"
    )
    cpus_per_gpu: PositiveInt | None = Field(default=None, description="CPU cores per GPU")
    cpus_per_task: PositiveInt | None = Field(
        default=None, description="in place of cpus_per_gpu: CPU cores per rank"
    )
    mem: SlurmMemory | None = Field(default=None, description="memory per node, such as 64G")
    mem_per_gpu: SlurmMemory | None = Field(
        default=None, description="in place of mem: memory per GPU, such as 32G"
    )
    job_name: SlurmName | None = Field(
        default=None, description="name in the queue; null: the run's"
    )
    directives: dict[SlurmName, SlurmText | int | None] = Field(
        default={}, description="any other sbatch directive by its name; null: a flag"
    )
    modules: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(), description="environment modules to load"
    )
    setup: str = Field(default="", description="shell lines to run before the ranks start")
    grace: DurationText | None = Field(
        default=None, description="how long before the limit the job is told to save and stop"
    )
    signal: Literal["USR1", "USR2"] | None = Field(
        default=None,
        description="tells a script to stop; null: USR2, or USR1 for Lightning",
    )
    requeue: bool = Field(
        default=True, description="continue in another job after the limit or a failed node"
    )
    max_attempts: PositiveInt = Field(default=100, description="attempts before the run gives up")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Drop nulls: they ask for nothing, also where the default is a list or a text."""
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None}


# The methods of `compress`, each with its keys and their defaults; None: derived.
COMPRESS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {},
    "powersgd": {"rank": 4, "start_step": None},
    "topk": {"keep": 0.01},
    "local-sgd": {"every": 20},
    "diloco": {"every": 20, "outer_lr": 0.7, "outer_momentum": 0.9},
}


class Compress(Section):
    """Send less between ranks, at some loss: gradients compressed, or weights averaged rarely."""

    name: Literal["bf16", "fp16", "powersgd", "topk", "local-sgd", "diloco"] = Field(
        description="the method", examples=["powersgd"]
    )
    rank: PositiveInt | None = Field(
        default=None, description="for powersgd: of the matrices that are sent; 4 unless given"
    )
    start_step: NonNegativeInt | None = Field(
        default=None,
        description="for powersgd: steps before it begins; null: while the learning rate rises",
    )
    keep: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="for topk: fraction of the gradient's entries that are sent; 0.01 unless given",
    )
    every: PositiveInt | None = Field(
        default=None,
        description="for local-sgd and diloco: steps between averages; 20 unless given",
    )
    outer_lr: PositiveFloat | None = Field(
        default=None,
        description="for diloco: learning rate of the step on the average; 0.7 unless given",
    )
    outer_momentum: Fraction | None = Field(
        default=None, description="for diloco: Nesterov momentum of that step; 0.9 unless given"
    )

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, values: Any) -> Any:
        """Fill in the method's defaults, so that the resolved job shows them."""
        if not isinstance(values, dict):
            return values
        given = {key: value for key, value in values.items() if value is not None}
        return {**COMPRESS.get(str(given.get("name")), {}), **given}

    @property
    def averages_weights(self) -> bool:
        """Whether ranks train by themselves, and average their weights now and then."""
        return self.every is not None


class Job(Section):
    """A job of allranks: a task to train, or a command to run on every rank."""

    name: NameText = Field(default="job", description="what the run folder's name begins with")
    task: str | None = Field(
        default=None, description="spiral, digits, language, or your own package.module:Class"
    )
    options: dict[str, Any] = Field(default={}, description="the task's own settings")
    command: CommandText | None = Field(
        default=None, description="in place of task: your own script, such as python train.py"
    )
    launcher: Literal["torchrun", "srun"] = Field(
        default="torchrun", description="for a command; srun: one SLURM task per rank"
    )
    last: Template | None = Field(default=None, description="where a command saves its checkpoint")
    resume: Template | None = Field(
        default=None, description="what to append to a command on a later attempt"
    )
    stage: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(), description="paths to copy to each node's own disk; {stage} is their folder"
    )
    batch_size: PositiveInt | None = Field(
        default=None, description="global; the same on every layout", examples=[128]
    )
    batch_size_per_rank: PositiveInt | None = Field(
        default=None, description="in place of batch_size: grows with the ranks", examples=[32]
    )
    micro_batch_size: Literal["auto"] | PositiveInt | None = Field(
        default=None, description="per rank and backward pass; null: batch / ranks; auto: what fits"
    )
    epochs: PositiveInt | None = Field(
        default=None, description="passes over the data", examples=[20]
    )
    steps: PositiveInt | None = Field(
        default=None, description="in place of epochs: optimizer steps", examples=[1000]
    )
    # 32 bits: NumPy takes no more.
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="for the weights and the order of samples"
    )
    precision: Literal["auto", "fp32", "tf32", "fp16", "bf16"] = Field(
        default="auto", description="auto: bf16 if supported, else fp32"
    )
    compile: Literal["auto"] | bool = Field(default="auto", description="torch.compile, or measure")
    activation_checkpointing: Literal["off", "full", "selective"] = Field(
        default="off", description="recompute activations, to save memory"
    )
    optimizer: Optimizer = Field(default=Optimizer(), description="how the weights are updated")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="scale lr with the ranks; needs batch_size_per_rank"
    )
    compress: Compress | None = Field(
        default=None, description="how to send less between ranks, at some loss; null: off"
    )
    pipeline: Pipeline = Field(default=Pipeline(), description="how pp's stages work together")
    data: Data = Field(default=Data(), description="how samples reach the ranks")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="when the state is saved")
    log_every: PositiveInt = Field(default=10, description="steps between events with the loss")
    layout: LayoutText = Field(default=Layout(), description="nodes x GPUs; --layout overrides it")
    preflight: bool = Field(default=True, description="check the machine before training")
    max_restarts: NonNegativeInt = Field(
        default=0, description="how many times all ranks restart when one dies"
    )
    timeout: DurationText = Field(
        default=Duration(1800),
        description="how long a rank waits for the others before it gives up",
    )
    stall_timeout: DurationText | None = Field(
        default=None,
        description="end the run after this long without a step; --stall-timeout overrides it",
    )
    probe: Probe = Field(default=Probe(), description="what ranks record about their own steps")
    slurm: Slurm = Field(default=Slurm(), description="what to ask sbatch for; null: leave it out")
    env: dict[EnvName, EnvText] = Field(
        default=BUILT_IN["env"], description="environment variables for every rank"
    )

    @property
    def argv(self) -> list[str]:
        """The command's arguments; empty for a task."""
        return shlex.split(self.command or "")

    def to_mapping(self) -> dict[str, Any]:
        """Every key that applies to this kind of job, as plain values."""
        values = self.model_dump(mode="json")
        if self.command is None:
            unused = {"command", *COMMAND_ONLY}
        else:
            unused = {"task", *TASK_ONLY}
            values["data"] = {"stage": self.data.stage}
        return {key: value for key, value in values.items() if key not in unused}

    def to_yaml(self) -> str:
        """The job with every default filled in; `load_job` reads the same job back."""
        return yaml.dump(
            self.to_mapping(), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100
        )

    def differences(self, other: Job) -> list[Difference]:
        """The keys whose values differ in the other job."""
        ours, theirs = dict(_flat(self.to_mapping())), dict(_flat(other.to_mapping()))
        keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        mathematics = {key for key in keys if key.partition(".")[0] in MATHEMATICS} - {OFFLOAD}
        if self.batch_size_per_rank and self.layout.data_ranks != other.layout.data_ranks:
            mathematics.add("layout")
        return [Difference(key, ours.get(key), theirs.get(key), key in mathematics) for key in keys]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif value != {}:
            yield prefix + key, value


@cache
def json_schema() -> dict[str, Any]:
    """The job file's schema, for editors. Shared by all callers: do not modify it."""
    schema = Job.model_json_schema()
    for model in (Job, Optimizer, Pipeline, Data, Checkpoint, Slurm, Compress):
        defaults = model.model_construct().model_dump(mode="json")
        part = schema if model is Job else schema["$defs"][model.__name__]
        for key, value in part["properties"].items():
            value.pop("title", None)  # only repeats the key
            if "default" in value:
                value["default"] = defaults[key]  # as written in YAML; pydantic shows the object
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def load_job(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    earlier: Sequence[str] = (),
    command: Sequence[str] | None = None,
    layout: str | None = None,
    resolved: bool = False,
) -> Job:
    """A job from its file (None: the bundled one, or only `command`) and the command line.

    `earlier`: overrides that the run was started with; those typed now win over them.
    `resolved`: the file is from a run folder. It has every default, so the task is not looked up.
    Raises an AllranksError that lists everything that is wrong.
    """
    layers = [] if path is None else [read_file(path, resolved=resolved)]
    layers += [read_overrides(earlier), read_overrides(overrides)]
    if command is not None:
        if not command:
            raise AllranksError("there is no command after --", fix="write -- python train.py")
        place = Origin("the command after --")
        layers.append(Layer({"command": list(command)}, {("command",): place}))
    if layout is not None:
        layers.append(Layer({"layout": layout}, {("layout",): Origin("--layout")}))
    return _resolve(layers, resolved)


def parse_job(values: Mapping[str, Any], *, resolved: bool = False) -> Job:
    """A job from plain values, checked and completed like a file's."""
    return _resolve([Layer(dict(values))], resolved)


def _resolve(layers: Sequence[Layer], resolved: bool) -> Job:
    said = merge(layers, SECTIONS)
    problems = [problem for layer in layers for problem in _pair_problems(layer)]
    below = [Layer(BUILT_IN)]
    option_names = None
    if said.values.get("command") is not None and said.values.get("task") is not None:
        where = said.place(("task",)).text
        what = f"a job has either a task or a command, but task is given too ({where})"
        # Reported alone: which other keys are allowed depends on which of the two is meant.
        raise error_of([Problem(said.place(("command",)), what, "remove the task, or the command")])
    if said.values.get("command") is None:
        below.append(Layer(BUILT_IN_TASK))
        if said.values.get("task") is None:
            said.values["task"] = DEFAULT_TASK
        task = said.values["task"]
        if isinstance(task, str) and not resolved:
            try:
                source = find_task(task)
            except AllranksError as error:
                place = said.place(("task",))
                problems.append(Problem(place, f"task: {error.what}", error.fix))
            else:
                origin = Origin(f"defaults of {source.path}")
                below.append(Layer(source.defaults, {(key,): origin for key in source.defaults}))
                option_names = source.options
    merged = merge([] if resolved else below, SECTIONS)
    merged = merge([merged, *layers, Layer({"task": said.values.get("task")})], SECTIONS)
    problems += _rule_problems(merged)
    problems += _option_problems(merged, option_names)
    values = merged.values
    if values.get("name") is None:
        values["name"] = _default_name(values)
    try:
        job = Job.model_validate(values)
    except ValidationError as error:
        problems += problems_of(error, json_schema(), merged)
    if problems:
        raise error_of(problems)
    return job


def _pair_problems(layer: Layer) -> Iterator[Problem]:
    """Report both keys of an exclusive pair in one layer; in two layers the higher one wins."""
    for pair in EXCLUSIVE:
        if all(layer.values.get(key) is not None for key in pair):
            what = f"{pair[0]} and {pair[1]} are both given"
            yield Problem(layer.place(pair[1:]), what, f"remove {pair[0]} or {pair[1]}")


def _rule_problems(layer: Layer) -> Iterator[Problem]:
    """Check rules between keys. Keys that do not apply are removed, to be reported only once."""
    values = layer.values
    is_command = values.get("command") is not None
    unfit = [*(TASK_ONLY if is_command else COMMAND_ONLY)]
    for key in [key for key in unfit if key in values]:
        if values.pop(key) in (None, []):
            continue
        why = (
            "a command decides that itself" if is_command else "only for a command, not for a task"
        )
        yield Problem(layer.place((key,)), f"{key}: {why}", f"remove {key}")
    if is_command:
        yield from _command_problems(layer)
        return
    for pair in EXCLUSIVE:
        if all(values.get(key) is None for key in pair):
            what = f"{pair[0]} and {pair[1]} are both null"
            yield Problem(layer.place(pair[:1]), what, f"give {pair[0]} or {pair[1]}")
    scaling = values.get("lr_scaling")
    if scaling in ("linear", "sqrt") and values.get("batch_size") is not None:
        yield Problem(
            layer.place(("lr_scaling",)),
            f"lr_scaling: {scaling} has no effect with batch_size, which no layout changes",
            "write batch_size_per_rank in place of batch_size, or lr_scaling: none",
        )
    compress = values.get("compress")
    if isinstance(compress, dict):
        yield from _compress_problems(layer, compress)


def _compress_problems(layer: Layer, compress: Mapping[str, Any]) -> Iterator[Problem]:
    name = compress.get("name")
    if not isinstance(name, str) or name not in COMPRESS:
        return
    for key, value in compress.items():
        others = [method for method, keys in COMPRESS.items() if key in keys]
        if value is not None and others and name not in others:
            yield Problem(
                layer.place(("compress", key)),
                f"compress.{key} has no effect with {name}, only with {' and '.join(others)}",
                f"remove compress.{key} (on the command line: compress.{key}=null), "
                f"or write compress.name: {others[0]}",
            )
    if layer.values.get("precision") == "fp16" and name not in ("bf16", "fp16"):
        yield Problem(
            layer.place(("precision",)),
            f"precision: fp16 scales gradients by a changing factor, which {name} cannot follow",
            "write precision: bf16 or fp32, or compress.name: fp16 or bf16",
        )


def _command_problems(layer: Layer) -> Iterator[Problem]:
    values = layer.values
    data = values.get("data")
    data = data if isinstance(data, dict) else {}
    for key in [key for key in data if key != "stage"]:
        if key in Data.model_fields:
            del data[key]
            place = layer.place(("data", key))
            yield Problem(
                place, f"data.{key}: a command loads its data itself", f"remove data.{key}"
            )
    if values.get("stall_timeout") is not None and values.get("launcher") == "srun":
        yield Problem(
            layer.place(("stall_timeout",)),
            "stall_timeout has no effect with launcher: srun, where allranks cannot end ranks",
            "write launcher: torchrun, or remove stall_timeout",
        )
    if "{last}" in str(values.get("resume")) and values.get("last") is None:
        place = layer.place(("resume",))
        yield Problem(place, "resume: {last} is not set", "write last: PATH of the checkpoint")


def _option_problems(layer: Layer, names: Sequence[str] | None) -> Iterator[Problem]:
    options = layer.values.get("options")
    if names is None or not isinstance(options, dict):
        return
    known = [f"options.{name}" for name in names]
    for key in options:
        if key not in names:
            path = ("options", key)
            yield unknown_key(path, known, layer.place(path))


def _default_name(values: Mapping[str, Any]) -> str:
    """The name of the task or the script, without characters that a folder cannot have."""
    command = values.get("command")
    if command is None:
        name = re.split(r"[.:]", str(values["task"]))[-1].lower()
    else:
        words = command if isinstance(command, list) else str(command).split()
        scripts = [word for word in words if str(word).endswith((".py", ".sh"))]
        modules = [word for flag, word in pairwise(words) if flag == "-m"]
        chosen = str([*scripts, *modules, *words, "command"][0])
        name = PurePath(chosen).stem if scripts or not modules else chosen.rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:100] or "job"
