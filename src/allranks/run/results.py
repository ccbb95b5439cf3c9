"""What came of a run, from its folder alone."""

from __future__ import annotations

import itertools
from typing import Any

from allranks.run.events import read_events, read_last_events
from allranks.run.folder import RunDir, State

EARLY_EVENTS = 200  # what is said once is among these


def outcome(run: RunDir, state: State | None = None) -> dict[str, Any]:
    """A run in one object, its pace by the word of its first rank (`timing.steps.result` measures
    it). `state`: where the caller knows it."""
    state = state or run.state()
    attempts = run.attempts()
    attempt = attempts[-1] if attempts else 0
    start = run.start(attempt, _first_rank(run, attempt)) or {}
    end = run.end(attempt, _first_rank(run, attempt)) or {}
    step = _last_step(run, attempt) or {}
    steps = end.get("step", step.get("step", start.get("step")))
    has_loss, loss = _losses(run, attempts, steps)
    metrics = {**({"loss": loss} if has_loss else {}), **end.get("metrics", {})}
    is_lost = has_loss and loss is None
    return {
        "run": run.name,
        "run_dir": str(run.path),
        "state": state,
        "layout": start.get("layout", run.info().get("layout")),
        "world_size": start.get("world_size"),
        "attempt": attempt,
        "steps": steps,
        "epochs": end.get("epoch", _epochs(start, steps, step, state)),
        "samples": end.get("samples", _samples(start, steps)),
        "seconds": round(sum(_seconds(run, number) for number in attempts), 3),
        "samples_per_second": end.get("samples_per_second"),
        "global_batch": start.get("global_batch"),
        "metrics": metrics,
        **({"nonfinite_since": _nonfinite_since(run, attempts, steps or 0)} if is_lost else {}),
    }


def steps_by_rank(run: RunDir) -> dict[int, int]:
    """How many steps each rank of the last attempt has made."""
    attempt = max(run.attempts(), default=0)
    found = {}
    for rank in run.ranks(attempt):
        events = read_last_events(run.events(attempt, rank))
        found[rank] = max((e["step"] for e in events if e["event"] == "step"), default=0)
    return found


def samples_per_epoch(run: RunDir) -> int | None:
    """Samples in the data set that a run trains on; of a script, what its probe has seen."""
    attempt = max(run.attempts(), default=0)
    rank = _first_rank(run, attempt)
    said = run.start(attempt, rank) or {}
    for event in itertools.islice(read_events(run.events(attempt, rank)), EARLY_EVENTS):
        if event["event"] == "dataset":
            said = event
    size = said.get("samples_per_epoch")
    return size if isinstance(size, int) else None


def _first_rank(run: RunDir, attempt: int) -> int:
    return min(run.ranks(attempt), default=0)


def _last_step(run: RunDir, attempt: int) -> dict[str, Any] | None:
    events = read_last_events(run.events(attempt, _first_rank(run, attempt)))
    return next((event for event in reversed(events) if event["event"] == "step"), None)


def _losses(run: RunDir, attempts: list[int], steps: int | None) -> tuple[bool, float | None]:
    """Whether a loss that belongs to the result is known, and the newest; None if it is no number.

    A later attempt may have gone back.
    """
    for attempt in reversed(attempts):
        # Far enough back for any log_every that people set.
        events = read_last_events(run.events(attempt, 0), 1 << 20, word=b'"loss"')
        losses = [e["loss"] for e in events if _has_loss(e) and e["step"] <= (steps or 0)]
        if losses:
            return True, losses[-1]
    return False, None


def _has_loss(event: dict[str, Any]) -> bool:
    return event["event"] == "step" and "loss" in event


def _nonfinite_since(run: RunDir, attempts: list[int], steps: int) -> int:
    """The step at which the loss stopped being a number, for good."""
    losses: dict[int, float | None] = {}
    told: list[int] = []
    for attempt in attempts:
        for event in read_events(run.events(attempt, 0), word=b'"loss"'):
            if _has_loss(event) and event["step"] <= steps:
                losses[event["step"]] = event["loss"]
        for rank in run.ranks(attempt):  # each says so of its own samples, between logged steps too
            events = read_events(run.events(attempt, rank), word=b'"event":"nonfinite"')
            told += [event["step"] for event in events]
    good = max((step for step, loss in losses.items() if loss is not None), default=0)
    bad = min(step for step in losses if step > good)
    return min([bad, *(step for step in told if good < step < bad)])


def _epochs(
    start: dict[str, Any], steps: int | None, step: dict[str, Any], state: State
) -> int | None:
    """Epochs completed after so many steps."""
    if steps is not None and start.get("steps_per_epoch"):
        return steps // int(start["steps_per_epoch"])
    if step.get("epoch"):  # as the probe counts a script's: from 1, the one that it is in
        return int(step["epoch"]) - (state != "finished")
    return None if steps is None else 0


def _samples(start: dict[str, Any], steps: int | None) -> int | None:
    """Samples seen after so many steps, for a run that did not live to say."""
    size: int | None = start.get("samples_per_epoch")
    batch: int | None = start.get("global_batch")
    if steps is None or size is None or batch is None or not start.get("steps_per_epoch"):
        return None
    epochs, rest = divmod(steps, int(start["steps_per_epoch"]))
    return epochs * size + min(rest * batch, size)


def _seconds(run: RunDir, attempt: int) -> float:
    """Time from the first step to the last; measured by the rank, else from its events' times."""
    rank = _first_rank(run, attempt)
    end = run.end(attempt, rank)
    if end is not None and "seconds" in end:
        return float(end["seconds"])
    first = next(read_events(run.events(attempt, rank)), None)
    last = read_last_events(run.events(attempt, rank))
    return last[-1]["t"] - first["t"] if first and last else 0.0
