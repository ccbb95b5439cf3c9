"""Draws the screens of `watch` in a terminal as lines of text, from plain data alone."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from allranks.show.numbers import count, duration, metric, number, percent
from allranks.show.tables import STATE_STYLES, fit, header, join
from allranks.show.text import clean, shortened
from allranks.timing.result import LIMITED, WARNING, VerdictLine, mfu_words, own_work_divided
from allranks.timing.steps import PART_WORDS
from allranks.watch.cells import (
    RANK_COLUMNS,
    RUN_COLUMNS,
    UNDER_REASON,
    Mark,
    base_words,
    doubts,
    exchange_words,
    facts_of,
    is_alarming,
    mark_in_words,
    rank_cells,
    reason,
    run_cells,
    slowest_words,
    sparkline,
    state_word,
    summary,
)
from allranks.watch.views import Parts, RankView, RunView

KEYS = (
    ("up, down, k, j", "move; also page up and down, home, end"),
    ("tab", "switch between runs and ranks"),
    ("enter, l", "log of the run or rank; / searches it"),
    ("s", "save a checkpoint and stop; asks first"),
    ("q", "quit; the runs continue"),
    ("?", "this page"),
)
LOG_KEYS = "↑↓ scroll  ←→ other log  / search  end follow  q back"
NO_RUNS = "no runs here: start one with allranks run or allranks submit"
MAIN_KEYS = "↑↓ move  tab ranks  enter logs  s stop  q quit  ? help"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Everything that the main screen shows."""

    runs: Sequence[RunView]
    selected: str | None = None
    ranks: Sequence[RankView] = ()
    parts: Parts | None = None
    selected_rank: int | None = None  # set while the focus is on the ranks
    message: str = ""  # shown in place of the keys
    asks: bool = False  # the message is a question
    num_old: int = 0
    silence: str | None = None
    now: float = 0.0
    marks: Mapping[str, Mark] = field(default_factory=dict)


def screen(scene: Scene, width: int, height: int) -> list[Text]:
    """Exactly `height` lines of at most `width` cells."""
    lines = [title(scene, width)]
    room = max(1, height - 3)  # less title, header and keys
    wanted = len(scene.runs)
    selected = next((run for run in scene.runs if run.run == scene.selected), None)
    num_runs = min(wanted, room if selected is None else max(2, min(wanted, room // 2)))
    rest = room - num_runs
    if selected is not None and rest < 5:  # too few lines to show ranks
        num_runs = min(wanted, room - 1)
    lines += run_lines(scene, width, num_runs)
    if selected is not None:
        about = about_run(selected, scene, width)
        left = height - 1 - len(lines)
        about = about[: max(0, left)]
        lines += about + rank_lines(scene, width, left - len(about))
    lines = lines[: height - 1]
    lines += [Text() for _ in range(height - 1 - len(lines))]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return [*lines, bottom(scene, width)]


def title(scene: Scene, width: int) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(scene.now))
    said = Text("allranks watch", style="bold") + Text(f"  {summary(scene.runs)}")
    if scene.num_old:
        said.append(f", {scene.num_old} older (--all)", style="dim")
    if scene.silence:
        said.append("  ! SLURM does not answer", style="yellow")
    said.truncate(max(0, width - len(clock) - 2), overflow="ellipsis")
    said.append(" " * (width - said.cell_len - len(clock)) + clock)
    return said


def run_lines(scene: Scene, width: int, num_rows: int) -> list[Text]:
    """The header and `num_rows` runs around the selected one."""
    if not scene.runs:
        return [Text(), Text(NO_RUNS)]
    names = [run.run for run in scene.runs]
    at = names.index(scene.selected) if scene.selected in names else 0
    shown = scene.runs[window(len(names), at, rows_of(len(names), num_rows))]
    rows = [run_cells(run, scene.now) for run in shown]
    widths = fit(RUN_COLUMNS, rows, width - 2)
    lines = [Text("  ") + header(RUN_COLUMNS, widths)]
    for run, row in zip(shown, rows, strict=True):
        is_selected = run.run == scene.selected
        line = Text("> " if is_selected else "  ") + run_line(run, row, widths, scene.now)
        lines.append(chosen(line, scene.selected_rank is None) if is_selected else line)
    return lines + more(len(names) - len(shown), "run", num_rows - len(shown))


def run_line(run: RunView, row: dict[str, Text], widths: dict[str, int], now: float) -> Text:
    """One run; a queued or failed one shows its reason in place of the numbers."""
    curve = sparkline(list(run.losses), widths.get("curve", 0))
    row = row | {
        "run": Text(shortened(row["run"].plain, widths.get("run", 0))),
        "curve": Text(curve, style="cyan"),
    }
    said = reason(run, now)
    if not said or not (run.state == "queued" or is_alarming(run)):
        return join(RUN_COLUMNS, widths, row)
    before = {key: size for key, size in widths.items() if key not in UNDER_REASON}
    line = join(RUN_COLUMNS, before, row)
    room = sum(widths.values()) + len(widths) - 1 - line.cell_len - 1
    if room < 1:
        return line
    style = STATE_STYLES.get(state_word(run), "") if run.state != "queued" else ""
    text = Text(said, style=style)
    text.truncate(max(0, room), overflow="ellipsis", pad=True)
    return line + Text(" ") + text


def window(length: int, at: int, rows: int) -> slice:
    """`rows` items of a list, with `at` in the middle if possible."""
    first = max(0, min(at - rows // 2, length - rows))
    return slice(first, first + rows)


def about_run(run: RunView, scene: Scene, width: int) -> list[Text]:
    """The selected run: what the table of runs has no column for."""
    word = state_word(run)
    rule = Text(f"── {clean(run.run)} ", style="bold")
    rule.append("─" * max(0, width - rule.cell_len), style="dim")
    facts = [word, *facts_of(run), f"{number(run.rank_hours)} {run.hours_unit}"]
    if run.judgement is not None and run.judgement.mfu is not None:
        facts.append(mfu_words(run.judgement.mfu))
    facts += [f"{clean(name)} {metric(value)}" for name, value in run.metrics.items()]
    if run.is_compared:
        of = f" (median of {run.repeats} runs)" if run.repeats > 1 else ""
        facts.insert(1, f"{percent(run.efficiency)} efficiency{of}")
        facts.append(base_words(run, 24))
    lines = [rule, Text("  ".join(facts))]
    if said := reason(run, scene.now):
        lines.append(Text(said, style=STATE_STYLES.get(word, "")))
    lines += [Text(doubt, style="yellow") for doubt in doubts(run)]
    if is_alarming(run):
        lines.append(Text(f"why: allranks doctor {clean(run.run)}"))
    lines += [line for one in run.verdict_lines for line in wrapped(one, width)]
    if scene.parts is not None:
        shares, slowest = parts_lines(scene.parts, run)
        fits = shares.cell_len + slowest.cell_len + 2 <= width
        lines += [shares + Text("  ") + slowest] if fits or not slowest else [shares, slowest]
        if waits := exchange_words(scene.parts):
            lines.append(Text(waits))
    for line in lines[1:]:
        line.truncate(width, overflow="ellipsis")
    return lines


def wrapped(one: VerdictLine, width: int) -> list[Text]:
    """A line of the verdict with its label; further lines are indented."""
    indent = len(LIMITED) + 2
    style = "yellow" if one.label == WARNING else ""
    whole = f"{one.text}   {one.aside}".rstrip()
    texts = textwrap.wrap(whole, max(20, width - indent))
    if one.aside and not texts[-1].endswith(one.aside):  # it stays in one piece
        texts = [*textwrap.wrap(one.text, max(20, width - indent)), one.aside]
    labels = [one.label, *[""] * (len(texts) - 1)]
    return [
        Text(label.ljust(indent), style="dim") + Text(text, style=style)
        for label, text in zip(labels, texts, strict=True)
    ]


def parts_lines(parts: Parts, run: RunView) -> tuple[Text, Text]:
    """Where a step's time goes, and which rank the others wait for."""
    whole = sum(parts.seconds.values()) or 1.0
    seconds_of = own_work_divided(parts.seconds, run.judged)
    by_size = sorted(seconds_of.items(), key=lambda item: -item[1])
    shares = "  ".join(
        f"{PART_WORDS.get(part, part)} {percent(seconds / whole, 0)}"
        for part, seconds in by_size
        if seconds >= 0.005 * whole
    )
    slowest = Text(slowest_words(parts), style="yellow")
    return Text(f"step {duration(whole)}: {shares}"), slowest


def rank_lines(scene: Scene, width: int, num_rows: int) -> list[Text]:
    """The header and the ranks, in at most `num_rows` lines."""
    if num_rows < 2 or not scene.ranks:
        return []
    shown = visible_ranks(scene, rows_of(len(scene.ranks), num_rows - 1))
    by_rank = {r.rank: rank_cells(r, scene.marks, scene.now) for r in scene.ranks}
    widths = fit(RANK_COLUMNS, list(by_rank.values()), width - 2)
    lines = [Text("  ") + header(RANK_COLUMNS, widths)]
    for rank in shown:
        is_selected = rank.rank == scene.selected_rank
        line = Text("> " if is_selected else "  ")
        line += join(RANK_COLUMNS, widths, by_rank[rank.rank])
        lines.append(chosen(line, True) if is_selected else line)
    return lines + more(len(scene.ranks) - len(shown), "rank", num_rows - 1 - len(shown))


def chosen(line: Text, has_focus: bool) -> Text:
    """The selected line; with the focus it is reversed, without colours, which would be too."""
    if has_focus:
        return Text(line.plain, style="reverse", no_wrap=True)
    line.stylize("bold")
    return line


def visible_ranks(scene: Scene, num_rows: int) -> list[RankView]:
    """The ranks around the selected one; always with the slowest, on top if it is far away."""
    numbers = [rank.rank for rank in scene.ranks]
    at = numbers.index(scene.selected_rank) if scene.selected_rank in numbers else 0
    shown = list(scene.ranks[window(len(numbers), at, num_rows)])
    slowest = [rank for rank in scene.ranks if rank.slowest and rank not in shown]
    if slowest and num_rows > 1:
        shown = slowest + list(scene.ranks[window(len(numbers), at, num_rows - 1)])
    return shown


def rows_of(length: int, room: int) -> int:
    """How many rows fit; if not all do, one line is kept to say how many more there are."""
    return room if length <= room or room < 2 else room - 1


def more(hidden: int, noun: str, room: int) -> list[Text]:
    return [Text(f"  … {count(hidden, f'more {noun}')}", style="dim")] if hidden and room else []


def bottom(scene: Scene, width: int) -> Text:
    if not scene.message:
        line = Text(MAIN_KEYS, style="dim")
    else:
        line = Text(clean(scene.message), style="bold reverse" if scene.asks else "bold")
    line.truncate(width, overflow="ellipsis")
    return line


def help_screen(marks: Mapping[str, Mark], width: int, height: int) -> list[Text]:
    """The keys, and what the signs mean."""
    lines = [Text("allranks watch: keys", style="bold"), Text()]
    lines += [Text(f"  {keys:<16}{what}") for keys, what in KEYS]
    lines += [
        Text(),
        Text("marks: + is good, ! needs attention (--mark NAME=LIMITS)", style="bold"),
    ]
    typed = [mark_in_words(name, mark) for name, mark in marks.items()]
    lines += [Text(f"  {words:<16}{meaning}") for words, meaning in typed]
    lines += [
        Text(),
        Text("took, data, wait: averages over the last steps"),
        Text("wait: for other ranks and the network"),
        Text("eff: speed compared with perfect scaling of a smaller layout"),
        Text("hours: GPU-hours, or rank-hours on CPUs, of all attempts"),
    ]
    return framed(lines, width, height, "press any key to go back")


def log_screen(
    title: str, lines: Sequence[str], width: int, height: int, bottom: str, wanted: str = ""
) -> list[Text]:
    """A page of a log, with the search term highlighted."""
    head = Text(clean(title), style="bold")
    body = [Text(clean(line)) for line in lines[-(height - 2) :]] if height > 2 else []
    for line in body if wanted else []:
        line.highlight_regex(f"(?i){re.escape(wanted)}", "reverse")
    return framed([head, *body], width, height, bottom)


def framed(lines: list[Text], width: int, height: int, keys: str) -> list[Text]:
    lines = lines[: height - 1]
    lines += [Text() for _ in range(height - 1 - len(lines))]
    lines = [*lines, Text(keys, style="dim")]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines
