"""`bench scaling`: which runs it needs, what they measured, and what follows from that."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.bench.laws import Fit, law_of
from allranks.bench.measure import Ended, Result, Series
from allranks.errors import AllranksError
from allranks.job.job import Job
from allranks.launch.backends import named
from allranks.launch.prepare import Prepared
from allranks.layout import Layout, split_layouts
from allranks.machine.prices import Price, find_price
from allranks.run.record import RankRecord, read_ranks, samples_per_epoch
from allranks.show.numbers import (
    NOTHING,
    between,
    count,
    dollars,
    duration,
    listed,
    number,
    percent,
    ratio,
)
from allranks.show.tables import Table, show_table
from allranks.timing.comparison import (
    CPU,
    MODES,
    SCALING,
    Compared,
    CpuUse,
    compare,
    cpu_use,
    device_name,
    gpu_memory,
    mode_of,
    relative_error,
    worst_doubt,
)
from allranks.timing.remarks import Remark, remarks
from allranks.timing.result import (
    LIMITED,
    NEXT,
    judged,
    own_work_divided,
    sentences,
    shown_exchanges,
    shown_parts,
    slowest_words,
)
from allranks.timing.steps import PART_WORDS, PARTS, STOPPED_EARLY, Timing, timing
from allranks.timing.verdict import Judgement, judge

ENDLESS_STEPS = 10_000_000  # the probe ends the run long before that
SCALES = 0.95  # efficiency
NO_PACE = ("no optimizer step", "too few steps", "no samples")  # of a run that did not fail


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All runs, round by round, so that a drift of the machine affects all layouts."""

    layouts: tuple[Layout, ...]
    steps: int | None  # None: to the end
    is_weak: bool = False
    added: Layout | None = None  # to compare the others with, without being asked for

    def settings_for(self, job: Job) -> tuple[tuple[str, ...], dict[str, Any]]:
        """The overrides that make a job measurable, and the record for every run's folder."""
        overrides: list[str] = []
        record: dict[str, Any] = {"id": secrets.token_hex(4), "kind": SCALING}
        if self.steps is not None:
            overrides.append(f"env.ALLRANKS_MEASURE='{self.steps}'")
        if job.command is None:
            if self.steps is not None:
                overrides.append(f"steps={ENDLESS_STEPS}")
                record["job"] = {"epochs": job.epochs, "steps": job.steps}  # as it is to train
            if self.is_weak:
                overrides.append(f"batch_size_per_rank={job.batch_size or job.batch_size_per_rank}")
                record["mode"] = "weak"
        elif self.is_weak:
            raise AllranksError(
                "--weak is for tasks: a script decides on its batches itself",
                fix="leave it out; the batches are measured, and shown",
            )
        return tuple(overrides), record

    def without_added(self) -> RunPlan:
        """For jobs that one rank cannot train: it would have nothing to compress."""
        layouts = tuple(layout for layout in self.layouts if layout != self.added)
        return replace(self, layouts=layouts, added=None)


def plan_runs(
    layouts: str, *, steps: str, repeats: int, weak: bool = False, may_add: bool = True
) -> RunPlan:
    """Read what was asked for. Raises AllranksError.

    If no layout has one rank, such a layout is added; not if every layout divides the model, which
    would hardly fit one rank.
    """
    once = dict.fromkeys(Layout.parse(word) for word in split_layouts(layouts, "--layouts"))
    wanted = sorted(once, key=lambda layout: (layout.ranks, layout.nodes))
    is_whole = any(layout.dp == layout.ranks for layout in wanted)
    added = Layout(1, 1) if may_add and is_whole and wanted[0].ranks > 1 else None
    order = [*([added] if added else []), *wanted]
    return RunPlan((*order,) * repeats, read_steps(steps), weak, added)


def read_steps(text: str) -> int | None:
    if text == "all":
        return None
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise AllranksError(
        f'--steps "{text}" is not a number of steps', fix="write --steps 200, or all"
    )


def measure(
    plan: RunPlan,
    prepare: Callable[[Sequence[str], str], Prepared],
    console: Console,
    *,
    backend: str = "local",
    prices: Sequence[Price] = (),
) -> Result:
    """Make all runs of a plan. `prepare` takes more overrides and a layout.

    Everything that can be refused is refused before anything runs.
    """
    job = prepare((), str(plan.layouts[-1])).job
    plan = plan.without_added() if job.compress is not None else plan
    overrides, record = plan.settings_for(job)
    planned = [(str(layout), prepare(overrides, str(layout))) for layout in plan.layouts]
    series = Series(planned, console, record)

    def read(ended: Ended) -> Repeat:
        repeat = repeat_of(ended)
        if repeat.problem:
            series.left_out.add(ended.name)
        console.print(repeat_words(repeat), soft_wrap=True)
        return repeat

    def price_of(device: str, memory: int | None) -> float | None:
        price = find_price(device, memory, prices)
        return price.usd_per_hour if price else None

    added = str(plan.added) if plan.added else None
    place = named(backend)
    done = series.in_queue(place, read, added) if place.is_queue else series.here(read)
    device = next((one.device for one in done if one.timing is not None), None)
    found = as_json(
        done,
        added=plan.added,
        price_of=price_of,
        more={
            "steps": str(plan.steps or "all"),
            "device": device,
            "unit": "rank" if device == CPU else "GPU",
            "interrupted": series.is_interrupted,
        },
    )
    result = result_of(found, is_interrupted=series.is_interrupted)
    return replace(result, how_far=series.how_far(one.problem for one in done))


def result_of(found: dict[str, Any], *, is_interrupted: bool = False) -> Result:
    notes = tuple(
        f"{row['layout']}, added for comparison, could not be measured: {row['problem']}; "
        "to leave it out: --no-baseline"
        for row in found["rows"]
        if row["added"] and row["problem"] and not row["out_of_memory"]
    )
    error = None if is_interrupted else error_in(found)
    return Result(found, error, is_interrupted, notes=notes)


@dataclass(frozen=True, slots=True)
class Repeat:
    """One run of one layout; `timing` is None if nothing could be measured, and `problem` why."""

    run: str
    layout: str
    timing: Timing | None
    problem: str | None = None
    samples_per_epoch: int | None = None
    remarks: Sequence[Remark] = ()
    judgement: Judgement | None = None
    lacked_memory: bool = False
    state: str = "finished"
    device: str = ""  # unknown for a run that never began
    device_memory: int | None = None
    cpus: CpuUse = field(default_factory=CpuUse)

    @property
    def samples_per_second(self) -> float | None:
        return self.timing.pace if self.timing else None


def repeat_of(ended: Ended) -> Repeat:
    """What a run has measured, or why it has not."""
    run = ended.run
    if run is None:
        return Repeat("", ended.name, None, ended.problem(None), state="failed")
    info, attempts = run.info(), run.attempts()
    records = read_ranks(run, attempts[-1]) if attempts else {}
    measured = timing(run, records=records)
    kept = measured if measured is not None and measured.pace else None
    lead = records[min(records)] if records else RankRecord(0)
    uses_gpu = any(event.get("utilization") is not None for event in lead.devices)
    device = device_name(lead.start, info, uses_gpu=uses_gpu)
    return Repeat(
        run=run.name,
        layout=ended.name,
        timing=kept,
        problem=ended.problem(measured),
        samples_per_epoch=samples_per_epoch(run),
        remarks=remarks(run, measured, records),
        judgement=judge(run, measured, records),
        lacked_memory=kept is None and ended.lacked_memory,
        state=run.state(),
        device=device,
        device_memory=gpu_memory(info).get(device),
        cpus=cpu_use(records.values()),
    )


def repeat_words(repeat: Repeat) -> Text:
    if repeat.timing is None:
        why = f"does not fit: {repeat.problem}" if repeat.lacked_memory else repeat.problem
        return Text(f"{repeat.layout}: {why}", style="red")
    timing = repeat.timing
    steady = "" if timing.steady else ", not steady"
    about = "about " if timing.counted.samples == "about" else ""
    return Text(
        f"{repeat.layout}: {about}{number(timing.pace)} samples/s "
        f"over {timing.num_steps} steps{steady}  ({repeat.run})"
    )


def error_in(found: Mapping[str, Any]) -> AllranksError | None:
    """Why a layout that was asked for could not be measured.

    That one has too little memory is a result, if another has enough.
    """
    is_measured = any(row["samples_per_second"] for row in found["rows"])
    failed = [
        row
        for row in found["rows"]
        if row["problem"] and not row["added"] and not (row["out_of_memory"] and is_measured)
    ]
    if not failed and is_measured:
        return None
    fix = "let it run longer"
    if not failed:
        return AllranksError("nothing was measured", fix=fix, exit_code=1)
    problem = failed[0]["problem"]
    if problem != STOPPED_EARLY:
        run = next((one["run"] for one in failed[0]["repeats"] if one.get("problem")), "")
        fix = f"see what it printed: allranks logs {run}" if run else "fix it, then measure again"
        if run and not problem.startswith(NO_PACE):
            fix = f"see allranks doctor {run}; {fix}"
    return AllranksError(f"{failed[0]['layout']}: {problem}", fix=fix, exit_code=1)


def as_json(
    repeats: Sequence[Repeat],
    *,
    added: Layout | None = None,
    price_of: Callable[[str, int | None], float | None] = lambda device, memory: None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `bench scaling --json` prints. `price_of`: dollars for an hour of a device, if known.

    `added`: a layout that was not asked for, to compare the others with.
    """
    usual = next((one.device for one in repeats if one.device), CPU)
    repeats = [one if one.device else replace(one, device=usual) for one in repeats]
    rows = compare(repeats)
    compared = most_measured(rows)
    fit, no_fit = law_of(compared)
    return {
        "mode": mode_of(compared),
        "rows": [row_object(row, repeats, added, price_of) for row in rows],
        "fit": fit and {"predicted": True, **asdict(fit), "prediction": beyond(fit)},
        "fit_problem": no_fit,
        **(more or {}),
        "verdict": verdict(
            compared, fit, problems_of(repeats), {one.run: judged(one.judgement) for one in repeats}
        ),
    }


def most_measured(rows: Sequence[Compared]) -> list[Compared]:
    """The rows of one device; if the queue gave several, of the one with the most layouts."""
    by_device: dict[str, list[Compared]] = {}
    for row in rows:
        by_device.setdefault(row.device, []).append(row)
    return max(
        by_device.values(), key=lambda those: sum(1 for one in those if one.pace), default=[]
    )


def row_object(
    row: Compared,
    repeats: Sequence[Repeat],
    added: Layout | None,
    price_of: Callable[[str, int | None], float | None],
) -> dict[str, Any]:
    own = [one for one in repeats if (one.layout, one.device) == (row.layout, row.device)]
    typical = next((one.judgement for one in own if one.run == row.typical), None)
    hours, price = hours_per_epoch(row, own), price_of(row.device, own[0].device_memory)
    return {
        "layout": row.layout,
        "added": row.layout == str(added),
        "device": row.device,
        "ranks": row.ranks,
        "samples_per_second": row.pace or 0.0,
        "is_guess": row.is_guess,
        "ci95": list(row.ci95) if row.ci95 is not None else None,
        "repeats": [
            {
                "run": one.run,
                "samples_per_second": one.samples_per_second,
                **({"problem": one.problem} if one.problem else {}),
                **({"remarks": [said.as_json() for said in one.remarks]} if one.remarks else {}),
            }
            for one in own
        ],
        "step_seconds": row.step_seconds or 0.0,
        "samples_per_step": row.batch or 0.0,
        "baseline": row.baseline,
        "speedup": row.speedup,
        "efficiency": row.efficiency,
        "parts": row.parts,
        "divided": own_work_divided(row.parts, judged(typical)) if row.parts else None,
        "exchanges": row.exchanges or None,
        "lost": row.lost or None,
        "slowest_rank": row.slowest_rank,
        "slowest_part": row.slowest_part,
        "limit": typical.verdict.limit if typical else None,
        "steady": row.is_steady and row.pace is not None,
        "hours_per_epoch": hours,
        "cost_per_epoch": None if hours is None or price is None else hours * price,
        "problem": next((one.problem for one in own if one.problem), None),
        "out_of_memory": row.pace is None and any(one.lacked_memory for one in own),
        "doubt": row.doubt,
        "remarks": remarks_of(own),
    }


def problems_of(repeats: Sequence[Repeat]) -> dict[str, str]:
    """Why a layout could not be measured, or not as often as planned."""
    return {one.layout: one.problem for one in reversed(repeats) if one.problem}


def remarks_of(repeats: Sequence[Repeat]) -> list[str]:
    """What makes the repeats of a layout doubtful, each kind once."""
    by_kind = {said.kind: said.text for one in reversed(repeats) for said in one.remarks}
    return [*by_kind.values()]


def hours_per_epoch(row: Compared, repeats: Sequence[Repeat]) -> float | None:
    """Rank-hours (GPU-hours, where a rank has a GPU) for one pass over the data."""
    sizes = [one.samples_per_epoch for one in repeats if one.samples_per_epoch]
    if not sizes or not row.pace or row.doubt:
        return None
    return row.ranks * sizes[0] / row.pace / 3600


def verdict(
    rows: Sequence[Compared],
    fit: Fit | None,
    problems: Mapping[str, str],
    judgements: Mapping[str, Mapping[str, Any]],
) -> str:
    """The result in a sentence or two, what limits the largest layout, and what to try next.

    `problems`: of layouts, by name. `judgements`: what is concluded about runs, by name.
    """

    def limits(row: Compared) -> list[str]:
        return sentences(judgements.get(row.typical or "", {}), LIMITED, NEXT)

    measured = [row for row in rows if row.pace]
    if not measured:
        why = next(iter(problems.values()), "no step was made")
        return f"nothing could be measured: {why}"
    base = next(row for row in measured if row.layout == row.baseline)
    if len(measured) == 1:
        others = ", ".join(problems)
        about = "about " if base.is_guess else ""
        said = f"{base.layout} makes {about}{number(base.pace)} samples/s"
        then = f"{others} could not be measured" if others else "name more layouts"
        return "; ".join([said, then, *limits(base)])
    stated = [row for row in measured if row.speedup is not None and row.layout != row.baseline]
    if not stated:
        return f"no speedup can be stated. {worst_doubt(measured)}"
    most = max(row.ranks for row in stated)
    largest = [row for row in (base, *stated) if row.ranks == most]
    top, *rest = sorted(largest, key=lambda row: -(row.speedup or 0.0))
    assert top.efficiency is not None and top.speedup is not None
    if top is base:
        said = f"{top.layout} is {ratio(1 / (rest[0].speedup or 1))} as fast as "
        said += f"{rest[0].layout} (measured)"
    else:
        said = f"{top.layout} is {ratio(top.speedup)} as fast as {base.layout} "
        said += f"({percent(top.efficiency)} efficient, measured)"
    if rest:
        said += fastest_words(top, rest)
    elif top.efficiency >= SCALES:
        said += ": it scales; try more ranks"
    return "; ".join([said, *limits(top)]) + _beyond(fit, measured)


def fastest_words(top: Compared, others: Sequence[Compared]) -> str:
    """How sure it is that a layout is the fastest of those with as many ranks."""
    least = (top.pace or 0.0) * (1 - relative_error(top))
    near = [row.layout for row in others if (row.pace or 0.0) * (1 + relative_error(row)) >= least]
    if near:
        return f"; {listed(near)} may be as fast, as their 95% intervals overlap"
    return f", the fastest of {len(others) + 1} layouts with {top.ranks} ranks"


def beyond(fit: Fit) -> dict[str, Any]:
    """What the law predicts for twice as many ranks as were measured."""
    return fit.prediction(2 * fit.most_ranks)


def _beyond(fit: Fit | None, rows: Sequence[Compared]) -> str:
    if fit is None:
        return ""
    said = beyond(fit)
    low, high = map(ratio, said["range"])
    margin = f" ({low} to {high})" if low != high else ""
    ranks = f"{said['ranks']} ranks" + (f" of {fit.axis}" if len(fit.layouts) < len(rows) else "")
    return f". Predicted for {ranks} by {fit.law}: {ratio(said['speedup'])}{margin}"


def show(console: Console, found: Mapping[str, Any]) -> None:
    """What `as_json` made."""
    rows = [row for row in found["rows"] if row["samples_per_second"]]
    for table in tables(found, rows):
        console.print()
        show_table(console, table)
    if not rows:  # the error says why
        return
    console.print()
    law = fit_words(found, rows)
    if law:
        console.print(Text(law, style="cyan"), soft_wrap=True)
    console.print(Text(found["verdict"], style="bold"), soft_wrap=True)
    for note in notes(found, rows):
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def tables(found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """Speed and cost, where the time goes, and what that costs, as far as measured."""
    if rows:
        yield speed_table(rows, found["mode"], found.get("unit", "rank"))
    if rows and all(row["parts"] for row in rows):
        yield parts_table(rows)
        if len((table := exchanges_table(rows)).columns) > 1:
            yield table
        if any(row["lost"] for row in rows[1:]):
            yield lost_table(rows[1:])


def speed_table(rows: Sequence[Mapping[str, Any]], mode: str, unit: str) -> Table:
    title = f"{MODES[mode]}, measured"
    bases = {row["baseline"] for row in rows if row["speedup"] and row["layout"] != row["baseline"]}
    if any(row["ranks"] > 1 for row in rows if row["layout"] in bases):
        title += f"; speedup and efficiency relative to {listed(bases)}"
    columns = (
        *("layout", "ranks", "samples/s", "95%", "speedup", "efficiency", "step"),
        *(f"{unit}-hours/epoch", "cost/epoch"),
    )
    cells = [
        (
            name_of(row, rows),
            count(row["ranks"]),
            ("about " if row["is_guess"] else "") + number(row["samples_per_second"]),
            between(row["ci95"]),
            ratio(row["speedup"]),
            percent(row["efficiency"]),
            duration(row["step_seconds"]),
            number(row["hours_per_epoch"]),
            dollars(row["cost_per_epoch"]),
        )
        for row in rows
    ]
    return Table(title, columns, cells)


def name_of(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The layout, with its device if the queue gave several."""
    several = len({one["device"] for one in rows}) > 1
    return f"{row['layout']} {row['device']}" if several else str(row["layout"])


def notes(found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is unusual in a row, and why a column is empty."""
    doubts = dict.fromkeys(row["doubt"] for row in found["rows"] if row["doubt"])
    said = [f"{row['layout']}: {text}" for row in found["rows"] for text in row["remarks"]]
    full = [row["layout"] for row in found["rows"] if row["out_of_memory"]]
    do_not = "do not fit" if len(full) > 1 else "does not fit"
    said = [*([f"{listed(full)} {do_not}: out of memory"] if full else []), *said]
    lines = [line for line in dict.fromkeys([*doubts, *said]) if line not in found["verdict"]]
    sure = [row for row in rows if not row["doubt"]]
    if not sure:
        return lines
    if all(row["hours_per_epoch"] is None for row in sure):
        lines.append("no hours and no cost: the number of samples in an epoch is not known")
    elif all(row["cost_per_epoch"] is None for row in sure):
        device = str(found.get("device") or "the device")
        name = f"name one with --price '{device.lower()}=DOLLARS'"
        lines.append(f"no price is known for {device}: {name}")
    return lines


def parts_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = shown_parts(row["divided"] for row in rows)
    cells = [
        (
            name_of(row, rows),
            *(duration(row["divided"][part]) for part in shown),
            slowest_words(row["slowest_rank"], row["layout"]),
            row["limit"] or NOTHING,
        )
        for row in rows
    ]
    columns = ("layout", *shown.values(), "slowest rank", "limited by")
    return Table("where the time of a step goes", columns, cells, texts=("limited by",))


def exchanges_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """How long a rank waits in each kind of exchange, for bytes and for other ranks."""
    those = [row for row in rows if row["exchanges"]]
    names = shown_exchanges((row["exchanges"], row["step_seconds"]) for row in those)
    cells = [
        (name_of(row, rows), *(duration(row["exchanges"].get(name)) for name in names))
        for row in those
    ]
    return Table("waiting in a step, by exchange", ("layout", *names), cells)


def lost_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    cells = [
        (name_of(row, rows), *(percent(row["lost"][part]) for part in PARTS))
        for row in rows
        if row["lost"]
    ]
    columns = ("layout", *PART_WORDS.values())
    return Table("efficiency that each part costs", columns, cells)


def fit_words(found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The law and what it predicts beyond the measured layouts; or why there is none."""
    fit, most_ranks = found["fit"], rows[-1]["ranks"]
    if fit is None:
        layouts = {row["ranks"] for row in found["rows"] if row["efficiency"] is not None}
        is_doubtful = any(row["doubt"] for row in found["rows"])  # which is shown anyway
        is_shown = len(layouts) > 1 and not is_doubtful
        return f"no law fits: {found['fit_problem']}" if is_shown else ""
    fits = f"{fit['law']} fits"
    if len(fit["layouts"]) < len(rows):
        fits += f" {listed(fit['layouts'])}"
    if fit["serial_fraction"] is not None:
        error = fit["serial_fraction_error"]
        margin = f" ± {percent(error)}" if error else ""
        words = [f"{fits}: serial fraction {percent(fit['serial_fraction'])}{margin}"]
    else:
        words = [
            f"{fits}: contention {percent(fit['contention'])}, coherence "
            f"{percent(fit['coherence'], 2)}"
        ]
    limits = {"fastest_at_ranks": "the top speed", "half_efficient_at_ranks": "50% efficiency"}
    for key, what in limits.items():
        if fit[key] is not None and fit[key] > most_ranks:  # else it was measured
            words.append(f"it predicts {what} at {count(fit[key])} ranks")
    return "; ".join(words)
