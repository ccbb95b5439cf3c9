"""Why a run is slower than its machine could be, and what share of a step each reason costs.

The most expensive findings come first. What is below its threshold is not reported: every run has a
little of everything.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from allranks.doctor.finding import Confidence, Evidence, Finding
from allranks.doctor.slow_facts import RankFacts, SlowFacts
from allranks.errors import AllranksError


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """From which value on something is reported. Shares are of a step's time."""

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


def slow(facts: SlowFacts, limits: Thresholds | None = None) -> list[Finding]:
    """The reasons, the most expensive first; empty for a run that is as fast as it can be."""
    limits = limits or Thresholds()
    if facts.timing.seconds < limits.least_seconds:
        return []
    rules = (waiting_for_data, unbalanced, slow_rank, throttled, sockets, talking, idle)
    found: list[tuple[float, Finding]] = []
    for rule in rules:
        found += rule(facts, limits)
    causes = {finding.cause for _, finding in found}
    # The general word only where no particular one was found.
    general = {"low-gpu-utilization", "communication-bound"}
    if causes - general:
        found = [each for each in found if each[1].cause not in general]
    found.sort(key=lambda each: -each[0])
    return [finding for _, finding in found]


def share_of(facts: SlowFacts, part: str, limits: Thresholds) -> float:
    """A part's share of the step; 0 where it was not measured, or is too short to matter."""
    parts, whole = facts.timing.parts, facts.timing.step_seconds
    if not parts or not whole or parts[part] * 1e3 < limits.least_ms:
        return 0.0
    return parts[part] / whole


def waiting_for_data(facts: SlowFacts, limits: Thresholds) -> Iterator[tuple[float, Finding]]:
    share = share_of(facts, "data", limits)
    if share < limits.data:
        return
    waits = {rank.rank: rank.data_seconds for rank in facts.ranks}
    worst = max(waits, key=lambda rank: waits[rank])
    usual = statistics.median(waits.values())
    # One rank is to blame only if it waits much longer than the others.
    is_one = len(waits) > 1 and waits[worst] > 2 * min(waits.values()) + limits.least_ms / 1e3
    culprit = facts.of(worst)
    cause, why, fix = _loader(facts, culprit, limits)
    whose = f"rank {worst} waits for its data" if is_one else "ranks wait for their data"
    title = f"{whose} {share:.0%} of each step{why}"
    text = (
        f"data {waits[worst] * 1e3:.1f} ms of a step of {facts.timing.step_seconds * 1e3:.1f} ms"
        f" (median rank {usual * 1e3:.1f} ms), {_window(facts)}"
    )
    blamed, sure = culprit if is_one else None, _sure(share, limits.data)
    yield share, _finding(cause, title, fix, blamed, sure, text, shown=culprit)


def _loader(facts: SlowFacts, rank: RankFacts, limits: Thresholds) -> tuple[str, str, str]:
    """What the loader's workers have to do with it: cause, words for the title, fix."""
    workers, means = rank.num_workers, rank.means
    per_node = max(1, len(facts.ranks) // facts.num_nodes)
    cpus = facts.cpus_allotted
    key = "data.num_workers=" if facts.is_task else "DataLoader(…, num_workers="
    end = "" if facts.is_task else ", prefetch_factor=4, persistent_workers=True)"
    fair = max(2, (cpus or 4 * per_node) // per_node - 1)
    if workers == 0:
        few = ": there are no loader workers, so batches are made between the steps"
        return "too-few-workers", few, f"{key}{fair}{end}"
    if workers and cpus and workers * per_node > 2 * cpus:
        many = f": {workers * per_node} loader workers share {cpus} CPUs"
        return "too-many-workers", many, f"{key}{fair}{end}, or more CPUs per rank"
    busy = means.get("workers_cpu", 0.0) / workers if workers else 0.0
    if workers and busy >= limits.busy:
        few = f": its {workers} loader workers are busy {busy:.0%} of the time"
        more = f"{key}{max(fair, workers + 1)}{end}; allranks bench data finds how many are needed"
        return "too-few-workers", few, more
    stage = "data.stage=local" if facts.is_task else "stage: [PATH] and {stage} in the command"
    known = f"; its {workers} loader workers are waiting too" if workers else ""
    return "data-bound", known, f"keep the data on the node's own disk ({stage}), or {key}…{end}"


def unbalanced(facts: SlowFacts, limits: Thresholds) -> Iterator[tuple[float, Finding]]:
    """A rank with more samples than the others, which wait for it."""
    share = share_of(facts, "straggler", limits)
    counts = {rank.rank: rank.step_samples for rank in facts.ranks}
    mean = statistics.fmean(counts.values())
    if share < limits.straggler or not mean:
        return
    most = max(counts, key=lambda rank: counts[rank])
    if counts[most] < limits.balance * mean:
        return
    title = f"rank {most} has {counts[most] / mean - 1:.0%} more samples per step than average"
    title += f": the others wait {share:.0%} of each step"
    text = f"samples per step: {', '.join(f'{count:.0f}' for count in counts.values())}"
    fix = "give every rank the same number: DistributedSampler, or a sampler that splits evenly"
    sure = _sure(share, limits.straggler)
    yield share, _finding("unbalanced-data", title, fix, facts.of(most), sure, text)


def slow_rank(facts: SlowFacts, limits: Thresholds) -> Iterator[tuple[float, Finding]]:
    """A rank that the others wait for, though it has no more to do."""
    share, timing = share_of(facts, "straggler", limits), facts.timing
    if share < limits.straggler:
        return
    if next(unbalanced(facts, limits), None) or next(throttled(facts, limits), None):
        return
    text = (
        f"waiting for slower ranks takes {share:.0%} of a step of "
        f"{timing.step_seconds * 1e3:.1f} ms; "
    )
    slowest = timing.slowest_rank
    culprit = facts.of(slowest) if slowest is not None else facts.ranks[0]
    last = f"rank {slowest} comes last in {timing.slowest_share:.0%} of the steps"
    text += (last if slowest is not None else "no rank is slower than the others") + ", "
    text += _window(facts)
    if slowest is None or timing.slowest_share < limits.slowest:
        title = f"ranks wait {share:.0%} of each step for whichever is slowest"
        fix = "group samples by length if it differs; otherwise look for other work on the nodes"
        yield share, _finding("uneven-steps", title, fix, None, "medium", text, shown=culprit)
        return
    where = f" on {culprit.node}" if culprit.node and facts.num_nodes > 1 else ""
    part = f", in {timing.slowest_part}" if timing.slowest_part else ""
    title = f"rank {culprit.rank}{where} is slower{part}: the others wait {share:.0%} of each step"
    fix = "look for other work there (top, nvidia-smi), and for code that only this rank runs"
    if facts.num_nodes > 1:
        fix += f"; if it stays slow, #SBATCH --exclude={culprit.node}"
    sure = _sure(share, limits.straggler)
    yield share, _finding("slow-rank", title, fix, culprit, sure, text)


def throttled(facts: SlowFacts, limits: Thresholds) -> Iterator[tuple[float, Finding]]:
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
        title = f"the GPU of rank {rank.rank} is hot and throttled to {ratio:.0%} of its clock"
        text = f"{means['temperature']:.0f} °C, {means['clock']:.0f} of "
        text += f"{means['clock_max']:.0f} MHz on average"
        fix = "tell the site that its cooling is not enough"
        fix += f"; until then #SBATCH --exclude={rank.node}" if rank.node else ""
        yield share, _finding("thermal-throttling", title, fix, rank, "medium", text)


def sockets(facts: SlowFacts, limits: Thresholds) -> Iterator[tuple[float, Finding]]:
    """NCCL over TCP between nodes, if that costs something."""
    share = share_of(facts, "comm", limits)
    using = [
        each for each in facts.nccl if "NET/Socket" in each.text or "network Socket" in each.text
    ]
    if not using or facts.num_nodes < 2 or share < limits.comm / 2:
        return
    disabled = [each for each in facts.nccl if "NCCL_IB_DISABLE" in each.text]
    missing = [each for each in facts.nccl if "No device found" in each.text]
    fix = "unset NCCL_IB_DISABLE" if disabled else "allranks doctor on the nodes checks InfiniBand"
    confidence: Confidence = "high" if disabled else "low" if missing else "medium"
    title = f"NCCL uses sockets, not InfiniBand: communication takes {share:.0%} of each step"
    found = Finding("sockets-instead-of-infiniband", title, fix, confidence=confidence)
    yield share, found.with_evidence(*using[:2], *disabled[:1], *missing[:1])


def talking(facts: SlowFacts, limits: Thresholds) -> Iterator[tuple[float, Finding]]:
    """Communication that takes long compared to the work between it."""
    share, timing = share_of(facts, "comm", limits), facts.timing
    if share < limits.comm:
        return
    samples = statistics.fmean(rank.step_samples for rank in facts.ranks)
    title = f"communication takes {share:.0%} of each step, with {samples:.0f} samples per rank"
    grow = "fewer ranks, or a larger batch_size" if facts.is_task else "fewer ranks, a larger batch"
    fix = f"{grow} (it changes the training), or a faster network: allranks bench comm"
    text = f"comm {1e3 * (timing.parts or {})['comm']:.1f} ms of a step of "
    text += f"{timing.step_seconds * 1e3:.1f} ms, {_window(facts)}"
    yield (
        share,
        _finding("communication-bound", title, fix, None, "medium", text, shown=facts.ranks[0]),
    )


def idle(facts: SlowFacts, limits: Thresholds) -> Iterator[tuple[float, Finding]]:
    """GPUs that have little to do although nothing else keeps them waiting."""
    seen = [rank for rank in facts.ranks if "utilization" in rank.means]
    if not seen:
        return
    worst = min(seen, key=lambda rank: rank.means["utilization"])
    percent = statistics.fmean(rank.means["utilization"] for rank in seen)
    if percent >= limits.utilization:
        return
    peak, total = worst.means.get("memory_peak", 0.0), worst.means.get("memory_total", 0.0)
    lowest = worst.means["utilization"]
    text = f"GPU utilisation {percent:.0f}% on average, {lowest:.0f}% on the lowest rank"
    share = 1 - percent / 100
    if total and peak < limits.memory * total:
        text += f"; at most {peak / total:.0%} of its memory was in use"
        title = f"the GPUs are busy {percent:.0f}% of the time: larger batches would fit"
        fix = "a larger micro_batch_size (the batch stays, accumulation shrinks), and compile: true"
        if not facts.is_task:
            fix = "a larger batch per rank (with less accumulation the total stays), torch.compile"
        yield share, _finding("small-batch", title, fix, None, "low", text, shown=worst)
        return
    title = f"the GPUs are busy {percent:.0f}% of the time"
    fix = "allranks run --profile 10 JOB.yaml shows what they wait for"
    yield share, _finding("low-gpu-utilization", title, fix, None, "low", text, shown=worst)


def _finding(
    cause: str,
    title: str,
    fix: str,
    culprit: RankFacts | None,
    confidence: Confidence,
    text: str,
    *,
    shown: RankFacts | None = None,
) -> Finding:
    """`shown`: whose events prove it, if no rank is to blame."""
    source = culprit or shown
    evidence = (Evidence(source.events, source.last_line, text),) if source else ()
    return Finding(
        cause,
        title,
        fix,
        rank=culprit.rank if culprit else None,
        node=culprit.node if culprit else None,
        confidence=confidence,
        evidence=evidence,
    )


def _sure(share: float, limit: float) -> Confidence:
    return "high" if share >= 2 * limit else "medium"


def _window(facts: SlowFacts) -> str:
    return f"average of steps {facts.timing.first_step} to {facts.timing.last_step}"
