"""What each rank of a layout would hold and send: one step on tensors without data, sent to nobody.

`python -m allranks.train.explain check|explain` reads jobs as JSON and prints its answer as JSON.
The launcher starts it, since it may not import torch itself.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from allranks.errors import AllranksError
from allranks.job.axes import check_tp
from allranks.job.job import Job, parse_job
from allranks.layout import NESTING, Layout
from allranks.machine.processes import die_with_parent
from allranks.run import tracebacks
from allranks.tasks import Task
from allranks.train import build
from allranks.train.counted import Sent, bytes_at, gathered
from allranks.train.dry_step import WITHOUT_DATA, Tried, imitate, precision_of, try_places
from allranks.train.model_facts import facts_of
from allranks.train.stages import blocks_and_stages


def main() -> None:
    """Answer the question on the command line about the jobs on stdin."""
    die_with_parent()
    imitate()
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what a task prints must not get into the answer
        jobs = [parse_job(values, resolved=True) for values in json.load(sys.stdin)]
        json.dump(answer(jobs, explain if sys.argv[1] == "explain" else check), out)


def answer(jobs: Sequence[Job], about: Callable[[Job], Any]) -> list[Any] | dict[str, Any]:
    """The answers about all jobs, or the first error."""
    try:
        return [about(job) for job in jobs]
    except AllranksError as error:
        return {"error": {**error.fields, "exit_code": error.exit_code}}
    except Exception as error:
        if about is check:
            raise  # ranks will say it better
        what = tracebacks.in_a_line(tracebacks.describe(error))
        tracebacks.hide_ours(error)
        traceback.print_exception(error)
        fix = "if the model looks at values, which explain does not have: run it"
        if any(job.layout.tp > 1 for job in jobs):
            fix += "; if its heads or sizes cannot be divided by tp, write a smaller tp"
        return {
            "error": {"what": f"a step without data failed: {what}", "fix": fix, "exit_code": 1}
        }


def check(job: Job) -> None:
    """Refuse a layout that the job's model cannot have."""
    task = build.load_task(job)
    with WITHOUT_DATA:
        check_model(job, task, task.model())


def check_model(job: Job, task: Task, model: nn.Module) -> None:
    check_tp(job.layout, facts_of(job, task, model))
    if job.layout.pp > 1:
        blocks_and_stages(job, job.layout, task, model)


def explain(job: Job) -> dict[str, Any]:
    """What the ranks of the layout hold and send. Only ranks that differ along pp are tried."""
    # Nothing is loaded by other processes.
    job = job.model_copy(update={"data": job.data.model_copy(update={"num_workers": 0})})
    imitate()
    layout, task = job.layout, build.load_task(job)
    with WITHOUT_DATA:
        model = task.model()
        check_model(job, task, model)
        num_parameters = sum(p.numel() for p in model.parameters())
    samples = task.datasets()["train"]
    tried = try_places(job, task, samples)
    return {
        "layout": str(layout),
        "axes": {axis: getattr(layout, axis) for axis in NESTING},
        "nodes": layout.nodes,
        "ranks_per_node": layout.gpus,
        "parameters": num_parameters,
        "precision": precision_of(job),
        "optimizer": job.optimizer.name,
        **tried[0].batch,
        "ranks": kinds_of(layout, tried, offload=job.optimizer.offload),
        "collectives": exchanges_of(tried),
    }


def kinds_of(
    layout: Layout, stages: Sequence[Tried], *, offload: bool = False
) -> list[dict[str, Any]]:
    """The ranks in groups that hold the same amounts, the first rank's group first.

    `offload`: the optimizer's state is in host memory, with copies of weights and gradients.
    """
    known: dict[tuple[int, ...], dict[str, int]] = {}
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.ranks):
        place = layout.place_of(rank)
        key = tuple(place[axis] for axis in NESTING[1:])  # replicas are alike
        if key not in known:
            tried = stages[place["pp"]]
            held = tried.held
            # A pipeline gathers them once for all of its micro-batches, and reduces then, too.
            kept = gathered(held.parameters) + gathered(held.gradients)
            known[key] = {
                "parameters": bytes_at(held.parameters, place),
                "buffers": bytes_at(held.buffers, place),
                "gradients": bytes_at(held.gradients, place),
                "optimizer": bytes_at(held.optimizer, place),
                "gathered": bytes_at(kept, place) if layout.pp > 1 else 0,
                "activations": round(tried.kept * tried.in_flight[place["pp"]]),
            }
        groups.setdefault((place["pp"], *known[key].values()), []).append(rank)
    found = []
    for number, ranks in enumerate(groups.values()):
        places = [layout.place_of(rank) for rank in ranks]
        key = tuple(places[0][axis] for axis in NESTING[1:])
        coordinates = {axis: sorted({place[axis] for place in places}) for axis in NESTING}
        one = {"kind": letters(number), "ranks": ranks, "coordinates": coordinates}
        amounts, on_host = known[key], 0
        if offload:
            on_host = amounts["optimizer"] + amounts["parameters"] + amounts["gradients"]
            amounts = {**amounts, "optimizer": 0}
        pp = places[0]["pp"]
        tried = stages[pp]
        peak = tried.most + round(tried.adds * (tried.in_flight[pp] - 1))
        peak += sum(amounts[name] for name in ("parameters", "buffers", "optimizer"))
        found.append({**one, "bytes": amounts, "peak": peak, "host_bytes": on_host})
    return found


def letters(number: int) -> str:
    """A, B, …, Z, AA, AB, …"""
    rest, last = divmod(number, 26)
    return (letters(rest - 1) if rest else "") + chr(ord("A") + last)


def exchanges_of(stages: Sequence[Tried]) -> list[dict[str, Any]]:
    """What is sent in a step, in its order, with the pipeline stages that take part."""
    found: dict[tuple[Sent, int], list[int]] = {}
    for stage, tried in enumerate(stages):
        for sent, count in tried.sent.items():
            found.setdefault((sent, count), []).append(stage)
    order = {when: at for at, when in enumerate(("forward", "backward", "passes", "update"))}
    return [
        {
            "kind": sent.kind,
            "axis": sent.axis,
            "group_size": sent.group_size,
            "bytes": sent.bytes,
            "count": count,
            "when": sent.when,
            "stages": stages_of,
        }
        for (sent, count), stages_of in sorted(
            found.items(), key=lambda item: order[item[0][0].when]
        )
    ]


if __name__ == "__main__":
    main()
