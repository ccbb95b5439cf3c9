"""Which rank keeps the others waiting, from what the ranks have written."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from allranks.doctor import hang as doctor_hang
from allranks.doctor.finding import Finding
from allranks.doctor.hang import Stall, hang, hung, judge, stack_in_log
from allranks.doctor.log_search import num_lines
from allranks.job.job import parse_job
from allranks.job.values import Duration
from allranks.launch.stall_watch import StallWatch, ends_of, frames_in_words
from allranks.run.events import append_event
from allranks.run.folder import RunDir
from allranks.run.record import RankRecord
from allranks.run.stacks import FOLLOW, Stack, from_lines, to_lines
from allranks.run.stalls import (
    ALIKE_SECONDS,
    END_SCRIPT_SECONDS,
    FIRST_STEP_SECONDS,
    RankState,
    blame,
    ended_for,
    is_stalled,
    patience_to_end,
    patience_with,
    read_states,
    silence,
    state_of,
    who_is_where,
)
from allranks.run.tracebacks import Frame
from allranks.show.numbers import duration

OWN = Stack(1, (Frame("/me/train.py", 9, "stuck"), Frame("/me/train.py", 20, "<module>")), "py-spy")
WAITS = Stack(
    2,
    (
        Frame("/e/site-packages/torch/distributed/x.py", 1, "all_reduce"),
        Frame("/me/train.py", 8, "f"),
    ),
    "",
)
BACKWARD = Stack(
    3, (Frame("/e/site-packages/torch/autograd/graph.py", 1, "run"), Frame("/me/t.py", 8, "f")), ""
)


START = {"event": "start", "t": 1.0}


def states(*changes: dict[str, Any]) -> list[RankState]:
    base = RankState(rank=0, node="n1", progress=100.0, heard=110.0, step=20, usual=0.1)
    return [replace(base, rank=rank, **change) for rank, change in enumerate(changes)]


def step(t: float, number: int, seconds: float = 0.1) -> dict[str, Any]:
    return {"event": "step", "t": t, "step": number, "seconds": seconds}


def test_a_state_is_how_far_a_rank_has_come() -> None:
    beat = {"event": "device", "t": 9.0, "step": 3, "doing": "wait", "collectives": 7}
    start = {"event": "start", "t": 1.0, "host": "n1"}
    found = state_of(RankRecord(0, [start, step(5.0, 1), step(6.5, 2), beat, beat]))
    assert (found.node, found.progress, found.heard, found.step) == ("n1", 6.5, 9.0, 2)
    assert (found.made, found.doing, found.collectives) == (3, "wait", 7)
    assert (found.usual, found.longest) == (0.1, 1.5)


def test_slow_first_steps_are_no_pauses_and_a_step_may_have_lost_its_time() -> None:
    times = [10.0, 20.0, 30.0, *(31.0 + n for n in range(12))]
    events = [step(at, number) for number, at in enumerate(times, start=1)]
    del events[5]["seconds"]  # its device was lost
    found = state_of(RankRecord(0, [START, *events]))
    assert (found.usual, found.longest) == (0.1, 1.0)


def test_a_count_that_still_grows_cannot_be_compared() -> None:
    beats = [{"event": "device", "t": 8.0 + n, "collectives": 7 + n} for n in range(2)]
    found = state_of(RankRecord(0, [START, step(6.0, 4), *beats]))
    assert found.collectives is None and found.exchanges  # an evaluation that exchanges something
    waiting = replace(found, stack=WAITS, usual=0.01)
    assert not is_stalled([waiting, waiting], None, 100.0)
    assert is_stalled([replace(waiting, exchanges=False)] * 2, None, 100.0)


def test_a_sign_of_life_from_before_the_last_step_tells_nothing() -> None:
    beat = {"event": "device", "t": 5.0, "step": 3, "doing": "data", "collectives": 7}
    found = state_of(RankRecord(0, [START, beat, step(6.0, 4)]))
    assert (found.doing, found.collectives) == (None, None)


def test_patience_follows_the_run_s_own_steps() -> None:
    assert patience_with(states({"usual": None})) == FIRST_STEP_SECONDS
    assert patience_with(states({"usual": 0.01})) == 10.0
    assert patience_with(states({"usual": 0.01, "longest": 30.0})) == 90.0  # an evaluation, say
    assert patience_with(states({"usual": 60.0})) == 1200.0
    assert patience_with(states({"usual": 60.0}), asked=5.0) == 5.0


def test_ranks_that_are_alike_have_longer() -> None:
    """They may be at an evaluation; the watcher, which looks at no stacks, takes them for that."""
    assert patience_with(states({"usual": 0.01}), stands_out=False) == ALIKE_SECONDS
    assert patience_with(states({"usual": 60.0}), stands_out=False) == 2400.0
    assert patience_with(states({"usual": None}), stands_out=False) > FIRST_STEP_SECONDS
    assert patience_to_end(30, has_stepped=True, is_script=True) == 30
    assert 30 < patience_to_end(30, has_stepped=False, is_script=False) < END_SCRIPT_SECONDS
    assert patience_to_end(30, has_stepped=False, is_script=True) == END_SCRIPT_SECONDS


def test_silence_is_since_the_last_rank_got_on() -> None:
    some = states({"progress": 100.0}, {"progress": 90.0}, {"progress": 200.0, "ended": "finished"})
    assert silence(some, 130.0) == 30.0
    assert silence([], 130.0) == 0.0


@pytest.mark.parametrize(
    ("changes", "culprits", "sure"),
    [
        ([{"collectives": 25}, {"collectives": 26}, {"collectives": 26}], (0,), True),
        ([{"stack": WAITS}, {"stack": OWN}], (1,), True),
        ([{"stack": BACKWARD, "doing": "wait"}, {"stack": OWN}], (1,), True),
        ([{"stack": BACKWARD}, {"stack": OWN}], (1,), False),
        # One is on another node: its own word stands in for its stack.
        ([{"doing": "wait"}, {"stack": OWN, "doing": "other"}], (1,), True),
        ([{"doing": "wait"}, {"doing": "data"}, {"doing": "wait"}], (1,), False),
        ([{"doing": "wait"}, {"heard": 60.0}], (1,), False),
        ([{"made": 12}, {"made": 11}, {"made": 11}], (1, 2), False),
        ([{}, {"ended": "finished"}], (1,), True),
        ([{"doing": "wait"}, {"kernel": "T"}], (1,), True),
        ([{"doing": "wait"}, {"kernel": "D"}], (1,), False),
    ],
)
def test_the_rank_that_did_not_come_is_found(
    changes: list[dict[str, Any]], culprits: tuple[int, ...], sure: bool
) -> None:
    found = blame(states(*changes))
    assert found is not None
    assert (found.ranks, found.is_sure) == (culprits, sure)


@pytest.mark.parametrize(
    "changes",
    [
        [{}, {}],
        [{"stack": OWN}, {"stack": OWN}],
        [{"stack": WAITS}, {"stack": WAITS}],
        [{"doing": "wait"}, {"doing": "wait"}],
        [{"collectives": 3}, {"collectives": 3}],
        [{"collectives": 3}, {"collectives": None}],
        [{"stack": OWN}],
    ],
)
def test_nobody_is_blamed_where_nothing_tells(changes: list[dict[str, Any]]) -> None:
    assert blame(states(*changes)) is None


def make_run(tmp_path: Path, ranks: int = 2) -> RunDir:
    run = RunDir(tmp_path / "job-20261115-120000-abcd")
    for rank in range(ranks):
        append_event(run.events(0, rank), "start", rank=rank, host="n1")
        for number in (1, 2, 3):
            append_event(run.events(0, rank), "step", step=number, seconds=0.01)
    return run


def judged(
    states: list[RankState], seconds: float, *, after: float | None = None, **more: Any
) -> list[Finding]:
    run = RunDir(Path("/runs/job-20261115-120000-abcd"))
    return judge(Stall(run=run, attempt=0, states=states, seconds=seconds, **more), after=after)


def test_a_finding_names_rank_node_line_and_fix() -> None:
    some = states({"stack": WAITS, "collectives": 26}, {"stack": OWN, "collectives": 25})
    (found,) = judged(some, 150.0, after=5.0, sources={OWN.frames[0]: "x.item()"})
    assert (found.cause, found.rank, found.node) == ("rank-missing-from-collective", 1, "n1")
    assert found.confidence == "high"
    assert judged(some, 30.0, after=5.0)[0].confidence == "medium"  # it may be saving
    assert found.title == who_is_where(some, blame(some))  # what the launcher says by itself
    assert "train.py:9 in stuck" in found.title
    assert (found.evidence[0].file, found.evidence[0].line) == ("/me/train.py", 9)
    assert found.evidence[0].text == "rank 1 is in stuck: x.item()"
    assert found.evidence[1].file.endswith("rank-1.jsonl")
    assert "25 collectives, others 26" in found.evidence[1].text
    assert "/me/train.py:9" in found.fix


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            [{"stack": WAITS}, {"stack": OWN}, {"stack": WAITS}],
            "rank 1 is at train.py:9 in stuck; ranks 0 and 2 wait for it in all_reduce",
        ),
        (
            [{"stack": WAITS}, {"stack": OWN}, {"stack": OWN}],
            "ranks 1 and 2 are at train.py:9 in stuck; rank 0 waits for them in all_reduce",
        ),
        (
            [{"stack": BACKWARD, "doing": "wait"}, {"stack": OWN, "node": "n2"}],
            "rank 1 on n2 is at train.py:9 in stuck; rank 0 waits for it in run",
        ),
        (
            [{"collectives": 26}, {"collectives": 25}],  # no stacks: another machine, say
            "rank 1 has reached 25 collectives, others 26; rank 0 waits for it",
        ),
        (
            [{"made": 12}, {"made": 11}, {"made": 11}],
            "ranks 1 and 2 have reached 11 steps, others 12; rank 0 waits for them",
        ),
        (
            [{"stack": WAITS}, {"kernel": "T"}],
            "rank 1 is stopped by a signal; rank 0 waits for it in all_reduce",
        ),
        (
            [{"stack": WAITS}, {"ended": "finished"}],
            "rank 1 has finished; rank 0 waits for it in all_reduce",
        ),
        ([{"stack": OWN}], "rank 0 is at train.py:9 in stuck"),
        ([{"stack": OWN}, {"stack": OWN}], "ranks 0 and 1 are at train.py:9 in stuck"),
        ([{"stack": WAITS}] * 2, "ranks 0 and 1 wait in all_reduce at train.py:8 in f"),
        ([{"doing": "data"}] * 2, "ranks 0 and 1 wait for data"),
        ([{}, {}], "no rank stands out"),
    ],
)
def test_who_is_where_is_one_line(changes: list[dict[str, Any]], line: str) -> None:
    some = states(*changes)
    assert who_is_where(some, blame(some)) == line


def test_many_ranks_are_counted() -> None:
    some = states({"stack": OWN}, *[{"stack": WAITS}] * 63)
    assert who_is_where(some, blame(some)) == (
        "rank 0 is at train.py:9 in stuck; ranks 1-63 wait for it in all_reduce"
    )


def test_nobody_waits_for_a_rank_that_has_finished_while_another_evaluates() -> None:
    assert blame(states({"stack": OWN}, {"ended": "finished"})) is None


def test_a_rank_that_has_finished_has_had_fewer_inputs() -> None:
    (found,) = judged(states({"stack": WAITS}, {"ended": "finished"}), 30.0, after=5.0)
    assert (found.cause, found.rank) == ("uneven-inputs", 1)
    assert judged(states({"stack": WAITS}, {"ended": "failed"}), 30.0, after=5.0) == []


def test_without_stacks_the_phase_says_where_a_rank_is() -> None:
    found = blame(states({"doing": "forward"}, {"doing": "wait"}))
    assert found is not None and found.ranks == (0,) and not found.is_sure
    assert "is at 'forward'" in found.why


def test_a_rank_is_named_with_its_stage() -> None:
    own, waits = {"stack": OWN, "layout": "1x4:pp=2"}, {"stack": WAITS, "layout": "1x4:pp=2"}
    known = states(waits, waits, waits, own)
    assert who_is_where(known, blame(known)) == (
        "rank 3 (stage 1, replica 1) is at train.py:9 in stuck; ranks 0-2 wait for it in all_reduce"
    )
    known = states(waits, own, waits, own)
    assert who_is_where(known, blame(known)).startswith("ranks 1 and 3 (stage 1) are at train.py")


def test_ranks_in_different_exchanges_are_told_apart() -> None:
    other = Stack(4, (WAITS.frames[0], Frame("/me/train.py", 11, "f")), "")
    apart = states({"stack": WAITS, "collectives": 8}, {"stack": other, "collectives": 7})
    (found,) = judged(apart, 30.0, after=5.0)
    assert (found.cause, found.rank) == ("collective-mismatch", None)
    assert found.title == (
        "ranks wait in different exchanges: rank 0 waits in all_reduce at train.py:8 in f; "
        "rank 1 waits in all_reduce at train.py:11 in f"
    )
    # Stages wait for different neighbours, and have sent different numbers of messages.
    (found,) = judged([replace(one, layout="1x2:pp=2") for one in apart], 130.0)
    assert (found.cause, found.rank) == ("no-progress", None)


def test_a_rank_that_never_joined() -> None:
    meeting = Frame(
        "/e/site-packages/torch/distributed/distributed_c10d.py", 1, "init_process_group"
    )
    waits = Stack(2, (WAITS.frames[0], meeting, Frame("/me/train.py", 8, "f")), "")
    (found,) = judged(states({"stack": waits}, {"stack": OWN}), 130.0)
    assert (found.cause, found.rank, found.confidence) == ("rendezvous-timeout", 1, "high")


def test_ranks_that_are_alike_are_a_finding_only_after_long() -> None:
    alike = states({"stack": OWN, "doing": "data"}, {"stack": OWN, "doing": "data"})
    assert judged(alike, 30.0) == []  # an evaluation, say
    (found,) = judged(alike, 500.0)
    assert (found.cause, found.rank, found.confidence) == ("no-progress", None, "low")
    assert "waits for its data" in found.fix


def test_a_run_that_makes_steps_does_not_hang(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert hang(run) == []
    assert hang(RunDir(tmp_path / "nothing")) == []
    assert read_states(run, 0)[1].step == 3


def test_a_failure_is_not_called_a_hang(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    append_event(run.events(0, 1), "end", state="failed", exit=1)
    assert hang(run, after=0.0) == []


def test_only_events_that_are_shown_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, count = make_run(tmp_path, ranks=20), Mock(wraps=num_lines)
    monkeypatch.setattr(doctor_hang, "num_lines", count)
    (found,) = hang(run, after=0.0)
    shown = [(str(run.events(0, rank)), 4) for rank in range(doctor_hang.MOST_EVIDENCE)]
    assert [(row.file, row.line) for row in found.evidence] == shown
    assert [(str(each.args[0]), 4) for each in count.call_args_list] == shown


def test_the_stacks_of_a_run_that_was_ended_are_read_from_its_logs(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    when = "2099-01-01T00:00:00.000+00:00"
    for rank, stack in enumerate((WAITS, OWN)):
        error = {"what": "made no step for 4s", "fix": "", "stall": True}
        append_event(run.events(0, rank), "end", state="failed", exit=1, error=error)
        text = f"epoch 1\nallranks: {when}: no step for 4s{FOLLOW}\nallranks: "
        run.log(0, rank).write_text(f"{text}{frames_in_words(stack)}\n")
    (found,) = hung(run)
    assert (found.rank, found.cause) == (1, "rank-missing-from-collective")
    assert "train.py:9" in found.title and "end the run" not in found.fix


def test_a_run_that_got_on_after_its_stacks_were_printed_did_not_hang(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for rank, stack in enumerate((WAITS, OWN)):
        append_event(run.events(0, rank), "end", state="failed", exit=1)
        text = f"allranks: 2001-01-01T00:00:00.000+00:00: no step for 4s{FOLLOW}\n"
        run.log(0, rank).write_text(text + frames_in_words(stack))
    assert hung(run) == []
    assert stack_in_log(tmp_path / "missing.log") is None


def test_other_nodes_answers_are_read_as_srun_mixes_them_and_noise_is_not() -> None:
    here = Stack(9, tuple(Frame("/me/a.py", line, "f") for line in range(60)), "py-spy")
    there = Stack(9, tuple(Frame("b" * 4000, line, "g" * 4000) for line in range(60)), "its log")
    one, other = to_lines(0, here).splitlines(), to_lines(1, there).splitlines()
    assert max(map(len, [*one, *other])) < 1024  # longer ones srun cuts, and mixes
    mixed = [line for pair in zip(one, other, strict=True) for line in pair]
    found = from_lines("\n".join(["srun: error: something", '["no", "mapping"]', "{", *mixed]))
    assert found[0] == here
    assert [call.line for call in found[1].frames] == list(range(60))
    assert found[1].frames[0].file.startswith("b") and len(found) == 2


def test_the_ends_of_a_run_that_was_ended_tell_the_cause_from_its_echoes() -> None:
    some = states({"stack": WAITS}, {"stack": OWN})
    ends = ends_of(some, blame(some), Duration(600), RunDir(Path("runs/job-1").absolute()))
    assert ends[1]["state"] == "failed" and ends[1]["exit"] == 1 and not ends[1]["error"]["echo"]
    assert ends[1]["error"]["what"] == (
        "made no step for 10m, is at train.py:9 in stuck; rank 0 waits for it in all_reduce"
    )
    assert "allranks doctor job-1" in ends[1]["error"]["fix"]
    assert ends[0]["exit"] is None and ends[0]["error"]["echo"]


def test_a_run_with_a_checkpoint_is_stopped_and_says_why(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    some = states({"stack": WAITS}, {"stack": OWN})
    assert ended_for(run, 0) is None
    for rank, end in ends_of(some, blame(some), Duration(600), run, can_go_on=True).items():
        append_event(run.events(0, rank), "end", **end)
    assert run.ended_state() == "stopped"
    assert (ended_for(run, 0) or "").startswith("rank 1: made no step for 10m, is at train.py:9")


def watch(run: RunDir, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> StallWatch:
    monkeypatch.setattr("allranks.launch.stall_watch.time.monotonic", lambda: clock[0])
    job = parse_job({"command": "python x.py", "stall_timeout": "20s"})
    return StallWatch(run, job, 0)


def test_a_launcher_ends_ranks_that_make_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, clock = make_run(tmp_path), [0.0]
    watched = watch(run, clock, monkeypatch)
    for rank in (0, 1):
        run.log(0, rank).write_text("")
    never = [2**22 + 1, 2**22 + 2]  # no such processes
    seen = []
    for now in range(5, 60, 5):
        clock[0] = float(now)
        if now == 15:
            append_event(run.events(0, 0), "step", step=4, seconds=0.01)
        seen.append(watched.check(0, never))
        if seen[-1]:
            break
    assert now == 35 and seen.count(True) == 1  # the step at 15, and 20 s
    assert watched.end_of(0) is not None and watched.end_of(7) is None
    assert FOLLOW in run.log(0, 0).read_text()
    clock[0] = 80.0
    assert not watched.check(0, never)  # once is enough


def test_a_launcher_says_who_is_where_until_the_ranks_get_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, clock, began = make_run(tmp_path), [0.0], time.time()
    watched = watch(run, clock, monkeypatch)
    looks: list[float] = []

    def looked(some: list[RankState], processes: dict[int, int]) -> list[RankState]:
        looks.append(clock[0])
        return [replace(state, stack=(WAITS, OWN)[state.rank]) for state in some]

    monkeypatch.setattr("allranks.launch.stall_watch.with_stacks", looked)
    monkeypatch.setattr("allranks.launch.stall_watch.stacks.is_gone", lambda process: False)
    monkeypatch.setattr("allranks.launch.stall_watch.time.time", lambda: began + clock[0])
    told = []
    for now in range(5, 150, 5):
        clock[0] = float(now)
        assert not watched.check(0, [2**22 + 1, 2**22 + 2], may_end=False)
        told.append(watched.line())
    line, seconds = told[-1] or ("", 0.0)
    words = "rank 1 is at train.py:9 in stuck; rank 0 waits for it in all_reduce"
    assert line == f"no step for {duration(seconds, whole=True)}: {words}" and told[0] is None
    assert len(looks) == 4  # ever less often
    append_event(run.events(0, 0), "step", step=4, seconds=0.01)
    clock[0] += 5.0
    assert not watched.check(0, [2**22 + 1, 2**22 + 2]) and watched.line() is None


def test_ranks_whose_probe_is_silent_are_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, clock = make_run(tmp_path), [0.0]
    watched = watch(run, clock, monkeypatch)
    for rank in (0, 1):
        run.log(0, rank).write_text("")
    monkeypatch.setattr(
        "allranks.launch.stall_watch.time.time", lambda: 4e9
    )  # long after all events
    seen = []
    for now in range(5, 200, 5):
        clock[0] = float(now)
        seen.append(watched.check(0, [2**22 + 1, 2**22 + 2]))
    assert not any(seen) and FOLLOW in run.log(0, 0).read_text()


def test_a_dump_is_not_why_a_rank_raised_later(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    when = "2099-01-01T00:00:00.000+00:00"
    for rank, stack in enumerate((WAITS, OWN)):
        append_event(run.events(0, rank), "end", state="failed", exit=1)
        text = f"allranks: {when}: no step for 15m{FOLLOW}\nallranks: "
        run.log(0, rank).write_text(f"{text}{frames_in_words(stack)}\nValueError: no data\n")
    assert hung(run) == []


def test_the_first_step_is_given_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, clock = RunDir(tmp_path / "job-20261115-120000-abcd"), [0.0]
    append_event(run.events(0, 0), "start", rank=0, host="n1")
    run.log(0, 0).write_text("")
    watched = watch(run, clock, monkeypatch)
    seen = []
    for now in range(5, 3700, 5):
        clock[0] = float(now)
        if watched.check(0, [2**22 + 1]):
            seen.append(now)
    assert seen == [3605]  # a script may prepare its data first


def test_a_launcher_that_was_stopped_itself_blames_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, clock = make_run(tmp_path), [0.0]
    watched = watch(run, clock, monkeypatch)
    for now in (5.0, 10.0, 500.0):
        clock[0] = now
        assert not watched.check(0, [2**22 + 1])


def test_without_a_limit_stacks_are_printed_and_nothing_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, clock = make_run(tmp_path, 1), [0.0]
    run.log(0, 0).write_text("")
    monkeypatch.setattr("allranks.launch.stall_watch.time.monotonic", lambda: clock[0])
    watched = StallWatch(run, parse_job({"command": "python x.py", "timeout": "40s"}), 0)
    for now in range(5, 100, 5):
        clock[0] = float(now)
        assert not watched.check(0, [2**22 + 1])
    assert run.log(0, 0).read_text().count(FOLLOW) == 1
