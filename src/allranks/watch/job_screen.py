"""SLURM jobs that allranks did not start: sampled by a step on their nodes, and shown live."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from allranks.errors import AllranksError
from allranks.machine import nodelist
from allranks.show.numbers import duration, size
from allranks.show.secrets import redact, redact_all
from allranks.show.tables import Column, fit, header, join
from allranks.show.text import clean
from allranks.slurm import commands as slurm
from allranks.slurm.commands import parse_time
from allranks.slurm.reasons import RUNNING, waiting_reason
from allranks.watch.cells import RANK_COLUMNS, Mark, marked, narrow_size, rank_cells
from allranks.watch.draw import framed
from allranks.watch.sampler import GPU_FIELDS, MARK
from allranks.watch.terminal import LETTERS
from allranks.watch.views import RankView

SAMPLER = Path(__file__).with_name("sampler.py")
JOB_FORMAT = "%i|%T|%r|%N|%M|%L|%u|%j"
SAMPLE_SECONDS = 5.0
MAX_SAMPLES = 17_280  # a day's worth; then the step ends, whatever became of its reader
FIRST_SECONDS = 60.0  # for srun to start on all nodes

KEYS = "↑↓ scroll  d stack dumps  q quit"
STACK_KEYS = "↑↓ scroll  q back"

NODE = Column(key="node", title="node", rank=0, width=6, right=False, most=24)
GPU_COLUMNS = (
    NODE,
    Column(key="index", title="gpu", rank=0, width=3),
    *(column for column in RANK_COLUMNS if column.key in ("gpu", "memory", "power", "temperature")),
    Column(key="name", title="", rank=9, width=10, right=False, most=40),
)
PROCESS_COLUMNS = (
    NODE,
    Column(key="rank", title="rank", rank=1, width=4),
    Column(key="pid", title="process", rank=0, width=7),
    Column(key="cpu", title="cpus", rank=2, width=5),
    Column(key="memory", title="memory", rank=2, width=7),
    Column(key="threads", title="threads", rank=5, width=7),
    Column(key="state", title="", rank=4, width=8, right=False),
    Column(key="command", title="command", rank=3, width=12, right=False, most=120),
)
OLD_SAMPLES = 3  # samples that a node must miss to count as silent
STATES = {"R": "runs", "S": "sleeps", "D": "on disk", "T": "stopped", "t": "traced"}

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


def ask_about(job: str) -> JobFacts | None:
    """What SLURM says about a job; None if it does not know it (any more)."""
    try:
        return parse_job(slurm.call("squeue", "-h", "-j", job, "-o", JOB_FORMAT))
    except slurm.SlurmError as error:
        if not error.is_gone:
            raise
        return None


def find_job(job: str) -> JobFacts:
    """The job, if it is running; otherwise raises an AllranksError that says why not."""
    fix = "see your jobs with squeue --me, your runs with allranks ls"
    facts = ask_about(job)
    if facts is None:
        raise AllranksError(f"there is no run {job!r} here, and no job {job} in the queue", fix=fix)
    if facts.state not in RUNNING:
        why = f": {waiting_reason(facts.reason)}" if facts.state == "PENDING" else ""
        raise AllranksError(f"job {job} is not running: it is {facts.state.lower()}{why}", fix=fix)
    return facts


def has_ended(job: str) -> bool:
    """Whether SLURM says that the job is over; False if it does not answer."""
    try:
        facts = ask_about(job)
    except slurm.SlurmError:
        return False
    return facts is None or facts.state not in RUNNING


def srun_command(
    job: str, num_nodes: int, python: str, *, interval: float, count: int, mode: str
) -> list[str]:
    """One task on each node of the job, beside its own; its input is the sampler."""
    words = f"- {job} {interval:g} {count} {mode}"
    # This Python if the nodes share its disk, else whatever they have.
    script = f'export {MARK}=1; test -x "$0" && exec "$0" {words}; exec python3 {words}'
    return [
        *("srun", f"--jobid={job}", "--overlap", f"--nodes={num_nodes}", f"--ntasks={num_nodes}"),
        *("--ntasks-per-node=1", "--cpus-per-task=1", "--mem=0", "--quiet"),
        *("sh", "-c", script, python),
    ]


class Sampling:
    """Samples of all nodes as they come, from one job step that runs while somebody looks."""

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
        """New samples, waiting that long for the first. Raises AllranksError if the step failed."""
        while True:
            try:
                sample = self._samples.get(timeout=seconds) if seconds else self._samples.get(False)
            except queue.Empty:
                return
            if sample is None:
                self._samples.put(None)  # for the next call
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
            raise slurm.SlurmError("srun", said)


class Pieces:
    """Reassembles samples that several nodes print at the same time."""

    def __init__(self) -> None:
        self._of_node: dict[str, list[str]] = {}

    def take(self, line: str) -> Sample | None:
        """The sample that this line completes. Other output, such as a greeting, is skipped."""
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
            fix="check whether the job is still running: squeue -j " + facts.job,
        )
    return [*(found[name] for name in sorted(found)), *({"node": name} for name in missing)]


def stack_lines(samples: Sequence[Sample]) -> list[str]:
    """The stack of every process, with its node and rank."""
    lines: list[str] = []
    for sample in samples:
        if not sample.get("stacks"):
            lines += [f"{sample['node']}: no Python process of the job was found", ""]
        for one in sample.get("stacks", []):
            rank = f"rank {one['rank']}, " if one.get("rank") is not None else ""
            lines.append(f"{sample['node']}: {rank}process {one['pid']}: {one['command'][:200]}")
            if one["by"] != "py-spy":
                install = "to see Python's own stack, install it there: pip install py-spy"
                lines.append(
                    f"  {one.get('trouble')}; this is what the kernel knows about each thread"
                )
                lines.append(f"  {install}")
            lines += [f"  {line}" for line in one["stack"].splitlines()] + [""]
    return [clean(line) for line in lines]


def job_lines(
    facts: JobFacts,
    samples: Sequence[Sample],
    marks: Mapping[str, Mark],
    width: int,
    *,
    passed: float = 0.0,
    now: float | None = None,
) -> list[Text]:
    """Everything known about a job's nodes as one long page, `passed` seconds after asking SLURM.

    Given `now`, old samples are labelled with their age.
    """
    title = Text(f"job {facts.job} {clean(facts.name)}", style="bold")
    title.append(f"  {times(facts, passed)}", style="not bold")
    lines = [title, *(node_line(sample, now) for sample in samples)]
    gpus = [gpu_cells(s["node"], gpu, marks) for s in samples for gpu in s.get("gpus", [])]
    processes = [
        process_cells(sample["node"], one)
        for sample in samples
        for one in sorted(sample.get("processes", []), key=in_order)
    ]
    for table, rows in ((GPU_COLUMNS, gpus), (PROCESS_COLUMNS, processes)):
        if rows:
            widths = fit(table, rows, width)
            lines += [Text(), header(table, widths)]
            lines += [join(table, widths, row) for row in rows]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def in_order(process: Mapping[str, object]) -> tuple[float, int]:
    rank = str(process.get("rank"))
    return (int(rank) if rank.isdigit() else float("inf"), int(str(process["pid"])))


def times(facts: JobFacts, passed: float) -> str:
    """How long the job has run, and how much of its time limit is left."""
    elapsed, left = parse_time(facts.elapsed), parse_time(facts.left)
    said = facts.state.lower()
    if facts.state == "ENDED":
        return f"ended after {duration((elapsed or 0.0) + passed, whole=True)}"
    if elapsed is not None:
        said += f" for {duration(elapsed + passed, whole=True)}"
    if left is not None:
        return f"{said}, {duration(max(0.0, left - passed), whole=True)} left of its time limit"
    return f"{said}, without a time limit" if facts.left == "UNLIMITED" else said


def node_line(sample: Sample, now: float | None = None) -> Text:
    if "memory_total" not in sample:
        return Text(f"{sample['node']}: no answer", style="yellow")
    used = sample["memory_total"] - sample["memory_available"]
    said = f"{size(used)} of {size(sample['memory_total'])} memory in use"
    busy = sum(process.get("cpu") or 0.0 for process in sample["processes"])
    cpus = f"{busy:.1f} of {sample['cpus']} CPUs in use by the job"
    line = Text(f"{sample['node']}: {cpus}, {said}")
    age = now - sample["t"] if now is not None else 0.0
    if age > OLD_SAMPLES * SAMPLE_SECONDS:
        line.append(f", {duration(age, whole=True)} ago", style="yellow")
    return line


def gpu_cells(node: str, gpu: Mapping[str, Any], marks: Mapping[str, Mark]) -> dict[str, Text]:
    """One GPU, with the cells and marks that a rank's has."""
    used: dict[str, Any] = {
        key: gpu.get(key) for key in GPU_FIELDS.values() if key not in ("index", "name")
    }
    return {
        **rank_cells(RankView(rank=0, node=node, **used), marks, 0.0),
        "index": marked(gpu.get("index"), "{:.0f}"),
        "name": Text(clean(str(gpu.get("name") or ""))),
    }


def process_cells(node: str, process: Mapping[str, object]) -> dict[str, Text]:
    state = str(process.get("state"))
    program, _, rest = str(process.get("command")).partition(" ")
    command = f"{program.rpartition('/')[2]} {rest}"  # without the folder of the program
    return {
        "node": Text(clean(node)),
        "rank": marked(process.get("rank"), "{}"),
        "pid": marked(process.get("pid"), "{}"),
        "cpu": marked(process.get("cpu"), "{:.2f}"),
        "memory": marked(process.get("memory"), narrow_size),
        "threads": marked(process.get("threads"), "{}"),
        "state": Text(STATES.get(state, state)),
        "command": Text(clean(command)),
    }


class JobScreen:
    """The live screen of one job: samples as they come, stack dumps on request."""

    def __init__(self, facts: JobFacts, marks: Mapping[str, Mark]) -> None:
        self.facts, self.marks = facts, marks
        self.samples: dict[str, Sample] = {}
        self.stacks: list[str] | None = None
        self.top = 0
        self.is_over = False
        self.problem = ""
        self.has_ended = False
        self.silent_since: float | None = None  # when samples stopped coming
        self.is_asking = False  # for stacks
        self._ask_due = 0.0
        self._begin = time.monotonic()
        self._sampling = Sampling(facts)

    def look(self) -> None:
        try:
            self.samples |= {sample["node"]: sample for sample in self._sampling.new()}
        except AllranksError as error:
            self.problem = error.what
        if self._sampling.is_over:
            self._ask_for_the_end()

    def _ask_for_the_end(self) -> None:
        """Samples have stopped: has the job ended? SLURM takes seconds to end a cancelled one."""
        now = time.monotonic()
        self.silent_since = self.silent_since or now
        self.problem = self.problem or "samples have stopped coming"
        if not self.has_ended and now >= self._ask_due:
            self._ask_due = now + SAMPLE_SECONDS
            self.has_ended = has_ended(self.facts.job)
        if self.has_ended:
            self.facts = replace(self.facts, state="ENDED")
            self.problem = "the job has ended"

    def lines(self, width: int) -> list[Text]:
        if self.stacks is not None:
            return [Text(clean(line)) for line in self.stacks]
        known = [self.samples[name] for name in sorted(self.samples)]
        passed = (self.silent_since or time.monotonic()) - self._begin
        now = None if self.has_ended else time.time()
        lines = job_lines(self.facts, known, self.marks, width, passed=passed, now=now)
        silent = [node for node in self.facts.nodes if node not in self.samples]
        if silent and not self.problem:
            named = f"{', '.join(silent[:4])}{', …' if len(silent) > 4 else ''}"
            lines.insert(1 + len(known), Text(f"waiting for {named} to answer", style="yellow"))
        return lines

    def draw(self, width: int, height: int) -> list[Text]:
        lines = self.lines(width)
        note = f"! {clean(self.problem)}" if self.problem else ""
        note = "collecting stack dumps from every node" if self.is_asking else note
        rows = max(1, height - (2 if note else 1))
        self.top = max(0, min(self.top, len(lines) - rows))
        page = lines[self.top : self.top + rows]
        if note:
            page += [Text() for _ in range(rows - len(page))] + [Text(note, style="bold")]
        return framed(page, width, height, STACK_KEYS if self.stacks is not None else KEYS)

    def press(self, key: str, rows: int) -> None:
        key = LETTERS.get(key, key)
        moves = {"up": -1, "down": 1, "page up": 2 - rows, "page down": rows - 2}
        moves |= {"home": -(1 << 30), "end": 1 << 30}
        if key in moves:
            self.top += moves[key]
        elif key == "d" and self.stacks is None and not self.is_asking:
            self.is_asking = True
            threading.Thread(target=self._take_stacks, name="stacks", daemon=True).start()
        elif key in ("q", "escape") and self.stacks is not None:
            self.stacks, self.top = None, 0
        elif key == "q":
            self.is_over = True

    def _take_stacks(self) -> None:
        """In a thread of its own: it takes seconds, and longer on busy nodes."""
        try:
            self.stacks, self.top = stack_lines(collect(self.facts, "stacks")), 0
        except AllranksError as error:
            self.problem = error.what
        self.is_asking = False

    def close(self) -> None:
        """The step on the job's nodes ends with the screen."""
        self._sampling.close()
