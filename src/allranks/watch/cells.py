"""The cells of the tables of runs and of ranks, and the marks that say which numbers are good."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from rich.text import Text

from allranks.errors import AllranksError
from allranks.show.numbers import (
    count,
    duration,
    metric,
    moment,
    number,
    percent,
    progress,
    rate,
    short,
    size,
)
from allranks.show.tables import STATE_STYLES, Column
from allranks.show.text import clean, shortened
from allranks.timing.result import shown_exchanges
from allranks.timing.steps import slowest_in_words
from allranks.watch.views import Parts, RankView, RunView

SPARKS = "▁▂▃▄▅▆▇█"
TAKING_TURNS = 0.1  # share of a step spent waiting for slower ranks
CURVE = 24  # maximum width of a sparkline

RUN_COLUMNS = (
    Column(key="run", title="run", rank=0, width=16, right=False, most=60),
    Column(key="state", title="state", rank=1, width=8, right=False),
    Column(key="layout", title="layout", rank=5, width=6, right=False),
    Column(key="epoch", title="epoch", rank=10, width=5),
    Column(key="step", title="step", rank=2, width=9),
    Column(key="left", title="left", rank=3, width=5),
    Column(key="loss", title="loss", rank=4, width=7),
    Column(key="curve", title="curve", rank=7, width=8, right=False, most=CURVE),
    Column(key="pace", title="samples/s", rank=6, width=9),
    Column(key="efficiency", title="eff", rank=8, width=5),
    Column(key="hours", title="hours", rank=9, width=5),
    Column(key="why", title="", rank=11, width=20, right=False, most=100),
)
# Columns that are mostly empty for a queued or failed run: its reason takes their place.
UNDER_REASON = ("left", "loss", "curve", "pace", "efficiency", "hours", "why")

RANK_COLUMNS = (
    Column(key="rank", title="rank", rank=0, width=5),
    Column(key="node", title="node", rank=9, width=6, right=False, most=24),
    Column(key="place", title="place", rank=3, width=7, right=False, most=32),
    Column(key="gpu", title="gpu%", rank=1, width=5),
    Column(key="memory", title="memory", rank=5, width=7),
    Column(key="power", title="power", rank=8, width=5),
    Column(key="temperature", title="°C", rank=7, width=3),
    Column(key="step", title="step", rank=10, width=6),
    Column(key="seconds", title="took", rank=2, width=6),
    Column(key="data", title="data", rank=3, width=6),
    Column(key="wait", title="wait", rank=4, width=6),
    Column(key="cpu", title="cpu", rank=11, width=4),
    Column(key="workers", title="workers", rank=12, width=7),
    Column(key="network", title="network", rank=13, width=9),
    Column(key="beat", title="seen", rank=6, width=5),
    Column(key="slowest", title="", rank=2, width=9, right=False),
)


def state_word(run: RunView) -> str:
    return "stalled" if run.stalled else run.state


def run_cells(run: RunView, now: float) -> dict[str, Text]:
    """The cells of one run, by column."""
    word, pace = state_word(run), known(short, run.samples_per_second or None).plain
    return {
        "run": Text(clean(run.run)),
        "state": Text(word, style=STATE_STYLES.get(word, "")),
        "layout": Text(clean(run.layout or "-")),
        "epoch": known(progress, run.epoch, run.epochs),
        "step": known(progress, run.step, run.steps),
        "left": known(time_left, run.seconds_left),
        "loss": loss_cell(run),
        "curve": Text(sparkline(list(run.losses), CURVE), style="cyan"),
        "pace": Text(f"~{pace}" if run.is_guess and pace else pace),
        "efficiency": known(percent, run.efficiency if run.is_compared else None),
        "hours": known(number, run.rank_hours or None),
        "why": Text("; ".join([*filter(None, [reason(run, now)]), *doubts(run)[:1]]), style="dim"),
    }


def plain_line(run: RunView, now: float) -> str:
    """One run in one line of plain text, each number with its name."""
    cells = {key: cell.plain for key, cell in run_cells(run, now).items()}
    forms = {
        "epoch": "epoch {}",
        "step": "step {}",
        "loss": "loss {}",
        "pace": "{} samples/s",
        "efficiency": "{} efficiency",
        "left": "{} left",
        "hours": f"{{}} {run.hours_unit}",
        "why": "({})",
    }
    said = [run.run, cells["state"], cells["layout"]]
    return "  ".join(said + [form.format(cells[key]) for key, form in forms.items() if cells[key]])


def reason(run: RunView, now: float) -> str:
    """Why it waits and until when, why it ended, or what needs attention."""
    said = [clean(run.reason)] if run.reason else []
    if run.expected_start:
        said.append(f"expected to start {moment(run.expected_start, now)}")
    return "; ".join(said)


def pace_words(run: RunView) -> str:
    """Its samples/s, marked if it is an estimate."""
    pace = number(run.samples_per_second)
    return f"about {pace}" if run.is_guess and run.samples_per_second else pace


def doubts(run: RunView) -> list[str]:
    """What makes its numbers doubtful, the worst first, and why it is not compared."""
    said = [remark.text for remark in run.remarks]
    is_new = run.doubt is not None and not any(run.doubt.endswith(text) for text in said)
    return [clean(text) for text in [*said, *([run.doubt] if is_new and run.doubt else [])]]


def base_words(run: RunView, width: int = 99) -> str:
    """The baseline of its efficiency: `one rank: NAME`, `1x2: median of 3 runs`."""
    layout = run.baseline_layout or "1x1"
    whose = "one rank" if layout == "1x1" else layout
    if len(run.baseline_runs) > 1:
        return f"{whose}: median of {len(run.baseline_runs)} runs"
    return f"{whose}: {shortened(clean(run.baseline or ''), width)}"


def facts_of(run: RunView) -> list[str]:
    """What a run trains on, and how far it is saved."""
    facts = [run.layout, run.device or ""]
    facts += [f"attempt {run.attempt}"] if run.attempts > 1 else []
    facts += [f"job {', '.join(run.jobs)}"] if run.jobs else []
    facts += [f"checkpoint {count(run.checkpoint)}"] if run.checkpoint is not None else []
    return [clean(fact) for fact in facts if fact]


def is_alarming(run: RunView) -> bool:
    return run.state == "failed" or run.stalled


def slowest_words(parts: Parts) -> str:
    """Which rank the others wait for, if one stands out or they lose much time."""
    words = slowest_in_words(
        parts.slowest_rank,
        parts.slowest_share,
        parts.slowest_part,
        f"the last {count(parts.steps, 'step')}",
        parts.layout,
    )
    if parts.slowest_rank is not None:
        return f"slowest: {words}"
    if parts.seconds["straggler"] >= TAKING_TURNS * (sum(parts.seconds.values()) or 1.0):
        return f"{words}: they take turns"
    return ""


def exchange_words(parts: Parts) -> str:
    """`waits: pipeline 31ms, all-reduce 12ms`: waiting in a step, by the name of the exchange."""
    names = shown_exchanges([(parts.exchanges, sum(parts.seconds.values()))])
    said = [f"{name} {duration(parts.exchanges[name])}" for name in names]
    return f"waits: {', '.join(said)}" if said else ""


def loss_cell(run: RunView) -> Text:
    if run.losses and run.losses[-1] is None and run.loss is None:
        return Text("! nan", style="bold red")
    return known(metric, run.loss)


def known(spelled: Callable[..., str], value: float | None, *more: Any) -> Text:
    """A formatted number; empty if it is unknown."""
    return Text("" if value is None else spelled(value, *more))


def rank_cells(rank: RankView, marks: Mapping[str, Mark], now: float) -> dict[str, Text]:
    """The cells of one rank, by column, with marks."""
    verdicts = judged(rank, marks)
    memory = rank.memory if rank.memory is not None else rank.host_memory_now
    of_link = share(traffic(rank), rank.link)
    busy = share(rank.workers_cpu, rank.num_workers)
    age = max(0.0, now - rank.heartbeat) if rank.heartbeat is not None else None
    seen = rank.state or ("" if age is None else duration(max(1, age), whole=True))
    return {
        "rank": Text(str(rank.rank)),
        "node": Text(clean(rank.node or "")),
        "place": Text(rank.place or ""),
        "gpu": marked(rank.utilization, "{:.0f}", verdicts["gpu_util"]),
        "memory": marked(memory, narrow_size, verdicts["memory"]),
        "power": marked(rank.power, "{:.0f}W", verdicts["power"]),
        "temperature": marked(rank.temperature, "{:.0f}"),
        "step": marked(rank.step, "{}"),
        "seconds": marked(rank.step_seconds, duration),
        "data": marked(rank.data, duration),
        "wait": marked(rank.wait, duration),
        "cpu": marked(rank.cpu, "{:.1f}"),
        "workers": marked(busy, "{:.0f}%", verdicts["workers"]),
        "network": marked(of_link, "{:.0f}%", verdicts["network"])
        if of_link is not None
        else marked(traffic(rank), rate),
        "beat": Text(seen, style=STATE_STYLES.get(rank.state or "", "")),
        "slowest": Text("< slowest" if rank.slowest else "", style="bold yellow"),
    }


def marked(value: Any, form: str | Callable[[Any], str], verdict: Verdict | None = None) -> Text:
    """A formatted number, followed by the sign of its mark if it has one."""
    if value is None:
        return Text("")
    said = form(value) if callable(form) else form.format(value)
    if verdict is None:
        return Text(said)
    return Text(said + SIGNS[verdict], style=STYLES[verdict])


def summary(runs: Sequence[RunView]) -> str:
    """How many runs are in each state."""
    words = [state_word(run) for run in runs]
    said = [f"{words.count(word)} {word}" for word in STATE_STYLES if word in words]
    return ", ".join(said) or "no runs"


def time_left(seconds: float) -> str:
    return duration(seconds, whole=True)


def narrow_size(num_bytes: float) -> str:
    return size(num_bytes, narrow=True)


def sparkline(values: list[float | None], width: int) -> str:
    """A curve's shape in one line; `!` where a value is not a number."""
    if not values or width < 1:
        return ""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    cells = [values[begin:end] for begin, end in pairwise(edges)]
    means: list[float | None] = []
    for cell in cells:
        known = [v for v in cell if v is not None and math.isfinite(v)]
        means.append(sum(known) / len(known) if len(known) == len(cell) else None)
    finite = [value for value in means if value is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    return "".join(
        "!" if value is None else SPARKS[min(7, int((value - low) / span * 8))] for value in means
    )


# --- Marks: limits that the user can set -------------------------------------------------------

Verdict = Literal["good", "warn", ""]

# Not by colour alone: not every terminal has it, and not everyone sees it.
SIGNS: Mapping[Verdict, str] = {"good": "+", "warn": "!", "": " "}
STYLES: Mapping[Verdict, str] = {"good": "green", "warn": "yellow", "": ""}
LIMIT_SIGNS = {"warn_under": "! under", "good_from": "+ from", "warn_over": "! over"}


@dataclass(frozen=True, slots=True)
class Mark:
    """Limits in percent; None means no such limit."""

    about: str
    warn_under: float | None = None
    good_from: float | None = None
    warn_over: float | None = None

    def judge(self, percent: float | None) -> Verdict:
        if percent is None:
            return ""
        if self.warn_under is not None and percent < self.warn_under:
            return "warn"
        if self.warn_over is not None and percent > self.warn_over:
            return "warn"
        return "good" if self.good_from is not None and percent >= self.good_from else ""

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, in the order in which they are typed."""
        named = {name: getattr(self, name) for name in LIMIT_SIGNS}
        return {name: limit for name, limit in named.items() if limit is not None}


DEFAULT_MARKS: Mapping[str, Mark] = {
    "gpu_util": Mark("GPU utilisation", warn_under=80, good_from=90),
    "memory": Mark("GPU memory in use", good_from=80, warn_over=90),
    "power": Mark("power, of its limit", good_from=80),
    "network": Mark("network, of the link's rate", warn_over=90),
    "workers": Mark("loader workers busy", warn_over=90),
}


def parse_marks(texts: Iterable[str]) -> dict[str, Mark]:
    """The default marks, changed by what was typed, such as `gpu_util=70,85`."""
    marks = dict(DEFAULT_MARKS)
    for text in texts:
        name, _, limits = text.partition("=")
        if name not in marks:
            known = ", ".join(marks)
            raise AllranksError(f"there is no mark {name!r}", fix=f"use one of {known}")
        names = list(marks[name].limits)
        try:
            numbers = [float(number) for number in limits.split(",")]
            changed: dict[str, Any] = dict(zip(names, numbers, strict=True))
            marks[name] = replace(marks[name], **changed)
        except ValueError:
            meaning = ", ".join(name.replace("_", " ") for name in names)
            example = ",".join(f"{limit:g}" for limit in marks[name].limits.values())
            raise AllranksError(
                f"the mark {text!r} needs {count(len(names), 'limit')} in percent: {meaning}",
                fix=f"write --mark {name}={example}",
            ) from None
    return marks


def mark_in_words(name: str, mark: Mark) -> tuple[str, str]:
    """`gpu_util=80,90` as it is typed, and `GPU utilisation: ! under 80%, + from 90%`."""
    typed = ",".join(f"{limit:g}" for limit in mark.limits.values())
    said = ", ".join(f"{LIMIT_SIGNS[key]} {limit:g}%" for key, limit in mark.limits.items())
    return f"{name}={typed}", f"{mark.about}: {said}"


def share(part: float | None, whole: float | None) -> float | None:
    """In percent; None if either is unknown."""
    return 100 * part / whole if part is not None and whole else None


def traffic(rank: RankView) -> float | None:
    """Bytes per second of the rank's node, in the busier direction."""
    return max((n for n in (rank.sent, rank.received) if n is not None), default=None)


def judged(rank: RankView, marks: Mapping[str, Mark]) -> dict[str, Verdict]:
    """The verdict of each mark on one rank."""
    percents = {
        "gpu_util": rank.utilization,
        "memory": share(rank.memory, rank.memory_total),
        "power": share(rank.power, rank.power_limit),
        "network": share(traffic(rank), rank.link),
        "workers": share(rank.workers_cpu, rank.num_workers),
    }
    return {name: marks[name].judge(percent) for name, percent in percents.items()}
