"""`allranks status`: one page to share, with resources, runs, speed, settings and next steps."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from allranks.errors import AllranksError
from allranks.launch.backends import TABLE
from allranks.machine.inventory import describe_machine
from allranks.run.folder import RunDir, write_atomically
from allranks.show.numbers import (
    NOTHING,
    count,
    duration,
    metric,
    number,
    percent,
    ranks_in_words,
    size,
)
from allranks.show.secrets import redact
from allranks.show.tables import Table, markdown, without_empty
from allranks.show.text import as_code, in_markdown, plain
from allranks.slurm.cluster import describe_cluster
from allranks.slurm.commands import SlurmError
from allranks.timing.comparison import bench_of
from allranks.timing.remarks import SPEEDUP, forbidding
from allranks.timing.result import NEXT
from allranks.watch.cells import Mark, doubts, judged, pace_words, reason, state_word
from allranks.watch.live import Watcher
from allranks.watch.views import RankView, RunView

MOST_NODES = 8  # that a run's line names
SHOWN_SETTINGS = (
    *("task", "command", "launcher", "options", "batch_size", "batch_size_per_rank"),
    *("micro_batch_size", "epochs", "steps", "seed", "precision", "compile"),
    *("activation_checkpointing", "lr_scaling", "compress", "optimizer", "data", "checkpoint"),
    *("slurm", "env"),
)
# What the ranks made of them, as reported by the first rank.
APPLIED = {
    "precision": "precision",
    "compile": "compile",
    "backend": "backend",
    "link": "network",
    "rank_batch": "batch of a rank",
    "accumulation": "accumulation",
    "num_workers": "loader workers",
    "threads": "threads",
}
# Environment variables whose values are safe to show.
OPEN_VARIABLES = ("NCCL_", "OMP_", "CUDA_", "TORCH_", "PYTORCH_")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One run with its settings and ranks."""

    view: RunView
    job: Mapping[str, Any] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)  # its first rank's start event
    ranks: Sequence[RankView] = ()
    compared_as: object = None  # equal for runs that can be compared; None if it cannot be


def gather(watcher: Watcher) -> list[RunStatus]:
    """Every run that the watcher shows, with its ranks."""
    watcher.poll(budget=float("inf"))
    names = [run.run for run in watcher.runs()]
    watcher.poll(names, budget=float("inf"))
    watcher.judge_all()
    return [
        RunStatus(
            view=run,
            job=(one := watcher.followed(run.run)).job,
            info=one.info,
            start=one.start,
            ranks=watcher.ranks(run.run),
            compared_as=next(iter(one.sets), None),
        )
        for run in watcher.runs()
    ]


def make_status(
    runs: Path, chosen: Sequence[RunDir] | None, marks: Mapping[str, Mark], *, old: bool
) -> tuple[str, list[RunView]]:
    """The page about a folder's runs, or the chosen ones, and the runs on it."""
    watcher = Watcher(runs, chosen, old=old)
    try:
        found = gather(watcher)
    finally:
        watcher.close()
    page = status_page(found, resources(), marks, time.time(), runs.absolute())
    return page, [one.view for one in found]


def resources() -> dict[str, Any]:
    """The cluster and this machine; this machine alone if SLURM does not answer."""
    try:
        return describe_cluster()
    except AllranksError as error:
        meaning = error.meaning if isinstance(error, SlurmError) else ""
        cluster = "SLURM" if isinstance(error, SlurmError) else "No SLURM cluster"
        note = f"{cluster}: {meaning or error.what}."
        return {"slurm": None, "machine": describe_machine(), "notes": [note]}


def write_page(path: Path, page: str) -> None:
    """Write the page completely or not at all; devices and pipes work too."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(page)  # renaming a file onto a device would replace it
        else:
            write_atomically(path, page)
    except OSError as error:
        why = error.strerror or str(error)
        raise AllranksError(
            f"cannot write {path}: {why}", fix="name another file after --md", exit_code=1
        ) from error


def status_page(
    runs: Sequence[RunStatus],
    resources: Mapping[str, Any],
    marks: Mapping[str, Mark],
    created: float,
    folder: Path | None = None,
) -> str:
    """The page in Markdown, with secrets in settings and reasons redacted."""
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(created))
    sections = {
        f"# Status, {moment}": [],
        "## Resources": resource_lines(resources),
        "## Runs": run_table(runs, created),
        "## Performance": performance_lines(runs, marks),
        "## Limits": limit_lines(runs),
        "## Settings": settings_lines(runs),
        "## Next steps": next_lines(runs),
        "## Follow the runs": ["```", *commands(runs, folder), "```"],
    }
    page = "\n\n".join("\n".join([title, "", *lines]).strip() for title, lines in sections.items())
    return redact(plain(f"{page}\n"))


def resource_lines(resources: Mapping[str, Any]) -> list[str]:
    """The cluster, from the data of `allranks cluster --json`, and this machine."""
    machine = resources.get("machine") or {}
    lines = []
    if slurm := resources.get("slurm"):
        nodes, gpus = resources["nodes"], resources["gpus"]
        partitions = [
            [part["name"], count(part["nodes"]["total"]), count(part["nodes"]["idle"])]
            for part in resources.get("partitions") or []
        ]
        lines += [
            f"SLURM cluster {slurm['cluster']}: {nodes['up']} of {nodes['total']} nodes up, "
            f"{gpus['free']} of {gpus['total']} GPUs free.",
            "",
            *markdown(Table("", ("partition", "nodes", "idle"), partitions)),
        ]
    gpus = machine.get("gpus") or []
    names = [str(gpu.get("name")) for gpu in gpus if isinstance(gpu, dict)]
    said = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no GPU"
    memory = machine.get("memory_allotted_bytes") or machine.get("memory_bytes")
    lines.append(
        f"This machine ({machine.get('host', 'unknown')}): {said}, "
        f"{machine.get('cpus_allotted', machine.get('cpus', '?'))} CPUs"
        + (f", {size(memory)} memory." if memory else ".")
    )
    return [*lines, *(f"\n{in_markdown(str(note))}" for note in resources.get("notes") or [])]


def run_table(runs: Sequence[RunStatus], now: float) -> list[str]:
    if not runs:
        return ["None."]
    titles = ("run", "SLURM job", "state", "layout", "on", "batch", "progress", "time left", "why")
    rows = [
        [
            *(one.view.run, ", ".join(one.view.jobs), state_word(one.view), one.view.layout),
            *(place_of(one), count(one.start.get("global_batch") or one.job.get("batch_size"))),
            *(
                progress(one.view),
                duration(one.view.seconds_left, whole=True),
                reason(one.view, now),
            ),
        ]
        for one in runs
    ]
    table = Table("", titles, [[cell or NOTHING for cell in row] for row in rows], texts=titles)
    return markdown(without_empty(table))


def place_of(one: RunStatus) -> str:
    """Where a run runs or has run: its machines, and the device of a rank."""
    nodes = list(dict.fromkeys(rank.node for rank in one.ranks if rank.node)) or one.view.nodes
    said = ", ".join(nodes[:MOST_NODES])
    if len(nodes) > MOST_NODES:
        said += f", … ({len(nodes)} nodes)"
    host = said or str((one.info.get("hardware") or {}).get("host", ""))
    return f"{host} ({one.view.device})" if one.view.device and host else host


def progress(view: RunView) -> str:
    if not view.step:
        return ""
    done = f"step {count(view.step)}" + (f" of {count(view.steps)}" if view.steps else "")
    if view.epoch is not None:
        done += f", epoch {count(view.epoch)}"
        done += f" of {count(view.epochs)}" if view.epochs else ""
    return done


def performance_lines(runs: Sequence[RunStatus], marks: Mapping[str, Mark]) -> list[str]:
    """Predicted and measured speed, where a smaller layout of the same job was also measured."""
    measured = [one for one in runs if one.view.samples_per_second]
    if not measured:
        return [*doubt_lines(runs), "Nothing has been measured yet."]
    titles = (
        *("run", "layout", "predicted samples/s", "measured samples/s", "efficiency", "step"),
        *("waits for data", "waits for ranks", "GPU use", "hours", "loss"),
    )
    rows = []
    for one in measured:
        view, steps = one.view, mean(rank.step_seconds for rank in one.ranks) or 0.0
        shares = waiting_shares(one, steps)
        rows.append(
            [
                *(view.run, view.layout, predicted(view), pace_words(view)),
                percent(view.efficiency if view.is_compared else None),
                duration(view.step_seconds or steps),
                *map(percent, shares),
                gpu_use(one.ranks, marks),
                f"{number(view.rank_hours)} {view.hours_unit}",
                metric(view.loss),
            ]
        )
    notes = [
        "Measured over the last steps of a running run, and over the steady steps of one that "
        "has ended.",
    ]
    bases = dict.fromkeys(
        in_markdown(f"{one.view.baseline_layout} ({', '.join(one.view.baseline_runs)})")
        for one in measured
        if one.view.is_compared
    )
    if bases:
        notes.append(
            "Predicted is the speed if every rank were as fast as a rank of the smallest measured "
            f"layout: the median of {'; '.join(bases)}. Efficiency compares the median of a "
            "layout's runs with it; a running run is compared by its last steps."
        )
    else:
        notes.append("No prediction: no smaller layout of these jobs has been measured.")
    table = markdown(without_empty(Table("", titles, rows, texts=("layout",))))
    return [*doubt_lines(runs), *table, *notes]


def waiting_shares(one: RunStatus, step_seconds: float) -> list[float | None]:
    """Shares of the time that ranks wait for data and for each other, as in the run's verdict.

    While it runs, of its last steps; `step_seconds`: their mean.
    """
    found = one.view.judgement
    if not one.view.is_active and found is not None and (parts := found.verdict.shares):
        return [parts["data"], parts["communication"] + parts["straggler"]]
    waits = (mean(rank.data for rank in one.ranks), mean(rank.wait for rank in one.ranks))
    return [wait / step_seconds if wait is not None and step_seconds else None for wait in waits]


def limit_lines(runs: Sequence[RunStatus]) -> list[str]:
    """What limits each run, and what to type next."""
    lines = []
    for one in runs:
        found = [f"  - {line.markdown}" for line in one.view.verdict_lines]
        lines += [f"- {in_markdown(one.view.run)}", *found] if found else []
    return lines or ["Nothing has been measured yet."]


def doubt_lines(runs: Sequence[RunStatus]) -> list[str]:
    """What makes the numbers doubtful, to be read before them."""
    lines = [
        f"- {in_markdown(f'{one.view.run}: {text}')}" for one in runs for text in doubts(one.view)
    ]
    return [*lines, ""] if lines else []


def predicted(view: RunView) -> str:
    """The speed of this many ranks if scaling were perfect."""
    if not view.is_compared or not view.baseline_samples_per_second or not view.speedup:
        return NOTHING
    return number(view.baseline_samples_per_second * view.speedup / (view.efficiency or 1.0))


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def gpu_use(ranks: Sequence[RankView], marks: Mapping[str, Mark]) -> str:
    use = mean(rank.utilization for rank in ranks)
    if use is None:
        return NOTHING
    low = [rank.rank for rank in ranks if judged(rank, marks)["gpu_util"] == "warn"]
    return f"{use:.0f}%" + (f" (low: {ranks_in_words(low)})" if low else "")


def next_lines(runs: Sequence[RunStatus]) -> list[str]:
    lines = [f"- {line}" for one in runs for line in next_steps(one)]
    finished: dict[object, list[str]] = {}
    for one in runs:
        is_comparable = one.compared_as and forbidding(SPEEDUP, one.view.remarks) is None
        if one.view.state == "finished" and is_comparable:
            finished.setdefault(one.compared_as, []).append(one.view.run)
    for names in finished.values():
        if len(names) > 1:
            typed = as_code(f"allranks report {shlex.join(names)}")
            lines.append(f"- Compare the finished runs: {typed}.")
    if not lines and any(line.label == NEXT for one in runs for line in one.view.verdict_lines):
        return ["- See `next` under Limits."]
    return lines or ["- Start a run: `allranks run job.yaml`."]


def next_steps(one: RunStatus) -> list[str]:
    """What to do next about a run, judging by its numbers."""
    view, name = one.view, in_markdown(one.view.run)
    typed = {
        what: as_code(f"allranks {what} {shlex.quote(view.run)}")
        for what in ("doctor", "ls", "resume")
    }
    # Whether a script can resume is only known if its job says where it saves.
    can_go_on = not one.job.get("command") or bool(one.job.get("last"))
    if view.stalled:
        return [f"{name} makes no progress: {typed['doctor']} shows where it is stuck."]
    if view.state == "failed":
        again = f"; to continue it: {typed['resume']}" if can_go_on else ""
        return [f"{name} failed: {typed['doctor']} shows why{again}."]
    if view.state == "stopped" and one.info.get("bench"):
        return []  # it was stopped because it had been measured
    if view.state == "stopped":
        return [f"{name} was stopped: continue with {typed['resume']}."] if can_go_on else []
    if view.state == "queued":
        return [f"{name} is queued: {typed['ls']} shows layouts that would start earlier."]
    found = []
    if view.state == "finished" and forbidding(SPEEDUP, view.remarks) is not None:
        found.append(f"{name} cannot be compared with others: {typed['doctor']} shows why.")
    is_comparable = not view.doubt and forbidding(SPEEDUP, view.remarks) is None
    if (view.world_size or 1) > 1 and not view.is_compared and view.step and is_comparable:
        found.append(f"{name} has no baseline: also run its job with `--layout 1x1`.")
    return found


def commands(runs: Sequence[RunStatus], folder: Path | None = None) -> list[str]:
    """The commands that follow the runs of this page, and where to type them."""
    active = [one.view.run for one in runs if one.view.is_active]
    option = ""
    lines = []
    if folder is not None:
        option = "" if folder.name == "runs" else f" --runs {shlex.quote(folder.name)}"
        lines.append(f"cd {shlex.quote(str(folder.parent))}")
    lines += [f"allranks {what}{option}" for what in ("watch", "watch --web", "ls")]
    lines += [as_code(f"allranks logs {shlex.quote(name)} -f{option}")[1:-1] for name in active]
    jobs = [job for one in runs if one.view.is_active for job in one.view.jobs]
    return lines + ([f"squeue -j {','.join(jobs)}"] if jobs else [])


def settings_lines(runs: Sequence[RunStatus]) -> list[str]:
    """One table per job; where its runs differ, each value names the runs that have it."""
    lines = []
    by_job = sorted(runs, key=lambda one: one.view.job)
    for job, group in groupby(by_job, key=lambda one: one.view.job):
        known = {one.view.run: settings_of(one) for one in group}
        keys = dict.fromkeys(key for rows in known.values() for key in rows)
        rows = [
            [key, value_by_run({run: known[run].get(key, "") for run in known})] for key in keys
        ]
        lines += [f"### {in_markdown(job)}: {in_markdown(', '.join(known))}", ""]
        table = markdown(Table("", ("setting", "value"), rows, texts=("value",)))
        lines += table if rows else ["None known.", ""]
    return lines or ["None."]


def value_by_run(by_run: Mapping[str, str]) -> str:
    """The value that all runs share, or each value with the ends of the names of its runs."""
    values = dict.fromkeys(by_run.values())
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(
        f"{value or 'none'} (…{', …'.join(run[-4:] for run in by_run if by_run[run] == value)})"
        for value in values
    )


def settings_of(one: RunStatus) -> dict[str, str]:
    """Every setting that a run sets, and its value in one line."""
    shown = [k for k in SHOWN_SETTINGS if k not in TABLE or k == one.info.get("backend")]
    # A benchmark runs its job without an end: the job's own length is in the benchmark's record.
    job = {**one.job, **bench_of(one.info).get("job", {})}
    rows = {key: job_setting(key, job.get(key)) for key in shown}
    for key, word in APPLIED.items():
        if is_set(one.start.get(key)):
            rows[f"applied: {word}"] = setting(one.start[key])
    rows["typed"] = " ".join(shown_override(str(word)) for word in one.info.get("overrides") or [])
    code, packages = one.info.get("code") or {}, one.info.get("packages") or {}
    if code.get("commit"):
        rows["code"] = str(code["commit"])[:12] + (", changed" if code.get("dirty") else "")
    versions = [f"{name} {packages[name]}" for name in ("allranks", "torch") if name in packages]
    rows["versions"] = ", ".join(versions)
    return {key: value for key, value in rows.items() if value}


def is_set(value: object) -> bool:
    return value not in (None, "", [], {})


def job_setting(key: str, value: object) -> str:
    """A setting of the job; of its environment, only values that cannot be secrets."""
    if key == "env" and isinstance(value, Mapping):
        shown = {name: item for name, item in value.items() if is_open(str(name))}
        return ", ".join(
            [*filter(None, [setting(shown)]), *(str(n) for n in value if n not in shown)]
        )
    return setting(value) if is_set(value) else ""


def shown_override(word: str) -> str:
    """An override as it was typed, but without the value of `env.NAME=VALUE` unless it is safe."""
    name, sign, _ = word.removeprefix("env.").partition("=")
    return f"env.{name}" if sign and word.startswith("env.") and not is_open(name) else word


def is_open(name: str) -> bool:
    return name.startswith(OPEN_VARIABLES)


def setting(value: object) -> str:
    """A value in one line; of a mapping, only the keys that are set."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={setting(item)}" for key, item in value.items() if is_set(item))
    if isinstance(value, list):
        return ", ".join(map(setting, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
