"""Which jobs are waiting in a SLURM cluster's queue, and the user's position in it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from allranks.slurm import commands as slurm
from allranks.slurm.cluster import current_user, find_partition, list_partitions
from allranks.slurm.commands import NOT_SET, number_of, parse_gres, parse_time, tres_gpus
from allranks.slurm.reasons import waiting_reason

# Fields of `squeue -O` and their widths. Unlike those of -o they show a job's GPUs however it asked
# for them. Lines are split by width, since no character is safe as a separator.
COLUMNS = {
    "jobarrayid": 80,
    "state": 16,
    "username": 40,
    "account": 40,
    "partition": 160,
    "qos": 40,
    "numnodes": 12,
    "tres-alloc": 240,
    "tres-per-node": 120,
    "tres-per-job": 120,
    "timelimit": 20,
    "prioritylong": 20,
    "submittime": 24,
    "starttime": 24,
    "reason": 200,
}
# Jobs that wait for their turn. Those that wait for something else (a limit, a dependency, their
# user) are ahead of nobody: SLURM skips them.
IN_LINE = ("", "none", "resources", "priority", "scheddefer", "waitingforscheduling", "licenses")
IN_LINE_FOR_NODES = ("reqnodenotavail", "nodes required")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLine:
    """One line of squeue, which may be a waiting job array. Times are UNIX seconds."""

    job: str
    user: str
    account: str
    partition: str  # several, separated by commas, if it may start in any of them
    qos: str
    running: bool
    tasks: int  # waiting tasks of an array; 1 for a plain job
    nodes: int  # of one task
    gpus: int
    seconds: int | None  # the time limit
    priority: int
    waiting_since: float | None
    expected_start: float | None  # of a running job: when it started
    reason: str  # SLURM's own
    reason_words: str

    @property
    def in_line(self) -> bool:
        reason = self.reason.lower()
        return not self.running and (reason in IN_LINE or reason.startswith(IN_LINE_FOR_NODES))

    @property
    def partitions(self) -> frozenset[str]:
        return frozenset(self.partition.split(","))


def queue(partition: str | None = None) -> dict[str, Any]:
    """The running and waiting jobs of a partition, or of all. Raises SlurmError."""
    fields = ",".join(f"{name}:{width}" for name, width in COLUMNS.items())
    chosen = () if partition is None else ("-p", partition)
    text = slurm.call("squeue", "-h", *chosen, "-O", fields)
    if partition is not None and not text.strip():
        find_partition(list_partitions(), partition)  # squeue accepts any name
    return queue_view(parse_queue(text), current_user(), partition)


def parse_queue(text: str) -> list[QueueLine]:
    """The jobs in squeue's output with COLUMNS; other lines are skipped."""
    jobs = []
    for line in text.splitlines():
        row: dict[str, str] = {}
        start = 0
        for name, width in COLUMNS.items():
            row[name] = line[start : start + width].strip()
            start += width
        if re.match(r"\d", row["jobarrayid"]) and row["state"]:
            jobs.append(_job(row))
    return jobs


def _job(row: dict[str, str]) -> QueueLine:
    nodes = number_of(row["numnodes"])
    reason = row["reason"]
    running = row["state"].upper() != "PENDING"
    return QueueLine(
        job=row["jobarrayid"],
        user=row["username"],
        account=row["account"],
        partition=row["partition"],
        qos=row["qos"],
        running=running,
        tasks=1 if running else array_tasks(row["jobarrayid"]),
        nodes=nodes,
        gpus=_gpus(row, nodes),
        seconds=parse_time(row["timelimit"]),
        priority=number_of(row["prioritylong"]),
        waiting_since=unix_time(row["submittime"]),
        expected_start=unix_time(row["starttime"]),
        reason=reason,
        reason_words="" if running else waiting_reason(reason),
    )


def _gpus(row: dict[str, str], nodes: int) -> int:
    """The GPUs of a job; sites that do not account for GPUs show only what was asked for."""

    def asked(text: str) -> int:
        return sum(count for kind, _, count in parse_gres(text) if kind == "gpu")

    told = tres_gpus(row["tres-alloc"])
    return told or asked(row["tres-per-job"]) or asked(row["tres-per-node"]) * max(1, nodes)


def array_tasks(job: str) -> int:
    """How many tasks 12_[0-9,20-29:2%4] means; at least that many if the list is cut off (...)."""
    inside = re.search(r"_\[([^\]%]*)", job)
    if inside is None:
        return 1
    count = 0
    for part in inside[1].split(","):
        if match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?(?::(\d{1,9}))?", part.strip()):
            first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            count += max(0, (last - first) // max(1, step) + 1)
    return max(1, count)


def unix_time(text: str) -> float | None:
    """UNIX seconds of SLURM's 2026-11-15T06:16:33, which is local time; None for N/A."""
    if text in NOT_SET:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def queue_view(jobs: Sequence[QueueLine], user: str, partition: str | None) -> dict[str, Any]:
    """The JSON of `allranks cluster --queue`: `jobs` are the waiting ones, the next first."""
    running = [job for job in jobs if job.running]
    waiting = sorted((job for job in jobs if not job.running), key=_turn)
    return {
        "partition": partition,
        "user": user,
        "running": _sums(running, user),
        "waiting": _sums(waiting, user),
        "jobs": [_shown(job) for job in waiting],
        "mine": _standings(waiting, user),
    }


def _turn(job: QueueLine) -> tuple[bool, int, float, int]:
    return not job.in_line, -job.priority, job.waiting_since or 0, number_of(job.job)


def _shown(job: QueueLine) -> dict[str, Any]:
    return {key: value for key, value in asdict(job).items() if key != "running"}


def _standings(waiting: Sequence[QueueLine], user: str) -> list[dict[str, Any]]:
    """The positions of the user's jobs among those that compete for one of their partitions.

    `waiting` is in order. One pass, since a user can have thousands of jobs.
    """
    rivals = Counter(job.partitions for job in waiting if job.in_line)
    passed: dict[frozenset[str], Counter[str]] = {}
    standings = []
    for job in waiting:
        if job.user == user:
            ahead: Counter[str] = Counter(lines=0, jobs=0, nodes=0, gpus=0)
            for partitions, sums in passed.items():
                ahead.update(sums if partitions & job.partitions else {})
            standings.append(
                _shown(job)
                | {
                    "position": ahead.pop("lines") + 1 if job.in_line else None,
                    "of": sum(n for them, n in rivals.items() if them & job.partitions),
                    "ahead": dict(ahead) if job.in_line else None,
                }
            )
        if job.in_line:
            passed.setdefault(job.partitions, Counter()).update(_sums([job]) | {"lines": 1})
    return standings


def _sums(jobs: Sequence[QueueLine], user: str | None = None) -> dict[str, int]:
    """Totals of these jobs, with each task of an array counted; `mine`: those of `user`."""
    return {
        "jobs": sum(job.tasks for job in jobs),
        "nodes": sum(job.tasks * job.nodes for job in jobs),
        "gpus": sum(job.tasks * job.gpus for job in jobs),
    } | ({"mine": sum(job.tasks for job in jobs if job.user == user)} if user else {})
