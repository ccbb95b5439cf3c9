"""What limited a run, from folders with one planted limit each."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
from tests.verdict_runs import HEALTHY, Event, cpu_trace, gpu_trace, planted

from allranks.layout import Layout
from allranks.run import files
from allranks.run.folder import RunDir
from allranks.timing.verdict import MOST_BYTES, Verdict, judge

RANKS = pytest.mark.parametrize("ranks", [1, 2, 4])


def verdict_of(run: RunDir, **more: Any) -> Verdict:
    found = judge(run, **more).verdict
    if found.shares:
        assert sum(found.shares.values()) == pytest.approx(1, abs=1e-3)
    return found


def traces(ranks: int, **more: Any) -> dict[int, Event]:
    return {rank: cpu_trace(**more) for rank in range(ranks)}


@RANKS
def test_a_healthy_run_computes(tmp_path: Path, ranks: int) -> None:
    found = verdict_of(planted(tmp_path, *[HEALTHY] * ranks, comm=1.0, traces=traces(ranks)))
    assert (found.limit, found.sure, found.gain, found.cause) == ("compute", True, None, None)
    assert found.share and found.share > 0.9


@RANKS
def test_slow_data(tmp_path: Path, ranks: int) -> None:
    slow = {**HEALTHY, "data": 300.0}
    run = planted(tmp_path, *[slow] * ranks, comm=1.0, traces=traces(ranks))
    found = verdict_of(run)
    assert (found.limit, found.sure, found.rank) == ("data", True, None)
    assert found.share == pytest.approx(0.75, abs=0.02)
    assert found.gain == pytest.approx(4, abs=0.2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_rank_s_slow_data(tmp_path: Path, ranks: int) -> None:
    each = [HEALTHY] * (ranks - 1) + [{**HEALTHY, "data": 300.0}]
    run = planted(tmp_path, *each, comm=1.0, traces=traces(ranks))
    found = verdict_of(run)
    assert (found.limit, found.sure, found.rank) == ("data", True, ranks - 1)
    assert f"rank {ranks - 1} waits for its loader 75% of the time" in found.why


def test_ranks_that_take_turns_in_waiting_for_data(tmp_path: Path) -> None:
    def each(rank: int, number: int, step: Event) -> Event:
        return {**step, "data": 0.15 if (number * 7) % 4 == rank else 0.001}

    run = planted(tmp_path, *[HEALTHY] * 4, comm=1.0, traces=traces(4), each=each)
    found = verdict_of(run)
    assert (found.limit, found.rank) == ("data", None) and found.share == pytest.approx(
        0.6, abs=0.05
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_communication_after_the_last_rank_has_come(tmp_path: Path, ranks: int) -> None:
    run = planted(tmp_path, *[HEALTHY] * ranks, comm=50.0, traces=traces(ranks))
    found = verdict_of(run)
    assert (found.limit, found.sure, found.cause) == ("communication", True, "communication-bound")
    assert found.gain == pytest.approx(1.5, abs=0.02)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_the_others_wait_for(tmp_path: Path, ranks: int) -> None:
    each = [HEALTHY] * (ranks - 1) + [{**HEALTHY, "forward": 130.0}]
    lines = [["train.py:7", 0.1]]
    shown = traces(ranks) | {ranks - 1: cpu_trace(host=100.0, local=198.8, lines=lines)}
    found = verdict_of(planted(tmp_path, *each, comm=1.0, traces=shown))
    assert (found.limit, found.sure, found.rank) == ("straggler", True, ranks - 1)
    assert found.share == pytest.approx(0.5, abs=0.02) and found.line == "train.py:7"


@pytest.mark.parametrize(
    ("layout", "slow", "why"),
    [
        ("1x2:pp=2", [1], "for rank 1 (stage 1): its stage takes "),
        ("1x4:pp=2", [1, 3], "for stage 1, which takes "),
        ("1x4:pp=2", [3], "for rank 3 (stage 1, replica 1): "),  # rank 1 is not slow
        ("1x4:pp=2", [], "exchanging data between ranks takes 50% of the time (pipeline)"),
    ],
)
def test_stages_of_a_pipeline(tmp_path: Path, layout: str, slow: list[int], why: str) -> None:
    """Ranks that wait for another stage are not slow; a stage that computes longer is named."""

    def each(rank: int, number: int, step: Event) -> Event:
        return {**step, "exchanges": {"pipeline": 0.05}}

    ranks = Layout.parse(layout).ranks
    long = {**HEALTHY, "forward": 2 * HEALTHY["forward"], "backward": 2 * HEALTHY["backward"]}
    phases = [long if rank in slow else HEALTHY for rank in range(ranks)]
    comm = 1.0 if slow else sum(HEALTHY.values())
    start = {"layout": layout}
    run = planted(
        tmp_path, *phases, comm=comm, traces=traces(ranks), each=each, start=start, steps=60
    )
    found = verdict_of(run)
    assert found.limit == ("straggler" if slow else "communication") and why in found.why
    assert found.rank == (slow[0] if len(slow) == 1 else None)
    assert ("another pp" in (found.next or "")) == (slow in ([1], [1, 3]))


@pytest.mark.parametrize(
    ("exchange", "start", "next"),
    [
        # Half of the time is far more than the bubble of a pipeline of 2 with 16 micro-batches.
        ("pipeline", {"accumulation": 16, "stages": [2, 2]}, "pipeline.micro_batches=8"),
        ("pipeline", {"accumulation": 2, "stages": [2, 2]}, "pipeline.micro_batches=4"),
        ("all-gather", {"accumulation": 4}, "micro_batch_size=16"),
        ("all-gather", {"accumulation": 1}, "a larger batch_size"),  # all in one micro-batch
        ("tensor-parallel", {"accumulation": 1}, "a smaller tp;"),
        ("all-reduce", {"accumulation": 1}, "a larger batch_size"),
    ],
)
def test_what_to_change_in_a_task_that_communicates_long(
    tmp_path: Path, exchange: str, start: dict[str, Any], next: str
) -> None:
    def each(rank: int, number: int, step: Event) -> Event:
        return {**step, "exchanges": {exchange: 0.099}}

    begun = {
        "layout": "1x2:pp=2",
        "micro_batch_size": 8,
        "samples_per_epoch": 9,
        "step": 0,
        **start,
    }
    run = planted(
        *(tmp_path, HEALTHY, HEALTHY),
        comm=99.0,
        traces=traces(2),
        each=each,
        start=begun,
    )
    assert (verdict_of(run).next or "").startswith(next)


@RANKS
@pytest.mark.parametrize("who", ["all", "rank 0"])
def test_pauses(tmp_path: Path, ranks: int, who: str) -> None:
    """Evaluations, and saves that the script makes in a few of its steps."""

    def each(rank: int, number: int, step: Event) -> Event:
        if number % 10 or (who == "rank 0" and rank):
            return step
        return {**step, "evaluation": 0.5, "other": step["other"] + 0.3}

    run = planted(tmp_path, *[HEALTHY] * ranks, comm=1.0, traces=traces(ranks), each=each)
    found = verdict_of(run)
    assert (found.limit, found.sure) == ("pauses", True)
    assert found.share == pytest.approx(0.08 / 0.18, abs=0.03)


def test_time_between_steps_is_a_pause(tmp_path: Path) -> None:
    def each(rank: int, number: int, step: Event) -> Event:
        return {**step, "between": 0.5 * (number % 10 == 0)}

    found = verdict_of(planted(tmp_path, HEALTHY, traces=traces(1), each=each))
    assert found.limit == "pauses" and found.share == pytest.approx(0.05 / 0.15, abs=0.03)


@RANKS
@pytest.mark.parametrize("where", ["forward", "other"])
def test_python_outside_torch(tmp_path: Path, ranks: int, where: str) -> None:
    busy = {**HEALTHY, where: HEALTHY[where] + 30.0}
    shown = traces(ranks, host=30.5, local=128.8, lines=[["train.py:52", 0.03]])
    found = verdict_of(planted(tmp_path, *[busy] * ranks, comm=1.0, traces=shown))
    assert (found.limit, found.sure, found.line) == ("host", True, "train.py:52")
    assert found.share == pytest.approx(30.5 / 129, abs=0.02)


def test_without_a_trace_nothing_local_is_sure(tmp_path: Path) -> None:
    found = verdict_of(planted(tmp_path, HEALTHY))
    assert (found.limit, found.sure) == ("compute", False)
    # More could be hidden in what is called forward than is lost to the loader.
    found = verdict_of(planted(tmp_path, {**HEALTHY, "data": 30.0}, number=1))
    assert (found.limit, found.sure) == ("data", False)
    found = verdict_of(planted(tmp_path, {**HEALTHY, "data": 130.0}, number=2))
    assert (found.limit, found.sure) == ("data", True)


@pytest.mark.parametrize(("pageable", "are_longer"), [(4e8, True), (0.0, False)])
def test_only_copies_by_the_host_may_be_a_bit_slower_than_in_the_trace(
    tmp_path: Path, pageable: float, are_longer: bool
) -> None:
    """Traced steps of 90 ms, others of 100: the copies take longer, or nobody knows what does."""
    shown = {0: gpu_trace(20.0, copies=68.0, copied=4e8, pageable=pageable, host=1.0, launches=1.0)}
    found = verdict_of(planted(tmp_path, HEALTHY, traces=shown))
    assert (found.limit, found.shares["copies"] > 0.75) == ("copies", are_longer)
    few = {0: gpu_trace(72.0, copies=4.0, copied=4e8, pageable=pageable, host=0.5, launches=0.5)}
    found = verdict_of(planted(tmp_path / "few", HEALTHY, traces=few))
    assert not found.sure and found.shares["copies"] < 0.06


AT_9: Any = {"copying": [["train.py:9", 0.06]]}


@RANKS
@pytest.mark.parametrize(
    ("limit", "trace"),
    [
        ("launches", gpu_trace(20.0, launches=140.0)),  # tracing makes launches longer
        ("host", gpu_trace(20.0, launches=5.0, host=73.0, lines=[["train.py:9", 0.07]])),
        ("copies", gpu_trace(30.0, copies=68.0, copied=4e8, pageable=4e8)),
        ("copies", gpu_trace(30.0, copies=68.0, copied=4e8, copied_back=4e8, **AT_9)),
        ("compute", gpu_trace(97.0, launches=1.0)),
    ],
)
def test_the_device_s_own_truth(tmp_path: Path, ranks: int, limit: str, trace: Event) -> None:
    shown = dict.fromkeys(range(ranks), trace)
    found = verdict_of(planted(tmp_path, *[HEALTHY] * ranks, comm=1.0, traces=shown))
    assert (found.limit, found.sure) == (limit, True)
    assert found.line == ("train.py:9" if "train.py:9" in str(trace) else None)
    if limit == "copies":
        assert ("copy back" if found.line else "pin_memory") in (found.next or "")


@pytest.mark.parametrize(("data", "gain"), [(4.0, 5), (30.0, 2)])
def test_a_short_wait_for_the_loader_overlaps_once_a_gpu_is_not_kept_waiting(
    tmp_path: Path, data: float, gain: float
) -> None:
    shown = {0: gpu_trace(20.0, launches=60.0)}
    run = planted(tmp_path, {**HEALTHY, "data": data, "forward": 30.0 - data}, traces=shown)
    found = verdict_of(run)
    assert found.limit == "launches" and found.gain == pytest.approx(gain, rel=0.12)


@pytest.mark.parametrize(("times", "reading"), [(4.0, 0.0), (1.6, 0.4)])
def test_traced_steps_that_differ_from_the_others_make_nothing_sure(
    tmp_path: Path, times: float, reading: float
) -> None:
    """As when a step is compiled later: what reading the trace took explains only itself."""

    def each(rank: int, number: int, step: Event) -> Event:
        if not 30 <= number < 34:
            return step
        slow = {phase: step[phase] * times for phase in HEALTHY}
        return {**step, **slow, "optimizer": slow["optimizer"] + reading * (number == 33)}

    shown = {0: gpu_trace(60.0, host=130.0, cost=reading)}
    found = verdict_of(planted(tmp_path, HEALTHY, traces=shown, each=each))
    assert (found.limit, found.sure) == ("host", False)


TINY = {"data": 0.002, "forward": 0.15, "backward": 0.2, "optimizer": 0.2, "other": 0.05}


@pytest.mark.parametrize(("host", "is_sure"), [(0.0, True), (0.1, False)])
def test_short_steps_that_tracing_slows_are_like_the_others(
    tmp_path: Path, host: float, is_sure: bool
) -> None:
    """So may be what is between their operators. The trace is read in its last step."""

    def each(rank: int, number: int, step: Event) -> Event:
        if not 30 <= number < 34:
            return step
        slow = {phase: step[phase] * 1.8 for phase in TINY}
        return {**step, **slow, "optimizer": slow["optimizer"] + 0.07 * (number == 33)}

    shown = {0: cpu_trace(host=host, local=1.0, cost=0.06)}
    found = verdict_of(planted(tmp_path, TINY, traces=shown, each=each))
    assert (found.limit, found.sure) == ("host" if host else "compute", is_sure)
    assert found.shares["host"] == pytest.approx(host / 0.6, abs=0.02)


def test_what_only_tracing_may_have_caused_is_not_sure(tmp_path: Path) -> None:
    """Traced steps are idle for twice as long: either of two may be the longer one elsewhere."""
    shown = {0: gpu_trace(20.0, host=70.0, launches=90.0)}
    found = verdict_of(planted(tmp_path, HEALTHY, traces=shown))
    assert (found.limit, found.sure) == ("host", False)


def test_a_trace_of_unusual_steps_does_not_count_beside_one_of_usual_steps(tmp_path: Path) -> None:
    def each(rank: int, number: int, step: Event) -> Event:
        return {**step, "forward": 0.6, "traced": True} if number in (80, 81) else step

    odd = {"event": "trace", "first": 80, "last": 81, **cpu_trace(local=660.0)}
    run = planted(
        *(tmp_path, HEALTHY), traces=traces(1, host=50.0), each=each, events=lambda rank: [odd]
    )
    found = verdict_of(run)
    assert found.limit == "host" and found.share == pytest.approx(0.5, abs=0.05)


def test_a_gpu_without_a_trace_is_judged_by_nvml_and_never_surely(tmp_path: Path) -> None:
    def idle(rank: int) -> list[Event]:
        use = {"event": "device", "utilization": 40.0, "memory_peak": 8e9, "memory_total": 80e9}
        return [use] * 5 + [{"event": "trace", "problem": "the driver does not allow it"}]

    without_kernels = {0: cpu_trace()}
    found = verdict_of(planted(tmp_path, HEALTHY, events=idle, traces=without_kernels, number=1))
    assert (found.limit, found.sure) == ("launches", False)
    found = verdict_of(planted(tmp_path, HEALTHY, events=idle))
    assert (found.limit, found.sure, found.cause) == ("launches", False, "small-batch")
    assert found.share == pytest.approx(0.6, abs=0.02) and "the driver" in found.why


def test_a_short_run_says_what_it_looks_like(tmp_path: Path) -> None:
    found = verdict_of(planted(tmp_path, {**HEALTHY, "data": 300.0}, steps=15))
    assert (found.limit, found.sure, found.gain) == ("too-short", False, None)
    assert "training waits for its loader" in found.why
    found = verdict_of(planted(tmp_path, HEALTHY, steps=1, number=1))
    assert found.limit == "too-short" and "too few steps" in found.why
    found = verdict_of(planted(tmp_path, HEALTHY, steps=0, number=2))
    assert found.limit == "unknown" and "no optimizer step" in found.why
    assert verdict_of(RunDir(tmp_path / "none")).limit == "unknown"


def test_a_mixture_is_not_surely_one_thing(tmp_path: Path) -> None:
    """Data and host take about the same, and vary."""
    chance = random.Random(0)

    def each(rank: int, number: int, step: Event) -> Event:
        return {**step, "data": chance.uniform(0.0, 0.064)}

    both = {**HEALTHY, "other": 30.0}
    shown = {0: cpu_trace(host=30.0, local=128.0)}
    found = verdict_of(planted(tmp_path, both, traces=shown, each=each))
    assert found.limit in ("data", "host") and not found.sure
    other = {"data": "host", "host": "data"}[found.limit]
    assert found.doubt is not None and found.doubt.startswith(f"{other} takes ")


def test_more_threads_than_cpus_make_nothing_sure(tmp_path: Path) -> None:
    run = planted(tmp_path, *[HEALTHY] * 4, comm=50.0, traces=traces(4), start={"threads": 4})
    found = verdict_of(run)
    assert (found.limit, found.sure) == ("communication", False)
    assert found.doubt == "16 threads share 8 CPUs"


def test_a_pause_too_rare_for_the_last_steps_is_seen_by_the_clock(tmp_path: Path) -> None:
    """Of a long file only both ends are read, and steps at a few places in between."""

    def each(rank: int, number: int, step: Event) -> Event:
        return {**step, "evaluation": 160.0 * (number % 3000 == 1000)}

    run = planted(tmp_path, HEALTHY, steps=22_000, traces=traces(1), each=each)
    assert run.events(0, 0).stat().st_size > MOST_BYTES
    found = verdict_of(run)
    assert found.limit == "pauses" and found.share == pytest.approx(0.37, abs=0.06)


def test_of_many_long_files_only_the_ends_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the files of 64 ranks, a hole stands for what is never read."""
    slow = {**HEALTHY, "data": 300.0}
    many = {"hardware": {"cpus_allotted": 64}}
    run = planted(tmp_path, *[slow] * 64, comm=1.0, steps=250, traces=traces(64), info=many)
    for rank in range(1, 64):
        head, line, tail = run.events(0, rank).read_bytes().partition(b'{"v": 1, "t"')
        with run.events(0, rank).open("wb") as file:
            file.write(head + line + tail[: 1 << 15] + b"\n")
            file.seek(60 << 20)
            file.write(b"\n" + line + tail)
    read = 0

    class Counted(io.BufferedReader):
        def readline(self, *args: Any) -> bytes:
            nonlocal read
            found = super().readline(*args)
            read += len(found)
            return found

    monkeypatch.setattr(files, "open_file", lambda path: Counted(io.FileIO(path)))
    found = verdict_of(run)
    assert (found.limit, found.sure, found.rank) == ("data", True, None)
    assert read < 2 * MOST_BYTES


def test_of_very_many_ranks_one_trace_is_read(tmp_path: Path) -> None:
    many = {"hardware": {"cpus_allotted": 128}}
    run = planted(tmp_path, *[HEALTHY] * 128, comm=1.0, traces=traces(128), info=many)
    assert sum(run.events(0, rank).stat().st_size for rank in range(128)) > MOST_BYTES
    found = verdict_of(run)
    assert (found.limit, found.sure) == ("compute", True)


GPU: Event = {
    **{"utilization": 96.0, "temperature": 60.0, "clock": 1900.0, "clock_max": 1980.0},
    **{"power": 500.0, "power_limit": 700.0, "neighbours": 0, "cpus_allotted": 16},
}


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"clock": 1200.0}, "1,200 MHz"),
        ({"clock": 1200.0, "power": 398.0, "power_limit": 400.0}, "power limit is 400 W"),
        ({"clock": 1200.0, "temperature": 88.0}, "hot (88 °C"),
        ({"neighbours": 1}, "another process"),
        ({"cpus_allotted": 2}, "2 CPUs, the others 16"),
    ],
)
def test_a_straggler_s_machine_says_why(tmp_path: Path, odd: Event, reason: str) -> None:
    def events(rank: int) -> list[Event]:
        return [{"event": "device", **GPU, **(odd if rank == 2 else {})}] * 5

    late = {**HEALTHY, "forward": 60.0, "backward": 120.0}
    shown = dict.fromkeys(range(4), gpu_trace(97.0)) | {2: gpu_trace(187.0)}
    run = planted(tmp_path, HEALTHY, HEALTHY, late, HEALTHY, traces=shown, events=events)
    found = verdict_of(run)
    assert (found.limit, found.rank, found.sure) == ("straggler", 2, True)
    assert reason in found.why


def test_what_no_rank_has_written_and_ranks_that_differ(tmp_path: Path) -> None:
    run = planted(tmp_path, HEALTHY, HEALTHY)
    run.events(0, 1).write_text('{"v": 1, "t": 1.0, "event": "start", "rank": 1}\n')
    found = verdict_of(run)
    assert found.limit == "unknown" and "no optimizer step was seen on rank 1" in found.why
    run.events(0, 0).write_bytes(b"\xff\x00[[[[" * 100)
    assert verdict_of(run).limit == "unknown"


def test_steps_without_phases_are_not_judged(tmp_path: Path) -> None:
    run = planted(tmp_path, HEALTHY)
    run.events(0, 0).write_text(run.events(0, 0).read_text().replace('"forward"', '"former"'))
    found = verdict_of(run)
    assert found.limit == "unknown" and "the probe was off" in found.why


@pytest.mark.parametrize(
    ("info", "typed"),
    [
        ({"job_file": None, "overrides": []}, ""),
        ({"job_file": "job.yaml", "overrides": ["epochs=2", "env.KEY=abc"]}, " job.yaml epochs=2"),
        ({"job_file": None, "overrides": ["task=language"]}, " task=language"),
        ({}, " JOB.yaml"),
    ],
)
def test_a_job_is_named_as_it_was_typed(tmp_path: Path, info: Any, typed: str) -> None:
    task = {"step": 0}  # only tasks count their steps from there
    found = verdict_of(planted(tmp_path, HEALTHY, traces={0: cpu_trace()}, info=info, start=task))
    assert found.next == f"allranks bench scaling --layouts 1x1,1x2{typed}"


@pytest.mark.parametrize(("every", "limit"), [(3, "host"), (10, "pauses")])
def test_work_in_many_steps_is_no_pause(tmp_path: Path, every: int, limit: str) -> None:
    def plotted(rank: int, number: int, step: Event) -> Event:
        return {**step, "other": step["other"] + 0.12 * (number % every == 1)}

    # One of the four traced steps.
    trace = cpu_trace(host=30.0, local=128.8, lines=[["train.py:27", 0.03]])
    found = verdict_of(planted(tmp_path, HEALTHY, each=plotted, traces={0: trace}))
    assert found.limit == limit
    assert found.line == ("train.py:27" if limit == "host" else None)
    assert found.gain is not None and found.gain > 1.1
