"""Runs a step of srun to its end, and tells its ranks to stop in time."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

from allranks.errors import AllranksError
from allranks.job.job import Job
from allranks.launch.backends.slurm import submit
from allranks.launch.backends.slurm.in_job import (
    SlurmNodes,
    record_failed,
    say,
    step_environment,
    time_to_limit,
)
from allranks.launch.backends.slurm.sbatch import grace_seconds
from allranks.machine import nodelist
from allranks.run.folder import RunDir
from allranks.show.numbers import duration

EARLY_SECONDS = 90  # SLURM warns up to a minute before it was asked to, and looks every 30 s
LOOK_SECONDS = 3.0  # between looks for a request to stop that came without a signal
JUDGE_SECONDS = 0.02  # between looks at what launchers wait for
ASK_SECONDS = 120.0  # before SLURM is asked again for a limit that it has not told
FOR_EVER = math.inf
OUT_OF_MEMORY = "Out Of Memory"
# What srun says of a task: `srun: error: node2: task 1: Killed`, `...: Exited with exit code 1`.
TASK_END = re.compile(r"srun: error: (?P<node>\S+): tasks? [\d,-]+: (?P<how>.+)")
MEMORY_END = re.compile(r"slurmstepd.*(exceeded (\w+ )?memory limit|oom.kill event)", re.I)

LIGHTNING = re.compile(r"(?m)^\s*(?:from|import) +(?:lightning|pytorch_lightning)\b")
IMPORT = re.compile(r"(?m)^\s*(?:from|import) +(\.*)([\w.]*)(?: +import +\(?([\w, ]*))?")
MAX_SCRIPTS, MAX_SCRIPT_BYTES = 100, 1 << 18


@dataclass
class Relay:
    """Runs steps for one job, and knows when their ranks must stop.

    Signals can be lost (before Python listens), so the limit and the user's request are looked at
    as well.
    """

    run: RunDir
    place: SlurmNodes
    job: Job
    signals: list[signal.Signals]  # that the batch process has had; its handler adds to them
    said: deque[str]  # gets what srun says
    at_limit: bool = False  # the ranks were told to stop because the job's time is over
    first_end: tuple[str, str] | None = None  # of tasks that ended badly: node, and how
    _stop_at: float = FOR_EVER  # by the monotonic clock
    _ask_at: float = FOR_EVER  # again, where SLURM has not said when the limit is
    _next_look: float = 0.0
    _is_limit: bool = False  # what a signal warned of
    _is_warned: bool = False

    def __post_init__(self) -> None:
        self._signal, why = stop_signal(self.job)
        if why:
            say(f"{self._signal.name} will tell the script to stop: {why}")

    def run_step(
        self,
        command: Sequence[str],
        *,
        attempt: int | None = None,
        seconds: float = FOR_EVER,
        variables: Mapping[str, str] | None = None,
        judge: Callable[[], bool | None] = lambda: True,
    ) -> int:
        """Run srun to its end. `attempt`: whose ranks it starts, if it starts any.

        `judge` is asked whether the step may go on, until it knows.
        """
        self.first_end = None
        env = step_environment({**os.environ, **(variables or {})})
        step = subprocess.Popen(command, env=env, stderr=subprocess.PIPE)
        reader = threading.Thread(target=self._repeat, args=(step.stderr,), daemon=True)
        reader.start()
        deadline = time.monotonic() + seconds
        told, goes_on = False, None
        self._watch_limit()
        while True:
            try:
                step.wait(JUDGE_SECONDS if goes_on is None else 0.5)
                break
            except subprocess.TimeoutExpired:
                pass
            if goes_on is None and (goes_on := judge()) is False:
                deadline = 0.0
            if attempt is not None and not told and self.must_stop() and self._listen(attempt):
                told = True
                # srun passes USR1 and USR2 on to every task; TERM and INT it treats differently.
                step.send_signal(self._signal)
            if time.monotonic() > deadline:
                step.terminate()
        reader.join(5)
        return int(step.returncode)

    def must_stop(self) -> bool:
        """Whether the ranks must stop now."""
        if set(self.signals) - {signal.SIGUSR2}:
            return True
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            if self.run.asked_to_stop(self.place.job) is not None:
                return True
        if self.signals and not self._is_warned:
            self._is_warned = True
            self._take_warning()
        if self._stop_at == FOR_EVER and now >= self._ask_at:
            self._watch_limit()
        if now >= self._stop_at:
            # Asked again: somebody may have given the job more time.
            is_time = bool(self.signals) or not self._watch_limit()
            self.at_limit = is_time and (not self.signals or self._is_limit)
            return is_time
        return False

    def _take_warning(self) -> None:
        """A first USR2: the limit is near (SLURM says so early), or somebody sent it."""
        left, grace = self._left_and_grace()
        is_warning = left is not None and left < grace + EARLY_SECONDS
        wait = max(0.0, left - grace) if left is not None and is_warning else 0.0
        self._stop_at = time.monotonic() + wait
        self._is_limit = is_warning
        say(f"USR2: the ranks will be told to stop in {duration(wait, whole=True)}")

    def _watch_limit(self) -> bool:
        """Note when the limit will be near; whether there is still time."""
        left, grace = self._left_and_grace()
        self._ask_at = time.monotonic() + ASK_SECONDS
        if left is None:
            return False
        self._stop_at = time.monotonic() + left - grace
        return left > grace

    def _left_and_grace(self) -> tuple[float | None, int]:
        left, limit = time_to_limit(self.place.job)
        asked, needed = self.job.slurm.grace, submit.grace_needed(self.run)
        if asked is not None and limit is not None and asked.seconds > limit / 2:
            asked = None  # the partition's limit, which nobody knew when it was asked for
        return left, grace_seconds(asked, limit, needed)

    def _listen(self, attempt: int) -> bool:
        """Whether every rank has written something: before that, a signal would just kill it."""
        newest = max(self.run.attempts(), default=-1)  # later than ours if ranks restarted
        return newest >= attempt and len(self.run.ranks(newest)) == self.job.layout.ranks

    def _repeat(self, said: IO[bytes]) -> None:
        with said:
            for line in said:
                text = line.decode(errors="replace")
                self.said.append(text.strip())
                with suppress(OSError):  # a full disk must not keep srun waiting
                    sys.stdout.write(text)
                    sys.stdout.flush()
                if self.first_end is None and (ended := TASK_END.match(text)):
                    self.first_end = ended["node"], ended["how"]
                elif self.first_end is None and MEMORY_END.match(text):
                    self.first_end = "", OUT_OF_MEMORY
                # At once: SLURM leaves this process a few seconds.
                lost = dict.fromkeys(nodes_failed(text), "SLURM lost it during an attempt")
                record_failed(self.run, lost)


def nodes_failed(said: str) -> list[str]:
    """Nodes that srun names as lost, in its words: `srun: error: Node failure on node3`."""
    found: list[str] = []
    for line in said.splitlines():
        _, words, text = line.rpartition("Node failure on ")
        with suppress(AllranksError):  # a rank's own words
            found += nodelist.expand(text) if words else []
    return found


def stop_signal(job: Job) -> tuple[signal.Signals, str]:
    """The signal that tells ranks to save and stop; and why, if it was chosen here."""
    if job.slurm.signal is not None:
        return signal.Signals[f"SIG{job.slurm.signal}"], ""
    texts = script_texts(job.argv)
    lightning = next((path for path, text in texts.items() if LIGHTNING.search(text)), None)
    # One that names USR2 listens to that, whatever it imports.
    if lightning is None or any("SIGUSR2" in text for text in texts.values()):
        return signal.SIGUSR2, ""
    return signal.SIGUSR1, f"{lightning} imports Lightning, which saves and requeues on that signal"


def script_texts(words: Sequence[str]) -> dict[str, str]:
    """The Python files that a command names, and those beside them that they import."""
    modules = [name.replace(".", "/") for flag, name in pairwise(words) if flag == "-m"]
    paths = [Path(word) for word in words if word.endswith(".py")]
    paths += [Path(f"{name}{end}") for name in modules for end in (".py", "/__main__.py")]
    roots = {Path(), *(path.parent for path in paths)}
    texts: dict[str, str] = {}
    while paths and len(texts) < MAX_SCRIPTS:
        path = paths.pop(0)
        if str(path) in texts or not path.is_file():
            continue
        with suppress(OSError), path.open("rb") as file:
            texts[str(path)] = file.read(MAX_SCRIPT_BYTES).decode(errors="replace")
        for dots, module, names in IMPORT.findall(texts.get(str(path), "")):
            base = module.replace(".", "/")
            parts = [base, *(f"{base}/{name}".strip("/") for name in re.findall(r"\w+", names))]
            folders = [path.parent, *path.parent.parents][len(dots) - 1 :][:1] if dots else roots
            paths += [
                folder / f"{part}{end}"
                for folder in folders
                for part in parts
                for end in (".py", "/__init__.py")
            ]
    return texts
