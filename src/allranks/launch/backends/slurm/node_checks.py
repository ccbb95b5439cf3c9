"""Judges the nodes by the preflight's files: which failed, why, and warnings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.machine.nodelist import compress
from allranks.show.numbers import rate

OWN_CHECKS = ("write", "gpus", "health", "torch")  # a node passes or fails these by itself
SLOW_IMPORT = 3.0  # times as long as on every other node
NEVER_CAME = "never came"  # doctor/connectivity.py's word for a node that gave no address

Records = Mapping[str, Mapping[str, Any]]


@dataclass(slots=True)
class Verdict:
    """`failed`: nodes to exclude; `trouble`: what is wrong with none of them in particular."""

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
    """Judge by NODE.json of every node in the folder; a file that is no record counts as none."""
    records = {node: record for node in nodes if (record := _read(folder / f"{node}.json"))}
    return judge(records, nodes)


def judge(records: Records, nodes: Sequence[str]) -> Verdict:
    """Which nodes are to blame. A failure that another one explains is not counted."""
    found = Verdict(tuple(nodes))
    if not records:
        found.trouble = "no node answered: the checks could not be started, or not write"
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
    count = f"{len(found.nodes)} node{'s' if len(found.nodes) != 1 else ''}"
    lines = []
    if found.ok:
        lines.append(f"preflight: {count} checked in {found.seconds:.0f} s, no fault found")
    elif found.failed:
        names = compress(list(found.failed))
        lines.append(f"preflight: {len(found.failed)} of {count} failed: {names}")
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
    """The nodes whose removal leaves no pair that cannot talk, the most suspect first."""
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
            found.failed[peer] = f"cannot be reached by {node}, nor the other way round: {why}"
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
            reason = f"torch took over {seconds[node]:.0f} s to import, on the others {slowest:.0f}"
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
