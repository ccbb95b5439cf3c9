"""What `bench scaling` says of its runs: layouts compared, what each loses time to, a verdict.

Everything here is a pure function of measured runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from allranks.bench.laws import Fit, differ_too_much, fit_object, law_of
from allranks.layout import Layout
from allranks.show.numbers import number, percent, ratio
from allranks.timing.comparison import CPU, SUSPICIOUS, Compared, compare, mode_of
from allranks.timing.samples_seen import APART
from allranks.timing.steps import Timing

STOPPED = "it was stopped before there was enough to measure"
NOTHING_TO_MEASURE = ("no optimizer step", "only one step", "no samples")  # in a run that is well


@dataclass(frozen=True, slots=True)
class Repeat:
    """One run of one layout; `timing` is None if nothing could be measured, and `problem` why."""

    run: str
    layout: str
    timing: Timing | None
    problem: str | None = None
    samples_per_epoch: int | None = None
    remarks: Sequence[str] = ()  # on what its ranks read, and whether they exchange anything
    state: str = "finished"
    device: str = ""  # not known of a run that never began
    device_memory: int | None = None

    @property
    def samples_per_second(self) -> float | None:
        return self.timing.samples_per_second or None if self.timing else None


def nothing_measured(state: str, steps: Mapping[int, int]) -> str:
    """Why a run that did not fail has no timing; `steps`: how many each rank has made."""
    if state == "stopped":
        return STOPPED
    most = max(steps, key=lambda rank: steps[rank], default=0)
    if not steps.get(most):
        return "no optimizer step was seen: the script must train with a torch optimizer, in Python"
    none = [rank for rank in steps if not steps[rank]]
    if none:
        ranks = f"rank {none[0]}" if len(none) == 1 else f"{len(none)} other ranks"
        return (
            f"no optimizer step was seen on every rank: rank {most} made {steps[most]}, {ranks} "
            "none, so there is nothing to measure"
        )
    if min(steps.values()) < 2:
        return "only one step was made: the first one is no measure of the others"
    return "no samples were seen: the batches have no length"


def as_json(
    repeats: Sequence[Repeat],
    *,
    added: Layout | None = None,
    price_of: Callable[[str, int | None], float | None] = lambda device, memory: None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `bench scaling --json` prints. `price_of`: dollars for an hour of a device, if known.

    `added`: the layout that nobody asked for, to compare the others with.
    """
    usual = next((one.device for one in repeats if one.device), CPU)
    repeats = [one if one.device else replace(one, device=usual) for one in repeats]
    rows = compare(repeats)
    judged = most_measured(rows)
    top = [row for row in judged if row.pace][-1:]
    fit, no_fit = law_of(judged)
    return {
        "mode": mode_of(judged),
        "rows": [row_object(row, repeats, added, price_of) for row in rows],
        "fit": fit and fit_object(fit),
        "fit_problem": no_fit,
        **(more or {}),
        "verdict": verdict(judged, fit, problems_of(repeats), remarks_of(top, repeats)),
    }


def most_measured(rows: Sequence[Compared]) -> list[Compared]:
    """The rows of one device: where the queue gave several, of that with the most layouts."""
    by_device: dict[str, list[Compared]] = {}
    for row in rows:
        by_device.setdefault(row.device, []).append(row)
    return max(
        by_device.values(), key=lambda those: sum(1 for one in those if one.pace), default=[]
    )


def row_object(
    row: Compared,
    repeats: Sequence[Repeat],
    added: Layout | None,
    price_of: Callable[[str, int | None], float | None],
) -> dict[str, Any]:
    own = [one for one in repeats if (one.layout, one.device) == (row.layout, row.device)]
    hours, price = hours_per_epoch(row, own), price_of(row.device, own[0].device_memory)
    return {
        "layout": row.layout,
        "added": row.layout == str(added),
        "device": row.device,
        "ranks": row.ranks,
        "samples_per_second": row.pace or 0.0,
        "ci95": list(row.ci95) if row.ci95 is not None else None,
        "repeats": [
            {
                "run": one.run,
                "samples_per_second": one.samples_per_second,
                **({"problem": one.problem} if one.problem else {}),
            }
            for one in own
        ],
        "step_seconds": row.step_seconds or 0.0,
        "samples_per_step": row.batch or 0.0,
        "speedup": row.speedup,
        "efficiency": row.efficiency,
        "parts": row.parts,
        "lost": row.lost or None,
        "slowest_rank": row.slowest_rank,
        "slowest_part": row.slowest_part,
        "steady": row.is_steady and row.pace is not None,
        "hours_per_epoch": hours,
        "cost_per_epoch": None if hours is None or price is None else hours * price,
        "problem": next((one.problem for one in own if one.problem), None),
        "remarks": remarks_of([row], repeats),
    }


def problems_of(repeats: Sequence[Repeat]) -> dict[str, str]:
    """Why a layout could not be measured, or not as often as it was to be."""
    return {one.layout: one.problem for one in reversed(repeats) if one.problem}


def remarks_of(rows: Sequence[Compared], repeats: Sequence[Repeat]) -> list[str]:
    runs = {run for row in rows for run in row.runs}
    return [*dict.fromkeys(remark for one in repeats if one.run in runs for remark in one.remarks)]


def hours_per_epoch(row: Compared, repeats: Sequence[Repeat]) -> float | None:
    """Rank-hours (GPU-hours, where a rank has a GPU) for one pass over the data."""
    sizes = [one.samples_per_epoch for one in repeats if one.samples_per_epoch]
    return row.ranks * sizes[0] / row.pace / 3600 if sizes and row.pace else None


NEXT = {
    "compute": "a rank computes less efficiently on its smaller share, or ranks share a processor: "
    "try a larger batch_size, or fewer ranks",
    "comm": "exchanging gradients is not hidden behind the computation: try a larger batch_size or "
    "accumulation (fewer exchanges for each sample), and allranks bench comm for the network",
    "straggler": "ranks wait for a slower one: see what is different there",
    "data": "ranks wait for their data: try more data.num_workers, and allranks bench data",
    "other": "the loop does other things between its steps: see them with --profile 20",
}


def verdict(
    rows: Sequence[Compared],
    fit: Fit | None,
    problems: Mapping[str, str],
    remarks: Sequence[str] = (),
) -> str:
    """What was found, in a sentence or two, and the next thing to try.

    `problems`: of layouts, by name; `remarks`: on the largest.
    """
    measured = [row for row in rows if row.efficiency is not None]
    if not measured:
        why = next(iter(problems.values()), "no step was made")
        return f"nothing could be measured: {why}"
    top = measured[-1]
    base = next(row for row in measured if row.layout == row.baseline)
    if len(measured) == 1:
        others = ", ".join(problems)
        said = f"{top.layout} makes {number(top.pace)} samples/s; "
        return said + (f"{others} could not be measured" if others else "name more layouts")
    for row in (base, top):
        if differs := differ_too_much(row):
            return f"{differs}: measure again when nothing else runs, with more --steps"
    assert top.efficiency is not None and top.speedup is not None
    said = (
        f"{top.layout} is {ratio(top.speedup)} as fast as {base.layout} "
        f"({percent(top.efficiency)} efficient, measured)"
    )
    if any(remark.startswith(APART) for remark in remarks):
        return f"{said}, but {APART}: it is one training only if they join"
    if top.efficiency > SUSPICIOUS:
        return (
            f"{said}: more than {top.ranks} ranks should do; before you trust it, look at what "
            f"slowed {base.layout} down (threads, a busy machine), and measure again"
        )
    if top.efficiency >= 0.95:
        return f"{said}: it scales; try more ranks{_beyond(fit, top)}"
    if not top.lost:
        return f"{said}{_beyond(fit, top)}"
    part = max(top.lost, key=lambda name: top.lost[name])
    where = " for slower ranks" if part == "straggler" else ""
    if top.slowest_rank is not None:
        doing = WORDS.get(top.slowest_part or "", top.slowest_part)
        if part == "straggler":
            longer = f" (its {doing} takes longer)" if doing else ""
            where = f" for rank {top.slowest_rank}{longer}"
        elif part == top.slowest_part:
            where = f" (longest on rank {top.slowest_rank})"
    return (
        f"{said}; {percent(top.lost[part])} is lost to {WORDS[part]}{where}: "
        f"{NEXT[part]}{_beyond(fit, top)}"
    )


WORDS = {
    "compute": "computing",
    "comm": "communication",
    "straggler": "waiting",
    "data": "waiting for data",
    "other": "the rest of the loop",
}


def _beyond(fit: Fit | None, top: Compared) -> str:
    if fit is None or top.ranks < 2:
        return ""
    twice = 2 * top.ranks
    return f". Predicted for {twice} ranks: {ratio(fit.speedup(twice))}"
