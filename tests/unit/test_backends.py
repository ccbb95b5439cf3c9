"""Where a run goes on and is stopped: the table of backends, and what local runs keep for it."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.commandline import Allranks

from allranks.launch import backends
from allranks.launch.backends import Options, local
from allranks.launch.node import Place
from allranks.launch.prepare import Request, open_run, prepare, write_attempt
from allranks.launch.screen import Screen
from allranks.run.events import append_event
from allranks.run.folder import RunDir


def made(folder: Path, *, state: str, place: Place, backend: str = "local") -> RunDir:
    """A run of one attempt that has ended."""
    prepared = prepare(Request(overrides=["task=spiral"], layout="1x1", runs=folder))
    run = open_run(prepared, backend=backend)
    write_attempt(prepared, run, nodes=("here",), port=0, **place.kept)
    assert run.attempts() == []  # described, but it has not begun
    append_event(run.events(0, 0), "start", rank=0, layout="1x1")
    append_event(run.events(0, 0), "end", state=state, exit=0)
    return run


def test_every_backend_has_the_functions_of_the_protocol() -> None:
    wanted = {"is_queue", *(name for name in vars(backends.Backend) if not name.startswith("_"))}
    assert {"check", "draft", "start", "move", "look", "stop"} <= wanted
    for name in backends.TABLE:
        assert not [one for one in wanted if not hasattr(backends.named(name), one)]


@pytest.mark.parametrize("name", ["local", "slurm", "ssh", "of another version"])
def test_a_run_lives_where_its_last_attempt_was(tmp_path: Path, name: str) -> None:
    run = made(tmp_path, state="stopped", place=Place(), backend=name)
    assert backends.of(run) == (name if name in backends.TABLE else "local")


def test_a_local_run_goes_on_where_it_was_and_as_it_was_started(
    tmp_path: Path, allranks: Allranks
) -> None:
    run = made(tmp_path / "runs", state="finished", place=Place(max_restarts=2, oversubscribe=True))
    said = StringIO()
    options = Options(screen=Screen(Console(file=said)))
    prepared = local.check(Request(resume=str(run.path)), options)
    assert local.place_of(prepared, options) == Place(max_restarts=2, oversubscribe=True)
    assert local.move(prepared, options).exit_code == 0
    assert "has already finished" in said.getvalue()
    shown = allranks("resume", "last", "steps=900", "--dry-run", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "allranks.launch.rank_env" in shown.stdout
    assert backends.stop([run]) == [{"run": run.name, "done": "already finished"}]
