"""Ranks agree on the step to act at, though they run at their own pace and only one was asked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from allranks.train.agreement import Decision, Pulse

pytestmark = pytest.mark.ranks

What = Literal["stop", "save", "failed"]


def steps_until(
    what: What, asked_rank: int, asked_step: int, num_steps: int
) -> tuple[int | None, list[bool]]:
    """The step at which this rank learns of it, and at which steps it began an exchange."""
    pulse = Pulse(dist.group.WORLD)
    rank = dist.get_rank()
    begins = []
    for step in range(1, num_steps + 1):
        time.sleep(0.0005 * (1 + 3 * rank))
        asked = rank == asked_rank and step >= asked_step
        begins.append(pulse.beats_next)
        decision = pulse.step(
            stop=asked and what == "stop",
            save=asked and what == "save",
            failed=asked and what == "failed",
        )
        if decision != Decision():
            assert decision == Decision(**{what: True})
            return step, begins
    return None, begins


@pytest.mark.parametrize(
    ("what", "asked_rank", "asked_step"),
    [("stop", 1, 1), ("stop", 2, 40), ("save", 0, 25), ("failed", 1, 25)],
)
def test_all_ranks_act_at_the_same_step(
    tmp_path: Path, what: What, asked_rank: int, asked_step: int
) -> None:
    results = run_ranks(steps_until, 3, tmp_path, what, asked_rank, asked_step, 3000)
    acted = {step for step, _ in results}
    assert len(acted) == 1
    (step,) = acted
    assert step is not None
    assert step > asked_step
    assert all(begins == results[0][1] for _, begins in results)


def test_nothing_is_decided_when_nobody_asks(tmp_path: Path) -> None:
    assert [step for step, _ in run_ranks(steps_until, 2, tmp_path, "stop", -1, 0, 200)] == [
        None,
        None,
    ]


def agree_now() -> tuple[Decision, Decision]:
    pulse = Pulse(dist.group.WORLD)
    rank = dist.get_rank()
    pulse.step(stop=False, save=False, failed=False)  # leaves an exchange under way
    return pulse.agree(stop=rank == 1), pulse.agree(stop=False)


def test_agreeing_at_once_waits_for_all(tmp_path: Path) -> None:
    assert run_ranks(agree_now, 3, tmp_path) == [(Decision(stop=True), Decision())] * 3


def test_one_rank_decides_alone_at_once() -> None:
    pulse = Pulse(None)
    assert pulse.step(stop=False, save=False, failed=False) == Decision()
    assert pulse.step(stop=True, save=False, failed=False) == Decision(stop=True)
    assert pulse.agree(stop=True, save=True) == Decision(stop=True, save=True)


def recorded() -> list[str]:
    pulse = Pulse(dist.group.WORLD)
    with torch.profiler.profile() as profile:
        pulse.agree(stop=False)
    return [event.name for event in profile.events() if "reduce" in event.name]


def test_no_profiler_sees_what_may_end_after_it(tmp_path: Path) -> None:
    """gloo's threads would write to memory that the profiler has given back."""
    assert run_ranks(recorded, 2, tmp_path) == [[], []]
