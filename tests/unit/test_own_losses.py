"""Each rank tells since when its own loss is no number, at the moment losses are sent anyway."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.unit.test_doctor_runs import make_run, write_rank

from allranks.doctor.diagnose import diagnose_run
from allranks.run.events import EventLog, read_events
from allranks.train import meter
from allranks.train.meter import MAX_KEPT, OwnLosses

NAN = float("nan")
DONE = {"event": "end", "state": "finished", "exit": 0}


def told(tmp_path: Path, steps: list[float], log_every: int) -> list[tuple[int, str]]:
    """What a rank with these losses writes, one a step."""
    log = EventLog(tmp_path / "rank-1.jsonl")
    own = OwnLosses(log)
    for step, loss in enumerate(steps, 1):
        own.keep(step, torch.tensor([1.0, loss], requires_grad=True))
        if step % log_every == 0:
            own.check(step, torch.tensor([loss]))
    own.finish()
    log.close()
    events = read_events(tmp_path / "rank-1.jsonl")
    return [(e["step"], e["loss"]) for e in events if e["event"] == "nonfinite"]


@pytest.mark.parametrize(
    ("steps", "log_every", "first"),
    [
        ([1.0] * 20, 5, []),
        ([1.0] * 12 + [NAN] * 18, 10, [(13, "nan")]),
        ([1.0] * 9 + [float("inf")] + [NAN] * 10, 5, [(10, "inf")]),
        ([1.0] * 2 + [NAN] + [1.0] * 9 + [NAN] * 8, 5, [(13, "nan")]),  # one of them was survived
        ([NAN] * 10, 5, [(1, "nan")]),
    ],
)
def test_the_first_step_is_told_once(
    steps: list[float], log_every: int, first: list[tuple[int, str]], tmp_path: Path
) -> None:
    assert told(tmp_path, steps, log_every) == first


@pytest.mark.parametrize(("first_bad", "known"), [(4, []), (8, [(8, "nan")])])
def test_a_step_is_no_first_one_where_those_before_it_are_lost(
    first_bad: int, known: list[tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "MAX_KEPT", 4)
    steps = [1.0] * (first_bad - 1) + [NAN] * (11 - first_bad)
    assert told(tmp_path, steps, 10) == known


def test_large_micro_batches_are_not_hoarded(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "rank-1.jsonl")
    own = OwnLosses(log)
    losses = torch.ones(1 << 18)
    for step in range(1, 20):
        own.keep(step, losses)
    log.close()
    assert [step for step, _ in own._kept] == [15, 16, 17, 18, 19]


def test_an_answer_that_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's does: nobody waits for it before the end."""
    waited: list[float] = []

    def value(self: meter._Arrival) -> torch.Tensor:
        waited.append(float(self._losses))
        return self._losses

    monkeypatch.setattr(meter._Arrival, "ready", lambda self: bool(waited))
    monkeypatch.setattr(meter._Arrival, "value", value)
    assert told(tmp_path, [1.0] * 3 + [NAN] * 8, 5) == [(4, "nan")]
    assert len(waited) == 2  # for the first check, and to read it


def test_it_keeps_no_graph_and_not_for_ever(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "rank-1.jsonl")
    own = OwnLosses(log)
    for step in range(2 * MAX_KEPT):
        own.keep(step, torch.ones(2, requires_grad=True) * 2)
    log.close()
    assert len(own._kept) == MAX_KEPT
    assert not any(losses.requires_grad for _, losses in own._kept)


@pytest.mark.parametrize(
    ("firsts", "rank"),
    [
        ({0: 14, 1: 13}, 1),
        ({0: 13, 1: 13}, None),  # the rate was too high for all of them
        ({1: 13}, 1),  # it was the last step
    ],
)
def test_the_doctor_names_who_was_first(
    firsts: dict[int, int], rank: int | None, tmp_path: Path
) -> None:
    """Also where thousands of steps have followed."""
    run = make_run(tmp_path)
    after = [{"event": "step", "step": n, "seconds": 0.1} for n in range(20, 9000)]
    for one in range(2):
        bad = [{"event": "nonfinite", "step": firsts[one], "loss": "nan"}] if one in firsts else []
        loss = {"loss": None, "nonfinite": {"loss": "nan"}} if one == 0 else {}
        write_rank(run, one, [*bad, *after, {"event": "step", "step": 9000, **loss}, DONE])
        lines = run.events(0, one).read_text().replace('": ', '":').replace(", ", ",")
        run.events(0, one).write_text(lines)
    (found,) = diagnose_run(run)
    assert (found.cause, found.rank) == ("nan-loss", rank)
    assert "at step 13" in found.title
    if rank is not None:
        assert (found.evidence[0].file.rpartition("/")[2], found.evidence[0].line) == (
            f"rank-{rank}.jsonl",
            2,
        )


def test_a_loss_without_bounds_in_events(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_rank(run, 0, [DONE])
    write_rank(run, 1, [DONE])
    line = '{"v":1,"t":101,"event":"step","step":7,"loss":null,"nonfinite":{"loss":"inf"}}\n'
    run.events(0, 0).write_text(line + run.events(0, 0).read_text())
    assert [one.cause for one in diagnose_run(run)] == ["nan-loss"]
