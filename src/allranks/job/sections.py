"""The parts of a job that are mappings: optimizer, data, checkpoint, slurm, compress."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from allranks.job.values import (
    Duration,
    DurationText,
    SlurmFeatures,
    SlurmJobs,
    SlurmMemory,
    SlurmName,
    SlurmNodes,
    SlurmText,
    SlurmTime,
    Word,
)

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
    time: SlurmTime | None = Field(default=None, description="limit, such as 12:00:00 or 2h")
    gpu: SlurmName | Annotated[tuple[SlurmName, ...], Field(strict=False)] | None = Field(
        default=None, description="type of GPU, or a list of acceptable types"
    )
    gpus: NonNegativeInt | None = Field(
        default=None, description="per node; null: from the layout; 0: a job without GPUs"
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
    job_name: SlurmName | None = Field(default=None, description="in the queue; null: the run's")
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
        default=None, description="tells a script to stop; null: USR2, or USR1 for Lightning"
    )
    requeue: bool = Field(
        default=True, description="continue in another job after the limit or a failed node"
    )
    max_attempts: PositiveInt = Field(default=100, description="before the run gives up")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Drop nulls: they ask for nothing, also where the default is a list or a text."""
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None}


class Compress(Section):
    """Compress gradients before they are exchanged, at some loss."""

    name: Word = Field(description="the method", examples=["powersgd"])
    rank: PositiveInt | None = Field(default=None, description="for a low-rank method")
