"""What the kernel logged about a run, and which process each message is about."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from allranks.doctor.log_search import Scanned, Source
from allranks.doctor.run_evidence import Starts
from allranks.machine.processes import output_of
from allranks.run.events import read_last_events
from allranks.run.folder import RunDir

DMESG_SECONDS = 5.0
SAMPLES_BYTES = 4 << 20  # of a rank's events: with short steps the samples are far apart
FIRST_NAMESPACE = 0xEFFFFFFC  # inode of the namespace with the kernel's own process numbers
OF_MEMORY = re.compile(rb"(?i)\boom|out of memory|kill(?:ed)? process")
VICTIM = re.compile(rb"(?i)kill(?:ed)? process (\d+)|oom-kill:.{0,2000}?\bpid=(\d+)")

Processes = Mapping[tuple[str | None, int], int | None]  # by node and number; None if not a rank


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel's messages on this machine from the time of an attempt, if readable."""

    sources: Sequence[Source] = ()
    node: str | None = None
    victims: frozenset[int] = frozenset()  # all processes that it killed for memory

    def spares(self, node: str | None, processes: Processes) -> bool:
        """Whether it killed processes there, but none of the run."""
        if node is None or node != self.node or not self.victims:
            return False
        return not any((node, pid) in processes for pid in self.victims)


def processes_of(
    run: RunDir, attempt: int, starts: Starts, scanned: Iterable[Scanned]
) -> dict[tuple[str | None, int], int | None]:
    """Ranks by their processes, and by those that they started, such as loader workers."""
    found: dict[tuple[str | None, int], int | None] = {}
    with suppress(OSError):
        launcher, its_node = run.holder()
        found[its_node, launcher] = None
    for rank, start in starts.events.items():
        node = start.get("host")
        for event in read_last_events(
            run.events(attempt, rank), SAMPLES_BYTES, word=b'"processes"'
        ):
            numbers = event.get("processes")
            for pid in numbers if isinstance(numbers, list) else ():
                found[node, pid] = rank
        if isinstance(start.get("pid"), int):
            found[node, start["pid"]] = rank
    # A worker may live for less than the time between two samples: torch names it when it dies.
    for one in scanned:
        for hit in one.hits:
            if hit.cause.slug == "worker-killed" and hit.rank is not None:
                for pid in re.findall(r"\d+", hit.fields.get("pids", "")):
                    found.setdefault((starts.node(hit.rank), int(pid)), hit.rank)
    return found


def messages(starts: Starts, since: float, until: float, processes: Processes) -> Kernel:
    """The kernel's lines from the time of an attempt, if it ran here and they can be read.

    Those about memory are kept only if they name a process of the run: others are about other
    programs.
    """
    node = socket.gethostname()
    if node not in {starts.node(rank) for rank in starts.events}:
        return Kernel()
    said = output_of(["dmesg", "--time-format", "iso"], DMESG_SECONDS) or ""
    lines = [line for line in said.encode().splitlines() if _is_between(line, since, until)]
    victims: set[int] = set()
    kept = []
    for line in lines:
        if OF_MEMORY.search(line) is None:
            kept.append(line)
        elif (pid := _victim(line)) is not None and _counts_as_kernel():
            victims.add(pid)
            if (node, pid) in processes:
                kept.append(line)
    sources = [Source(Path("dmesg"), "dmesg", None, node, b"\n".join(kept))] if kept else []
    return Kernel(sources, node, frozenset(victims))


def _victim(line: bytes) -> int | None:
    found = VICTIM.search(line)
    return int(found[1] or found[2]) if found is not None else None


def _counts_as_kernel() -> bool:
    """Whether processes have the same numbers here as in the kernel's messages."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino == FIRST_NAMESPACE
    return False


def _is_between(line: bytes, since: float, until: float) -> bool:
    stamp = line.partition(b" ")[0].decode(errors="replace").replace(",", ".")
    with suppress(ValueError):
        return since - 5 <= datetime.fromisoformat(stamp).timestamp() <= until + 60
    return False
