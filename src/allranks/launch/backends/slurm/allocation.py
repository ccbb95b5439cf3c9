"""One SLURM job of a run, from its first second to what comes after it.

The script that was sent becomes this process, on the first node, as

    python -m allranks.launch.backends.slurm.allocation RUN_DIR --racer 2x2 --claim 0

It claims the run (or finds it taken, and ends), cancels the jobs that it beat, checks the nodes,
has srun start the ranks, passes signals on to them, and has a run that was stopped by its
time limit continue in another job.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from allranks.errors import AllranksError
from allranks.job.job import Job
from allranks.launch import checks, prepare
from allranks.launch.backends.slurm import ladder, node_gate, submit
from allranks.launch.backends.slurm.in_job import (
    SlurmNodes,
    check_command,
    check_words,
    free_port,
    has_launchers,
    has_saved,
    job_state,
    look_for_missing,
    no_progress,
    record_failed,
    requeue,
    say,
    step_command,
    unusable_nodes,
    while_silent,
    why_it_ends,
)
from allranks.launch.backends.slurm.relay import OUT_OF_MEMORY, Relay
from allranks.launch.backends.slurm.sbatch import Racer, ask
from allranks.launch.follow import ENDING_SECONDS, wait_for_ranks
from allranks.launch.prepare import Prepared, Request
from allranks.machine.processes import STOP_SIGNALS, signal_name
from allranks.run import claims
from allranks.run.claims import Claim
from allranks.run.events import append_event
from allranks.run.failures import failed_ranks, failure, failure_in_words, is_echo, missing_in_words
from allranks.run.folder import RunDir, State
from allranks.run.run_state import lost_words
from allranks.run.stalls import ended_for
from allranks.show.numbers import duration, ranks_in_words
from allranks.slurm import commands as slurm

MEASURE = "ALLRANKS_MEASURE"  # see probe/start.py
PREFLIGHT_SECONDS = 25
IMPORT_SECONDS = 300  # that launchers have to import torch, before they check their nodes
STEP_TRIES = 3  # srun fails at once where the controller is deaf
# SLURM's reasons for the end of a job whose first process was killed; it depends on the release.
OWN_END = ("JobLaunchFailure", "NonZeroExitCode", "RaisedSignal")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--racer", type=Racer.parse, required=True)
    parser.add_argument("--claim", type=int, required=True)
    wanted = parser.parse_args()
    run, place = RunDir(wanted.run_dir), SlurmNodes.from_environment(os.environ)
    if is_stopped(run, place.job) or is_held_elsewhere(run):
        return 0
    claim: Claim | None = None
    try:
        claim = take_claim(run, place, wanted.racer, wanted.claim)
        if claim is None:
            return 0
        with claims.locked(run.claims, claim.number):
            return Allocation(run, place, wanted.racer, claim).run_to_end()
    except AllranksError as error:
        say(f"error: {error.what}\n  fix: {error.fix}")
        if claims.newest(run.claims) == claim:
            give_up(run, error.what)
        return error.exit_code


def give_up(run: RunDir, reason: str, state: str = "failed") -> None:
    """Record in the run's folder that no job will continue it, and why."""
    ended = {"state": state, "reason": reason}
    run.update_info(lambda info: info.update(queued=False, ended=ended))


def is_held_elsewhere(run: RunDir) -> bool:
    """Whether `allranks run` trains the run, outside of SLURM."""
    if not run.is_held:
        return False
    process, host = run.holder()
    say(f"{run.name} is being trained by process {process} on {host}: this job ends")
    return True


def take_claim(run: RunDir, place: SlurmNodes, racer: Racer, number: int) -> Claim | None:
    """Take the run for this job; None (and nothing is written) if another one has it."""
    claims.look_anew(run.claims)
    holder = claims.newest(run.claims)
    if holder is not None and holder.job == place.job:
        number = holder.number + 1  # requeued: what was ours is ours
    claim = Claim(
        number=number,
        job=place.job,
        restart=place.restart,
        layout=str(racer.layout),
        nodes=place.nodes,
    )
    is_next = holder is None or number == holder.number + 1
    if is_next and claims.take(run.claims, claim):
        return claim
    winner = claims.newest(run.claims)
    who = f"job {winner.job} ({winner.layout})" if winner else "another job"
    say(f"{run.name} was taken by {who}: this job ({racer}) ends")
    return None


def is_stopped(run: RunDir, job: str) -> bool:
    """Whether somebody has asked this job to stop before it could begin (again)."""
    run.look_anew()
    stop, asked = run.asked_to_stop(job), job
    while stop is None and (asked := run.info().get("racers", {}).get(asked, {}).get("after")):
        stop = run.asked_to_stop(asked)  # before this job was known, which goes on with that one
    if stop is None:
        return False
    say(f"{run.name}: {stop['why']}")
    holder = claims.newest(run.claims)
    if not stop["moves"] and (holder is None or holder.job in (job, asked)):
        give_up(run, stop["why"], "stopped")
    return True


@dataclass
class Allocation:
    """A job that trains a run: from its first second to what comes after it."""

    run: RunDir
    place: SlurmNodes
    racer: Racer
    claim: Claim
    signals: list[signal.Signals] = field(default_factory=list)
    said: deque[str] = field(default_factory=lambda: deque(maxlen=3))  # srun's last lines

    def __post_init__(self) -> None:
        self.job: Job = submit.with_layout(prepare.load_resolved(self.run), self.racer)

    @cached_property
    def relay(self) -> Relay:
        return Relay(self.run, self.place, self.job, self.signals, self.said)

    def run_to_end(self) -> int:
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, _: self.signals.append(signal.Signals(number)))
        submit.record_job(self.run, self.place.job, self.racer, self.claim.number)
        threading.Thread(target=self._cancel_rivals, daemon=True).start()
        say(
            f"{self.run.name}: job {self.place.job} on {', '.join(self.place.nodes)} "
            f"(layout {self.racer}, restart {self.place.restart})"
        )
        if self._is_finished():
            say("the run has already finished")
            return 0
        if lost := lost_words(self.run):
            say(lost)
        self._check_progress()
        if self._leave_failed_nodes():
            return 0
        tried = self._train_checked() if self._must_check() else self._train()
        if tried is None:
            return 0
        prepared, code = tried
        measured = ladder.measured(self.run, self.racer)
        if measured is not None and not self.signals:
            rung, climbed = measured
            say(climbed.in_words(rung))
            if climbed.rung != rung:
                return self._climb(Racer.parse(climbed.rung))
            prepared, code = self._train()  # the best is where it is
        return self._what_next(prepared, code)

    def _train(self, prepared: Prepared | None = None) -> tuple[Prepared, int]:
        """Make an attempt; returns how it was prepared, and srun's exit code."""
        prepared = prepared or self._open()
        for _ in range(STEP_TRIES):
            code = self._run_step(prepared)
            if self._is_over(prepared, code):
                break
        return prepared, code

    def _run_step(
        self,
        prepared: Prepared,
        check: Sequence[str] = (),
        judge: Callable[[], bool | None] = lambda: True,
    ) -> int:
        """Have srun run the ranks; `check`: what launchers tell the preflight, if they are to."""
        port = free_port(self.place.job)
        told = {"nodes": self.place.nodes, "port": port, "check": tuple(check)}
        path = prepare.write_attempt(prepared, self.run, **told)
        climbing = ladder.read(self.run)
        on_rung = climbing is not None and climbing.chosen is None
        return self.relay.run_step(
            step_command(self.job, self.place, path),
            attempt=prepared.attempt,
            variables={MEASURE: str(climbing.steps)} if climbing and on_rung else {},
            judge=judge,
        )

    def _is_over(self, prepared: Prepared, code: int) -> bool:
        """Whether a step was all of an attempt: else srun could not start its ranks."""
        if code == 0 or self._has_begun(prepared) or job_state(self.place.job)[0] != "RUNNING":
            return True
        say(f"srun ended with code {code} before any rank had begun: trying again")
        return False

    def _train_checked(self) -> tuple[Prepared, int] | None:
        """An attempt on nodes that this run has not used yet; None if another job takes over."""
        if has_launchers(self.job):
            prepared, folder = self._prepare(), self._check_folder(0)
            gate = node_gate.Gate(
                folder,
                self.place.nodes,
                until=time.monotonic() + IMPORT_SECONDS + PREFLIGHT_SECONDS,
                signals=self.signals,
                opens=lambda verdict: (self._hear(verdict), self._open(prepared)),
            )
            check = check_words(self.place, folder, *self._check_settings(0))
            code = self._run_step(prepared, check, gate.judge)
            if gate.is_open:
                is_over = self._is_over(prepared, code)
                return (prepared, code) if is_over else self._train(prepared)
            say("something is wrong with the nodes: they are checked in a separate step")
        return self._train() if self._preflight() else None

    def _climb(self, rung: Racer) -> int:
        """Continue on another rung of the ladder."""
        racer = Racer(rung.layout, rung.gpu or self.racer.gpu)
        self.run.update_info(lambda info: info.update(queued=True, layout=str(racer)))
        if self._resubmit(f"climbs to {racer}", racer):
            return 0
        give_up(self.run, f"no job could be sent for {racer}: {self._last_words()}")
        return 1

    def _is_finished(self) -> bool:
        info, begun = self.run.info(), self.run.attempts()
        opened = [one["attempt"] for one in info.get("attempts", [])]
        if not begun or max(opened, default=0) > begun[-1]:
            return False  # the last one has not come to anything
        if ladder.ended_on_rung(self.run):
            return False  # a script has ended, but only because there was enough to measure
        extends = any(change["key"] != "layout" for change in info.get("changes", []))
        return self.run.ended_state() == "finished" and not extends

    def _cancel_rivals(self) -> None:
        """Cancel the other jobs of this run, however long SLURM does not answer."""
        cancelled: set[str] = set()
        pause = 1.0
        for _ in range(20):  # who is sending them may not have recorded the last one yet
            racers = self.run.info().get("racers", {})
            beaten = {job for job in racers if racers[job]["claim"] <= self.claim.number}
            others = beaten - {self.place.job} - cancelled
            try:
                if others:
                    slurm.call("scancel", "--state=PENDING", *sorted(others))
            except slurm.SlurmError as error:
                if error.is_silence:
                    others = set()
            cancelled |= others
            time.sleep(pause)
            pause = min(60.0, 2 * pause)

    def _leave_failed_nodes(self) -> bool:
        """Ask for other nodes if SLURM gave us one on which this run has failed before."""
        earlier = claims.all_of(self.run.claims)[:-1][-1:]
        if self.place.restart and earlier:
            record_failed(self.run, unusable_nodes(earlier[0].nodes))
        known = self.run.info().get("failed_nodes", {})
        here = [node for node in self.place.nodes if node in known]
        if not here:
            return False
        say(f"{', '.join(here)} failed this run before: asking for other nodes")
        return self._resubmit(f"excludes {', '.join(here)}")

    def _must_check(self) -> bool:
        """Whether there are nodes that this run has not used yet."""
        checked = self.run.info().get("checked_nodes", [])
        return self.job.preflight and not set(self.place.nodes) <= set(checked)

    def _preflight(self) -> bool:
        """Check the nodes in a step of its own; False if another job takes over."""
        started = time.monotonic()
        verdict = self._check_nodes(tries=2)
        if not self._hear(verdict):
            return True
        say(f"preflight took {duration(time.monotonic() - started)} in all")
        return True if not verdict.failed else self._replace_nodes(verdict.failed)

    def _hear(self, verdict: node_gate.Verdict) -> bool:
        """Print and record what is known about the nodes; False if there is no time for it."""
        if self.signals:
            return False  # let the ranks save what there is
        for line in node_gate.words(verdict).splitlines():
            say(line)
        if verdict.ok:
            good = {*self.run.info().get("checked_nodes", []), *self.place.nodes}
            self.run.update_info(lambda info: info.update(checked_nodes=sorted(good)))
        return True

    def _check_nodes(self, *, tries: int) -> node_gate.Verdict:
        """Run the checks on all nodes; again where something failed that is no node's fault."""
        for number in range(tries):
            folder = self._check_folder(1 + number)
            command = check_command(self.place, folder, *self._check_settings(1 + number))
            self.relay.run_step(command, seconds=PREFLIGHT_SECONDS + 15)
            verdict = node_gate.verdict(folder, self.place.nodes)
            if verdict.failed or not verdict.trouble or self.signals:
                break
        return verdict

    def _check_folder(self, number: int) -> Path:
        folder = self.run.path / "preflight" / f"{self.claim.number}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _check_settings(self, number: int) -> tuple[int, int, int]:
        """Port, GPUs and seconds of the checks of this number."""
        port = free_port(self.place.job, offset=1 + number)
        return port, ask(self.job, self.racer).gpus_per_node, PREFLIGHT_SECONDS

    def _replace_nodes(self, failed: Mapping[str, str]) -> bool:
        """Submit the job again without the nodes that failed; True if it must use them anyway."""
        record_failed(self.run, failed)
        named = "; ".join(f"{node}: {reason}" for node, reason in failed.items())
        if self.run.info().get("replaced_nodes"):
            raise AllranksError(
                f"the nodes failed their check a second time: {named}",
                fix=f"tell the site; continue with allranks resume {self.run.name} preflight=false",
                exit_code=1,
            )
        self.run.update_info(lambda info: info.update(replaced_nodes=True))
        if not self._resubmit(f"preflight failed: {named}"):
            say("no other job could be submitted: continuing with these nodes")
            return True
        return False

    def _prepare(self) -> Prepared:
        """The next attempt."""
        layout = str(self.racer.layout)
        # What may change was decided when the job was sent.
        request = Request(resume=str(self.run.path), layout=layout, leads=False, force=True)
        prepared = prepare.prepare(request)
        prepared.claim = self.claim.number
        return prepared

    def _open(self, prepared: Prepared | None = None) -> Prepared:
        """Write the attempt into the run's folder."""
        prepared = prepared or self._prepare()
        prepare.open_run(prepared, backend="slurm")
        for remark in [*prepared.remarks, *checks.warnings(prepared.job)]:
            say(remark)
        return prepared

    def _check_progress(self) -> None:
        attempts = self.run.info().get("attempts", [])
        limit = self.job.slurm.max_attempts
        if len(attempts) >= limit:
            raise AllranksError(
                f"{len(attempts)} attempts were made, as many as slurm.max_attempts allows",
                fix=f"look at the logs, then allranks resume {self.run.name} "
                f"slurm.max_attempts={2 * limit}",
                exit_code=1,
            )
        record = self.run.info().get("racers", {}).get(self.place.job, {})
        if self.place.restart == 0 and not record.get("continues"):
            return  # somebody asked for this attempt
        if (self.job.command is None or self.job.last) and no_progress(self.run, self.job):
            raise AllranksError(
                "no progress in two attempts: no checkpoint was committed in either"
                + (f"; {lost}" if (lost := lost_words(self.run)) else ""),
                fix="give it more time (slurm.time), save more often (checkpoint.every), or see "
                f"why it ends: allranks logs {self.run.name}",
                exit_code=1,
            )

    def _has_begun(self, prepared: Prepared) -> bool:
        """Whether a rank of this job has written anything."""
        newest = max(self.run.attempts(), default=-1)
        return newest >= prepared.attempt and bool(self.run.ranks(newest))

    def _is_ending(self) -> tuple[bool, str]:
        """Whether SLURM is ending this job, and its reason."""
        state, reason = job_state(self.place.job)
        return state not in ("RUNNING", "UNKNOWN"), reason

    def _what_next(self, prepared: Prepared, code: int) -> int:
        """Continue in another job if the run was stopped before its end; returns an exit code."""
        claims.raise_if_lost(self.run.claims, self.claim.number)
        self.run.look_anew()
        has_begun = self._has_begun(prepared)
        lost = self._killed(code) if has_begun else None
        # Without a rank that has begun, the run is where it was.
        state, stalled = self._tell_end(prepared, code, lost) if has_begun else ("stopped", None)
        if state == "finished":
            return 0
        stop = self.run.asked_to_stop(self.place.job)
        racers = self.run.info().get("racers", {}).values()
        has_successor = any(racer["claim"] > self.claim.number for racer in racers)
        if stop is not None and (not stop["moves"] or has_successor):
            if not stop["moves"]:
                failed = failure(self.run) if state == "failed" else None
                why = [lost or "", failure_in_words(failed) if failed else "", stop["why"]]
                give_up(self.run, "; ".join(filter(None, why)), state)
                say(f"{stop['why']}: continue with {self.run.resume_command}")
            return 0
        is_over, slurms = self._is_ending()
        if is_over and slurms != "TimeLimit":
            return 0  # SLURM is ending this job itself, and knows what comes next
        if lost:
            return self.go_on_after(lost)
        if state != "stopped":
            self._look_for_missing(max(self.run.attempts()))
            return 1
        opened = [one["attempt"] for one in self.run.info().get("attempts", [])]
        if not has_begun and code != 0 and opened.count(prepared.attempt) > 1:
            give_up(self.run, f"srun could not start the ranks, twice: {self._last_words()}")
            self._look_for_missing(prepared.attempt)
            return 1
        saved = not has_begun or has_saved(self.run, prepared, since=self.claim.time)
        if self.job.slurm.requeue and saved:
            self._continue(may_requeue=not is_over)
            return 0
        native = self.job.command is None
        reason = why_it_ends(self.run, prepared)
        if stalled and self.job.slurm.requeue:
            reason = f"{stalled}; it had saved nothing new to resume from"
        if self.relay.at_limit:
            reason = f"the job reached its time limit; {reason}"
        say(reason)
        give_up(self.run, reason, "stopped" if native else "failed")
        return 0 if native else 1

    def _killed(self, code: int) -> str | None:
        """Whether srun or a launcher was killed, in words; None if neither was.

        A launcher that lives writes an end for each of its ranks, whatever became of them.
        """
        attempt = max(self.run.attempts())  # ranks may have restarted
        if code == 0 and self._silent(attempt):  # written, but a network disk may show it late
            wait_for_ranks(self.run, attempt, self.racer.layout.ranks, ENDING_SECONDS, bool)
        silent = self._silent(attempt)
        if code == 0 or not silent or self._is_ending()[0]:
            return None
        if code < 0:
            return f"srun was killed by {signal_name(-code)} on {self.place.nodes[0]}"
        node, how = self.relay.first_end or ("", "")
        failed = [one for one in failed_ranks(self.run, attempt) if not is_echo(one)]
        if how == OUT_OF_MEMORY or (failed and how != "Killed"):
            return None  # it would happen again; or others were ended because of what failed
        hosts = {(self.run.start(attempt, rank) or {}).get("host", "") for rank in silent}
        where = node or ", ".join(sorted(hosts))
        ended = f"ended ({how})" if how.startswith("Exited") else "was killed"
        return f"the launcher on {where} {ended}, with {ranks_in_words(silent)}"

    def _tell_end(
        self, prepared: Prepared, code: int, lost: str | None
    ) -> tuple[State, str | None]:
        """How the attempt has ended, said in the log; and who kept the others waiting."""
        # Not needed before the end, and a job that starts has no time to import them.
        from allranks.launch.node import Place, describe_failure
        from allranks.launch.screen import Screen
        from allranks.show.console import PeopleConsole
        from allranks.timing.result import result

        attempt = max(self.run.attempts())
        # Ranks that could not write their end: another one failed, and their launcher was killed.
        for rank in self._silent(attempt) if lost is None else ():
            append_event(self.run.events(attempt, rank), "end", state="failed", exit=None)
        state, stalled = self.run.ended_state(), ended_for(self.run, attempt)
        say(f"attempt {attempt} is {'lost' if lost else state} (srun: {code})")
        if lost or stalled:
            say(str(lost or stalled))
        if state == "failed" and not lost:
            print(describe_failure(self.run, prepared, Place()).shown, flush=True)
        elif not lost:
            console = PeopleConsole(highlight=False)
            Screen(console).summary(result(self.run, state), can_go_on=False)
        return state, stalled

    @property
    def is_cancelled(self) -> bool:
        """Whether SLURM is ending this job for another reason than the end of its first process."""
        is_ending, why = self._is_ending()
        return is_ending and not why.startswith(OWN_END)

    def go_on_after(self, lost: str) -> int:
        """Go on in another attempt, as after a lost node, and note what was killed; exit code."""
        if not self.job.slurm.requeue:
            give_up(self.run, f"{lost}, and slurm.requeue is false")
            return 1
        note = {"attempt": max(self.run.attempts()), "what": lost}
        self.run.update_info(lambda info: info.update(lost=note))
        self._continue()
        return 0

    def _look_for_missing(self, attempt: int) -> None:
        """If a rank did not find a file, record which nodes have it as the reason for the end."""
        found = look_for_missing(self.run, attempt, self.place, self.said)
        if found is None:
            return
        what, fix = missing_in_words(found, is_task=self.job.command is None)
        say(f"error: {what}\n  fix: {fix}")
        failed = failure(self.run) if self.run.attempts()[-1:] == [attempt] else None
        rank = f"rank {failed['rank']} did not find a file: " if failed is not None else ""
        give_up(self.run, f"{rank}{what}")
        self.run.update_info(lambda info: info.update(missing=found))

    def _last_words(self) -> str:
        return "; ".join(self.said) or "it said nothing"

    def _silent(self, attempt: int) -> list[int]:
        """Ranks that have begun, and whose end nobody has written."""
        return [rank for rank in self.run.ranks(attempt) if self.run.end(attempt, rank) is None]

    def _continue(self, *, may_requeue: bool = True) -> None:
        """Have SLURM requeue this job; if it refuses, submit another."""
        needed, asked = submit.grace_needed(self.run), self.job.slurm.grace
        if asked is not None and needed > asked.seconds:
            take, grace = duration(needed / 3, whole=True), duration(needed, whole=True)
            say(f"checkpoints take {take}: slurm.grace should be over {grace}")
        self.run.update_info(lambda info: info.update(queued=True))
        refused = "its time is up"
        try:
            if may_requeue:
                say("continuing in the next attempt: scontrol requeue")
                while_silent(lambda: requeue(self.place))
                return
        except slurm.SlurmError as error:
            refused = error.what
        say(f"{refused}: sending another job instead")
        if not self._resubmit("continues"):
            give_up(self.run, f"could be neither requeued nor sent again: {refused}")

    def _resubmit(self, why: str, racer: Racer | None = None) -> bool:
        """Submit another job, in this layout or another, that starts when this one has ended."""
        racer, after = racer or self.racer, self.place.job
        send = partial(
            submit.send,
            submit.with_layout(self.job, racer),
            racer,
            self.run,
            claim=self.claim.number + 1,
            after=[after],
            exclude=",".join(self.run.info().get("failed_nodes", {})),
            record={"continues": why, "after": after},
        )
        try:
            job_id = while_silent(send)
        except slurm.SlurmError as error:
            say(error.what)
            return False
        say(f"sent job {job_id}: {why}")
        return True


if __name__ == "__main__":
    sys.exit(main())
