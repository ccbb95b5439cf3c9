"""What every rank of a run was given, written down by the ranks themselves for tests to compare."""

from __future__ import annotations

import json
from typing import Any

from allranks.run.folder import RunDir

# The user's own sitecustomize: run in every rank, of a script and of a task alike.
WRITE_DOWN = """
import json, os, resource, signal

if "RANK" in os.environ and "ALLRANKS_RUN_DIR" in os.environ:
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    state = {
        "environment": dict(os.environ),
        "cpus": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "folder": os.getcwd(),
        "files": sorted(files)[:-1],  # the last is that of the look itself
        "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
    }
    path = f"{os.environ['ALLRANKS_RUN_DIR']}/state-{os.environ['RANK']}.json"
    with open(path, "w") as file:
        json.dump(state, file)
"""
# What tells one run, or one benchmark, from another.
OF_THE_RUN = {
    *("ALLRANKS_RUN_DIR", "ALLRANKS_LAUNCHER", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *(
        "ALLRANKS_CLAIM",
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "SLURM_JOB_NAME",
        "ALLRANKS_MEASURE",
        "ALLRANKS_BENCH_DATA",
        "ALLRANKS_PROBE",
        "TORCHELASTIC_ERROR_FILE",
    ),
}


def states(run: RunDir) -> list[dict[str, Any]]:
    """What every rank of a run was given, less what names the run."""
    found = []
    for rank in range(len(list(run.path.glob("state-*.json")))):
        state = json.loads((run.path / f"state-{rank}.json").read_text())
        state["environment"] = {
            name: value for name, value in state["environment"].items() if name not in OF_THE_RUN
        }
        said = run.log(0, rank).read_text().splitlines()
        state["threads"] = [line for line in said if line.startswith("threads")]
        found.append(state)
    assert found
    return found


def differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    """In what two runs' ranks differ, rank by rank."""
    assert len(ours) == len(theirs)
    found = []
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        one, other = ({**state, **state["environment"], "environment": 0} for state in (one, other))
        names = sorted(name for name in {**one, **other} if one.get(name) != other.get(name))
        found += [f"rank {rank}: {name}: {one.get(name)}, {other.get(name)}" for name in names]
    return found
