"""What the doctor makes of a run's verdict: a finding under its published cause, or none."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.verdict_runs import HEALTHY, Event, cpu_trace, planted

from allranks.doctor.catalogue import load
from allranks.doctor.diagnose import slowed, stalled, together
from allranks.doctor.finding import Finding
from allranks.doctor.slow import slow
from allranks.errors import AllranksError
from allranks.run.folder import RunDir
from allranks.timing.limits import SAYING
from allranks.timing.limits.facts import Thresholds
from allranks.timing.limits.ranks import nccl_lines

SOCKET = "n1:7 NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>"
OFF = "n1:7 NCCL INFO NCCL_IB_DISABLE set by environment to 1."
WAITING = {**HEALTHY, "data": 70.0}
BUSY = {
    **{"utilization": 96.0, "temperature": 65.0, "clock": 1900.0, "clock_max": 1980.0},
    **{"memory_peak": 60e9, "memory_total": 80e9},
}


def devices(*of_ranks: Event) -> dict[str, Any]:
    """Samples of the ranks' devices, the same every two seconds."""
    return {"events": lambda rank: [{"event": "device", **of_ranks[rank]}] * 5}


def found(folder: Path, *phases: Any, traced: bool = True, **more: Any) -> list[Finding]:
    traces = {rank: cpu_trace() for rank in range(len(phases))} if traced else None
    return slow(planted(folder, *phases, comm=more.pop("comm", 1.0), traces=traces, **more))


def test_a_fast_run_gives_none(tmp_path: Path) -> None:
    assert found(tmp_path, HEALTHY, HEALTHY) == []


@pytest.mark.parametrize(
    ("loader", "use", "cause", "fix"),
    [
        (
            {"num_workers": 0},
            {},
            "too-few-workers",
            "DataLoader(..., num_workers=3, persistent_workers=True)",
        ),
        ({"num_workers": 0, "iterable": True}, {}, "too-few-workers", "get_worker_info"),
        ({"num_workers": 3}, {"workers_cpu": 2.9}, "too-few-workers", "num_workers=4"),
        (
            {"num_workers": 4},
            {"workers_cpu": 3.9, "cpu": 1.0},
            "too-few-workers",
            "more CPUs per rank",
        ),
        (
            {"num_workers": 40},
            {"workers_cpu": 3.9, "cpu": 1.0},
            "too-many-workers",
            "num_workers=3",
        ),
        # Workers that wait for a disk need no CPUs.
        ({"num_workers": 4}, {"workers_cpu": 0.4}, "data-bound", "num_workers=8"),
        ({"num_workers": 20}, {"workers_cpu": 0.4}, "data-bound", "num_workers=40"),
        ({"num_workers": 40}, {"workers_cpu": 0.4}, "data-bound", "stage:"),
    ],
)
def test_waiting_for_data_and_what_the_workers_have_to_do_with_it(
    tmp_path: Path, loader: Event, use: Event, cause: str, fix: str
) -> None:
    def events(rank: int) -> list[Event]:
        return [{"event": "loader", **loader}, *[{"event": "device", "cpu": 0.0, **use}] * 5]

    (one,) = found(tmp_path, WAITING, WAITING, events=events)
    assert (one.cause, one.rank, one.confidence) == (cause, None, "high")
    assert "41% of the time" in one.title and fix in one.fix
    assert "70.0ms" in one.evidence[0].text and one.evidence[0].line


def test_a_task_s_settings_are_those_of_its_job_file(tmp_path: Path) -> None:
    start = {"step": 0, "num_workers": 0}
    (one,) = found(tmp_path, WAITING, WAITING, start=start)
    assert (one.cause, one.fix.partition(";")[0]) == ("too-few-workers", "data.num_workers=3")


@pytest.mark.parametrize("steps", [8, 20])  # of an epoch
def test_workers_that_start_anew_in_every_epoch(tmp_path: Path, steps: int) -> None:
    def each(rank: int, number: int, step: Event) -> Event:
        data = 2.0 if number % steps == 5 else step["data"]
        return {**step, "data": data, "epoch": 1 + (number - 5) // steps}

    loader = {"event": "loader", "num_workers": 2, "persistent_workers": False}
    (one,) = found(tmp_path, HEALTHY, each=each, events=lambda _: [loader])
    assert (one.cause, one.fix) == ("data-bound", "DataLoader(..., persistent_workers=True)")


def test_one_rank_that_waits_for_its_data_differs_from_the_others(tmp_path: Path) -> None:
    some = [{"event": "loader", "num_workers": 2}, {"event": "device", "workers_cpu": 0.1}]
    (one,) = found(tmp_path, HEALTHY, WAITING, events=lambda _: some)
    assert (one.cause, one.rank, one.confidence) == ("data-bound", 1, "high")
    assert "num_workers" not in one.fix and "disk" in one.fix  # the others have as many workers
    assert "data 70.0ms on rank 1, at most 200µs on others" in one.evidence[0].text


def test_a_slow_rank_is_named_with_what_it_does_longer_and_its_node(tmp_path: Path) -> None:
    late = {**HEALTHY, "backward": 130.0}
    (one,) = found(tmp_path, HEALTHY, late, start={"host": "n1"})
    assert (one.cause, one.rank, one.node) == ("slow-rank", 1, "n1")
    assert one.title.startswith("The others wait 41% of the time for rank 1: it is slower in back")


def test_ranks_that_take_turns_in_being_slow_have_no_culprit(tmp_path: Path) -> None:
    def each(rank: int, number: int, step: Event) -> Event:
        return {**step, "forward": step["forward"] + 0.1 * (number * 7 % 2 == rank)}

    (one,) = found(tmp_path, HEALTHY, HEALTHY, each=each)
    assert (one.cause, one.rank, one.confidence) == ("uneven-steps", None, "medium")


def test_batches_of_different_lengths_are_named(tmp_path: Path) -> None:
    chance = random.Random(0)

    def each(rank: int, number: int, step: Event) -> Event:
        work = chance.choice([1, 2, 3, 4, 5])
        return {**step, "forward": 0.02 * work, "backward": 0.05 * work}

    (one,) = found(tmp_path, HEALTHY, HEALTHY, each=each)
    assert (one.cause, one.rank) == ("uneven-lengths", None)
    assert "bucket by length" in one.fix and "20.0ms to 100ms" in one.evidence[0].text


def test_a_rank_with_more_samples_is_not_called_slow(tmp_path: Path) -> None:
    late = {**HEALTHY, "backward": 130.0}
    each = lambda rank, _, step: {**step, "samples": 16 + 8 * rank}  # noqa: E731
    (one,) = found(tmp_path, HEALTHY, late, each=each)
    assert (one.cause, one.rank) == ("unbalanced-data", 1)
    assert "20% more samples" in one.title


def test_a_hot_gpu_below_its_clock(tmp_path: Path) -> None:
    hot, late = {**BUSY, "temperature": 88.0, "clock": 1200.0}, {**HEALTHY, "backward": 130.0}
    (one,) = found(tmp_path, HEALTHY, late, **devices(BUSY, hot))
    assert (one.cause, one.rank) == ("thermal-throttling", 1)
    assert "61% of its full clock" in one.title
    # All of them, so none waits.
    (one,) = found(tmp_path, HEALTHY, number=1, **devices(hot))
    assert (one.cause, one.rank) == ("thermal-throttling", None) and "61%" in one.title
    warm = {**BUSY, "temperature": 88.0}
    assert found(tmp_path, HEALTHY, number=2, **devices(warm)) == []


def test_sockets_in_place_of_infiniband(tmp_path: Path) -> None:
    traces = {rank: cpu_trace() for rank in range(2)}
    run = planted(tmp_path, HEALTHY, HEALTHY, comm=40.0, traces=traces)
    run.log(0, 0).write_text(f"hello\n{OFF}\n{SOCKET}\n")
    assert [one.cause for one in slow(run)] == ["communication-bound"]  # one node
    for rank in range(2):
        path = run.events(0, rank)
        text = path.read_text().replace('"event": "start"', f'"event": "start", "host": "n{rank}"')
        path.write_text(text)
    (one,) = slow(run)
    assert (one.cause, one.confidence) == ("sockets-instead-of-infiniband", "high")
    assert one.fix == "unset NCCL_IB_DISABLE" and [each.line for each in one.evidence[:2]] == [2, 3]
    assert nccl_lines([tmp_path / "none.log"]) == ()


def test_idle_gpus_and_small_batches_without_a_trace(tmp_path: Path) -> None:
    idle = {**BUSY, "utilization": 40.0}
    (one,) = found(tmp_path, HEALTHY, traced=False, **devices(idle))
    assert (one.cause, one.confidence) == ("low-gpu-utilization", "low")
    small = {**idle, "memory_peak": 8e9}
    (one,) = found(tmp_path, HEALTHY, traced=False, number=1, **devices(small))
    assert one.cause == "small-batch" and "10% of its memory" in one.evidence[0].text


def test_thresholds_can_be_others(tmp_path: Path) -> None:
    run = planted(tmp_path, WAITING, traces={0: cpu_trace()})
    assert slow(run, Thresholds.parse(["data=0.5"])) == []
    assert slow(run, Thresholds.parse(["least_ms=80"])) == []
    assert len(slow(run, Thresholds.parse(["data=0.3"]))) == 1
    for wrong in ("least_seconds=6000", "least_steps=6000"):
        [short] = slow(run, Thresholds.parse([wrong]))
        assert short.cause == "too-short-to-judge" and short.confidence == "low"
        assert "limited by data: training waits for its loader 42% of the time" in short.title
    for wrong in ("dat=0.1", "data=much", "data=-1", "data", "data=nan"):
        with pytest.raises(AllranksError, match="not a threshold"):
            Thresholds.parse([wrong])


def test_every_limit_has_words_and_known_causes() -> None:
    assert {"data-bound", "host-bound", "launch-bound", "copy-bound", "pauses"} <= load().keys()
    assert "compute" in SAYING and len(SAYING) == 8


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


def test_memory_that_grows_is_a_finding(tmp_path: Path) -> None:
    def memory(rank: int) -> list[Event]:
        kept = {"event": "kept", "where": "host", "line": "train.py:9"}
        return [kept, *({"event": "memory", "step": n, "host": n << 20} for n in range(1, 119))]

    info = {"hardware": {"memory_allotted_bytes": 16 << 30}}
    (one,) = found(tmp_path, HEALTHY, events=memory, info=info)
    assert one.cause == "memory-grows" and one.title.startswith("Host memory grows by 1 MiB a step")
    assert one.title.endswith("(train.py:9)")
