"""A profile for people, in the terminal and as profile.md, drawn from its JSON alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from allranks.bench import profile
from allranks.run.events import to_json
from allranks.run.folder import RunDir, write_atomically

Found = Mapping[str, Any]
NARROW = 80
TERMINAL_ROWS = 6  # of a table; profile.md has all


@dataclass(frozen=True, slots=True)
class Part:
    """A table. The first column is text, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def parts(found: Found) -> Iterator[Part]:
    """Every table that has something to say."""
    whole = mean(found, "step_seconds")
    yield Part(
        "ranks (a step, in the mean)",
        ("rank", "step", "compute", "comm", "exposed", "hidden", "idle"),
        [rank_row(rank) for rank in found["ranks"]],
    )
    columns = ("", "calls", "time", "share")
    kernels = [[*timed(row), share(row["seconds"], whole)] for row in found["kernels"]]
    yield Part("kernels of the device", columns, kernels)
    operators = [[*timed(row), share(row["seconds"], whole)] for row in found["operators"]]
    yield Part("operators of the host, their own time", columns, operators)
    yield Part(
        "communication of a step",
        ("collective", "calls", "bytes", "time"),
        [
            [row["name"], calls(row["count"]), in_bytes(row["bytes"]), duration(row["seconds"])]
            for row in found["communication"]
        ],
    )
    yield Part(
        f"every collective of one step of rank {found['ranks'][0]['rank']}",
        ("collective", "size", "type", "ranks", "calls", "time"),
        [collective_row(row) for row in found["collectives_of_a_step"]],
    )
    yield Part(
        "copies of a step",
        ("copy", "calls", "bytes", "time"),
        [
            [row["name"], calls(row["count"]), in_bytes(row["bytes"]), duration(row["seconds"])]
            for row in found["copies"]
        ],
    )
    yield Part(
        "idle: nothing computed, exchanged or copied",
        ("the host in", "until", "gaps", "time"),
        [
            [row["during"], row["before"], calls(row["count"]), duration(row["seconds"])]
            for row in found["gaps"]
        ],
    )


def rank_row(rank: Found) -> list[str]:
    hidden = rank["hidden_share"]
    times = ("step", "compute", "communication", "exposed")
    return [
        str(rank["rank"]),
        *(duration(rank[f"{name}_seconds"]) for name in times),
        "-" if hidden is None else f"{hidden:.0%}",
        duration(rank["idle_seconds"]),
    ]


def timed(row: Found) -> list[str]:
    return [row["name"], calls(row["count"]), duration(row["seconds"])]


def collective_row(row: Found) -> list[str]:
    group = "-" if row["group_size"] is None else str(row["group_size"])
    if row["group"] and row["group"] not in ("default_pg", "undefined"):
        group += f" ({row['group']})"
    numbers = [calls(row["count"]), duration(row["seconds"])]
    return [row["name"], in_bytes(row["bytes"]), row["dtype"] or "-", group, *numbers]


def remarks(found: Found) -> list[str]:
    """What is said besides the tables."""
    words = {"compute": "computes", "exposed": "waits for communication", "idle": "is idle"}
    lines = [
        f"rank {one['rank']} {words[one['part'].removesuffix('_seconds')]} "
        f"{duration(abs(one['seconds']))} a step {'longer' if one['seconds'] > 0 else 'less'} "
        "than the median of the ranks"
        for one in found["differences"]
    ]
    if found["device"] == "cpu" and found["communication"]:
        lines.append("the time of a collective includes waiting for the last rank to come to it")
    if any(rank["is_blind"] for rank in found["ranks"]):
        lines.append(
            "what the GPU itself did is missing from the traces: its driver may be set to let "
            "nobody but administrators profile (see the ranks' logs); this is the host's side alone"
        )
    return [*lines, found["verdict"]]


def where(found: Found) -> list[str]:
    """Where the traces are, and what opens them."""
    ranks = found["ranks"]
    size = in_bytes(sum(rank["trace_bytes"] for rank in ranks))
    first, last = ranks[0]["first_step"], ranks[0]["last_step"]
    return [
        f"traces of steps {first} to {last} ({size} in all); https://ui.perfetto.dev opens each:",
        *(rank["trace"] for rank in ranks),
    ]


def show(console: Console, found: Found) -> None:
    """The summary at the end of a run."""
    for part in parts(found):
        if part.rows:
            console.print(table_of(part, console.width))
    for line in remarks(found):
        console.print(Text(line, style="bold" if line == found["verdict"] else ""), soft_wrap=True)
    head, *files = where(found)
    console.print(Text(head), soft_wrap=True)
    for file in files[:TERMINAL_ROWS]:
        console.print(Text(f"  {file}", style="dim"), soft_wrap=True)
    if len(files) > TERMINAL_ROWS:
        console.print(Text(f"  and {len(files) - TERMINAL_ROWS} more beside them", style="dim"))


def show_profile(run: RunDir, console: Console) -> Found | None:
    """Summarise the traces of the run's last attempt; None, and why, if there are none."""
    found = profile.summarise(run)
    if found is None:
        console.print(f"note: no profile: {profile.why_none(run)}", style="yellow", soft_wrap=True)
        return None
    write_atomically(run.path / "profile.json", to_json(found, indent=1) + "\n")
    write_atomically(run.path / "profile.md", markdown(found))
    show(console, found)
    if found["device"] == "cpu" and any(one.get("with_device") for one in profile.events_of(run)):
        how = f"{profile.LOUDNESS}=0 has torch's profiler say why"
        note = f"note: nothing was recorded of the GPU: {how}"
        console.print(note, style="yellow", soft_wrap=True)
    return found


def table_of(part: Part, width: int) -> Table:
    """At most `width` columns wide: it is the texts that are cut."""
    rows = part.rows if part.columns[0] == "rank" else part.rows[:TERMINAL_ROWS]
    columns, cells = list(part.columns), [list(row) for row in rows]
    if part.columns[0] == "rank" and width < NARROW:
        gone = columns.index("comm")  # with what is exposed and what is hidden it is told
        columns, cells = without(columns, gone), [without(row, gone) for row in cells]
    texts = 2 if "until" in columns else 1
    numbers = zip(*(row[texts:] for row in cells), strict=True)
    taken = sum(max(map(len, column)) + 2 for column in numbers)
    room = max(12, (width - taken - 8) // texts)
    table = Table(box=box.SIMPLE_HEAD, title=part.title, title_justify="left", padding=(0, 1, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < texts else "right", no_wrap=True)
    for row in cells:
        table.add_row(*(Text(cut(cell, room)) for cell in row[:texts]), *map(Text, row[texts:]))
    if len(rows) < len(part.rows):
        table.caption = f"and {len(part.rows) - len(rows)} more in profile.md"
        table.caption_justify = "left"
    return table


def without(cells: list[str], number: int) -> list[str]:
    return [cell for place, cell in enumerate(cells) if place != number]


def cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def markdown(found: Found) -> str:
    """The same, whole, as profile.md."""
    lines = [f"# Profile of {found['run']}", "", *(f"- {line}" for line in remarks(found))]
    for part in parts(found):
        if not part.rows:
            continue
        lines += ["", f"## {part.title[0].upper()}{part.title[1:]}", ""]
        lines += ["| " + " | ".join(part.columns) + " |", "|---" * len(part.columns) + "|"]
        lines += [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in r) + " |" for r in part.rows
        ]
    head, *files = where(found)
    return "\n".join([*lines, "", head, "", *(f"- `{file}`" for file in files), ""])


def mean(found: Found, key: str) -> float:
    values: list[float] = [rank[key] for rank in found["ranks"]]
    return sum(values) / len(values)


def share(seconds: float, whole: float) -> str:
    return f"{seconds / whole:.1%}" if whole else "-"


def calls(count: float) -> str:
    return f"{count:,.0f}" if count == int(count) else f"{count:,.1f}"


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.0f} µs"


def in_bytes(count: float | None) -> str:
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            is_whole = unit == "B" and count == int(count)
            return f"{count:,.0f} B" if is_whole else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
