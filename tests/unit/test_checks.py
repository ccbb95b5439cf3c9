"""Who is to blame for what the preflight found, and when ranks may start."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from allranks.launch.backends.slurm.node_gate import (
    ENDED,
    OPEN,
    Gate,
    Verdict,
    judge,
    verdict,
    words,
)

Pairs = Sequence[tuple[str, str]]


def check(name: str, ok: bool | None = True, detail: str = "fine", **more: Any) -> dict[str, Any]:
    return {"name": name, "ok": ok, "detail": detail, "warning": "", "seconds": 0.1, **more}


def record(node: str, *special: Mapping[str, Any]) -> dict[str, Any]:
    """All well but for the special checks."""
    checks = {name: check(name) for name in ("write", "disk", "gpus", "health", "clock")}
    checks["reach"] = check("reach", silent={})
    checks["torch"] = check("torch") | {"seconds": 4.0}
    checks["rendezvous"] = check("rendezvous", missing=[], store=True)
    checks["allreduce"] = check("allreduce", backend="gloo", bus_bandwidth=2e9)
    checks |= {each["name"]: dict(each) for each in special}
    return {"v": 1, "node": node, "seconds": 9.0, "checks": list(checks.values())}


def cut(nodes: str, pairs: Pairs) -> dict[str, dict[str, Any]]:
    """Records where the first of each pair cannot reach the second."""
    records = {}
    for node in nodes:
        silent = {peer: "Connection timed out" for own, peer in pairs if own == node}
        records[node] = record(node, check("reach", not silent, silent=silent))
    return records


def both(*pairs: str) -> Pairs:
    return [pair for a, b in map(tuple, pairs) for pair in ((a, b), (b, a))]


def test_all_well() -> None:
    slow = check("allreduce", backend="nccl", bus_bandwidth=1e9)
    found = judge({"a": record("a"), "b": record("b", slow)}, "ab")
    assert found.ok and found.bandwidth == 1e9 and not found.warnings
    assert words(found).startswith("preflight: 2 nodes checked in 9.00s, no fault found\n")
    assert "1 GB/s" in words(found)


def test_files_are_read_and_a_torn_one_is_none(tmp_path: Path) -> None:
    for node in "ab":
        (tmp_path / f"{node}.json").write_text(json.dumps(record(node)))
    (tmp_path / "c.json").write_text('{"v": 1, "checks": [{"na')
    (tmp_path / "d.json").write_text("[]")
    found = verdict(tmp_path, ["a", "b", "c", "d", "e"])
    assert found.failed == dict.fromkeys("cde", "did not answer")
    assert words(found).startswith("preflight: 3 of 5 nodes failed: c,d,e\n  c: did not answer")


def test_no_answer_at_all_is_no_nodes_fault(tmp_path: Path) -> None:
    found = verdict(tmp_path, ["a", "b"])
    assert not found.ok and not found.failed and "no node answered" in found.trouble


@pytest.mark.parametrize("name", ["write", "gpus", "health", "torch"])
def test_a_nodes_own_failure(name: str) -> None:
    records = {node: record(node) for node in "abc"}
    records["b"] = record("b", check(name, False, "broken"))
    assert judge(records, "abc").failed == {"b": "broken"}


def test_the_same_failure_everywhere_is_no_nodes_fault() -> None:
    records = {node: record(node, check("write", False, "no space left")) for node in "abc"}
    found = judge(records, "abc")
    assert not found.failed and found.trouble == "write failed on every node: no space left"
    one = judge({"a": records["a"]}, "a")
    assert one.failed == {"a": "no space left"}


@pytest.mark.parametrize(
    ("nodes", "pairs", "blamed"),
    [
        ("abcd", [("a", "b"), ("c", "b"), ("d", "b")], "b"),  # closed to all
        ("abcd", [("b", "a"), ("b", "c"), ("b", "d")], "b"),  # gets nowhere
        ("abcd", both("ba", "bc", "bd"), "b"),  # cut off
        ("abc", both("ab", "ac"), "a"),  # the first one, too
        ("abcd", both("ba", "bc", "bd", "ca", "cd"), "bc"),  # two of them
        ("abcd", both("ac", "ad", "bc", "bd"), "cd"),  # a torn cable: the first one's side stays
        ("abcd", both("cd"), "d"),
        ("ab", [("a", "b")], "b"),  # closed is more likely than caged
        ("ab", [("b", "a")], "a"),
        ("ab", both("ab"), "ab"),  # nobody can tell
    ],
)
def test_whose_fault_a_broken_connection_is(nodes: str, pairs: Pairs, blamed: str) -> None:
    found = judge(cut(nodes, pairs), nodes)
    assert "".join(found.failed) == blamed
    assert all("Connection timed out" in reason for reason in found.failed.values())


def test_a_cut_off_node_is_named_with_its_pairs() -> None:
    found = judge(cut("abcd", [("a", "b"), ("c", "b"), ("b", "c")]), "abcd")
    assert found.failed["b"] == "cannot be reached by a,c and cannot reach c: Connection timed out"
    found = judge(cut("abc", both("ba", "bc")), "abc")
    assert found.failed["b"].startswith("cannot be reached by any other node and cannot reach any")


def test_nobody_is_blamed_for_not_reaching_one_that_is_not_there() -> None:
    silent = check("reach", False, silent={"c": "never came"})
    lonely = check("rendezvous", False, "c did not come", missing=["c"], store=True)
    records = {node: record(node, silent, lonely) for node in "ab"}
    assert judge(records, "abc").failed == {"c": "did not answer"}


def test_nobody_is_blamed_for_a_node_that_died_in_the_all_reduce() -> None:
    broken = check("allreduce", False, "Connection closed by peer")
    records = {node: record(node, broken) for node in "ab"}
    found = judge(records, "abc")
    assert found.failed == {"c": "did not answer"} and not found.trouble


def test_the_first_node_is_where_all_meet() -> None:
    outside = check("rendezvous", False, "refused", missing=[], store=False)
    waiting = check("rendezvous", False, "b, c", missing=["b", "c"], store=True)
    records = {
        "a": record("a", waiting),
        "b": record("b", outside),
        "c": record("c", outside),
    }
    assert judge(records, "abc").failed == {"a": "no other node could meet there: refused"}
    del records["a"]
    assert judge(records, "abc").failed == {"a": "did not answer"}


def test_one_node_that_does_not_get_to_the_store() -> None:
    records = {
        "a": record("a", check("rendezvous", False, "b", missing=["b"], store=True)),
        "b": record("b", check("rendezvous", False, "refused", missing=[], store=False)),
        "c": record("c", check("rendezvous", False, "b", missing=["b"], store=True)),
    }
    assert judge(records, "abc").failed == {"b": "refused"}
    records["b"] = record("b", check("rendezvous", False, "b", missing=["b"], store=True))
    found = judge(records, "abc")
    assert found.ok and found.warnings == ["b: came too late for the all-reduce to be checked"]


def slow(node: str, seconds: float) -> dict[str, Any]:
    """One that did not come to meet the others, for it was still importing torch."""
    torch = check("torch", None) | {"seconds": seconds, "warning": "torch took long"}
    return record(node, torch, check("rendezvous", None), check("allreduce", None))


def test_a_slow_import_is_a_warning_where_all_are_slow() -> None:
    found = judge({node: slow(node, 20) for node in "abc"}, "abc")
    assert found.ok and len(found.warnings) == 3 and found.bandwidth is None
    outside = check("rendezvous", False, "refused", missing=[], store=False)
    late = check("torch") | {"seconds": 18.0}
    found = judge({"a": slow("a", 21), "b": record("b", outside, late)}, "ab")
    assert found.ok and found.warnings == ["a: torch took long"]


def test_a_slow_import_is_a_fault_where_the_others_were_quick() -> None:
    waiting = check("rendezvous", False, "c", missing=["c"], store=True)
    records = {"a": record("a", waiting), "b": record("b", waiting), "c": slow("c", 24)}
    reason = "torch took over 24s to import; on the others, 4s"
    assert judge(records, "abc").failed == {"c": reason}


def test_a_port_that_is_taken_is_no_nodes_fault() -> None:
    taken = check("rendezvous", False, "port taken", missing=[], store=False, fault="port")
    outside = check("rendezvous", False, "refused", missing=[], store=False)
    found = judge({"a": record("a", taken), "b": record("b", outside)}, "ab")
    assert not found.failed and found.trouble == "port taken"


def test_an_all_reduce_that_fails_for_all_is_no_nodes_fault() -> None:
    hung = check("allreduce", False, "had not ended after 5.0 s")
    raised = check("allreduce", False, "wrong sum")
    found = judge({"a": record("a", hung), "b": record("b", raised)}, "ab")
    assert not found.failed and found.trouble.endswith("all-reduce failed: wrong sum")
    assert "wrong sum" in words(found)


def test_a_gpu_that_cannot_be_used_explains_the_others() -> None:
    own = check("allreduce", False, "GPU 0 cannot be used", fault="own")
    hung = check("allreduce", False, "had not ended after 5.0 s")
    found = judge({"a": record("a", hung), "b": record("b", own)}, "ab")
    assert found.failed == {"b": "GPU 0 cannot be used"} and not found.trouble


def test_warnings_do_not_fail_a_node() -> None:
    late = check("clock") | {"warning": "the clock is 3 s ahead of a"}
    found = judge({"a": record("a"), "b": record("b", late)}, "ab")
    assert found.ok and found.warnings == ["b: the clock is 3 s ahead of a"]
    assert words(found).endswith("warning: b: the clock is 3 s ahead of a")


def test_one_node_alone() -> None:
    alone = {"v": 1, "node": "a", "seconds": 0.4, "checks": [check("write"), check("disk")]}
    found = judge({"a": alone}, "a")
    assert found == Verdict(nodes=("a",), seconds=0.4) and found.bandwidth is None
    assert words(found) == "preflight: 1 node checked in 400ms, no fault found"


# --- Ranks wait until their nodes are checked -------------------------------------------------

PAIR = ["a", "b"]


class Job:
    """The process that judges, with a gate of its own."""

    def __init__(self, folder: Path, seconds: float = 1000.0) -> None:
        self.folder = folder
        self.signals: list[signal.Signals] = []
        self.opened: list[Verdict] = []
        until = time.monotonic() + seconds
        self.gate = Gate(folder, PAIR, until, self.signals, self.before_it_opens)

    def before_it_opens(self, verdict: Verdict) -> None:
        assert not (self.folder / OPEN).exists()
        self.opened.append(verdict)

    def end_checks(self, *failed: str) -> None:
        for node in PAIR:
            special = [check("write", False, "cannot write")] if node in failed else []
            (self.folder / f"{node}.json").write_text(json.dumps(record(node, *special)))
        (self.folder / ENDED).touch()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_ranks_wait_while_nodes_are_checked_and_start_when_all_is_well(job: Job) -> None:
    assert job.gate.judge() is None and job.gate.is_open is None
    job.end_checks()
    assert job.gate.judge() is True and (job.folder / OPEN).exists()
    assert job.gate.judge() is True and len(job.opened) == 1  # once, however often it is asked


def test_ranks_do_not_start_where_a_node_failed_or_did_not_answer(job: Job) -> None:
    job.end_checks("b")
    assert job.gate.judge() is False
    job.end_checks()  # too late: its step is being ended
    assert job.gate.judge() is False
    assert not job.opened and not (job.folder / OPEN).exists()


def test_checks_that_do_not_end_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    late = Job(tmp_path, seconds=-1.0)
    assert late.gate.judge() is False and not (tmp_path / OPEN).exists()


def test_a_job_that_must_stop_judges_nobody(job: Job) -> None:
    job.signals.append(signal.SIGUSR2)
    assert job.gate.judge() is True and (job.folder / OPEN).exists()
