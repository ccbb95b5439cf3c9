"""Which rank of a run keeps the others waiting, and the line it is in."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from allranks.doctor.finding import Evidence, Finding
from allranks.doctor.log_lines import num_lines
from allranks.launch import backends
from allranks.run import files, stacks
from allranks.run.folder import RunDir
from allranks.run.stacks import Stack
from allranks.run.stalls import (
    ALIKE_SECONDS,
    Blame,
    RankState,
    blame,
    ended_for,
    is_stalled,
    patience_with,
    read_states,
    silence,
    wait_apart,
    who_is_where,
    with_stacks,
)
from allranks.run.tracebacks import Frame, source_lines
from allranks.show.numbers import duration
from allranks.show.secrets import redact
from allranks.show.text import plain

OTHER_NODES_SECONDS = 20.0
LOG_BYTES = 1 << 20  # of the end of a log, which may have stacks
MOST_EVIDENCE = 8


def hang(run: RunDir, *, after: float | None = None) -> list[Finding]:
    """Why a live run makes no steps; nothing if it does, or has ended.

    `after`: seconds without a step that count as a stall; by default the run's own steps decide.
    """
    attempts = run.attempts()
    if not attempts:
        return []
    states = read_states(run, attempts[-1])
    if any(state.ended == "failed" for state in states) or not states:
        return []  # the failure is the cause
    usual = patience_with(states, asked=after)
    seconds = silence(states, time.time())
    if seconds < usual:
        return []
    states = looked_at(run, attempts[-1], states)
    found = judge(states, seconds, run, after=after)
    # It may have moved on while its stacks were read.
    return found if silence(read_states(run, attempts[-1]), time.time()) >= usual else []


def hung(run: RunDir) -> list[Finding]:
    """Why a run had stalled that its launcher ended, from the stacks in its logs."""
    attempts = run.attempts()
    if not attempts or run.ended_state() == "finished":
        return []
    ranks = run.ranks(attempts[-1])
    logged = {rank: stack_in_log(run.log(attempts[-1], rank)) for rank in ranks}
    printed = {rank: found for rank, found in logged.items() if found is not None}
    states = [
        replace(state, ended=None, stack=printed[state.rank][1] if state.rank in printed else None)
        for state in read_states(run, attempts[-1])
    ]
    when = min((when for when, _ in printed.values()), default=0.0)
    progress = max((state.progress for state in states), default=0.0)
    if not printed or progress > when or ended_for(run, attempts[-1]) is None:
        return []  # no stall, it moved on after that, or something else ended it
    return judge(states, when - progress, run, after=0.0, is_live=False)


def judge(
    states: Sequence[RankState],
    seconds: float,
    run: RunDir,
    *,
    after: float | None = None,
    is_live: bool = True,
) -> list[Finding]:
    """What to say about ranks that have made no step for this long."""
    found = blame(states)
    if not is_stalled(states, found, seconds, after):
        return []
    if wait_apart(states):
        return [mismatch(states, run)]
    if found is None:
        return [nobody_to_blame(states, seconds, run, is_live=is_live)]
    has_passed = seconds >= ALIKE_SECONDS  # longer than an evaluation or a checkpoint may take
    by_rank = {state.rank: state for state in states}
    culprit = by_rank[found.ranks[0]]
    cause = "rank-missing-from-collective"
    if culprit.ended == "finished":
        cause = "uneven-inputs"
    elif culprit.ended:
        return []  # its end is the cause
    elif is_meeting([state for state in states if state.rank not in found.ranks]):
        cause = "rendezvous-timeout"
    return [
        Finding(
            cause,
            who_is_where(states, found),
            fix(culprit, run, is_live=is_live),
            rank=culprit.rank,
            node=culprit.node,
            confidence="high" if found.is_sure and (has_passed or not is_live) else "medium",
            evidence=evidence(states, found, run),
        )
    ]


def is_meeting(states: Sequence[RankState]) -> bool:
    """Whether these ranks still wait for the others to join the process group."""
    return bool(states) and all(
        state.stack is not None
        and any(frame.function.endswith("init_process_group") for frame in state.stack.frames)
        for state in states
    )


def mismatch(states: Sequence[RankState], run: RunDir) -> Finding:
    return Finding(
        "collective-mismatch",
        who_is_where(states, None),
        "all ranks must call the same collectives in the same order: look for a condition on the "
        "rank, or on its data, between these lines",
        confidence="medium",
        evidence=evidence(states, None, run),
    )


def nobody_to_blame(
    states: Sequence[RankState], seconds: float, run: RunDir, *, is_live: bool
) -> Finding:
    """All ranks are in the same state: something that they share hangs."""
    doing = {state.doing for state in states}
    common = {
        frozenset({"data"}): "every rank waits for its data: look at the loader, or the disk",
        frozenset({"wait"}): "every rank waits in a collective: look at the network between them",
    }.get(
        frozenset(str(each) for each in doing),
        "all ranks are alike: look at what they share",
    )
    return Finding(
        "no-progress",
        f"no step for {duration(seconds, whole=True)}: {who_is_where(states, None)}",
        common + (f"; allranks stop {run.name} ends the run" if is_live else ""),
        confidence="low",
        evidence=evidence(states, None, run),
    )


def fix(culprit: RankState, run: RunDir, *, is_live: bool) -> str:
    place = culprit.stack.place if culprit.stack else None
    if culprit.ended == "finished":
        return (
            "give every rank equally many batches: DistributedSampler(…, drop_last=True), or train "
            "within `with model.join():` (torch.distributed.algorithms.join)"
        )
    if culprit.kernel == "T":
        process = stacks.processes_of(run, max(run.attempts(), default=0)).get(culprit.rank)
        return f"kill -CONT {process}: it was stopped (SIGSTOP, Ctrl-Z, a debugger)"
    if culprit.kernel == "D":
        return "look at the disk that it waits for (dmesg, df): a network disk may not be answering"
    at = f"look at {place}" if place else look_there(culprit, run)
    stop = f"; end the run with allranks stop {run.name}" if is_live else ""
    if culprit.stack and any("torch/utils/data" in frame.file for frame in culprit.stack.frames):
        at += ", in its data loader: which file or worker does it wait for?"
    return (
        f"{at}: every rank must reach the same collectives{stop}. "
        "`--stall-timeout 10m` (in the job: stall_timeout) ends such a run automatically"
    )


def look_there(culprit: RankState, run: RunDir) -> str:
    here = f"allranks doctor {run.path}"
    return f"see where it is: ssh {culprit.node} {here}" if culprit.node else f"run {here} there"


def evidence(states: Sequence[RankState], found: Blame | None, run: RunDir) -> tuple[Evidence, ...]:
    """The line each rank is in, or its last sign of life; culprits first."""
    culprits = found.ranks if found else ()
    rows: list[Evidence] = []
    for state in sorted(states, key=lambda state: (state.rank not in culprits, state.rank)):
        if len(rows) >= MOST_EVIDENCE:
            break
        why = found.why if found and state.rank in culprits else None
        if state.stack is not None and state.stack.place is not None:
            place = state.stack.place
            text = f"rank {state.rank} is in {place.function}{source(place)}"
            rows.append(Evidence(place.file, place.line, text))
            if why is None:
                continue
        rows.append(heartbeat(state, run, why))
    return tuple(rows)


def heartbeat(state: RankState, run: RunDir, why: str | None) -> Evidence:
    path = run.events(max(run.attempts(), default=0), state.rank)
    fields = {
        "step": state.step,
        "at": state.doing,
        "collectives": state.collectives,
        "ended": state.ended,
    }
    known = ", ".join(f"{key} {value}" for key, value in fields.items() if value is not None)
    text = f"rank {state.rank} {why or 'waits'}" + (f" ({known})" if known else "")
    return Evidence(str(path), num_lines(path), text)


def source(place: Frame) -> str:
    line = "".join(source_lines(place.file)[place.line - 1 : place.line]).strip()
    return f": {redact(plain(line))}" if line else ""


def looked_at(run: RunDir, attempt: int, states: Sequence[RankState]) -> list[RankState]:
    """The states with the stacks of their ranks, on this machine and on the run's other nodes."""
    processes = stacks.processes_of(run, attempt)
    more: dict[int, Stack] = {}
    if len(processes) < len(states):
        words = ["-m", "allranks.run.stacks", str(run.path), str(attempt)]
        backend = backends.named(backends.of(run))
        more = stacks.from_lines(backend.on_nodes(run, words, OTHER_NODES_SECONDS))
    return with_stacks(states, processes, more)


def stack_in_log(log: Path) -> tuple[float, Stack] | None:
    """The last stack that the launcher had a rank print into its log, and when."""
    try:
        with files.open_file(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            text = file.read(LOG_BYTES).decode(errors="replace")
    except OSError:
        return None
    before, mark, after = text.rpartition(stacks.FOLLOW)
    stamp = before.rpartition("\n")[2].removeprefix("allranks: ").partition(": ")[0]
    try:
        when = datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return None
    stack = stacks.parse_dump(0, after) if mark else None
    return (when, stack) if stack is not None else None
