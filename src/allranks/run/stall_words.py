"""Ranks that make no progress, in a line: who is where, and who waits for whom. Pure; no torch.

The launcher says it during the run, the doctor when asked, both in the same words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from allranks.run.stalls import Blame, RankState, is_waiting, wait_apart
from allranks.show.text import clean

MOST_NAMES, MOST_PLACES = 5, 3
PLURALS = {"is": "are", "has": "have", "gives": "give", "waits": "wait"}


def who_is_where(states: Sequence[RankState], found: Blame | None) -> str:
    """`rank 1 is at train.py:9 in f; ranks 0 and 2 wait for it in all_reduce`."""
    if wait_apart(states):
        return clean(f"ranks wait in different exchanges: {places(states)}")
    if found is None:
        return clean(places(states) or "no rank stands out")
    culprits = [state for state in states if state.rank in found.ranks]
    others = [state for state in states if state.rank not in found.ranks and not state.ended]
    has_nodes = len({state.node for state in states}) > 1
    # Why they are blamed stands in for where they are: ended, unable to run, or elsewhere.
    is_told = any(state.ended or state.kernel in ("T", "D") for state in culprits)
    said = "" if is_told else places(culprits, with_nodes=has_nodes)
    if not said:
        why = "has finished" if all(s.ended == "finished" for s in culprits) else found.why
        said = clause(culprits, why, with_nodes=has_nodes)
    calls = {state.stack.call if state.stack else None for state in others}
    call = calls.pop() if len(calls) == 1 else None
    whom = "it" if len(culprits) == 1 else "them"
    waits = f"waits for {whom}" + (f" in {call}" if call else "")
    return clean(f"{said}; {clause(others, waits)}" if others else said)


def places(states: Sequence[RankState], *, with_nodes: bool = False) -> str:
    """Where ranks are, grouped by place; empty if that is not known for any of them."""
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
    call = state.stack.call or "an exchange"
    return f"waits in {call} at {place.brief}" if place.is_own else f"waits in {call}"


def clause(states: Sequence[RankState], what: str, *, with_nodes: bool = False) -> str:
    """Ranks and what is said about them, in the singular or the plural."""
    nodes = list(dict.fromkeys(state.node for state in states if state.node))
    on = f" on {rank_names(nodes, '')}" if with_nodes and nodes else ""
    verb, _, rest = what.partition(" ")
    verb = PLURALS.get(verb, verb) if len(states) > 1 else verb
    return f"{rank_names([state.rank for state in states])}{on} {verb} {rest}".strip()


def rank_names(names: Iterable[object], word: str = "rank") -> str:
    """`rank 1`, `ranks 0, 2 and 3`, `ranks 0, 1, 2, 3 and 60 more`."""
    known = [str(name) for name in names]
    if len(known) > MOST_NAMES:
        known[MOST_NAMES - 1 :] = [f"{len(known) - MOST_NAMES + 1} more"]
    listed = " and ".join([part for part in (", ".join(known[:-1]), known[-1]) if part])
    return f"{word}{'s' if len(known) > 1 else ''} {listed}" if word else listed


def in_seconds(seconds: float) -> str:
    """`34 s`, `8 min`."""
    return f"{seconds:.0f} s" if seconds < 180 else f"{seconds / 60:.0f} min"
