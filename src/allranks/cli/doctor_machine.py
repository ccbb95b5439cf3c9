"""`allranks doctor` without a run: this machine or allocation, and the way to another machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.cli.options import people_console

if TYPE_CHECKING:
    from allranks.doctor.check import Check
    from allranks.launch.backends.slurm.node_checks import Verdict

DEFAULT_PORT = 29500
NODES_SECONDS = 30


def check_here(runs: Path, data: Sequence[Path] = (), *, as_json: bool = False) -> int:
    """Check this machine and, within a SLURM job, all its nodes; the exit code."""
    from allranks.doctor.machine import screen
    from allranks.doctor.machine.facts import collect

    started = time.monotonic()
    facts = collect(runs, data)
    checks = screen.check_machine(facts)
    checks += check_allocation(runs, len(facts.gpus))
    return _show(checks, facts.host, time.monotonic() - started, as_json=as_json)


def check_allocation(runs: Path, gpus: int) -> list[Check]:
    """The nodes of the SLURM job that this is in, side by side, through one srun."""
    from allranks.doctor.check import failed, not_here
    from allranks.launch.backends.slurm import inside
    from allranks.launch.backends.slurm.node_checks import verdict

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
        return node_checks(verdict(folder, place.nodes))
    except (OSError, subprocess.SubprocessError) as error:
        fix = "srun hostname shows whether steps can be started in this job"
        return [failed("nodes", f"srun could not be run: {error}", fix)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def node_checks(found: Verdict) -> list[Check]:
    """What the nodes' own preflight says, in the form of the other checks. Pure."""
    from allranks.doctor.check import failed, passed, warned

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
        speed = found.bandwidth and f", all-reduce {found.bandwidth / 1e9:.3g} GB/s on the bus"
        count = len(found.nodes)
        words = "reach each other: names, ports, rendezvous" if count > 1 else "is fit"
        rows.append(passed("nodes", f"{count} checked, {words}{speed or ''}"))
    return rows


def port_of(words: Sequence[str] | None) -> int | None:
    """The port that may follow --listen."""
    from allranks.errors import AllranksError

    if not words:
        return None
    if len(words) > 1 or not words[0].isdecimal() or not 0 < int(words[0]) < 65536:
        raise AllranksError(
            f"--listen {' '.join(words)} is not a port", fix="write for example --listen 29501"
        )
    return int(words[0])


def listen(port: int | None, *, as_json: bool = False) -> int:
    """Wait for one `doctor --connect`, then say what was found."""
    from allranks.doctor.pair.listen import Listening
    from allranks.doctor.pair.verdict import verdict
    from allranks.machine.network import up_interfaces
    from allranks.show.text import clean

    console = people_console(as_json)

    def told(text: str) -> None:
        console.print(clean(text), markup=False, soft_wrap=True)  # a stranger may have said it

    listening = Listening(DEFAULT_PORT if port is None else port, told)
    console.print(f"listening on port {listening.port}; on the other machine type one of")
    for each in up_interfaces():
        if not each.is_loopback:
            host = f"[{each.address}]" if ":" in each.address else each.address
            console.print(
                f"  allranks doctor --connect {host}:{listening.port}   # {each.name}",
                markup=False,
            )
    started = time.monotonic()
    found = listening.wait()
    assert found is not None
    host = found.there.host if found.there else ""
    checks = verdict(found, listens=True)
    return _show(checks, host, time.monotonic() - started, as_json=as_json)


def connect(target: str, *, as_json: bool = False) -> int:
    """Test the way to a machine that listens."""
    from allranks.doctor.pair.connect import connect as reach
    from allranks.doctor.pair.verdict import verdict

    host, port = split_target(target)
    started = time.monotonic()
    found = reach(host, port)
    checks = verdict(found, listens=False)
    return _show(checks, target, time.monotonic() - started, as_json=as_json)


def split_target(target: str) -> tuple[str, int]:
    """HOST, HOST:PORT or [IPV6]:PORT."""
    from allranks.errors import AllranksError

    host, colon, port = target.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):  # no port, or plain IPv6
        host, port = target, str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise AllranksError(
            f"--connect {target} is not HOST:PORT", fix="write for example --connect node1:29500"
        )
    return host.strip("[]"), int(port)


def _show(checks: Sequence[Check], host: str, seconds: float, *, as_json: bool) -> int:
    from allranks.doctor.machine import screen

    screen.show(checks, host, seconds, people_console(as_json))
    found = screen.report(checks, host, seconds)
    if as_json:
        json.dump(found, sys.stdout)
        print()
    return 0 if found["ok"] else 1
