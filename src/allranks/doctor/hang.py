"""Which rank of a run keeps the others waiting, and the line it is in."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from allranks.doctor.catalogue import finding
from allranks.doctor.finding import Evidence, Finding, shown_path
from allranks.doctor.log_search import num_lines
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Ranks that have made no step for a while, with all that a finding says about them."""

    run: RunDir
    attempt: int
    states: Sequence[RankState]
    seconds: float  # without a step
    is_live: bool = True
    processes: Mapping[int, int] = field(default_factory=dict)  # of ranks on this machine
    sources: Mapping[Frame, str] = field(default_factory=dict)  # the lines of code that they are in


def hang(run: RunDir, *, after: float | None = None, takes_stacks: bool = True) -> list[Finding]:
    """Why a live run makes no steps; nothing if it does, or has ended.

    `after`: seconds without a step that count as a stall; by default the run's own steps decide.
    `takes_stacks`: from its processes, by a signal.
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
    stall = read_stall(run, attempts[-1], states, seconds, takes_stacks=takes_stacks)
    found = with_last_lines(judge(stall, after=after))
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
    seconds, attempt = when - progress, attempts[-1]
    stall = Stall(run=run, attempt=attempt, states=states, seconds=seconds, is_live=False)
    return with_last_lines(judge(with_sources(stall), after=0.0))


def judge(stall: Stall, *, after: float | None = None) -> list[Finding]:
    """What to say about ranks that have made no step for this long. Reads nothing."""
    states = stall.states
    found = blame(states)
    if not is_stalled(states, found, stall.seconds, after):
        return []
    if wait_apart(states):
        told = finding("collective-mismatch", evidence(stall, None), ["hang"])
        return [replace(told, title=who_is_where(states, None), confidence="medium")]
    if found is None:
        return [nobody_to_blame(stall)]
    has_passed = stall.seconds >= ALIKE_SECONDS  # longer than an evaluation or a checkpoint takes
    culprit = next(state for state in states if state.rank == found.ranks[0])
    cause = "rank-missing-from-collective"
    if culprit.ended == "finished":
        cause = "uneven-inputs"
    elif culprit.ended:
        return []  # its end is the cause
    elif is_meeting([state for state in states if state.rank not in found.ranks]):
        cause = "rendezvous-timeout"
    told = finding(cause, evidence(stall, found))
    return [
        replace(
            told,
            title=who_is_where(states, found),
            fix=told.fix if culprit.ended else fix_for(culprit, stall),
            rank=culprit.rank,
            node=culprit.node,
            confidence="high" if found.is_sure and (has_passed or not stall.is_live) else "medium",
        )
    ]


def is_meeting(states: Sequence[RankState]) -> bool:
    """Whether these ranks still wait for the others to join the process group."""
    return bool(states) and all(
        state.stack is not None
        and any(frame.function.endswith("init_process_group") for frame in state.stack.frames)
        for state in states
    )


def nobody_to_blame(stall: Stall) -> Finding:
    """All ranks are in the same state: something that they share hangs."""
    doing = {state.doing for state in stall.states}
    situations = [str(one) for one in doing] if len(doing) == 1 else []
    return finding(
        "no-progress",
        evidence(stall, None),
        situations,
        time=duration(stall.seconds, whole=True),
        where=who_is_where(stall.states, None),
        run=stall.run.name if stall.is_live else "",
    )


def fix_for(culprit: RankState, stall: Stall) -> str:
    if culprit.kernel == "T":
        process = stall.processes.get(culprit.rank)
        return f"kill -CONT {process}: it was stopped (SIGSTOP, Ctrl-Z, a debugger)"
    if culprit.kernel == "D":
        return "look at the disk that it waits for (dmesg, df): a network disk may not be answering"
    here = f"allranks doctor {stall.run.path}"
    at = f"see where it is: ssh {culprit.node} {here}" if culprit.node else f"run {here} there"
    if culprit.stack and culprit.stack.place:
        at = f"look at {culprit.stack.place}"
    if culprit.stack and any("torch/utils/data" in frame.file for frame in culprit.stack.frames):
        at += ", in its data loader: which file or worker does it wait for?"
    stop = f"; end the run with allranks stop {stall.run.name}" if stall.is_live else ""
    return (
        f"{at}: every rank must reach the same collectives{stop}. "
        "`--stall-timeout 10m` (in the job: stall_timeout) ends such a run automatically"
    )


def evidence(stall: Stall, found: Blame | None) -> tuple[Evidence, ...]:
    """The line each rank is in, or its last sign of life; culprits first."""
    culprits = found.ranks if found else ()
    rows: list[Evidence] = []
    for state in sorted(stall.states, key=lambda state: (state.rank not in culprits, state.rank)):
        why = found.why if found and state.rank in culprits else None
        place = state.stack.place if state.stack is not None else None
        if place is not None:
            source = stall.sources.get(place, "")
            text = f"rank {state.rank} is in {place.function}{f': {source}' if source else ''}"
            rows.append(Evidence(place.file, place.line, text))
        if place is None or why is not None:
            rows.append(heartbeat(state, stall, why))
    return tuple(rows[:MOST_EVIDENCE])


def heartbeat(state: RankState, stall: Stall, why: str | None) -> Evidence:
    fields = {
        "step": state.step,
        "at": state.doing,
        "collectives": state.collectives,
        "ended": state.ended,
    }
    known = ", ".join(f"{key} {value}" for key, value in fields.items() if value is not None)
    text = f"rank {state.rank} {why or 'waits'}" + (f" ({known})" if known else "")
    return Evidence(shown_path(stall.run.events(stall.attempt, state.rank)), 0, text)


def read_stall(
    run: RunDir,
    attempt: int,
    states: Sequence[RankState],
    seconds: float,
    *,
    takes_stacks: bool = True,
) -> Stall:
    """The states with the stacks of their ranks, on this machine and on the run's other nodes."""
    processes = stacks.processes_of(run, attempt)
    more: dict[int, Stack] = {}
    if takes_stacks and len(processes) < len(states):
        words = ["-m", "allranks.run.stacks", str(run.path), str(attempt)]
        backend = backends.named(backends.of(run))
        more = stacks.from_lines(backend.on_nodes(run, words, OTHER_NODES_SECONDS))
    states = with_stacks(states, processes, more, takes=takes_stacks)
    stall = Stall(run=run, attempt=attempt, states=states, seconds=seconds, processes=processes)
    return with_sources(stall)


def with_sources(stall: Stall) -> Stall:
    places = [state.stack.place for state in stall.states if state.stack is not None]
    sources = {place: source_of(place) for place in places if place is not None}
    return replace(stall, sources=sources)


def with_last_lines(findings: list[Finding]) -> list[Finding]:
    """Number the last lines of the files of events that are shown, and read no others."""

    def numbered(row: Evidence) -> Evidence:
        path = Path(row.file)
        return replace(row, line=num_lines(path)) if path.suffix == ".jsonl" else row

    return [replace(each, evidence=tuple(map(numbered, each.evidence))) for each in findings]


def source_of(place: Frame) -> str:
    return redact(plain("".join(source_lines(place.file)[place.line - 1 : place.line]).strip()))


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
