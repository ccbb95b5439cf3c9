"""`bench data`: how many loader workers a job needs, from what its ranks measured.

`data.json` in a run's folder (see train/feed_bench.py) has every measurement; here they become
rows. Every sentence follows from one judgement, so that no two of them can disagree.
"""

from __future__ import annotations

import itertools
import json
import secrets
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from allranks.bench.measure import Ended, Result, Series, stopped_early
from allranks.errors import AllranksError
from allranks.launch.prepare import Prepared
from allranks.machine.allotted import cpus_allotted
from allranks.run.events import read_events
from allranks.run.files import read_mapping
from allranks.run.folder import RunDir
from allranks.run.record import Counted
from allranks.show.numbers import between, count, duration, number, percent
from allranks.show.tables import Table, facts, show_table, without_empty
from allranks.timing.steps import Timing, timing, why_no_pace

KNEE_GAIN = 0.10  # what more workers must add to be worth it
AS_GOOD = 0.05  # a pace this close to another is as good
DISTURBED = 1.5  # times: repeats differ by more, or steps are faster than without loading

Found = Mapping[str, Any]
Limit = Literal["step", "data", "cpus"]  # what keeps the training from being faster


def measure(
    prepare: Callable[[Sequence[str]], Prepared],
    console: Console,
    *,
    workers: Sequence[int],
    seconds: float,
    repeats: int,
    steps: int,
) -> Result:
    """Make the run. `prepare` takes more overrides. Raises an error if nothing was measured."""
    is_script = prepare(()).job.command is not None
    more = [f"env.ALLRANKS_MEASURE='{steps}'"]
    if not is_script:
        settings = {"workers": list(workers), "seconds": seconds, "repeats": repeats}
        more = [f"env.ALLRANKS_BENCH_DATA='{json.dumps(settings)}'", "env.ALLRANKS_PROBE='off'"]
    record = {"id": secrets.token_hex(4), "kind": "data"}
    series = Series([("data", prepare(more))], console, record)
    # A task that is measured for its data writes no step events.
    (ended,) = series.here(lambda ended: ended, makes_steps=is_script)
    found = found_in_script(ended) if is_script else found_in_task(ended)
    error = None if is_script or series.is_interrupted else ended.error
    return Result(found, error, series.is_interrupted)


def found_in_task(ended: Ended) -> dict[str, Any]:
    found = read_mapping(ended.run.path / "data.json", {}) if ended.run is not None else {}
    if not found or ended.run is None:
        raise ended.error or stopped_early()
    return as_json(found, ended.run)


def found_in_script(ended: Ended) -> dict[str, Any]:
    run = ended.run
    if run is None:
        raise ended.error or stopped_early()
    timed = timing(run)
    if timed is None or not timed.samples:
        if run.state() == "stopped":
            raise stopped_early()
        raise ended.error or AllranksError(
            why_no_pace(run, timed) or "",
            fix=f"see {run.log(0, 0)}: the script must train, with torch's optimizers and loaders",
            exit_code=1,
        )
    events = read_events(run.events(max(run.attempts()), 0), kind="device")
    seen = [event.get("num_workers", 0) for event in events]
    cpus = max(1, cpus_allotted() // timed.ranks)
    return script_as_json(run, timed, max(seen, default=None), cpus)


def read_workers(text: str | None) -> list[int]:
    """The numbers in `--workers 0,2,8`; empty: each rank chooses by its CPUs."""
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isdecimal() and int(word) <= 1024 for word in words):
        raise AllranksError(
            f'--workers "{text}" is not a list of numbers of workers',
            fix="write --workers 0,1,2,4, or leave it out: then it follows from the CPUs",
        )
    return sorted({int(word) for word in words})


def paces_of(found: Found, kind: str) -> dict[int | None, PaceRange]:
    """Samples a second by the number of workers, over the repeats of one kind of measurement."""
    repeats: dict[int | None, list[float]] = {}
    for one in found["measured"]:
        if one["kind"] == kind:
            repeats.setdefault(one["workers"], []).append(one["samples_per_second"])
    return {n: PaceRange(statistics.median(own), min(own), max(own)) for n, own in repeats.items()}


def rows_of(found: Found) -> list[Row]:
    """One row for each number of workers, fewest first."""
    loading, training = paces_of(found, "loading"), paces_of(found, "training")
    return [
        Row(n, loading[n], training.get(n)) for n in sorted(n for n in loading if n is not None)
    ]


def as_json(found: Found, run: RunDir) -> dict[str, Any]:
    """What `bench data --json` prints for a task."""
    rows, step = rows_of(found), paces_of(found, "step").get(None)
    batch, judged = found["batch_size"], judge(rows, step)
    return {
        "mode": "task",
        "run": run.name,
        "run_dir": str(run.path),
        "ranks": found["world_size"],
        "cpus_per_rank": found["cpus"],
        "device": found["device"],
        "batch_size": batch,
        "samples_per_epoch": found["num_samples"],
        "rows": [
            {
                "workers": row.workers,
                "is_direct": row.workers == 0 and found["is_direct"],
                **_fields("", row.loading),
                "batches_per_second": row.loading.median / batch,
                **_fields("cold_", None),  # not measured any more; published keys stay
                **_fields("training_", row.training),
                "of_step": row.training.median / step.median if row.training and step else None,
            }
            for row in rows
        ],
        "step": None
        if step is None
        else {
            **_fields("", step),
            "batches_per_second": step.median / batch,
            "seconds": batch / step.median,
        },
        "knee": knee_of(rows),
        "files": {"count": None, "bytes": None, "is_all": None, "why_not_cold": "not measured"},
        "disks": [],
        "workers_of_job": found["workers_of_job"],
        "limit": judged.limit,
        "recommendation": None
        if judged.row is None
        else {"num_workers": judged.row.workers, "reason": reason(judged)},
        "is_disturbed": judged.contradiction is not None or bool(judged.remarks),
        "remarks": list(judged.remarks),
        "verdict": verdict(found, judged),
    }


def _fields(prefix: str, pace: PaceRange | None) -> dict[str, Any]:
    return {
        f"{prefix}samples_per_second": pace.median if pace else None,
        f"{prefix}range": [pace.low, pace.high] if pace else None,
    }


def script_as_json(
    run: RunDir, timed: Timing, num_workers: int | None, cpus: int
) -> dict[str, Any]:
    """What `bench data --json` prints for a script, measured as it is: it makes its own loaders.

    `num_workers` is None if the run was too short to see any; `cpus` are those of a rank.
    """
    waits = timed.parts["data"] if timed.parts else None
    share = waits / timed.step_seconds if waits is not None and timed.step_seconds else None
    pace = timed.pace
    return {
        "mode": "script",
        "run": run.name,
        "run_dir": str(run.path),
        "ranks": timed.ranks,
        "rows": [],
        "num_workers": num_workers,
        "cpus_per_rank": cpus,
        "samples_per_second": pace,
        "counted": asdict(timed.counted),
        "samples_per_second_without_waiting": pace / (1 - share)
        if pace and share is not None and share < 1
        else None,
        "step_seconds": timed.step_seconds,
        "data_seconds": waits,
        "data_share": share,
        "steady": timed.steady,
        "recommendation": None,
        "verdict": script_verdict(share, num_workers, cpus, is_steady=timed.steady),
    }


@dataclass(frozen=True, slots=True)
class PaceRange:
    """Samples a second of all ranks together, over repeats."""

    median: float
    low: float
    high: float

    def reaches(self, other: PaceRange) -> bool:
        """Whether it is no slower than the other, as far as the repeats show."""
        return self.is_close(other) or self.median >= other.low or self.high >= other.median

    def is_close(self, other: PaceRange) -> bool:
        return self.median >= (1 - AS_GOOD) * other.median


@dataclass(frozen=True, slots=True)
class Row:
    """The paces with a number of workers a rank."""

    workers: int
    loading: PaceRange  # with nothing consuming the data
    training: PaceRange | None  # steps on these data; None for all rows if it ended before them


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was measured, which row to choose, and what limits its training."""

    rows: Sequence[Row]
    step: PaceRange | None  # steps that wait for nothing
    row: Row | None = None  # None: nothing was measured, or it contradicts itself
    limit: Limit | None = None  # None: the training itself was not measured
    contradiction: str | None = None
    remarks: tuple[str, ...] = ()  # on repeats that differ, whether or not it matters


def judge(rows: Sequence[Row], step: PaceRange | None) -> Judgement:
    row = chosen_row(rows)
    limit: Limit | None = None
    if row is not None and row.training is not None and step is not None:
        limit = "step"
        if not row.training.reaches(step):
            fastest = max((one.loading for one in rows), key=median_of)
            limit = "cpus" if fastest.reaches(step) else "data"
    wide = list(wide_paces(rows, step))
    remarks = tuple(said for _, said in wide)
    decisive = list(close_calls(rows, row, step))
    undecided = (said for pace, said in wide if pace in decisive)
    contradiction = next(itertools.chain(contradictions(rows, step), undecided), None)
    if contradiction is not None:
        return Judgement(rows, step, contradiction=contradiction, remarks=remarks)
    return Judgement(rows, step, row, limit, remarks=remarks)


def close_calls(
    rows: Sequence[Row], row: Row | None, step: PaceRange | None
) -> Iterator[PaceRange]:
    """The paces on which a close decision hangs: only some repeats of one reach the other."""
    if row is None or row.training is None:  # only loading is compared, by medians
        yield from (one.loading for one in rows)
        return
    compared = [(row.training, max((one.training for one in rows if one.training), key=median_of))]
    if step is not None:
        compared.append((row.training, step))
        if not row.training.reaches(step):
            compared += [(one.loading, step) for one in rows]
    for one, other in compared:
        if one.reaches(other) and not one.is_close(other):
            yield from (one, other)


def median_of(pace: PaceRange) -> float:
    return pace.median


def chosen_row(rows: Sequence[Row]) -> Row | None:
    """The fewest workers that train as fast as any number; without training, the knee's."""
    trained = [(row, row.training) for row in rows if row.training is not None]
    if trained:
        fastest = max((pace for _, pace in trained), key=median_of)
        return next(row for row, pace in trained if pace.reaches(fastest))
    knee = knee_of(rows)
    return next((row for row in rows if row.workers == knee), None)


def knee_of(rows: Sequence[Row]) -> int | None:
    """The fewest workers beyond which more of them speed loading up by less than a tenth."""
    for at, row in enumerate(rows, start=1):
        enough = (1 + KNEE_GAIN) * row.loading.median
        if all(more.loading.median <= enough for more in rows[at:]):
            return row.workers
    return None


def wide_paces(rows: Sequence[Row], step: PaceRange | None) -> Iterator[tuple[PaceRange, str]]:
    """Repeats that differ more than they do on a machine with nothing else running."""
    named = [("the step alone", step)]
    for row in rows:
        named.append((f"training with {count_of(row.workers)}", row.training))
        named.append((f"loading with {count_of(row.workers)}", row.loading))
    for name, pace in named:
        if pace is not None and pace.high > DISTURBED * pace.low:
            span = f"{number(pace.low)} to {number(pace.high)}"
            yield pace, f"repeats of {name} range from {span} samples/s"


def contradictions(rows: Sequence[Row], step: PaceRange | None) -> Iterator[str]:
    """What is impossible: training that is faster than its steps alone, or than its data."""
    for row in rows:
        if row.training is None:
            continue
        reached = f"{number(row.training.median)} samples/s"
        said = f"training with {count_of(row.workers)} was faster ({reached})"
        if step is not None and row.training.median > DISTURBED * step.median:
            yield f"{said} than the step alone ({number(step.median)})"
        if row.training.low > (1 + KNEE_GAIN) * row.loading.high:
            yield f"{said} than loading its data ({number(row.loading.median)})"


def count_of(workers: int) -> str:
    return count(workers, "worker") if workers else "no workers"


def reason(judged: Judgement) -> str:
    """Why this number of workers: its pace, that of fewer, of more, and of the step alone."""
    row = judged.row
    assert row is not None
    kind = "training" if row.training is not None else "loading"
    paces = {one.workers: one.training or one.loading for one in judged.rows}
    here = paces[row.workers]
    words = f"{kind} makes {number(here.median)} samples/s with {count_of(row.workers)}"
    fewer = [workers for workers in paces if workers < row.workers]
    if fewer:
        words += f", {number(paces[fewer[-1]].median)} with {count_of(fewer[-1])}"
    more = [workers for workers in paces if workers > row.workers]
    if more:
        best = max(more, key=lambda workers: paces[workers].median)
        words += f", {number(paces[best].median)} with {count_of(best)}"
        if paces[best].median > here.median / (1 - AS_GOOD):
            words += " (repeats differ as much)" if kind == "training" else ""
    if judged.step is not None:
        words += f"; the step alone makes {number(judged.step.median)}"
    return words


def verdict(found: Found, judged: Judgement) -> str:
    """What limits the training, and what to set."""
    if judged.contradiction is not None:
        return (
            "no recommendation, as the measurements contradict each other: "
            f"{judged.contradiction}; measure again when nothing else is running here, with a "
            "higher --seconds-each or --repeats"
        )
    row, step = judged.row, judged.step
    if row is None:
        return "nothing was measured"
    now = ", as it is now" if row.workers == found["workers_of_job"] else ""
    words = f"data.num_workers={row.workers}{now} ({reason(judged)})"
    if judged.limit is None or step is None or row.training is None:
        return f"{words}; the training itself was not measured"
    lost = f"{percent(1 - row.training.median / step.median, 0)} of the step's pace is lost"
    if judged.limit == "step":
        words += ": data loading keeps up with the step"
    elif judged.limit == "data":
        words += f": data loading is the limit, {lost} to waiting; {more_data(found, judged)}"
    else:
        words += (
            f": loading alone is fast enough{alone(judged)}, but {lost} to preparing data on the "
            "CPUs that the step needs; give each rank more CPUs, or make samples cheaper to prepare"
        )
    return words


def alone(judged: Judgement) -> str:
    """The number of workers with which loading is fast enough, if another one is recommended."""
    row, step = judged.row, judged.step
    assert row is not None and step is not None
    if row.loading.reaches(step):
        return f" ({number(row.loading.median)})"
    enough = next(one for one in judged.rows if one.loading.reaches(step))
    return f" with {count_of(enough.workers)} ({number(enough.loading.median)})"


def more_data(found: Found, judged: Judgement) -> str:
    """What would make loading faster."""
    most = judged.rows[-1].workers
    if len(judged.rows) < 2:
        return "try other numbers of workers with --workers, or make samples cheaper to prepare"
    if knee_of(judged.rows) != most:
        return "more workers add nothing: make samples cheaper to prepare"
    if most < found["cpus"]:
        return f"loading still gains with {count_of(most)}: try more of them with --workers"
    return (
        f"loading still gains with {count_of(most)}, one for each CPU: "
        "give each rank more CPUs, or make samples cheaper to prepare"
    )


def script_verdict(
    share: float | None, num_workers: int | None, cpus: int, *, is_steady: bool
) -> str:
    """For a script, whose number of workers cannot be changed from outside."""
    if share is None:
        return "the time spent waiting for data is not known: the script's phases were not measured"
    said = f"steps spend {percent(share)} of their time waiting for data"
    if num_workers is not None:
        said += f" with {count_of(num_workers)} per rank, on {count(cpus, 'CPU')}"
    said += "" if is_steady else " (the steps were not steady)"
    if share <= AS_GOOD:
        return f"{said}: data loading keeps up with the step"
    if num_workers is not None and num_workers >= cpus:
        advice = "make samples cheaper to prepare, or give each rank more CPUs"
    else:
        advice = "give its DataLoader more workers, or make samples cheaper to prepare"
    return f"{said}: data loading is the limit; {advice}, and measure again"


# --- For people ---------------------------------------------------------------------------------


def show(console: Console, found: Found) -> None:
    """What `as_json` or `script_as_json` made."""
    if found["mode"] == "script":
        show_table(console, script_table(found))
    else:
        if found["rows"]:
            show_table(console, workers_table(found))
        for line in notes(found):
            console.print(Text(line), soft_wrap=True)
    console.print(Text(found["verdict"], style="bold"), soft_wrap=True)
    console.print(Text(found["run_dir"], style="dim"), soft_wrap=True)


def workers_table(found: Found) -> Table:
    chosen = (found["recommendation"] or {}).get("num_workers")
    cells = []
    for row in found["rows"]:
        shown = (
            count(row["workers"]),
            number(row["samples_per_second"]),
            between(row["range"]),
            number(row["batches_per_second"]),
            number(row["training_samples_per_second"]),
            percent(row["of_step"]),
        )
        style = "bold" if row["workers"] == chosen else ""
        cells.append([Text(cell, style=style) for cell in shown])
    columns = ("workers", "data alone", "range", "batches/s", "training", "of the step")
    return without_empty(Table("samples/s by loader workers a rank, measured", columns, cells))


def notes(found: Found) -> list[str]:
    """What the table does not say."""
    lines = []
    step, knee = found["step"], found["knee"]
    if step is not None:
        lines.append(
            f"the step alone takes {number(step['samples_per_second'])} samples/s "
            f"({number(step['batches_per_second'])} batches of {found['batch_size']})"
        )
    if any(row["is_direct"] for row in found["rows"]):
        lines.append(
            "without workers, whole batches are fetched at once, with no loader in between"
        )
    if knee is not None and len(found["rows"]) > 1:
        most = found["rows"][-1]["workers"]
        gain = f"loading gains less than a tenth beyond {count_of(knee)}"
        lines.append(f"loading still gains with {count_of(most)}" if knee == most else gain)
    if found["recommendation"] is not None:  # else the verdict says why
        lines += [
            f"note: {said}: something else may be running here" for said in found["remarks"][:1]
        ]
    return lines


def script_table(found: Found) -> Table:
    waits = f"{duration(found['data_seconds'])} ({percent(found['data_share'])})"
    rows = [
        ("samples/s", Counted(**found["counted"]).words(number(found["samples_per_second"]))),
        ("step", duration(found["step_seconds"])),
        ("of it waiting for data", waits),
        ("samples/s without waiting", number(found["samples_per_second_without_waiting"])),
    ]
    return facts(rows if found["data_seconds"] is not None else rows[:2])
