"""A report as one plain object: what --json prints, and what every other form is made from."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.machine.prices import Price, find_price
from allranks.report.costs import (
    BOTH,
    MEASURED,
    PREDICTED,
    Row,
    Targets,
    best_of,
    groups,
    headline,
    recommended,
    rows_of,
    verdict,
    what_differs,
    work_of,
)
from allranks.report.facts import RunFacts
from allranks.run.folder import RunDir, find_run, find_runs, list_runs
from allranks.show.numbers import count
from allranks.timing.comparison import (
    bench_of,
    is_comparable,
    is_compared,
    mode_of,
    worst_doubt,
)
from allranks.timing.remarks import SPEEDUP, Remark, is_guess
from allranks.timing.result import LIMITED, judged, own_work_divided, sentences

VERSION = 1


def build(
    runs: Sequence[RunFacts],
    *,
    prices: Sequence[Price] = (),
    targets: Targets | None = None,
    created: float,
    chosen: str | None = None,
) -> dict[str, Any]:
    """Everything there is to say about these runs, in plain values only.

    `chosen`: which runs these are, if nobody named them.
    """
    targets = targets or Targets()
    jobs = groups(runs)
    differences = what_differs([of_job[0].same_job for of_job in jobs])
    sections = [
        section(of_job, differs, prices, targets)
        for of_job, differs in zip(jobs, differences, strict=True)
    ]
    used, notes = prices_used(runs, prices)
    if len(jobs) > 1:
        notes.insert(0, f"{len(jobs)} different jobs: each is compared separately")
    return {
        "v": VERSION,
        "created": created,
        "date": time.strftime("%Y-%m-%d %H:%M", time.localtime(created)),
        "chosen": chosen,
        "targets": {**asdict(targets), "both": BOTH},
        "notes": notes,
        "prices": used,
        "sections": sections,
    }


def section(
    runs: Sequence[RunFacts],
    differs: Mapping[str, Any],
    prices: Sequence[Price],
    targets: Targets,
) -> dict[str, Any]:
    """One job: its layouts against each other."""
    rows = rows_of(runs, prices)
    objects = {run.run: run_object(run) for run in runs}
    job = runs[0].same_job
    mode = mode_of(rows)
    best = best_of(rows)
    row = best or (rows[0] if rows and worst_doubt(rows) else None)
    shown = objects[row.typical] if row is not None and row.typical else {}
    return {
        "job": runs[-1].job,
        "trains": _plain(job.get("command") or job.get("task")),
        "differs": {key: _plain(value) for key, value in differs.items()},
        "mode": mode,
        "unit": "GPU" if all(row.is_gpu for row in rows) and rows else "rank",
        "devices": list(dict.fromkeys(row.device for row in rows)),
        "batch": batch_of(rows) if mode in ("strong", "one layout") else None,
        "samples": work_of(runs),
        "headline": (said := headline(rows, best, sentences(shown, LIMITED))),
        "headline_run": shown.get("run"),
        "notes": [note for note in section_notes(runs, rows, mode) if note not in (said or "")],
        "rows": [row_object(row, targets, objects.get(row.typical or "")) for row in rows],
        "recommended": recommended(rows, targets),
        "curves": {name: curves(runs, name) for name in ("loss", "utilization")},
        "runs": [*objects.values()],
    }


def batch_of(rows: Sequence[Row]) -> float | None:
    return next((row.batch for row in rows if row.batch), None)


def row_object(row: Row, targets: Targets, typical: Mapping[str, Any] | None) -> dict[str, Any]:
    words, text = verdict(row, targets)
    fields = {**asdict(row), "num_counted": len(row.counted)}
    fields["limit"] = typical["verdict"]["limit"] if typical and typical["verdict"] else None
    fields["divided"] = own_work_divided(row.parts, typical or {}) if row.parts else None
    return {**fields, "verdict": ", ".join(words), "verdict_text": text}


def run_object(run: RunFacts) -> dict[str, Any]:
    keys = (
        *("run", "run_dir", "layout", "device", "state", "steps", "samples", "seconds"),
        *("samples_per_second", "problem"),
    )
    said = [remark.as_json() for remark in run.remarks]
    return {key: getattr(run, key) for key in keys} | {
        "bench": dict(run.bench) or None,
        "is_guess": is_guess(run.remarks),
        "remarks": said,
        **judged(run.judgement),
    }


def section_notes(runs: Sequence[RunFacts], rows: Sequence[Row], mode: str) -> list[str]:
    """What a reader must know to understand the numbers."""
    notes = []
    paced = [row for row in rows if row.pace]
    stated = {row.device for row in paced if row.speedup and row.layout != row.baseline}
    for row in paced:
        if row.layout == row.baseline and row.ranks > 1:
            relative = f": speedup, efficiency and extra hours are relative to {row.layout}"
            notes.append(
                f"no run with one rank was measured on {row.device}"
                + (relative if row.device in stated else "; measure one: --layout 1x1")
            )
        if not row.is_steady:
            notes.append(f"{row.layout}: its steps never became steady; all but the first count")
        if row.num_failed and row.counted:
            counted = (
                "these are the numbers of failed runs" if row.state == "failed" else "left out"
            )
            notes.append(
                f"{row.layout}: {row.num_failed} of {len(row.runs)} runs failed, {counted}"
            )
    if mode == "mixed":
        notes.append("the batch differs between layouts: speedup is by samples/s, not by steps")
    kinds = {row.seconds_kind for row in rows}
    if PREDICTED in kinds:
        notes.append(
            "times marked predicted follow from the measured pace of steps, without evaluations "
            "and saves"
        )
    if kinds >= {MEASURED, PREDICTED}:
        notes.append("extra hours compare all layouts by their pace, as not all have finished")
    if any(not row.doubt for row in paced) and all(row.seconds is None for row in paced):
        notes.append(
            "no run has trained the whole job: its time to finish, hours and cost are not known"
        )
    if not paced and rows:
        notes.append("no layout was measured: there is nothing to compare yet")
    doubts = dict.fromkeys(row.doubt for row in rows if row.doubt)
    notes = [*doubts, *notes]
    told = {}  # of each layout, every kind once
    for run in reversed(runs):
        for said in run.remarks:
            told[run.layout, said.kind] = f"{run.layout}: {said.text}{left_out(run, said, rows)}"
    notes += [note for note in told.values() if note not in doubts]
    notes += [f"{run.run}: {run.state}, {run.problem}" for run in runs if run.problem]
    return notes


def left_out(run: RunFacts, said: Remark, rows: Sequence[Row]) -> str:
    """Says that a run is left out, if a remark forbids comparing it and other runs count."""
    row = next((row for row in rows if run.run in row.runs), None)
    is_left_out = row is not None and row.counted and run.run not in row.counted
    return "; that run is left out" if SPEEDUP in said.forbids and is_left_out else ""


def curves(runs: Sequence[RunFacts], name: str) -> list[dict[str, Any]]:
    """Each layout's curve: of the newest run that has one, and did not fail if possible."""
    chosen: dict[tuple[int, str, str], RunFacts] = {}
    # The last one counts: failed runs first, the others from old to new.
    for run in sorted(runs, key=lambda run: run.state != "failed"):
        if getattr(run, name) is not None:
            chosen[run.ranks, run.layout or "", run.device] = run
    return [
        {
            "layout": run.layout,
            "device": run.device,
            "is_gpu": run.is_gpu,
            "run": run.run,
            "batch": run.timing.samples_per_step if run.timing else None,
            **asdict(getattr(run, name)),
        }
        for _, run in sorted(chosen.items(), key=lambda item: item[0])
    ]


def prices_used(
    runs: Sequence[RunFacts], own: Sequence[Price]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The price of every device in the report, and notes about them."""
    memory = {run.device: run.device_memory for run in runs if run.layout is not None}
    known = {device: find_price(device, size, own) for device, size in sorted(memory.items())}
    used = [{"device": device} | asdict(price) for device, price in known.items() if price]
    notes = [
        f"no price is known for {device}: name one with --price '{device.lower()}=DOLLARS'"
        for device, price in known.items()
        if price is None
    ]
    unused = [price.gpu for price in own if price not in known.values()]
    notes += [f"the price of {gpu} is not used: no run had such a device" for gpu in unused]
    return used, notes


def _plain(value: Any) -> str | None:
    return " ".join(map(str, value)) if isinstance(value, list) else value and str(value)


def chosen_runs(runs: Path, references: Sequence[str]) -> tuple[list[RunDir], str | None]:
    """The runs to compare, newest first; and in words which they are, if nobody named them."""
    if references:
        return named_runs(runs, references)
    known = [one for one in list_runs(runs) if one.job_file.exists()]
    infos = {one.name: one.info() for one in known}
    newest = next((one for one in known if is_comparable(infos[one.name])), None)
    if newest is None:
        find_run(runs, "last")  # raises if there is no run at all
        kinds = sorted({f"bench {bench_of(info).get('kind')}" for info in infos.values()})
        what = (
            f"they are runs of {' and '.join(kinds)}" if kinds else "none has the job.yaml of a run"
        )
        raise AllranksError(
            f"no run in {runs} can be compared: {what}",
            fix="measure layouts: allranks bench scaling job.yaml; or name runs: "
            "allranks report RUN",
        )
    mine = infos[newest.name]
    those = [
        one
        for one in known
        if one.job_name == newest.job_name and is_compared(mine, infos[one.name])
    ]
    others = [one.job_name for one in known if is_comparable(infos[one.name])]
    is_bench = bool(bench_of(mine))
    return those, chosen_words(newest.job_name, len(those), is_bench=is_bench, jobs=others)


def named_runs(runs: Path, references: Sequence[str]) -> tuple[list[RunDir], str | None]:
    """Every run that was named; where a word means several, those that can be compared."""
    named: dict[Path, RunDir] = {}
    num_left = 0
    for reference in references:
        found = find_runs(runs, reference)
        those = [one for one in found if is_comparable(one.info())] or found
        num_left += len(found) - len(those)
        named |= {one.path: one for one in those}
    ordered = sorted(named.values(), key=lambda one: one.info().get("created", 0.0), reverse=True)
    if not num_left:
        return ordered, None
    return ordered, f"Left out: {count(num_left, 'run')} of other benchmarks."


def chosen_words(job: str, number: int, *, is_bench: bool, jobs: Sequence[str]) -> str:
    """Which runs are compared if none was named, and how to compare others."""
    if is_bench:
        words = f"Compared: the {count(number, 'run')} of {job} in the newest bench scaling."
        if jobs.count(job) > number:
            words += f" For all runs of {job}: allranks report {job}."
    else:
        words = f"Compared: the {count(number, 'run')} of {job}, the newest job."
    others = [name for name in dict.fromkeys(jobs) if name != job]
    if others:
        names = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        words += f" Other jobs: {names} (allranks report NAME)."
    return words
