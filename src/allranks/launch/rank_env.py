"""What every rank runs first: it sets up its environment and log, then starts the training.

Run by the launcher as `python -m allranks.launch.rank_env [COMMAND ...]`; without a command the
rank is one of a native task. It keeps its process id: a command replaces it.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from allranks.errors import AllranksError
from allranks.machine.data_copies import stage_together
from allranks.machine.processes import STOP_SIGNALS, die_with_parent
from allranks.run.events import append_event
from allranks.run.folder import RunDir

INJECT = Path(__file__).parent.parent / "probe" / "inject"


def main() -> None:
    die_with_parent(int(os.environ["ALLRANKS_LAUNCHER"]))
    play_node(os.environ)
    run = RunDir(Path(os.environ["ALLRANKS_RUN_DIR"]))
    attempt, rank = int(os.environ["ALLRANKS_ATTEMPT"]), int(os.environ["RANK"])
    redirect_output(run.log(attempt, rank), own_terminal(os.environ, rank))
    command = sys.argv[1:]
    if not command:
        runpy.run_path(str(INJECT / "sitecustomize.py"))  # as a script's Python does by itself
        # Stop signals stay blocked until the worker can take them.
        sys.argv = ["allranks.train.worker"]
        runpy.run_module("allranks.train.worker", run_name="__main__")
        return
    append_event(
        run.events(attempt, rank),
        "start",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        host=socket.gethostname(),
        pid=os.getpid(),
        layout=os.environ["ALLRANKS_LAYOUT"],
        backend=None,
    )
    command = stage(command, os.environ)
    inject(os.environ)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    replace_by(command)


def play_node(env: os._Environ[str]) -> None:
    """Where one launcher plays several nodes, give each rank the numbers of the node it plays."""
    rank, per_node = int(env["RANK"]), int(env["ALLRANKS_RANKS_PER_NODE"])
    env["ALLRANKS_RANK"] = env["RANK"]  # also where a command numbers ranks anew
    env["LOCAL_RANK"] = str(rank % per_node)
    env["LOCAL_WORLD_SIZE"] = str(per_node)
    env["GROUP_RANK"] = str(rank // per_node)
    env["GROUP_WORLD_SIZE"] = str(int(env["WORLD_SIZE"]) // per_node)
    if "ALLRANKS_RESTARTS" in env:
        # torch names its store by this count; a node whose own ranks did not fail counts
        # differently.
        env["TORCHELASTIC_RESTART_COUNT"] = env["ALLRANKS_RESTARTS"]
    if env.get("ALLRANKS_OWN_GPU"):
        env["LOCAL_RANK"] = "0"  # scripts choose their GPU by it, and see no other
    if env.get("ALLRANKS_OVERSUBSCRIBE"):
        # NCCL refuses two ranks on one GPU of one host: have it think that they are two hosts.
        env["NCCL_HOSTID"] = f"allranks-{rank}"


def own_terminal(env: os._Environ[str], rank: int) -> int | None:
    """The terminal that the launcher opened for this rank; the launcher then writes its log."""
    owner, _, path = env.pop("ALLRANKS_TERMINAL", "").partition(":")
    with suppress(OSError):
        return os.open(path, os.O_RDWR | os.O_NOCTTY) if owner == str(rank) else None
    return None


def redirect_output(path: Path, terminal: int | None) -> None:
    """Send what this process and its children print to its terminal, or else to its log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log if terminal is None else terminal, 1)
    os.dup2(log if terminal is None else terminal, 2)
    os.close(log)
    if terminal is not None:
        os.close(terminal)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # text streams


def stage(command: list[str], env: os._Environ[str]) -> list[str]:
    """The command with {stage} filled in, once the data is on this node's own disk."""
    paths = json.loads(env.get("ALLRANKS_STAGE", "[]"))
    if not paths:
        return command
    try:
        folder = stage_together([Path(path) for path in paths])
    except AllranksError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    return [word.replace("{stage}", str(folder)) for word in command]


def inject(env: os._Environ[str]) -> None:
    """Have Python, in the user's script, apply the job's settings to torch (see probe/inject)."""
    folder = str(INJECT)
    earlier = env.get("PYTHONPATH")
    env["PYTHONPATH"] = f"{folder}{os.pathsep}{earlier}" if earlier else folder


def replace_by(command: list[str]) -> None:
    """Become the user's command."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127)


if __name__ == "__main__":
    main()
