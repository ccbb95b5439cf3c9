"""Explains SLURM's reasons by words.yaml: why a job is waiting, and why one has ended."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from allranks.machine.processes import signal_name

# States of a job on its nodes; squeue lists those in any other because they wait.
RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "SUSPENDED", "STOPPED")


@cache
def words() -> dict[str, Any]:
    """The tables of words.yaml."""
    import yaml  # takes 15 ms, which a command that asks SLURM nothing saves

    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text())
    return found


def waiting_reason(text: str) -> str:
    """Explains why a job waits, given squeue's %r or %R; returns the text itself if unknown."""
    said, known = text.strip().strip("()").strip(), words()["waiting"]
    key = re.sub(r"[^a-z]", "", said.lower()) or "none"
    if key in known:
        return str(known[key])
    head, _, rest = said.partition(",")  # ReqNodeNotAvail, UnavailableNodes:node[1-3]
    head = re.sub(r"[^a-z]", "", head.lower())
    if rest and head in known:
        nodes = re.search(r"Nodes:\s*([^\s,()]\S*)", rest)
        return f"{known[head]}{f': {nodes[1]}' if nodes else ''}"
    return _limit(key) or said


def _limit(key: str) -> str | None:
    """A limit that a job has reached, from a name such as qosmaxgresperuser."""
    match = re.fullmatch(r"(assoc|qos)?(grp|max|min)(.*)", key)
    if match is None:
        return None
    where, kind, rest = match.groups()
    what = next((noun for name, noun in words()["limited"].items() if name in rest), None)
    if what is None:
        return None
    if "minutes" in rest or "mins" in rest:
        what = {"GPUs": "GPU time", "CPUs": "CPU time"}.get(what, f"time on {what}")
    owner = {"assoc": "account", "qos": "QOS"}.get(where or "", "account or QOS")
    if kind == "min":
        return f"asks for fewer {what} than the {owner} requires"
    if "walldurationperjob" in rest:
        return f"asks for more time than the {owner} allows one job"
    if kind == "grp":
        return f"the {owner}'s limit on {what}, for all its jobs together, is reached"
    whom = next((f" of {who}" for name, who in words()["per"].items() if name in rest), "")
    return f"the {owner}'s limit on {what}{whom} is reached"


def end_reason(state: str, exit_code: str = "") -> str:
    """Explains why a job that did not complete has ended, given sacct's State and ExitCode."""
    name, *more = state.upper().split() or [""]
    if name.endswith("+"):  # truncated by sacct: OUT_OF_ME+
        known = (*words()["ends"], "CANCELLED", "FAILED")
        name = next((whole for whole in known if whole.startswith(name[:-1])), name[:-1])
    if name == "CANCELLED":
        user = more[-1] if more else ""  # CANCELLED by 1000
        who = {"": "", "0": " by root (the administrators or SLURM)"}
        return f"cancelled{who.get(user, f' by user {user}')}"
    if name == "FAILED":
        ended = _exit(exit_code)
        return f"failed: {ended}" if ended else "failed"
    return str(words()["ends"].get(name, name.lower().replace("_", " ") or "unknown"))


def _exit(exit_code: str) -> str | None:
    """What `code:signal` means; None for 0:0 and for anything else that is not an exit code."""
    match = re.fullmatch(r"\s*(\d{1,9})(?::(\d{1,9}))?\s*", exit_code)
    if match is None:
        return None
    code, number = int(match[1]), int(match[2] or 0)
    signals, codes = words()["signals"], words()["codes"]
    if 128 < code < 160 and not number:  # as a shell reports it
        number = code - 128
    if number in signals:
        return str(signals[number])
    if number:
        name = signal_name(number)
        return f"{signals.get(name, 'ended by a signal')} ({name})"
    return f"exit code {code}{f', {codes[code]}' if code in codes else ''}" if code else None
