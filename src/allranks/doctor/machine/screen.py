"""The checks of a machine, and of an allocation's nodes, as people and programs read them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.doctor.check import Check, Status
from allranks.doctor.machine.env_checks import env_checks
from allranks.doctor.machine.facts import MachineFacts, collect
from allranks.doctor.machine.gpu_checks import gpu_checks
from allranks.doctor.machine.nodes import check_allocation
from allranks.doctor.machine.system_checks import network_checks, system_checks

STYLES: dict[Status, str] = {"pass": "green", "warn": "yellow", "fail": "red", "not here": "dim"}
NAME_WIDTH = 14


def check_machine(facts: MachineFacts) -> list[Check]:
    """All checks of one machine, in the order they are shown."""
    return [
        *gpu_checks(facts),
        *network_checks(facts),
        *system_checks(facts),
        *env_checks(facts),
    ]


def check_here(runs: Path, data: Sequence[Path]) -> tuple[list[Check], str]:
    """Check this machine and the nodes around it; the checks, and this machine's name."""
    facts = collect(runs, data)
    return [*check_machine(facts), *check_allocation(runs, len(facts.gpus))], facts.host


def report(checks: Sequence[Check], host: str, seconds: float) -> dict[str, Any]:
    """What `doctor --json` prints without a run."""
    return {
        "host": host,
        "ok": not any(check.status == "fail" for check in checks),
        "seconds": round(seconds, 3),
        "checks": [check.as_json() for check in checks],
    }


def show(checks: Sequence[Check], host: str, seconds: float, console: Console) -> None:
    """One line a check; the fix on lines of its own."""
    width = max(40, console.width)
    for check in checks:
        head = Text(f"{check.status:<9}", style=STYLES[check.status])
        head.append(f"{check.name:<{NAME_WIDTH}} ", style="bold")
        room = max(20, width - 10 - NAME_WIDTH)
        first, *more = textwrap.wrap(
            check.value, room, break_long_words=False, break_on_hyphens=False
        ) or [""]
        head.append(first, style="dim" if check.status == "not here" else "")
        console.print(head, soft_wrap=True)
        indent = " " * (10 + NAME_WIDTH)
        for line in more:
            console.print(f"{indent}{line}", markup=False, soft_wrap=True)
        if check.fix:
            word = "use" if check.status == "pass" else "fix"
            for line in textwrap.wrap(
                f"{word}: {check.fix}", room, break_long_words=False, break_on_hyphens=False
            ):
                console.print(Text(f"{indent}{line}", style="cyan"), soft_wrap=True)
    console.print(summary(checks, host, seconds), markup=False, soft_wrap=True)


def summary(checks: Sequence[Check], host: str, seconds: float) -> str:
    counts = {status: sum(check.status == status for check in checks) for status in STYLES}
    words = [f"{count} {word}" for word, count in counts.items() if count]
    return f"{host}: {', '.join(words)} ({seconds:.1f} s)"
