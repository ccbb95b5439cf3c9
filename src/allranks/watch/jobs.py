"""Jobs that allranks did not start: looked at from the inside, through a step of their own."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.show.secrets import redact, redact_all
from allranks.show.text import clean
from allranks.slurm import commands as slurm
from allranks.slurm import nodelist
from allranks.slurm.reasons import RUNNING, waiting_reason
from allranks.watch.sampler import MARK

SAMPLER = Path(__file__).with_name("sampler.py")
JOB_FORMAT = "%i|%T|%r|%N|%M|%L|%u|%j"
SAMPLE_SECONDS = 5.0
MAX_SAMPLES = 17_280  # a day of them; then the step ends whatever became of its reader
FIRST_SECONDS = 60.0  # in which srun must have started on all nodes

Sample = dict[str, Any]


@dataclass(frozen=True, slots=True)
class JobFacts:
    """One line of squeue."""

    job: str
    state: str
    reason: str
    nodes: tuple[str, ...]
    elapsed: str
    left: str
    user: str
    name: str


def parse_job(printed: str) -> JobFacts | None:
    """What `squeue -h -j ID -o JOB_FORMAT` printed."""
    for line in printed.splitlines():
        job, state, reason, nodes, elapsed, left, user, *name = [*line.split("|"), *[""] * 8]
        if job:
            found = tuple(nodelist.expand(nodes)) if nodes else ()
            said = redact("|".join(name).rstrip("|"))
            return JobFacts(job, state, reason, found, elapsed, left, user, said)
    return None


def find_job(job: str) -> JobFacts:
    """The job, if it runs. Raises AllranksError in words if it does not."""
    fix = "see your jobs with squeue --me, your runs with allranks ls"
    try:
        facts = parse_job(slurm.call("squeue", "-h", "-j", job, "-o", JOB_FORMAT))
    except slurm.SlurmError as error:
        if "invalid job id" not in error.words.lower():
            raise
        facts = None
    if facts is None:
        raise AllranksError(f"there is no run {job!r} here, and no job {job} in the queue", fix=fix)
    if facts.state not in RUNNING:
        why = f": {waiting_reason(facts.reason)}" if facts.state == "PENDING" else ""
        raise AllranksError(f"job {job} does not run, it is {facts.state.lower()}{why}", fix=fix)
    return facts


def has_ended(job: str) -> bool:
    """Whether SLURM no longer runs it; a SLURM that does not answer has not said so."""
    try:
        facts = parse_job(slurm.call("squeue", "-h", "-j", job, "-o", JOB_FORMAT))
    except slurm.SlurmError as error:
        return "invalid job id" in error.words.lower()
    return facts is None or facts.state not in RUNNING


def srun_command(
    job: str, num_nodes: int, python: str, *, interval: float, count: int, mode: str
) -> list[str]:
    """One task on each node of the job, beside what runs there; the sampler is its input."""
    words = f"- {job} {interval:g} {count} {mode}"
    # The Python of this command if the nodes share its disk, else whatever they have.
    script = f'export {MARK}=1; test -x "$0" && exec "$0" {words}; exec python3 {words}'
    return [
        *("srun", f"--jobid={job}", "--overlap", f"--nodes={num_nodes}", f"--ntasks={num_nodes}"),
        *("--ntasks-per-node=1", "--cpus-per-task=1", "--mem=0", "--quiet"),
        *("sh", "-c", script, python),
    ]


class Sampling:
    """Samples of all nodes as they come, from one step that lasts as long as somebody looks."""

    def __init__(
        self,
        facts: JobFacts,
        *,
        mode: str = "samples",
        interval: float = SAMPLE_SECONDS,
        count: int = MAX_SAMPLES,
    ) -> None:
        self.facts = facts
        options: dict[str, Any] = {"interval": interval, "count": count, "mode": mode}
        command = srun_command(facts.job, len(facts.nodes), sys.executable, **options)
        self._running = slurm.start(*command, text=SAMPLER.read_text())
        self._samples: queue.Queue[Sample | None] = queue.Queue()
        self._thread = threading.Thread(target=self._read, name="samples", daemon=True)
        self._thread.start()

    def new(self, seconds: float = 0.0) -> Iterator[Sample]:
        """What has come, waiting so long for the first. Raises AllranksError if the step failed."""
        while True:
            try:
                sample = self._samples.get(timeout=seconds) if seconds else self._samples.get(False)
            except queue.Empty:
                return
            if sample is None:
                self._samples.put(None)  # for who asks again
                self._check()
                return
            yield sample
            seconds = 0.0

    @property
    def is_over(self) -> bool:
        return self._running.poll() is not None

    def close(self) -> None:
        self._running.terminate()
        self._running.wait()
        self._thread.join()
        for pipe in (self._running.stdout, self._running.stderr):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self._running.stdout is not None
        pieces = Pieces()
        for line in self._running.stdout:
            sample = pieces.take(line)
            if sample is not None:
                self._samples.put(sample)
        self._samples.put(None)

    def _check(self) -> None:
        code = self._running.wait()
        said = self._running.stderr.read() if self._running.stderr else ""
        if code not in (0, -15) and said.strip():
            raise slurm.refusal("srun", said)


class Pieces:
    """Puts together what the samplers of several nodes tell at the same time."""

    def __init__(self) -> None:
        self._of_node: dict[str, list[str]] = {}

    def take(self, line: str) -> Sample | None:
        """The sample that this line is the end of. A site's own words are passed over."""
        node, _, rest = line.rstrip("\n").partition(" ")
        place, _, piece = rest.partition(" ")
        number, _, count = place.partition("/")
        if not (number.isdigit() and count.isdigit()):
            return None
        pieces = self._of_node.setdefault(node, [])
        if number == "1":
            pieces.clear()
        pieces.append(piece)
        if number != count:
            return None
        try:
            found = json.loads("".join(pieces))
        except ValueError:
            return None
        if not isinstance(found, dict) or "node" not in found:
            return None
        sample: Sample = redact_all(found)  # command lines and stacks may hold passwords
        return sample


def collect(facts: JobFacts, mode: str) -> list[Sample]:
    """One sample of each node."""
    sampling = Sampling(facts, mode=mode, interval=1.0, count=1)
    try:
        found: dict[str, Sample] = {}
        while len(found) < len(facts.nodes):
            before = len(found)
            found |= {sample["node"]: sample for sample in sampling.new(FIRST_SECONDS)}
            if len(found) == before:
                break
    finally:
        sampling.close()
    missing = sorted(set(facts.nodes) - set(found))
    if not found:
        raise AllranksError(
            f"job {facts.job}: no node answered in {FIRST_SECONDS:.0f} seconds",
            fix="see whether the job still runs: squeue -j " + facts.job,
        )
    return [*(found[name] for name in sorted(found)), *({"node": name} for name in missing)]


def stack_lines(samples: Sequence[Sample]) -> list[str]:
    """Every process's stack, with whose it is."""
    lines: list[str] = []
    for sample in samples:
        if not sample.get("stacks"):
            lines += [f"{sample['node']}: no Python process of the job was found", ""]
        for one in sample.get("stacks", []):
            rank = f"rank {one['rank']}, " if one.get("rank") is not None else ""
            lines.append(f"{sample['node']}: {rank}process {one['pid']}: {one['command'][:200]}")
            if one["by"] != "py-spy":
                install = "install it there for Python's own lines: pip install py-spy"
                lines.append(f"  {one.get('trouble')}; what the kernel knows of each thread")
                lines.append(f"  {install}")
            lines += [f"  {line}" for line in one["stack"].splitlines()] + [""]
    return [clean(line) for line in lines]
