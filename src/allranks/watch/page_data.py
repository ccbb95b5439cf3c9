"""The page's data as JSON: built from the watcher's views, and how it changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Any

from allranks.watch.marks import Mark, judged
from allranks.watch.table_cells import base_words
from allranks.watch.views import History, Parts, RankView, RunView

METRICS = ("work", "seconds", "data", "wait", "utilization")
SPARK_POINTS = 40
NOT_FOR_THE_LIST = ("loss_steps", "losses", "run_dir", "jobs", "heartbeat", "baseline_runs")
TIMES = ("started", "last_step", "heartbeat")

Row = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Wish:
    """What one browser looks at: a run, its heat map's metric, and runs to compare."""

    run: str | None = None  # None: the first in the list
    metric: str = "work"
    beside: tuple[str, ...] = ()


def run_line(view: RunView) -> dict[str, Any]:
    """One run in the list."""
    fields = {key: value for key, value in asdict(view).items() if key not in NOT_FOR_THE_LIST}
    every = -(-len(view.losses) // SPARK_POINTS) or 1
    spark = [rounded(loss) for loss in view.losses[::-1][::every][::-1]]
    base = base_words(view) if view.is_compared else None
    return {key: _short(key, value) for key, value in fields.items()} | {
        "spark": spark,
        "base": base,
    }


def rank_line(view: RankView, marks: Mapping[str, Mark]) -> dict[str, Any]:
    """One rank in the table, with the verdicts of the marks."""
    fields = {key: _short(key, value) for key, value in asdict(view).items() if key != "rank"}
    return fields | {"marks": judged(view, marks)}


def parts_line(parts: Parts | None) -> dict[str, Any] | None:
    if parts is None:
        return None
    seconds = {part: rounded(value) for part, value in parts.seconds.items()}
    return {**asdict(parts), "seconds": seconds, "slowest_share": rounded(parts.slowest_share)}


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
    digits = _digits(rows.values())
    columns = [
        [None if value is None else round(value, digits) for value in column]
        for column in zip_longest(*(rows[rank] for rank in ranks))
    ]
    known = {"metric": metric, "unit": unit, "width": history.width}
    return {**known, "ranks": ranks, "columns": columns}


def _heat_rows(known: Mapping[str, Mapping[int, Row]], metric: str) -> tuple[dict[int, Row], str]:
    if metric == "work":
        # Ranks wait for each other, so all steps take as long: a slow rank shows without waits.
        waits = known.get("wait", {})
        return {
            rank: _less(row, waits.get(rank, ())) for rank, row in known.get("seconds", {}).items()
        }, "s"
    if metric == "utilization":
        key, unit = ("utilization", "%") if known.get("utilization") else ("cpu", " CPUs")
        return dict(known.get(key, {})), unit
    return dict(known.get(metric, {})), "s"


def _less(row: Row, waits: Row) -> list[float | None]:
    pairs = zip_longest(row, waits[: len(row)])
    return [None if took is None else took - (wait or 0.0) for took, wait in pairs]


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


def _short(key: str, value: Any) -> Any:
    if key in TIMES:
        return None if value is None else round(value, 1)
    return rounded(value, 6 if key == "loss" else 4)


def rounded(value: Any, digits: int = 4) -> Any:
    """Rounded to significant digits: what nobody can see need not be sent."""
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _digits(rows: Any) -> int:
    """Decimals that show a thousandth of the largest value."""
    most = max((abs(v) for row in rows for v in row if v is not None), default=0.0)
    return 3 if most == 0 else max(0, 3 - int(f"{most:e}".partition("e")[2]))


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
