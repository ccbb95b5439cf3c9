"""Where the ranks of a run on this machine are in their code, by py-spy or by a signal.

py-spy is used if it is installed. Without it, or if the kernel does not allow it, a rank that
allranks started writes its own stacks to a file in memory at `DUMP_SIGNAL` (see probe/inject), and
nothing to its log. As a program, for the other nodes of a job:

    python -m allranks.run.stacks RUN_DIR ATTEMPT
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.machine.processes import output_of
from allranks.run.folder import RunDir
from allranks.run.tracebacks import OURS, Frame

PROC = Path("/proc")
HEAD = re.compile(
    r"(?:allranks: )?(Current thread|Thread|stack of process) \w+\b.*\(most recent call first\):"
)
# A signal that neither torch nor NCCL nor MPI uses. It ends a process that has no handler for it:
# it is sent only to those that have one. A Mac has no such signals.
DUMP_SIGNAL = int(getattr(signal, "SIGRTMIN", 0)) + 7 if hasattr(signal, "SIGRTMIN") else 0
VARIABLE = "ALLRANKS_DUMP_SIGNAL"
MEMORY = "/memfd:allranks-stacks"  # the kernel's name for the file in memory
FOLLOW = ": the stacks of this rank follow"  # the line above them in its log
END = "allranks: these were its stacks"
PY_SPY_SECONDS = 5.0
DUMP_SECONDS = 5.0
QUIET_SECONDS = 0.5  # without another byte: the dump is complete
LOOK_SECONDS = 0.02
MOST_AT_ONCE = 8
MAX_NAME = 300  # characters of a file's or a function's name that are sent to other nodes
# These tell a reader nothing; the last two are of every module.
WRAPPERS = (
    *("wrapper", "inner", "call", "_fn", "decorate_context"),
    *("_call_impl", "_wrapped_call_impl"),
)
# In these files of torch, a rank waits for others.
WAITING_FILES = ("torch/distributed/", "torch/nn/parallel/distributed.py", "torch/cuda/nccl.py")


@dataclass(frozen=True, slots=True)
class Stack:
    """The calls of one rank's main thread, the innermost first."""

    process: int
    frames: tuple[Frame, ...]
    source: str  # py-spy, or the rank itself

    @property
    def place(self) -> Frame | None:
        """The innermost line of the user's own code, or of a library if there is none."""
        own = [frame for frame in self.frames if frame.is_own]
        return next(iter(own or self.frames), None)

    @property
    def library_call(self) -> str | None:
        """The library function that the user's own code called: `all_reduce`, `backward`."""
        called = None
        for frame in self.frames:
            if frame.is_own:
                break
            if not frame.file.startswith(OURS) and frame.function not in WRAPPERS:
                called = frame.function
            elif called is not None and frame.file.startswith(f"{OURS}train/"):
                break  # for a task, our loop stands for the user's code
        return called

    @property
    def waits(self) -> bool | None:
        """Whether the rank is in an exchange with others; None if that is unclear."""
        for frame in self.frames:
            if any(part in frame.file for part in WAITING_FILES):
                return True
            if frame.file.endswith("probe/hooks.py") and frame.function.endswith("call"):
                return True  # the probe's `waiting`, around calls that are not Python
            if frame.file.endswith("torch/autograd/graph.py"):
                return None  # DDP waits there, but gradients are computed there too
            if frame.is_own:
                return False
        return None


def processes_of(run: RunDir, attempt: int, proc: Path = PROC) -> dict[int, int]:
    """The processes of an attempt's ranks on this machine, by rank.

    They are known by their environment. A rank's child processes have the same environment; the
    rank itself is the one whose parent does not.
    """
    found: dict[int, tuple[int, int]] = {}  # process -> its rank, its parent
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError, LookupError):
            rank = rank_of(folder / "environ", run.name, attempt)
            if rank is not None:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                found[int(folder.name)] = (rank, parent)
    firsts = {
        rank: process
        for process, (rank, parent) in sorted(found.items(), reverse=True)
        if found.get(parent, (None,))[0] != rank
    }
    return dict(sorted(firsts.items()))


def rank_of(environ: Path, run_name: str, attempt: int) -> int | None:
    """The rank that an environment belongs to, or to a child process of."""
    text = environ.read_bytes()
    if b"ALLRANKS_RUN_DIR=" not in text:
        return None
    pairs = (entry.partition(b"=") for entry in text.split(b"\0"))
    env = {key: value.decode(errors="replace") for key, _, value in pairs}
    is_of_run = Path(env.get(b"ALLRANKS_RUN_DIR", "")).name == run_name
    if not is_of_run or env.get(b"ALLRANKS_ATTEMPT") != str(attempt):
        return None
    return int(env[b"RANK"])


def kernel_state(process: int, proc: Path = PROC) -> str:
    """The kernel's letter for a process: R runs, S sleeps, D waits for a disk, T is stopped."""
    try:
        return (proc / str(process) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_gone(process: int, proc: Path = PROC) -> bool:
    """Whether a process has ended; False if there is no /proc to ask."""
    return (proc / "self").exists() and kernel_state(process, proc) in ("", "Z", "X")


def take(processes: Mapping[int, int]) -> dict[int, Stack]:
    """The stacks of these ranks (rank: process), as far as they can be read."""
    found: dict[int, Stack] = {}
    program = find_py_spy()
    if program is not None and processes:
        with ThreadPoolExecutor(min(MOST_AT_ONCE, len(processes))) as pool:
            looks = {rank: pool.submit(_by_py_spy, program, pid) for rank, pid in processes.items()}
        found = {rank: stack for rank, look in looks.items() if (stack := look.result())}
    found |= by_signal({rank: pid for rank, pid in processes.items() if rank not in found})
    return dict(sorted(found.items()))


def find_py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _by_py_spy(program: str, process: int) -> Stack | None:
    said = output_of([program, "dump", "--json", "--pid", str(process)], PY_SPY_SECONDS)
    with suppress(ValueError, KeyError, TypeError):
        return parse_py_spy(process, json.loads(said or ""))
    return None  # not allowed, ended, not Python, or too new a Python


def parse_py_spy(process: int, threads: Sequence[Mapping[str, Any]]) -> Stack | None:
    """The main thread, whose id is the process's, in what `py-spy dump --json` prints."""
    mains = [each for each in threads if each.get("os_thread_id") == process]
    mains += [each for each in threads if each.get("thread_name") == "MainThread"]
    if not mains:
        return None
    frames = [
        # Without the class, which only newer versions show.
        Frame(str(each["filename"]), int(each["line"]), str(each["name"]).rpartition(".")[2])
        for each in mains[0]["frames"]
    ]
    return Stack(process, tuple(frames), "py-spy") if frames else None


def by_signal(processes: Mapping[int, int]) -> dict[int, Stack]:
    """The stacks that ranks write when they get the signal."""
    found = {rank: parse_dump(processes[rank], text) for rank, text in dumps(processes).items()}
    return {rank: stack for rank, stack in found.items() if stack is not None}


def dumps(processes: Mapping[int, int]) -> dict[int, str]:
    """What faulthandler prints in these ranks (rank: process) about all their threads."""
    asked: dict[int, tuple[Path, int]] = {}  # rank -> its file, and where its dump begins there
    for rank, process in processes.items():
        with suppress(OSError):
            file = memory_file(process)
            if file is not None and takes_signal(process):
                asked[rank] = (file, file.stat().st_size)
                os.kill(process, DUMP_SIGNAL)
    return _read_when_quiet(asked)


def memory_file(process: int, proc: Path = PROC) -> Path | None:
    """The file that a process writes its stacks to; None if it has none, or closed it."""
    for entry in (proc / str(process) / "fd").iterdir():
        with suppress(OSError):
            if os.readlink(entry).startswith(MEMORY):
                return entry
    return None


def takes_signal(process: int, proc: Path = PROC) -> bool:
    """Whether a process has a handler for the signal, which would kill any other."""
    text = (proc / str(process) / "status").read_text()
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)$", text, re.MULTILINE)
    return bool(DUMP_SIGNAL and match and int(match[1], 16) >> (DUMP_SIGNAL - 1) & 1)


def _read_when_quiet(asked: Mapping[int, tuple[Path, int]]) -> dict[int, str]:
    """What was added to these files, once it is complete."""
    texts: dict[int, str] = {}
    until, changed = time.monotonic() + DUMP_SECONDS, time.monotonic()
    while asked and time.monotonic() < until:
        before = dict(texts)
        for rank, (path, start) in asked.items():
            with suppress(OSError), path.open("rb") as file:
                file.seek(start)
                texts[rank] = file.read(1 << 20).decode(errors="replace")
        if texts != before:
            changed = time.monotonic()
        if texts == before and texts and all(map(is_complete, texts.values())):
            break
        if all(texts.values()) and time.monotonic() - changed > QUIET_SECONDS:
            break
        time.sleep(LOOK_SECONDS)
    return texts


def without_dumps(text: str) -> str:
    """The text of a log without the stacks that the launcher added."""
    return re.sub(
        rf"^allranks: [^\n]*{FOLLOW}\n.*?^{END}\n", "", text, flags=re.DOTALL | re.MULTILINE
    )


def is_complete(text: str) -> bool:
    """Whether a dump has got to the outermost call of the main thread, which is its last line.

    It is written call by call: on a busy machine a rank may pause anywhere in between.
    """
    last = text.rpartition("(most recent call first):")[2]
    return re.search(r" in (<module>|_run_module_as_main)\n", last) is not None


def parse_dump(process: int, text: str, *, crashed: bool = False) -> Stack | None:
    """The main thread in what faulthandler prints; `crashed`: the one that got the signal."""
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        head = HEAD.match(line)
        frame = re.fullmatch(r'  File "(.*)", line (\d{1,9}) in (.+)', line)
        if head:
            threads.append((head[1] != "Thread", []))
        elif frame and threads:
            threads[-1][1].append(Frame(frame[1], int(frame[2]), frame[3]))
    # Any thread may get a signal. The main one is the oldest, and so the last.
    current = [frames for is_current, frames in threads if is_current and crashed]
    frames = [[], *(frames for _, frames in threads), *current][-1]
    return Stack(process, tuple(frames), "the rank itself") if frames else None


def main() -> None:
    for rank, stack in take(processes_of(RunDir(Path(sys.argv[1])), int(sys.argv[2]))).items():
        print(to_lines(rank, stack))


def to_lines(rank: int, stack: Stack) -> str:
    """A stack for `from_lines`, one call a line: srun mixes up nodes' lines over 1 KiB."""
    common = {"rank": rank, "process": stack.process, "source": stack.source}
    calls = ((one.file[-MAX_NAME:], one.line, one.function[-MAX_NAME:]) for one in stack.frames)
    return "\n".join(json.dumps({**common, "call": call}) for call in calls)


def from_lines(text: str) -> dict[int, Stack]:
    """The stacks that `to_lines` wrote on several nodes, among any other lines."""
    found: dict[int, Stack] = {}
    for line in text.splitlines():
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            said: Mapping[str, Any] = json.loads(line)
            file, number, function = said["call"]
            call = Frame(str(file), int(number), str(function))
            rank = int(said["rank"])
            before = found[rank].frames if rank in found else ()
            found[rank] = Stack(int(said["process"]), (*before, call), str(said["source"]))
    return found


if __name__ == "__main__":
    main()
