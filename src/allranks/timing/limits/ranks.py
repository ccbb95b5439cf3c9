"""What is said about ranks that spend much time exchanging data, or waiting for one of them."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from allranks.layout import place_in_words
from allranks.run import files
from allranks.run.record import RankRecord, samples_by_rank
from allranks.show.numbers import count, duration, percent, ratio
from allranks.timing.limits.facts import Facts, Reason, Said, hot
from allranks.timing.slow_rank import slow_rank_reason
from allranks.timing.steps import ENOUGH_STEPS, LEAST_PART, PIPELINE, SLOWER_IN
from allranks.timing.timeline import BACKWARD, FORWARD

HEAVY = 1.5  # times the forward pass of a light step
ALIKE = 0.8  # correlation of forward and backward passes: at least, if batches differ in length
SLOWER_CPU = 1.5  # times as long: less may be the CPU rather than the work
HEAVIER, ALIKE_FACTORS = 1.15, 1.3  # times the others' passes; how far two such factors may differ
OWN_PART = 0.3  # of how long the others wait for a rank: a part that explains this much is named
LOG_BYTES = 1 << 18  # of the beginning of a log, where NCCL names its network
NCCL_LINES = re.compile(
    r"NCCL INFO .*(?:Using network|NET/Socket|NET/IB|NCCL_IB_DISABLE|NCCL_NET\b|No device found)"
)


def communication(facts: Facts) -> Said:
    samples = statistics.fmean(samples_by_rank(facts.records).values() or [0.0])
    few = f", with {count(samples)} samples per rank" if samples else ""
    share = facts.share("communication")
    evidence = f"comm {facts.of_step(facts.seconds('communication'))}"
    if (sockets := sockets_words(facts)) is not None:
        why = f"exchanging data between nodes takes {share} of the time: {SOCKETS}"
        cause = "sockets-instead-of-infiniband"
        return Said(why=why, next=sockets, cause=cause, evidence=evidence)
    fix = "with model.no_sync(): on all but every 4th batch, a larger batch, or fewer ranks"
    exchanges = facts.found.timing.exchanges
    if facts.is_task:
        longest = max(exchanges, key=lambda name: exchanges[name], default="")
        fix = less_waiting(facts, longest)
    which = f" ({exchanges_in_words(exchanges)})" if exchanges else ""
    return Said(
        why=f"exchanging data between ranks takes {share} of the time{which}{few}",
        next=f"{fix}; allranks bench comm measures the network",
        cause="communication-bound",
        evidence=evidence,
    )


def exchanges_in_words(seconds: Mapping[str, float]) -> str:
    """How the waiting is divided among the longest exchanges."""
    whole = math.fsum(seconds.values()) or 1.0
    shown = [(name, took / whole) for name, took in seconds.items() if took >= LEAST_PART * whole]
    if len(shown) == 1:
        return shown[0][0]
    return ", ".join(f"{name} {percent(part, 0)}" for name, part in shown) + " of it"


def less_waiting(facts: Facts, exchange: str) -> str:
    """What makes a task wait less in this exchange: keys of its job file, or another layout."""
    start = facts.records[min(facts.records)].start
    pieces, size = int(start.get("accumulation") or 1), int(start.get("micro_batch_size") or 1)
    smaller = "or fewer ranks"
    if exchange == PIPELINE:
        smaller = "or a smaller pp"
        stages = len(start.get("stages") or ()) or 2
        bubble = (stages - 1) / (pieces + stages - 1)
        of_pipeline = facts.found.timing.exchanges[PIPELINE] / facts.found.step_seconds
        if of_pipeline > MORE_THAN_BUBBLE * bubble and pieces % (2 * stages) == 0:
            return f"pipeline.micro_batches={pieces // 2} (fewer messages), {smaller}"
        if of_pipeline <= MORE_THAN_BUBBLE * bubble and size > 1:
            less = "stages wait less for each other, but compute smaller micro-batches"
            return f"pipeline.micro_batches={2 * pieces} ({less}), {smaller}"
    elif exchange in ("all-gather", "reduce-scatter"):
        smaller = "or a smaller fsdp"
        if pieces > 1:
            return f"micro_batch_size={2 * size} (shards are exchanged for each), {smaller}"
    elif exchange == "tensor-parallel":
        return "a smaller tp" + (", inside a node" if len(facts.nodes) > 1 else "")
    return f"a larger batch_size (which changes the training), {smaller}"


SOCKETS = "NCCL uses sockets, not InfiniBand"
# Waiting that is longer than the bubble of a pipeline explains is for its messages.
MORE_THAN_BUBBLE = 1.5
LogLine = tuple[str, int, str]  # file, number, text


def sockets_words(facts: Facts) -> str | None:
    """What to do about NCCL over TCP between nodes; None if its log does not show that."""
    if len(facts.nodes) < 2:
        return None
    lines = nccl_lines(facts.run.log(facts.attempt, rank) for rank in facts.records)
    texts = [text for *_, text in lines]
    if not any("NET/Socket" in text or "network Socket" in text for text in texts):
        return None
    if any("NCCL_IB_DISABLE" in text for text in texts):
        return "unset NCCL_IB_DISABLE"
    return "allranks doctor on the nodes checks InfiniBand"


def nccl_lines(logs: Iterable[Path]) -> tuple[LogLine, ...]:
    """What NCCL prints about its network, from the first log that has any of it."""
    for log in logs:
        with suppress(OSError):
            if found := _nccl_lines(log, min(LOG_BYTES, log.stat().st_size)):
                return found
    return ()


@lru_cache(maxsize=1024)  # the beginning of a log does not change
def _nccl_lines(log: Path, num_bytes: int) -> tuple[LogLine, ...]:
    with files.open_file(log) as file:
        text = file.read(num_bytes).decode(errors="replace")
    return tuple(
        (str(log), number, line.strip()[:400])
        for number, line in enumerate(text.splitlines(), start=1)
        if NCCL_LINES.search(line)
    )


def straggler(facts: Facts) -> Said:
    timing, share = facts.found.timing, facts.share("straggler")
    rank = timing.slowest_rank
    evidence = f"waiting {facts.of_step(facts.seconds('straggler'))}; {timing.slowest_words}"
    if (stage := heavy_stage(facts)) is not None:
        return Said(
            why=f"ranks wait {share} of the time for {stage[0]}, which takes "
            f"{ratio(stage[1])} as long as the others",
            next=OTHER_STAGES,
            cause="uneven-steps",
            evidence=evidence,
        )
    if rank is None or not has_culprit(facts):
        return taking_turns(facts, evidence)
    reason, node = slow_because(facts, rank), facts.node_of(rank)
    there = f" on {node}" if node else ""
    return Said(
        why=f"the others wait {share} of the time for {facts.named(rank)}{there}{reason.words}",
        next=reason.fix,
        cause=reason.cause,
        evidence=evidence,
        rank=rank,
        line=reason.line,
        doubt=reason.doubt,
    )


OTHER_STAGES = "another pp, which divides the blocks differently"


def heavy_stage(facts: Facts) -> tuple[str, float] | None:
    """The stage whose ranks all compute longer than all others, and how many times as long.

    Of stages with one rank each, it may be the rank that is slow.
    """
    stages = {
        stage: [sum(mean_pass(facts, rank, phase) for phase in (FORWARD, BACKWARD)) for rank in of]
        for stage, of in ranks_of_stages(facts).items()
        if len(of) > 1
    }
    if len(stages) < 2:
        return None
    longest = max(stages, key=lambda stage: min(stages[stage]))
    others = max(max(each) for stage, each in stages.items() if stage != longest)
    factor = min(stages[longest]) / others if others else 0.0
    return (longest, factor) if factor >= HEAVIER else None


def ranks_of_stages(facts: Facts) -> dict[str, list[int]]:
    """The ranks of each stage; empty if it is no pipeline."""
    stages: dict[str, list[int]] = {}
    for rank, record in facts.records.items() if PIPELINE in facts.found.timing.exchanges else ():
        stage = place_in_words(record.start.get("layout"), [rank]).partition(",")[0]
        stages.setdefault(stage, []).append(rank)
    return stages


def mean_pass(facts: Facts, rank: int, phase: str) -> float:
    """Seconds of a rank's forward or backward pass in its measured steps."""
    steps = facts.records[rank].timed_steps
    first = facts.found.timing.first_step
    return statistics.fmean(steps[n][phase] for n in steps if n >= first)


def has_culprit(facts: Facts) -> bool:
    """Whether the others wait for the same rank in most steps."""
    timing = facts.found.timing
    return timing.slowest_rank is not None and timing.slowest_share >= facts.limits.slowest


def is_jitter(facts: Facts) -> bool:
    """Whether ranks take turns at being last, and their batches do not explain it."""
    return not has_culprit(facts) and uneven_lengths(facts) is None


def uneven_lengths(facts: Facts) -> tuple[float, float] | None:
    """Seconds of the forward pass in light and in heavy steps; None if not all ranks have both."""
    works = [uneven_work(record, facts) for record in facts.records.values()]
    known = [work for work in works if work is not None]
    if len(known) < len(works):
        return None
    least, most = (statistics.fmean(edge) for edge in zip(*known, strict=True))
    return least, most


def taking_turns(facts: Facts, evidence: str) -> Said:
    """What is said about ranks that wait for whichever of them is slowest in a step."""
    share = facts.share("straggler")
    if (lengths := uneven_lengths(facts)) is not None:
        least, most = map(duration, lengths)
        return Said(
            why=f"ranks wait {share} of the time for the longest batch: batches differ in length",
            next="bucket by length: in each step, give all ranks samples of similar length",
            cause="uneven-lengths",
            evidence=f"{evidence}; a forward pass takes {least} to {most}, and a backward pass "
            "grows with it",
        )
    fix = "look for other processes on the nodes (top, nvidia-smi)"
    is_crowded = facts.crowding is not None
    return Said(
        why=f"ranks wait {share} of the time for whichever is slowest"
        + (f": {facts.crowding}" if is_crowded else ""),
        next=f"fewer ranks or threads, or {fix}"
        if is_crowded
        else f"group samples by length if lengths differ; otherwise {fix}",
        cause="uneven-steps",
        evidence=evidence,
        doubt="no single rank or batch is behind it",
    )


def slow_because(facts: Facts, rank: int) -> Reason:
    """Why a rank is slow, by the first reason that applies: its samples, machine, or own code."""
    samples = samples_by_rank(facts.records)
    average = statistics.fmean(samples.values() or [0.0])
    if average and samples[rank] >= facts.limits.balance * average:
        more = percent(samples[rank] / average - 1, 0)
        fix = "give every rank the same number of samples: DistributedSampler"
        words = f": it has {more} more samples than average"
        return Reason(words=words, cause="unbalanced-data", fix=fix)
    return hot(facts, rank) or on_its_machine(facts, rank) or own_code(facts, rank)


def on_its_machine(facts: Facts, rank: int) -> Reason | None:
    """What is different about the rank's GPU and CPUs."""
    reason, node = slow_rank_reason(facts.records, rank), facts.node_of(rank)
    if reason is None:
        return None
    cause = "thermal-throttling" if reason.kind == "temperature" else "slow-rank"
    fix = reason.fix + (f"; until then #SBATCH --exclude={node}" if node else "")
    return Reason(words=f": {reason.text}", cause=cause, fix=fix)


def own_code(facts: Facts, rank: int) -> Reason:
    """What takes a slow rank longer than the others, and at which line if it is Python code."""
    timing, traced, typical = facts.found.timing, facts.found.traced, facts.found.typical
    part = timing.slowest_part or ""
    where = f": it is slower in {SLOWER_IN.get(part, part)}" if part else ""
    if (factor := heavier(facts, rank)) is not None:
        where = f": its forward and backward passes take {ratio(factor)} as long as the others'"
    fix = "look for other processes there (top, nvidia-smi), and for code that only this rank runs"
    mine = traced.get(rank)
    if mine is not None and typical is not None and typical is not mine:
        others = dict(typical.lines)
        lines = [(took - others.get(at, 0.0), at) for at, took in mine.lines]
        longer = mine.parts["host"] - typical.parts["host"]
        if lines and longer >= OWN_PART * timing.late_seconds:
            line = max(lines)[1]
            fix = f"look at {line}, where this rank spends more time than the others"
            words = f": it takes longer at {line}"
            return Reason(words=words, cause="slow-rank", fix=fix, line=line)
    if factor is not None and [rank] in ranks_of_stages(facts).values():
        where = f": its stage takes {ratio(factor)} as long as the others'"
        fix = f"{OTHER_STAGES}, if these are the reason; otherwise {fix}"
    elif factor is not None:
        fix = f"compare the lengths of its samples with the others'; otherwise {fix}"
    # A CPU may be slower for a while: it shares caches, memory and its host with others.
    is_chance = factor is not None and factor < SLOWER_CPU and not facts.found.is_gpu
    doubt = "a CPU may be this much slower for a while" if is_chance else None
    return Reason(words=where, cause="slow-rank", fix=fix, doubt=doubt)


def heavier(facts: Facts, rank: int) -> float | None:
    """How many times as long a rank's passes take as those of the middle rank.

    None unless both passes take longer, by similar factors.
    """
    middle = facts.found.timing.middle_rank
    factors = []
    for phase in (FORWARD, BACKWARD):
        others = mean_pass(facts, rank if middle is None else middle, phase)
        factors.append(mean_pass(facts, rank, phase) / others if others else 0.0)
    is_alike = max(factors) <= ALIKE_FACTORS * min(factors)
    return statistics.fmean(factors) if min(factors) >= HEAVIER and is_alike else None


def uneven_work(record: RankRecord, facts: Facts) -> tuple[float, float] | None:
    """Seconds of the forward pass in light and in heavy steps; None if all are alike.

    A heavy batch has a longer backward pass, too; other processes on the node do not cause that.
    """
    first = facts.found.timing.first_step
    steps = [event for number, event in record.timed_steps.items() if number >= first]
    parts = [(one[FORWARD], one[BACKWARD]) for one in steps if FORWARD in one and BACKWARD in one]
    forward, backward = zip(*parts, strict=True) if len(parts) >= ENOUGH_STEPS else ((), ())
    if len({*forward}) < 2 or len({*backward}) < 2:
        return None
    least, *_, most = statistics.quantiles(forward, n=10)
    is_work = statistics.correlation(forward, backward) >= ALIKE
    return (least, most) if is_work and most >= HEAVY * least else None
