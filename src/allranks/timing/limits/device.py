"""What is said about a run whose device computes, is idle or copies, and about pauses."""

from __future__ import annotations

from allranks.show.numbers import count, duration, percent, size
from allranks.timing.limits.data import loader_of
from allranks.timing.limits.facts import Facts, Said, device_means, hot

WORTH_A_WORD = 0.02  # of the time
TAKES = {
    "launches": "launching kernels takes",
    "host": "other Python code takes",
    "copies": "copying takes",
    "data": "loading data takes",
    "communication": "communication takes",
    "straggler": "waiting for slower ranks takes",
    "pauses": "pauses take",
}
BY_NVML = "as nvidia-smi counts it"


def compute(facts: Facts) -> Said:
    found, device = facts.found, "the GPU" if facts.found.is_gpu else "torch"
    if found.typical is not None:
        why = f"{device} computes {facts.share('compute')} of the time{second_of(facts)}"
    elif found.utilization is not None:
        why = f"the GPU is in use {percent(found.utilization, 0)} of the time, {BY_NVML}"
    else:
        share = facts.share("compute")
        why = f"{share} of the time is spent in forward, backward and update{second_of(facts)}"
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
    more = f"allranks bench scaling --layouts 1x1,1x2 {facts.typed}".rstrip()
    return Said(why=why, next=more if facts.is_alone else None, cause=None, evidence=evidence)


def second_of(facts: Facts) -> str:
    """Words for the largest part after compute; empty if it takes hardly any time."""
    shares = facts.found.shares
    part = max(TAKES, key=lambda part: shares[part])
    return f"; {TAKES[part]} {facts.share(part)}" if shares[part] >= WORTH_A_WORD else ""


def launches(facts: Facts) -> Said:
    traced = facts.found.typical
    evidence = facts.of_step(facts.seconds("launches"))
    if traced is None:
        return idle(facts)
    per = f"; {count(traced.kernels)} kernels a step" if traced.kernels else ""
    return Said(
        why=f"the GPU is idle {facts.share('launches')} of the time: launching its kernels takes "
        "longer than running them",
        next=larger_kernels(facts),
        cause="launch-bound",
        evidence=f"launches {evidence}{per}",
    )


def larger_kernels(facts: Facts) -> str:
    if not facts.is_task:
        return "model = torch.compile(model), a CUDA graph, or a larger batch"
    if facts.records[min(facts.records)].start.get("compile"):
        return "a larger micro_batch_size"
    return "compile: true in the job file, or a larger micro_batch_size"


def idle(facts: Facts) -> Said:
    """What is said about a GPU that is often idle, if only NVML says so."""
    found, means = facts.found, [device_means(one) for one in facts.records.values()]
    totals = [one["memory_peak"] / one["memory_total"] for one in means if one.get("memory_total")]
    is_small = bool(totals) and max(totals) < facts.limits.memory
    busy = percent(found.utilization, 0)
    used = f"; at most {percent(max(totals), 0)} of its memory was in use" if totals else ""
    fix = larger_kernels(facts) if is_small else f"allranks run --profile 10 {facts.typed}".rstrip()
    why = f" ({found.problem})" if found.problem else ""
    return Said(
        why=f"the GPU is in use only {busy} of the time, {BY_NVML}; no step was traced{why}",
        next=fix,
        cause="small-batch" if is_small else "low-gpu-utilization",
        evidence=f"GPU utilisation {busy} on average{used}",
        doubt=f"the use of a GPU, {BY_NVML}, does not show why it is idle",
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
    less = "out of the training loop, or do it less often or in another process"
    fix = f"move such work {less}"
    if line is not None and traced is not None:
        why += f", {mostly_at(traced.lines[0], traced.parts['host'])}"
        evidence += f"; {', '.join(f'{at} {duration(took)}' for at, took in traced.lines[:3])}"
        fix = f"look at {line}: move it {less}"
        if facts.found.is_gpu:
            fix += "; avoid whatever waits for the GPU (.item(), .cpu(), printing a tensor)"
    elif traced is None:
        fix = f"allranks run --profile 10 {facts.typed}".rstrip()
    return Said(why=why, next=fix, cause="host-bound", evidence=f"host {evidence}", line=line)


def mostly_at(line: tuple[str, float], seconds: float) -> str:
    """In words, how much of these seconds is spent at the line that takes longest."""
    part = min(1.0, line[1] / max(seconds, 1e-9))
    return f"{'most' if part > 0.5 else percent(part, 0)} of it at {line[0]}"


def copies(facts: Facts) -> Said:
    traced = facts.found.typical
    assert traced is not None  # nothing else shows copies
    is_pageable = traced.pageable > traced.copied / 2
    is_back = traced.copied_back > traced.copied / 2
    line = traced.copying[0][0] if traced.copying else None
    where = f", {mostly_at(traced.copying[0], traced.parts['copies'])}" if line else ""
    moved = f"{size(traced.copied)} a step, {size(traced.pageable)} of it in unpinned memory"
    loader = loader_of(facts, min(facts.records)) or {}
    if is_back and is_pageable:
        fix = "copy back less often, or into pinned memory: pinned.copy_(tensor, non_blocking=True)"
    elif is_back:
        fix = "copy back less often, or do more of the work on the GPU"
    elif is_pageable and loader.get("pin_memory") is False:
        fix = "DataLoader(..., pin_memory=True) and .to(device, non_blocking=True)"
    elif is_pageable:
        fix = "tensor.pin_memory() before .to(device, non_blocking=True)"
    else:
        fix = "batch.to(device, non_blocking=True) a step ahead; keep constant data on the GPU"
    return Said(
        why=f"copying {'from' if is_back else 'to'} the GPU takes {facts.share('copies')} of the "
        f"time{where}"
        + (", as the memory is not pinned" if is_pageable else ", while it computes nothing"),
        next=f"at {line}: {fix}" if line else fix,
        cause="copy-bound",
        evidence=f"copies {facts.of_step(facts.seconds('copies'))}; {moved}",
        line=line,
    )


def pauses(facts: Facts) -> Said:
    found = facts.found
    share = found.shares["pauses"]
    is_evaluation = found.evaluation > share / 2
    what = "evaluation" if is_evaluation else "saving, logging or the like"
    fix = "evaluate less often, or on less data" if is_evaluation else "save and log less often"
    if facts.is_task and not is_evaluation:
        every = (facts.run.job().get("checkpoint") or {}).get("every", "10m")
        rarely = 10 * every if isinstance(every, int) else "1h"
        fix = f"checkpoint.every={rarely} (now {every})"
    return Said(
        why=f"{what} between steps takes {percent(share, 0)} of the time",
        next=fix,
        cause="pauses",
        evidence=f"pauses {facts.of_step(facts.seconds('pauses'))}; evaluation "
        f"{percent(found.evaluation, 0)} of the time",
    )
