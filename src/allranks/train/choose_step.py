"""`compile: auto`: trains at once, and switches to the form of the step that is measured fastest.

The plain step is timed, then replayed as a CUDA graph and timed again; meanwhile a process of its
own compiles into the shared cache, so that the ranks can take the compiled step from there in
seconds. What an earlier run has compiled is taken from there after a few steps. All ranks decide
the same at the same step. The decisions are kept in the run's folder and in its checkpoints: a
resumed run switches at the same steps, and so computes the same bits.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from allranks.job.job import Job
from allranks.layout import Layout
from allranks.run.folder import write_atomically
from allranks.timing import timeline
from allranks.train import compile_ahead
from allranks.train.compile_ahead import OUT_OF_MEMORY, Child, CompileCost
from allranks.train.data import Batch, MicroBatch
from allranks.train.fast_step import (
    CudaGraph,
    Graph,
    GraphStep,
    compile_now,
    graph_refused,
    set_compiled,
)
from allranks.train.loop import Compute, Training, clear_gradients, one_step, seed_dropout

if TYPE_CHECKING:
    from allranks.train.build import Rank

EAGER, COMPILED, GRAPH = "eager", "compiled", " as a CUDA graph"
FORMS = (EAGER, EAGER + GRAPH, COMPILED, COMPILED + GRAPH)  # the plainest first
SETTLE_STEPS, FIRST_STEPS, BLOCKS = 3, 5, 3
LEAST_STEPS = 4  # of a block
MOST_TIMED = 5  # timing a form takes at most one step of so many that are left
GLANCE_STEPS = 2  # of a block of the first steps: they end before the probe traces some
TOO_LATE = "the steps that are left would not pay for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """When to measure, and what has to be gained."""

    measure_from: int = 30  # steps: by then, the probe has traced some
    block_seconds: float = 0.2
    least_gain: float = 1.01
    graph_pays: int = 100  # steps that are left: a rehearsal takes as long as three
    child_pays: float = 30.0  # seconds of training that are left, also when the child is done
    foreground_pays: float = 300.0  # the same, where the training has to wait for the compiler
    cached_pays: float = 5.0  # times what it takes to compile from the cache, if that is known
    make_graph: Callable[[torch.device], Graph] | None = CudaGraph
    start_child: Callable[[Training], Child | str] | None = None  # or why there is none


@dataclass(slots=True, kw_only=True)
class Record:
    """Which form was used from which step on, in all attempts of a run on one kind of machine."""

    layout: str
    device: str
    torch: str = torch.__version__
    forms: list[tuple[int, str]] = field(default_factory=lambda: [(1, EAGER)])  # from this step on
    decided: int = 0  # for a training of so many steps; 0: not yet

    def update_from(self, stored: Any) -> None:
        """Take over what an earlier attempt decided, if it was on the same kind of machine."""
        with suppress(KeyError, TypeError, ValueError):
            same = all(stored[key] == getattr(self, key) for key in ("layout", "device", "torch"))
            forms = [(int(step), str(form)) for step, form in stored["forms"]]
            if same and forms:
                self.forms, self.decided = forms, int(stored["decided"])

    def form_at(self, step: int) -> str:
        return [form for first, form in self.forms if first <= step][-1]

    def switch(self, step: int, form: str) -> None:
        """Set the form from a step on; drop what an earlier attempt recorded from there on."""
        self.forms = [*((first, was) for first, was in self.forms if first < step), (step, form)]


class MeasuredStep:
    """The device step of a training, in the form that has been found fastest so far."""

    def __init__(self, rules: Rules, record: Record, file: Path, cost: CompileCost) -> None:
        self.rules = rules
        self.cost = cost
        self.record = record
        self.file = file  # where the record is kept
        self.form = EAGER
        self.lost = 0.0  # seconds for which the training waited for compilers and captures
        self.refused: dict[str, str] = {}  # why, by form
        self._step: Compute = one_step
        self._batch: Batch | None = None  # the one that is trained on next
        self._script: Iterator[None] | None = None

    def __call__(self, t: Training, batch: Batch, want_loss: bool) -> torch.Tensor | None:
        if self._script is None:
            self._script = self._choose(t)
        self._batch = batch
        next(self._script, None)  # collective
        return self._step(t, self._batch, want_loss)

    def _choose(self, t: Training) -> Generator[None, None, None]:
        """Decide what the fastest form is; every `yield` is a step in the present one."""
        t.notes["compile"] = asdict(self.record)
        yield from self._repeat_earlier_attempts(t)
        if self.record.decided == t.last_step:
            return
        set_choosing(True)
        seconds: dict[str, float] = {}
        if self.form == EAGER:
            glance = yield from self._glance(t)
            if self._was_compiled_before(t, glance) and self._use(t, COMPILED):
                self._note_switch(t)
                seconds[EAGER] = glance
        for _ in range(self.rules.measure_from):
            yield
        seconds[self.form] = yield from self._time(t)
        if self.form.startswith(COMPILED):  # since the first steps, or an earlier attempt
            yield from self._try_forms(t, (COMPILED + GRAPH, EAGER), seconds)
        if not self.form.startswith(COMPILED):
            yield from self._try_forms(t, (EAGER, EAGER + GRAPH), seconds)
            fastest = min(seconds.values())
            if COMPILED not in seconds and (yield from self._compiler_is_ready(t, fastest)):
                yield from self._try_forms(t, (COMPILED, COMPILED + GRAPH), seconds)
            else:
                self._report(t, seconds)
        self.record.decided = t.last_step
        self._keep_record(t)
        set_choosing(False)

    def _repeat_earlier_attempts(self, t: Training) -> Generator[None, None, None]:
        """Use the forms that steps had in an earlier attempt, at the same steps."""
        last = max(step for step, _ in self.record.forms)
        while True:
            step = t.progress.step + 1
            wanted = self.record.form_at(step)
            if wanted != self.form and not self._use(t, wanted):
                self.record.switch(step, self.form)
                self.record.decided = t.last_step  # it would be refused again
                self._keep_record(t)
                self._report(t, {})
                return
            if step >= last:
                break
            yield
        if self.form != EAGER:
            self._report(t, {})

    def _try_forms(
        self, t: Training, forms: Sequence[str], seconds: dict[str, float]
    ) -> Generator[None, None, None]:
        """Time each of these forms that is new and works here; go on in the fastest form so far."""
        for form in forms:
            was_refused = form.startswith(COMPILED) and COMPILED in self.refused
            if form in seconds or was_refused or self._graph_refused(t, form):
                continue
            if self._use(t, form):
                self._note_switch(t)
                seconds[form] = yield from self._time(t)
        self._settle_on_fastest(t, seconds)

    def _graph_refused(self, t: Training, form: str) -> bool:
        too_late = t.last_step - t.progress.step < self.rules.graph_pays
        is_refused = self.rules.make_graph is None or too_late or graph_refused(t) is not None
        return is_refused and form.endswith(GRAPH)

    def _settle_on_fastest(self, t: Training, seconds: dict[str, float]) -> None:
        """Switch to the fastest form, or to a plainer one that is about as fast."""
        least = min(seconds.values()) * self.rules.least_gain
        fastest = next(form for form in FORMS if seconds.get(form, math.inf) <= least)
        if fastest != self.form and self._use(t, fastest):
            self._note_switch(t)
        self._report(t, seconds)

    def _use(self, t: Training, form: str) -> bool:
        """Use this form from the next step on, unless it fails on some rank. Collective."""
        began = perf_counter()
        was_compiled, is_compiled = (one.startswith(COMPILED) for one in (self.form, form))
        step, why = one_step, ""
        assert self._batch is not None
        micros = list(self._batch.micro_batches)
        try:
            if is_compiled and not was_compiled:
                with self.cost.noted():
                    compile_now(t, micros[0])
                self.cost = CompileCost(None)  # again, it would take less in this process
            elif was_compiled and not is_compiled:
                set_compiled(t, False)
            if form.endswith(GRAPH):
                assert self.rules.make_graph is not None
                graph = self.rules.make_graph(t.device)
                step = GraphStep(t, self._with(micros), graph)
                step.rehearse(t)
        except Exception as error:  # by whatever a user's model does that a compiler cannot follow
            why = in_a_line(error)
        works = bool(smallest(t, float(not why)))  # collective
        if works:
            self.form, self._step = form, step
        elif is_compiled != was_compiled:
            set_compiled(t, was_compiled)
        if not works:
            self.refused[form] = why or "it does not work on another rank"
        if why:
            print(f"note: compile: auto does not use the form {form}: {why}")
        clear_gradients(t)
        seed_dropout(t, t.progress.step + 1)
        self._batch = self._with(micros)
        self.lost += perf_counter() - began
        t.meter.begin_step()  # the time of this belongs to no step
        return works

    def _with(self, micros: list[MicroBatch]) -> Batch:
        assert self._batch is not None
        return self._batch._replace(micro_batches=iter(micros))

    def _time(self, t: Training) -> Generator[None, None, float]:
        """Seconds of a step in the present form: the same number on every rank. Collective."""
        for _ in range(SETTLE_STEPS):
            yield
        guess = yield from self._time_block(t, FIRST_STEPS)
        count = math.ceil(self.rules.block_seconds / max(guess, 1e-6))
        most = (t.last_step - t.progress.step) // (MOST_TIMED * BLOCKS)
        return (yield from self._median_block(t, max(LEAST_STEPS, min(count, most))))

    def _glance(self, t: Training) -> Generator[None, None, float]:
        """Seconds of a plain step, roughly: of an attempt's first ones. Collective."""
        for _ in range(SETTLE_STEPS):
            yield
        return (yield from self._median_block(t, GLANCE_STEPS))

    def _median_block(self, t: Training, count: int) -> Generator[None, None, float]:
        """The median of several blocks of so many steps each, in seconds a step. Collective."""
        blocks = []
        for _ in range(BLOCKS):
            blocks.append((yield from self._time_block(t, count)))
        return statistics.median(blocks)

    def _time_block(self, t: Training, count: int) -> Generator[None, None, float]:
        settle(t.device)
        t.meter.begin_step()
        before = t.meter.step_seconds  # evaluations and saves in between are not in it
        for _ in range(count):
            yield
        began = perf_counter()
        settle(t.device)
        seconds = t.meter.step_seconds - before + perf_counter() - began
        return mean(t, seconds / count)  # collective

    def _was_compiled_before(self, t: Training, seconds: float) -> bool:
        """Whether compiling from the cache pays, because it is known to take little. Collective."""
        cost = -smallest(t, -self.cost.seconds())  # collective
        left = (t.last_step - t.progress.step) * seconds
        return compiling_refused(t) is None and left >= self.rules.cached_pays * cost

    def _compiler_is_ready(self, t: Training, seconds: float) -> Generator[None, None, bool]:
        """Whether to compile now: the child is done, or waiting for it pays. Collective."""

        def pays(least: float) -> bool:
            return (t.last_step - t.progress.step) * seconds >= least

        if why := self.refused.get(COMPILED) or compiling_refused(t):
            self.refused[COMPILED] = why
            return False
        if not pays(self.rules.child_pays):
            self.refused[COMPILED] = TOO_LATE
            return False
        child = self.rules.start_child(t) if self.rules.start_child else "there is none"
        if not smallest(t, float(not isinstance(child, str))):  # collective
            if not isinstance(child, str):
                child.kill()
                child = "there is no room for it on another node"
            if not pays(self.rules.foreground_pays):
                self.refused[COMPILED] = f"not compiled beside the training: {child}"
            return pays(self.rules.foreground_pays)
        assert not isinstance(child, str)
        while not t.pulse.all_ready:
            t.pulse.ready = child.poll() is not None
            yield
        t.pulse.ready = t.pulse.all_ready = False
        failed = {0: "", OUT_OF_MEMORY: "not enough memory"}.get(child.poll() or 0, "it failed")
        if failed:
            print(f"note: compile: auto does not compile: {failed}: see compile-*.log")
        if not smallest(t, float(not failed)):  # collective
            why = failed or "it failed on another node"
            self.refused[COMPILED] = f"not compiled beside the training: {why}"
            return False
        if not pays(self.rules.child_pays):  # ranks wait for the cache, and for the first passes
            self.refused[COMPILED] = TOO_LATE
            return False
        return True

    def _note_switch(self, t: Training) -> None:
        self.record.switch(t.progress.step + 1, self.form)
        self._keep_record(t)

    def _keep_record(self, t: Training) -> None:
        """Keep the record before the first step that follows it."""
        t.notes["compile"] = asdict(self.record)
        if t.mesh.world.rank == 0:
            write_atomically(self.file, json.dumps(t.notes["compile"]) + "\n")

    def _report(self, t: Training, seconds: dict[str, float]) -> None:
        """The event that says what was chosen, and why not more."""
        if t.mesh.world.rank != 0:
            return
        why = "; ".join(f"{form}: {said}" for form, said in self.refused.items())
        t.meter.log.write(
            "compile",
            step=self.record.forms[-1][0],
            form=self.form,
            lost=round(self.lost, 6),
            times={form: round(took, 7) for form, took in seconds.items()},
            **({"why": why} if why else {}),
        )


def compiling_refused(t: Training) -> str | None:
    """Why `auto` does not try to compile this training."""
    if not t.data.pads:
        return "batches differ in shape"
    if t.norms and t.mesh.data.size > 1:
        return "BatchNorm exchanges its statistics in the forward pass"  # where one rank may fail
    return None


def measured_step(
    me: Rank, job: Job, rules: Rules, device: torch.device, notes: Mapping[str, Any]
) -> MeasuredStep:
    """The step of `compile: auto`, which knows what earlier attempts chose. Collective."""
    record, file = (
        Record(layout=str(me.layout), device=device_name(device)),
        me.run.path / "compile.json",
    )
    stored: list[Any] = [notes.get("compile")]
    if me.rank == 0:
        with suppress(OSError, ValueError):  # later than the checkpoint, if it is there
            stored = [json.loads(file.read_text())]
    if me.world_size > 1:
        dist.broadcast_object_list(stored, src=0)  # collective
    record.update_from(stored[0])
    if rules.start_child is None:
        output = me.run.attempt(me.attempt) / f"compile-{me.rank // me.local_world_size}.log"
        rules = replace(
            rules,
            start_child=lambda t: compile_ahead.start(
                t, me.run, output, me.local_world_size, me.local_rank
            ),
        )
    return MeasuredStep(rules, record, file, CompileCost.of(job, me.layout, device))


def rules_of(job: Job, layout: Layout, device: torch.device) -> Rules | None:
    """How `compile: auto` measures: on GPUs, for layouts that only divide the batch."""
    is_plain = layout.dp == layout.ranks and job.compress is None
    return Rules() if job.compile == "auto" and device.type == "cuda" and is_plain else None


def set_choosing(on: bool) -> None:
    """Tell a benchmark, which counts steps only once their form is final."""
    if timeline.current is not None:
        timeline.current.is_choosing = on


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mean(t: Training, value: float) -> float:
    """The mean of all ranks' values. Collective."""
    return agreed(t, value, dist.ReduceOp.SUM) / t.mesh.world.size


def smallest(t: Training, value: float) -> float:
    """The smallest of all ranks' values. Collective."""
    return agreed(t, value, dist.ReduceOp.MIN)


def agreed(t: Training, value: float, how: Any) -> float:
    if t.pulse.group is None:
        return value
    number = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(number, how, group=t.pulse.group)
    return number.item()


def in_a_line(error: BaseException) -> str:
    """An error in one line. A compiler names the user's error in its second line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([f"{type(error).__name__}:", *lines[:2]])[:300]
