"""The page's data as JSON, with the words and cells that it shows, and how it changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Any

from allranks.show.numbers import NOTHING, count, duration, metric, number, percent, rate, size
from allranks.show.secrets import redact
from allranks.timing.result import own_work_divided
from allranks.timing.steps import PART_WORDS
from allranks.watch.cells import (
    Mark,
    base_words,
    doubts,
    exchange_words,
    facts_of,
    is_alarming,
    judged,
    pace_words,
    reason,
    slowest_words,
    state_word,
    traffic,
)
from allranks.watch.views import History, Parts, RankView, RunView

METRICS = ("work", "seconds", "data", "wait", "utilization")
SPARK_POINTS = 40
MOST_METRICS = 4  # among the large numbers of a run
HOT_DEGREES = 85
MFU = "model FLOPs utilisation: how much of its GPUs' peak speed the model uses"
MUCH_DATA = 0.1  # of a step, waiting for data

Row = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Wish:
    """What one browser looks at: a run, its heat map's metric, and runs to compare."""

    run: str | None = None  # None: the first in the list
    metric: str = "work"
    beside: tuple[str, ...] = ()


def run_line(view: RunView, now: float) -> dict[str, Any]:
    """One run in the list."""
    share = float(view.state == "finished")
    if view.steps and view.step is not None:
        share = min(1.0, view.step / view.steps)
    every = -(-len(view.losses) // SPARK_POINTS) or 1
    return {
        **{"run": view.run, "job": view.job, "layout": view.layout, "state": state_word(view)},
        **{"is_active": view.is_active, "step": view.step, "steps": view.steps},
        "share": rounded(share),
        "words": list_words(view, share, now),
        "spark": [rounded(loss) for loss in view.losses[::-1][::every][::-1]],
    }


def list_words(view: RunView, share: float, now: float) -> str:
    """How far a run in the list is, or why it does not go on."""
    if view.state == "queued" or view.stalled:
        return redact(reason(view, now)) or "waiting in the queue"
    words = [] if view.state == "running" else [view.state]
    if view.step is not None:
        words.append(percent(share) if view.steps else f"step {count(view.step)}")
    if view.samples_per_second is not None and view.state == "running":
        words.append(f"{pace_words(view)}/s")
    if view.seconds_left is not None:
        words.append(f"{duration(view.seconds_left, whole=True)} left")
    return " · ".join(words) or view.state


def head(view: RunView, silence: str | None, now: float) -> dict[str, Any]:
    """The chosen run in words; `silence`: why SLURM does not answer."""
    slurm = f"SLURM does not answer: {silence}" if silence else ""
    warnings = [reason(view, now), *doubts(view), slurm]
    return {
        "facts": [*facts_of(view), *([", ".join(view.nodes)] if view.nodes else [])],
        "warnings": [redact(warning) for warning in warnings if warning],
        "verdict": [[one.label, redact(one.text), one.aside] for one in view.verdict_lines],
        "is_alarming": is_alarming(view),
        # The number of steps of a user's script is not known.
        "has_progress": bool(view.steps) or view.state == "finished",
        "tiles": tiles(view),
        "loss": "" if view.loss is None else metric(view.loss),
        "pace": "" if view.samples_per_second is None else f"{pace_words(view)} samples/s",
    }


def tiles(view: RunView) -> list[list[str]]:
    """The large numbers of a run: each with its name, what follows it, and what explains it."""
    if view.state == "running":
        time = ["time left", duration(view.seconds_left, whole=True), "", ""]
    else:
        ends = (view.started, view.last_step)
        passed = None if None in ends else ends[1] - ends[0]  # type: ignore[operator]
        time = ["time", duration(passed), "", ""]
    base = f"compared with {base_words(view)}" if view.is_compared else ""
    found = [
        ["step", count(view.step), f"of {count(view.steps)}" if view.steps else "", ""],
        ["epoch", count(view.epoch), f"of {count(view.epochs)}" if view.epochs else "", ""],
        ["loss", metric(view.loss), "", ""],
        ["samples/s", pace_words(view), "", ""],
        ["efficiency", percent(view.efficiency if base else None), "", base],
        ["step time", duration(view.step_seconds), "", ""],
        ["MFU", percent(view.judgement.mfu if view.judgement else None), "", MFU],
        time,
        [view.hours_unit, number(view.rank_hours or None), "", ""],
        *(
            [name.replace("_", " "), metric(value), "", ""]
            for name, value in [*view.metrics.items()][:MOST_METRICS]
        ),
    ]
    return [one for one in found if one[1] != NOTHING or one[0] in ("step", "loss", "samples/s")]


def parts_line(parts: Parts | None, view: RunView) -> dict[str, Any] | None:
    """Where a step's time goes, by part: its share, and its name with the share."""
    if parts is None:
        return None
    whole = sum(parts.seconds.values()) or 1.0
    seconds_of = own_work_divided(parts.seconds, view.judged)
    shares = {part: seconds / whole for part, seconds in seconds_of.items()}
    return {
        "shares": {
            part: [rounded(share), f"{PART_WORDS.get(part, part)} {percent(share)}"]
            for part, share in shares.items()
        },
        "slowest": "; ".join(filter(None, [exchange_words(parts), slowest_words(parts)])),
    }


def rank_table(ranks: Iterable[RankView], marks: Mapping[str, Mark]) -> dict[str, Any]:
    """The columns that have any value, and every rank's cells by column."""
    rows = {str(rank.rank): rank_line(rank, marks) for rank in ranks}
    known = [row["cells"].items() for row in rows.values()]
    columns = dict.fromkeys(name for cells in known for name, cell in cells)
    has_value = {name for cells in known for name, cell in cells if cell[0] is not None}
    return {"columns": [name for name in columns if name in has_value], "ranks": rows}


def rank_line(rank: RankView, marks: Mapping[str, Mark]) -> dict[str, Any]:
    """One rank: each cell is a value to sort by, its text, and the verdict of its mark."""
    verdicts = judged(rank, marks)
    too_hot = rank.temperature is not None and rank.temperature >= HOT_DEGREES
    too_long = (rank.data or 0.0) > MUCH_DATA * (rank.step_seconds or 0.0)
    use = None if rank.utilization is None else rank.utilization / 100
    power = "" if rank.power_limit is None else f" of {count(rank.power_limit)}"
    used, whole = size(rank.memory), size(rank.memory_total)
    memory = f"{used.removesuffix(whole.lstrip('0123456789,.'))} of {whole}"
    cells: dict[str, list[Any]] = {
        "node": [rank.node, rank.node, ""],
        "place": [rank.place, rank.place, ""],
        "GPU": [rank.utilization, percent(use, 0), verdicts["gpu_util"]],
        "memory": [rank.memory, memory if rank.memory_total else used, verdicts["memory"]],
        "power, W": [rank.power, count(rank.power) + power, verdicts["power"]],
        "°C": [rank.temperature, count(rank.temperature), "warn" if too_hot else ""],
        "CPUs": [rank.cpu, number(rank.cpu, 2), ""],
        "workers": [
            rank.workers_cpu if rank.num_workers else None,
            f"{number(rank.workers_cpu, 2)} of {rank.num_workers}",
            verdicts["workers"],
        ],
        "network": [traffic(rank), rate(traffic(rank)), verdicts["network"]],
        "host memory": [rank.host_memory_now, size(rank.host_memory_now), ""],
        "peak memory": [rank.host_memory, size(rank.host_memory), ""],
        "step": [rank.step, count(rank.step), ""],
        "step time": [rank.step_seconds, duration(rank.step_seconds), ""],
        "data": [rank.data, duration(rank.data), "warn" if too_long else ""],
        "waiting": [rank.wait, duration(rank.wait), ""],
    }
    return {
        "cells": {
            name: [rounded(value), NOTHING if value is None else text, verdict]
            for name, (value, text, verdict) in cells.items()
        },
        "slowest": rank.slowest,
        "state": rank.state,
        "heard": None if rank.heartbeat is None else round(rank.heartbeat, 1),
    }


def loss(view: RunView) -> dict[str, Any]:
    """Loss by step."""
    return {"x": list(view.loss_steps), "y": [rounded(value, 6) for value in view.losses]}


def pace(history: History | None) -> dict[str, Any]:
    """Samples per second by step."""
    values = history.samples_per_second if history else ()
    width = history.width if history else 1
    known = [(i, value) for i, value in enumerate(values) if value is not None]
    return {
        "x": [i * width + (width + 1) // 2 for i, _ in known],
        "y": [rounded(value) for _, value in known],
    }


def heat(history: History | None, metric: str) -> dict[str, Any] | None:
    """Columns over time, each with one value per rank; None if nothing is known."""
    rows, unit = _heat_rows(history.ranks if history else {}, metric)
    if history is None or not rows:
        return None
    ranks = sorted(rows)
    columns = zip_longest(*(rows[rank] for rank in ranks))
    return {
        **{"metric": metric, "unit": unit, "width": history.width, "ranks": ranks},
        "columns": [[rounded(value) for value in column] for column in columns],
    }


def _heat_rows(known: Mapping[str, Mapping[int, Row]], metric: str) -> tuple[dict[int, Row], str]:
    if metric == "work":
        # Ranks wait for each other, so all steps take as long: a slow rank shows without waits.
        found = {}
        for rank, row in known.get("seconds", {}).items():
            pairs = zip_longest(row, known.get("wait", {}).get(rank, ())[: len(row)])
            found[rank] = [None if took is None else took - (wait or 0.0) for took, wait in pairs]
        return dict(found), "s"
    if metric == "utilization":
        key, unit = ("utilization", "%") if known.get("utilization") else ("cpu", " CPUs")
        return dict(known.get(key, {})), unit
    return dict(known.get(metric, {})), "s"


def use(history: History | None) -> dict[str, Any] | None:
    """How busy the ranks' devices are: mean, lowest and highest rank, by step."""
    rows, unit = _heat_rows(history.ranks if history else {}, "utilization")
    if history is None or not rows:
        return None
    found: dict[str, list[Any]] = {"x": [], "mean": [], "low": [], "high": []}
    for i in range(max(len(row) for row in rows.values())):
        values = [v for row in rows.values() if i < len(row) and (v := row[i]) is not None]
        if values:
            found["x"].append(i * history.width + (history.width + 1) // 2)
            found["mean"].append(rounded(fmean(values), 3))
            found["low"].append(rounded(min(values), 3))
            found["high"].append(rounded(max(values), 3))
    return {"unit": unit, **found}


def rounded(value: Any, digits: int = 4) -> Any:
    """Rounded to significant digits: what nobody can see need not be sent."""
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def change(before: Any, after: Any) -> dict[str, Any] | None:
    """How to turn `before` into `after`; None if they are equal.

    {"=": value} replaces it, {"+": [n, items]} keeps the first n items of a list and adds others,
    {"~": changes, "-": keys} changes some keys of an object and removes others.
    """
    if before == after:
        return None
    if isinstance(before, dict) and isinstance(after, dict):
        inner = {
            key: change(before[key], value) if key in before else {"=": value}
            for key, value in after.items()
        }
        found: dict[str, Any] = {"~": {key: one for key, one in inner.items() if one is not None}}
        gone = [key for key in before if key not in after]
        return {**found, "-": gone} if gone else found
    if isinstance(before, list) and isinstance(after, list):
        same = next(
            (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
            min(len(before), len(after)),
        )
        if same:
            return {"+": [same, after[same:]]}
    return {"=": after}
