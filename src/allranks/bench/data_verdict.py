"""What paces of loading and of steps say about the number of workers. Pure, and without torch.

Every sentence follows from one judgement, so that no two of them can disagree.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from allranks.show.numbers import number, percent, ratio

KNEE_GAIN = 0.10  # what more workers must add to be worth having
AS_GOOD = 0.05  # a pace this close to another is as good
FASTER_DISK = 1.5
DISTURBED = 1.5  # times: repeats that differ by more, or steps that are faster than without data

Found = Mapping[str, Any]
Limit = Literal["step", "data", "cpus"]  # what a training cannot be faster than


@dataclass(frozen=True, slots=True)
class Pace:
    """Samples a second of all ranks together, over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Pace | None:
        return cls(statistics.median(values), min(values), max(values)) if values else None

    @property
    def is_wide(self) -> bool:
        return self.high > DISTURBED * self.low

    def reaches(self, other: Pace) -> bool:
        """Whether it is no slower than the other, as far as repeats can tell."""
        return self.is_close(other) or self.median >= other.low or self.high >= other.median

    def is_close(self, other: Pace) -> bool:
        return self.median >= (1 - AS_GOOD) * other.median


@dataclass(frozen=True, slots=True)
class Row:
    """What so many workers a rank give."""

    workers: int
    warm: Pace | None  # data from memory, nobody using them
    cold: Pace | None  # data from the disk
    training: Pace | None  # steps on those data


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was measured, which row to take, and what keeps its training from being faster."""

    rows: Sequence[Row]
    step: Pace | None  # steps that wait for nothing
    row: Row | None = None  # None: nothing was measured, or it contradicts itself
    limit: Limit | None = None  # None: the training itself was not measured
    contradiction: str | None = None
    remarks: tuple[str, ...] = ()  # repeats that differ, whether or not it matters


def judge(rows: Sequence[Row], step: Pace | None) -> Judgement:
    wide = list(wide_paces(rows, step))
    remarks = tuple(said for _, said in wide)
    row = chosen_row(rows)
    limit: Limit | None = None
    fastest = max((one.warm for one in rows if one.warm), key=lambda p: p.median, default=None)
    if row is not None and row.training is not None and step is not None:
        limit = "step"
        if not row.training.reaches(step):
            limit = "cpus" if fastest is not None and fastest.reaches(step) else "data"
    contradiction = next(contradictions(rows, step), None)
    if contradiction is None:
        decisive = list(hangs_on(rows, row, step))
        contradiction = next((said for pace, said in wide if pace in decisive), None)
    if contradiction is not None:
        return Judgement(rows, step, contradiction=contradiction, remarks=remarks)
    return Judgement(rows, step, row, limit, remarks=remarks)


def hangs_on(rows: Sequence[Row], row: Row | None, step: Pace | None) -> Iterator[Pace]:
    """What was compared with something that only some of its repeats reach."""
    if row is None or row.training is None:  # the data alone are compared, by their medians
        yield from (one.warm for one in rows if one.warm)
        return
    trained = [one.training for one in rows if one.training is not None]
    compared = [(row.training, max(trained, key=lambda pace: pace.median))]
    if step is not None:
        compared.append((row.training, step))
        if not row.training.reaches(step):
            compared += [(one.warm, step) for one in rows if one.warm]
    for one, other in compared:
        if one.reaches(other) and not one.is_close(other):
            yield from (one, other)


def chosen_row(rows: Sequence[Row]) -> Row | None:
    """The fewest workers that train as fast as any; by the data alone where nothing trained."""
    trained = [(row, row.training) for row in rows if row.training is not None]
    if trained:
        fastest = max((pace for _, pace in trained), key=lambda pace: pace.median)
        return next(row for row, pace in trained if pace.reaches(fastest))
    knee = knee_of(rows)
    return next((row for row in rows if row.workers == knee), None)


def knee_of(rows: Sequence[Row]) -> int | None:
    """The fewest workers from which on more of them add less than a tenth to the data alone."""
    known = [(row.workers, row.warm.median) for row in rows if row.warm is not None]
    for at, (workers, pace) in enumerate(known, start=1):
        if all(more <= (1 + KNEE_GAIN) * pace for _, more in known[at:]):
            return workers
    return None


def wide_paces(rows: Sequence[Row], step: Pace | None) -> Iterator[tuple[Pace, str]]:
    """Repeats that differ as they do not where nothing else uses this machine."""
    named = [] if step is None else [("the step alone", step)]
    for row in rows:
        named += [(f"training with {count_of(row.workers)}", row.training)] if row.training else []
        named += [(f"loading with {count_of(row.workers)}", row.warm)] if row.warm else []
    for name, pace in named:
        if pace.is_wide:
            span = f"{number(pace.low)} to {number(pace.high)}"
            yield pace, f"repeats of {name} range from {span} samples/s"


def contradictions(rows: Sequence[Row], step: Pace | None) -> Iterator[str]:
    """What cannot be: steps on data that are faster than either."""
    for row in rows:
        if row.training is None:
            continue
        reached = f"{number(row.training.median)} samples/s"
        said = f"training with {count_of(row.workers)} was faster ({reached})"
        if step is not None and row.training.median > DISTURBED * step.median:
            yield f"{said} than the step alone ({number(step.median)})"
        if row.warm is not None and row.training.low > (1 + KNEE_GAIN) * row.warm.high:
            yield f"{said} than its data come ({number(row.warm.median)})"


def count_of(workers: int) -> str:
    return f"{workers} worker" if workers == 1 else f"{workers or 'no'} workers"


def reason(judged: Judgement) -> str:
    """Why so many workers, in measured numbers: against fewer, against more, against the step."""
    row = judged.row
    assert row is not None
    kind = "training" if row.training is not None else "loading"
    paces = {
        one.workers: pace
        for one in judged.rows
        if (pace := one.training if kind == "training" else one.warm) is not None
    }
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
    """What was found, and what to set."""
    if judged.contradiction is not None:
        return (
            f"no recommendation, the measurements contradict each other: {judged.contradiction}; "
            "measure again when nothing else runs here, with more --seconds-each or --repeats"
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
        words += ": the data keep up with the step"
    elif judged.limit == "data":
        words += f": the data are the limit, {lost} to them; {more_data(found, judged)}"
    else:
        words += (
            f": the data alone come fast enough{alone(judged)}, but {lost} to preparing them on "
            "the CPUs of the step; give a rank more CPUs, or make a sample cheaper to prepare"
        )
    return words + from_disk(found, judged)


def alone(judged: Judgement) -> str:
    """With how many workers they do, where that is not what is recommended."""
    row, step = judged.row, judged.step
    assert row is not None and step is not None
    if row.warm is not None and row.warm.reaches(step):
        return f" ({number(row.warm.median)})"
    enough = next(one for one in judged.rows if one.warm is not None and one.warm.reaches(step))
    assert enough.warm is not None
    return f" with {count_of(enough.workers)} ({number(enough.warm.median)})"


def more_data(found: Found, judged: Judgement) -> str:
    """What would make data come faster, by whether more workers still did."""
    most = judged.rows[-1].workers
    if len(judged.rows) < 2:
        return "measure other numbers of them with --workers, or make a sample cheaper to prepare"
    if knee_of(judged.rows) != most:
        return "more workers add nothing: make a sample cheaper to prepare"
    if most < found["cpus"]:
        return f"loading still gains with {count_of(most)}: measure more of them with --workers"
    return (
        f"loading still gains with {count_of(most)}, one for each CPU: "
        "give a rank more CPUs, or make a sample cheaper to prepare"
    )


def from_disk(found: Found, judged: Judgement) -> str:
    """What reading from the disk changes, where it is what the steps would wait for."""
    row, step = judged.row, judged.step
    assert row is not None and step is not None
    if row.cold is None or row.cold.reaches(step):
        return ""
    if row.warm is not None and row.cold.reaches(row.warm):
        return ""  # it is not the disk that they wait for
    words = f". From the disk they come at {number(row.cold.median)} samples/s: the first epoch, "
    words += "or every one of data larger than the memory, waits for it"
    best = max((one for one in judged.rows if one.cold), key=lambda one: _median(one.cold))
    if best.cold is not None and best.cold.low > (1 + KNEE_GAIN) * row.cold.high:
        words += f" ({number(best.cold.median)} with {count_of(best.workers)})"
    disks = {disk["role"]: disk for disk in found["disks"]}
    data, staging = (disks.get(role, {}).get("bytes_per_second") for role in ("data", "staging"))
    if data and staging and staging > FASTER_DISK * data:
        words += f"; data.stage=local reads a copy {ratio(staging / data)} as fast"
    return words


def _median(pace: Pace | None) -> float:
    return 0.0 if pace is None else pace.median


def script_verdict(
    share: float | None, num_workers: int | None, cpus: int, *, is_steady: bool
) -> str:
    """Of a script, measured as it is: its number of workers cannot be changed from outside."""
    if share is None:
        return "the time waiting for data is not known: the script's phases were not measured"
    said = f"steps wait {percent(share)} of their time for data"
    if num_workers is not None:
        said += f" with {count_of(num_workers)} a rank, of {cpus} CPU{'' if cpus == 1 else 's'}"
    said += "" if is_steady else " (the steps were not steady)"
    if share <= AS_GOOD:
        return f"{said}: the data keep up with the step"
    if num_workers is not None and num_workers >= cpus:
        advice = "make a sample cheaper to prepare, or give a rank more CPUs"
    else:
        advice = "give its DataLoader more workers, or make a sample cheaper to prepare"
    return f"{said}: the data are the limit; {advice}, and measure again"
