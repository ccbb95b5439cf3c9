"""Runs one rank of a task, from its environment to its exit code."""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from allranks.errors import AllranksError
from allranks.job.job import Job, load_job
from allranks.run import tracebacks
from allranks.run.events import EventLog
from allranks.timing import timeline
from allranks.train import signals
from allranks.train.build import Rank, build, choose_device, join_world
from allranks.train.choose_step import rules_of
from allranks.train.compress import plain_bytes
from allranks.train.data import Progress
from allranks.train.loop import PeerFailure, Training, train
from allranks.train.micro_batches import MicroBatches


def run(work: Callable[[Rank, Job, torch.device, EventLog], dict[str, Any]]) -> None:
    """Do a rank's work, which returns fields of its end event; record how it ended, and exit."""
    timeline.take()  # the step that only allocates the optimizer's state must not be recorded
    me = Rank.from_environment()
    log = EventLog(me.run.events(me.attempt, me.rank))
    try:
        job = load_job(me.run.job_file, resolved=True)
        device = choose_device(me)
        join_world(me, job, device)
        end = work(me, job, device, log)
        dist.barrier()
        log.write("end", exit=0, signal=signals.stop_requested(), **end)
        log.close()
        dist.destroy_process_group()
    except BaseException as error:
        fail(error, log)


def train_task(me: Rank, job: Job, device: torch.device, log: EventLog) -> dict[str, Any]:
    """Train; return the state, and the totals of this attempt. Collective."""
    rules, micro_batches = rules_of(job, me.layout, device), MicroBatches(me, job)
    training = None
    try:
        training = build(me, job, device, log, rules=rules, micro_batches=micro_batches)
        started, before = time.perf_counter(), dataclasses.replace(training.progress)
        state = train(training)
    except Exception as error:
        full = micro_batches.after(error, training)
        if full is None:
            raise
        raise full from error
    return {"state": state, **summary(training, time.perf_counter() - started, before)}


def fail(error: BaseException, log: EventLog) -> None:
    """Write the reason to the events and the log, and exit without waiting for other ranks."""
    described = tracebacks.describe(error)
    what, fix, code = tracebacks.in_a_line(described), "", 1
    if isinstance(error, PeerFailure):
        what = "stopped because another rank failed"
    elif isinstance(error, AllranksError):
        what, fix, code = error.what, error.fix, error.exit_code
    fields: dict[str, Any] = {"what": what, "fix": fix, "echo": described["echo"]}
    # The events come first: the launcher then knows that what follows is a traceback.
    log.write("error", pid=os.getpid(), **described)
    log.write("end", state="failed", exit=code, error=fields)
    log.flush("drop")  # losses that are still being summed over the ranks will never arrive
    is_told = log.error is None  # otherwise the launcher would show it as the task's own words
    with suppress(OSError):  # the log may be on a full disk as well
        if is_told or not isinstance(error, AllranksError):
            tracebacks.hide_ours(error)
            traceback.print_exception(error)
        sys.stderr.flush()
    os._exit(1)  # destroying the process group could wait forever for the other ranks


def summary(t: Training, seconds: float, before: Progress) -> dict[str, Any]:
    """The end event's totals of this attempt."""
    trained = t.progress.samples - before.samples
    metrics = {record["name"]: record["value"] for record in t.metrics}
    return {
        "step": t.progress.step,
        "epoch": t.progress.epoch,
        "samples": t.progress.samples,
        "seconds": round(seconds, 6),
        "samples_per_second": trained / t.meter.step_seconds if t.meter.step_seconds else 0.0,
        "metrics": metrics,
        **bytes_sent(t, t.progress.step - before.step),
        **memory_peaks(t),
    }


def bytes_sent(t: Training, num_steps: int) -> dict[str, int]:
    """What this rank sent to its peers to train, in bytes; nothing where it is not counted."""
    if t.compression is not None:
        return {"sent": t.compression.wire.sent}
    in_a_step = plain_bytes(t.model, t.mesh.data)
    return {"sent": in_a_step * num_steps} if in_a_step else {}


def memory_peaks(t: Training) -> dict[str, int]:
    """Peak memory of this rank in bytes, on the host and on its GPU."""
    peaks = {"host_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if t.device.type == "cuda":
        peaks["memory_peak"] = torch.cuda.max_memory_allocated(t.device)
    return peaks
