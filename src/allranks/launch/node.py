"""Starts, follows and stops the ranks on this machine through torch's elastic agent."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.errors import STOPPED_AT_CHECKPOINT, STOPPED_AT_ONCE, AllranksError, disk_error
from allranks.launch import meeting, prepare
from allranks.launch.follow import ENDING_SECONDS, SAVING_SECONDS, stopped_code, wait_for_ranks
from allranks.launch.launchers import OwnRanksWatch
from allranks.launch.prepare import Prepared
from allranks.launch.screen import Screen
from allranks.launch.stall_watch import StallWatch
from allranks.machine.allotted import memory_kills
from allranks.machine.processes import Signals, blocked_signals, quick_imports, signal_name
from allranks.run import claims, micro_batches
from allranks.run.events import append_event
from allranks.run.failures import describe_for_json, failure, failure_in_words, failure_lines
from allranks.run.folder import RunDir, State
from allranks.run.stalls import ended_for
from allranks.show.console import PeopleConsole
from allranks.timing.result import result

if TYPE_CHECKING:
    from allranks.launch.agent import Agent

AT_ONCE_SECONDS = 10.0  # for torch's agent to end once its ranks are killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where these ranks run: all on this machine, or as one node of several."""

    node_rank: int | None = None  # None: this machine plays every node
    master: str | None = None  # HOST:PORT of node 0
    max_restarts: int | None = None  # None: what the job says
    oversubscribe: bool = False

    @property
    def kept(self) -> dict[str, Any]:
        """What attempt.json keeps of it: a resume starts the same way."""
        return {"max_restarts": self.max_restarts, "oversubscribe": self.oversubscribe}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the command line reports."""

    run: RunDir
    result: dict[str, Any]
    exit_code: int
    error: AllranksError | None = None
    can_go_on: bool = False  # whether a later attempt can continue it


class Launch:
    """One attempt of one run, as seen from the process that started it."""

    def __init__(
        self,
        prepared: Prepared,
        place: Place,
        here: int,
        signals: Signals,
        screen: Screen,
    ) -> None:
        self.prepared = prepared
        self.place = place
        self.here = here
        self.signals = signals
        self.screen = screen
        self.first_rank = (place.node_rank or 0) * here
        with signals.leaving():
            self.run, self.agent = self._meet()
        self.disk_error: AllranksError | None = None
        self._told: set[tuple[int, int]] = set()  # (process, number of signals it was sent)
        self._stalled = StallWatch(
            self.run,
            self.prepared.job,
            self.first_rank,
            makes_steps=screen.makes_steps,
            has_checkpoint=lambda: prepare.has_checkpoint(self.prepared.job, self.run),
        )
        self._twice = OwnRanksWatch(self.run, self.prepared.job)
        self._memory_kills = memory_kills() or 0
        self._claim = claims.Watch(self.run.claims, prepared.claim, looks=prepared.request.leads)

    def _meet(self) -> tuple[RunDir, Agent]:
        """Open the run's folder (node 0) or learn where it is, and make an agent for the ranks."""
        # Imports torch: from here on ranks really run on this machine.
        with quick_imports(with_warnings=False):
            from allranks.launch import agent

        place, prepared = self.place, self.prepared
        node_rank, layout = place.node_rank or 0, str(prepared.layout)
        num_nodes = 1 if place.node_rank is None else prepared.layout.nodes
        master = meeting.split_master(place.master)
        waits = (self._interrupted, self._show_wait)
        if node_rank == 0:
            assert prepared.run is not None
            told = prepared.attempt, layout, prepared.checkpoint, prepared.claim
            mine = meeting.Meeting(str(prepared.run.path), *told)
        if num_nodes == 1:
            met = meeting.alone(mine)
        elif node_rank == 0:
            met = meeting.receive(*master, mine, num_nodes, meeting.Wait(*waits))
        else:
            met = meeting.enter(*master, node_rank, layout, meeting.Wait(*waits))
        decided = met.meeting
        store = agent.open_store(met, meeting.Wait(*waits))
        self._show(lambda: self.screen.stalled(None))
        run = RunDir(Path(decided.run_dir))
        prepared.checkpoint, prepared.attempt = decided.checkpoint, decided.attempt
        prepared.claim = decided.claim
        # Node 0's job is the one that counts; its layout is that of the meeting.
        prepared.job = prepare.load_resolved(run, layout=decided.layout)
        nodes = agent.FixedNodes(
            store,
            node_rank=node_rank,
            num_nodes=num_nodes,
            address=met.address if num_nodes == 1 else master[0],
            run=run.name,
            attempt=decided.attempt,
        )
        self.environment = prepare.ranks_environment(
            prepared, run, here=self.here, oversubscribe=place.oversubscribe
        )
        is_command = prepared.job.command is not None

        def arguments(attempt: int) -> list[str]:
            self._claim.raise_if_lost()  # the number of an attempt may be a newer holder's, too
            self._show(lambda: self.screen.starting(attempt))
            words = prepare.fill_command(prepared, run, attempt) if is_command else []
            return ["-m", "allranks.launch.rank_env", *words]

        return run, agent.Agent(
            nodes,
            arguments,
            self.environment,
            self._record_ends,
            partial(micro_batches.goes_on, run),
            num_ranks=self.here,
            max_restarts=max_restarts(prepared, place),
            # Ranks of a task cannot save once one is gone; a script may want to clean up.
            kills_peers=not is_command,
        )

    def _interrupted(self) -> bool:
        return bool(self.signals.received)

    def run_ranks(self) -> set[str]:
        """Run this node's ranks to their end; the states in which they ended.

        The agent runs beside this thread, which follows the ranks and passes signals on.
        """
        ended: list[dict[int, int | None] | Exception] = []

        def run_agent() -> None:
            try:
                ended.append(self.agent.run_quietly())
            except Exception as error:  # raised again below, where somebody hears it
                ended.append(error)

        self._show(lambda: self.screen.follow(self.run, self.prepared.job, self.first_rank))
        terminal = self.screen.open_terminal()
        if terminal is not None:
            self.environment["ALLRANKS_TERMINAL"] = f"{self.first_rank}:{terminal}"
        thread = threading.Thread(target=run_agent, daemon=True)
        with blocked_signals():  # inherited by the thread and by every rank that it starts
            thread.start()
        try:
            self._follow(thread)
            if isinstance(ended[0], Exception):
                raise ended[0]
            self._record_ends(ended[0], self.agent.attempt)
            if self.place.node_rank == 0:
                self._wait_for_other_nodes()
        finally:
            self._show(lambda: self.screen.finish(self.agent.attempt))
        return self.own_states()

    def _show_wait(self, text: str, seconds: float) -> None:
        self._show(lambda: self.screen.waiting(text, seconds))

    def _follow(self, thread: threading.Thread) -> None:
        """Until the agent's thread has ended."""
        killed = None
        while thread.is_alive():
            thread.join(0.1)
            now, awaits = time.monotonic(), self.agent.awaits()
            killed = (killed or now) if self.signals.at_once else None
            is_deaf = now > (killed or now) + AT_ONCE_SECONDS  # torch waits for a silent node 0
            no_ranks = self.agent.meets or not self.agent.processes()
            if is_deaf or (self._interrupted() and no_ranks):
                self.agent.leave()
                thread.join(1.0)  # one that runs Python while the process ends would abort it
                raise meeting.Interrupted
            self._pass_signals_on()
            self._show(lambda: self.screen.update(self.agent.attempt))
            if awaits:
                self._show_wait(*awaits)
            else:
                self._end_if_stalled()

    def _show(self, draw: Callable[[], None]) -> None:
        """Draw if possible: a closed pipe or a broken terminal must not end the training."""
        try:
            draw()
        except (OSError, ValueError):
            self.screen.mute()

    def _pass_signals_on(self) -> None:
        received = self.signals.received
        if not received:
            return
        self.agent.never_restart()
        if self.signals.at_once:
            self.agent.kill()
            return
        if not self.signals.is_due:
            return
        for process in self.agent.processes():
            if (process, len(received)) in self._told:
                continue
            self._told.add((process, len(received)))
            with suppress(ProcessLookupError):
                os.kill(process, received[-1])
            self._show(lambda: self.screen.stopping(received[-1].name))

    def _end_if_stalled(self) -> None:
        """End ranks that wait in vain: they would hold a whole allocation for hours."""
        # Ranks told to stop may save for as long as it takes: they are not ended, only reported.
        attempt, processes, stops = self.agent.attempt, self.agent.processes(), self._interrupted()
        is_over = self._claim.is_lost() or (
            processes and not stops and self._twice.must_end(attempt)
        )
        if is_over or self._stalled.check_beside(attempt, processes, may_end=not stops):
            self.agent.never_restart()
            self.agent.kill()
        line = self._stalled.line()
        self._show(lambda: self.screen.stalled(*(line or (None,))))

    def _record_ends(self, exit_codes: dict[int, int | None], attempt: int) -> None:
        """Write the end of every rank that did not: it was killed, or is a user's script."""
        self._claim.raise_if_lost()  # a newer holder's ranks have written what there is to write
        # The kernel's own count: its messages are mostly not for users to read.
        kills = (memory_kills() or 0) - self._memory_kills
        for rank, code in exit_codes.items():
            if self.run.end(attempt, rank) is not None:
                continue
            path = self.run.events(attempt, rank)
            try:
                is_command = self.prepared.job.command is not None
                end = self._twice.end(attempt) or self._stalled.end_of(rank)
                end = end or end_of(code, is_command=is_command, stopped=self._interrupted())
                if code and kills > 0:
                    end["memory_kills"] = kills
                append_event(path, "end", **end)
            except OSError as error:
                self.disk_error = disk_error(error, path)
        self._memory_kills += kills

    def _wait_for_other_nodes(self) -> None:
        """Wait until their ranks have ended: only then is it known how the run ended."""
        is_lost = "failed" in self.own_states()  # the others are ended because of it
        seconds = SAVING_SECONDS if self._interrupted() else ENDING_SECONDS
        if not is_lost:
            # In SLURM the job knows of a node that is lost, and ends this launcher.
            seconds = meeting.MEETING_SECONDS if self.prepared.request.leads else math.inf
        begin = time.monotonic()

        def is_enough() -> bool:
            waited = time.monotonic() - begin
            if waited > ENDING_SECONDS:
                self._show_wait("waiting for the ranks of other nodes to end", waited)
            return self.signals.at_once or len(self.signals.received) > 1

        ranks, attempt = self.prepared.layout.ranks, self.agent.attempt
        wait_for_ranks(self.run, attempt, ranks, seconds, is_enough, while_alive=not is_lost)
        self._show(lambda: self.screen.stalled(None))

    def run_to_end(self) -> Outcome:
        """Run this node's ranks, and report how the run ended, which the first node decides."""
        states = self.run_ranks()
        # The run is still held by this process: for everyone else it is running until we return.
        state = self.run.ended_state()
        if self.place.node_rank and states == {"finished"}:
            state = "finished"  # as far as this node knows: the first one says what the run came to
        if state == "failed" and self._interrupted() and failure(self.run) is None:
            state = "stopped"  # ranks of other nodes have not said so yet
        error = self.disk_error
        return outcome_of(self.run, self.prepared, self.place, self.signals, state, error)

    def own_states(self) -> set[str]:
        """The states in which the ranks here have ended; one without an end has failed."""
        ranks = range(self.first_rank, self.first_rank + self.here)
        ends = [self.run.end(self.agent.attempt, rank) for rank in ranks]
        return {end["state"] if end is not None else "failed" for end in ends}


def outcome_of(
    run: RunDir,
    prepared: Prepared,
    place: Place,
    signals: Signals,
    state: State,
    error: AllranksError | None = None,
) -> Outcome:
    """What the command line reports for a run in this state; `error`: one that is not a rank's."""
    outcome, attempt = result(run, state), max(run.attempts(), default=0)
    if state == "finished" and not signals.at_once:
        return Outcome(run, outcome, 0)
    if state == "stopped" or signals.at_once:
        code = STOPPED_AT_ONCE
        if not signals.at_once:
            is_interrupted = signal.SIGINT in signals.received
            code = stopped_code(run, prepared.job, is_interrupted=is_interrupted)
        if why := ended_for(run, attempt):
            outcome["reason"] = why
        can_go_on = prepare.has_checkpoint(prepared.job, run) or code == STOPPED_AT_CHECKPOINT
        return Outcome(run, outcome, code, can_go_on=can_go_on)
    error = error or describe_failure(run, prepared, place)
    return Outcome(run, outcome, error.exit_code, error)


def run_beside(prepared: Prepared, place: Place, signals: Signals) -> int:
    """Run one node's ranks where another process reports on the run; returns an exit code.

    It is 0 unless ranks of this node failed by themselves. What ranks print is only in their logs.
    """
    screen = Screen(PeopleConsole(highlight=False), echo=False)
    if place.node_rank:
        screen.mute()
    launch = None
    try:
        launch = Launch(prepared, place, prepared.layout.gpus, signals, screen)
        states = launch.run_ranks()
    except AllranksError as error:  # other nodes did not come, or node 0 is silent
        print(error.shown, flush=True)
        states = launch.own_states() if launch is not None else {"failed"}
        return error.exit_code if "failed" in states and not signals.received else 0
    if launch.disk_error is not None:
        print(launch.disk_error.shown, flush=True)
    return 1 if "failed" in states and not signals.received else 0


def end_of(code: int | None, *, is_command: bool, stopped: bool) -> dict[str, Any]:
    """The end event of a rank that did not write one; `code`: None if another rank caused it."""
    if is_command and stopped:
        state = "stopped"
    else:
        state = "finished" if is_command and code == 0 else "failed"
    fields: dict[str, Any] = {"state": state, "exit": code}
    if code is None:
        what = "ended because another rank failed"
        fields["error"] = {"what": what, "fix": "", "echo": True}
    elif code < 0:
        fields["signal"] = signal_name(-code)
    return fields


def max_restarts(prepared: Prepared, place: Place) -> int:
    return prepared.job.max_restarts if place.max_restarts is None else place.max_restarts


def describe_failure(run: RunDir, prepared: Prepared, place: Place) -> AllranksError:
    """The error that names the rank that failed, with the fix."""
    failed = failure(run)
    if failed is None:
        return AllranksError(f"run {run.name} failed", fix=f"see {run.path}", exit_code=1)
    what, error = failure_in_words(failed), failed.get("error")
    facts: dict[str, Any] = {"lines": failure_lines(failed), "facts": describe_for_json(failed)}
    if error is not None and error["fix"]:
        return AllranksError(what, fix=error["fix"], exit_code=failed["exit"], **facts)
    fix = f"allranks doctor {run.reference} shows why; the rank's output is in {failed['log']}"
    if prepare.has_checkpoint(prepared.job, run):  # else there is nothing to go on from
        fix += f"; continue with {run.resume_command}"
    if "signal" in failed and not max_restarts(prepared, place):
        fix += "; --max-restarts N would restart it automatically"
    return AllranksError(what, fix=fix, exit_code=1, **facts)
