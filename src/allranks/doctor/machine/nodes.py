"""The nodes of the SLURM job that this process is in, checked side by side."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from allranks.doctor.check import Check, failed, not_here, passed, warned
from allranks.launch.backends.slurm import inside
from allranks.launch.backends.slurm.node_checks import Verdict, verdict
from allranks.show.numbers import rate

NODES_SECONDS = 30


def check_allocation(runs: Path, gpus: int) -> list[Check]:
    """The nodes of the SLURM job that this is in, side by side, through one srun."""
    if "SLURM_JOB_ID" not in os.environ:
        return [not_here("nodes", "not within a SLURM job: this machine alone was checked")]
    place = inside.Place.from_environment(os.environ)
    folder = runs.absolute() / f".doctor-{place.job}-{os.getpid()}"  # on a disk that all nodes have
    folder.mkdir(parents=True)
    try:
        port = inside.free_port(place.job, offset=1)
        command = inside.check_command(place, folder, port, gpus, NODES_SECONDS)
        subprocess.run(
            command,
            env=inside.step_environment(os.environ),
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
    """What the nodes' own preflight says, in the form of the other checks. Pure."""
    rows = [
        failed(node, reason, f"#SBATCH --exclude={node}, and tell the site")
        for node, reason in found.failed.items()
    ]
    if found.trouble:
        rows.append(failed("nodes", found.trouble, "srun hostname; then this again"))
    for warning in found.warnings:
        node, _, words = warning.partition(": ")
        rows.append(warned(node, words, "look at that node: allranks doctor there"))
    if found.ok:
        speed = found.bandwidth and f", all-reduce {rate(found.bandwidth)} on the bus"
        count = len(found.nodes)
        words = "reach each other: names, ports, rendezvous" if count > 1 else "is fit"
        rows.append(passed("nodes", f"{count} checked, {words}{speed or ''}"))
    return rows
