"""The result of a run, from its folder alone."""

from __future__ import annotations

from typing import Any

from allranks.run.events import read_events
from allranks.run.folder import RunDir, State
from allranks.run.record import RankRecord, lead_rank, read_ends, read_lead, read_rank

EARLY_EVENTS = 200  # which include everything that is written once
LOSS_BYTES = 1 << 20  # enough for any log_every that people set


def outcome(run: RunDir, state: State | None = None) -> dict[str, Any]:
    """A run's result as one mapping; `state`: if the caller knows it.

    Its speed is what its first rank says; `timing.steps.result` measures it.
    """
    state = state or run.state()
    attempts = run.attempts()
    lead = read_lead(run)
    start, end, steps = lead.start, lead.end or {}, lead.steps_made
    has_loss, loss = _last_loss(run, attempts, steps)
    is_lost = has_loss and loss is None
    return {
        "run": run.name,
        "run_dir": str(run.path),
        "state": state,
        "layout": start.get("layout", run.info().get("layout")),
        "world_size": start.get("world_size"),
        "attempt": attempts[-1] if attempts else 0,
        "steps": steps,
        "epochs": end.get("epoch", _epochs(lead, state)),
        "samples": end.get("samples", _samples(lead)),
        "seconds": round(seconds_of(run), 3),
        "samples_per_second": end.get("samples_per_second"),
        "global_batch": start.get("global_batch"),
        "metrics": {**({"loss": loss} if has_loss else {}), **end.get("metrics", {})},
        **({"nonfinite_since": _nonfinite_since(run, attempts, steps or 0)} if is_lost else {}),
    }


def seconds_of(run: RunDir) -> float:
    """Seconds of training, in all attempts."""
    return sum(read_ends(run, n, lead_rank(run, n)).seconds for n in run.attempts())


def steps_by_rank(run: RunDir) -> dict[int, int]:
    """How many steps each rank of the last attempt has made."""
    attempt = max(run.attempts(), default=0)
    return {rank: read_ends(run, attempt, rank).last_step or 0 for rank in run.ranks(attempt)}


def samples_per_epoch(run: RunDir) -> int | None:
    """Samples in the data set of a run; for a script, as its probe found it."""
    attempt = max(run.attempts(), default=0)
    lead = read_rank(run, attempt, lead_rank(run, attempt), EARLY_EVENTS)
    said = lead.others["dataset"][-1] if lead.others["dataset"] else lead.start
    return said.get("samples_per_epoch")


def _last_loss(run: RunDir, attempts: list[int], steps: int | None) -> tuple[bool, float | None]:
    """Whether a loss is known, and the newest one; None if it is not a number.

    Losses of later steps do not count: the next attempt may have started from an earlier one.
    """
    for attempt in reversed(attempts):
        events = read_events(run.events(attempt, 0), last=LOSS_BYTES, word=b'"loss"')
        found = {s: loss for s, loss in RankRecord(0, events).losses.items() if s <= (steps or 0)}
        if found:
            return True, found[max(found)]
    return False, None


def _nonfinite_since(run: RunDir, attempts: list[int], steps: int) -> int:
    """The first step after which the loss was never a number again."""
    losses: dict[int, float | None] = {}
    told: list[int] = []
    for attempt in attempts:
        found = RankRecord(0, read_events(run.events(attempt, 0), word=b'"loss"')).losses
        losses |= {step: loss for step, loss in found.items() if step <= steps}
        for rank in run.ranks(attempt):  # each reports its own samples, also between logged steps
            events = read_events(run.events(attempt, rank), kind="nonfinite")
            told += [event["step"] for event in events]
    good = max((step for step, loss in losses.items() if loss is not None), default=0)
    bad = min(step for step in losses if step > good)
    return min([bad, *(step for step in told if good < step < bad)])


def _epochs(lead: RankRecord, state: State) -> int | None:
    """Epochs completed by now."""
    steps = lead.steps_made
    if steps is not None and lead.start.get("steps_per_epoch"):
        return steps // int(lead.start["steps_per_epoch"])
    if lead.steps and lead.steps[-1].get("epoch"):
        # The probe counts a script's epochs from 1, including the one in progress.
        return int(lead.steps[-1]["epoch"]) - (state != "finished")
    return None if steps is None else 0


def _samples(lead: RankRecord) -> int | None:
    """Samples seen by now, for a run without an end event."""
    start, steps = lead.start, lead.steps_made
    size, batch = start.get("samples_per_epoch"), start.get("global_batch")
    if steps is None or size is None or batch is None or not start.get("steps_per_epoch"):
        return None
    epochs, rest = divmod(steps, int(start["steps_per_epoch"]))
    return int(epochs * size + min(rest * batch, size))
