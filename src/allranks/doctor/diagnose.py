"""What is wrong with a run or a set of logs: reads everything, then judges it."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from allranks.doctor import out_of_memory, run_evidence
from allranks.doctor.catalogue import finding
from allranks.doctor.failure_facts import FailureFacts, gather
from allranks.doctor.finding import UNKNOWN, WELL, Evidence, Finding, shown_path
from allranks.doctor.flight_recorder import flight_source, is_dump
from allranks.doctor.hang import hang, hung
from allranks.doctor.judge import judge
from allranks.doctor.log_search import Scanned, Source, scan
from allranks.doctor.run_evidence import KernelLog, Starts, error_file
from allranks.doctor.slow import slow
from allranks.errors import AllranksError
from allranks.launch import backends
from allranks.layout import place_in_words
from allranks.run import claims, run_state
from allranks.run.events import to_json
from allranks.run.failures import missing_in_words
from allranks.run.folder import ODD, RunDir, State, find_run
from allranks.run.record import EARLY_EVENTS, read_ranks
from allranks.run.shares import counted_prints
from allranks.timing.limits.facts import Thresholds
from allranks.timing.remarks import remarks, same_order, same_samples

LOGS = ("*.log", "*.out", "*.err", "*.txt", "*.log.gz", "error.json", "*trace_rank_*")
LOG_SUFFIXES = (".log", ".out", ".err", ".txt", ".gz")
MAX_FILES = 10_000
Scan = Callable[[Source], Scanned]
# Only words that name a process or a log may be before it: lora_rank_16.log is of no rank.
_NAMED_RANK = re.compile(
    r"(?:(?:global|workers?|train\w*|jobs?|runs?|logs?|nodes?|proc\w*|out\w*|err\w*|std\w+|slurm"
    r"|torch\w*|\w*\d)[._-])*rank[-_]?(\d+)(?:[._-]\w+)*"
)
_LOG_DIR = re.compile(r"attempt_\d+/(\d+)/std(?:err|out)\.log$")  # torchrun --log-dir
_ERROR_FILE = re.compile(r"error_file: (?P<path>/\S+)")


def diagnose_logs(paths: Sequence[Path]) -> list[Finding]:
    """What is wrong according to log files from anywhere, all of one run."""
    scanned = read_logs([source for path in paths if (source := source_of(path))])
    unread = [one for one in scanned if one.problem]
    if unread and len(unread) == len(scanned):
        raise AllranksError(
            f"{unread[0].source.name} {unread[0].problem}", fix="name a log file that can be read"
        )
    return judge(gather(scanned))


def log_files(path: Path) -> list[Path]:
    """The file itself; for a folder, everything in it that looks like a log."""
    if not path.is_dir():
        return [path]
    root = path.resolve()
    # A link must not lead out of the folder.
    found = sorted(
        {
            file
            for form in LOGS
            for file in path.rglob(form)
            if file.is_file() and file.resolve().is_relative_to(root)
        }
    )
    if not found:
        raise AllranksError(
            f"{path} has no run.json and no logs ({', '.join(LOGS)})",
            fix="name a run folder, a folder of logs, or log files",
        )
    return found[:MAX_FILES]


def read_logs(sources: Sequence[Source], scan: Scan = scan) -> list[Scanned]:
    """Read every file, and the error files that they name and that still exist."""
    scanned = [_scan(source, scan) for source in sources]
    named = {
        Path(match["path"])
        for one in scanned
        for hit in one.hits
        if (match := _ERROR_FILE.search(hit.line.text)) is not None
    }
    files = [error for path in sorted(named) if (error := error_file(path)) is not None]
    return scanned + [scan(source) for source in files]


def _scan(source: Source, scan: Scan) -> Scanned:
    """Read one file; the rank in its name counts only if its lines name no other."""
    found = scan(source)
    if source.rank is not None and found.ranks - {source.rank}:
        found = scan(replace(source, rank=None))
    return found


def source_of(path: Path) -> Source | None:
    """How a file is to be read, with the rank that its name may give."""
    if is_dump(path):
        return flight_source(path)
    if path.name == "error.json":
        return error_file(path)
    return Source(path, shown_path(path), rank_in_name(path), is_named=True)


def rank_in_name(path: Path) -> int | None:
    """3 for rank-3.log, rank3.out, worker_rank_3.txt."""
    match = _NAMED_RANK.fullmatch(path.name) or _LOG_DIR.search(str(path))
    return int(match[1]) if match is not None else None


SOFT = ("nan-loss", "loss-scale-underflow", "launcher-killed")
MISSING = "missing-file"
BY_USER = "stopped by its user"
STOPPERS = ("slurm-time-limit", "slurm-preempted", "slurm-node-failure", "job-cancelled")


def diagnose_run(run: RunDir, scan: Scan = scan) -> list[Finding]:
    """What is wrong with a run; nothing if it is running or finished well."""
    queue = backends.look([run])
    row = run_state.describe(run, queue)
    attempts = run.attempts()
    if row["state"] == "queued" and not attempts:
        return _waiting(run, queue)
    if not attempts:
        return _never_started(run)
    attempt = attempts[-1]
    about_data = data_findings(run, attempt)
    if row["state"] == "stopped" and (by_slurm := _stopped_by_slurm(run, queue)):
        return [*by_slurm, *about_data]
    starts = run_evidence.starts_of(run, attempt)
    scanned = read_logs(sources_of(run, attempt, queue, starts), scan)
    if row["state"] in ("finished", "running", "stopped"):
        # Errors in the log of a run that is still going, or went well, did not end it.
        return [*_judge_only(SOFT, run, scanned, starts), *about_data]
    facts, said = read_failure(run, attempt, scanned, starts)
    curves = list(out_of_memory.memory_curves(run, attempt))
    extra = out_of_memory.memory_candidates(run, attempt, facts, curves, said)
    found = on_which_nodes(run, attempt, judge(facts, extra))
    found = [out_of_memory.with_usage(run, attempt, one, curves) for one in found]
    return [*found, *about_data]


def on_which_nodes(run: RunDir, attempt: int, found: list[Finding]) -> list[Finding]:
    """Add which nodes have a missing file, if the job has looked."""
    seen = run.info().get("missing") or {}
    if seen.get("attempt") != attempt:
        return found
    title, fix = missing_in_words(seen, is_task=bool(run.job().get("task")))
    line = Evidence(shown_path(run.path / "run.json"), 0, f"missing: {to_json(seen)}")
    name = Path(seen["path"]).name
    same = [one for one in found if any(name in each.text for each in one.evidence)]
    known = same[0] if same else finding(MISSING, [])
    known = replace(known, cause=MISSING, title=title, fix=fix, confidence="high")
    return [known.with_evidence(line), *(one for one in found if one not in same)]


def sources_of(run: RunDir, attempt: int, queue: run_state.Queue, starts: Starts) -> list[Source]:
    """What an attempt's ranks and its job have printed and recorded."""
    dumps = [one for path in run.path.rglob("*trace_rank_*") if (one := flight_source(path))]
    accounting = run_evidence.accounting(_of_last_job(run, queue))
    return [*run_evidence.logs_of(run, attempt, starts), *dumps, *accounting]


def read_failure(
    run: RunDir, attempt: int, scanned: Sequence[Scanned], starts: Starts
) -> tuple[FailureFacts, KernelLog]:
    """Everything that an attempt left behind, and the kernel's messages about it."""
    processes = run_evidence.processes_of(run, attempt, starts, scanned)
    span = run_evidence.span_of(run, attempt)
    said = run_evidence.kernel_log(starts, *span, processes)
    facts = gather(
        [*scanned, *read_logs(said.sources)],
        ends=run_evidence.ends_in_events(run, attempt, starts),
        known=_known(run, starts),
        situations=_situations(run),
        world=_world(starts),
        processes=processes,
        interfaces=_interfaces(starts),
    )
    return facts, said


def _interfaces(starts: Starts) -> tuple[str, ...]:
    """The network interfaces of this machine, if the ranks ran on it."""
    if socket.gethostname() not in {start.get("host") for start in starts.values()}:
        return ()
    with suppress(OSError):
        return tuple(name for _, name in socket.if_nameindex())
    return ()


def _world(starts: Starts) -> int | None:
    return next((one["world_size"] for one in starts.values() if "world_size" in one), None)


def _of_last_job(run: RunDir, queue: run_state.Queue) -> dict[str, run_state.EndedJob]:
    """How the job that last trained the run ended; all jobs if it is not known which did."""
    holder = claims.newest(run.claims)
    if holder is not None and holder.job in queue.ended:
        return {holder.job: queue.ended[holder.job]}
    return queue.ended


def _stopped_by_slurm(run: RunDir, queue: run_state.Queue) -> list[Finding]:
    """Why the ranks of a run were stopped, unless its user stopped them."""
    ended = str((run.info().get("ended") or {}).get("reason", ""))
    if not backends.named(backends.of(run)).is_queue or ended.startswith(BY_USER):
        return []
    sources = [
        *run_evidence.accounting(_of_last_job(run, queue)),
        *run_evidence.job_logs(run),
        *_reason(run),
    ]
    return _judge_only(STOPPERS, run, read_logs(sources), {})


def _judge_only(
    slugs: Sequence[str], run: RunDir, scanned: Sequence[Scanned], starts: Starts
) -> list[Finding]:
    """The findings of these causes, as if the logs said nothing else."""
    only = [
        replace(one, hits=[hit for hit in one.hits if hit.cause.slug in slugs]) for one in scanned
    ]
    known, situations = _known(run, starts), _situations(run)
    return judge(gather(only, known=known, situations=situations, world=_world(starts)))


def _situations(run: RunDir) -> tuple[str, ...]:
    return (*(("task",) if run.job().get("task") else ()), backends.of(run))


def _known(run: RunDir, starts: Starts) -> Mapping[str, str]:
    """Values of the job for the fixes: a smaller batch, a lower rate, the job's number."""
    known = {}
    start = next(iter(starts.values()), {})
    shares, accumulation = start.get("rank_batch"), start.get("accumulation")
    largest = max(shares) if isinstance(shares, list) and shares else shares
    if isinstance(largest, int) and isinstance(accumulation, int) and accumulation > 0:
        known["half_micro_batch"] = str(max(1, -(-largest // accumulation) // 2))
    rate = (run.job().get("optimizer") or {}).get("lr")
    if isinstance(rate, int | float):
        known["lower_lr"] = f"{rate / 10:g}"
    jobs = run.info().get("jobs") or []
    if jobs:
        known["job"] = str(jobs[-1])
    return known


def _waiting(run: RunDir, queue: run_state.Queue) -> list[Finding]:
    """Why a job is still in the queue, in SLURM's words."""
    jobs = [queue.jobs[job] for job in run.info().get("jobs", []) if job in queue.jobs]
    lines = [Evidence("squeue", 0, f"{job.job} {job.state} ({job.reason})") for job in jobs[:1]]
    return [finding("slurm-pending", lines, reason=jobs[0].why)] if lines else []


def _never_started(run: RunDir) -> list[Finding]:
    """Why a job never started a rank: what it printed, or why it was refused."""
    sources = [*(Source(path, shown_path(path)) for path in run.job_logs()), *_reason(run)]
    return judge(gather(read_logs(sources), situations=("slurm",)))


def _reason(run: RunDir) -> list[Source]:
    """Why the run was given up, as its run.json says."""
    ended, path = (run.info().get("ended") or {}).get("reason"), run.path / "run.json"
    return [Source(path, shown_path(path), content=str(ended).encode())] if ended else []


def stalled(
    run: RunDir, state: State, *, after: float | None = None, takes_stacks: bool = True
) -> list[Finding]:
    """Why no rank makes progress.

    `after`: seconds without a step that count as a stall; by default the run's own steps decide.
    """
    if state == "running":
        return hang(run, after=after, takes_stacks=takes_stacks)
    return hung(run) if state in ("failed", "stopped") else []


def slowed(run: RunDir, state: State, limits: Thresholds | None = None) -> list[Finding]:
    """Why a run that trains, or has trained, is slow."""
    if state not in ("running", "finished", "stopped"):
        return []
    return slow(run, limits)


def odd_folder(run: RunDir) -> list[Finding]:
    """A finding if the folder holds what it should not: other findings may be wrong then."""
    problem = run.problem()
    if problem is None:
        return []
    line = Evidence(shown_path(run.path), 0, problem)
    return [finding("odd-run-folder", [line], problem=problem.removeprefix(ODD))]


# --- Results that differ between layouts: batches, seeds and order -------------------------------


def data_findings(run: RunDir, attempt: int) -> list[Finding]:
    """Ranks or epochs that read the same samples."""
    records = read_ranks(run, attempt, EARLY_EVENTS)
    seen = counted_prints(records)

    def evidence(rank: int, epoch: int) -> Evidence:
        event = seen[rank][epoch, 0]
        keys = [key for key in ("epoch", "batch", "indices", "content") if key in event]
        words = ", ".join(f"{key} {event[key]}" for key in keys)
        return Evidence(shown_path(run.events(attempt, rank)), 0, words)

    found = []
    if alike := same_samples(seen):
        lines = [evidence(rank, epoch=1) for rank in alike[:2]]
        found.append(finding("ranks-read-same-data", lines, ranks=", ".join(map(str, alike))))
    if same_order(seen):
        found.append(finding("missing-set-epoch", [evidence(min(seen), epoch=2)]))
    return found


# Remarks on a run that are findings, and the causes that say the same as a remark.
FROM_REMARKS = {"alone": "ranks-train-alone", "idle-rank": "idle-rank"}
SAME_AS_REMARKS = {kind: (cause,) for kind, cause in FROM_REMARKS.items()} | {
    "same-samples": ("ranks-read-same-data",),
    "same-order": ("missing-set-epoch",),
    "too-short": ("too-short-to-judge",),
    "uneven-ranks": ("unbalanced-data",),
}


def remark_findings(run: RunDir) -> list[Finding]:
    """What makes a run's numbers doubtful and can be fixed."""
    path = shown_path(run.path)
    return [
        finding(FROM_REMARKS[one.kind], [Evidence(path, 0, one.text)])
        for one in remarks(run)
        if one.kind in FROM_REMARKS
    ]


def doubts(runs: Path, subjects: Sequence[str], found: Sequence[Finding]) -> list[str]:
    """What else makes the numbers of the named runs doubtful."""
    causes = {one.cause for one in found}
    named = [find_run(runs, one) for one in subjects if not is_log(one)]
    return [
        f"{run.name}: {one.text}" if len(named) > 1 else one.text
        for run in named
        for one in remarks(run)
        if causes.isdisjoint(SAME_AS_REMARKS.get(one.kind, ()))
    ]


def without_findings(runs: Path, subjects: Sequence[str]) -> dict[str, str]:
    """What to say of each log or run, by its name, if nothing was found."""
    said = {}
    for one in subjects:
        if is_log(one):
            said[one] = about_log(Path(one).expanduser())
        else:
            run = find_run(runs, one)
            state = run_state.describe(run, backends.look([run]))["state"]
            said[run.name] = UNKNOWN if state == "failed" else WELL
    return said


def about_log(path: Path) -> str:
    """Why nothing was found in a log: that it has no known cause does not make it a good one."""
    if not path.is_file() or path.suffix == ".gz" or is_dump(path):
        return UNKNOWN
    with path.open("rb") as file:
        start = file.read(1 << 16)
    if not start:
        return "it is empty"
    return "it is not a text file" if b"\0" in start else UNKNOWN


def compare(runs: Sequence[RunDir]) -> list[Finding]:
    """Why the results of runs of one job may differ: batch and seed."""
    known = [(run, facts) for run in runs if (facts := _step_facts(run))]
    if len(known) < 2:
        return []
    (first, before), (last, now) = known[0], known[-1]
    found, lines = [], []
    for run, facts in ((first, before), (last, now)):
        words = f"{facts['samples']} samples per step on {facts['ranks']} ranks"
        lines.append(Evidence(shown_path(run.path / "job.yaml"), 0, words))
    if before["samples"] != now["samples"] and before["rate"] == now["rate"]:
        fields = {"before": str(before["samples"]), "now": str(now["samples"])}
        factor = f"{now['samples'] / before['samples']:g}"
        found.append(finding("effective-batch-grew", lines, **fields, factor=factor))
    if before["seed"] is not None and before["seed"] != now["seed"]:
        seeds = f"is {before['seed']} in one and {now['seed']} in the other"
        found.append(finding("seeds-differ", lines, seeds=seeds))
    return found


def _step_facts(run: RunDir) -> dict[str, Any] | None:
    """Samples per step, learning rate and seed of a run's last attempt."""
    attempts = run.attempts()
    records = read_ranks(run, attempts[-1], EARLY_EVENTS) if attempts else {}
    samples = [int(one.steps[0].get("samples") or 0) for one in records.values() if one.steps]
    job = run.job()
    rate = (job.get("optimizer") or {}).get("lr")
    seed = job.get("seed") if job.get("task") else None
    found = {"samples": sum(samples), "ranks": len(samples), "rate": rate, "seed": seed}
    return found if sum(samples) else None


# --- All of it together --------------------------------------------------------------------------

# What the logs of a hung run say: ranks waited, or were ended because of it.
ECHOES = ("rank-missing-from-collective", "rank-died", "terminated-by-signal", "rank-raised")


def together(
    by_logs: Sequence[Finding], stalls: Sequence[Finding], slowness: Sequence[Finding]
) -> list[Finding]:
    """All findings in order: a hang before its echoes in the logs, slowness last."""
    rest = list(by_logs)
    if stalls:
        ranks = {None, *(one.rank for one in stalls)}
        rest = [one for one in rest if one.cause not in ECHOES or one.rank not in ranks]
    # If a rank named a certain cause of its own, that may be why it made no progress.
    is_echo = not rest or rest[0].cause in ECHOES or rest[0].confidence != "high"
    return [*stalls, *rest, *slowness] if is_echo else [*rest, *stalls, *slowness]


def diagnosis_of(
    run: RunDir,
    limits: Thresholds | None = None,
    stalled_after: float | None = None,
    *,
    scan: Scan = scan,
    takes_stacks: bool = True,
) -> list[Finding]:
    """What is wrong with one run: why it failed, hangs or is slow.

    `takes_stacks`: a hanging rank is made to write its stack, by a signal.
    """
    state = run_state.describe(run, backends.look([run]))["state"]
    stalls = stalled(run, state, after=stalled_after, takes_stacks=takes_stacks)
    slowness = slowed(run, state, limits) if not stalls else []
    found = together(diagnose_run(run, scan), stalls, slowness)
    doubtful = remark_findings(run)
    found = [*found, *doubtful] if state == "failed" else [*doubtful, *found]
    return [with_place(run, one) for one in [*found, *odd_folder(run)]]


def with_place(run: RunDir, found: Finding) -> Finding:
    """A finding that says which stage or shard its rank has, where a layout divides the model."""
    if found.rank is None or not run.attempts():
        return found
    start = run.start(run.attempts()[-1], found.rank) or {}
    layout = start.get("layout") or run.info().get("layout")
    return replace(found, place=place_in_words(layout, [found.rank]) or None)


def is_log(subject: str) -> bool:
    """Whether this names logs; anything else names a run."""
    path = Path(subject).expanduser()
    return path.exists() and not (path / "run.json").is_file()


def diagnosis(
    runs: Path, subjects: Sequence[str], limits: Thresholds, stalled_after: float | None = None
) -> list[Finding]:
    """What is wrong with the subjects: files are logs of one run, anything else is a run."""
    logs, references = [], []
    for one in subjects:
        path = Path(one).expanduser()
        if is_log(one):
            logs += log_files(path)
        elif path.suffix in LOG_SUFFIXES:
            raise AllranksError(
                f"there is no file {one}",
                fix="name an existing log, a folder of logs, or a run",
            )
        else:
            references.append(one)
    found = diagnose_logs(logs) if logs else []
    named = [find_run(runs, one) for one in references]
    for run in named:
        found += diagnosis_of(run, limits, stalled_after)
    return [*found, *compare(named)]
