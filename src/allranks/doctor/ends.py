"""How each rank ended, as torchrun, srun, mpirun or the run's own events tell it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from allranks.doctor.scan import Hit

SENT_BY_LAUNCHER = ("SIGTERM", "SIGCONT", "SIGINT")
# What srun writes in place of a signal's name.
_WORDS = {
    "killed": "SIGKILL",
    "terminated": "SIGTERM",
    "segmentation fault": "SIGSEGV",
    "aborted": "SIGABRT",
    "bus error": "SIGBUS",
    "floating point exception": "SIGFPE",
    "illegal instruction": "SIGILL",
    "hangup": "SIGHUP",
    "interrupt": "SIGINT",
}


@dataclass(frozen=True, slots=True)
class End:
    """The end of one rank; `hit` is the line that tells it, None where an event does."""

    rank: int
    code: int | None
    signal: str | None = None
    node: str | None = None
    hit: Hit | None = None
    is_first: bool = False  # torchrun's "first observed failure"
    is_by_launcher: bool = False  # ended because of another rank

    @property
    def is_own(self) -> bool:
        """Failed by itself, not because of another rank."""
        return not self.is_by_launcher and bool(self.code or self.signal)

    @property
    def is_crash(self) -> bool:
        """Ended by a signal that nobody of the job sends."""
        return self.signal is not None and not self.is_by_launcher

    @property
    def in_words(self) -> str:
        if self.signal is not None:
            return f"by {self.signal}"
        return f"with exit code {self.code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ends_of(hits: Iterable[Hit]) -> dict[int, End]:
    """The last end of each rank that the marks of one or several logs tell."""
    found: dict[int, End] = {}
    marks = list(hits)
    own = list(_own_ends(marks))
    if own:  # then srun's tasks are launchers, one a node, and torchrun has no part in it
        return {end.rank: end for end in reversed(own)}
    for end in [*_agent_ends(marks), *_block_ends(marks), *_task_ends(marks)]:
        before = found.get(end.rank)
        # srun calls an exit of a shell 128 + signal; the block says it better than the line above.
        if before is None or before.hit is None or end.hit is None or not before.is_first:
            found[end.rank] = end
    return found


def _own_ends(marks: list[Hit]) -> Iterator[End]:
    """`error: rank 1 was killed by SIGKILL`: what allranks says of the rank that failed first."""
    nodes: list[str] = []
    ranks_per_node = 1
    for hit in marks:
        fields = hit.fields
        if hit.cause.slug == "allranks-job":
            nodes = [node.strip() for node in fields["nodes"].split(",")]
            ranks_per_node = int(fields["layout"].partition("x")[2])
        if hit.cause.slug != "allranks-end":
            continue
        rank = int(fields["rank"])
        index = rank // ranks_per_node
        node = nodes[index] if index < len(nodes) else None
        code = int(fields["code"]) if "code" in fields else None if "how" in fields else 1
        yield End(rank, code, fields.get("how"), node, hit, is_first=True)


def _agent_ends(marks: list[Hit]) -> Iterator[End]:
    """`failed (exitcode: -11) local_rank: 1`: the local rank is the rank on a single node."""
    for hit in marks:
        if hit.cause.slug == "agent-block" and "local" in hit.fields and "code" in hit.fields:
            yield _end(int(hit.fields["local"]), int(hit.fields["code"]), hit, None, True)


def _block_ends(marks: list[Hit]) -> Iterator[End]:
    """The list that torchrun prints last: host, rank, exitcode, one line each."""
    node: str | None = None
    rank: int | None = None
    is_first = False
    for hit in marks:
        if hit.cause.slug != "agent-block":
            continue
        fields = hit.fields
        if "local" in fields and "rank" in fields:
            rank = int(fields["rank"])
        elif "node" in fields:
            node = fields["node"]
        elif "Root Cause" in hit.line.text:
            is_first = True
        elif "code" in fields and rank is not None and "local" not in fields:
            yield _end(rank, int(fields["code"]), hit, node, is_first)
            rank, is_first = None, False


def _end(rank: int, code: int, hit: Hit, node: str | None, is_first: bool) -> End:
    name = signal_name(-code) if code < 0 else None
    by_launcher = name in SENT_BY_LAUNCHER
    place = None if node in (None, "localhost") else node
    return End(rank, code, name, place, hit, is_first, by_launcher)


def _task_ends(marks: list[Hit]) -> Iterator[End]:
    for hit in marks:
        if hit.cause.slug != "task-ended":
            continue
        how = hit.fields["how"].lower()
        code = re.search(r"exit code (\d+)|signal (\d+)", how)
        name = next((value for word, value in _WORDS.items() if word in how), None)
        if code is not None and code[2]:
            name = signal_name(int(code[2]))
        number = int(code[1]) if code is not None and code[1] else None
        if number is not None and 128 < number < 160:  # a shell around it
            name = signal_name(number - 128)
        node = hit.fields["node"]
        for rank in expand(hit.fields["tasks"]):
            yield End(
                rank,
                number,
                name,
                None if "[" in node else node,
                hit,
                is_by_launcher=name in SENT_BY_LAUNCHER,
            )


def expand(tasks: str) -> Iterator[int]:
    """`0-2,5` as 0, 1, 2, 5."""
    for part in tasks.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            yield from range(int(first), min(int(last or first), int(first) + 4096) + 1)
