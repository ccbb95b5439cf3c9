"""The job file: its layers, its rules, and how what is wrong with it is told."""

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import allranks
from allranks.errors import AllranksError
from allranks.job.job import Difference, Job, load_job, parse_job
from allranks.job.values import Duration
from allranks.layout import Layout

# A loaded machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

TASK = """
from dataclasses import dataclass
from allranks.tasks import Task

@dataclass
class Mine(Task):
    size: str = "tiny"
    depth: int = 2
    defaults = {"batch_size_per_rank": 8, "steps": 30, "optimizer": {"lr": 0.5, "name": "sgd"}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TASK)
    return tmp_path


def load(text: str, *overrides: str, **options: Any) -> Job:
    Path("job.yaml").write_text(text, encoding="utf-8")
    return load_job(Path("job.yaml"), overrides, **options)


def refusal(text: str, *overrides: str, **options: Any) -> AllranksError:
    with pytest.raises(AllranksError) as caught:
        load(text, *overrides, **options)
    assert caught.value.fix
    assert caught.value.exit_code == 2
    return caught.value


def test_the_bundled_job() -> None:
    job = load_job(None)
    assert (job.name, job.task, job.command) == ("spiral", "spiral", None)
    assert (job.batch_size, job.batch_size_per_rank) == (32, None)
    assert (job.epochs, job.steps) == (50, None)
    assert job.layout == Layout(1, 1)
    assert job.timeout.seconds == 1800
    assert job.optimizer.lr == 1e-3
    assert job.env == {"NCCL_DEBUG": "WARN"}
    assert load("") == load("# nothing\n") == job


def test_built_in_defaults_stand_where_the_task_has_none() -> None:
    Path("bare.py").write_text("class Bare: pass")
    job = load("task: bare:Bare")
    assert (job.name, job.batch_size, job.epochs) == ("bare", 128, 20)


def test_layers_from_the_task_to_the_command_line() -> None:
    job = load("task: mine:Mine\noptimizer: {warmup: 0.1, lr: 0.2}", "optimizer.lr=3e-4")
    assert job.name == "mine"
    assert (job.batch_size_per_rank, job.batch_size) == (8, None)
    assert (job.steps, job.epochs) == (30, None)
    assert job.optimizer.name == "sgd"
    assert job.optimizer.warmup == 0.1
    assert job.optimizer.lr == 3e-4
    assert load("layout: 1x2", layout="1x4").layout == Layout(1, 4)
    assert load("layout: 1x2", "layout=2x2").layout == Layout(2, 2)


def test_a_higher_layer_clears_the_other_of_a_pair() -> None:
    job = load("task: mine:Mine\nepochs: 3\nbatch_size: 64")
    assert (job.epochs, job.steps, job.batch_size, job.batch_size_per_rank) == (3, None, 64, None)
    job = load("epochs: 3\nbatch_size: 64", "steps=7", "batch_size_per_rank=4")
    assert (job.epochs, job.steps, job.batch_size, job.batch_size_per_rank) == (None, 7, None, 4)


def test_a_section_with_every_line_commented_out() -> None:
    job = load("slurm:\n  # account: me\noptions:\nenv:\ndata: null\n")
    assert job == load_job(None)
    assert load("slurm: {modules: null, setup: null}").slurm.modules == ()


def test_yaml_is_read_as_people_write_it() -> None:
    job = load(
        "optimizer: {lr: 1e-3, clip: null}\nactivation_checkpointing: off\ncompile: true\n"
        "slurm: {time: 1:30:00, modules: [cuda/12, gcc]}\nseed: 010\n"
        "checkpoint: {every: 1h30m}\nenv: {A: 1, B: yes, C: true, D: 0x10, E: 1.5}\n"
    )
    assert job.optimizer.lr == 1e-3
    assert job.optimizer.clip is None
    assert job.activation_checkpointing == "off"
    assert job.compile is True
    assert job.slurm.time == "1:30:00"
    assert job.slurm.modules == ("cuda/12", "gcc")
    assert job.seed == 10
    assert job.checkpoint.every == Duration(5400)
    assert job.env == {
        **{"NCCL_DEBUG": "WARN", "A": "1", "B": "yes", "C": "true", "D": "16", "E": "1.5"}
    }
    assert load("checkpoint: {every: 500}").checkpoint.every == 500
    assert load("\ufeffseed: 3").seed == 3  # the mark that some Windows editors put first


def test_a_command() -> None:
    job = load_job(None, ["timeout=5m"], command=["python", "my train.py", "{run}"], layout="1x2")
    assert job.argv == ["python", "my train.py", "{run}"]
    assert (job.name, job.task, job.launcher) == ("my-train", None, "torchrun")
    assert "batch_size" not in job.to_yaml()
    job = load("command: |\n  torchrun \\\n    -m package.train --lr 3\ndata: {stage: local}")
    assert job.argv == ["torchrun", "-m", "package.train", "--lr", "3"]
    assert job.name == "train"
    assert load("command: [./run.sh, a b]").argv == ["./run.sh", "a b"]
    assert load("command: python a.py", command=["python", "b.py"]).name == "b"


JOBS = [
    "",
    "task: mine:Mine\noptions: {size: 1e3, depth: [1, {a: null}]}",
    "steps: 9\nbatch_size_per_rank: 3\nlr_scaling: sqrt\ncompress: {name: powersgd, rank: 4}",
    "optimizer: {lr: 1e-30, betas: [0.8, 0.95]}\ncheckpoint: {every: 90s}\nlayout: 1x8:tp=2",
    "name: '1e3'\nslurm: {time: 2-0, setup: \"a\\nb: '#'\", grace: 2m}\nenv: {A: 'off', B: '1e3'}",
    "command: python t.py --s \"a 'b'\" {run}\nlauncher: srun\nlast: a/{run}\nresume: --c {last}",
]


@pytest.mark.parametrize("text", JOBS)
def test_the_resolved_file_reads_back(text: str) -> None:
    job = load(text)
    Path("mine.py").unlink()  # as on another machine
    again = load(job.to_yaml(), resolved=True)
    assert again == job
    assert again.differences(job) == []
    assert parse_job(job.to_mapping(), resolved=True) == job
    assert again.to_yaml() == job.to_yaml()


def test_the_resolved_file_is_also_an_ordinary_one() -> None:
    job = load("task: mine:Mine")
    assert load(job.to_yaml()) == job
    assert load(job.to_yaml(), "epochs=2").steps is None


def test_differences_and_what_they_change() -> None:
    ours = load("task: mine:Mine\noptions: {size: a}\nlayout: 1x2")
    theirs = load("task: mine:Mine\noptions: {depth: 3}\nseed: 4\nlog_every: 5\nenv: {A: 1}")
    assert ours.differences(theirs) == [
        Difference("options.size", "a", None, True),
        Difference("seed", 0, 4, True),
        Difference("log_every", 10, 5, False),
        Difference("layout", "1x2", "1x1", True),
        Difference("options.depth", None, 3, True),
        Difference("env.A", None, "1", False),
    ]
    changed = {"optimizer.lr=2", "compress={name: bf16}", "batch_size=1", "task=spiral"}
    for override in changed:
        other = load("task: mine:Mine", override)
        assert any(found.mathematics for found in ours.differences(other)), override


def test_a_method_of_compress_has_its_own_keys() -> None:
    job = load("compress: {name: diloco, outer_lr: 0.5}")
    assert job.compress is not None and job.compress.averages_weights
    assert job.compress.model_dump(exclude_none=True) == {
        **{"name": "diloco", "every": 20, "outer_lr": 0.5, "outer_momentum": 0.9}
    }
    typed = load("task: spiral", "compress.name=powersgd", "compress.rank=2")
    assert typed.compress is not None and typed.compress.rank == 2
    assert not typed.compress.averages_weights
    file = "compress: {name: powersgd, rank: 4}"
    assert load(file, "compress={name: topk, rank: null}").compress.keep == 0.01  # type: ignore[union-attr]
    assert load(file, "compress=null").compress is None
    assert load("compress: {name: fp16}\nprecision: fp16").compress is not None


WRONG = [
    (
        "\nbatch_size: many",
        'job.yaml:2: batch_size: expected a positive integer, got "many"',
        "128",
    ),
    ("batch_size: 0", "expected a positive integer, got 0", "batch_size: 128"),
    ("batch_size: 1.0", "got 1.0", "batch_size: 128"),
    ("batch_size: true", "got true", "batch_size: 128"),
    ("micro_batch_size: -1", "expected auto or a positive integer, got -1", "positive"),
    ("batchsize: 3", "job.yaml:1: batchsize: there is no such key", "write batch_size instead"),
    ("wat: 3", "no such key", "the keys of a job are name, task,"),
    ("lr: 3", "no such key", "write optimizer.lr instead of lr"),
    ("learning_rate: 3", "no such key", "optimizer.lr"),
    ("optimizer.lr: 3", "no such key", "lr indented under optimizer:"),
    ("optimizer:\n  name: sgd\n  lrr: 1", "job.yaml:3: optimizer.lrr", "write optimizer.lr "),
    ("data: {zzz: 1}", "data.zzz", "the keys of data are num_workers, prefetch, stage"),
    ("optimizer: {name: adam}", "one of adamw, sgd", "optimizer.name: adamw (allowed: adamw, sgd)"),
    ("optimizer: 3", "expected a mapping of keys", "mapping"),
    ("optimizer: {lr: -1}", "positive number", "0.001"),
    ("optimizer: {lr: .nan}", "positive number", "0.001"),
    ("optimizer: {clip: 0}", "a positive number or null", "1.0"),
    ("optimizer: {betas: [0.9, 2]}", "a list of 2", "[0.9, 0.999]"),
    ("optimizer: {warmup: 1.5}", "at least 0 and at most 1", "0.05"),
    ("compile: 1", "one of auto, true, false, got 1", "allowed: auto, true, false"),
    ("activation_checkpointing: false", "one of off, full, selective", "off"),
    ("data: {num_workers: -1}", "auto or an integer, at least 0", "auto"),
    ("data: {num_workers: true}", "auto or an integer, at least 0", "auto"),
    ("data: {stage: remote}", "local", "local"),
    ("checkpoint: {every: soon}", "a positive integer or text such as 10m or 1h30m", "10m"),
    ("checkpoint: {every: 0s}", "a positive integer or text such as 10m or 1h30m", "10m"),
    ("timeout: 30", "text such as 10m", "timeout: 30m"),
    ("seed: -1", "at least 0", "at least 0"),
    ("slurm: {time: 1.5}", "text such as 12:00:00", "12:00:00"),
    ("slurm: {modules: cuda}", "a list of text", "a list of text"),
    ("env: {1A: x}", '"1A" cannot name', "letters"),
    ("env: {A: [1]}", "env.A: expected text", "text"),
    ("name: ../up", "can name a folder", "write name: up"),
    ("name: -x", "can name a folder", "write name: x"),
    ("name: 3", "name: expected text, got 3", "text"),
    ("layout: 1x8:tp=3", "layout 1x8:tp=3", "1x8:tp=2"),
    ("layout: 8", "NODESxGPUS", "1x8"),
    ("compress: {rank: 2}", "compress.name is missing", "compress.name"),
    ("compress: powersgd", "mapping", "mapping"),
    ("compress: {name: zip}", "one of bf16, fp16, powersgd, topk, local-sgd, diloco", "bf16"),
    ("compress: {name: topk, rank: 2}", "no effect with topk, only with powersgd", "=null"),
    ("compress: {name: bf16, every: 2}", "only with local-sgd and diloco", "name: local-sgd"),
    ("compress: {name: topk, keep: 0}", "compress.keep: expected a number, above 0", "above 0"),
    ("compress: {name: topk}\nprecision: fp16", "which topk cannot follow", "precision: bf16"),
    ("task: spirall", "job.yaml:1: task", "spiral"),
    ("task: mine:Mime", "no class Mime", "mine:Mine"),
    ("task: 3", "task: expected text, got 3", "text"),
    ("task: ''", "not a bundled task", "package.module:Class"),
    ("task: mine:Mine\noptions: {sise: x}", "job.yaml:2: options.sise", "options.size"),
    ("epochs: 3\nsteps: 4", "epochs and steps are both given", "remove"),
    ("batch_size: 3\nbatch_size_per_rank: 4", "both given", "remove"),
    ("epochs: null", "both null", "give epochs or steps"),
    ("lr_scaling: linear", "has no effect with batch_size", "batch_size_per_rank"),
    ("launcher: srun", "for a command", "remove launcher"),
    ("last: x", "for a command", "remove last"),
    ("task: spiral\ncommand: x", "a task or a command", "remove"),
    ("command: x\noptimizer: {lr: 1}", "optimizer: a command decides", "remove optimizer"),
    ("command: x\ndata: {prefetch: 1}", "loads its data itself", "remove data.prefetch"),
    ("command: x\nlauncher: mpi", "one of torchrun, srun", "torchrun"),
    ("command: x\nresume: --c {last}", "{last} is not set", "write last:"),
    ("command: x\nlast: a/{rnu}", "{rnu} is not a placeholder", "{run}"),
    ("command: ''", "text such as python train.py", "python train.py"),
    ("command: python 'x", "No closing quotation", "close the quote"),
    ("command: A=1 python x", "A=1 is not an assignment", "env: {A: 1}"),
]


@pytest.mark.parametrize(("text", "what", "fix"), WRONG)
def test_what_is_wrong_is_told_with_the_fix(text: str, what: str, fix: str) -> None:
    error = refusal(text)
    assert what in error.what
    assert fix in error.fix
    assert error.what.startswith("job.yaml")
    assert "\n" not in error.what


def test_all_problems_are_told_at_once_in_the_order_of_the_file() -> None:
    error = refusal("wat: 1\nepochs: x\ntask: spirall\noptimizer:\n  lr: fast\n", "seed=y")
    lines = error.what.splitlines()
    starts = [*(f"job.yaml:{line}: " for line in (1, 2, 3, 5))]
    assert lines[0] == (
        "seed=y on the command line: seed: "
        'expected an integer, at least 0 and below 4294967296, got "y"'
    )
    assert [line[: len(start)] for line, start in zip(lines[1:], starts, strict=True)] == starts
    assert len(error.fix.splitlines()) == 5
    assert "line 5: write optimizer.lr: 0.001" in error.fix


def test_a_wrong_default_of_the_task_is_told_as_its_own() -> None:
    Path("bad.py").write_text("class Bad:\n    defaults = {'epochs': 'x'}")
    assert "defaults of bad:Bad: epochs" in refusal("task: bad:Bad").what


@pytest.mark.parametrize(
    ("override", "what", "fix"),
    [
        ("epochs=abc", "epochs=abc on the command line: epochs: expected", "write epochs=20"),
        ("optimizer.nme=sgd", "optimizer.nme=sgd on the command line", "optimizer.name"),
        ("epochs", "an override is key.path=value", "write epochs=VALUE"),
        ("epochs:5", "an override is key.path=value", "write epochs=5"),
        ("=5", "an override is key.path=value", "write key=value"),
        ("a..b=5", "an override is key.path=value", "write key=value"),
        ("optimizer={lr: 1", "not valid YAML", "quotes"),
        ("seed.x=1", "seed: expected an integer", "integer"),
        ("layout=1x2x3", "NODESxGPUS", "2x4"),
        ("command=x", "a task or a command", "remove"),
    ],
)
def test_a_wrong_override(override: str, what: str, fix: str) -> None:
    error = refusal("task: spiral", override)
    assert what in error.what
    assert fix in error.fix


def test_overrides_into_mappings() -> None:
    job = load(
        *("task: mine:Mine", "options.size=big", "env.NCCL_DEBUG=INFO", "env.URL=a=b"),
        *("optimizer={lr: 2, clip: null}", "optimizer.lr=3", "name=x"),
    )
    assert job.options == {"size": "big"}
    assert job.env == {"NCCL_DEBUG": "INFO", "URL": "a=b"}
    assert (job.optimizer.lr, job.optimizer.clip, job.optimizer.name) == (3, None, "sgd")
    assert job.name == "x"


def test_the_command_line_conflicts_with_the_file() -> None:
    error = refusal("task: spiral", command=["python", "x.py"])
    assert "the command after --" in error.what
    assert "job.yaml:1" in error.what
    assert '--layout: layout "3"' in refusal("", layout="3").what
    assert "no command after --" in refusal("", command=[]).what


@unhurried
@given(st.text(max_size=30))
def test_any_override_is_taken_or_refused_with_a_fix(text: str) -> None:
    with contextlib.suppress(AllranksError):  # it cannot be made without a fix
        load_job(None, [text])


@unhurried
@given(st.integers(1, 10**8))
def test_durations_round_trip(seconds: int) -> None:
    assert Duration.parse(str(Duration(seconds))) == Duration(seconds)


@pytest.mark.parametrize("text", ["", "10", "1.5h", "m", "10m1h", "-3s", "0s", "1h 3m", "10m\n"])
def test_durations_have_units_in_order(text: str) -> None:
    with pytest.raises(AllranksError, match="1h30m"):
        Duration.parse(text)


def test_a_job_needs_no_torch_and_events_neither_pydantic_nor_yaml() -> None:
    program = (
        "import sys, allranks.layout, allranks.run.events as events\n"
        "events.declared()  # in a script's rank, which may have no other packages\n"
        "assert not {'pydantic', 'yaml'} & set(sys.modules)\n"
        "from allranks.job.template import commented_job\n"
        "from allranks.job.job import load_job\n"
        "commented_job(); load_job(None)\n"
        "try: load_job(None, ['task=language', 'a=b'])\n"
        "except Exception: pass\n"
        "assert 'torch' not in sys.modules"
    )
    source = str(Path(allranks.__file__).parents[1])
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": source})


def test_what_srun_starts_cannot_be_ended_for_a_stall() -> None:
    job = {"command": "python x.py", "launcher": "srun", "stall_timeout": "10m"}
    with pytest.raises(AllranksError, match="launcher: srun"):
        parse_job(job)
    assert parse_job({**job, "launcher": "torchrun"}).stall_timeout is not None
