"""Checks the nodes of a job before ranks start: who waits for what, and which nodes are to blame.

A launcher imports torch anyway, and so do the checks (doctor/preflight.py): each launcher forks
those of its node, and waits. The job's first process (allocation.py) judges by the files that they
write. If all is well, ranks may start; if not, it ends the step and has the nodes checked in a
separate one, which finds out where the fault lies.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from allranks.errors import AllranksError
from allranks.machine.nodelist import compress
from allranks.machine.processes import die_with_parent, quick_imports
from allranks.show.numbers import count, duration, rate

OWN_CHECKS = ("write", "gpus", "health", "torch")  # a node passes or fails these by itself
SLOW_IMPORT = 3.0  # times as long as on every other node
NEVER_CAME = "never came"  # doctor/connectivity.py's word for a node that gave no address

# In the folder of the checks. Only the first node uses these: no network disk shows them late.
ENDED = "ended"  # its launcher: the checks are over
OPEN = "open"  # the job's first process: ranks may start
POLL_SECONDS = 0.02
MOST_SECONDS = 600.0  # that a launcher waits; a job that does not let ranks start ends the step

Records = Mapping[str, Mapping[str, Any]]


@dataclass(slots=True)
class Verdict:
    """Which nodes to exclude (`failed`), and `trouble` that is no single node's fault."""

    nodes: tuple[str, ...]
    failed: dict[str, str] = field(default_factory=dict)  # node: reason
    trouble: str = ""
    warnings: list[str] = field(default_factory=list)
    bandwidth: float | None = None  # of the bus, in bytes per second
    backend: str | None = None  # that carried the all-reduce
    seconds: float = 0.0  # of the slowest node

    @property
    def ok(self) -> bool:
        return not self.failed and not self.trouble


def verdict(folder: Path, nodes: Sequence[str]) -> Verdict:
    """Judge by NODE.json of every node in the folder; a file that cannot be read counts as none."""
    records = {node: record for node in nodes if (record := _read(folder / f"{node}.json"))}
    return judge(records, nodes)


def judge(records: Records, nodes: Sequence[str]) -> Verdict:
    """Which nodes are to blame. A failure that another one explains is not counted."""
    found = Verdict(tuple(nodes))
    if not records:
        found.trouble = (
            "no node answered: the checks could not be started, or could not write their results"
        )
        return found
    for node in nodes:
        if node not in records:
            found.failed[node] = "did not answer"
    _blame_own_checks(found, records)
    _blame_unreachable(found, records)
    slow = _blame_slow(found, records)
    _blame_rendezvous(found, records, slow)
    _blame_all_reduce(found, records)
    found.failed = {node: found.failed[node] for node in nodes if node in found.failed}
    for node, record in records.items():
        notes = [check["warning"] for check in record["checks"] if check.get("warning")]
        found.warnings += [f"{node}: {note}" for note in notes]
        found.seconds = max(found.seconds, float(record.get("seconds", 0.0)))
    done = [check for node in records if (check := _check(records, node, "allreduce")).get("ok")]
    speeds = [float(check["bus_bandwidth"]) for check in done if "bus_bandwidth" in check]
    if speeds:
        found.bandwidth = min(speeds)
        found.backend = str(done[0].get("backend", "")) or None
    return found


def words(found: Verdict) -> str:
    """The verdict for people."""
    nodes, lines = count(len(found.nodes), "node"), []
    if found.ok:
        lines.append(f"preflight: {nodes} checked in {duration(found.seconds)}, no fault found")
    elif found.failed:
        names = compress(list(found.failed))
        lines.append(f"preflight: {len(found.failed)} of {nodes} failed: {names}")
        lines += [f"  {node}: {reason}" for node, reason in found.failed.items()]
    if found.trouble:
        lines.append(f"preflight: {found.trouble}")
    if found.bandwidth is not None:
        speed = rate(found.bandwidth)
        lines.append(
            f"  all-reduce across nodes: {speed} bus bandwidth ({found.backend}), measured"
        )
    lines += [f"  warning: {warning}" for warning in found.warnings]
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_bytes())
        checks = record["checks"]
        return record if all(isinstance(check["name"], str) for check in checks) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check(records: Records, node: str, name: str) -> Mapping[str, Any]:
    """A node's check of that name; empty if it did not come to it."""
    checks: Iterable[Mapping[str, Any]] = records[node]["checks"]
    return next((check for check in checks if check["name"] == name), {})


def _blame_own_checks(found: Verdict, records: Records) -> None:
    for name in OWN_CHECKS:
        bad = [node for node in records if _check(records, node, name).get("ok") is False]
        if len(bad) > 1 and len(bad) == len(records):
            detail = _check(records, bad[0], name)["detail"]
            found.trouble = found.trouble or f"{name} failed on every node: {detail}"
            continue
        for node in bad:
            found.failed.setdefault(node, str(_check(records, node, name)["detail"]))


def _blame_unreachable(found: Verdict, records: Records) -> None:
    """Blame nodes, the most suspect first, until all pairs of the others can talk."""
    pairs = {
        (node, peer): str(why)
        for node in records
        for peer, why in _check(records, node, "reach").get("silent", {}).items()
        if peer in records and why != NEVER_CAME
    }
    pairs = {
        pair: why for pair, why in pairs.items() if not any(node in found.failed for node in pair)
    }
    healthy = [node for node in records if node not in found.failed]
    if len(healthy) == 2 and len(pairs) == 2:  # no third one to tell which it is
        for (node, peer), why in pairs.items():
            found.failed[peer] = f"{node} cannot reach it, and it cannot reach {node}: {why}"
        return
    while pairs:

        def suspicion(node: str, pairs: Mapping[tuple[str, str], str] = pairs) -> tuple[int, ...]:
            # A port that is closed to others is more common than one that lets nothing out. In a
            # tie the node farther from the first goes: the first is where the others meet.
            unreached = sum(peer == node for _, peer in pairs)
            unreaching = sum(own == node for own, _ in pairs)
            return unreached + unreaching, unreached, healthy.index(node)

        worst = max({node for pair in pairs for node in pair}, key=suspicion)
        found.failed[worst] = _isolation(worst, pairs, len(healthy) - 1)
        pairs = {pair: why for pair, why in pairs.items() if worst not in pair}


def _isolation(node: str, pairs: Mapping[tuple[str, str], str], num_others: int) -> str:
    """How a node is cut off, in words that name the pairs."""
    by = [own for own, peer in pairs if peer == node]
    to = [peer for own, peer in pairs if own == node]
    parts = []
    if by:
        who = "any other node" if len(by) == num_others > 1 else compress(by)
        parts.append(f"cannot be reached by {who}")
    if to:
        whom = "any other node" if len(to) == num_others > 1 else compress(to)
        parts.append(f"cannot reach {whom}")
    example = next(why for pair, why in pairs.items() if node in pair)
    return f"{' and '.join(parts)}: {example}"


def _blame_slow(found: Verdict, records: Records) -> list[str]:
    """The nodes that were not ready in time to meet; blamed only if the others were long before."""
    if len(found.nodes) < 2:
        return []
    slow = [node for node in records if _check(records, node, "rendezvous").get("ok") is None]
    seconds = {node: float(_check(records, node, "torch").get("seconds", 0.0)) for node in records}
    slowest = max((seconds[node] for node in records if node not in slow), default=None)
    for node in slow:
        if slowest is not None and seconds[node] > SLOW_IMPORT * slowest:
            took, others = duration(seconds[node], whole=True), duration(slowest, whole=True)
            reason = f"torch took over {took} to import; on the others, {others}"
            found.failed.setdefault(node, reason)
    return slow


def _blame_rendezvous(found: Verdict, records: Records, slow: Sequence[str]) -> None:
    first = found.nodes[0]
    if first in found.failed or first in slow:
        return  # nobody could meet there
    failures = {
        node: check
        for node in records
        if (check := _check(records, node, "rendezvous")).get("ok") is False
    }
    own = failures.get(first)
    if own is not None and own.get("fault") == "port":
        found.trouble = found.trouble or str(own["detail"])
        return
    if own is not None and not own.get("store"):
        found.failed[first] = str(own["detail"])
        return
    outside = [node for node, check in failures.items() if not check.get("store")]
    outside = [node for node in outside if node not in found.failed]
    others = [node for node in records if node != first and node not in found.failed]
    if outside and len(outside) == len(others) > 1:
        detail = failures[outside[0]]["detail"]
        found.failed[first] = f"no other node could meet there: {detail}"
        return
    for node in outside:
        found.failed[node] = str(failures[node]["detail"])
    for node in (own or {}).get("missing", ()):
        if node not in found.failed and node not in slow:
            found.warnings.append(f"{node}: came too late for the all-reduce to be checked")


def _blame_all_reduce(found: Verdict, records: Records) -> None:
    checks = {node: _check(records, node, "allreduce") for node in records}
    failures = {node: check for node, check in checks.items() if check.get("ok") is False}
    for node, check in failures.items():
        if check.get("fault") == "own":
            found.failed.setdefault(node, str(check["detail"]))
    if failures and found.ok:
        # One that hung waited for the others: who raised an error knows more.
        told = [str(check["detail"]) for check in failures.values()]
        detail = next((text for text in told if "had not ended" not in text), told[0])
        found.trouble = f"the nodes reach each other, but their all-reduce failed: {detail}"


# --- Ranks wait until their nodes are checked ----------------------------------------------------


@dataclass(slots=True)
class Gate:
    """The job's side: `opens` is called with the verdict, just before ranks may start."""

    folder: Path
    nodes: Sequence[str]
    until: float  # by the monotonic clock: then it is judged by what there is
    signals: Sequence[object]  # received by the job: if any, ranks must save at once
    opens: Callable[[Verdict], object]
    is_open: bool | None = None  # None: not judged yet

    def judge(self) -> bool | None:
        """Whether ranks may start; None while that is not known."""
        is_over = (self.folder / ENDED).exists() or time.monotonic() > self.until
        if self.is_open is None and (is_over or self.signals):
            found = verdict(self.folder, self.nodes)
            self.is_open = found.ok or bool(self.signals)
            if self.is_open:
                self.opens(found)
                (self.folder / OPEN).touch()
        return self.is_open


def pass_gate(
    words: Sequence[str], variables: Mapping[str, str], *, node_rank: int, num_nodes: int
) -> None:
    """The launcher's side: check this node, and wait until ranks may start.

    To be called before there are threads. `words`: arguments of doctor/preflight.py; `variables`:
    for its environment, besides ours.
    """
    folder, launcher = Path(words[words.index("--folder") + 1]), os.getpid()
    if num_nodes > 1:  # one node on its own is checked without it
        _import_torch()
    checking = os.fork()
    if checking == 0:
        os.environ.update(variables)  # of this child alone
        _check_and_exit(words, launcher)
    _import_torch()
    os.waitpid(checking, 0)  # it may hold a GPU; its time is limited
    if node_rank:
        return  # in agent.py the others wait for the first node
    (folder / ENDED).touch()
    until = time.monotonic() + MOST_SECONDS
    while not (folder / OPEN).exists():
        if time.monotonic() > until:
            what = f"the results of the node checks were not read within {MOST_SECONDS:.0f} seconds"
            raise AllranksError(what, fix="send the job again", exit_code=1)
        time.sleep(POLL_SECONDS)


def _import_torch() -> None:
    with suppress(Exception), quick_imports(with_warnings=False):  # the checks say what is wrong
        from allranks.launch import agent  # noqa: F401


def _check_and_exit(words: Sequence[str], launcher: int) -> NoReturn:
    """Run the node's checks; to exit also frees whatever they hold on a GPU."""
    try:
        die_with_parent(launcher)
        sys.argv = ["allranks.doctor.preflight", *words]
        runpy.run_module("allranks.doctor.preflight", run_name="__main__")
    finally:
        os._exit(1)
