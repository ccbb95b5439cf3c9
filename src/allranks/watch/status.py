"""One page to share: what there is, what runs, how fast, with which settings, what comes next."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.plain import clean
from allranks.redact import redact
from allranks.watch.lines import day, reason, state_word
from allranks.watch.live import Watcher
from allranks.watch.marks import Mark, judged
from allranks.watch.views import Parts, RankView, RunView
from allranks.watch.words import count, duration, hours, num_bytes

DATA_BOUND, STRAGGLING = 0.10, 0.10  # shares of a step that are worth a look
SHOWN_SETTINGS = (
    *("task", "command", "batch_size", "batch_size_per_rank", "micro_batch_size", "epochs"),
    *("steps", "seed", "precision", "compile", "activation_checkpointing", "lr_scaling"),
    *("compress", "optimizer", "data", "checkpoint", "slurm", "env"),
)
# Variables of the environment whose values may be told.
OPEN_VARIABLES = ("NCCL_", "OMP_", "CUDA_", "TORCH_", "PYTORCH_")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One run, and what its folder says of its settings."""

    view: RunView
    job: Mapping[str, Any] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    parts: Parts | None = None
    ranks: Sequence[RankView] = ()


def gather(watcher: Watcher) -> list[RunStatus]:
    """Every run that the watcher shows, with its ranks."""
    watcher.poll(budget=float("inf"))
    names = [run.run for run in watcher.runs()]
    watcher.poll(names, budget=float("inf"))
    return [
        RunStatus(
            view=run,
            job=watcher.job(run.run),
            info=watcher.info(run.run),
            parts=watcher.parts(run.run),
            ranks=watcher.ranks(run.run),
        )
        for run in watcher.runs()
    ]


def status_page(
    runs: Sequence[RunStatus],
    resources: Mapping[str, Any],
    marks: Mapping[str, Mark],
    created: float,
) -> str:
    """The page, in Markdown. Secrets in settings and reasons are taken out."""
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(created))
    lines = [f"# Status, {moment}", ""]
    lines += ["## Resources", "", *resource_lines(resources), ""]
    lines += ["## Runs", "", *run_table(runs, day(created)), ""]
    lines += ["## Performance", "", *performance_lines(runs, marks), ""]
    lines += ["## Settings", "", *settings_lines(runs)]
    lines += ["## Next steps", "", *next_lines(runs), ""]
    lines += ["## To follow it", "", "```", *commands(runs), "```", ""]
    return redact("\n".join(lines))


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table; a bar in a cell would end it."""
    text = [[clean(str(cell)).replace("|", "\\|") for cell in row] for row in rows]
    body = ["| " + " | ".join(cell or "-" for cell in row) + " |" for row in text]
    return ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles), *body]


def resource_lines(resources: Mapping[str, Any]) -> list[str]:
    """The cluster, as `allranks cluster --json` has it, and this machine."""
    machine = resources.get("machine") or {}
    lines = []
    if slurm := resources.get("slurm"):
        nodes, gpus = resources["nodes"], resources["gpus"]
        lines += [
            f"SLURM cluster {slurm['cluster']}: {nodes['up']} of {nodes['total']} nodes up, "
            f"{gpus['free']} of {gpus['total']} GPUs free.",
            "",
            *table(("partition", "nodes", "idle"), partition_rows(resources)),
            "",
        ]
    gpus = machine.get("gpus") or []
    names = [str(gpu.get("name")) for gpu in gpus if isinstance(gpu, dict)]
    said = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no GPU"
    memory = machine.get("memory_allotted_bytes") or machine.get("memory_bytes")
    lines.append(
        f"This machine ({machine.get('host', 'unknown')}): {said}, "
        f"{machine.get('cpus_allotted', machine.get('cpus', '?'))} CPUs"
        + (f", {num_bytes(memory)} memory." if memory else ".")
    )
    return [*lines, *(f"\n{clean(str(note))}" for note in resources.get("notes") or [])]


def partition_rows(resources: Mapping[str, Any]) -> list[list[object]]:
    return [
        [part["name"], part["nodes"]["total"], part["nodes"]["idle"]]
        for part in resources.get("partitions") or []
    ]


def run_table(runs: Sequence[RunStatus], today: str) -> list[str]:
    if not runs:
        return ["None."]
    titles = ("run", "state", "layout", "on", "progress", "time left", "why")
    rows = []
    for one in runs:
        view = one.view
        on = ", ".join(view.nodes) or one.info.get("hardware", {}).get("host", "")
        done = f"step {view.step}" + (f" of {view.steps}" if view.steps else "")
        if view.epoch is not None:
            done += f", epoch {view.epoch}" + (f" of {view.epochs}" if view.epochs else "")
        left = duration(view.seconds_left) if view.seconds_left is not None else ""
        why = reason(view, today)
        rows.append(
            [view.run, state_word(view), view.layout, on, done if view.step else "", left, why]
        )
    return table(titles, rows)


def performance_lines(runs: Sequence[RunStatus], marks: Mapping[str, Mark]) -> list[str]:
    """Predicted beside measured; there is no prediction without a plan."""
    measured = [one for one in runs if one.view.samples_per_second]
    if not measured:
        return ["Nothing is measured yet."]
    titles = [
        *("run", "layout", "predicted samples/s", "measured samples/s", "efficiency", "step"),
        *("waits for data", "waits for ranks", "GPU use", "hours", "loss"),
    ]
    rows = []
    for one in measured:
        view, steps = one.view, one.view.step_seconds or 0.0
        rows.append(
            [
                *(view.run, view.layout, "none", count(view.samples_per_second or 0)),
                f"{view.efficiency:.0%}" if view.efficiency is not None else "",
                duration(steps),
                share_of(mean([rank.data for rank in one.ranks]), steps),
                share_of(mean([rank.wait for rank in one.ranks]), steps),
                gpu_use(one.ranks, marks),
                f"{hours(view.rank_hours)} {'GPU' if view.is_gpu else 'rank'}-hours",
                f"{view.loss:.4g}" if view.loss is not None else "",
            ]
        )
    notes = [
        "",
        "Measured over the last steps of each run; nothing was predicted: there is no plan.",
    ]
    bases = dict.fromkeys(one.view.baseline for one in measured if one.view.baseline)
    if bases:
        notes.append(f"Efficiency is against the pace of one rank in {', '.join(map(str, bases))}.")
    return [*table(titles, rows), *notes]


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def share_of(part: float | None, whole: float) -> str:
    return f"{part / whole:.0%}" if part is not None and whole else ""


def gpu_use(ranks: Sequence[RankView], marks: Mapping[str, Mark]) -> str:
    use = mean([rank.utilization for rank in ranks])
    if use is None:
        return ""
    low = [rank.rank for rank in ranks if judged(rank, marks)["gpu_util"] == "warn"]
    return f"{use:.0f}%" + (f" (low: rank {', '.join(map(str, low[:8]))})" if low else "")


def settings_lines(runs: Sequence[RunStatus]) -> list[str]:
    """What each run was started with: the job as resolved, what was typed, versions."""
    lines = []
    for one in runs:
        lines += [f"### {one.view.run}", ""]
        rows = [
            [key, job_setting(key, one.job[key])]
            for key in SHOWN_SETTINGS
            if is_set(one.job.get(key))
        ]
        if one.info.get("overrides"):
            rows.append(["typed", " ".join(typed(str(word)) for word in one.info["overrides"])])
        code, packages = one.info.get("code") or {}, one.info.get("packages") or {}
        if code.get("commit"):
            rows.append(["code", str(code["commit"])[:12] + (", changed" if code["dirty"] else "")])
        versions = [
            f"{name} {packages[name]}" for name in ("allranks", "torch") if name in packages
        ]
        if versions:
            rows.append(["versions", ", ".join(versions)])
        lines += [*(table(("setting", "value"), rows) if rows else ["None is known."]), ""]
    return lines or ["None.", ""]


def is_set(value: object) -> bool:
    return value not in (None, "", [], {})


def job_setting(key: str, value: object) -> str:
    """A setting of the job; of its variables only the values that are known to be no secrets."""
    if key != "env":
        return setting(value)
    if not isinstance(value, Mapping):
        return ""
    return ", ".join(
        f"{name}={setting(item)}" if is_open(str(name)) else str(name)
        for name, item in value.items()
    )


def typed(word: str) -> str:
    """What was typed; `env.NAME=VALUE` as in the job."""
    name, sign, _ = word.removeprefix("env.").partition("=")
    return f"env.{name}" if sign and word.startswith("env.") and not is_open(name) else word


def is_open(name: str) -> bool:
    return name.startswith(OPEN_VARIABLES)


def setting(value: object) -> str:
    """A value in one line; of a mapping, what is set in it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={setting(item)}" for key, item in value.items() if is_set(item))
    if isinstance(value, list):
        return ", ".join(map(setting, value))
    return str(value)


def next_lines(runs: Sequence[RunStatus]) -> list[str]:
    lines = [f"- {line}" for one in runs for line in next_steps(one)]
    return lines or ["- Start a run: `allranks run job.yaml`."]


def next_steps(one: RunStatus) -> list[str]:
    """What to do about a run, as far as its numbers tell."""
    view, name = one.view, one.view.run
    word = "resume" if one.info.get("backend") == "slurm" else "run --resume"
    if view.stalled:
        return [f"{name} makes no steps: `allranks doctor {name}` says where it is."]
    if view.state == "failed":
        return [f"{name} failed: `allranks doctor {name}`, then `allranks {word} {name}`."]
    if view.state == "stopped":
        return [f"{name} was stopped: `allranks {word} {name}` goes on."]
    if view.state == "queued":
        return [f"{name} waits: `allranks ls {name}` names layouts that would start earlier."]
    found = []
    if one.parts is not None:
        whole = sum(one.parts.seconds.values()) or 1.0
        if one.parts.seconds["data"] > DATA_BOUND * whole:
            said = f"{one.parts.seconds['data'] / whole:.0%} of its steps for data"
            found.append(f"{name} waits {said}: `allranks bench data`.")
        if one.parts.seconds["straggler"] > STRAGGLING * whole:
            said = f"{one.parts.seconds['straggler'] / whole:.0%} of its steps"
            found.append(f"{name} waits {said} for rank {one.parts.slowest_rank}.")
    if (view.world_size or 1) > 1 and view.efficiency is None and view.step:
        found.append(
            f"{name} has nothing to be compared with: run its job with `--layout 1x1` too."
        )
    if view.state == "finished":
        found.append(f"{name} finished: `allranks report {name}`.")
    return found


def commands(runs: Sequence[RunStatus]) -> list[str]:
    """What to type to follow the runs of this page."""
    active = [one.view.run for one in runs if one.view.is_active]
    lines = ["allranks watch", "allranks ls"]
    lines += [f"allranks logs {name} -f" for name in active]
    jobs = [job for one in runs if one.view.is_active for job in one.view.jobs]
    return lines + ([f"squeue -j {','.join(jobs)}"] if jobs else [])
