"""`allranks run` as a fork of a server that has torch imported: tenths of a second, not seconds.

Its ranks are forks of it in turn: children that lead a session, with what `Popen` would give them.
They are ranks of tasks and of Python scripts; any other command is executed as ever.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.abc
import importlib.machinery
import multiprocessing.resource_tracker
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.fork_server import fork_server

PR_SET_NAME = 15
# What a rank does something about when it imports them (probe/inject).
AWAITED = ("torch", "torch.distributed.distributed_c10d", "torch._dynamo.trace_rules")
EXECUTED = {"PYTHONPATH": ""}  # given to a run: its scripts are started as users' are
OURS_WITH_TORCH = ("allranks.probe", "allranks.tasks", "allranks.train")


class Forked:
    """As much of `subprocess.Popen` as tests of runs need."""

    def __init__(
        self, words: Sequence[str], cwd: Path, env: Mapping[str, str], stderr: Path | None = None
    ) -> None:
        context = fork_server()
        folder = Path(tempfile.mkdtemp())
        self._files = folder / "stdout", stderr or folder / "stderr"
        given = {**os.environ, **env}
        args = list(words), cwd, given, *self._files
        self._process = context.Process(target=_be_allranks, args=args)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("allranks run", timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        stdout, stderr = (file.read_text() if file.exists() else "" for file in self._files)
        return stdout, stderr


def run_forked(
    *args: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 150
) -> subprocess.CompletedProcess[str]:
    """`allranks ARGS` in a folder, as `run_allranks` runs it in a process that starts anew."""
    words = list(map(str, args))
    process = Forked(words, cwd, env or {})
    try:
        stdout, stderr = process.communicate(timeout)
    finally:
        process.send_signal(signal.SIGKILL)
    return subprocess.CompletedProcess(words, process.wait(), stdout, stderr)


def _be_allranks(
    words: list[str], cwd: Path, env: dict[str, str], stdout: Path, stderr: Path
) -> None:
    """In the launcher's process."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from allranks.cli.main import main

    for path, number in ((os.devnull, 0), (stdout, 1), (stderr, 2)):
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    _take_environment(env)
    # It is nobody's worker.
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    sys.argv, sys.orig_argv = ["allranks", *words], [sys.executable, "-m", "allranks", *words]
    popen = SubprocessHandler._popen

    def fork_or_popen(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        is_script = args[3:4] in ((), ("python",), (sys.executable,)) and args[4:5] != ("-c",)
        if is_script and args[4:5] != ("-m",) and "PYTHONPATH" not in env:
            return _fork_rank(args, env)
        return popen(self, args, env)

    SubprocessHandler._popen = fork_or_popen  # type: ignore[method-assign]
    _leave_with(main)


def _fork_rank(args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[str]:
    import torch

    from allranks.launch import rank_env

    ready, told = os.pipe()
    pid = os.fork()
    if pid:
        os.close(told)
        os.read(ready, 1)  # it leads its session now, as after `Popen`: its group can be killed
        os.close(ready)
        process = subprocess.Popen.__new__(subprocess.Popen)
        process.args, process.pid, process.returncode = args, pid, None
        process.stdin = process.stdout = process.stderr = None
        process._child_created = True  # type: ignore[attr-defined]
        process._waitpid_lock = threading.Lock()  # type: ignore[attr-defined]
        return process
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank {env['RANK']}".encode())
    gc.freeze()  # what the launcher left open is closed here, once
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # `told` too
    tracker: Any = multiprocessing.resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # it was the launcher's
    for number in range(1, signal.SIGRTMIN):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _take_environment(env)
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    _as_if_not_imported()
    sys.argv, sys.orig_argv = ["rank_env", *args[3:]], list(args)
    rank_env.replace_by = _be_script
    _leave_with(rank_env.main)
    raise AssertionError


def _be_script(command: list[str]) -> None:
    """What `python SCRIPT WORDS` does in a rank's environment."""
    for folder in os.environ["PYTHONPATH"].split(os.pathsep):
        runpy.run_path(str(Path(folder, "sitecustomize.py")))
    sys.argv, sys.orig_argv = command[1:], command
    sys.path[:1] = [str(Path(command[1]).resolve().parent)]
    runpy.run_path(command[1], run_name="__main__")


def _take_environment(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.path[0] = ""  # of `python -m`: the current folder


def _leave_with(function: Callable[[], object]) -> None:
    """End this process as the interpreter would at the end of that function."""
    code: object = 0
    try:
        function()
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code or 0))  # type: ignore[call-overload]


class _Preloaded(importlib.abc.MetaPathFinder):
    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self.modules = modules

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name not in self.modules:
            return None
        module = self.modules[name]
        spec = importlib.machinery.ModuleSpec(name, _Again(module), origin=module.__file__)
        spec.submodule_search_locations = getattr(module, "__path__", None)
        return spec


class _Again(importlib.abc.Loader):
    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def create_module(self, spec: object) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None: ...


def _as_if_not_imported() -> None:
    """Ours that use torch are imported anew, and torch is found as it is, past who waits for it."""
    for name in list(sys.modules):
        if name.startswith(OURS_WITH_TORCH):
            del sys.modules[name]
    modules = {name: sys.modules.pop(name) for name in AWAITED if name in sys.modules}
    sys.meta_path.insert(0, _Preloaded(modules))
