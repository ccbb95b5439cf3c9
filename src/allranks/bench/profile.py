"""The traces of a run's ranks in numbers: profile.json, profile.md, and the summary on the screen.

A rank with a GPU is judged by what its GPU does, any other by its own operators. Numbers of a step
are averages over the traced steps; those of all ranks together are averages over the ranks.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.bench import trace as traces
from allranks.bench.trace import Exchange, Span, Trace
from allranks.run.events import read_events, to_json
from allranks.run.folder import RunDir, write_atomically
from allranks.show import tables
from allranks.show.numbers import NOTHING, count, duration, number, percent, size
from allranks.show.tables import Table, show_table

TOP = 10
TOP_GAPS = 5
MIN_GAP_SECONDS = 20e-6  # below, it is the profiler's own time as likely as not
DIFFERENT = 0.10  # of a rank from the others

VARIABLE = "ALLRANKS_PROFILE"  # how many steps are to be traced; read by the probe of every rank
LOUDNESS = "KINETO_LOG_LEVEL"  # of torch's profiler; see probe/inject

Fields = dict[str, Any]


def summarise(run: RunDir, attempt: int | None = None) -> Fields | None:
    """Read the traces of an attempt, the last by default; None if there are none."""
    attempts = run.attempts()
    number = attempts[-1] if attempt is None and attempts else attempt
    if number is None:
        return None
    files = traces.trace_files(run, number)
    ranks = []
    for rank, path in files.items():  # one at a time: they are large
        trace = traces.read_trace(path, rank)
        if trace is not None:
            ranks.append({**rank_summary(trace), "trace": str(path), **size_of(path)})
    return {"v": 1, "run": run.name, "attempt": number, **together(ranks)} if ranks else None


def events_of(run: RunDir) -> Iterator[Fields]:
    """What the ranks of its last attempt said of their traces."""
    attempt = max(run.attempts(), default=0)
    for rank in run.ranks(attempt):
        yield from read_events(run.events(attempt, rank), kind="profile")


def why_none(run: RunDir) -> str:
    problems = (str(one["problem"]) for one in events_of(run) if "problem" in one)
    return next(problems, "no optimizer step was seen")


def size_of(path: Path) -> Fields:
    return {"trace_bytes": path.stat().st_size}


def rank_summary(trace: Trace) -> Fields:
    """One rank's steps."""
    steps = trace.num_steps
    exchanges = [one for one in traces.exchanges_of(trace) if is_inside(trace, one.asked)]
    compute = compute_of(trace)
    judged = [one for one in exchanges if one.is_on_device or not trace.device]
    exchanging = traces.union((one.begin, one.end) for one in judged)
    computing = traces.union((span.begin, span.end) for span in compute)
    copies = copies_of(trace)
    begin, end = window_of(trace, [*compute, *copies], judged)
    exchanging = traces.within(exchanging, begin, end)
    computing = traces.within(computing, begin, end)
    copying = [(span.begin, span.end) for span in copies]
    busy = traces.union([*exchanging, *computing, *copying])
    hidden, in_flight = traces.overlap(exchanging, computing), traces.length(exchanging)
    idle = traces.gaps(busy, begin, end)
    times = [
        later - earlier
        for (_, earlier), (_, later) in zip(trace.marks, trace.marks[1:], strict=False)
    ]
    return {
        "rank": trace.rank,
        "device": "cuda" if trace.device else "cpu",
        "is_blind": trace.is_blind,
        "steps": steps,
        "first_step": trace.marks[0][0] + 1,
        "last_step": trace.marks[-1][0],
        "step_seconds": statistics.fmean(times),
        "compute_seconds": traces.length(computing) / steps,
        "communication_seconds": in_flight / steps,
        "exposed_seconds": (in_flight - hidden) / steps,
        "hidden_share": hidden / in_flight if in_flight else None,
        "idle_seconds": traces.length(idle) / steps,
        "gaps": gaps_of(trace, idle, steps, [*compute, *copies]),
        "operators": operators_of(trace, steps),
        "kernels": kernels_of(trace, steps),
        "communication": by_collective(exchanges, steps),
        "copies": by_copy(copies, steps),
        "collectives_of_a_step": of_one_step(trace, exchanges, times),
    }


def is_inside(trace: Trace, moment: float) -> bool:
    return trace.begin <= moment < trace.end


def launched_inside(trace: Trace, kinds: Sequence[str]) -> list[Span]:
    """What a device did for these steps, which is not when they were on the host."""
    return [
        span
        for number, span in enumerate(trace.device)
        if span.kind in kinds and is_inside(trace, trace.launched[number])
    ]


def compute_of(trace: Trace) -> list[Span]:
    if trace.device:
        kernels = launched_inside(trace, ("kernel", "gpu_memset"))
        return [span for span in kernels if not traces.is_exchange(span)]
    return [s for s in trace.host if is_inside(trace, s.begin) and not s.name.startswith("c10d::")]


def copies_of(trace: Trace) -> list[Span]:
    return launched_inside(trace, ("gpu_memcpy",))


def window_of(
    trace: Trace, spans: Sequence[Span], exchanges: Sequence[Exchange]
) -> tuple[float, float]:
    """From when to when the steps were on the device; on the host, between their marks."""
    if not trace.device or not spans:
        return trace.begin, trace.end
    ends = [*(span.end for span in spans), *(one.end for one in exchanges)]
    return min(span.begin for span in spans), max(ends)


# Where the time goes.


def operators_of(trace: Trace, steps: int) -> list[Fields]:
    """Of the host, by the time that they took themselves."""
    inside = [span for span in trace.host if is_inside(trace, span.begin)]
    sums: dict[str, list[float]] = defaultdict(list)
    for span, seconds in traces.self_seconds(inside):
        sums[span.name].append(seconds)
    return sum_by_name(sums, steps)


def kernels_of(trace: Trace, steps: int) -> list[Fields]:
    """Of the device; those that exchange are told apart in `communication`."""
    sums: dict[str, list[float]] = defaultdict(list)
    for span in compute_of(trace) if trace.device else []:
        sums[short_kernel(span.name)].append(span.seconds)
    return sum_by_name(sums, steps)


def sum_by_name(sums: Mapping[str, Sequence[float]], steps: int) -> list[Fields]:
    rows = [
        {"name": name, "count": len(times) / steps, "seconds": sum(times) / steps}
        for name, times in sums.items()
    ]
    return longest_first(rows)


def longest_first(rows: list[Fields]) -> list[Fields]:
    return sorted(rows, key=lambda row: -row["seconds"])


def short_kernel(name: str) -> str:
    """A kernel's name without the types that it was made for."""
    bare = re.sub(r"^void ", "", name)
    return re.split(r"[<(]", bare, maxsplit=1)[0].strip() or name


def gaps_of(
    trace: Trace, idle: Sequence[traces.Interval], steps: int, spans: Iterable[Span]
) -> list[Fields]:
    """When nothing was computed, exchanged or copied, and what the host was doing then."""
    ordered = sorted(spans, key=traces.begin_of)
    sums: dict[tuple[str, str], list[float]] = defaultdict(list)
    upcoming = 0
    for begin, end in idle:
        if end - begin < MIN_GAP_SECONDS:
            continue
        while upcoming < len(ordered) and ordered[upcoming].begin < end:
            upcoming += 1
        following = ordered[upcoming].name if upcoming < len(ordered) else "the last step"
        sums[doing_at(trace, (begin + end) / 2), short_kernel(following)].append(end - begin)
    rows = [
        {
            "during": during,
            "before": before,
            "count": len(times) / steps,
            "seconds": sum(times) / steps,
        }
        for (during, before), times in sums.items()
    ]
    return longest_first(rows)


def doing_at(trace: Trace, moment: float) -> str:
    """The innermost thing that torch says the training's thread was in."""
    inner = [
        span
        for span in trace.annotations
        if span.begin <= moment < span.end
        and span.thread == trace.main_thread
        and not span.name.startswith(traces.STEP_MARK)
    ]
    if not inner:
        return "Python"
    name = min(inner, key=lambda span: span.seconds).name
    return "waiting for data" if name.startswith("enumerate(DataLoader)") else name


# Communication and copies.


def by_collective(exchanges: Sequence[Exchange], steps: int) -> list[Fields]:
    """All of a kind together, of a step."""
    kinds: dict[tuple[str, bool], list[Exchange]] = defaultdict(list)
    for one in exchanges:
        kinds[one.name, one.is_on_device].append(one)
    rows = [
        {
            "name": name,
            "is_on_device": is_on_device,
            "count": len(ones) / steps,
            "bytes": sum(one.num_bytes or 0 for one in ones) / steps
            if any(one.num_bytes is not None for one in ones)
            else None,
            "seconds": sum(one.end - one.begin for one in ones) / steps,
        }
        for (name, is_on_device), ones in kinds.items()
    ]
    return longest_first(rows)


def of_one_step(
    trace: Trace, exchanges: Sequence[Exchange], times: Sequence[float]
) -> list[Fields]:
    """Every collective of the step whose length is in the middle, equal ones counted."""
    middle = sorted(range(len(times)), key=lambda step: times[step])[len(times) // 2]
    counted: dict[tuple[Any, ...], list[float]] = {}
    for one in exchanges:
        if traces.step_at(trace, one.asked) == middle:
            key = (one.name, one.num_bytes, one.dtype, one.group_size, one.group)
            counted.setdefault(key, []).append(one.end - one.begin)
    names = ("name", "bytes", "dtype", "group_size", "group")
    return [
        {**dict(zip(names, key, strict=True)), "count": len(took), "seconds": sum(took)}
        for key, took in counted.items()
    ]


def by_copy(copies: Sequence[Span], steps: int) -> list[Fields]:
    """Copies of a step, by where from and where to."""
    kinds: dict[str, list[Span]] = defaultdict(list)
    for span in copies:
        kinds[span.name].append(span)
    rows = [
        {
            "name": name,
            "count": len(spans) / steps,
            "bytes": sum(span.args.get("bytes", 0) for span in spans) / steps,
            "seconds": sum(span.seconds for span in spans) / steps,
        }
        for name, spans in kinds.items()
    ]
    return longest_first(rows)


# All ranks.


def together(ranks: Sequence[Mapping[str, Any]]) -> Fields:
    """The ranks side by side, and what they have in common."""
    own = ("operators", "kernels", "communication", "copies", "gaps", "collectives_of_a_step")
    return {
        "device": ranks[0]["device"],
        "steps": min(rank["steps"] for rank in ranks),
        "ranks": [{key: rank[key] for key in rank if key not in own} for rank in ranks],
        "operators": mean_rows(ranks, "operators", ("name",)),
        "kernels": mean_rows(ranks, "kernels", ("name",)),
        "communication": mean_rows(ranks, "communication", ("name", "is_on_device")),
        "copies": mean_rows(ranks, "copies", ("name",)),
        "gaps": mean_rows(ranks, "gaps", ("during", "before"))[:TOP_GAPS],
        "collectives_of_a_step": ranks[0]["collectives_of_a_step"],
        "differences": differences(ranks),
        "verdict": verdict(ranks),
    }


def mean_rows(ranks: Sequence[Mapping[str, Any]], table: str, keys: Sequence[str]) -> list[Fields]:
    """The same rows of all ranks as one, longest first."""
    sums: dict[tuple[Any, ...], Fields] = {}
    for rank in ranks:
        for row in rank[table]:
            key = tuple(row[name] for name in keys)
            mean = sums.setdefault(key, dict.fromkeys((n for n in row if n not in keys), 0.0))
            for name in mean:
                known = mean[name] is not None and row[name] is not None
                mean[name] = mean[name] + row[name] / len(ranks) if known else None
    rows = [{**dict(zip(keys, key, strict=True)), **mean} for key, mean in sums.items()]
    return longest_first(rows)[:TOP]


def differences(ranks: Sequence[Mapping[str, Any]]) -> list[Fields]:
    """Where one rank is far from the median of all."""
    found = []
    for part in ("compute_seconds", "exposed_seconds", "idle_seconds"):
        middle = statistics.median(rank[part] for rank in ranks)
        far = max(ranks, key=lambda rank: abs(rank[part] - middle))
        away = far[part] - middle
        if len(ranks) > 1 and abs(away) > DIFFERENT * far["step_seconds"] / 2:
            found.append({"part": part, "rank": far["rank"], "seconds": away})
    return found


def verdict(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Where a step's time goes, in a sentence."""
    step = statistics.fmean(rank["step_seconds"] for rank in ranks)
    parts = {
        name: statistics.fmean(rank[key] for rank in ranks) / step
        for name, key in (
            ("computing", "compute_seconds"),
            ("exchanging with nothing computed meanwhile", "exposed_seconds"),
            ("idle", "idle_seconds"),
        )
    }
    said = ", ".join(
        f"{percent(share, 0)} {name}" for name, share in parts.items() if share >= 0.005
    )
    hidden = [rank["hidden_share"] for rank in ranks if rank["hidden_share"] is not None]
    if not hidden:
        return f"of a step, {said}; nothing is exchanged"
    return (
        f"of a step, {said}; {percent(statistics.fmean(hidden), 0)} of the communication is hidden"
    )


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
    found = summarise(run)
    if found is None:
        console.print(f"note: no profile: {why_none(run)}", style="yellow", soft_wrap=True)
        return None
    write_atomically(run.path / "profile.json", to_json(found, indent=1) + "\n")
    write_atomically(run.path / "profile.md", markdown(found))
    show(console, found)
    if found["device"] == "cpu" and any(one.get("with_device") for one in events_of(run)):
        how = f"{LOUDNESS}=0 has torch's profiler say why"
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
