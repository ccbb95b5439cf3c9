"""A job that holds a run: whether to go on, and what comes after it. No torch."""

from __future__ import annotations

import re
import signal
from collections import deque
from collections.abc import Mapping
from typing import Any

from allranks.errors import AllranksError
from allranks.job.job import Job
from allranks.launch import prepare
from allranks.launch.cluster import submit
from allranks.launch.cluster.inside import (
    Place,
    has_saved,
    patiently,
    say,
    while_silent,
    why_it_ends,
)
from allranks.launch.cluster.missing_files import look_for_missing
from allranks.launch.cluster.relay import OUT_OF_MEMORY
from allranks.launch.cluster.sbatch import Racer
from allranks.launch.prepare import Prepared
from allranks.launch.waiting import ENDING_SECONDS, wait_for_ranks
from allranks.machine.processes import blocked_signals
from allranks.run import claims, missing
from allranks.run.claims import Claim
from allranks.run.events import append_event
from allranks.run.failures import failed_ranks, failure, failure_in_words, is_echo, ranks_in_words
from allranks.run.folder import RunDir, State
from allranks.run.run_state import lost_words
from allranks.run.stalls import ended_for
from allranks.slurm import commands as slurm

# SLURM's reasons for the end of a job whose first process was killed; it depends on the release.
OWN_END = ("JobLaunchFailure", "NonZeroExitCode", "RaisedSignal")


def give_up(run: RunDir, reason: str, state: str = "failed") -> None:
    """Say in the run's folder that nobody will go on with it, and why."""
    ended = {"state": state, "reason": reason}
    run.update_info(lambda info: info.update(queued=False, ended=ended))


class Held:
    """A run in the hands of one job."""

    def __init__(self, run: RunDir, place: Place, racer: Racer, claim: Claim) -> None:
        self.run = run
        self.place = place
        self.racer = racer
        self.claim = claim
        self.job: Job = submit.with_layout(prepare.load_resolved(run), racer)
        self.said: deque[str] = deque(maxlen=3)  # srun's last lines
        self.first_end: tuple[str, str] | None = None  # of its tasks: see relay.py
        self.at_limit = False  # its ranks were stopped because its time is over

    def last_words(self) -> str:
        return "; ".join(self.said) or "it said nothing"

    def _check_progress(self) -> None:
        attempts = self.run.info().get("attempts", [])
        limit = self.job.slurm.max_attempts
        if len(attempts) >= limit:
            raise AllranksError(
                f"{len(attempts)} attempts were made, as many as slurm.max_attempts allows",
                fix=f"look into the logs, then allranks resume {self.run.name} "
                f"slurm.max_attempts={2 * limit}",
                exit_code=1,
            )
        if self.place.restart == 0 and not self._is_continuation():
            return  # somebody asked for this attempt
        if (self.job.command is None or self.job.last) and no_progress(self.run, self.job):
            raise AllranksError(
                "no progress in two attempts: no checkpoint was committed in either"
                + (f"; {lost}" if (lost := lost_words(self.run)) else ""),
                fix="give it more time (slurm.time), save more often (checkpoint.every), or see "
                f"why it ends: allranks logs {self.run.name}",
                exit_code=1,
            )

    def _is_continuation(self) -> bool:
        return bool(self.run.info().get("racers", {}).get(self.place.job, {}).get("continues"))

    def _has_begun(self, prepared: Prepared) -> bool:
        """Whether a rank of this job has written anything."""
        newest = max(self.run.attempts(), default=-1)
        return newest >= prepared.attempt and bool(self.run.ranks(newest))

    def _record_failed(self, failed: Mapping[str, str]) -> None:
        if failed:
            self.run.update_info(lambda info: info.setdefault("failed_nodes", {}).update(failed))

    def _state(self) -> tuple[str, str]:
        """This job's state and its reason in SLURM's words, once SLURM answers."""
        try:
            printed = patiently("squeue", "-h", "-j", self.place.job, "-o", "%T|%r").strip()
        except slurm.SlurmError as error:
            return "GONE" if "invalid job id" in error.words.lower() else "UNKNOWN", ""
        state, _, reason = (printed or "GONE").partition("|")
        return state, reason

    def _is_ending(self) -> tuple[bool, str]:
        """Whether SLURM is ending this job, and its reason."""
        state, reason = self._state()
        return state not in ("RUNNING", "UNKNOWN"), reason

    def _what_next(self, prepared: Prepared, code: int) -> int:
        """Go on in another job if the run was stopped short; the exit code of this one."""
        claims.check(self.run.claims, self.claim.number)  # raises if another job has it by now
        self.run.look_anew()
        has_begun = self._has_begun(prepared)
        lost = self._killed(code) if has_begun else None
        # Without a rank that has begun, the run is where it was.
        state, stalled = self._tell_end(prepared, code, lost) if has_begun else ("stopped", None)
        if state == "finished":
            return 0
        stop = self.run.asked_to_stop(self.place.job)
        if stop is not None and (not stop["moves"] or self._has_successor()):
            if not stop["moves"]:
                failed = failure(self.run) if state == "failed" else None
                why = [lost or "", failure_in_words(failed) if failed else "", stop["why"]]
                give_up(self.run, "; ".join(filter(None, why)), state)
                say(f"{stop['why']}: go on with {self.run.resume_command}")
            return 0
        is_over, slurms = self._is_ending()
        if is_over and slurms != "TimeLimit":
            return 0  # SLURM is ending this job itself, and knows what comes next
        if lost:
            return self.go_on_after(lost)
        if state != "stopped":
            self._look_for_missing(max(self.run.attempts()))
            return 1
        if not has_begun and code != 0 and self._tries(prepared) > 1:
            give_up(self.run, f"srun could not start the ranks, twice: {self.last_words()}")
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
        if self.at_limit:
            reason = f"the job reached its time limit; {reason}"
        say(reason)
        give_up(self.run, reason, "stopped" if native else "failed")
        return 0 if native else 1

    def _killed(self, code: int) -> str | None:
        """What was killed that is no rank, in words: srun, or a launcher; None if nothing was.

        A launcher that lives writes an end for each of its ranks, whatever became of them.
        """
        attempt = max(self.run.attempts())  # ranks may have restarted
        if code == 0 and self._silent(attempt):  # written, but a network disk may show it late
            wait_for_ranks(self.run, attempt, self.racer.layout.ranks, ENDING_SECONDS, bool)
        silent = self._silent(attempt)
        if code == 0 or not silent or self._is_ending()[0]:
            return None
        if code < 0:
            known = -code in {int(one) for one in signal.Signals}
            name = signal.Signals(-code).name if known else f"signal {-code}"
            return f"srun was killed by {name} on {self.place.nodes[0]}"
        node, how = self.first_end or ("", "")
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
        from allranks.launch.local import Place as OneMachine
        from allranks.launch.local import describe_failure
        from allranks.launch.screen import PeopleConsole, Screen
        from allranks.timing.steps import result

        attempt = max(self.run.attempts())
        if lost is None:
            self._record_silent(attempt)
        state, stalled = self.run.ended_state(), ended_for(self.run, attempt)
        say(f"attempt {attempt} is {'lost' if lost else state} (srun: {code})")
        if lost or stalled:
            say(str(lost or stalled))
        if state == "failed" and not lost:
            print(describe_failure(self.run, prepared, OneMachine()).shown, flush=True)
        elif not lost:
            console = PeopleConsole(highlight=False, width=100)
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
        what, fix = missing.in_words(found, is_task=self.job.command is None)
        say(f"error: {what}\n  fix: {fix}")
        failed = failure(self.run) if self.run.attempts()[-1:] == [attempt] else None
        rank = f"rank {failed['rank']} did not find a file: " if failed is not None else ""
        give_up(self.run, f"{rank}{what}")
        self.run.update_info(lambda info: info.update(missing=found))

    def _tries(self, prepared: Prepared) -> int:
        """How often this attempt was opened: more than once if no rank has ever begun it."""
        opened = [one["attempt"] for one in self.run.info().get("attempts", [])]
        return opened.count(prepared.attempt)

    def _has_successor(self) -> bool:
        """Whether a job was sent that goes on with the run after this one."""
        racers = self.run.info().get("racers", {}).values()
        return any(racer["claim"] > self.claim.number for racer in racers)

    def _silent(self, attempt: int) -> list[int]:
        """Ranks that have begun, and whose end nobody has written."""
        return [rank for rank in self.run.ranks(attempt) if self.run.end(attempt, rank) is None]

    def _record_silent(self, attempt: int) -> None:
        """Write an end for ranks that could not: another one failed, and theirs was killed."""
        for rank in self._silent(attempt):
            append_event(self.run.events(attempt, rank), "end", state="failed", exit=None)

    def _continue(self, *, may_requeue: bool = True) -> None:
        """Have SLURM run this job again; where it may not, send another."""
        needed, asked = submit.grace_needed(self.run), self.job.slurm.grace
        if asked is not None and needed > asked.seconds:
            say(f"checkpoints take {needed / 3:.0f} s: slurm.grace should be over {needed}s")
        self.run.update_info(lambda info: info.update(queued=True))
        refused = "its time is over"
        try:
            if may_requeue:
                say("going on in the next attempt: scontrol requeue")
                while_silent(self._requeue)
                return
        except slurm.SlurmError as error:
            refused = error.what
        say(f"{refused}: sending another job instead")
        if not self._resubmit("continues"):
            give_up(self.run, f"could be neither requeued nor sent again: {refused}")

    def _requeue(self) -> str:
        try:
            with blocked_signals():  # a requeue ends all that this job runs, scontrol as well
                return slurm.call("scontrol", "requeue", self.place.job)
        except slurm.SlurmError:
            # It may have been done all the same: by a scontrol that could not say so, or by SLURM.
            shown = patiently("scontrol", "show", "job", "-o", self.place.job)
            restarts = re.search(r"\bRestarts=(\d+)", shown)
            if restarts is None or int(restarts[1]) <= self.place.restart:
                raise
            return ""

    def _resubmit(self, why: str, racer: Racer | None = None) -> bool:
        """Send another job that starts when this one has ended, in its layout or another."""
        racer = racer or self.racer
        job = submit.with_layout(self.job, racer)
        excluded = ",".join(self.run.info().get("failed_nodes", {}))
        after = f"afterany:{self.place.job}"
        record = {"continues": why, "after": self.place.job}
        options: dict[str, Any] = {
            "claim": self.claim.number + 1,
            "exclude": excluded,
            "dependency": after,
            "record": record,
        }
        try:
            job_id = while_silent(lambda: submit.send(job, racer, self.run, **options))
        except slurm.SlurmError as error:
            say(error.what)
            return False
        say(f"sent job {job_id}: {why}")
        return True


def no_progress(run: RunDir, job: Job) -> bool:
    """Whether the last two attempts began where this one would begin."""
    key = "checkpoint" if job.command is None else "last_changed"
    starts = [attempt.get(key) for attempt in run.info().get("attempts", [])]
    newest = (
        prepare.newest_checkpoint(run) if job.command is None else prepare.last_change(run, job)
    )
    return len(starts) >= 2 and starts[-2:] == [newest, newest]
