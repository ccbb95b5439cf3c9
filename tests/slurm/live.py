"""The live SLURM cluster of tests/slurm/cluster.sh, as an object."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn, TypeVar

import pytest

SCRIPT = Path(__file__).with_name("cluster.sh")
SLOTS = range(1, 5)  # one for each test run at a time; 0 is left to those who start one by hand
ANSWER_SECONDS = 120.0  # for one command of SLURM's
START_SECONDS = 200.0  # less than the limit of a test: cluster.sh says more about what is wrong
CLEAN_SECONDS = 120.0  # until nodes that crashed are back and jobs that ran are gone
POLL_SECONDS = 0.2

# The job's name comes last: it alone may contain the bar.
QUEUE = {"id": "%i", "state": "%T", "partition": "%P", "account": "%a", "reason": "%r"}
QUEUE |= {"num_nodes": "%D", "nodes": "%N", "elapsed": "%M", "limit": "%l", "gres": "%b"}
QUEUE |= {"name": "%j"}
SACCT = "JobID,JobName,Partition,Account,State,ExitCode,NNodes,NodeList,Submit,Start,End,Elapsed"

T = TypeVar("T")


def unavailable(reason: str) -> NoReturn:
    """Skip the test; where nothing may be skipped, fail it."""
    if os.environ.get("ALLRANKS_NO_SKIPS"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


class Cluster:
    """Four nodes, node1 to node4, of two GPUs each: see the head of cluster.sh."""

    nodes = ("node1", "node2", "node3", "node4")

    def __init__(self, slot: int, lock: IO[str]) -> None:
        self.slot = slot
        self.lock = lock  # held as long as this lives, by no other process
        words = self.script("env").stdout.split()
        self.conf = next(word for word in words if word.startswith("SLURM_CONF="))[11:]
        self.mode = (Path(self.conf).parents[1] / "run" / "mode").read_text().strip()

    @classmethod
    def start(cls) -> Cluster:
        """Raises RuntimeError with the reason where that cannot be."""
        if os.geteuid() != 0:
            raise RuntimeError("no SLURM: only root can start a cluster")
        slot, lock = take_slot()
        try:
            run_script("down", slot)  # what a killed test run has left
            # Packages take longer than a test may: `cluster.sh install` is for those.
            outcome = run_script("up", slot, "--no-install", seconds=START_SECONDS)
            if outcome.returncode:
                raise RuntimeError(f"no SLURM: exit {outcome.returncode}, {outcome.stderr.strip()}")
            return cls(slot, lock)
        except BaseException:
            run_script("down", slot)
            lock.close()
            raise

    def stop(self) -> None:
        self.script("down")
        self.lock.close()

    @property
    def variables(self) -> dict[str, str]:
        """What makes SLURM's commands talk to this cluster."""
        return {"SLURM_CONF": self.conf, "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}

    def script(self, verb: str, *args: str) -> subprocess.CompletedProcess[str]:
        outcome = run_script(verb, self.slot, *args)
        assert outcome.returncode == 0, f"cluster.sh {verb} failed:\n{outcome.stderr}"
        return outcome

    # Faults, and their end.

    def crash(self, node: str) -> None:
        """Power loss. Noticed by SLURM after 15 to 30 seconds."""
        if self.mode != "netns":
            unavailable("a node cannot crash here: namespaces are not allowed")
        self.script("crash", node)

    def kill_slurmd(self, node: str) -> None:
        """Its jobs run on, until SLURM misses it."""
        self.script("stop-slurmd", node)

    def boot(self, node: str) -> None:
        """After a crash or `kill_slurmd`. Returns before SLURM has made use of it."""
        self.script("boot", node)

    def stop_controller(self) -> None:
        self.script("stop-ctld")

    def start_controller(self) -> None:
        self.script("start-ctld")

    def exec(self, node: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """A command on a node, outside of any job. Its exit status is not checked."""
        return run_script("exec", self.slot, node, *map(str, command))

    # SLURM's commands.

    def run(
        self, *command: str | Path, cwd: Path | None = None, script: str = ""
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            env={**os.environ, **self.variables},
            input=script,
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
            check=False,
        )

    def read(self, *command: str | Path, cwd: Path | None = None, script: str = "") -> str:
        """What a command says that must succeed."""
        outcome = self.run(*command, cwd=cwd, script=script)
        assert outcome.returncode == 0, f"{command} failed:\n{outcome.stderr}"
        return outcome.stdout.strip()

    def sbatch(self, *args: str | Path, cwd: Path | None = None, script: str = "") -> str:
        """The id of the job that is submitted; its script may be given as text."""
        return self.read("sbatch", "--parsable", *args, cwd=cwd, script=script).split(";")[0]

    def squeue(self) -> list[dict[str, str]]:
        """Jobs that have not ended, with the keys of QUEUE."""
        lines = self.read("squeue", "-h", "-r", "-o", "|".join(QUEUE.values())).splitlines()
        return [dict(zip(QUEUE, line.split("|", len(QUEUE) - 1), strict=True)) for line in lines]

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says, by its own names: JobState, NodeList, Restarts..."""
        text = self.read("scontrol", "show", "job", "-o", job_id)
        return dict(re.findall(r"([A-Z][\w:/]*)=(.*?)(?=\s+[A-Z][\w:/]*=|\s*$)", text))

    def sacct(self, job_id: str) -> list[dict[str, str]]:
        """A row for each time the job was started, oldest first. Up to 2 seconds late."""
        text = self.read("sacct", "-D", "-X", "-P", "-j", job_id, "-o", SACCT)
        names, *rows = [line.split("|") for line in text.splitlines()]
        return [dict(zip(names, row, strict=True)) for row in rows]

    def node_states(self) -> dict[str, str]:
        """As sinfo writes them: idle, mixed, down*..."""
        lines = self.read("sinfo", "-h", "-N", "-p", "gpu", "-o", "%N %T").splitlines()
        return dict(line.split() for line in lines)

    def wait(self, predicate: Callable[[], T], seconds: float, what: str) -> T:
        """The first true answer of the predicate."""
        begin = time.monotonic()
        deadline = begin + seconds
        while not (answer := predicate()):
            now = time.monotonic()
            if now >= deadline:
                state = self.run("squeue").stdout + self.run("sinfo", "-N", "-l").stdout
                raise AssertionError(f"waited {seconds:g} s for {what}\n{state}")
            time.sleep(max(POLL_SECONDS, min(1.0, 10 * (now - begin))))  # others need the CPU
            begin = time.monotonic()
        return answer

    def cancel_all(self) -> None:
        """Returns when no job is left. Jobs get no time to end by themselves."""

        def is_empty() -> bool:
            jobs = [job["id"] for job in self.squeue()]
            if jobs:  # more than once: a job may just be on its way back into the queue
                self.run("scancel", "--full", "--signal=KILL", *jobs)
                self.run("scancel", *jobs)
            return not jobs

        self.wait(is_empty, CLEAN_SECONDS, "an empty queue")

    def clean(self) -> None:
        """As it was at first: every node and the controller up, no job."""
        self.script("repair")
        self.cancel_all()
        self.wait(self.is_idle, CLEAN_SECONDS, "idle nodes")

    def is_idle(self) -> bool:
        states = self.node_states()
        for node, state in states.items():
            if state.startswith("drain"):
                self.run("scontrol", "update", f"nodename={node}", "state=resume")
        return set(states.values()) == {"idle"}


def run_script(
    verb: str, slot: int, *args: str, seconds: float = ANSWER_SECONDS
) -> subprocess.CompletedProcess[str]:
    # Its subshells would outlive a timeout of subprocess; this one ends them too, with 124.
    return subprocess.run(
        ["timeout", str(seconds), str(SCRIPT), verb, "--slot", str(slot), *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def take_slot() -> tuple[int, IO[str]]:
    """The first cluster of this machine that no other test run has, and the lock on it."""
    for slot in SLOTS:
        lock = open(f"/var/tmp/allranks-slurm-{slot}.lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        return slot, lock
    raise RuntimeError(f"no SLURM: {len(SLOTS)} other test runs have clusters")
