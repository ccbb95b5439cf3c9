"""The traces of a run's ranks in numbers: profile.json, profile.md, and the summary on the screen.

A rank with a GPU is judged by what its GPU does, any other by its own operators. Numbers of a step
are averages over the traced steps; those of all ranks together are averages over the ranks.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.run.events import read_events, to_json
from allranks.run.folder import RunDir, write_atomically
from allranks.show import tables
from allranks.show.numbers import NOTHING, count, duration, number, percent, size
from allranks.show.tables import Table, show_table
from allranks.timing import trace as traces
from allranks.timing.result import LIMITED, judged, sentences
from allranks.timing.trace import Exchange, Span, Trace
from allranks.timing.verdict import judge

MAX_ROWS, MAX_GAPS = 10, 5  # of a table
TERMINAL_ROWS = 6  # of a table in the terminal; profile.md has all
MAX_NAME = 44  # characters of a kernel's name in the terminal; profile.md has it whole
MIN_GAP_SECONDS = 20e-6  # a shorter gap may well be the profiler's own time
DIFFERENT = 0.10  # of a rank from the others

VARIABLE = "ALLRANKS_PROFILE"  # how many steps are to be traced; read by the probe of every rank
LOUDNESS = "KINETO_LOG_LEVEL"  # of torch's profiler; see probe/inject

# What is known of each rank, with the names that tell its rows apart.
TABLES = {
    "operators": ("name",),
    "kernels": ("name",),
    "communication": ("name", "is_on_device"),
    "copies": ("name",),
    "gaps": ("during", "before"),
}

Fields = dict[str, Any]
Found = Mapping[str, Any]


def show_profile(run: RunDir, console: Console) -> Found | None:
    """Summarise the traces of the run's last attempt; if there are none, say why."""
    found = summarise(run)
    attempt = max(run.attempts(), default=0)
    events = (read_events(run.events(attempt, rank), kind="profile") for rank in run.ranks(attempt))
    said = list(itertools.chain.from_iterable(events))
    if found is None:
        problems = (str(one["problem"]) for one in said if "problem" in one)
        why = next(problems, "no optimizer step was seen")
        console.print(f"note: no profile: {why}", style="yellow", soft_wrap=True)
        return None
    write_atomically(run.path / "profile.json", to_json(found, indent=1) + "\n")
    write_atomically(run.path / "profile.md", markdown(found))
    show(console, found)
    if found["device"] == "cpu" and any(one.get("with_device") for one in said):
        note = f"nothing was recorded on the GPU: {LOUDNESS}=0 makes torch's profiler say why"
        console.print(f"note: {note}", style="yellow", soft_wrap=True)
    return found


def summarise(run: RunDir) -> Fields | None:
    """Read the traces of the last attempt; None if there are none."""
    attempt = max(run.attempts(), default=0)
    ranks = []
    for rank, path in traces.trace_files(run, attempt).items():  # one at a time: they are large
        trace = traces.read_trace(path, rank)
        if trace is not None:
            file = {"trace": str(path), "trace_bytes": path.stat().st_size}
            ranks.append({**rank_summary(trace), **file})
    if not ranks:
        return None
    limits = sentences(judged(judge(run)), LIMITED)
    return {"v": 1, "run": run.name, "attempt": attempt, **together(ranks, limits)}


# --- One rank -----------------------------------------------------------------------------------


def rank_summary(trace: Trace) -> Fields:
    """Where the time of one rank's steps went."""
    steps = trace.num_steps
    exchanges = [one for one in traces.exchanges_of(trace) if trace.covers(one.asked)]
    operators = [span for span in trace.host if trace.covers(span.begin)]
    compute = [span for span in operators if not span.name.startswith("c10d::")]
    copies: list[Span] = []
    if trace.device:
        # What a device did for these steps, which is not when they were on the host.
        launched = [s for n, s in enumerate(trace.device) if trace.covers(trace.launched[n])]
        copies = [span for span in launched if span.kind == "gpu_memcpy"]
        compute = [s for s in launched if s.kind != "gpu_memcpy" and not traces.is_exchange(s)]
    judged = [one for one in exchanges if one.is_on_device or not trace.device]
    begin, end = trace.begin, trace.end
    if spans := [*compute, *copies] if trace.device else []:  # when the steps were on the device
        begin = min(span.begin for span in spans)
        end = max([*(span.end for span in spans), *(one.end for one in judged)])
    exchanging = traces.within(traces.union((one.begin, one.end) for one in judged), begin, end)
    computing = traces.within(traces.union((s.begin, s.end) for s in compute), begin, end)
    busy = traces.union([*exchanging, *computing, *((s.begin, s.end) for s in copies)])
    idle = traces.gaps(busy, begin, end)
    hidden, in_flight = traces.overlap(exchanging, computing), traces.length(exchanging)
    times = [later - earlier for (_, earlier), (_, later) in pairwise(trace.marks)]
    own_times = traces.self_seconds(operators)
    kernels = compute if trace.device else []
    rows: dict[str, list[Fields]] = {
        "operators": per_step("operators", (((s.name,), t) for s, t in own_times), steps),
        "kernels": per_step(
            "kernels", (((short_kernel(s.name),), s.seconds) for s in kernels), steps
        ),
        "communication": per_step(
            "communication",
            (((one.name, one.is_on_device), one.end - one.begin) for one in exchanges),
            steps,
            [one.num_bytes for one in exchanges],
        ),
        "copies": per_step(
            "copies",
            (((span.name,), span.seconds) for span in copies),
            steps,
            [span.args.get("bytes", 0) for span in copies],
        ),
        "gaps": per_step("gaps", gaps_of(trace, idle, [*compute, *copies]), steps),
    }
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
        **rows,
        "collectives_of_a_step": of_one_step(trace, exchanges, times),
    }


def per_step(
    table: str,
    found: Iterable[tuple[tuple[Any, ...], float]],
    steps: int,
    sizes: Sequence[int | None] | None = None,
) -> list[Fields]:
    """What has the same names added up, as its share of a step, longest first.

    `found`: names and seconds; `sizes`: the bytes of each, where there are any.
    """
    groups: dict[tuple[Any, ...], list[tuple[float, int | None]]] = defaultdict(list)
    for place, (names, seconds) in enumerate(found):
        groups[names].append((seconds, sizes[place] if sizes else None))
    rows = []
    for names, ones in groups.items():
        row = dict(zip(TABLES[table], names, strict=True)) | {"count": len(ones) / steps}
        if sizes is not None:
            known = [num_bytes for _, num_bytes in ones if num_bytes is not None]
            row["bytes"] = sum(known) / steps if known else None
        rows.append(row | {"seconds": sum(seconds for seconds, _ in ones) / steps})
    return sorted(rows, key=lambda row: -row["seconds"])


def short_kernel(name: str) -> str:
    """A kernel's name without the types it was compiled for."""
    bare = re.sub(r"^void ", "", name)
    return re.split(r"[<(]", bare, maxsplit=1)[0].strip() or name


def gaps_of(
    trace: Trace, idle: Sequence[traces.Interval], spans: Iterable[Span]
) -> Iterator[tuple[tuple[str, str], float]]:
    """For each gap what the host was doing, what came next, and how long the gap was."""
    ordered = sorted(spans, key=traces.begin_of)
    upcoming = 0
    for begin, end in idle:
        if end - begin < MIN_GAP_SECONDS:
            continue
        while upcoming < len(ordered) and ordered[upcoming].begin < end:
            upcoming += 1
        following = ordered[upcoming].name if upcoming < len(ordered) else "the last step"
        yield (doing_at(trace, (begin + end) / 2), short_kernel(following)), end - begin


def doing_at(trace: Trace, moment: float) -> str:
    """The innermost annotation of torch's that the training thread was in."""
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


def of_one_step(
    trace: Trace, exchanges: Sequence[Exchange], times: Sequence[float]
) -> list[Fields]:
    """Every collective of the step of median length; equal ones are counted."""
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


# --- All ranks ----------------------------------------------------------------------------------


def together(ranks: Sequence[Found], limits: Sequence[str] = ()) -> Fields:
    """The ranks side by side, and the averages over all of them. `limits`: what limits the run."""
    own = (*TABLES, "collectives_of_a_step")
    means = {table: mean_rows(ranks, table) for table in TABLES}
    return {
        "device": ranks[0]["device"],
        "steps": min(rank["steps"] for rank in ranks),
        "ranks": [{key: rank[key] for key in rank if key not in own} for rank in ranks],
        **means,
        "gaps": means["gaps"][:MAX_GAPS],
        "collectives_of_a_step": ranks[0]["collectives_of_a_step"],
        "differences": differences(ranks),
        "verdict": "; ".join([*limits, hidden_words(ranks)]),
    }


def mean_rows(ranks: Sequence[Found], table: str) -> list[Fields]:
    """The average over the ranks of the rows with the same names, longest first."""
    keys = TABLES[table]
    sums: dict[tuple[Any, ...], Fields] = {}
    for rank in ranks:
        for row in rank[table]:
            key = tuple(row[name] for name in keys)
            mean = sums.setdefault(key, dict.fromkeys((n for n in row if n not in keys), 0.0))
            for name in mean:
                known = mean[name] is not None and row[name] is not None
                mean[name] = mean[name] + row[name] / len(ranks) if known else None
    rows = [{**dict(zip(keys, key, strict=True)), **mean} for key, mean in sums.items()]
    return sorted(rows, key=lambda row: -row["seconds"])[:MAX_ROWS]


def differences(ranks: Sequence[Found]) -> list[Fields]:
    """Where one rank is far from the median of all."""
    found = []
    for part in ("compute_seconds", "exposed_seconds", "idle_seconds"):
        middle = statistics.median(rank[part] for rank in ranks)
        far = max(ranks, key=lambda rank: abs(rank[part] - middle))
        away = far[part] - middle
        if len(ranks) > 1 and abs(away) > DIFFERENT * far["step_seconds"] / 2:
            found.append({"part": part, "rank": far["rank"], "seconds": away})
    return found


def hidden_words(ranks: Sequence[Found]) -> str:
    """How much of the communication costs no time."""
    hidden = [rank["hidden_share"] for rank in ranks if rank["hidden_share"] is not None]
    if not hidden:
        return "nothing is exchanged"
    return f"{percent(statistics.fmean(hidden), 0)} of the communication is hidden"


def mean_of(ranks: Sequence[Found], key: str) -> float:
    return statistics.fmean(rank[key] for rank in ranks)


# --- For people ---------------------------------------------------------------------------------


def show(console: Console, found: Found) -> None:
    """The summary at the end of a run."""
    for table in tables_of(found):
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
        console.print(
            Text(f"  and {len(files) - TERMINAL_ROWS} more in the same folders", style="dim")
        )


def markdown(found: Found) -> str:
    """Everything, as profile.md."""
    lines = [f"# Profile of {found['run']}", "", *(f"- {line}" for line in remarks(found)), ""]
    for table in tables_of(found):
        heading = f"{table.title[0].upper()}{table.title[1:]}"
        lines += tables.markdown(replace(table, title=heading), "##")
    head, *files = where(found)
    return "\n".join([*lines, head, "", *(f"- `{file}`" for file in files), ""])


def tables_of(found: Found) -> list[Table]:
    """Every table that has rows."""
    step = mean_of(found["ranks"], "step_seconds")

    def timed(row: Found) -> list[str]:
        share = percent(row["seconds"] / step if step else None)
        return [row["name"], calls(row), duration(row["seconds"]), share]

    def sized(row: Found) -> list[str]:
        return [row["name"], calls(row), size(row["bytes"]), duration(row["seconds"])]

    def gap(row: Found) -> list[str]:
        return [row["during"], row["before"], calls(row), duration(row["seconds"])]

    first = found["ranks"][0]["rank"]
    shares, sizes = ("calls", "time", "share"), ("calls", "bytes", "time")
    ranks = ("rank", "step", "compute", "comm", "exposed", "hidden", "idle")
    each = ("collective", "size", "type", "ranks", "calls", "time")
    idle = ("the host in", "until", "gaps", "time")
    all_tables = [
        Table("ranks (average step)", ranks, [*map(rank_row, found["ranks"])]),
        Table("GPU kernels", ("", *shares), [*map(timed, found["kernels"])]),
        Table("host operators, their own time", ("", *shares), [*map(timed, found["operators"])]),
        Table(
            "communication of a step", ("collective", *sizes), [*map(sized, found["communication"])]
        ),
        Table(
            f"every collective of one step of rank {first}",
            each,
            [*map(collective_row, found["collectives_of_a_step"])],
        ),
        Table("copies of a step", ("copy", *sizes), [*map(sized, found["copies"])]),
        Table(
            "idle: nothing computed, exchanged or copied",
            idle,
            [*map(gap, found["gaps"])],
            texts=("until",),
        ),
    ]
    return [table for table in all_tables if table.rows]


def rank_row(rank: Found) -> list[str]:
    times = ("step", "compute", "communication", "exposed")
    return [
        str(rank["rank"]),
        *(duration(rank[f"{name}_seconds"]) for name in times),
        percent(rank["hidden_share"]),
        duration(rank["idle_seconds"]),
    ]


def collective_row(row: Found) -> list[str]:
    group = count(row["group_size"])
    if row["group"] and row["group"] not in ("default_pg", "undefined"):
        group += f" ({row['group']})"
    numbers = [calls(row), duration(row["seconds"])]
    return [row["name"], size(row["bytes"]), row["dtype"] or NOTHING, group, *numbers]


def calls(row: Found) -> str:
    return count(row["count"]) if row["count"] == int(row["count"]) else number(row["count"])


def shortened(table: Table) -> Table:
    """For the terminal: the first rows, and long names cut. All ranks are shown."""
    if table.columns[0] == "rank":
        return table
    shown = [[str(cell) for cell in row] for row in table.rows[:TERMINAL_ROWS]]
    rows = [[c if len(c) <= MAX_NAME else c[: MAX_NAME - 1] + "…" for c in row] for row in shown]
    more = len(table.rows) - len(rows)
    title = f"{table.title} (and {more} more in profile.md)" if more else table.title
    return replace(table, title=title, rows=rows)


def remarks(found: Found) -> list[str]:
    """What is said besides the tables."""
    words = {"compute": "computes", "exposed": "waits for communication", "idle": "is idle"}
    lines = [
        f"rank {one['rank']} {words[one['part'].removesuffix('_seconds')]} "
        f"{duration(abs(one['seconds']))} {'longer' if one['seconds'] > 0 else 'less'} "
        "per step than the median rank"
        for one in found["differences"]
    ]
    if found["device"] == "cpu" and found["communication"]:
        lines.append("the time of a collective includes waiting for the last rank to reach it")
    if any(rank["is_blind"] for rank in found["ranks"]):
        lines.append(
            "what the GPU itself did is missing from the traces: its driver may let only "
            "administrators profile (see the ranks' logs); this is the host's side alone"
        )
    return [*lines, found["verdict"]]


def where(found: Found) -> list[str]:
    """Where the traces are, and what opens them."""
    ranks = found["ranks"]
    total = size(sum(rank["trace_bytes"] for rank in ranks))
    first, last = ranks[0]["first_step"], ranks[0]["last_step"]
    return [
        f"traces of steps {first} to {last} ({total} in all); https://ui.perfetto.dev opens each:",
        *(rank["trace"] for rank in ranks),
    ]
