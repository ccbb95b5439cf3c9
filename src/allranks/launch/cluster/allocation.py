"""One SLURM job of a run, from its first second to what comes after it. No torch.

The script that was sent becomes this process, on the first node, as

    python -m allranks.launch.cluster.allocation RUN_DIR --racer 2x2 --claim 0

It takes the run (or finds it taken, and ends), cancels the jobs that it beat, checks the nodes, has
srun start the ranks, passes signals on to them, and sees to it that a run that was stopped by its
time limit goes on in another job.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from allranks.errors import AllranksError
from allranks.launch import prepare
from allranks.launch.cluster import checks, ladder, submit
from allranks.launch.cluster.gate import Gate
from allranks.launch.cluster.held import Held, give_up
from allranks.launch.cluster.inside import (
    Place,
    check_command,
    check_words,
    free_port,
    has_launchers,
    say,
    step_command,
    unusable_nodes,
)
from allranks.launch.cluster.relay import Relay
from allranks.launch.cluster.sbatch import Racer, ask
from allranks.launch.prepare import Prepared, Request
from allranks.machine.processes import STOP_SIGNALS
from allranks.run import claims
from allranks.run.claims import Claim
from allranks.run.folder import RunDir
from allranks.run.run_state import lost_words
from allranks.slurm import commands as slurm

MEASURE = "ALLRANKS_MEASURE"  # see probe/start.py
PREFLIGHT_SECONDS = 25
IMPORT_SECONDS = 300  # that launchers have to import torch, before they check their nodes
STEP_TRIES = 3  # srun fails at once where the controller is deaf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--racer", type=Racer.parse, required=True)
    parser.add_argument("--claim", type=int, required=True)
    wanted = parser.parse_args()
    run, place = RunDir(wanted.run_dir), Place.from_environment(os.environ)
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


def is_held_elsewhere(run: RunDir) -> bool:
    """Whether `allranks run` trains the run, outside of SLURM."""
    if not run.is_held:
        return False
    process, host = run.holder()
    say(f"{run.name} is trained by process {process} on {host}: this job ends")
    return True


def take_claim(run: RunDir, place: Place, racer: Racer, number: int) -> Claim | None:
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


def rung_words(climbed: ladder.Ladder, rung: str) -> str:
    speed, efficiency = climbed.speeds[rung], climbed.efficiency(rung)
    said = f"ladder: {rung} makes {speed:,.1f} samples/s"
    if efficiency is None:
        said = f"ladder: no samples could be counted on {rung}, so it cannot be compared"
    else:
        said += f" ({efficiency:.0%} efficient, measured)"
    return f"{said}; " + (
        f"trains on {climbed.chosen}" if climbed.chosen else f"next is {climbed.rung}"
    )


class Allocation(Held):
    """A job that trains a run, from its first second."""

    def __init__(self, run: RunDir, place: Place, racer: Racer, claim: Claim) -> None:
        super().__init__(run, place, racer, claim)
        self.signals: list[signal.Signals] = []
        self.relay = Relay(run, place, self.job, self.signals, self.said, self._lose)

    def run_to_end(self) -> int:
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)
        submit.record_job(self.run, self.place.job, self.racer, self.claim.number)
        threading.Thread(target=self._cancel_rivals, daemon=True).start()
        say(
            f"{self.run.name}: job {self.place.job} on {', '.join(self.place.nodes)} "
            f"(layout {self.racer}, restart {self.place.restart})"
        )
        if self._is_finished():
            say("the run is finished already")
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
            say(rung_words(climbed, rung))
            if climbed.rung != rung:
                wanted = Racer.parse(climbed.rung)
                return self._climb(Racer(wanted.layout, wanted.gpu or self.racer.gpu))
            prepared, code = self._train()  # the best is where it is
        return self._what_next(prepared, code)

    def _train(self, prepared: Prepared | None = None) -> tuple[Prepared, int]:
        """An attempt; how it was prepared, and the code with which srun ended."""
        prepared = prepared or self._open()
        for _ in range(STEP_TRIES):
            command = step_command(self.job, self.place, prepared, self.claim)
            code = self.relay.run_step(
                command, attempt=prepared.attempt, variables=self._variables()
            )
            if self._is_over(prepared, code):
                break
        return prepared, code

    def _variables(self) -> dict[str, str]:
        """What ranks on a rung of a ladder are told: how many steps to measure."""
        climbing = ladder.read(self.run)
        if climbing is None or climbing.chosen is not None:
            return {}
        return {MEASURE: str(climbing.steps)}

    def _is_over(self, prepared: Prepared, code: int) -> bool:
        """Whether a step was all of an attempt; else srun could not start its ranks."""
        self.at_limit, self.first_end = self.relay.at_limit, self.relay.first_end
        if code == 0 or self._has_begun(prepared) or self._state()[0] != "RUNNING":
            return True
        say(f"srun ended with code {code} before any rank had begun: once more")
        return False

    def _train_checked(self) -> tuple[Prepared, int] | None:
        """An attempt on nodes that this run has not used yet; None if another job takes over."""
        if has_launchers(self.job):
            prepared, folder = self._prepare(), self._check_folder(0)
            gate = Gate(
                folder,
                self.place.nodes,
                seconds=IMPORT_SECONDS + PREFLIGHT_SECONDS,
                signals=self.signals,
                opens=lambda verdict: (self._hear(verdict), self._open(prepared)),
            )
            check = check_words(self.place, folder, *self._check_settings(0))
            command = step_command(self.job, self.place, prepared, self.claim, check)
            code = self.relay.run_step(
                command, attempt=prepared.attempt, variables=self._variables(), judge=gate.judge
            )
            if gate.is_open:
                is_over = self._is_over(prepared, code)
                return (prepared, code) if is_over else self._train(prepared)
            say("something is wrong with the nodes: they are checked in a separate step")
        return self._train() if self._preflight() else None

    def _climb(self, racer: Racer) -> int:
        """Go on in another layout."""
        self.run.update_info(lambda info: info.update(queued=True, layout=str(racer)))
        if self._resubmit(f"climbs to {racer}", racer):
            return 0
        give_up(self.run, f"no job could be sent for {racer}: {self.last_words()}")
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

    def _lose(self, nodes: Sequence[str]) -> None:
        self._record_failed(dict.fromkeys(nodes, "SLURM lost it during an attempt"))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(signal.Signals(number))

    def _cancel_rivals(self) -> None:
        """Take the other jobs of this run out of the queue, however long SLURM is deaf."""
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
        """Go elsewhere if SLURM gave us a node that this run has seen fail."""
        earlier = claims.all_of(self.run.claims)[:-1][-1:]
        if self.place.restart and earlier:
            self._record_failed(unusable_nodes(earlier[0].nodes))
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
        say(f"preflight took {time.monotonic() - started:.1f} s in all")
        return True if not verdict.failed else self._replace_nodes(verdict.failed)

    def _hear(self, verdict: checks.Verdict) -> bool:
        """Say and record what is known of the nodes; False if there is no time for it."""
        if self.signals:
            return False  # let the ranks save what there is
        for line in checks.words(verdict).splitlines():
            say(line)
        if verdict.ok:
            good = {*self.run.info().get("checked_nodes", []), *self.place.nodes}
            self.run.update_info(lambda info: info.update(checked_nodes=sorted(good)))
        return True

    def _check_nodes(self, *, tries: int) -> checks.Verdict:
        """Run the checks on all nodes; again where something failed that is no node's fault."""
        for number in range(tries):
            folder = self._check_folder(1 + number)
            command = check_command(self.place, folder, *self._check_settings(1 + number))
            self.relay.run_step(command, seconds=PREFLIGHT_SECONDS + 15)
            verdict = checks.verdict(folder, self.place.nodes)
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
        """Send the job again without the nodes that failed; True if it has to do with them."""
        self._record_failed(failed)
        named = "; ".join(f"{node}: {reason}" for node, reason in failed.items())
        if self.run.info().get("replaced_nodes"):
            raise AllranksError(
                f"the nodes failed their check a second time: {named}",
                fix=f"tell the site; go on with allranks resume {self.run.name} preflight=false",
                exit_code=1,
            )
        self.run.update_info(lambda info: info.update(replaced_nodes=True))
        if not self._resubmit(f"preflight failed: {named}"):
            say("no other job could be sent: going on with these nodes")
            return True
        return False

    def _prepare(self) -> Prepared:
        """The attempt that is next."""
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
        for remark in [*prepared.remarks, *prepare.environment_warnings(prepared.job)]:
            say(remark)
        return prepared


if __name__ == "__main__":
    sys.exit(main())
