"""Why a run is slow: each reason from measured shares, none for a run that is as fast as it can."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.doctor.diagnose import slowed, stalled, together
from allranks.doctor.finding import Evidence, Finding
from allranks.doctor.slow import (
    RankFacts,
    SlowFacts,
    Thresholds,
    nccl_lines,
    read_slow_facts,
    slow,
    uneven_work,
)
from allranks.errors import AllranksError
from allranks.run.events import append_event
from allranks.run.folder import RunDir
from allranks.timing.steps import Timing

FAST = {"compute": 0.090, "comm": 0.006, "straggler": 0.001, "data": 0.001, "other": 0.002}
BUSY = {
    **{"utilization": 96.0, "temperature": 65.0, "clock": 1900.0, "clock_max": 1980.0},
    **{"memory_peak": 60e9, "memory_total": 80e9},
}
SOCKET = Evidence("rank-0.log", 4, "n1:7 NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>")
OFF = Evidence("rank-0.log", 3, "n1:7 NCCL INFO NCCL_IB_DISABLE set by environment to 1.")


def timed(
    slowest: int | None = 1, share: float = 0.5, part: str | None = None, **parts: float
) -> Timing:
    """Steps of 100 ms; what a part takes more, compute takes less."""
    changed = {**FAST, **parts}
    changed["compute"] = 0.1 - sum(changed[name] for name in changed if name != "compute")
    return Timing(
        first_step=11,
        last_step=110,
        ranks=2,
        steady=True,
        seconds=10.0,
        samples=3200,
        step_seconds=0.1,
        step_deviation=0.001,
        parts=changed,
        slowest_rank=slowest,
        slowest_share=share,
        slowest_part=part,
    )


def ranks(*changes: dict[str, Any]) -> tuple[RankFacts, ...]:
    base = RankFacts(
        rank=0,
        node="n1",
        events="rank.jsonl",
        last_line=120,
        step_samples=16.0,
        data_seconds=0.001,
        means=BUSY,
        num_workers=4,
    )
    return tuple(replace(base, rank=rank, **change) for rank, change in enumerate(changes))


def found(timing: Timing, of: tuple[RankFacts, ...] | None = None, **more: Any) -> list[Finding]:
    several = {"cpus_allotted": 16, "is_task": True, **more}
    return slow(SlowFacts(timing=timing, ranks=of or ranks({}, {}), **several))


def test_a_fast_run_gives_none() -> None:
    assert found(timed()) == []


@pytest.mark.parametrize(
    ("change", "cause", "fix"),
    [
        ({"num_workers": 0}, "too-few-workers", "data.num_workers=7"),
        ({"num_workers": 4, "means": {"workers_cpu": 3.9}}, "too-few-workers", "bench data"),
        ({"num_workers": 40}, "too-many-workers", "data.num_workers=7"),
        ({"num_workers": 4, "means": {"workers_cpu": 0.4}}, "data-bound", "data.stage=local"),
    ],
)
def test_waiting_for_data_and_what_the_workers_have_to_do_with_it(
    change: dict[str, Any], cause: str, fix: str
) -> None:
    each = {"data_seconds": 0.04, **change}
    (one,) = found(timed(data=0.04), ranks(each, each))
    assert (one.cause, one.rank, one.confidence) == (cause, None, "high")
    assert "40% of each step" in one.title and fix in one.fix
    assert "40.0ms of a step of 100ms" in one.evidence[0].text


def test_one_rank_that_waits_for_its_data_differs_from_the_others() -> None:
    slow_one = ranks({"data_seconds": 0.0005}, {"data_seconds": 0.08, "num_workers": 0})
    [one] = found(timed(data=0.08), slow_one)
    assert (one.cause, one.rank, one.confidence) == ("data-bound", 1, "high")
    assert "num_workers" not in one.fix and "disk" in one.fix  # the others have as many workers
    assert "80.0ms of a step of 100ms on rank 1, at most 500µs on others" in one.evidence[0].text


def test_a_script_s_settings_are_those_of_its_loader() -> None:
    each = {"data_seconds": 0.04, "num_workers": 0}
    (one,) = found(timed(data=0.04), ranks(each, each), is_task=False)
    assert "DataLoader(…, num_workers=7" in one.fix


def test_a_slow_rank_is_named_with_what_it_does_longer() -> None:
    (one,) = found(timed(straggler=0.03, share=0.9, part="forward"))
    assert (one.cause, one.rank, one.confidence) == ("slow-rank", 1, "high")
    assert "in forward" in one.title and "30% of each step" in one.title
    (other,) = found(timed(straggler=0.03, share=0.9), ranks({}, {"node": "n2"}))
    assert other.node == "n2" and "--exclude=n2" in other.fix


def test_ranks_that_take_turns_in_being_slow_have_no_culprit() -> None:
    for told in (timed(straggler=0.03, share=0.4), timed(slowest=None, share=0.0, straggler=0.03)):
        (one,) = found(told)
        assert (one.cause, one.rank) == ("uneven-steps", None)


def test_batches_of_different_lengths_are_named(tmp_path: Path) -> None:
    def steps(*works: float) -> list[dict[str, float]]:
        return [{"forward": 0.02 * work, "backward": 0.05 * work} for work in works]

    lengths = uneven_work(steps(*(1 + number % 4 for number in range(40))))
    assert lengths == pytest.approx((0.02, 0.08))
    (one,) = found(timed(straggler=0.03, share=0.4), ranks(*[{"work_seconds": lengths}] * 2))
    assert (one.cause, one.rank, one.confidence) == ("uneven-lengths", None, "medium")
    assert "bucket by length" in one.fix and "20.0ms to 80.0ms" in one.evidence[0].text
    (other,) = found(timed(straggler=0.03, share=0.4), ranks({"work_seconds": lengths}, {}))
    assert other.cause == "uneven-steps"  # one rank's work alone is another matter
    # Batches that are alike; and hiccups, which hit one pass or the other.
    assert uneven_work(steps(*[1.0] * 40)) is None
    noise = [
        {"forward": 0.1 if n % 4 else 0.4, "backward": 0.9 if n % 3 else 0.2} for n in range(40)
    ]
    assert uneven_work(noise) is None


def test_a_rank_with_more_samples_is_not_called_slow() -> None:
    uneven = ranks({"step_samples": 16.0}, {"step_samples": 24.0})
    (one,) = found(timed(straggler=0.03, share=0.95), uneven)
    assert (one.cause, one.rank) == ("unbalanced-data", 1)
    assert "20% more samples" in one.title


def test_a_hot_gpu_below_its_clock() -> None:
    hot = {**BUSY, "temperature": 88.0, "clock": 1200.0}
    (one,) = found(timed(straggler=0.03, share=0.95), ranks({}, {"means": hot}))
    assert (one.cause, one.rank) == ("thermal-throttling", 1)
    assert "61% of its clock" in one.title
    warm = {**BUSY, "temperature": 88.0}
    assert found(timed(), ranks({}, {"means": warm})) == []


def test_sockets_in_place_of_infiniband() -> None:
    two = ranks({}, {"node": "n2"})
    (one,) = found(timed(comm=0.03), two, nccl=(OFF, SOCKET))
    assert (one.cause, one.confidence) == ("sockets-instead-of-infiniband", "high")
    assert one.fix == "unset NCCL_IB_DISABLE" and len(one.evidence) == 2
    assert found(timed(comm=0.03), two) == []
    assert found(timed(), two, nccl=(OFF, SOCKET)) == []  # it costs nothing
    assert found(timed(comm=0.03), nccl=(OFF, SOCKET)) == []  # one node


def test_exchanges_that_take_long() -> None:
    (one,) = found(timed(comm=0.06))
    assert one.cause == "communication-bound" and "60% of each step" in one.title


def test_idle_gpus_and_small_batches() -> None:
    idle = {**BUSY, "utilization": 40.0}
    (one,) = found(timed(), ranks({"means": idle}, {"means": idle}))
    assert (one.cause, one.confidence) == ("low-gpu-utilization", "low")
    small = {**idle, "memory_peak": 8e9}
    (one,) = found(timed(), ranks({"means": small}, {"means": small}))
    assert one.cause == "small-batch" and "10% of its memory" in one.evidence[0].text


def test_the_most_expensive_comes_first_and_general_words_only_alone() -> None:
    idle = {"means": {**BUSY, "utilization": 40.0}, "data_seconds": 0.2, "num_workers": 0}
    several = found(timed(data=0.15, straggler=0.4, share=0.9), ranks(idle, idle))
    assert [one.cause for one in several] == ["slow-rank", "too-few-workers"][: len(several)]


def test_thresholds_can_be_others() -> None:
    facts = SlowFacts(timing=timed(data=0.04), ranks=ranks({}, {}))
    assert slow(facts, Thresholds.parse(["data=0.5"])) == []
    [found] = slow(facts, Thresholds.parse(["least_seconds=60"]))
    assert found.cause == "too-short-to-judge" and found.confidence == "low"
    assert "in the 10.0s that were measured, ranks spend 40%" in found.title
    assert len(slow(facts, Thresholds.parse(["data=0.3"]))) == 1
    for wrong in ("dat=0.1", "data=much", "data=-1", "data"):
        with pytest.raises(AllranksError, match="not a threshold"):
            Thresholds.parse([wrong])


def test_what_takes_next_to_no_time_is_not_told() -> None:
    parts = timed(data=0.04).parts or {}
    tiny = {part: seconds / 50 for part, seconds in parts.items()}
    assert found(replace(timed(), step_seconds=0.002, parts=tiny)) == []


def test_steps_without_phases_give_nothing_but_what_the_gpus_show() -> None:
    assert found(replace(timed(), parts=None)) == []


def test_facts_are_read_from_a_run_s_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job-20261115-120000-abcd")
    phases = {"forward": 0.1, "backward": 0.1, "optimizer": 0.0, "other": 0.0}
    for rank in (0, 1):
        append_event(run.events(0, rank), "start", rank=rank, host="n1")
        for number in range(1, 31):
            step = {"step": number, "samples": 8 + rank, "seconds": 0.6, "data": 0.3, "wait": 0.1}
            append_event(run.events(0, rank), "step", **step, **phases)
        append_event(run.events(0, rank), "device", num_workers=2, workers_cpu=1.9, cpu=1.0)
    run.log(0, 0).write_text(f"hello\n{OFF.text}\n{SOCKET.text}\n")
    run.write_info({"hardware": {"cpus_allotted": 8}})
    facts = read_slow_facts(run)
    assert facts is not None and facts.cpus_allotted == 8 and not facts.is_task
    assert [rank.step_samples for rank in facts.ranks] == [8, 9]
    assert facts.ranks[0].num_workers == 2 and facts.ranks[0].last_line == 32
    assert [each.line for each in facts.nccl] == [2, 3]
    (one,) = slow(facts)
    assert (one.cause, one.rank) == ("too-few-workers", None)
    assert read_slow_facts(RunDir(tmp_path / "none")) is None
    assert nccl_lines([tmp_path / "none.log"]) == ()


def finding(cause: str, rank: int | None = None, confidence: Any = "high") -> Finding:
    return Finding(cause, cause, "fix", rank=rank, confidence=confidence)


def test_a_hang_comes_before_its_echoes_and_slowness_after_everything() -> None:
    stall, late = finding("rank-missing-from-collective", 1), finding("data-bound")
    echo, other = finding("rank-died", 1), finding("nan-loss", 0, "medium")
    assert together([echo, other], [stall], []) == [stall, other]
    assert together([other], [], [late]) == [other, late]
    # What a rank said for certain may be why it did not get on.
    full = finding("disk-full", 1)
    assert together([full], [stall], []) == [full, stall]
    assert together([], [], []) == []


def test_a_failed_run_is_not_called_slow(tmp_path: Path) -> None:
    assert slowed(RunDir(tmp_path), "failed") == [] == stalled(RunDir(tmp_path), "finished")
