"""`bench comm-opt`: a job with each way of sending less between ranks, and with plain DDP.

The runs see the same samples in the same order from the same weights, so their losses differ only
by the method.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.bench.measure import Result, Series
from allranks.bench.precision import Trial, compare, error_in, reader, row_of
from allranks.errors import AllranksError
from allranks.job.job import COMPRESS, Compress, Job
from allranks.launch.prepare import Prepared
from allranks.show.numbers import duration, metric, number, percent, ratio, size
from allranks.show.tables import Table, show_table

PLAIN = "plain"
METHODS = (PLAIN, *COMPRESS)
MOST_STEPS = 60  # of a run that only measures another batch size
SAME_LOSS = 0.02  # relative: a loss that is higher by less than this is called equal


def read_methods(text: str | None) -> list[str]:
    """The names in `--methods powersgd,diloco`, in one order and with plain; all by default."""
    words = [word.strip() for word in text.split(",")] if text else list(METHODS)
    wrong = [word for word in words if word not in METHODS]
    if wrong:
        raise AllranksError(
            f'--methods "{text}": {wrong[0] or "one"} is not a method',
            fix=f"write some of {','.join(COMPRESS)}",
        )
    return [method for method in METHODS if method in words or method == PLAIN]


def read_batch_sizes(text: str | None) -> list[int]:
    """The numbers in `--batch-sizes 8,32`, in ascending order."""
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isdecimal() and int(word) for word in words):
        raise AllranksError(
            f'--batch-sizes "{text}" is not a list of numbers', fix="write --batch-sizes 8,32"
        )
    return sorted({int(word) for word in words})


def override_of(method: str, given: Compress | None) -> str:
    """The override that chooses a method, with the settings that the job itself has for it."""
    if method == PLAIN:
        return "compress=null"
    if given is not None and given.name == method:
        return f"compress={json.dumps(given.model_dump())}"
    # Nulls clear what the job has for another method.
    return f"compress={json.dumps({**dict.fromkeys(Compress.model_fields), 'name': method})}"


def measure(
    methods: Sequence[str],
    batch_sizes: Sequence[int],
    prepare: Callable[[Sequence[str]], Prepared],
    console: Console,
    *,
    steps: int,
) -> Result:
    """Make all runs, one after another. `prepare` takes more overrides."""
    job = prepare(()).job
    check(job)
    own = (job.batch_size_per_rank or 0) * job.layout.ranks or job.batch_size or 0
    planned, refused = [], []
    for batch in [None, *(batch for batch in batch_sizes if batch != own)]:
        for method in methods:
            words = [override_of(method, job.compress)]
            if batch is None:
                words.append(f"steps={steps}")
            else:
                words += [f"steps={min(steps, MOST_STEPS)}", f"batch_size={batch}"]
            name = name_of(method, batch)
            try:
                planned.append((name, prepare(words)))
            except AllranksError as error:
                if method == PLAIN:
                    raise
                refused.append(Trial(name, problem=error.what, is_refused=True))
    series = Series(planned, console, {"id": secrets.token_hex(4), "kind": "comm-opt"})
    done = series.here(reader(series))
    found = as_json([*refused, *done], methods, [own, *batch_sizes], steps=steps)
    found |= {"layout": str(job.layout), "interrupted": series.is_interrupted}
    failed = None if series.is_interrupted else error_in(done)
    return Result(found, failed, series.is_interrupted, series.how_far(one.problem for one in done))


def check(job: Job) -> None:
    if job.command is not None:
        raise AllranksError(
            "bench comm-opt is for tasks: a script exchanges its gradients itself",
            fix="register one of torch's DDP communication hooks in your script, and compare the "
            "runs: allranks report",
        )
    if job.layout.dp < 2:
        raise AllranksError(
            f"bench comm-opt compares what replicas of the model (dp) send each other, and layout "
            f"{job.layout} has only one",
            fix="add --layout 1x2",
        )


def name_of(method: str, batch: int | None) -> str:
    return method if batch is None else f"{method}, batch {batch}"


def as_json(
    trials: Sequence[Trial], methods: Sequence[str], batches: Sequence[int], *, steps: int
) -> dict[str, Any]:
    """What `bench comm-opt --json` prints. `batches`: the job's own first."""
    by_name = {trial.name: trial for trial in trials}
    own, *others = batches
    sizes = sorted({own, *others})
    rows = []
    for method in methods:
        of_batch = {b: by_name.get(name_of(method, None if b == own else b)) for b in sizes}
        trial = of_batch[own]
        if trial is not None:
            rows.append(row(trial, of_batch))
    base = next((one for one in rows if one["method"] == PLAIN and one["step_seconds"]), None)
    for one in rows:
        compare(one, base)
        sent, plain = one["sent_per_step"], base["sent_per_step"] if base else None
        one["ratio"] = plain / sent if plain and sent else None
        loss, apart = base["loss"] if base else None, one["loss_difference"]
        one["relative_loss_difference"] = apart / loss if loss and apart is not None else None
    return {
        "steps": steps,
        "batch_sizes": sizes,
        "batch_size": own,
        "rows": rows,
        "verdict": verdict(rows, base, steps),
    }


def row(trial: Trial, of_batch: Mapping[int, Trial | None]) -> dict[str, Any]:
    found = row_of([trial])
    measured = trial.measured
    return {
        "method": trial.name,
        "problem": trial.problem,
        "run": trial.run or None,
        "sent_per_step": trial.sent_per_step if measured else None,
        "samples_per_second": found["samples_per_second"],
        "step_seconds": measured.step_seconds if measured else None,
        "communication_to_computation": {
            str(batch): one and exchanged_share(one) for batch, one in of_batch.items()
        },
        "loss": found["loss"],
        "losses": found["losses"],
    }


def exchanged_share(trial: Trial) -> float | None:
    """Time in exchanges for each second of computing, where waiting for slow ranks is neither."""
    parts = trial.measured.parts if trial.measured else None
    return parts["comm"] / parts["compute"] if parts and parts["compute"] else None


def verdict(rows: Sequence[Mapping[str, Any]], base: Mapping[str, Any] | None, steps: int) -> str:
    """Which method sends the least at the same loss, and whether that is faster here."""
    if base is None:
        why = next((one["problem"] for one in rows if one["problem"]), "no run was made")
        return f"nothing can be compared: {why}"
    measured = [one for one in rows if one["ratio"] and one is not base]
    if not measured:
        return "only plain could be measured, so there is nothing to compare"
    equal = [one for one in measured if (one["relative_loss_difference"] or 0) <= SAME_LOSS]
    if not equal:
        share = percent(SAME_LOSS, 0)
        return f"after {steps} steps, every method's loss is more than {share} above plain's"
    best = max(equal, key=lambda one: one["ratio"])
    apart = percent(best["relative_loss_difference"], signed=True)
    return (
        f"{best['method']} sends 1/{number(best['ratio'])} of plain's bytes, at "
        f"{ratio(best['speedup'])} its speed here; after {steps} steps its loss differs by {apart}"
    )


def show(console: Console, found: Mapping[str, Any]) -> None:
    """What `as_json` made, for people."""
    measured = [one for one in found["rows"] if one["step_seconds"] is not None]
    if measured:
        show_table(console, table_of(found, measured))
    for one in found["rows"]:
        if one["problem"]:
            console.print(Text(f"{one['method']}: {one['problem']}"), soft_wrap=True)
    console.print(Text(found["verdict"], style="bold"), soft_wrap=True)


def table_of(found: Mapping[str, Any], rows: list[Mapping[str, Any]]) -> Table:
    sizes = [str(batch) for batch in found["batch_sizes"]]
    columns = (
        *("method", "sent/step", "ratio", "step time"),
        *(f"comm/comp {batch}" for batch in sizes),
        *("loss", "differs by", "at most"),
    )
    cells = []
    for one in rows:
        is_base = one["method"] == PLAIN
        most = None if is_base else one["largest_loss_difference"]
        apart = None if is_base else one["relative_loss_difference"]
        cells.append(
            (
                one["method"],
                size(one["sent_per_step"]),
                f"1/{number(one['ratio'])}" if one["ratio"] else "-",
                duration(one["step_seconds"]),
                *(number(one["communication_to_computation"][batch], 2) for batch in sizes),
                metric(one["loss"]),
                percent(apart, signed=True),
                number(most, 2),
            )
        )
    title = (
        f"{found['steps']} steps each, batch {found['batch_size']}, {found['layout']}, measured; "
        f"comm/comp {sizes[0]}: with batch {sizes[0]}"
    )
    return Table(title, columns, cells)
