"""What is said of each limit: why, by which numbers, on which rank and line, and what to type."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.run import files
from allranks.run.folder import RunDir
from allranks.run.record import RankRecord
from allranks.show.numbers import count, duration, percent, ratio, size
from allranks.timing.shares import Measured
from allranks.timing.slow_rank import slow_rank_reason
from allranks.timing.steps import ENOUGH_STEPS, SLOWER_IN
from allranks.timing.timeline import BACKWARD, FORWARD

if TYPE_CHECKING:
    from allranks.timing.verdict import Thresholds

ONE_RANK = 0.05  # of a step: by how much one rank alone waits longer for data than twice the others
HEAVY = 1.5  # times a light step's forward pass
ALIKE = 0.8  # how closely forward and backward passes grow together
ALL_CPUS = 0.9  # of a machine's: above this, none is left for more workers
MOST_CPU_WAIT = 20.0  # percent of the time: more, and other work decides what is slow
HEAVIER, ALIKE_FACTORS = 1.15, 1.3  # times the others' passes, and how far two such factors differ
BURST = 0.8  # of the time for data: more in a few steps are workers that start
LOG_BYTES = 1 << 18  # of the beginning of a log, where NCCL names its network
NCCL_LINES = re.compile(
    r"NCCL INFO .*(?:Using network|NET/Socket|NET/IB|NCCL_IB_DISABLE|NCCL_NET\b|No device found)"
)
OWN_PART = 0.3  # of what others wait for a rank: a part of its time that explains as much is named


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The texts of a verdict."""

    why: str
    next: str | None
    cause: str | None
    evidence: str = ""
    rank: int | None = None
    line: str | None = None
    is_sure: bool = True


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the texts are made of."""

    run: RunDir
    attempt: int
    records: Mapping[int, RankRecord]
    found: Measured
    limits: Thresholds

    @cached_property
    def info(self) -> Mapping[str, Any]:
        return self.run.info()

    @cached_property
    def is_task(self) -> bool:
        """Of allranks: the job file has the settings."""
        return any(record.counts_on for record in self.records.values())

    @property
    def cpus(self) -> int | None:
        """Of the machine that started the run."""
        return (self.info.get("hardware") or {}).get("cpus_allotted")

    @property
    def is_alone(self) -> bool:
        return len(self.records) == 1

    @cached_property
    def nodes(self) -> dict[Any, list[int]]:
        """The ranks of each node."""
        found: dict[Any, list[int]] = {}
        for rank, record in sorted(self.records.items()):
            found.setdefault(record.start.get("host"), []).append(rank)
        return found

    @property
    def per_node(self) -> int:
        return max(map(len, self.nodes.values()))

    def node_of(self, rank: int) -> str | None:
        """The rank's node if there are others."""
        host = self.records[rank].start.get("host")
        return host if len(self.nodes) > 1 else None

    @property
    def is_calm(self) -> bool:
        """Whether every thread that computes has a CPU of its own, as far as is known."""
        waits = [one.mean("cpu_wait", of=one.devices) or 0.0 for one in self.records.values()]
        if max(waits) > MOST_CPU_WAIT:
            return False
        if self.cpus is None or self.found.is_gpu:
            return True
        threads = [threads_of(record) for record in self.records.values()]
        return self.per_node * max(1, *threads) <= self.cpus

    def share(self, part: str) -> str:
        return percent(self.found.shares[part], 0)

    def of_step(self, seconds: float) -> str:
        timing = self.found.timing
        return (
            f"{duration(seconds)} of {duration(self.found.step_seconds)} a step, "
            f"average of {timing.window}"
        )

    def seconds(self, part: str) -> float:
        return self.found.shares[part] * self.found.step_seconds


def facts_of(
    run: RunDir,
    attempt: int,
    records: Mapping[int, RankRecord],
    found: Measured,
    limits: Thresholds,
) -> Facts:
    return Facts(run=run, attempt=attempt, records=records, found=found, limits=limits)


def said_of(limit: str, facts: Facts) -> Said:
    return SAYING[limit](facts)


def threads_of(record: RankRecord) -> int:
    """Of torch in a rank, if it says so."""
    said = [one["threads"] for one in record.others["recorder"] if "threads" in one]
    return int(record.start.get("threads") or (said[-1] if said else 1))


# --- The device ----------------------------------------------------------------------------------


def compute(facts: Facts) -> Said:
    found, device = facts.found, "the GPU" if facts.found.is_gpu else "torch"
    if found.typical is not None:
        busy = found.shares["compute"] + found.shares["copies"] * found.is_gpu
        why = f"{device} computes {percent(busy, 0)} of the time, and nothing else takes much"
    elif found.utilization is not None:
        why = f"the GPU is in use {percent(found.utilization, 0)} of the time, by NVML"
    else:
        why = f"{facts.share('compute')} of the time is spent in forward, backward and update"
    evidence = facts.of_step(facts.seconds("compute"))
    if throttled := {rank: one for rank in facts.records if (one := hot(facts, rank))}:
        rank, reason = next(iter(throttled.items()))
        of = "" if facts.is_alone else f" of rank {rank}"
        return Said(
            why=f"{why}, but the GPU{of} is slow{reason.words.replace(' its GPU', ' it')}",
            next=reason.fix,
            cause=reason.cause,
            evidence=evidence,
            rank=None if facts.is_alone else rank,
        )
    what = "JOB.yaml" if facts.is_task else "-- python …"
    more = f"allranks bench scaling {what} measures what more ranks would gain"
    return Said(why=why, next=more if facts.is_alone else None, cause=None, evidence=evidence)


def launches(facts: Facts) -> Said:
    found, traced = facts.found, facts.found.typical
    evidence = facts.of_step(facts.seconds("launches"))
    if traced is None:
        return idle(facts)
    per = f"; {count(traced.kernels)} kernels a step" if traced.kernels else ""
    return Said(
        why=f"the GPU is idle {facts.share('launches')} of the time: its kernels are shorter than "
        "their launch",
        next=larger_kernels(facts),
        cause="launch-bound",
        evidence=f"launches {evidence}{per}",
        is_sure=found.has_trace,
    )


def larger_kernels(facts: Facts) -> str:
    if not facts.is_task:
        return "model = torch.compile(model), a CUDA graph, or a larger batch"
    if facts.records[min(facts.records)].start.get("compile"):
        return "a larger micro_batch_size"
    return "compile: true in the job file, or a larger micro_batch_size"


def idle(facts: Facts) -> Said:
    """A GPU that is often idle, by NVML alone."""
    found, means = facts.found, [device_means(one) for one in facts.records.values()]
    totals = [one["memory_peak"] / one["memory_total"] for one in means if one.get("memory_total")]
    is_small = bool(totals) and max(totals) < facts.limits.memory
    busy = percent(found.utilization, 0)
    used = f"; at most {percent(max(totals), 0)} of its memory was in use" if totals else ""
    fix = larger_kernels(facts) if is_small else "allranks run --profile 10 shows what it waits for"
    why = f" ({found.problem})" if found.problem else ""
    return Said(
        why=f"the GPU is in use only {busy} of the time, by NVML; there is no trace{why}",
        next=fix,
        cause="small-batch" if is_small else "low-gpu-utilization",
        evidence=f"GPU utilisation {busy} on average{used}",
        is_sure=False,
    )


def host(facts: Facts) -> Said:
    traced = facts.found.typical
    if traced is None and facts.found.is_gpu:
        return idle(facts)
    line = traced.line if traced else None
    evidence = facts.of_step(facts.seconds("host"))
    share = facts.share("host")
    if facts.found.is_gpu:
        why = f"the GPU is idle {share} of the time while Python does something else"
    else:
        why = f"{share} of the time is spent outside torch"
    fix = "move it out of the training loop, do it less often, or in another process"
    if line is not None and traced is not None:
        part = traced.lines[0][1] / max(traced.parts["host"], 1e-9)
        mostly = "most of it" if part > 0.5 else f"{percent(min(1.0, part), 0)} of it"
        why += f", {mostly} at {line}"
        evidence += f"; {', '.join(f'{at} {duration(took)}' for at, took in traced.lines[:3])}"
        fix = f"look at {line}: {fix}"
        if facts.found.is_gpu:
            fix += ", and leave out what waits for the GPU (.item(), .cpu(), print of a tensor)"
    elif traced is None:
        fix = "allranks run --profile 10 shows what the loop does there"
    return Said(why=why, next=fix, cause="host-bound", evidence=f"host {evidence}", line=line)


def copies(facts: Facts) -> Said:
    traced = facts.found.typical
    pageable = traced.pageable if traced else 0.0
    copied = traced.copied if traced else 0.0
    is_pageable = pageable > copied / 2
    moved = f"; {size(copied)} a step, {size(pageable)} of it from or to pageable memory"
    loader = loader_of(facts, min(facts.records))
    if is_pageable and not (loader or {}).get("pin_memory"):
        fix = "DataLoader(..., pin_memory=True) and batch.to(device, non_blocking=True)"
    elif is_pageable:
        fix = "tensor.pin_memory() before .to(device, non_blocking=True)"
    else:
        fix = "batch.to(device, non_blocking=True) one step ahead, and keep on the GPU what stays"
    return Said(
        why=f"copying to and from the GPU takes {facts.share('copies')} of the time"
        + (", from pageable memory" if is_pageable else ", while nothing is computed"),
        next=fix,
        cause="copy-bound",
        evidence=f"copies {facts.of_step(facts.seconds('copies'))}{moved if copied else ''}",
    )


# --- Data ----------------------------------------------------------------------------------------


def data(facts: Facts) -> Said:
    seconds = facts.found.timing.data_seconds
    worst = max(seconds, key=lambda rank: seconds[rank])
    others = [took for rank, took in seconds.items() if rank != worst]
    # One rank is to blame only if it waits much longer than every other.
    least = ONE_RANK * facts.found.timing.step_seconds
    is_one = bool(others) and seconds[worst] > 2 * max(others) + least
    who = "it waits for its loader" if facts.is_alone else "ranks wait for their loaders"
    who = f"rank {worst} waits for its loader" if is_one else who
    because, cause, fix = loader_words(facts, worst, is_one=is_one)
    beside = f" on rank {worst}, at most {duration(max(others))} on others" if others else ""
    return Said(
        why=f"{who} {facts.share('data')} of the time ({because})",
        next=fix,
        cause=cause,
        evidence=f"data {duration(seconds[worst])}{beside}, {facts.of_step(facts.seconds('data'))}",
        rank=worst if is_one else None,
    )


def loader_of(facts: Facts, rank: int) -> Mapping[str, Any] | None:
    """What the training loader of a script is set to."""
    said = facts.records[rank].others["loader"]
    return said[-1] if said else None


def workers_of(facts: Facts, rank: int) -> int | None:
    record = facts.records[rank]
    loader = loader_of(facts, rank) or record.start
    if loader.get("num_workers") is not None:
        return int(loader["num_workers"])
    seen = [int(one["num_workers"]) for one in record.devices if "num_workers" in one]
    return round(statistics.median(seen)) if seen else None


def loader_words(facts: Facts, rank: int, *, is_one: bool) -> tuple[str, str, str]:
    """Why a loader is slow, under which cause, and what to type."""
    workers, cpus, per_node = workers_of(facts, rank), facts.cpus, facts.per_node
    loader = loader_of(facts, rank) or {}
    fair = max(2, (cpus or 4 * per_node) // per_node - 1)
    node = facts.node_of(rank)
    if workers == 0:
        few = "too-few-workers" if not is_one else "data-bound"
        return "no workers", few, more_workers(facts, fair, persistent_workers=True)
    if workers is None:
        return "how many workers it has is not known", "data-bound", staging(facts)
    if cpus and workers * per_node > 2 * cpus:
        many = f"{workers * per_node} workers share {cpus} CPUs"
        return many, "too-many-workers", more_workers(facts, fair)
    if loader.get("persistent_workers") is False and facts.found.burst > BURST:
        again = f"its {count(workers, 'worker')} start anew in every epoch"
        return again, "data-bound", "DataLoader(..., persistent_workers=True)"
    if is_one:
        there = f" of {node}" if node else ""
        fix = f"look at the disk and the CPUs{there} (iostat -x 1, top), and at the files it reads"
        return "the others hardly wait: its disk, CPUs or data differ", "data-bound", fix
    means = device_means(facts.records[rank])
    busy = means.get("workers_cpu", 0.0) / workers
    if busy < facts.limits.busy:
        known = f"its {count(workers, 'worker')} {'is' if workers == 1 else 'are'} waiting, too"
        return known, "data-bound", staging(facts)
    known = f"its {count(workers, 'worker')} {'is' if workers == 1 else 'are'} always busy"
    if cpus and in_use(facts) > ALL_CPUS * cpus:
        fix = "more CPUs per rank, or samples that take less to make (allranks bench data)"
        return f"{known}, and so are all {cpus} CPUs", "too-few-workers", fix
    return known, "too-few-workers", more_workers(facts, max(fair, workers + 1))


def more_workers(facts: Facts, workers: int, **settings: Any) -> str:
    if facts.is_task:
        return f"data.num_workers={workers}; allranks bench data finds how many are needed"
    more = "".join(f", {name}={value}" for name, value in settings.items())
    return f"DataLoader(..., num_workers={workers}{more})"


def staging(facts: Facts) -> str:
    if facts.is_task:
        return "data.stage=local keeps the data on the node's own disk; or data.num_workers=…"
    return "stage: in the job file keeps the data on the node's own disk; allranks bench data"


def in_use(facts: Facts) -> float:
    """CPUs that the ranks of a node and their workers use."""
    means = [device_means(one) for one in facts.records.values()]
    each = [one.get("cpu", 0.0) + one.get("workers_cpu", 0.0) for one in means]
    return sum(each) / max(1, len(facts.nodes))


def device_means(record: RankRecord) -> dict[str, float]:
    """Means over a rank's `device` events; without those that they lack."""
    names = (
        *("cpu", "workers_cpu", "utilization", "temperature", "clock", "clock_max"),
        *("memory_peak", "memory_total", "power", "power_limit"),
    )
    found = {name: record.mean(name, of=record.devices) for name in names}
    return {name: mean for name, mean in found.items() if mean is not None}


# --- Other ranks ---------------------------------------------------------------------------------


def communication(facts: Facts) -> Said:
    steps = [record.mean("samples") for record in facts.records.values()]
    samples = statistics.fmean(each or 0.0 for each in steps)
    few = f", with {count(samples)} samples per rank" if samples else ""
    share = facts.share("communication")
    evidence = f"comm {facts.of_step(facts.seconds('communication'))}"
    if (sockets := sockets_words(facts)) is not None:
        why = f"exchanging data between nodes takes {share} of the time: {SOCKETS}"
        cause = "sockets-instead-of-infiniband"
        return Said(why=why, next=sockets, cause=cause, evidence=evidence)
    fix = "with model.no_sync(): on all but every 4th batch, a larger batch, or fewer ranks"
    if facts.is_task:
        fix = "a larger batch_size (which changes the training), or fewer ranks"
    return Said(
        why=f"exchanging data between ranks takes {share} of the time{few}",
        next=f"{fix}; allranks bench comm measures the network",
        cause="communication-bound",
        evidence=evidence,
    )


SOCKETS = "NCCL uses sockets, not InfiniBand"
LogLine = tuple[str, int, str]  # file, number, text


def sockets_words(facts: Facts) -> str | None:
    """What to do about NCCL over TCP between nodes; None where that is not seen."""
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
    if rank is None or timing.slowest_share < facts.limits.slowest:
        return taking_turns(facts, evidence)
    reason, node = slow_because(facts, rank), facts.node_of(rank)
    there = f" on {node}" if node else ""
    return Said(
        why=f"the others wait for rank {rank}{there} {share} of the time{reason.words}",
        next=reason.fix,
        cause=reason.cause,
        evidence=evidence,
        rank=rank,
        line=reason.line,
    )


def taking_turns(facts: Facts, evidence: str) -> Said:
    """Ranks that wait for whichever is the slowest in a step."""
    share = facts.share("straggler")
    works = [uneven_work(record, facts) for record in facts.records.values()]
    known = [work for work in works if work is not None]
    if len(known) == len(works):
        least, most = (duration(statistics.fmean(edge)) for edge in zip(*known, strict=True))
        return Said(
            why=f"ranks wait {share} of the time for the longest batch: batches differ in length",
            next="bucket by length: in each step, give all ranks samples of similar length",
            cause="uneven-lengths",
            evidence=f"{evidence}; a forward pass takes {least} to {most}, and a backward pass "
            "grows with it",
        )
    return Said(
        why=f"ranks wait {share} of the time for whichever is slowest",
        next="group samples by length if lengths differ; otherwise look for other work on the "
        "nodes (top, nvidia-smi)",
        cause="uneven-steps",
        evidence=evidence,
        is_sure=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why one rank is slower than the others."""

    words: str  # what follows "the others wait for rank 1 57% of the time"
    cause: str
    fix: str
    line: str | None = None


def slow_because(facts: Facts, rank: int) -> Reason:
    """The first reason that explains it: its work, its GPU, its own code."""
    samples = {one: record.mean("samples") or 0.0 for one, record in facts.records.items()}
    average = statistics.fmean(samples.values())
    if average and samples[rank] >= facts.limits.balance * average:
        more = percent(samples[rank] / average - 1, 0)
        fix = "give every rank the same number of samples: DistributedSampler"
        words = f": it has {more} more samples than average"
        return Reason(words=words, cause="unbalanced-data", fix=fix)
    return hot(facts, rank) or on_its_machine(facts, rank) or own_code(facts, rank)


def hot(facts: Facts, rank: int) -> Reason | None:
    """A GPU that is hot and runs below its full clock rate."""
    means, node = device_means(facts.records[rank]), facts.node_of(rank)
    clock = means.get("clock", 1.0) / (means.get("clock_max") or 1.0)
    if means.get("temperature", 0.0) < facts.limits.temperature or clock >= facts.limits.clock:
        return None
    at = f"{count(means['temperature'])} °C, at {percent(clock, 0)} of its clock"
    fix = "tell the site that its cooling is insufficient"
    fix += f"; until then #SBATCH --exclude={node}" if node else ""
    return Reason(words=f": its GPU is hot ({at})", cause="thermal-throttling", fix=fix)


def on_its_machine(facts: Facts, rank: int) -> Reason | None:
    """What is different about the rank's GPU and CPUs."""
    reason, node = slow_rank_reason(facts.records, rank), facts.node_of(rank)
    if reason is None:
        return None
    cause = "thermal-throttling" if reason.kind == "temperature" else "slow-rank"
    fix = reason.fix + (f"; until then #SBATCH --exclude={node}" if node else "")
    return Reason(words=f": {reason.text}", cause=cause, fix=fix)


def own_code(facts: Facts, rank: int) -> Reason:
    """What a slow rank does longer than the others, and the line if it is the host's."""
    timing, traced, typical = facts.found.timing, facts.found.traced, facts.found.typical
    part = timing.slowest_part or ""
    where = f": it is slower in {SLOWER_IN.get(part, part)}" if part else ""
    if (factor := heavier(facts, rank)) is not None:
        where = f": its forward and backward passes both take {ratio(factor)} as long"
    fix = "look for other work there (top, nvidia-smi), and for code that only this rank runs"
    mine = traced.get(rank)
    if mine is not None and typical is not None and typical is not mine:
        others = dict(typical.lines)
        lines = [(took - others.get(at, 0.0), at) for at, took in mine.lines]
        longer = mine.parts["host"] - typical.parts["host"]
        if lines and longer >= OWN_PART * timing.late_seconds:
            line = max(lines)[1]
            fix = f"look at {line}, where this rank alone spends its time"
            words = f": it does something else, at {line}"
            return Reason(words=words, cause="slow-rank", fix=fix, line=line)
    if factor is not None:
        fix = f"compare its samples with the others' (their lengths); otherwise {fix}"
    return Reason(words=where, cause="slow-rank", fix=fix)


def heavier(facts: Facts, rank: int) -> float | None:
    """How many times as long a rank's passes take, if both do: its samples may be longer."""
    first, middle = facts.found.timing.first_step, facts.found.timing.middle_rank
    factors = []
    for phase in (FORWARD, BACKWARD):
        means = []
        for one in (rank, rank if middle is None else middle):
            steps = facts.records[one].timed_steps
            means.append(statistics.fmean(steps[n][phase] for n in steps if n >= first))
        factors.append(means[0] / means[1] if means[1] else 0.0)
    is_alike = max(factors) <= ALIKE_FACTORS * min(factors)
    return statistics.fmean(factors) if min(factors) >= HEAVIER and is_alike else None


def uneven_work(record: RankRecord, facts: Facts) -> tuple[float, float] | None:
    """Seconds of the forward pass in light and in heavy steps; None if all are alike.

    A heavy batch has a longer backward pass, too; other work on the node does not cause that.
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


# --- Pauses --------------------------------------------------------------------------------------


def pauses(facts: Facts) -> Said:
    found = facts.found
    share = found.shares["pauses"]
    is_evaluation = found.evaluation > share / 2
    what = "evaluation takes" if is_evaluation else "saving, logging and the like take"
    fix = "evaluate less often, or on less data" if is_evaluation else "save and log less often"
    if facts.is_task and not is_evaluation:
        every = (facts.run.job().get("checkpoint") or {}).get("every", "10m")
        rarely = 10 * every if isinstance(every, int) else "1h"
        fix = f"checkpoint.every={rarely} (now {every})"
    return Said(
        why=f"{what} {percent(share, 0)} of the time, between steps",
        next=fix,
        cause="pauses",
        evidence=f"pauses {facts.of_step(facts.seconds('pauses'))}; evaluation "
        f"{percent(found.evaluation, 0)} of the time",
    )


SAYING = {
    "compute": compute,
    "launches": launches,
    "host": host,
    "copies": copies,
    "data": data,
    "communication": communication,
    "straggler": straggler,
    "pauses": pauses,
}
