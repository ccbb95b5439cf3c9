"""What is sent to SLURM: the script, what it asks for, and that no value can become more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from allranks.errors import AllranksError
from allranks.job.job import Job, load_job, parse_job
from allranks.job.values import Duration
from allranks.launch.backends.slurm.sbatch import (
    OWN_KEYS,
    Ask,
    Racer,
    ask,
    grace_seconds,
    parse_race,
    racers_of,
    sbatch_script,
    summary,
    time_seconds,
    time_text,
)
from allranks.layout import Layout

GOLDEN = Path(__file__).parent / "golden"
RUN = Path("/home/me/runs/digits-20261115-142301-3f9a")
PYTHON = "/env/bin/python"


def job_of(slurm: dict[str, Any], **keys: Any) -> Job:
    return parse_job({"command": "python train.py", "slurm": slurm, **keys})


def asked(slurm: dict[str, Any], racer: str = "1x1", **keys: Any) -> Ask:
    return ask(job_of(slurm, **keys), Racer.parse(racer))


def script_of(job: Job, racer: str = "1x1", **options: Any) -> str:
    where = {"run_dir": RUN, "claim": 0, "folder": Path("/home/me"), **options}
    return sbatch_script(job, Racer.parse(racer), **where)


def directives_of(script: str) -> list[str]:
    """What sbatch reads: options in leading comment lines, split at spaces outside of quotes."""
    found = []
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            found += split_options(line.removeprefix("#SBATCH"))
        elif line.strip(" \t\v\f\r") and not line.lstrip(" \t\v\f\r").startswith("#"):
            break
    return found


def split_options(text: str) -> list[str]:
    options, word, quote, escaped = [], "", "", False
    inside = False
    for letter in text:
        if escaped:
            word, escaped = word + letter, False
        elif letter == "\\":
            inside = escaped = True
        elif quote and letter == quote:
            quote = ""
        elif not quote and letter in "\"'":
            inside, quote = True, letter
        elif not quote and letter == "#":
            break
        elif not quote and letter in " \t\v\f\r":
            options += [word] if inside else []
            word, inside = "", False
        else:
            inside, word = True, word + letter
    assert not quote, "a quote is open: sbatch would refuse the script"
    return [*options, word] if inside else options


# --- The script ---------------------------------------------------------------------------------

FULL = {
    "account": "lab-1",
    "partition": "gpu,long",
    "qos": "high",
    "constraint": "ib&(a100|h100)",
    "reservation": "course_2026",
    "exclude": "node[3-4],bad1",
    "dependency": "afterok:123:124,singleton",
    "exclusive": True,
    "time": "2-12:30:00",
    "gpu": "a100",
    "gpu_request": "gpus-per-node",
    "cpus_per_gpu": 8,
    "mem_per_gpu": "32G",
    "job_name": "digits",
    "directives": {"mail-type": "END,FAIL", "comment": "for the paper; v2", "contiguous": None},
    "modules": ["cuda/12.4", "my module"],
    "setup": "\nsource ~/env.sh\nulimit -n 4096\n\n",
    "grace": "5m",
    "requeue": False,
}
JOBS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "full": (
        {"slurm": FULL, "task": "digits", "env": {"NCCL_DEBUG": "INFO", "NOTE": "it's $HOME"}},
        "2x4@a100",
        {"claim": 3, "exclude": "node9", "grace": 200},
    ),
    "minimal": ({"task": "spiral"}, "1x1", {}),
    "cpu": (
        {"command": "python trees.py", "slurm": {"gpus": 0, "cpus_per_task": 64}},
        "1x1",
        {},
    ),
    "srun": (
        {
            "command": "python train.py",
            "launcher": "srun",
            "slurm": {"cpus_per_gpu": 6, "time": "1h"},
        },
        "2x4",
        {"dependency": "afterany:77"},
    ),
}
JOBS["cpu"][0]["slurm"]["partition"] = "main"


@pytest.mark.parametrize("name", JOBS)
def test_the_script_is_the_golden_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", PYTHON)
    values, racer, options = JOBS[name]
    script = script_of(parse_job(values), racer, **options)
    golden = GOLDEN / f"{name}.sbatch"
    if "ALLRANKS_GOLDEN" in os.environ:  # ALLRANKS_GOLDEN=1 writes them anew
        golden.write_text(script)
    assert script == golden.read_text()


@pytest.mark.parametrize("name", JOBS)
def test_bash_finds_nothing_wrong_with_the_script(name: str) -> None:
    done = subprocess.run(["bash", "-n", GOLDEN / f"{name}.sbatch"], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_job_that_asks_for_nothing_emits_only_what_the_layout_and_the_run_need() -> None:
    names = [text.partition("=")[0] for text in directives_of(script_of(parse_job({})))]
    assert names == [
        *("--job-name", "--nodes", "--ntasks-per-node", "--gres"),
        *("--signal", "--requeue", "--open-mode", "--output"),
    ]


def test_a_job_without_gpus_has_no_gres() -> None:
    job = job_of({"gpus": 0, "cpus_per_task": 64, "partition": "main"})
    found = directives_of(script_of(job))
    assert "--cpus-per-task=64" in found
    assert "--partition=main" in found
    assert not [text for text in found if "gres" in text or "gpu" in text]


def test_the_same_job_in_its_run_folder_gives_the_same_script(tmp_path: Path) -> None:
    job = parse_job(JOBS["full"][0])
    (tmp_path / "job.yaml").write_text(job.to_yaml())
    again = load_job(tmp_path / "job.yaml", resolved=True)
    assert script_of(again, "2x4@a100") == script_of(job, "2x4@a100")


def test_the_built_in_environment_is_left_to_the_rank() -> None:
    assert "NCCL_DEBUG" not in script_of(parse_job({}))
    assert "export NCCL_DEBUG=TRACE\n" in script_of(parse_job({"env": {"NCCL_DEBUG": "TRACE"}}))


def test_a_percent_sign_in_the_folder_is_no_pattern_of_slurms() -> None:
    script = script_of(parse_job({}), run_dir=Path("/data/100%j/run"))
    assert "--output=/data/100%%j/run/slurm-%j.log" in directives_of(script)


def test_a_renamed_folder_cannot_add_a_directive() -> None:
    script = script_of(parse_job({}), run_dir=Path("/runs/best --account=theirs #1"))
    found = directives_of(script)
    assert "--job-name=best_--account_theirs__1" in found
    assert "--output=/runs/best --account=theirs #1/slurm-%j.log" in found
    assert not [text for text in found if text.startswith("--account")]


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "a\x00b", "a\x7fb", "a\udcffb"])
def test_a_folder_that_no_script_can_name_is_refused(name: str) -> None:
    with pytest.raises(AllranksError, match="cannot") as refusal:
        script_of(parse_job({}), run_dir=Path("/runs") / name)
    assert refusal.value.fix


@pytest.mark.parametrize("where", ["env", "modules", "setup", "folder"])
@pytest.mark.parametrize("bad", ["a\x00b", "a\ud800b"])
def test_what_is_no_text_is_refused(where: str, bad: str) -> None:
    values: dict[str, dict[str, Any]] = {"modules": {"modules": [bad]}, "setup": {"setup": bad}}
    job = job_of(values.get(where, {}), env={"NAME": bad} if where == "env" else {})
    with pytest.raises(AllranksError, match="cannot be written into a script"):
        script_of(job, folder=Path(f"/{bad}" if where == "folder" else "/"))


@pytest.mark.parametrize("name", [*OWN_KEYS, "partitio", "accoun", "sig"])
def test_a_directive_with_a_key_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(AllranksError, match=rf"slurm\.directives\.{name} would change") as refusal:
        script_of(job_of({"directives": {name: "1"}}))
    assert refusal.value.fix.startswith("use ")


def test_an_own_key_names_the_key_to_use() -> None:
    for name, key in (("mem-per-gpu", "slurm.mem_per_gpu"), ("gres", "slurm.gpu"), ("A", "man")):
        with pytest.raises(AllranksError) as refusal:
            script_of(job_of({"directives": {name: "1"}}))
        assert key in refusal.value.fix


def test_other_directives_pass_by_name() -> None:
    job = job_of({"directives": {"mem-per-cpu": "2G", "nice": 100, "comment": "a b", "hold": None}})
    assert directives_of(script_of(job))[-4:] == [
        *("--mem-per-cpu=2G", "--nice=100", "--comment=a b", "--hold"),
    ]


# --- What is asked for --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slurm", "texts", "racers"),
    [
        ({}, [], ["1x2"]),
        ({"gpu": "a100"}, [], ["1x2@a100"]),
        ({"gpu": ["a100", "a40"]}, [], ["1x2@a100", "1x2@a40"]),
        ({"gpu": []}, [], ["1x2"]),
        ({"gpu": ["a100", "a40"], "gpus": 0}, [], ["1x2"]),
        ({}, ["1x4", " 4x1@a40"], ["1x4", "4x1@a40"]),
        ({"gpu": ["a100", "l40s"]}, ["1x4", "4x1@a40"], ["1x4@a100", "1x4@l40s", "4x1@a40"]),
        ({"gpu": "a40"}, ["1x4", "1x4@a40"], ["1x4@a40"]),
    ],
)
def test_a_layout_races_once_for_each_type_that_will_do(
    slurm: dict[str, Any], texts: list[str], racers: list[str]
) -> None:
    race = [Racer.parse(text) for text in texts]
    assert [str(racer) for racer in racers_of(job_of(slurm, layout="1x2"), race)] == racers


def test_a_race_is_a_list_of_layouts() -> None:
    assert [str(racer) for racer in parse_race("1x4, 4x1@a40")] == ["1x4", "4x1@a40"]
    mended = {"1x2,": "write 1x2", ",1x2,4x1": "write 1x2,4x1", "": "write 1x1,1x2,1x4"}
    for text, fix in mended.items():
        with pytest.raises(AllranksError, match="a layout is missing") as refusal:
            parse_race(text)
        assert refusal.value.fix == fix


@pytest.mark.parametrize(
    "text", ["1x4@", "0x4@", "1x4@a b", "1x4@a100\n", "1x4@-x", "4@a100", "1x4@a,b"]
)
def test_what_is_no_racer_is_refused(text: str) -> None:
    if text == "1x4@a100\n":  # blanks around it are nobody's fault
        assert str(Racer.parse(text)) == "1x4@a100"
        return
    with pytest.raises(AllranksError) as refusal:
        Racer.parse(text)
    assert refusal.value.fix.startswith("write ")
    suggested = re.findall(r"[0-9]+x[0-9]+(?:@[a-z0-9]+)?", refusal.value.fix)
    assert suggested and [str(Racer.parse(one)) for one in suggested] == suggested


def test_types_of_gpu_in_one_text_are_refused_before_the_job_is_sent() -> None:
    with pytest.raises(AllranksError, match="is not one type of GPU") as refusal:
        racers_of(job_of({"gpu": "a100,a40"}), [])
    assert refusal.value.fix == "write slurm.gpu: [a100, a40]"


def test_a_racer_is_read_back_as_it_is_written() -> None:
    job = job_of({"gpu": ["a100-80gb", "nvidia_h100:2g.20gb"]})
    for racer in racers_of(job, parse_race("2x4:tp=4")):
        assert Racer.parse(str(racer)) == racer


@pytest.mark.parametrize(
    ("slurm", "launcher", "tasks", "cpus_per_task", "cpus"),
    [
        ({}, "torchrun", 1, None, None),
        ({"cpus_per_gpu": 6}, "torchrun", 1, 24, 48),
        ({"cpus_per_gpu": 6}, "srun", 4, 6, 48),
        ({"cpus_per_task": 6}, "torchrun", 1, 24, 48),
        ({"cpus_per_task": 6}, "srun", 4, 6, 48),
        ({"cpus_per_gpu": 6, "gpus": 2}, "torchrun", 1, 12, 24),
        ({"cpus_per_gpu": 7, "gpus": 2}, "srun", 4, 4, 32),  # rounded up: a rank has whole cores
        ({"gpus": 0}, "torchrun", 1, 4, 8),
        ({"gpus": 0, "cpus_per_task": 16}, "srun", 4, 16, 128),
    ],
)
def test_cpus_follow_from_the_ranks_of_a_task(
    slurm: dict[str, Any], launcher: str, tasks: int, cpus_per_task: int | None, cpus: int | None
) -> None:
    found = asked(slurm, "2x4", launcher=launcher)
    assert (found.tasks_per_node, found.cpus_per_task, found.cpus) == (tasks, cpus_per_task, cpus)


def test_a_task_of_ours_has_one_launcher_per_node() -> None:
    assert ask(parse_job({}), Racer.parse("2x4")).tasks_per_node == 1


@pytest.mark.parametrize(
    ("slurm", "mem"),
    [
        ({}, None),
        ({"mem": "64G"}, "64G"),
        ({"mem": "0"}, "0"),
        ({"mem_per_gpu": "32G"}, "128G"),
        ({"mem_per_gpu": "500"}, "2000"),
        ({"mem_per_gpu": "32G", "gpus": 2}, "64G"),
    ],
)
def test_memory_is_that_of_a_node(slurm: dict[str, Any], mem: str | None) -> None:
    assert asked(slurm, "2x4").mem == mem


@pytest.mark.parametrize(
    ("slurm", "racer", "words"),
    [
        ({"cpus_per_gpu": 2, "cpus_per_task": 2}, "1x1", "cpus_per_gpu and slurm.cpus_per_task"),
        ({"mem": "1G", "mem_per_gpu": "1G"}, "1x1", "mem and slurm.mem_per_gpu"),
        ({"gpus": 0, "cpus_per_gpu": 2}, "1x1", "no meaning with gpus: 0"),
        ({"gpus": 0, "mem_per_gpu": "1G"}, "1x1", "no meaning with gpus: 0"),
        ({"gpus": 0}, "1x1@a100", "no meaning with gpus: 0"),
        ({"time": "1h1h"}, "1x1", "expected a time"),
    ],
)
def test_what_contradicts_itself_is_refused(slurm: dict[str, Any], racer: str, words: str) -> None:
    with pytest.raises(AllranksError, match=words):
        asked(slurm, racer)


@pytest.mark.parametrize(
    ("text", "seconds", "written"),
    [
        ("60", 3600, "01:00:00"),
        ("90:30", 5430, "01:30:30"),
        ("12:00:00", 43_200, "12:00:00"),
        ("2-12", 216_000, "2-12:00:00"),
        ("2-12:30", 217_800, "2-12:30:00"),
        ("2-12:30:15", 217_815, "2-12:30:15"),
        ("2h30m", 9_000, "02:30:00"),
        ("45s", 45, "00:00:45"),
        ("1d", 86_400, "1-00:00:00"),
    ],
)
def test_time_limits_in_slurms_forms_and_ours(text: str, seconds: int, written: str) -> None:
    assert time_seconds(text) == seconds
    assert time_text(seconds) == written
    assert time_seconds(written) == seconds
    assert f"--time={written}" in directives_of(script_of(job_of({"time": text})))


@pytest.mark.parametrize(
    ("grace", "limit", "needed", "seconds"),
    [
        (None, None, None, 120),
        (None, 3600, None, 120),
        (None, 240, None, 60),  # a quarter
        (None, 3600, 300, 300),  # checkpoints were measured to take longer
        (None, 3600, 10, 120),
        (None, 400, 300, 200),  # but never more than half
        (None, None, 300, 300),
        (None, 1, None, 1),
        (30, 3600, 300, 30),  # what was asked for holds
        (1800, 3600, None, 1800),
        (1800, None, None, 1800),
    ],
)
def test_the_grace_time(
    grace: int | None, limit: int | None, needed: int | None, seconds: int
) -> None:
    assert grace_seconds(Duration(grace) if grace else None, limit, needed) == seconds


def test_a_grace_of_more_than_half_of_the_limit_is_refused() -> None:
    with pytest.raises(AllranksError, match="more than half of the time limit") as refusal:
        asked({"grace": "31m", "time": "1h"})
    assert "slurm.grace=30m" in refusal.value.fix
    assert asked({"grace": "30m", "time": "1h"}).grace == 1800


def test_the_table_of_a_dry_run() -> None:
    slurm = {"cpus_per_gpu": 8, "mem": "64G", "time": "1h", "exclusive": True}
    job = parse_job({"task": "spiral", "batch_size": 128, "slurm": slurm})
    assert summary(job, Racer.parse("2x4@a100"), 1000) == {
        "nodes": 2,
        "ranks": 8,
        "GPUs": "8 x a100",
        "CPUs": 64,
        "memory per node": "64G",
        "nodes are": "exclusive",
        "time limit": "01:00:00",
        "effective batch": 128,
        "steps per epoch": 8,
    }


def test_the_table_says_what_is_left_to_the_site_and_grows_a_batch_per_rank() -> None:
    job = parse_job({"task": "spiral", "batch_size_per_rank": 32})
    column = summary(job, Racer(Layout(2, 2)), None)
    assert column["effective batch"] == 128
    assert column["steps per epoch"] == "known at the start"
    assert column["CPUs"] == column["memory per node"] == column["time limit"] == "site default"
    assert column["GPUs"] == "4"
    column = summary(job_of({"gpus": 0}), Racer.parse("1x2"), None)
    assert column["GPUs"] == "none"
    assert "effective batch" not in column


# --- No value becomes more than a value ---------------------------------------------------------

PIECES = [
    *("'", '"', "`", "\\", "\n", "\r", "\r\n", "\t", " ", "  ", "\0", "\x1b", "\x7f", "\ud800"),
    *("$(touch X)", "`touch X`", ";touch X;", "\ntouch X\n", "&& touch X", "| touch X", "> X"),
    *("${IFS}", "$HOME", "$'\\x41'", "!!", "~", "*", "?", "[a-z]", "{a,b}", "#", "%j", "%%", "--"),
    *("\n#SBATCH --account=theirs\n", "#SBATCH --x", " --account=theirs", "-", "=", ",", ":", "@"),
    *("\x85", "\u2028", "\u2029", "\u202e", "\ufeff", "\xe9", "\U0001f600"),
    *("{{ 7 * 7 }}", "{% raw %}", "{# x #}", "EOF", "'\"'\"'", "\\\n", "<<X", "a", "gpu", "1"),
]
TEXT = st.lists(
    st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), min_size=1, max_size=6
).map("".join)
MODEST = settings(
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],  # to shrink what takes a process each would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Seen(NamedTuple):
    """What the end of a script found, and the files that were made on the way."""

    argv: list[str]
    env: dict[str, str]
    modules: list[str]
    files: list[str]


@contextmanager
def stubs(folder: Path) -> Iterator[Path]:
    """In place of Python and of `module`: they say what they were given."""
    folder.mkdir(exist_ok=True)
    python, module = folder / "python", folder / "module"
    python.write_text('#!/bin/sh\nprintf \'%s\\0\' "$#" "$@"\nexec /usr/bin/env -0\n')
    module.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" >> '{folder}/modules'\n")
    for file in (python, module):
        file.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        yield folder


def run_script(script: str, stub_folder: Path, watched: Path) -> Seen:
    """Run it as SLURM would, but in an empty environment."""
    (stub_folder / "modules").write_bytes(b"")
    file = stub_folder / "script"
    file.write_text(script)
    before = sorted(path for path in watched.rglob("*"))
    done = subprocess.run(
        ["/bin/bash", file],
        cwd=watched,
        env={"PATH": f"{stub_folder}:/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    count, *words = [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]
    pairs = [word.partition("=") for word in words[int(count) :]]
    modules = (stub_folder / "modules").read_bytes().split(b"\0")[:-1]
    after = sorted(path for path in watched.rglob("*"))
    return Seen(
        argv=words[: int(count)],
        env={name: value for name, _, value in pairs},
        modules=[os.fsdecode(word) for word in modules],
        files=[str(path) for path in after if path not in before],
    )


def is_text(value: str) -> bool:
    return not any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in value)


def refuses(job: Job, **options: Any) -> bool:
    try:
        script_of(job, **options)
    except AllranksError:
        return True
    return False


def test_a_warning_before_python_listens_does_not_end_the_job(tmp_path: Path) -> None:
    with stubs(tmp_path / "stubs") as folder:
        script = script_of(job_of({"setup": "kill -USR2 $$"}), folder=tmp_path)
        assert run_script(script, folder, tmp_path).argv[0] == "-m"


@settings(MODEST, max_examples=60)
@given(values=st.lists(TEXT, min_size=40, max_size=40))
def test_env_and_modules_arrive_as_they_were_written(values: list[str], tmp_path: Path) -> None:
    watched = tmp_path / "watched"
    watched.mkdir(exist_ok=True)
    for value in values:
        if not is_text(value):
            assert refuses(job_of({"modules": [value]}))
            assert refuses(job_of({}, env={"V": value}))
    good = [value for value in values if is_text(value)]
    env = {f"V{number}": value for number, value in enumerate(good)}
    with stubs(tmp_path / "stubs") as folder:
        script = script_of(job_of({"modules": good}, env=env), folder=watched)
        seen = run_script(script, folder, watched)
    assert {name: seen.env[name] for name in env} == env
    assert set(seen.env) - set(env) <= {"PATH", "PWD", "OLDPWD", "SHLVL", "_"}
    assert seen.modules == (["load", *good] if good else [])
    assert seen.argv[:3] == ["-m", "allranks.launch.backends.slurm.allocation", str(RUN)]
    assert seen.files == []
    assert len(directives_of(script)) == 8


NAMES = ("account", "partition", "qos", "constraint", "reservation", "job_name")


def value_of(directives: Sequence[str], name: str) -> list[str]:
    begin = f"--{name.replace('_', '-')}="
    return [text.removeprefix(begin) for text in directives if text.startswith(begin)]


@settings(MODEST, max_examples=500)
@given(text=TEXT, key=st.sampled_from(NAMES))
def test_a_name_is_refused_or_is_one_directive(text: str, key: str) -> None:
    try:
        script = script_of(job_of({key: text}))
    except AllranksError:
        return
    found = directives_of(script)
    assert value_of(found, key) == [text]
    assert len(found) == 8 + (key != "job_name")


@settings(MODEST, max_examples=500)
@given(text=TEXT, name=st.one_of(st.just("comment"), TEXT))
def test_any_directive_is_refused_or_is_one_directive(text: str, name: str) -> None:
    try:
        script = script_of(job_of({"directives": {name: text}}))
    except AllranksError:
        return
    found = directives_of(script)
    assert found[-1] == f"--{name}={text}"
    assert len(found) == 9


@settings(MODEST, max_examples=300)
@given(text=st.text("abzAZ09 _.,:;@%+=/()[]&|*!?~^<>{}-#'\"\\\n", max_size=12))
def test_a_directive_of_the_letters_that_are_allowed_means_itself(text: str) -> None:
    try:
        script = script_of(job_of({"directives": {"comment": text}}))
    except AllranksError:
        assert set(text) & set("#'\"\\\n")
        return
    assert directives_of(script)[-1] == f"--comment={text}"


@settings(MODEST, max_examples=500)
@given(text=TEXT, other=st.sampled_from(["time", "mem", "mem_per_gpu", "exclude", "dependency"]))
def test_times_sizes_and_nodes_are_refused_or_one_directive(text: str, other: str) -> None:
    try:
        found = directives_of(script_of(job_of({other: text})))
    except AllranksError:
        return
    assert len(found) == 9
    assert len([option for option in found if " " in option]) == 0


@settings(MODEST, max_examples=60)
@given(names=st.tuples(TEXT, TEXT))
def test_folders_arrive_as_they_are_named(names: tuple[str, str], tmp_path: Path) -> None:
    cwd, run = ["".join(c for c in name if c not in "/") for name in names]
    base = tmp_path / "watched"
    base.mkdir(exist_ok=True)
    job = job_of({})
    with stubs(tmp_path / "stubs") as folder:
        try:
            script = script_of(job, run_dir=base / f"r{run}", folder=base / f"c{cwd}")
        except AllranksError:
            return
        (base / f"c{cwd}").mkdir(exist_ok=True)
        seen = run_script(script, folder, base)
    assert seen.env["PWD"] == str(base / f"c{cwd}")
    assert seen.argv[2] == str(base / f"r{run}")
    assert seen.files == []
    found = directives_of(script)
    assert len(found) == 8
    assert value_of(found, "output") == [f"{base}/r{run.replace('%', '%%')}/slurm-%j.log"]


def test_a_secret_is_not_in_the_script() -> None:
    script = script_of(parse_job({"env": {"WANDB_API_KEY": "0123456789abcdef", "A": "b"}}))
    assert "0123456789abcdef" not in script
    assert "export A=b\n" in script
