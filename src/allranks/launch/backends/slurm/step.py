"""What srun starts in an allocation: the launcher of a node, or (`launcher: srun`) one rank.

    srun python -m allranks.launch.backends.slurm.step RUN_DIR/attempts/0/attempt.json

It exits with 0 if its own ranks did not fail, or were told to stop: with any other code srun would
end the other tasks. The job reports how the run ended, once all tasks have ended.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from allranks.errors import AllranksError
from allranks.launch import checks, network, prepare
from allranks.launch.backends.slurm.node_gate import pass_gate
from allranks.launch.launchers import OwnRanksWatch
from allranks.launch.node import Place, end_of, run_beside
from allranks.launch.prepare import Attempt, Prepared
from allranks.machine.gpus import local_gpus
from allranks.machine.processes import STOP_SIGNALS, listening
from allranks.run import claims
from allranks.run.claims import Claim
from allranks.run.events import append_event
from allranks.run.folder import RunDir

CLAIM_SECONDS = 5.0
REQUEUE_SECONDS = 60.0  # that asking for it may take; SLURM ends this process sooner
PASS_ON_SECONDS = 2.0  # srun signals the ranks too: this is for those it has missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attempt", type=Path, help="its attempt.json")
    path: Path = parser.parse_args().attempt
    told, run = prepare.read_attempt(path), RunDir(path.parents[2])
    variables = network.variables(told.nodes)
    if told.check:
        node_rank = int(os.environ["SLURM_NODEID"])
        pass_gate(told.check, variables, node_rank=node_rank, num_nodes=len(told.nodes))
    prepared = told.prepared(run, variables)
    try:
        network.say_once(checks.settle_precision(prepared))
    except AllranksError as error:
        print(error.shown, flush=True)
        return error.exit_code
    # Of many tasks on a node, srun ends the others when one ends: they need not all look so often.
    seconds = CLAIM_SECONDS if os.environ.get("SLURM_LOCALID", "0") == "0" else 12 * CLAIM_SECONDS
    watch(end_with_claim, run, told.claim, seconds)
    if prepared.job.command is not None and prepared.job.launcher == "srun":
        return run_rank(prepared, run, told)
    return run_node(prepared, told)


def watch(look: Callable[..., None], *args: object) -> threading.Thread:
    """Run a function in a thread for as long as this process lives."""
    thread = threading.Thread(target=look, args=args, daemon=True)
    thread.start()
    return thread


def end_with_claim(run: RunDir, number: int, seconds: float) -> None:
    """End this process, and its ranks with it, when a newer attempt has taken the run.

    SLURM may have lost sight of this node, and started the job elsewhere.
    """
    while True:
        time.sleep(seconds * random.uniform(0.8, 1.2))  # a thousand nodes must not look at once
        try:
            claims.raise_if_lost(run.claims, number)
        except AllranksError as error:
            print(f"allranks: {error.what}", flush=True)
            os._exit(1)
        except OSError:  # a disk that does not answer says nothing about the claim
            continue


def go_on_without_job(run: RunDir, claim: Claim, holder: int, is_told: Callable[[], bool]) -> None:
    """Requeue the job when its first process is killed: SLURM would only end the rest of it.

    `holder`: that process, as an open file. `is_told`: whether this task was told to stop, perhaps
    because somebody cancelled the job.
    """
    from allranks.launch.backends.slurm import allocation, in_job, sbatch

    select.select([holder], [], [])
    os.close(holder)
    place = in_job.SlurmNodes.from_environment(os.environ)
    info = run.info()
    if info.get("queued") or info.get("ended") or run.asked_to_stop(place.job):
        return
    racer = sbatch.Racer.parse(info["racers"][place.job]["layout"])
    job = allocation.Allocation(run, place, racer, claim)
    if is_told() and job.is_cancelled:
        return
    job.go_on_after(f"the job's first process was killed on {place.nodes[0]}")


@contextmanager
def watching_job(
    run: RunDir, number: int | None, is_first: bool, is_told: Callable[[], bool]
) -> Iterator[None]:
    """Have the first task of a job watch over it, and not end before the job is requeued."""
    claim = claims.newest(run.claims) if is_first and number is not None else None
    # Opened before there are ranks: it may be killed as soon as they begin.
    holder = open_holder(claim.pid, run) if claim and claim.number == number else None
    if claim is None or holder is None:
        yield
        return
    thread = watch(go_on_without_job, run, claim, holder, is_told)
    try:
        yield
    finally:
        if not is_holder(claim.pid, run):
            thread.join(REQUEUE_SECONDS)


def open_holder(process: int, run: RunDir) -> int | None:
    """The process that holds a run for a job, as a file that can be waited for.

    None if it runs on another node, or where its processes are not seen.
    """
    with suppress(OSError):  # an old kernel
        holder = os.pidfd_open(process)
        if is_holder(process, run):
            return holder
        os.close(holder)
    return None


def is_holder(process: int, run: RunDir) -> bool:
    """Whether a process of this machine is the one that holds a run for a job."""
    with suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        # By its name: one of the two paths may go through a link.
        return run.name.encode() in [os.path.basename(word) for word in words]
    return False


def run_node(prepared: Prepared, told: Attempt) -> int:
    """All ranks of this node, through torch's agent."""
    node_rank = int(os.environ["SLURM_NODEID"])
    place = Place(node_rank=node_rank, master=told.master)
    with ExitStack() as held:
        signals = held.enter_context(listening(PASS_ON_SECONDS))
        assert prepared.run is not None
        watched = (prepared.run, prepared.claim, node_rank == 0, lambda: bool(signals.received))
        held.enter_context(watching_job(*watched))
        return run_beside(prepared, place, signals)


def run_rank(prepared: Prepared, run: RunDir, told: Attempt) -> int:
    """One rank of a user's script, beside those that srun starts by itself."""
    rank, layout = int(os.environ["SLURM_PROCID"]), prepared.layout
    # srun gave every rank its own CPUs, and started as many as the layout has.
    env = {**os.environ, **prepare.ranks_environment(prepared, run, here=1, oversubscribe=False)}
    env.update(
        RANK=str(rank),
        WORLD_SIZE=str(layout.ranks),
        MASTER_ADDR=told.nodes[0],
        MASTER_PORT=str(told.port),
        ALLRANKS_ATTEMPT=str(prepared.attempt),
        ALLRANKS_RANKS_HERE=str(layout.gpus),
    )
    if layout.nodes == 1:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif env.get("GLOO_SOCKET_IFNAME") == "lo":  # from whoever submitted it
        del env["GLOO_SOCKET_IFNAME"]
    if len(local_gpus()) == 1 < layout.gpus:
        env["ALLRANKS_OWN_GPU"] = "1"  # SLURM bound one to this task: it is number 0 here
    words = [sys.executable, "-m", "allranks.launch.rank_env"]
    words += prepare.fill_command(prepared, run, prepared.attempt)
    stopped = []

    def send(number: int) -> None:
        with suppress(ProcessLookupError):
            process.send_signal(number)

    def pass_on(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        known = signal.SIGTERM if number == signal.SIGHUP else number
        later = threading.Timer(PASS_ON_SECONDS, send, (known,))
        later.daemon = True
        later.start()

    # Blocked until both are ready: the rank unblocks them itself, in rank_env.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    process = subprocess.Popen(words, env=env)
    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    with watching_job(run, prepared.claim, rank == 0, lambda: bool(stopped)):
        code = process.wait()
        twice = OwnRanksWatch(run, prepared.job).end(prepared.attempt)
        end = twice or end_of(code, is_command=True, stopped=bool(stopped))
        append_event(run.events(prepared.attempt, rank), "end", **end)
    return 1 if twice else 0 if stopped else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
