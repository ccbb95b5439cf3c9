"""Was a layout worth its GPU-hours, and which one to take? Pure functions of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allranks.report.rows import Row
from allranks.show.numbers import dollars, number, percent, ratio

GOOD, BELOW, DIMINISHING = "good", "below target", "diminishing returns"
BASELINE, UNKNOWN = "baseline", "not measured"
LOSSES = {
    "comm": "communication",
    "straggler": "waiting for slower ranks",
    "data": "waiting for data",
    "other": "spent outside of training",
}
WORTH_SAYING = 0.02  # of a step
BOTH = "the fastest layout whose verdict is good: it meets its target, and no diminishing returns"


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a layout must reach; shares of one."""

    within_node: float = 0.95  # efficiency
    across_nodes: float = 0.85
    doubling: float = 0.10  # GPU-hours that a doubling of the ranks may add


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    words: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A layout to take, and why."""

    layout: str
    device: str
    why: str


def verdict(row: Row, targets: Targets) -> Verdict:
    """What to think of a row, in a word or two, and a sentence with its numbers."""
    if row.efficiency is None:
        return Verdict(words=(UNKNOWN,), text="no pace was measured")
    if row.layout == row.baseline:
        kind = "one rank" if row.ranks == 1 else f"{row.ranks} ranks, the fewest there are"
        return Verdict(words=(BASELINE,), text=f"what the others are compared with: {kind}")
    target, where = targets.within_node, "within a node"
    if row.nodes > 1:
        target, where = targets.across_nodes, "across nodes"
    reached = row.efficiency >= target
    verb = "meets" if reached else "is below"
    text = f"{percent(row.efficiency)} efficiency {verb} {percent(target)} {where}"
    found = [] if reached else [BELOW]
    if row.doubling_share is not None and row.doubling_share > targets.doubling:
        found.append(DIMINISHING)
        text += (
            f"; a doubling of ranks from {row.doubling_from} adds "
            f"{percent(row.doubling_share)} {hours_name(row)}"
        )
    return Verdict(words=tuple(found) or (GOOD,), text=text)


def hours_name(row: Row) -> str:
    return "GPU-hours" if row.is_gpu else "rank-hours"


def headline(rows: Sequence[Row]) -> str | None:
    """What came out, in a sentence: the fastest layout against the baseline, and what it loses."""
    larger = [row for row in rows if row.speedup is not None and row.layout != row.baseline]
    best = max(larger, key=lambda row: row.pace or 0, default=None)
    if best is None or best.speedup is None or best.efficiency is None:
        return None
    times = ratio(best.speedup)
    text = f"{best.layout} is {times} as fast as {best.baseline}"
    text += f" on {best.device}, at " if len({row.device for row in rows}) > 1 else ", at "
    text += f"{percent(best.efficiency)} efficiency"
    if best.parts and best.step_seconds:
        part = max(LOSSES, key=lambda name: best.parts[name] if best.parts else 0.0)
        share = best.parts[part] / best.step_seconds
        if share >= WORTH_SAYING:
            text += f"; {percent(share)} of its step is {LOSSES[part]}"
    return text + "."


def recommended(rows: Sequence[Row], targets: Targets) -> dict[str, Choice | None]:
    """The layout to take by time, by cost, and for the best of both; None where nothing tells."""
    paced = [row for row in rows if row.pace]
    if len(paced) < 2:
        return {"time": None, "cost": None, "both": None}
    return {
        "time": by_time(paced),
        "cost": by_cost(paced),
        "both": by_both(paced, targets),
    }


def by_time(rows: Sequence[Row]) -> Choice:
    best, second, *_ = sorted(rows, key=lambda row: (-(row.pace or 0), row.ranks))
    why = f"{number(best.pace)} samples/s, the most"
    if overlap(best, second):
        why += f"; not surely more than {second.layout}: their 95% intervals overlap"
    return Choice(layout=best.layout, device=best.device, why=why)


def overlap(a: Row, b: Row) -> bool:
    one, other = a.samples_per_second, b.samples_per_second
    if one is None or other is None or one.ci95 is None or other.ci95 is None:
        return False
    return one.ci95[0] <= other.ci95[1] and other.ci95[0] <= one.ci95[1]


def by_cost(rows: Sequence[Row]) -> Choice | None:
    """By dollars where prices are known; else by GPU-hours, which only one kind of GPU allows."""
    priced = [row for row in rows if row.usd_per_million_samples is not None]
    devices = {row.device for row in rows}
    if len(priced) == len(rows) or (priced and len(devices) > 1):
        best = min(priced, key=lambda row: (row.usd_per_million_samples or 0, row.ranks))
        why = f"{dollars(best.usd_per_million_samples)} for a million samples, the least"
        if len(priced) < len(rows):
            why += " where a price is known"
        return Choice(layout=best.layout, device=best.device, why=why)
    if len(devices) > 1:
        return None
    best = min(rows, key=lambda row: (row.hours_per_sample or 0, row.ranks))
    hours = number((best.hours_per_sample or 0) * 1e6)
    why = f"{hours} {hours_name(best)} for a million samples, the fewest (no price is known)"
    return Choice(layout=best.layout, device=best.device, why=why)


def by_both(rows: Sequence[Row], targets: Targets) -> Choice:
    fit = [row for row in rows if verdict(row, targets).words[0] in (GOOD, BASELINE)]
    best = max(fit, key=lambda row: (row.pace or 0, -row.ranks))
    if best.layout == best.baseline:
        why = "no larger layout meets its target without diminishing returns"
    else:
        why = f"the fastest that is worth it: {verdict(best, targets).text}"
    return Choice(layout=best.layout, device=best.device, why=why)
