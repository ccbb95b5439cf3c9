"""Why a run is slower than its machine could be, and what share of a step each reason costs.

The most expensive findings come first. What is below its threshold is not reported: every run has a
little of everything.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from allranks.doctor.catalogue import finding
from allranks.doctor.finding import Confidence, Evidence, Finding
from allranks.doctor.log_search import num_lines
from allranks.errors import AllranksError
from allranks.run import files
from allranks.run.folder import RunDir
from allranks.run.record import RankRecord, newest_window, read_ends
from allranks.show.numbers import count, duration, percent
from allranks.timing.steps import SLOWER_IN, Timing, timing_of
from allranks.timing.timeline import BACKWARD, DATA, FORWARD

RECENT_BYTES = 1 << 20  # of each rank's events: some thousand steps
LOG_BYTES = 1 << 18  # of the beginning of a log, where NCCL names its network
NCCL_LINES = re.compile(
    r"NCCL INFO .*(?:Using network|NET/Socket|NET/IB|NCCL_IB_DISABLE|NCCL_NET\b|No device found)"
)
NUMBERS = (
    *("utilization", "temperature", "clock", "clock_max", "memory_peak", "memory_total"),
    "workers_cpu",
)
ENOUGH_STEPS = 20
HEAVY = 1.5  # times a light step's forward pass
ALIKE = 0.8  # how closely forward and backward passes grow together
GENERAL = ("low-gpu-utilization", "communication-bound")

Reasons = Iterator[tuple[float, Finding]]  # each with the share of a step that it costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The values from which something is reported. Shares are of a step's time."""

    data: float = 0.10
    straggler: float = 0.10
    comm: float = 0.50
    least_ms: float = 5.0  # of a step: a smaller cost is not worth a change
    least_seconds: float = 10.0  # of measured steps
    slowest: float = 0.6  # share of the steps in which the same rank comes last
    utilization: float = 80.0  # percent
    temperature: float = 83.0  # degrees Celsius
    clock: float = 0.9  # of the GPU's fastest
    balance: float = 1.1  # a rank's samples over the mean
    busy: float = 0.7  # of a CPU, by each loader worker
    memory: float = 0.5  # of the GPU's memory

    @classmethod
    def parse(cls, words: Sequence[str]) -> Thresholds:
        """The defaults, changed by `key=value` words. Raises AllranksError."""
        known = {each.name for each in dataclasses.fields(cls)}
        changed: dict[str, float] = {}
        for word in words:
            key, _, value = word.partition("=")
            try:
                number = float(value)
            except ValueError:
                number = -1.0
            if key not in known or number < 0:
                raise AllranksError(
                    f"{word} is not a threshold",
                    fix=f"write KEY=NUMBER with one of {', '.join(sorted(known))}",
                )
            changed[key] = number
        return cls(**changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank, with means over its last steps and samples."""

    rank: int
    node: str | None = None
    events: str = ""  # the file
    last_line: int = 0  # of the last step in it
    step_samples: float = 0.0
    data_seconds: float = 0.0
    work_seconds: tuple[float, float] | None = None  # of light and of heavy steps, if they differ
    # Means over its `device` events; without those that they lack.
    means: Mapping[str, float] = field(default_factory=dict)
    num_workers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowFacts:
    """What is known about a run's speed."""

    timing: Timing
    ranks: tuple[RankFacts, ...]
    cpus_allotted: int | None = None  # of the machine that started it
    is_task: bool = False  # of allranks: the job file has the settings
    nccl: tuple[Evidence, ...] = ()  # lines in which NCCL names its network

    @property
    def num_nodes(self) -> int:
        return len({rank.node for rank in self.ranks})

    @property
    def situations(self) -> tuple[str, ...]:
        return ("task",) if self.is_task else ()

    def by_rank(self, rank: int) -> RankFacts:
        return next(each for each in self.ranks if each.rank == rank)


def read_slow_facts(run: RunDir) -> SlowFacts | None:
    """From the run's last attempt; None if too little was measured."""
    attempts = run.attempts()
    if not attempts:
        return None
    attempt = attempts[-1]
    records = {rank: read_ends(run, attempt, rank, RECENT_BYTES) for rank in run.ranks(attempt)}
    steps = {rank: record.timed_steps for rank, record in records.items()}
    measured = timing_of(steps, newest_window(records.values()))
    if measured is None:
        return None
    return SlowFacts(
        timing=measured,
        ranks=tuple(
            rank_facts(record, measured.first_step, run.events(attempt, rank))
            for rank, record in sorted(records.items())
        ),
        cpus_allotted=(run.info().get("hardware") or {}).get("cpus_allotted"),
        is_task=any("rank_batch" in record.start for record in records.values()),
        nccl=nccl_lines(run.log(attempt, rank) for rank in records),
    )


def rank_facts(record: RankRecord, first_step: int, path: Path) -> RankFacts:
    """One rank, from this step on."""
    steps = [event for number, event in record.timed_steps.items() if number >= first_step]
    devices = record.devices
    found = {name: record.mean(name, of=devices) for name in NUMBERS}
    workers = record.start.get("num_workers")
    if workers is None and devices:
        # A script: the processes that it had started most of the time.
        workers = round(statistics.median(int(e.get("num_workers", 0)) for e in devices))
    return RankFacts(
        rank=record.rank,
        node=record.start.get("host"),
        events=str(path),
        last_line=num_lines(path),
        step_samples=record.mean("samples", of=steps) or 0.0,
        data_seconds=record.mean(DATA, of=steps) or 0.0,
        work_seconds=uneven_work(steps),
        means={name: mean for name, mean in found.items() if mean is not None},
        num_workers=workers,
    )


def uneven_work(steps: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Seconds of the forward pass in light and in heavy steps; None if all are alike.

    A heavy batch has a longer backward pass, too; other work on the node does not cause that.
    """
    parts = [(one[FORWARD], one[BACKWARD]) for one in steps if FORWARD in one and BACKWARD in one]
    forward, backward = zip(*parts, strict=True) if len(parts) >= ENOUGH_STEPS else ((), ())
    if len({*forward}) < 2 or len({*backward}) < 2:
        return None
    least, *_, most = statistics.quantiles(forward, n=10)
    is_work = statistics.correlation(forward, backward) >= ALIKE
    return (least, most) if is_work and most >= HEAVY * least else None


def nccl_lines(logs: Iterable[Path]) -> tuple[Evidence, ...]:
    """What NCCL prints about its network, from the first log that has any of it."""
    for log in logs:
        with suppress(OSError):
            if found := _nccl_lines(log, min(LOG_BYTES, log.stat().st_size)):
                return found
    return ()


@lru_cache(maxsize=1024)  # the beginning of a log does not change
def _nccl_lines(log: Path, num_bytes: int) -> tuple[Evidence, ...]:
    with files.open_file(log) as file:
        text = file.read(num_bytes).decode(errors="replace")
    return tuple(
        Evidence(str(log), number, line.strip()[:400])
        for number, line in enumerate(text.splitlines(), start=1)
        if NCCL_LINES.search(line)
    )


def slow(facts: SlowFacts, limits: Thresholds | None = None) -> list[Finding]:
    """The reasons, the most expensive first; empty for a run that is as fast as it can be."""
    limits = limits or Thresholds()
    if facts.timing.seconds < limits.least_seconds:
        likely = slow(facts, dataclasses.replace(limits, least_seconds=0.0))
        return [too_short(facts, likely[0])] if likely else []
    rules = (waiting_for_data, unbalanced, slow_rank, throttled, sockets, communication, idle)
    found = [reason for rule in rules for reason in rule(facts, limits)]
    # The general word only where no particular one was found.
    particular = [one for one in found if one[1].cause not in GENERAL]
    return [finding for _, finding in sorted(particular or found, key=lambda one: -one[0])]


def too_short(facts: SlowFacts, likely: Finding) -> Finding:
    """What a run looks like so far, if it was not measured long enough to be sure."""
    seconds = duration(facts.timing.seconds)
    title = likely.title
    if not title[1:2].isupper():  # NCCL
        title = title[0].lower() + title[1:]
    looks = f"in the {seconds} that were measured, {title}"
    found = finding("too-short-to-judge", likely.evidence, looks=looks, fix=likely.fix)
    return dataclasses.replace(found, rank=likely.rank, node=likely.node)


def share_of(facts: SlowFacts, part: str, limits: Thresholds) -> float:
    """A part's share of the step; 0 where it was not measured, or is too short to matter."""
    parts, whole = facts.timing.parts, facts.timing.step_seconds
    if not parts or not whole or parts[part] * 1e3 < limits.least_ms:
        return 0.0
    return parts[part] / whole


def waiting_for_data(facts: SlowFacts, limits: Thresholds) -> Reasons:
    share = share_of(facts, "data", limits)
    if share < limits.data:
        return
    worst = max(facts.ranks, key=lambda rank: rank.data_seconds)
    others = [rank.data_seconds for rank in facts.ranks if rank is not worst]
    # One rank is to blame only if it waits much longer than every other.
    is_one = bool(others) and worst.data_seconds > 2 * max(others) + limits.least_ms / 1e3
    cause, situations, fields = (
        _one_loader(facts, worst) if is_one else _loader(facts, worst, limits)
    )
    fields["who"] = f"Rank {worst.rank} spends" if is_one else "Ranks spend"
    fields["share"] = percent(share, 0)
    beside = f" on rank {worst.rank}, at most {duration(max(others))} on others" if others else ""
    text = f"data {_of_step(facts, worst.data_seconds)}{beside}, {_window(facts)}"
    found = finding(cause, [_evidence(worst, text)], situations, **fields)
    yield share, _sure(found, share, limits.data, worst if is_one else None)


Loader = tuple[str, tuple[str, ...], dict[str, str]]  # cause, situations, fields of its texts


def _one_loader(facts: SlowFacts, rank: RankFacts) -> Loader:
    """All ranks run the same script: what differs is this rank's disk, CPUs or data."""
    why = ", the others hardly any: it runs the same script, so its disk, CPUs or data differ"
    return "data-bound", ("one_rank",), {"why": why, "node": _one_of_several(facts, rank)}


def _loader(facts: SlowFacts, rank: RankFacts, limits: Thresholds) -> Loader:
    """Whether the loader's workers are the reason."""
    workers, cpus, task = rank.num_workers, facts.cpus_allotted, facts.situations
    per_node = max(1, len(facts.ranks) // facts.num_nodes)
    fair = max(2, (cpus or 4 * per_node) // per_node - 1)
    if workers == 0:
        few = "there are no loader workers, so batches are made between the steps"
        return "too-few-workers", task, {"why": few, "fair": str(fair)}
    if workers and cpus and workers * per_node > 2 * cpus:
        many = {"workers": str(workers * per_node), "cpus": str(cpus), "fair": str(fair)}
        return "too-many-workers", task, many
    busy = rank.means.get("workers_cpu", 0.0) / workers if workers else 0.0
    if workers and busy >= limits.busy:
        few = f"its {workers} loader workers are busy {percent(busy, 0)} of the time"
        return "too-few-workers", task, {"why": few, "fair": str(max(fair, workers + 1))}
    known = f"; its {workers} loader workers are waiting too" if workers else ""
    return "data-bound", task, {"why": known}


def unbalanced(facts: SlowFacts, limits: Thresholds) -> Reasons:
    """A rank with more samples than the others, which wait for it."""
    share = share_of(facts, "straggler", limits)
    counts = [rank.step_samples for rank in facts.ranks]
    mean, most = statistics.fmean(counts), max(facts.ranks, key=lambda rank: rank.step_samples)
    if share < limits.straggler or not mean or most.step_samples < limits.balance * mean:
        return
    fields = {"more": percent(most.step_samples / mean - 1, 0), "share": percent(share, 0)}
    text = f"samples per step: {', '.join(map(count, counts))}"
    found = finding("unbalanced-data", [_evidence(most, text)], **_names(most), **fields)
    yield share, _sure(found, share, limits.straggler, most)


def slow_rank(facts: SlowFacts, limits: Thresholds) -> Reasons:
    """A rank that the others wait for, though it has no more to do."""
    share, timing = share_of(facts, "straggler", limits), facts.timing
    if share < limits.straggler or any(unbalanced(facts, limits)) or any(throttled(facts, limits)):
        return
    words, slowest = percent(share, 0), timing.slowest_rank
    shown = facts.by_rank(slowest) if slowest is not None else facts.ranks[0]
    text = f"waiting for slower ranks takes {words} of a step of {duration(timing.step_seconds)}; "
    text += timing.slowest_words
    if slowest is None or timing.slowest_share < limits.slowest:
        works = [rank.work_seconds for rank in facts.ranks if rank.work_seconds is not None]
        if len(works) == len(facts.ranks):
            least, most = (duration(statistics.fmean(edge)) for edge in zip(*works, strict=True))
            text += f"; a forward pass takes {least} to {most}, and a backward pass grows with it"
            yield share, finding("uneven-lengths", [_evidence(shown, text)], share=words)
        else:
            yield share, finding("uneven-steps", [_evidence(shown, text)], share=words)
        return
    part = timing.slowest_part or ""
    fields = {"node": _one_of_several(facts, shown), "part": SLOWER_IN.get(part, part)}
    line = _evidence(shown, text)
    found = finding("slow-rank", [line], **_names(shown), **fields, share=words)
    yield share, _sure(found, share, limits.straggler, shown)


def throttled(facts: SlowFacts, limits: Thresholds) -> Reasons:
    """A GPU that is hot and runs below its full clock rate."""
    for rank in facts.ranks:
        means = rank.means
        if not {"temperature", "clock", "clock_max", "utilization"} <= set(means):
            continue
        ratio = means["clock"] / (means["clock_max"] or 1.0)
        if means["temperature"] < limits.temperature or ratio >= limits.clock:
            continue
        is_slowest = facts.timing.slowest_rank == rank.rank
        share = max(1 - ratio, share_of(facts, "straggler", limits) if is_slowest else 0.0)
        text = f"{count(means['temperature'])} °C, {count(means['clock'])} of "
        text += f"{count(means['clock_max'])} MHz on average"
        fields = {**_names(rank), "node": rank.node or "", "clock": percent(ratio, 0)}
        found = finding("thermal-throttling", [_evidence(rank, text)], **fields)
        yield share, dataclasses.replace(found, rank=rank.rank, node=rank.node)


def sockets(facts: SlowFacts, limits: Thresholds) -> Reasons:
    """NCCL over TCP between nodes, if that costs something."""
    share = share_of(facts, "comm", limits)
    using = [
        each for each in facts.nccl if "NET/Socket" in each.text or "network Socket" in each.text
    ]
    if not using or facts.num_nodes < 2 or share < limits.comm / 2:
        return
    disabled = [each for each in facts.nccl if "NCCL_IB_DISABLE" in each.text]
    missing = [each for each in facts.nccl if "No device found" in each.text]
    lines = [*using[:2], *disabled[:1], *missing[:1]]
    situations = ("switched_off",) if disabled else ()
    found = finding("sockets-instead-of-infiniband", lines, situations, share=percent(share, 0))
    sure: Confidence = "high" if disabled else "low" if missing else "medium"
    yield share, dataclasses.replace(found, confidence=sure)


def communication(facts: SlowFacts, limits: Thresholds) -> Reasons:
    """Communication that takes long compared to the work between it."""
    share = share_of(facts, "comm", limits)
    if share < limits.comm:
        return
    samples = count(statistics.fmean(rank.step_samples for rank in facts.ranks))
    fields = {"share": percent(share, 0), "samples": samples}
    text = f"comm {_of_step(facts, share * facts.timing.step_seconds)}, {_window(facts)}"
    line = _evidence(facts.ranks[0], text)
    yield share, finding("communication-bound", [line], facts.situations, **fields)


def idle(facts: SlowFacts, limits: Thresholds) -> Reasons:
    """GPUs that have little to do although nothing else keeps them waiting."""
    seen = [rank for rank in facts.ranks if "utilization" in rank.means]
    if not seen:
        return
    worst = min(seen, key=lambda rank: rank.means["utilization"])
    busy = statistics.fmean(rank.means["utilization"] for rank in seen) / 100
    if busy >= limits.utilization / 100:
        return
    peak, total = worst.means.get("memory_peak", 0.0), worst.means.get("memory_total", 0.0)
    lowest = percent(worst.means["utilization"] / 100, 0)
    text = f"GPU utilisation {percent(busy, 0)} on average, {lowest} on the lowest rank"
    cause = "low-gpu-utilization"
    if total and peak < limits.memory * total:
        cause = "small-batch"
        text += f"; at most {percent(peak / total, 0)} of its memory was in use"
    lines = [_evidence(worst, text)]
    yield 1 - busy, finding(cause, lines, facts.situations, busy=percent(busy, 0))


def _evidence(shown: RankFacts, text: str) -> Evidence:
    """`shown`: the rank whose events prove it."""
    return Evidence(shown.events, shown.last_line, text)


def _names(rank: RankFacts) -> dict[str, str]:
    return {"rank": str(rank.rank), "rank_word": f"Rank {rank.rank}"}


def _one_of_several(facts: SlowFacts, rank: RankFacts) -> str:
    """The rank's node if there are others."""
    return rank.node or "" if facts.num_nodes > 1 else ""


def _sure(found: Finding, share: float, limit: float, to_blame: RankFacts | None) -> Finding:
    """The finding, the surer the further the share is above its limit, with the rank to blame."""
    sure: Confidence = "high" if share >= 2 * limit else "medium"
    if to_blame is None:
        return dataclasses.replace(found, confidence=sure)
    return dataclasses.replace(found, confidence=sure, rank=to_blame.rank, node=to_blame.node)


def _of_step(facts: SlowFacts, seconds: float) -> str:
    return f"{duration(seconds)} of a step of {duration(facts.timing.step_seconds)}"


def _window(facts: SlowFacts) -> str:
    return f"average of steps {facts.timing.first_step} to {facts.timing.last_step}"
