"""`run_ranks`: call a function on real ranks, processes that talk over gloo."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import time
import traceback
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from tests.fork_server import fork_server

from allranks.machine.processes import die_with_parent

Result = TypeVar("Result")

START_SECONDS = 90.0  # for all ranks to meet
GRACE_SECONDS = 1.0  # for ranks that fail only because another one has
STACK_SECONDS = 10.0  # for a silent rank to print where it is


def run_ranks(
    function: Callable[..., Result],
    world_size: int,
    tmp_path: Path,
    *args: Any,
    timeout: float = 60,
    backend: str = "gloo",
) -> list[Result]:
    """What `function(*args)` returns on each of `world_size` ranks. With "nccl", they share a GPU.

    Raises an AssertionError that says which ranks raised (with their tracebacks, the first to
    raise first), which died (of what), and which were silent for `timeout` seconds after all had
    met (and where). No process outlives the call. The function and its arguments must be picklable.
    """
    context = fork_server()
    folder = tmp_path / f"ranks-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    ranks: list[_Rank] = []
    failures = ["not all ranks were started"]
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            work = pickle.dumps((function, args))
            process = context.Process(
                target=_run,
                args=(sender, work, rank, world_size, folder, timeout, backend),
                daemon=True,
            )
            process.start()
            sender.close()
            ranks.append(_Rank(rank, process, receiver))
        _follow(ranks, timeout)
        failures = [_words(rank, timeout, folder) for rank in sorted(ranks, key=_order)]
    finally:
        for each in ranks:
            each.end(gently=not any(failures))
    if any(failures):
        raise AssertionError("\n".join(filter(None, failures)))
    return [rank.value for rank in ranks]


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    pipe: Connection
    outcome: str = "silent"  # returned, raised or died
    has_met: bool = False  # the other ranks
    value: Any = None
    when: float = field(default_factory=time.monotonic)

    def hear(self) -> None:
        """Take its word, or its death."""
        try:
            outcome, value = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            outcome, value = "died", None
            self.process.join(30)
        if outcome == "met":
            self.has_met = True
            return
        self.outcome, self.value, self.when = outcome, value, time.monotonic()
        if outcome == "raised":  # by the rank's own word: who looks may hear of several at once
            self.when, self.value = value

    def end(self, *, gently: bool) -> None:
        if gently:
            self.process.join(30)
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


def _follow(ranks: list[_Rank], timeout: float) -> None:
    """Until every rank has been heard of, or the time is over; it is soon after a failure."""
    deadline, have_met = time.monotonic() + START_SECONDS, False
    while silent := [rank for rank in ranks if rank.outcome == "silent"]:
        ready = wait([rank.pipe for rank in silent], max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for rank in silent:
            if rank.pipe in ready:
                rank.hear()
                if rank.outcome in ("raised", "died"):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        has_failed = any(rank.outcome in ("raised", "died") for rank in ranks)
        if not have_met and not has_failed and all(rank.has_met for rank in ranks):
            have_met, deadline = True, time.monotonic() + timeout


def _order(rank: _Rank) -> tuple[bool, float]:
    return rank.outcome == "silent", rank.when


def _words(rank: _Rank, timeout: float, folder: Path) -> str:
    name = f"rank {rank.number}"
    if rank.outcome == "raised":
        return f"{name} raised:\n{rank.value}"
    if rank.outcome == "died":
        code = rank.process.exitcode
        how = (
            f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with {code}"
        )
        return f"{name} died {how}"
    if rank.outcome == "silent":
        return f"{name} was silent (limit {timeout:g} s):\n{_where(rank, folder)}"
    return ""


def _where(rank: _Rank, folder: Path) -> str:
    """The stack of a silent rank."""
    assert rank.process.pid is not None
    stack = folder / f"stack-{rank.number}"
    if not stack.exists():
        return "(it had not started)"
    os.kill(rank.process.pid, signal.SIGUSR1)
    end = time.monotonic() + STACK_SECONDS
    # The outermost call comes last: a busy machine shows a part of it before.
    while time.monotonic() < end and not stack.read_text().endswith("in <module>\n"):
        time.sleep(0.02)
    return stack.read_text()


def _run(
    pipe: Connection,
    work: bytes,
    rank: int,
    world_size: int,
    folder: Path,
    timeout: float,
    backend: str,
) -> None:
    """In the rank's process."""
    import torch
    import torch.distributed as dist

    die_with_parent()
    with (folder / f"stack-{rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"  # it refuses two ranks on one GPU of one host
        torch.set_num_threads(1)
        if backend == "gloo":
            warnings.simplefilter("error")
        try:
            function, args = pickle.loads(work)
            dist.init_process_group(
                backend,
                device_id=torch.device("cuda", 0) if backend == "nccl" else None,
                init_method=f"file://{folder / 'store'}",
                rank=rank,
                world_size=world_size,
                # The limits of the process that follows come first.
                timeout=timedelta(seconds=START_SECONDS + 2 * timeout),
            )
            pipe.send_bytes(pickle.dumps(("met", None)))
            message = pickle.dumps(("returned", function(*args)))
        except BaseException:
            told = (time.monotonic(), traceback.format_exc())
            pipe.send_bytes(pickle.dumps(("raised", told)))
            os._exit(1)  # without waiting for ranks that may never come
        pipe.send_bytes(message)
        # Others may still be reading what this rank sent last.
        dist.barrier()
        dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)
