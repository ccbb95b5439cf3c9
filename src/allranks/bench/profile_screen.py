"""A profile for people, in the terminal and as profile.md, drawn from its JSON alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.bench import profile
from allranks.run.events import to_json
from allranks.run.folder import RunDir, write_atomically
from allranks.show import tables
from allranks.show.numbers import NOTHING, count, duration, number, percent, size
from allranks.show.tables import Table, show_table

Found = Mapping[str, Any]
TERMINAL_ROWS = 6  # of a table; profile.md has all
MOST_NAME = 44  # characters of a kernel's name in the terminal; profile.md has it whole


def parts(found: Found) -> Iterator[Table]:
    """Every table that has something to say."""
    whole = mean(found, "step_seconds")
    yield Table(
        "ranks (a step, in the mean)",
        ("rank", "step", "compute", "comm", "exposed", "hidden", "idle"),
        [rank_row(rank) for rank in found["ranks"]],
    )
    columns = ("", "calls", "time", "share")
    yield Table("kernels of the device", columns, [timed(row, whole) for row in found["kernels"]])
    operators = [timed(row, whole) for row in found["operators"]]
    yield Table("operators of the host, their own time", columns, operators)
    yield Table(
        "communication of a step",
        ("collective", "calls", "bytes", "time"),
        [
            [row["name"], calls(row["count"]), size(row["bytes"]), duration(row["seconds"])]
            for row in found["communication"]
        ],
    )
    yield Table(
        f"every collective of one step of rank {found['ranks'][0]['rank']}",
        ("collective", "size", "type", "ranks", "calls", "time"),
        [collective_row(row) for row in found["collectives_of_a_step"]],
    )
    yield Table(
        "copies of a step",
        ("copy", "calls", "bytes", "time"),
        [
            [row["name"], calls(row["count"]), size(row["bytes"]), duration(row["seconds"])]
            for row in found["copies"]
        ],
    )
    yield Table(
        "idle: nothing computed, exchanged or copied",
        ("the host in", "until", "gaps", "time"),
        [
            [row["during"], row["before"], calls(row["count"]), duration(row["seconds"])]
            for row in found["gaps"]
        ],
        texts=("until",),
    )


def rank_row(rank: Found) -> list[str]:
    times = ("step", "compute", "communication", "exposed")
    return [
        str(rank["rank"]),
        *(duration(rank[f"{name}_seconds"]) for name in times),
        percent(rank["hidden_share"]),
        duration(rank["idle_seconds"]),
    ]


def timed(row: Found, whole: float) -> list[str]:
    share = percent(row["seconds"] / whole if whole else None)
    return [row["name"], calls(row["count"]), duration(row["seconds"]), share]


def collective_row(row: Found) -> list[str]:
    group = count(row["group_size"])
    if row["group"] and row["group"] not in ("default_pg", "undefined"):
        group += f" ({row['group']})"
    numbers = [calls(row["count"]), duration(row["seconds"])]
    return [row["name"], size(row["bytes"]), row["dtype"] or NOTHING, group, *numbers]


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
    whole = size(sum(rank["trace_bytes"] for rank in ranks))
    first, last = ranks[0]["first_step"], ranks[0]["last_step"]
    return [
        f"traces of steps {first} to {last} ({whole} in all); https://ui.perfetto.dev opens each:",
        *(rank["trace"] for rank in ranks),
    ]


def show(console: Console, found: Found) -> None:
    """The summary at the end of a run."""
    for table in parts(found):
        if table.rows:
            console.print()
            show_table(console, shortened(table))
    console.print()
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


def shortened(table: Table) -> Table:
    """For the terminal: the first rows, and long names cut. All ranks are shown."""
    if table.columns[0] == "rank":
        return table
    rows = [[cut(str(cell)) for cell in row] for row in table.rows[:TERMINAL_ROWS]]
    more = len(table.rows) - len(rows)
    title = f"{table.title} (and {more} more in profile.md)" if more else table.title
    return replace(table, title=title, rows=rows)


def cut(text: str) -> str:
    return text if len(text) <= MOST_NAME else text[: MOST_NAME - 1] + "…"


def markdown(found: Found) -> str:
    """Everything, as profile.md."""
    lines = [f"# Profile of {found['run']}", "", *(f"- {line}" for line in remarks(found)), ""]
    for table in parts(found):
        if table.rows:
            heading = f"{table.title[0].upper()}{table.title[1:]}"
            lines += tables.markdown(replace(table, title=heading), "##")
    head, *files = where(found)
    return "\n".join([*lines, head, "", *(f"- `{file}`" for file in files), ""])


def mean(found: Found, key: str) -> float:
    values: list[float] = [rank[key] for rank in found["ranks"]]
    return sum(values) / len(values)


def calls(value: float) -> str:
    return count(value) if value == int(value) else number(value)
