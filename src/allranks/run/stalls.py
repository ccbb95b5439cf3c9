"""When a run is stalled, which rank the others wait for, and how that is said in one line.

This is the one rule of launcher, watcher and doctor. A run is judged by its own steps. If one rank
keeps the others waiting, or all wait in an exchange, a pause is soon longer than usual. If all
ranks are alike, they may be at an evaluation or a checkpoint, which takes longer. `--stalled
SECONDS` overrides all of it. Who is to blame follows from the ranks' events, which any machine can
read, and from the stacks of those on this machine.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from allranks.layout import with_place
from allranks.run import stacks
from allranks.run.folder import RunDir
from allranks.run.record import RankRecord, read_ends
from allranks.run.stacks import Stack
from allranks.show.numbers import listed, ranks_in_words
from allranks.show.text import clean

LEAST_SECONDS = 10.0  # a shorter pause is never reported
USUAL_STEPS = 20.0  # times the usual step
LONGEST_PAUSES = 3.0  # times the longest pause between two steps so far
FIRST_STEP_SECONDS = 120.0  # to import, to meet, to compile
# For ranks that are alike.
ALIKE_SECONDS = 120.0
ALIKE_TIMES = 2.0
ALIKE_FIRST_SECONDS = 300.0  # imports from a network disk, copies of data, compiling
# Before `stall_timeout` ends a run without a step; a script may prepare its data first.
END_FIRST_SECONDS, END_SCRIPT_SECONDS = ALIKE_FIRST_SECONDS, 3600.0
RECENT_BYTES = (1 << 17, 1 << 22)  # the second if heartbeats fill the first
HEARTBEAT_SECONDS = 2.0  # between a rank's `device` events
WARM_UP_GAPS, STEADY_GAPS = 3, 10
MOST_PLACES = 3
PLURALS = {"is": "are", "has": "have", "shows": "show", "waits": "wait"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """How far one rank has got, by its last events."""

    rank: int
    node: str | None = None
    layout: str = ""
    progress: float = 0.0  # when it last made progress, in UNIX time
    heard: float = 0.0  # when it last wrote anything
    step: int | None = None  # the last one that it wrote; None before the first
    made: int | None = None  # steps by its heartbeat; the last may not be written yet
    doing: str | None = None
    collectives: int | None = None  # that it has entered; None while the count grows
    exchanges: bool = False  # whether the count grew between its last two heartbeats
    ended: str | None = None  # the state of its end event
    usual: float | None = None  # median seconds of its steps
    longest: float | None = None  # seconds of the longest pause between two of its events
    stack: Stack | None = None
    kernel: str = ""  # the kernel's letter for its process, if it is on this machine

    @property
    def is_stage(self) -> bool:
        """Whether it is part of a pipeline, whose ranks exchange with neighbours alone."""
        return "pp=" in self.layout


@dataclass(frozen=True, slots=True)
class Blame:
    """The ranks that the others wait for, and how that is known."""

    ranks: tuple[int, ...]
    why: str
    is_sure: bool


def read_states(run: RunDir, attempt: int) -> list[RankState]:
    """The states of all ranks of an attempt that have written anything."""
    begun = run.attempt(attempt).stat().st_mtime  # when the ranks' files were made
    return [state_of(_recent(run, attempt, rank), begun) for rank in run.ranks(attempt)]


def _recent(run: RunDir, attempt: int, rank: int) -> RankRecord:
    # One rank far back is enough: all ranks pause for evaluations together.
    for num_bytes in RECENT_BYTES[1:] if rank == 0 else RECENT_BYTES:
        record = read_ends(run, attempt, rank, num_bytes)
        if len(record.steps) > 1:
            break
    return record


def state_of(record: RankRecord, begun: float = 0.0) -> RankState:
    """A rank's state by its start and its last events; `begun`: when its attempt began."""
    progress = max(record.moves, default=begun)
    # A heartbeat shows where the rank is now only if there was no progress since.
    beats = [event for event in record.devices if event["t"] > progress]
    beat = beats[-1] if beats else {}
    # Heartbeats come at different moments: only a count that stands still can be compared.
    counts = {event.get("collectives") for event in beats[-2:]}
    stands = len(counts) == 1 < len(beats)
    moves = sorted([*record.moves][1:])
    gaps = [after - before for before, after in itertools.pairwise(moves)]
    if len(gaps) >= STEADY_GAPS:  # the first steps compile and connect: they say nothing
        gaps = gaps[WARM_UP_GAPS:]
    seconds = [float(event["seconds"]) for event in record.timed_steps.values()]
    return RankState(
        rank=record.rank,
        node=record.start.get("host"),
        layout=str(record.start.get("layout", "")),
        progress=progress,
        heard=record.last_time or begun,
        step=record.last_step,
        made=beat.get("step"),
        doing=beat.get("doing"),
        collectives=beat.get("collectives") if stands else None,
        exchanges=len(counts - {None}) > 1,
        ended=record.end["state"] if record.end else None,
        usual=statistics.median(seconds) if seconds else None,
        longest=max(gaps, default=None),
    )


def with_stacks(
    states: Sequence[RankState],
    processes: Mapping[int, int],
    more: Mapping[int, Stack] | None = None,
    *,
    takes: bool = True,
) -> list[RankState]:
    """The states with the stacks of the ranks on this machine (rank: process), and `more`.

    `takes`: whether to signal each process to write its stack; otherwise only the kernel is asked.
    """
    letters = {rank: stacks.kernel_state(process) for rank, process in processes.items()}
    able = {rank: process for rank, process in processes.items() if letters[rank] not in "TDtZ"}
    found = {**(more or {}), **(stacks.take(able) if takes else {})}
    return [
        replace(state, stack=found.get(state.rank), kernel=letters.get(state.rank, ""))
        for state in states
    ]


def patience(
    usual: float | None, longest: float, *, stands_out: bool = True, asked: float | None = None
) -> float:
    """Seconds without a step after which a run is stalled.

    `usual`: seconds of a step, None before the first; `longest`: the longest pause between steps
    so far. `stands_out`: whether something distinguishes the run from one that is busy with
    something else, such as a rank that the others wait for. `asked`: what the user has set instead.
    """
    if asked is not None:
        return asked
    if usual is None:
        return FIRST_STEP_SECONDS if stands_out else ALIKE_FIRST_SECONDS
    soon = max(LEAST_SECONDS, USUAL_STEPS * usual, LONGEST_PAUSES * longest)
    return soon if stands_out else max(ALIKE_SECONDS, ALIKE_TIMES * soon)


def patience_to_end(timeout: float, *, has_stepped: bool, is_script: bool) -> float:
    """Seconds without a step after which a run with `stall_timeout` is ended."""
    if has_stepped:
        return timeout
    return max(timeout, END_SCRIPT_SECONDS if is_script else END_FIRST_SECONDS)


def patience_with(
    states: Sequence[RankState], *, stands_out: bool = True, asked: float | None = None
) -> float:
    """Seconds without a step after which these ranks are stalled; see `patience`."""
    usual = max((state.usual for state in states if state.usual is not None), default=None)
    longest = max((state.longest for state in states if state.longest is not None), default=0.0)
    return patience(usual, longest, stands_out=stands_out, asked=asked)


def silence(states: Sequence[RankState], now: float) -> float:
    """Seconds since the last progress of any rank that has not ended."""
    moves = [state.progress for state in states if state.ended is None and state.progress]
    return max(0.0, now - max(moves)) if moves else 0.0


def blame(states: Sequence[RankState]) -> Blame | None:
    """Which ranks keep the others waiting; None if that cannot be told."""
    gone = [state.rank for state in states if state.ended is not None]
    waiting = [state for state in states if state.ended is None]
    if gone and any(is_waiting(state) is not False for state in waiting):
        return Blame(tuple(gone), "has ended, but the others go on", True)
    if len(waiting) < 2:
        return None
    return (
        _halted(waiting)
        or _behind(waiting, _collectives, "collectives", sure=True)
        or _apart(waiting, with_stacks=True)
        or _lifeless(waiting)
        or _apart(waiting, with_stacks=False)
        or _behind(waiting, lambda state: state.made, "steps", sure=False)
    )


def _halted(states: Sequence[RankState]) -> Blame | None:
    """Ranks that cannot run at all: stopped by a signal, or waiting for a disk."""
    for letter, why in (("T", "is stopped by a signal"), ("D", "waits for a disk")):
        halted = tuple(state.rank for state in states if state.kernel == letter)
        if halted and len(halted) < len(states):
            return Blame(halted, why, letter == "T")
    return None


def _behind(
    states: Sequence[RankState], count: Callable[[RankState], int | None], what: str, *, sure: bool
) -> Blame | None:
    counts = {state.rank: count(state) for state in states}
    known = {rank: number for rank, number in counts.items() if number is not None}
    if len(known) < len(states) or len(set(known.values())) == 1:
        return None
    least, most = min(known.values()), max(known.values())
    ranks = tuple(rank for rank, number in known.items() if number == least)
    return Blame(ranks, f"has reached {least} {what}, others {most}", sure)


def _collectives(state: RankState) -> int | None:
    # A message to a neighbour counts, too: the stages of a pipeline have different counts.
    return None if state.is_stage else state.collectives


def _apart(states: Sequence[RankState], *, with_stacks: bool) -> Blame | None:
    """Ranks in code of their own while every other rank is, or may be, in an exchange."""
    if with_stacks and not any(state.stack for state in states):
        return None
    if not all(state.stack or state.doing for state in states):
        return None
    waits = {state.rank: is_waiting(state) for state in states}
    apart = tuple(rank for rank, waiting in waits.items() if waiting is False)
    if not apart or len(apart) == len(states):
        return None
    is_sure = with_stacks and any(waits[rank] for rank in waits if rank not in apart)
    doing = next(state.doing for state in states if state.rank == apart[0])
    where = "elsewhere" if with_stacks else f"at {doing!r}"
    return Blame(apart, f"is {where}, while the others wait in an exchange", is_sure)


def is_waiting(state: RankState) -> bool | None:
    """Whether a rank is in an exchange, by its stack or its heartbeat; None: not known."""
    if state.stack is not None and state.stack.waits is not None:
        return state.stack.waits
    return None if state.doing is None else state.doing == "wait"


def _lifeless(states: Sequence[RankState]) -> Blame | None:
    """Ranks without a heartbeat: stopped, or in code that keeps every other thread waiting."""
    last = max(state.heard for state in states)
    limit = last - 5 * HEARTBEAT_SECONDS
    silent = tuple(state.rank for state in states if state.heard < limit)
    if not silent or not any(state.doing for state in states):
        return None
    return Blame(silent, "shows no sign of life, but the others do", False)


def wait_apart(states: Sequence[RankState]) -> bool:
    """Whether all ranks are in exchanges, but not in the same one."""
    if any(state.is_stage for state in states):
        return False  # they wait for each other in turn
    places = [state.stack.place for state in states if state.stack and state.stack.waits]
    return len(places) == len(states) > 1 and len(set(places)) > 1


def is_stalled(
    states: Sequence[RankState], found: Blame | None, seconds: float, asked: float | None = None
) -> bool:
    """Whether ranks are stalled after `seconds` without a step; `found`: who is to blame."""
    is_held_up = found is not None or wait_apart(states) or all(map(is_waiting, states))
    # Ranks that still exchange something are busy, at an evaluation of a divided model for example.
    stands_out = is_held_up and not any(state.exchanges for state in states)
    return seconds >= patience_with(states, stands_out=stands_out, asked=asked)


def ended_for(run: RunDir, attempt: int) -> str | None:
    """Why the launcher ended an attempt that made no steps; None if it did not."""
    ends = {rank: run.end(attempt, rank) or {} for rank in run.ranks(attempt)}
    errors = [(rank, end.get("error") or {}) for rank, end in ends.items()]
    said = [(error.get("echo", False), rank, error) for rank, error in errors if "stall" in error]
    for _, rank, error in sorted(said, key=lambda one: one[:2]):
        return f"rank {rank}: {error['what']}"
    return None


# --- In words ----------------------------------------------------------------------------------


def who_is_where(states: Sequence[RankState], found: Blame | None) -> str:
    """`rank 1 is at train.py:9 in f; ranks 0 and 2 wait for it in all_reduce`."""
    if wait_apart(states):
        return clean(f"ranks wait in different exchanges: {places(states)}")
    if found is None:
        return clean(places(states) or "no rank stands out")
    culprits = [state for state in states if state.rank in found.ranks]
    others = [state for state in states if state.rank not in found.ranks and not state.ended]
    has_nodes = len({state.node for state in states}) > 1
    # For ranks that have ended or cannot run, the reason is shown instead of a place.
    is_told = any(state.ended or state.kernel in ("T", "D") for state in culprits)
    said = "" if is_told else places(culprits, with_nodes=has_nodes)
    if not said:
        why = "has finished" if all(s.ended == "finished" for s in culprits) else found.why
        said = clause(culprits, why, with_nodes=has_nodes)
    calls = {state.stack.library_call if state.stack else None for state in others}
    call = calls.pop() if len(calls) == 1 else None
    whom = "it" if len(culprits) == 1 else "them"
    waits = f"waits for {whom}" + (f" in {call}" if call else "")
    return clean(f"{said}; {clause(others, waits)}" if others else said)


def places(states: Sequence[RankState], *, with_nodes: bool = False) -> str:
    """Where ranks are, grouped by place; empty if it is not known of any."""
    groups: dict[str, list[RankState]] = defaultdict(list)
    for state in states:
        if state.ended is None and (where := place_of(state)):
            groups[where].append(state)
    said = [clause(group, where, with_nodes=with_nodes) for where, group in groups.items()]
    rest = sum(len(group) for group in list(groups.values())[MOST_PLACES:])
    return "; ".join([*said[:MOST_PLACES], *([f"{rest} more elsewhere"] if rest else [])])


def place_of(state: RankState) -> str:
    """`is at train.py:9 in f`, `waits in all_reduce at train.py:8 in f`; empty if not known."""
    place = state.stack.place if state.stack else None
    if place is None or state.stack is None:
        return {"wait": "waits in an exchange", "data": "waits for data"}.get(state.doing or "", "")
    if not is_waiting(state):
        return f"is at {place.brief}"
    call = state.stack.library_call or "an exchange"
    return f"waits in {call} at {place.brief}" if place.is_own else f"waits in {call}"


def clause(states: Sequence[RankState], what: str, *, with_nodes: bool = False) -> str:
    """A sentence about ranks, in the singular or the plural."""
    nodes = list(dict.fromkeys(state.node for state in states if state.node))
    on = f" on {listed(nodes)}" if with_nodes and nodes else ""
    verb, _, rest = what.partition(" ")
    verb = PLURALS.get(verb, verb) if len(states) > 1 else verb
    ranks = [state.rank for state in states]
    who = with_place(ranks_in_words(ranks), states[0].layout if states else "", ranks)
    return f"{who}{on} {verb} {rest}".strip()
