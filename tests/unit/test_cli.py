"""The command line before any rank runs: answers, exit codes, and no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from allranks.cli.commands import Command, Commands, help_page
from allranks.cli.main import AllCommands, app, as_user_error
from allranks.cli.options import print_error
from allranks.errors import AllranksError
from allranks.launch.prepare import Request, open_run, prepare
from allranks.run import commits
from allranks.run.commits import seal, writing_folder

# Runs commands one after another, each as `python -m allranks` would; says how it ended, and what
# was imported by then.
SEVERAL = """
import contextlib, io, json, sys
from allranks.cli.main import main

def ask(words):
    out, err = io.StringIO(), io.StringIO()
    sys.argv[1:] = words
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        except Exception as error:
            code = type(error).__name__
    heavy = sorted({"torch", "sklearn", "numpy"} & sys.modules.keys())
    ours = sorted(name for name in sys.modules if name.startswith("allranks.cli."))
    return code, out.getvalue(), err.getvalue(), heavy, ours

json.dump([ask(words) for words in json.load(sys.stdin)], sys.stdout)
"""


class Answer(NamedTuple):
    """How a command ended: its exit code (or the exception), what it printed, what it imported."""

    code: int | str
    out: str
    err: str
    heavy: list[str]
    ours: list[str]


def damage_the_only_checkpoint(folder: Path) -> None:
    run = open_run(prepare(Request(runs=folder / "runs")))
    writing = writing_folder(run.checkpoints, 10)
    writing.mkdir(parents=True)
    (writing / ".metadata").write_bytes(b"metadata")
    manifest = {"step": 10, "files": {".metadata": seal(writing / ".metadata")}}
    commits.commit(run.checkpoints, 10, manifest, keep=3)
    (run.checkpoints / "step-10" / ".metadata").write_bytes(b"METADATA")


# arguments of `allranks run`, exit code, words of the error, words of the fix
WRONG = {
    "unknown key": (["batchsize=3"], 2, "batchsize", "batch_size"),
    "unknown key in a file": (["typo.yaml"], 2, "typo.yaml", "epochs"),
    "wrong type": (["epochs=many"], 2, "many", "epochs"),
    "wrong value": (["precision=fp8"], 2, "fp8", "bf16"),
    "not yaml": (["broken.yaml"], 2, "broken.yaml", ""),
    "impossible layout": (["--layout", "1x4:tp=3"], 2, "tp=3", "1x4:tp=2"),
    "not a layout": (["--layout", "four"], 2, "four", "2x4"),
    "axes that are not there yet": (["--layout", "1x2:tp=2"], 2, "tp=2", "1x2"),
    "missing file": (["missing.yaml"], 2, "missing.yaml", ""),
    "task of no module": (["task=nowhere.at_all:Thing"], 2, "nowhere", "PYTHONPATH"),
    "task of no class": (["task=mine:Thing"], 2, "Thing", "mine:Mine"),
    "misspelt task": (["task=spirals"], 2, "spirals", "spiral"),
    "unknown option": (["options.nois=1"], 2, "nois", "noise"),
    "unknown run": (["--resume", "nothing"], 2, "nothing", "last"),
    "no run at all": (["--resume", "last", "--runs", "elsewhere"], 2, "elsewhere", "allranks run"),
    "damaged only checkpoint": (["--resume", "last"], 1, "step-10 is damaged", "backup"),
    "master alone": (["--master", "a:1"], 2, "--master", "--node-rank"),
    "node rank alone": (["--node-rank", "0", "--layout", "2x1"], 2, "--node-rank", "--master"),
    "no such node": (
        ["--node-rank", "2", "--master", "a:1", "--layout", "2x1"],
        2,
        "--node-rank 2",
        "0 to 1",
    ),
    "no command": (["--"], 2, "command", "python train.py"),
}


HELP = ("--help", "", "bench --help", "run --help", "init --help")
OTHERS = (
    *("init new --json", "run batchsize=3", "run batchsize=3 --debug", "run --no-such-option"),
    *("no-such-command", "ls -- python train.py"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("typed")
    (made / "typo.yaml").write_text("task: spiral\nepoch: 3\n")
    (made / "broken.yaml").write_text("task: [spiral\n")
    (made / "mine.py").write_text(
        "import torch\nfrom allranks.tasks import Task\n\nclass Mine(Task):\n    pass\n"
    )
    damage_the_only_checkpoint(made)
    return made


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Answer]:
    """What each command answers, by what is typed; one process asks them all, help pages first."""
    # --json stands before a lone `--`, which ends the options.
    wrong = {case: ["run", "--json", *WRONG[case][0]] for case in WRONG}
    typed = {**{words: words.split() for words in (*HELP, *OTHERS)}, **wrong}
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL],
        cwd=folder,
        input=json.dumps([*typed.values()]),
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    said = json.loads(done.stdout)
    return {name: Answer(*one) for name, one in zip(typed, said, strict=True)}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.replace(" ", "-"))
def test_what_is_wrong_is_answered_without_torch(
    folder: Path, answers: dict[str, Answer], case: str
) -> None:
    _, code, what, fix = WRONG[case]
    answer = answers[case]
    assert "torch" not in answer.heavy
    assert answer.code == code
    error = json.loads(answer.out)["error"]
    assert what in error["what"]
    assert fix in error["fix"]
    assert "Traceback" not in answer.err
    assert error["what"].splitlines()[0] in answer.err
    assert not list((folder / "runs").glob("*/attempts"))


def test_without_json_an_error_is_for_people(answers: dict[str, Answer]) -> None:
    answer = answers["run batchsize=3"]
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert "\n  fix: " in answer.err
    assert answers["run batchsize=3 --debug"].code == "AllranksError"  # with its traceback


@pytest.mark.parametrize("typed", HELP)
def test_help_imports_nothing_heavy(answers: dict[str, Answer], typed: str) -> None:
    answer = answers[typed]
    assert answer.heavy == []
    assert "Usage" in answer.out
    assert answer.code == (0 if typed else 2)
    if typed in HELP[:3]:  # no module of a command either
        assert answer.ours == ["allranks.cli.commands", "allranks.cli.main"]


def test_init_imports_nothing_heavy_and_never_overwrites(
    folder: Path, answers: dict[str, Answer]
) -> None:
    answer = answers["init new --json"]
    assert (answer.code, answer.heavy) == (0, [])
    written = {"job": folder / "new" / "job.yaml", "schema": folder / "new" / "job.schema.json"}
    assert json.loads(answer.out) == {name: str(path) for name, path in written.items()}
    with pytest.raises(AllranksError, match="already exist") as refused:
        app(["init", str(folder / "new")], standalone_mode=False)
    assert "--force" in refused.value.fix


def test_wrong_usage_has_exit_code_2(answers: dict[str, Answer]) -> None:
    assert answers["run --no-such-option"].code == 2
    assert answers["no-such-command"].code == 2
    refused = answers["ls -- python train.py"]  # a script where none is run
    assert refused.code == 2
    assert "no effect with allranks ls" in refused.err


def test_the_console_script_is_there() -> None:
    script = Path(sys.executable).parent / "allranks"
    outcome = subprocess.run([script, "--help"], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0
    assert "Usage" in outcome.stdout


def commands(group: Commands, *words: str) -> Iterator[tuple[str, Command | Commands]]:
    """Every command and group that there is, by what is typed."""
    yield " ".join(words), group
    for name in group.rows:
        command = group.load(name)
        if isinstance(command, Commands):
            yield from commands(command, *words, name)
        else:
            yield " ".join([*words, name]), command


ALL = dict(commands(AllCommands(name="allranks"), "allranks"))


@pytest.mark.parametrize("name", ALL)
def test_every_page_names_types_as_users_do(name: str) -> None:
    page = help_page(ALL[name], typer.Context(ALL[name], info_name=name))
    assert page.startswith(f"Usage: {name} ")
    assert not re.search(r"<[a-z]|MISSING|None|\bno help\b", page)


def test_every_option_is_spelt_as_its_name() -> None:
    """typer before 0.28 takes the metavar's spelling where the two are the same word."""
    spelt = [opt for command in ALL.values() for param in command.params for opt in param.opts]
    assert len(spelt) > 100
    assert not [opt for opt in spelt if opt.startswith("--") and opt != opt.lower()]


# what is typed, and which of its options is said to have no effect
WITHOUT_EFFECT = {
    "run --force": "--force",
    "run --master a:1": "--master",
    "submit --steps 200": "--steps",
    "submit --min-efficiency 0.85 --steps 9": "--min-efficiency and --steps",
    "submit --ladder 1x1,1x2 --layout 1x1": "--layout",
    "submit --race 1x1,1x2 --layout 1x1": "--layout",
    "submit --dry-run --wait": "--wait",
    "resume last --race 1x2 --layout 1x1": "--layout",
    "resume last --dry-run --wait": "--wait",
    "stop last --all": "RUN",
    "logs last --raw --json": "--raw",
    "watch --port 8000": "--port",
    "watch --web --once": "--once",
    "watch --once --interval 5": "--interval",
    "watch --once --notify true": "--notify",
    "watch --json --mark gpu_util=80,90": "--mark",
    "watch last --all": "--all",
    "watch --stacks": "--stacks",
    "status last --all": "--all",
    "doctor --stalled 30": "--stalled",
    "doctor --list last": "RUN|LOG",
    "doctor --listen --connect a:1": "--connect",
    "doctor --connect a:1 --data .": "--data",
    "doctor last --data .": "--data",
    "bench scaling --backend slurm --here": "--here",
    "bench comm --from last --seconds 3": "--seconds",
    "bench comm --backend slurm --oversubscribe": "--oversubscribe",
    "bench data --steps 3": "--steps",
}


# what is typed, and what to type instead
WITHOUT_DASHES = {
    "run train.py": "run -- python train.py",
    "run python3 train.py lr=0.1": "run -- python3 train.py lr=0.1",
    "run --layout 1x2 --json train.py --lr 0.1 -v": (
        "run --layout 1x2 --json -- python train.py --lr 0.1 -v"
    ),
    "run train.py --layout 1x4": "run --layout 1x4 -- python train.py",
    "run --json train.py a --lr 0.1 --layout=1x4 -v": (
        "run --json --layout=1x4 -- python train.py a --lr 0.1 -v"
    ),
    "run python3 train.py job --layout 1x4": "run --layout 1x4 -- python3 train.py job",
    "run no-such-launcher --layout 2 train.py": "run -- no-such-launcher --layout 2 train.py",
    "run no-such-launcher --gpus 2 train.py": "run -- no-such-launcher --gpus 2 train.py",
    "submit --race=1x2 python3 train.py": "submit --race=1x2 -- python3 train.py",
    "bench scaling --steps 9 train.py": "bench scaling --steps 9 -- python train.py",
    "bench data train.py --steps 9": "bench data --steps 9 -- python train.py",
}


@pytest.mark.parametrize("typed", WITHOUT_DASHES)
def test_a_script_without_dashes_is_answered_with_the_command_to_type(typed: str) -> None:
    with pytest.raises(AllranksError, match="not a job file") as refused:
        app(typed.split(), prog_name="allranks", standalone_mode=False)
    assert refused.value.fix == f"write allranks {WITHOUT_DASHES[typed]}"
    assert refused.value.exit_code == 2


def test_an_override_that_names_a_script_is_an_override() -> None:
    with pytest.raises(AllranksError, match="task: "):
        app(["run", "task=train.py"], prog_name="allranks", standalone_mode=False)


@pytest.mark.parametrize("typed", WITHOUT_EFFECT)
def test_an_option_without_effect_is_refused(typed: str) -> None:
    with pytest.raises(AllranksError, match="no effect with") as refused:
        app(typed.split(), standalone_mode=False)
    assert refused.value.what.startswith(f"{WITHOUT_EFFECT[typed]} ha")
    assert f"leave out {WITHOUT_EFFECT[typed]}" in refused.value.fix
    assert refused.value.exit_code == 2


def test_a_variable_without_effect_is_no_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALLRANKS_NOTIFY", "true")
    monkeypatch.setenv("ALLRANKS_RUNS", str(tmp_path))
    app(["watch", "--once"], standalone_mode=False)
    assert "no runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "what", "fix"),
    [
        (OSError(28, "No space left on device"), "cannot write a file: No space", "free space"),
        (OSError(28, "No space left on device", "a/b"), "cannot write a/b: No space", "free space"),
        (OSError(122, "Disk quota exceeded", "a/b"), "cannot write a/b: Disk quota", "free space"),
        (FileNotFoundError(2, "No such file or directory", "a/b"), "a/b: No such file", "the path"),
        (PermissionError(13, "Permission denied", "a/b"), "a/b: Permission denied", "permission"),
        (OSError(24, "Too many open files", "a/b"), "a/b: Too many open files", "ulimit -n"),
        (OSError(5, "Input/output error", "a/b"), "a/b: Input/output error", "its disk"),
    ],
)
def test_an_error_of_a_file_says_what_it_is_about(error: OSError, what: str, fix: str) -> None:
    told = as_user_error(error)
    assert told is not None and told.what.startswith(what) and fix in told.fix
    assert ("cannot write" in told.what) == (error.errno in (28, 122))


def test_an_error_is_shown_without_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(AllranksError("no \x1b]52;c;eA==\x07run\n  \x9b2J", fix="fix"), as_json=False)
    assert capsys.readouterr().err == "error: no run\n  \n  fix: fix\n"
