"""Everything known about one failure: hits, tracebacks, and how each rank ended."""

from __future__ import annotations

import itertools
import math
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from allranks.doctor.catalogue import load
from allranks.doctor.log_search import Hit, Scanned, parse, read_around
from allranks.doctor.speakers import is_near, spoken
from allranks.doctor.tracebacks import Raised, ends_well, has_gone_on, has_progress, tracebacks

GOES_ON_LINES = 300  # a log that has more lines after an error was not ended by it
LATER_BYTES = 1 << 16
LEAST_WIDTH, MAX_CUTS = 60, 6  # of a terminal that wrapped a copied message, and its lines
MAX_WRAPPED = 20  # tracebacks that are read in this way
OUTSIDE = ("slurm", "kernel")  # their messages are not part of a rank's output
MAX_RANKS = 4096  # that are listed one by one

# Ranks by node and process; None for a process that is not a rank, such as a launcher.
Processes = dict[tuple[str | None, int], int | None]


@dataclass(slots=True)
class FailureFacts:
    """What logs, events and accounting say, put together."""

    scanned: Sequence[Scanned]
    hits: list[Hit]
    raised: list[Raised]
    ends: dict[int, End]
    world: int | None = None
    known: Mapping[str, str] = field(default_factory=dict)  # of the job and the machine
    situations: tuple[str, ...] = ()
    processes: Processes = field(default_factory=dict)
    has_failed: bool = False
    passed_by: frozenset[tuple[int, int]] = frozenset()  # errors that did not end the work
    interfaces: tuple[str, ...] = ()  # of the network, for a run of this machine

    def hits_of(self, slug: str) -> list[Hit]:
        return [hit for hit in self.hits if hit.cause.slug == slug]

    @property
    def heard(self) -> set[int]:
        """The ranks that printed anything, or that a launcher mentions."""
        seen = set().union(*(one.ranks for one in self.scanned)) | set(self.ends)
        return seen | {one.source.rank for one in self.scanned if one.source.rank is not None}

    @property
    def ranks(self) -> set[int]:
        """All ranks, as far as the logs show."""
        seen = self.heard
        top = max([self.world or 0, *(rank + 1 for rank in seen)], default=0)
        return set(range(top)) if top <= MAX_RANKS else seen

    def rank_of_process(self, hit: Hit) -> int | None:
        """The rank whose process, or loader worker, a line names by its number."""
        number = hit.fields.get("pid", "")
        if not number.isdigit():
            return None
        if hit.node is not None:
            return self.processes.get((hit.node, int(number)))
        # Every node numbers its own processes.
        ranks = {rank for (_, pid), rank in self.processes.items() if pid == int(number)}
        return ranks.pop() if len(ranks) == 1 else None

    def is_passed(self, hit: Hit) -> bool:
        """Whether the work continued after this line."""
        return (id(hit.source), hit.number) in self.passed_by

    def is_final(self, hit: Hit) -> bool:
        """Whether the run may have ended at this line, rather than gone on after it."""
        if any(one.goes_on and is_near(hit, one) for one in self.raised):
            return False
        if self.has_failed or hit.cause.on_warning or hit.cause.kind == "soft":
            return True
        if self.is_passed(hit):
            return False
        lines = next(one.num_lines for one in self.scanned if one.source is hit.source)
        return lines - hit.number <= GOES_ON_LINES


def gather(
    scanned: Sequence[Scanned],
    *,
    ends: Mapping[int, End] | None = None,
    known: Mapping[str, str] | None = None,
    situations: Iterable[str] = (),
    world: int | None = None,
    processes: Processes | None = None,
    interfaces: tuple[str, ...] = (),
) -> FailureFacts:
    """Put together what was found in all files of one failure."""
    order = {id(one.source): index for index, one in enumerate(scanned)}
    hits = [hit for one in scanned for hit in one.hits]
    raised = [one for each in scanned for one in tracebacks(each)]
    hits += [hit for one in raised[:MAX_WRAPPED] for hit in _wrapped(one, hits)]
    hits = spoken(hits, raised, scanned, of_ranks=bool(ends or world or processes))
    hits = [hit for hit in hits if not _is_withdrawn(hit)]
    hits += [hit for one in raised for hit in _told_by(one)]
    hits.sort(key=lambda hit: (order[id(hit.source)], hit.number))
    of_processes = _ranks_of_processes(hits)
    hits = [_with_rank(hit, of_processes) for hit in hits]
    facts = FailureFacts(
        scanned,
        hits,
        raised,
        {**ends_of(hits), **(ends or {})},
        world or _world(hits),
        known or {},
        (*situations, *_situations(hits)),
        processes or {},
        interfaces=interfaces,
    )
    facts.has_failed = _has_failed(facts)
    facts.passed_by = frozenset(_passed_by(facts))
    return facts


def _passed_by(facts: FailureFacts) -> Iterator[tuple[int, int]]:
    """Errors after which the work continued: more steps follow, or the log ends well."""
    sizes = {id(one.source): one.num_bytes for one in facts.scanned}
    told = [hit for hit in facts.hits if hit.cause.kind not in ("mark", "soft")]
    for hit in [*told, *(one.mark for one in facts.raised if not facts.has_failed)]:
        if hit.cause.on_warning or hit.cause.family in OUTSIDE:
            continue
        if facts.has_failed:
            is_passed = not hit.line.is_prefixed and has_gone_on(hit)
        else:
            is_passed = has_progress(hit) or ends_well(hit, sizes[id(hit.source)])
        if is_passed:
            yield id(hit.source), hit.number


def _is_withdrawn(hit: Hit) -> bool:
    """Whether a later line revokes what a hit says."""
    if not hit.cause.until or hit.source.is_told:
        return False
    later = read_around(hit.source, hit.offset, LATER_BYTES).partition("\n")[2]
    return hit.cause.is_withdrawn(later)


def _wrapped(raised: Raised, hits: Sequence[Hit]) -> Iterator[Hit]:
    """Causes in the message of an exception that a terminal wrapped into several lines."""
    if len(raised.text) < LEAST_WIDTH or any(
        is_near(hit, raised) for hit in hits if hit.cause.kind != "mark"
    ):
        return
    mark = raised.mark
    lines = read_around(mark.source, mark.offset, LATER_BYTES).split("\n")
    cut = [parse(raw).text for raw in lines[raised.number - mark.number :][:MAX_CUTS]]
    more = list(itertools.takewhile(lambda line: line.strip(), cut[1:]))
    text = "".join([raised.text, *more])
    for cause in load().values() if more else ():
        if cause.kind != "mark" and (fields := cause.match(text)) is not None:
            line = replace(mark.line, text=text, rank=raised.rank, is_warning=False)
            yield Hit(cause, mark.source, raised.number, mark.offset, line, fields)


def _told_by(raised: Raised) -> Iterator[Hit]:
    """Causes that a traceback's exception and frames point to."""
    mark = raised.mark
    for cause in load().values():
        if any(one.fits(raised.text, raised.frames) for one in cause.raised):
            line = replace(mark.line, text=raised.text, rank=raised.rank)
            yield Hit(cause, mark.source, raised.number, mark.offset, line, {})


def _has_failed(facts: FailureFacts) -> bool:
    if any(end.code or end.signal for end in facts.ends.values()):
        return True
    return any(
        one.mark.source is each.source and each.num_lines - one.number <= GOES_ON_LINES
        for one in facts.raised
        if not one.goes_on
        for each in facts.scanned
    )


def _ranks_of_processes(hits: Sequence[Hit]) -> dict[tuple[str | None, int], int]:
    """Ranks by node and process: NCCL prints them once, and later only the process."""
    found = {}
    for hit in hits:
        if hit.cause.slug == "nccl-rank-of-process" and hit.line.pid is not None:
            found[hit.line.node, hit.line.pid] = int(hit.fields["rank"])
    return found


def _with_rank(hit: Hit, ranks: Mapping[tuple[str | None, int], int]) -> Hit:
    if hit.rank is not None or hit.line.pid is None:
        return hit
    rank = ranks.get((hit.line.node, hit.line.pid))
    if rank is None:
        return hit
    return replace(hit, line=replace(hit.line, rank=rank))


def _world(hits: Sequence[Hit]) -> int | None:
    said = [int(hit.fields["wanted"]) for hit in hits if hit.fields.get("wanted", "").isdigit()]
    layouts = [hit.fields["layout"] for hit in hits if hit.cause.slug == "allranks-job"]
    said += [math.prod(map(int, layout.split("x"))) for layout in layouts[-1:]]
    return max(said, default=None)


def _situations(hits: Sequence[Hit]) -> list[str]:
    text = " ".join(hit.line.text for hit in hits if hit.cause.slug == "framework-said")
    found = []
    if "lightning" in text.lower():
        found.append("lightning")
    if "accelerate/" in text or "transformers/trainer" in text:
        found.append("accelerate")
    if any(word in text for word in ("SLURM", "slurmstepd", "srun:", "sbatch:", "JobState")):
        found.append("slurm")
    return found


# A page of /dev/shm that there is no memory for ends a process with SIGBUS.
OF_SIGNALS = {"SIGILL": "illegal-instruction", "SIGBUS": "shared-memory-full"}
SENT_BY_LAUNCHER = ("SIGTERM", "SIGCONT", "SIGINT")
GRACE = timedelta(seconds=20)  # torchrun waits 30 s for ranks to end before it kills them
# What srun writes instead of a signal's name: "segmentation fault".
_SIGNALS = {(signal.strsignal(one) or one.name).lower(): one.name for one in signal.Signals}


@dataclass(frozen=True, slots=True)
class End:
    """How one rank ended; `hit` is the line that says so, None if an event does."""

    rank: int
    code: int | None
    signal: str | None = None
    node: str | None = None
    hit: Hit | None = None
    is_first: bool = False  # torchrun's "first observed failure"
    is_by_launcher: bool = False  # ended because of another rank

    @property
    def is_own(self) -> bool:
        """Whether it failed by itself, not because of another rank."""
        return not self.is_by_launcher and bool(self.code or self.signal)

    @property
    def is_crash(self) -> bool:
        """Whether a signal ended it that nothing in the job sends."""
        return self.signal is not None and not self.is_by_launcher

    @property
    def is_certain(self) -> bool:
        """Whether its end alone shows the cause."""
        return self.is_crash and self.cause != "shared-memory-full"

    @property
    def cause(self) -> str:
        """The cause that the signal which ended it points to."""
        return OF_SIGNALS.get(self.signal or "", "rank-died")

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
    """How each rank ended, from the marks of one or several logs."""
    found: dict[int, End] = {}
    marks = list(hits)
    own = list(_own_ends(marks))
    if own:  # then srun's tasks are launchers, one per node, and torchrun is not involved
        return {end.rank: end for end in reversed(own)}
    closed = {int(hit.fields["pid"]) for hit in marks if "closing" in hit.fields}
    # A signal to the launcher is passed on to all ranks: none of them failed first.
    closed_all = any(hit.cause.slug == "terminated-by-signal" for hit in marks)
    for end in [
        *_agent_ends(marks, closed, closed_all),
        *_block_ends(marks, closed, closed_all),
        *_task_ends(marks),
    ]:
        before = found.get(end.rank)
        # torchrun's block is more exact than the line above it, and than srun's 128 + signal.
        if before is None or not before.is_first:
            found[end.rank] = end
    return found


def _own_ends(marks: list[Hit]) -> Iterator[End]:
    """`error: rank 1 was killed by SIGKILL`: what allranks prints about the first failure."""
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


def _agent_ends(marks: list[Hit], closed: set[int], closed_all: bool) -> Iterator[End]:
    """`failed (exitcode: -11) local_rank: 1`: on a single node the local rank is the rank."""
    for hit in marks:
        if hit.cause.slug == "agent-block" and {"local", "code"} <= hit.fields.keys():
            sent = closed_all or int(hit.fields.get("pid", -1)) in closed
            yield _end(int(hit.fields["local"]), hit, None, sent=sent, is_first=True)


def _block_ends(marks: list[Hit], closed: set[int], closed_all: bool) -> Iterator[End]:
    """The list that torchrun prints at the end: time, host, rank, exitcode, one line each."""
    found: list[tuple[dict[str, str], Hit]] = []
    entry: dict[str, str] = {}
    for hit in marks:
        fields = hit.fields
        if hit.cause.slug != "agent-block" or {"local", "code"} <= fields.keys():
            continue
        if "Root Cause" in hit.line.text:
            entry["first"] = "yes"
        elif "code" not in fields:
            entry |= {key: fields[key] for key in ("time", "node", "rank") if key in fields}
        elif "rank" in entry:
            found.append((entry, hit))
            entry = {"node": entry["node"]} if "node" in entry else {}
    first = next((_time(entry) for entry, _ in found if "first" in entry), None)
    for entry, hit in found:
        when = _time(entry)
        is_late = first is not None and when is not None and when - first >= GRACE
        is_first = "first" in entry
        sent = closed_all or int(hit.fields["pid"]) in closed or (is_late and not is_first)
        yield _end(int(entry["rank"]), hit, entry.get("node"), sent=sent, is_first=is_first)


def _time(entry: Mapping[str, str]) -> datetime | None:
    with suppress(ValueError):
        return datetime.strptime(entry.get("time", ""), "%Y-%m-%d_%H:%M:%S")
    return None


def _end(rank: int, hit: Hit, node: str | None, *, sent: bool, is_first: bool) -> End:
    """How a rank ended, by its exit code; `sent`: torchrun may have sent it a signal."""
    code = int(hit.fields["code"])
    name = signal_name(-code) if code < 0 else None
    # The first failure follows from no other, unless torchrun says that it sent the signal.
    by_launcher = name in SENT_BY_LAUNCHER and (sent or not is_first)
    by_launcher |= name == "SIGKILL" and sent and not is_first
    place = None if node == "localhost" else node
    return End(rank, code, name, place, hit, is_first, by_launcher)


def _task_ends(marks: list[Hit]) -> Iterator[End]:
    """What srun prints about its tasks; it announces those that it is going to kill."""
    is_ending = False
    for hit in marks:
        is_ending |= hit.cause.slug == "step-ended"
        if hit.cause.slug != "task-ended":
            continue
        how = hit.fields["how"].lower()
        code = re.search(r"exit code (\d+)|signal (\d+)", how)
        name = next((value for word, value in _SIGNALS.items() if word in how), None)
        if code is not None and code[2]:
            name = signal_name(int(code[2]))
        number = int(code[1]) if code is not None and code[1] else None
        if number is not None and 128 < number < 160:  # a shell around it
            name = signal_name(number - 128)
        by_launcher = name in SENT_BY_LAUNCHER or (is_ending and name == "SIGKILL")
        node = hit.fields["node"]
        place = None if "[" in node else node
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", hit.fields["tasks"]):  # 0-2,5
            for rank in range(int(first), min(int(last or first), int(first) + MAX_RANKS) + 1):
                yield End(rank, number, name, place, hit, is_by_launcher=by_launcher)
