"""Marks along a step are read as phases that sum to it."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.timing.timeline import (
    AFTER,
    AROUND,
    BACKWARD,
    BEGIN,
    DATA,
    END,
    FORWARD,
    MAX_MARKS,
    MAX_WAITS,
    OPTIMIZER,
    OTHER,
    PHASES,
    REPLAY,
    WAIT,
    Mark,
    Step,
    Timeline,
    shares,
)

LABELS = [DATA, FORWARD, BACKWARD, WAIT, OPTIMIZER, OTHER, AFTER, AROUND]


def phases(marks: Sequence[Mark], unix: float = 0.0) -> dict[str, Any]:
    return read(Step([*marks], unix))


def read(one: Step) -> dict[str, Any]:
    """The fields of a step's event."""
    fields: dict[str, Any] = json.loads(f"{{{one.text()}}}")
    return fields


def step(*labels: str, seconds: float = 1.0) -> dict[str, Any]:
    """The phases of a step in which each label lasts as long."""
    return phases([(label, n * seconds, None, None) for n, label in enumerate([*labels, END])])


def of(fields: dict[str, Any]) -> dict[str, float]:
    return {name: fields[name] for name in PHASES if fields[name]}


marks = st.lists(st.tuples(st.sampled_from(LABELS), st.floats(0, 10)), min_size=1, max_size=60).map(
    lambda drawn: [
        (label, at, None, None)
        for label, at in zip(
            [*(label for label, _ in drawn), END],
            itertools.accumulate((took for _, took in drawn), initial=0.0),
            strict=True,
        )
    ]
)


def test_waiting_is_also_summed_by_the_name_of_the_exchange() -> None:
    labels = [
        *((FORWARD, None), (AROUND, "all-gather"), (WAIT, "all-gather"), (FORWARD, None)),
        *((WAIT, None), (WAIT, "reduce-scatter"), (WAIT, None), (END, 1)),
    ]
    fields = phases([(label, float(n), None, note) for n, (label, note) in enumerate(labels)])
    assert fields["wait"] == 5 and fields["waits"] == [2, 3]
    assert fields["exchanges"] == {"all-gather": 2, "reduce-scatter": 1}
    assert "exchanges" not in step(FORWARD, WAIT, FORWARD)


@given(marks)
def test_phases_sum_to_the_step(step_marks: list[Mark]) -> None:
    fields = phases(step_marks)
    took = step_marks[-1][1] - step_marks[0][1]
    assert fields["seconds"] == pytest.approx(took, abs=1e-6)
    assert sum(fields[name] for name in PHASES) == pytest.approx(fields["seconds"], abs=1e-5)
    assert all(fields[name] >= 0 for name in PHASES)


@given(marks)
def test_waits_sum_to_the_wait(step_marks: list[Mark]) -> None:
    fields = phases(step_marks)
    if "waits" in fields:
        assert sum(fields["waits"]) == pytest.approx(fields[WAIT], abs=1e-5)
        assert 1 < len(fields["waits"]) <= MAX_WAITS
    assert ("arrive" in fields) == any(
        label in (WAIT, AROUND) or (label == AFTER and following in (WAIT, AROUND))
        for (label, *_), (following, *_) in itertools.pairwise(step_marks)
    )


def test_a_plain_step() -> None:
    found = step(OTHER, DATA, FORWARD, BACKWARD, AFTER, OPTIMIZER)
    # Between backward and update gradients are clipped: that is part of the update.
    assert of(found) == {OTHER: 1, DATA: 1, FORWARD: 1, BACKWARD: 1, OPTIMIZER: 2}
    assert "arrive" not in found and "waits" not in found


def test_a_script_without_a_loader_computes_from_the_end_of_its_last_step() -> None:
    assert of(step(OTHER, BACKWARD, AFTER, OPTIMIZER)) == {FORWARD: 1, BACKWARD: 1, OPTIMIZER: 2}


def test_between_micro_batches_the_forward_pass_runs() -> None:
    found = step(DATA, FORWARD, BACKWARD, AFTER, BACKWARD, AFTER, OPTIMIZER)
    assert of(found) == {DATA: 1, FORWARD: 2, BACKWARD: 2, OPTIMIZER: 2}


def test_between_micro_batches_of_a_loader_the_rest_is_other() -> None:
    found = step(DATA, FORWARD, BACKWARD, AFTER, DATA, FORWARD, BACKWARD, AFTER, OPTIMIZER)
    assert of(found) == {DATA: 2, FORWARD: 2, BACKWARD: 2, OTHER: 1, OPTIMIZER: 2}


def test_a_closure_s_update_follows_its_backward_pass() -> None:
    assert of(step(DATA, FORWARD, BACKWARD, AFTER))[OPTIMIZER] == 1


def test_preparing_an_exchange_belongs_to_it() -> None:
    found = step(FORWARD, BACKWARD, WAIT, AFTER, WAIT, AFTER, OPTIMIZER)
    assert of(found) == {FORWARD: 1, BACKWARD: 1, WAIT: 3, OPTIMIZER: 2}
    assert "waits" not in found  # one exchange


def test_what_a_rank_does_around_an_exchange_is_its_own() -> None:
    found = step(BACKWARD, AROUND, WAIT, AROUND, BACKWARD, WAIT, AFTER, OPTIMIZER)
    assert found[WAIT] == 4 and "waits" not in found
    assert found["own"] == [2]
    by_hand = step(BACKWARD, AFTER, AROUND, WAIT, AROUND, AFTER, OPTIMIZER)
    assert by_hand[WAIT] == 4 and by_hand["own"] == [3]
    assert "own" not in step(BACKWARD, WAIT, AFTER, OPTIMIZER)
    two = step(AROUND, WAIT, FORWARD, BACKWARD, WAIT, AFTER)
    assert (two["waits"], two["own"]) == ([2, 1], [1, 0])
    many = step(*[AROUND, WAIT, FORWARD] * (MAX_WAITS + 1))
    assert many["own"] == [MAX_WAITS + 1] and "waits" not in many


def test_the_exchanges_of_one_backward_pass_are_one() -> None:
    found = step(FORWARD, BACKWARD, WAIT, BACKWARD, WAIT, BACKWARD, WAIT, AFTER, OPTIMIZER)
    assert found[WAIT] == 3
    assert "waits" not in found


def test_exchanges_of_two_passes_are_two() -> None:
    found = step(WAIT, FORWARD, BACKWARD, WAIT, AFTER, OPTIMIZER)
    assert found["waits"] == [1, 1]
    assert step(BACKWARD, WAIT, AFTER, BACKWARD, WAIT, AFTER)["waits"] == [1, 1]


def test_arrive_is_when_the_longest_wait_began() -> None:
    told = [
        (WAIT, 0.0, None, None),
        (FORWARD, 1.0, None, None),
        (WAIT, 2.0, None, None),
        (OTHER, 7.0, None, None),
        (END, 8.0, None, None),
    ]
    found = phases(told, unix=100.0)
    assert (found["arrive"], found["left"]) == (102.0, 107.0)


def test_too_many_waits_are_known_as_a_sum() -> None:
    many = [WAIT, FORWARD] * (MAX_WAITS + 1)
    found = step(*many)
    assert found[WAIT] == MAX_WAITS + 1
    assert "waits" not in found


def test_steps_follow_each_other_without_a_gap() -> None:
    timeline = Timeline()
    before = time.perf_counter()
    timeline.mark(DATA)
    begun = time.perf_counter()
    took = []
    for _ in range(20):
        timeline.mark(FORWARD)
        timeline.mark(BACKWARD)
        last = time.perf_counter()
        took.append(read(timeline.close())["seconds"])
    after = time.perf_counter()
    # Rounded to tenths of microseconds, each.
    assert last - begun - 1e-5 <= sum(took) <= after - before + 1e-5
    assert timeline.label == OTHER


def test_the_first_step_begins_with_its_first_mark() -> None:
    timeline = Timeline()
    time.sleep(0.05)
    before = time.perf_counter()
    timeline.mark(FORWARD)
    seconds = read(timeline.close())["seconds"]
    assert seconds <= time.perf_counter() - before + 1e-6


def test_what_came_before_a_restart_belongs_to_no_step() -> None:
    timeline = Timeline()
    timeline.mark(DATA)
    timeline.mark(FORWARD)
    timeline.restart()
    timeline.mark(BACKWARD)
    found = read(timeline.close())
    assert found[DATA] == 0


@dataclass
class FakeEvent:
    """A device that is behind its host."""

    at: float  # seconds
    passed: bool = False
    waited: int = 0

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waited += 1
        self.passed = True

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at - self.at)


def test_a_device_s_phases_are_times_of_the_device() -> None:
    events = [FakeEvent(0.0), FakeEvent(2.0), FakeEvent(7.0)]
    timeline = Timeline()
    timeline.record_event = iter(events).__next__
    timeline.mark(FORWARD)
    timeline.mark(BACKWARD)
    closed = timeline.close()
    assert not closed.ready()
    events[-1].passed = True
    assert closed.ready()
    found = read(closed)
    assert (found[FORWARD], found[BACKWARD], found["seconds"]) == (2.0, 5.0, 7.0)
    assert not any(event.waited for event in events)


def test_a_device_is_waited_for_only_when_the_value_is_asked_for() -> None:
    events = [FakeEvent(0.0), FakeEvent(1.0)]
    timeline = Timeline()
    timeline.record_event = iter(events).__next__
    timeline.mark(FORWARD)
    closed = timeline.close()
    assert events[-1].waited == 0
    assert read(closed)["seconds"] == 1.0
    assert events[-1].waited == 1


def test_steps_are_taken_once_and_lose_nothing_to_a_thread_that_takes_them() -> None:
    timeline, taken, is_over = Timeline(), [], threading.Event()

    def take() -> None:
        while not is_over.is_set():
            taken.extend(timeline.take_steps())

    taker = threading.Thread(target=take)
    taker.start()
    timeline.restart()
    for _ in range(3000):
        timeline.mark(DATA)
        timeline.mark(BACKWARD)
        timeline.end()
    is_over.set()
    taker.join()
    taken += timeline.take_steps()
    assert [step[-1][3] for step in taken] == list(range(1, 3001))
    assert all([label for label, *_ in step[1:]] == [DATA, BACKWARD, END] for step in taken)
    assert all(one[-1] == following[0] for one, following in itertools.pairwise(taken))
    assert timeline.take_steps() == []


def test_what_a_restart_leaves_out_costs_no_step_before_it() -> None:
    timeline = Timeline()
    timeline.mark(DATA)
    timeline.end()
    timeline.mark(DATA)
    timeline.restart()
    timeline.mark(FORWARD)
    timeline.end()
    first, second = timeline.take_steps()
    assert [label for label, *_ in first] == [DATA, END]
    assert [label for label, *_ in second] == [BEGIN, FORWARD, END]


def test_a_script_that_only_reads_its_data_keeps_few_marks() -> None:
    timeline = Timeline()
    timeline.restart()
    for _ in range(MAX_MARKS):
        timeline.mark(DATA)
        timeline.mark(FORWARD)
        timeline.shorten()
    timeline.end()
    (began,) = timeline.take_steps()
    assert len(began) < MAX_MARKS + 3
    fields = phases(began)
    assert fields["seconds"] == pytest.approx(began[-1][1] - began[0][1], abs=1e-3)
    assert fields["other"] > 0


def test_steps_that_nobody_takes_for_long_are_kept() -> None:
    timeline = Timeline()
    for _ in range(MAX_MARKS):  # a disk that does not answer holds up whoever takes them
        timeline.mark(BACKWARD)
        timeline.end()
        timeline.shorten()
    taken = timeline.take_steps()
    assert [step[-1][3] for step in taken] == list(range(1, MAX_MARKS + 1))


def test_what_a_rank_does_can_be_asked_at_any_moment() -> None:
    timeline = Timeline()
    assert timeline.doing() == (OTHER, 0.0)
    timeline.mark(WAIT)
    time.sleep(0.01)
    doing, seconds = timeline.doing()
    assert doing == WAIT and 0.01 <= seconds < 60
    timeline.mark(AFTER)
    assert timeline.doing()[0] == OTHER


def test_a_replayed_step_is_divided_as_it_was_when_it_was_captured() -> None:
    captured = [(FORWARD, 0.0), (BACKWARD, 1.0), (AFTER, 3.0), (OPTIMIZER, 3.5), (OTHER, 4.0)]
    of_graph = shares([(label, at, None, None) for label, at in captured])
    assert of_graph == {FORWARD: 0.25, BACKWARD: 0.5, OPTIMIZER: 0.25}
    replayed: list[Mark] = [
        (DATA, 0.0, None, None),
        (REPLAY, 1.0, None, (of_graph,)),
        (OTHER, 3.0, None, None),
        (END, 3.5, None, None),
    ]
    expected = {DATA: 1.0, FORWARD: 0.5, BACKWARD: 1.0, OPTIMIZER: 0.5, OTHER: 0.5}
    assert of(phases(replayed)) == expected
    replayed[1] = (REPLAY, 1.0, None, ({},))  # nothing is known about its phases
    assert of(phases(replayed)) == {DATA: 1.0, FORWARD: 2.0, OTHER: 0.5}
