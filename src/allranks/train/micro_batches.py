"""Cuts a rank's share of a batch into micro-batches that fit in memory: searched for, or halved.

`micro_batch_size: auto` tries passes that change nothing. If memory runs out in training, or in a
pass in which other ranks wait for this one, all ranks end, and the launcher starts them again
with smaller micro-batches. The batch stays the same: a step has more of them.
"""

from __future__ import annotations

import gc
import hashlib
import json
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import AllranksError
from allranks.job.job import Job
from allranks.job.stages import possible_numbers
from allranks.job.task_source import code_of
from allranks.machine.allotted import user_cache
from allranks.run.files import read_bytes
from allranks.run.folder import write_atomically
from allranks.run.micro_batches import Search, counts_for
from allranks.train.choose_step import device_name, smallest
from allranks.train.data import Cut, TrainingData
from allranks.train.fast_step import pass_without_weight, set_compiled
from allranks.train.loop import Training, clear_gradients, save, train, update, weighted_losses
from allranks.train.parallelize import without_sync
from allranks.train.pipeline import Pipeline
from allranks.train.stages import measure

if TYPE_CHECKING:
    from allranks.train.build import Rank

FULL = ("out of memory", "_STATUS_ALLOC_FAILED")  # in what CUDA's libraries say
# What takes less memory if a micro-batch is smaller.
PASSES: tuple[Callable[..., Any], ...] = (train, pass_without_weight, Pipeline.set_up, measure)
OTHER_FIXES = (
    "write activation_checkpointing: full, optimizer.offload: true or precision: bf16, or divide "
    "the model with --layout 1xN:fsdp=N"
)


class MicroBatches:
    """How this rank's share is cut, and what is known about how much fits."""

    def __init__(self, me: Rank, job: Job) -> None:
        self.me = me
        self.job = job
        self.is_auto = job.micro_batch_size == "auto"
        self.search: Search | None = None  # until the data are known
        self.why = "as an earlier attempt found"
        self._too_large: list[int] = []  # sizes that were tried
        self._cut: Cut | None = None  # as the job says
        self._now = 0  # micro-batches of a share
        self._cached: Path | None = None

    def begin(self, data: TrainingData, precision: str) -> None:
        """Cut as an earlier attempt found, or as the search starts. Collective."""
        cut = data.cut
        share = -(-cut.batch_size // cut.parts)
        first = cut.num_of_whole
        counts = [first]
        if data.pads and cut.num_micro_batches:
            schedule, pp = self.job.pipeline.schedule, self.me.layout.pp
            for number in possible_numbers(schedule, pp, share):
                counts += [number] if number >= 2 * counts[-1] else []
        elif data.pads:
            counts += [count for count in counts_for(share) if count > first]
        elif self.is_auto:
            raise AllranksError(
                "micro_batch_size: auto cannot be used with a task that compares samples "
                "(couples_samples): smaller micro-batches would change its loss",
                fix="write micro_batch_size: null, or a size",
            )
        kept = self.job.micro_batch_size, device_name(data.device)
        about = f"{self.me.layout} batch {cut.batch_size} micro_batch_size {kept[0]} on {kept[1]}"
        self._cut, self._now, search = cut, counts[-1], Search(about=about, counts=counts)
        if self.is_auto:
            self._cached = user_cache() / "micro-batches" / f"{self._key(precision, data.device)}"
            search.guess = self._remembered(share) if self.me.rank == 0 else 0
        else:
            search.too_few, search.enough = first - 1, first
        if self.me.rank == 0:
            search.resume(self.me.run)
        if self.me.world_size > 1:
            told = [search]
            dist.broadcast_object_list(told, src=0)  # collective
            search = told[0]
        self.search = search
        if not self.is_auto and search.enough != first:
            self.why = "memory ran out in an earlier attempt"
        count = search.next or search.enough
        if count is None:
            raise self._nothing_fits()
        if self.is_auto and search.next and not cut.num_micro_batches:
            # Passes that other parts need before the search must fit, too.
            count = max(1, -(-share // 2))
        self._use(data, count)

    def choose(self, t: Training, pipeline: Pipeline | None) -> bool:
        """Find what fits by passes that change nothing; True if the cut changed. Collective."""
        search, before = self.search, t.data.cut
        assert search is not None
        if search.next is not None:
            set_compiled(t, False, pipeline)
        while (count := search.next) is not None:
            self._use(t.data, count)
            fits = self._fits(t, pipeline)
            self.why = "remembered" if fits and count == search.guess else "tried"
            self._too_large += [] if fits else [t.data.cut.largest]
            search.tried(count, fits=fits)
        if search.enough is None:
            raise self._nothing_fits()
        self._use(t.data, search.enough)
        if self.is_auto:
            if self.me.rank == 0:
                search.keep(self.me.run)
                self._remember(t.data.cut)
            if t.device.type == "cuda":  # what was tried is not what a step takes
                torch.cuda.reset_peak_memory_stats(t.device)
            smallest(t, 1.0)  # collective: what a rank that runs out keeps must come later
        return t.data.cut != before

    def tell(self, t: Training) -> None:
        """Write the event and the line that say what was chosen, if it is not what the job says."""
        cut, was = t.data.cut, self._cut
        assert was is not None
        if self.me.rank or (cut == was and not self.is_auto):
            return
        count, step = cut.num_of_whole, t.progress.step + 1
        t.meter.log.write(
            "micro_batches",
            step=step,
            size=cut.largest,
            number=count,
            why=self.why,
            too_large=self._too_large,
        )
        why = "; ".join([self.why, *(f"{size} did not fit" for size in self._too_large)])
        than = f" instead of {was.largest}" if cut != was else ""
        print(f"note: micro-batches of {cut.largest} samples{than}, {count} in a step ({why})")

    def after(self, error: Exception, t: Training | None) -> AllranksError | None:
        """If a pass ran out of memory, prepare the next attempt, and return what to report."""
        search = self.search
        if search is None or not is_out_of_memory(error) or not is_in(error, PASSES):
            return None
        now, is_trial = self.size, search.next is not None
        if not is_trial:
            left = search.ran_out(self._now)
        else:
            search.tried(self._now, fits=False)
            left = search.next or search.enough
        if left is None:
            return self._nothing_fits()
        if t is not None:
            if self.me.world_size == 1 and is_intact(t, error):
                save(t)
            with suppress(Exception):  # of a rank that ran out of memory, too
                t.checkpointer.finish()
        search.keep(self.me.run, ended=self.me.attempt)
        assert self._cut is not None
        smaller = with_count(self._cut, left).largest
        return AllranksError(
            f"out of memory with micro-batches of {now}: "
            f"{'trying' if is_trial else 'going on with'} {smaller}",
            fix=f"if it does not go on by itself: {self.me.run.resume_command}",
            exit_code=1,
        )

    @property
    def size(self) -> int:
        """Samples in a micro-batch."""
        assert self._cut is not None
        return with_count(self._cut, self._now).largest

    def _use(self, data: TrainingData, count: int) -> None:
        assert self._cut is not None
        data.cut, self._now = with_count(self._cut, count), count

    def _fits(self, t: Training, pipeline: Pipeline | None) -> bool:
        """Whether training passes fit on all ranks. Collective.

        Raises if memory runs out in passes in which ranks wait for each other.
        """
        if pipeline or t.mesh.layout.dp < t.mesh.layout.ranks or (t.norms and t.mesh.data.size > 1):
            training_passes(t, pipeline)  # collective
            return bool(smallest(t, 1.0))  # collective: some rank may not have come through
        fits = True
        try:
            with without_sync(t.model):
                training_passes(t, None)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        clear_gradients(t)
        gc.collect()
        if t.device.type == "cuda":
            torch.cuda.empty_cache()
        return bool(smallest(t, float(fits)))  # collective

    def _nothing_fits(self) -> AllranksError:
        one = "one sample does not fit" if self._cut and self.size == 1 else "it cannot be halved"
        return AllranksError(
            f"out of memory with micro-batches of {self.size}: {one}",
            fix=f"{OTHER_FIXES}; allranks doctor {self.me.run.reference} shows what is in memory",
            exit_code=1,
        )

    # What is remembered for later runs.

    def _key(self, precision: str, device: torch.device) -> str:
        """A digest of everything that decides how large a micro-batch can be."""
        job, memory = self.job, 0
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
        facts = [
            *(job.task, code_of(str(job.task)), job.options, precision),
            *(job.compile, job.activation_checkpointing),
            *(job.optimizer.name, job.optimizer.offload, job.pipeline.schedule),
            *(str(self.me.layout), device_name(device), memory, torch.__version__),
        ]
        return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32] + ".json"

    def _remembered(self, share: int) -> int:
        """The number of micro-batches that an earlier run found for this model and device, or 0."""
        assert self._cached is not None and self._cut is not None
        with suppress(OSError, ValueError, KeyError, TypeError):
            size = int(json.loads(read_bytes(self._cached))["size"])
            if size > 0 and not self._cut.num_micro_batches:
                return -(-share // size)
        return 0

    def _remember(self, cut: Cut) -> None:
        assert self._cached is not None
        if cut.num_of_whole == 1 or cut.num_micro_batches:
            return  # a larger share may fit as well
        with suppress(OSError, AllranksError):
            self._cached.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._cached, json.dumps({"size": cut.largest}) + "\n")


def with_count(cut: Cut, count: int) -> Cut:
    """The cut with so many micro-batches in a whole batch."""
    if cut.num_micro_batches:
        return replace(cut, num_micro_batches=count)
    if count == cut.num_of_whole:
        return cut
    return replace(cut, micro_batch_size=-(-cut.batch_size // (cut.parts * count)))


def training_passes(t: Training, pipeline: Pipeline | None) -> None:
    """Passes that take as much memory as those of a step. Collective if ranks divide the model."""
    if pipeline:
        pipeline.set_up(t)  # collective
        return
    t.model.train()
    example, count = t.data.example(t.progress), t.data.cut.num_of_whole
    for number in range(min(2, count)):  # the second one has gradients beside its activations
        with nullcontext() if number + 1 == count else without_sync(t.model):
            pass_without_weight(t.model, lambda micro: weighted_losses(t, micro)[0], example)
    clear_gradients(t)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device ran out of memory; the host's own allocator raises something else."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in FULL)


def is_in(error: BaseException, functions: tuple[Callable[..., Any], ...]) -> bool:
    """Whether an error was raised in a call of one of these functions."""
    codes = {function.__code__ for function in functions}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def is_intact(t: Training, error: BaseException) -> bool:
    """Whether the training is still as its last step left it, so that it can be saved."""
    state = t.model.state_dict(keep_vars=True).values()
    # A forward pass may have changed buffers.
    only_weights = all(isinstance(value, nn.Parameter) for value in state)
    return only_weights and t.progress.step > 0 and not is_in(error, (update,))
