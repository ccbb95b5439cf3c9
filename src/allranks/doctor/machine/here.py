"""Checks this machine, and the other nodes of the SLURM job that it is part of."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from allranks.doctor.finding import Check, failed, not_here, passed, warned
from allranks.doctor.machine.checks import check_machine
from allranks.doctor.machine.facts import collect
from allranks.launch.backends.slurm import in_job
from allranks.launch.backends.slurm.node_gate import Verdict, verdict
from allranks.show.numbers import rate

NODES_SECONDS = 30


def check_here(runs: Path, data: Sequence[Path]) -> tuple[list[Check], str]:
    """The checks of this machine and of its job's nodes, and this machine's name."""
    facts = collect(runs, data)
    return [*check_machine(facts), *check_allocation(runs, len(facts.gpus))], facts.host


def check_allocation(runs: Path, gpus: int) -> list[Check]:
    """Check all nodes of the SLURM job that this process is in, at once, with one srun."""
    if "SLURM_JOB_ID" not in os.environ:
        return [not_here("nodes", "not within a SLURM job: only this machine was checked")]
    place = in_job.SlurmNodes.from_environment(os.environ)
    folder = runs.absolute() / f".doctor-{place.job}-{os.getpid()}"  # on a disk that all nodes have
    folder.mkdir(parents=True)
    try:
        port = in_job.free_port(place.job, offset=1)
        subprocess.run(
            in_job.check_command(place, folder, port, gpus, NODES_SECONDS),
            env=in_job.step_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=NODES_SECONDS + 60,
            check=False,
        )
        return as_checks(verdict(folder, place.nodes))
    except (OSError, subprocess.SubprocessError) as error:
        fix = "srun hostname shows whether steps can be started in this job"
        return [failed("nodes", f"srun could not be run: {error}", fix)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def as_checks(found: Verdict) -> list[Check]:
    """The verdict of the nodes' preflight as checks."""
    rows = [
        failed(node, reason, f"#SBATCH --exclude={node}, and tell the site")
        for node, reason in found.failed.items()
    ]
    if found.trouble:
        rows.append(failed("nodes", found.trouble, "try srun hostname, then run this again"))
    for warning in found.warnings:
        node, _, words = warning.partition(": ")
        rows.append(warned(node, words, "run allranks doctor on that node"))
    if found.ok:
        speed = f", all-reduce {rate(found.bandwidth)} bus bandwidth" if found.bandwidth else ""
        count = len(found.nodes)
        words = "reach each other: names, ports, rendezvous" if count > 1 else "is healthy"
        rows.append(passed("nodes", f"{count} checked, {words}{speed}"))
    return rows
