"""A run in one object, and what is concluded about it, in the words that every screen shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from allranks.layout import with_place
from allranks.run.folder import RunDir, State
from allranks.run.record import outcome, read_ranks, samples_trained
from allranks.show.numbers import NOTHING, count, duration, number, percent
from allranks.show.tables import Cell, Table, facts
from allranks.show.text import clean, in_markdown
from allranks.timing.remarks import remarks
from allranks.timing.shares import LOCAL
from allranks.timing.steps import (
    AFFORDABLE_BYTES,
    PART_WORDS,
    PARTS,
    affordable_timing,
    event_bytes,
)
from allranks.timing.verdict import Judgement, judge


def result(run: RunDir, state: State | None = None) -> dict[str, Any]:
    """A run in one object: what `allranks run --json` prints. `state`: if the caller knows it."""
    found = outcome(run, state)
    is_reported = found["samples_per_second"] is not None  # by the rank itself: only a task does
    records = None
    if not is_reported or event_bytes(run) <= AFFORDABLE_BYTES:
        records = read_ranks(run, max(run.attempts(), default=0))
    chosen = [event for of in (records or {}).values() for event in of.others["compile"]]
    found["compile"] = {key: chosen[-1].get(key) for key in COMPILE} if chosen else None
    cut = [event for of in (records or {}).values() for event in of.others["micro_batches"]]
    found["micro_batches"] = {key: cut[-1].get(key) for key in MICRO_BATCHES} if cut else None
    measured = affordable_timing(run, records=records)
    if found["counted"]["samples"] == "unknown":
        found["samples_per_second"] = None
    elif measured is not None and measured.samples:
        # From the same steps as in every other command: a task itself reports on all its steps.
        found["samples_per_second"] = round(measured.samples_per_second, 3)
        found["evaluation_seconds"] = round(measured.evaluation_seconds, 3)
        whole = measured.samples_per_second_with_evaluation
        found["samples_per_second_with_evaluation"] = round(whole, 3)
    is_counted = found["counted"]["samples"] != "unknown"
    if records is not None and found["samples"] is None and is_counted:
        found["samples"] = samples_trained(run, records)
    found["remarks"] = [remark.as_json() for remark in remarks(run, measured, records)]
    return found | judged(judge(run, measured, records))


def compile_words(compile: Mapping[str, Any]) -> str:
    """Which form the step has, since when, what it gains, and the time that was lost for it."""
    form, times = compile["form"], compile["times"] or {}
    words = form if compile["step"] <= 1 else f"{form} from step {count(compile['step'])} on"
    before = next(iter(times.values()), None)
    if before and times.get(form) and times[form] != before:
        gain = number(before / times[form], 2)
        words += f": {duration(times[form])} a step instead of {duration(before)} ({gain}x)"
    lost = f"{duration(compile['lost'])} waiting for it" if compile["lost"] else ""
    why = "" if form != "eager" or not compile["why"] else clean(compile["why"])
    return ", ".join(filter(None, [words, lost, why]))


def judged(found: Judgement | None) -> dict[str, Any]:
    """The keys of a run's object that hold what is concluded about it."""
    if found is not None:
        return found.as_json()
    return {"verdict": None, "warnings": [], "mfu": None, "since": None}


MICRO_BATCHES = ("step", "size", "number", "why", "too_large")  # of the event
COMPILE = ("step", "form", "lost", "times", "why")  # of the event
SURE, NOT_SURE = "sure", "not sure"
LIMITED, DOUBT, NEXT, SINCE, WARNING = "limited by", "doubt", "next", "since", "warning"
OF_TRACE = tuple(part for part in LOCAL if part != "compute")
SHOWN_PARTS = (*LOCAL, *(part for part in PARTS if part != "compute"))
LEAST_SHOWN = 0.01  # of a step
NOT_KNOWN = ("too-short", "unknown")


@dataclass(frozen=True, slots=True)
class VerdictLine:
    """One line of what is concluded about a run."""

    label: str
    text: str
    aside: str = ""  # how sure it is, or what it can gain

    @property
    def sentence(self) -> str:
        """Within a text: `limited by data: ... (sure)`, `next: ... (up to 3.8x)`."""
        label = self.label if self.label == LIMITED else f"{self.label}:"
        return f"{label} {self.text}" + (f" ({self.aside})" if self.aside else "")

    @property
    def markdown(self) -> str:
        return in_markdown(self.sentence)


def verdict_lines(found: Mapping[str, Any]) -> list[VerdictLine]:
    """What is concluded about a run, from its object; its limit comes first."""
    verdict, since = found.get("verdict"), found.get("since")
    lines = []
    is_unknown = verdict and verdict["limit"] == "unknown"
    if verdict and not (is_unknown and found.get("state") in ("queued", "failed", "stopped")):
        is_known = verdict["limit"] not in NOT_KNOWN
        what = verdict["limit"] if is_known else "not known"
        sure = SURE if verdict["sure"] else NOT_SURE
        why = with_line(verdict["why"], verdict["line"])
        lines.append(VerdictLine(LIMITED, f"{what}: {why}", sure if is_known else ""))
        if verdict.get("doubt"):  # verdicts of earlier versions have none
            lines.append(VerdictLine(DOUBT, clean(verdict["doubt"])))
        if verdict["next"]:
            gain = f"up to {number(verdict['gain'], 2)}x" if verdict["gain"] else ""
            lines.append(VerdictLine(NEXT, clean(verdict["next"]), gain))
    if since:
        lines.append(VerdictLine(SINCE, clean(since["text"])))
    warnings = found.get("warnings") or ()
    return [
        *lines,
        *(VerdictLine(WARNING, with_line(one["text"], one["line"])) for one in warnings),
    ]


def verdict_table(rows: Sequence[tuple[str, Cell]], lines: Sequence[VerdictLine]) -> Table:
    """Facts, and what is concluded from them, with a column for how sure that is."""
    if not lines:
        return facts(rows)
    styles = {SURE: "green", NOT_SURE: "yellow"}
    cells: list[tuple[Cell, ...]] = [(*row, "") for row in rows]
    for one in lines:
        text = Text(one.text, style="yellow" if one.label == WARNING else "")
        cells.append((one.label, text, Text(one.aside, style=styles.get(one.aside, "dim"))))
    columns = ("name", "fact", "aside")
    return Table("", columns, cells, texts=columns, has_head=False)


def sentences(found: Mapping[str, Any], *labels: str) -> list[str]:
    """What is concluded about a run under these labels; nothing if its limit is not known."""
    if not found.get("verdict") or found["verdict"]["limit"] in NOT_KNOWN:
        return []
    return [one.sentence for one in verdict_lines(found) if one.label in labels]


def own_work_divided(parts: Mapping[str, float], found: Mapping[str, Any]) -> dict[str, float]:
    """The parts of a step, with a rank's own work divided as the traced steps show it.

    `found`: the object of its run. Without a trace, that work is called compute and other.
    """
    shares = (found.get("verdict") or {}).get("shares") or {}
    own = {part: shares.get(part, 0.0) for part in LOCAL}
    if sum(own[part] for part in OF_TRACE) < LEAST_SHOWN:  # nor is it shown
        own = {**dict.fromkeys(LOCAL, 0.0), "compute": own["compute"]}
    if not sum(own.values()):
        return dict.fromkeys(SHOWN_PARTS, 0.0) | dict(parts)
    seconds = (parts["compute"] + parts["other"]) / sum(own.values())
    waits = {part: parts[part] for part in ("comm", "straggler", "data")}
    return {**{part: share * seconds for part, share in own.items()}, **waits, "other": 0.0}


def shown_parts(rows: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """What to call each part in a table of these rows; parts of a trace only if a row has them."""
    those = [*rows]
    return {
        part: PART_WORDS.get(part, part)
        for part in SHOWN_PARTS
        if part not in OF_TRACE
        or any(row[part] >= LEAST_SHOWN * sum(row.values()) for row in those)
    }


def shown_exchanges(rows: Iterable[tuple[Mapping[str, float], float]]) -> list[str]:
    """The exchanges to show of these rows: their seconds in a step by name, and those of a step."""
    return list(
        dict.fromkeys(
            name
            for exchanges, step in rows
            for name, seconds in exchanges.items()
            if seconds >= LEAST_SHOWN * step
        )
    )


def slowest_words(rank: int | None, layout: str) -> str:
    """`3 (stage 1)`: the slowest rank, and where it is in a layout that divides the model."""
    return NOTHING if rank is None else with_place(count(rank), layout, [rank])


def with_line(text: str, line: str | None) -> str:
    """A text, followed by the line of the user's code unless it names it already."""
    return clean(text if not line or line in text else f"{text} ({line})")


def mfu_words(mfu: float | None) -> str:
    """Model FLOPs utilisation; empty if it is not known."""
    return "" if mfu is None else f"{percent(mfu)} MFU"
