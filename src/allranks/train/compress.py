"""Less communication: gradients compressed in DDP's exchange, or weights averaged every few steps.

Both count the bytes that this rank sends where they are handed to a collective: times 2 (n - 1) / n
in an all-reduce over n ranks and n - 1 in an all-gather, which is what a ring sends.

What a method remembers is saved with every checkpoint, some of it for each rank (`rank-3`). On the
same number of ranks a run continues exactly; on another, every rank takes the mean over the ranks
that saved, so that what is still owed to the mean gradient is neither lost nor counted twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from allranks.job.job import Compress
from allranks.run.commits import Commit
from allranks.train.checkpoint import (
    model_tensors,
    named_parameters,
    read_tensors,
    training_tensors,
)
from allranks.train.mesh import Ranks
from allranks.train.optim import Schedule

MEAN_ELEMENTS = 1 << 24  # averaged in one exchange: a copy of them is made
# PowerSGD with a rank of 1 or 2 divides by the length of columns, which may be zero.
EPSILON = 1e-8

Tensors = dict[str, Tensor]


class Wire:
    """What this rank has sent to its peers, in bytes."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.sent = 0

    def reduces(self, tensor: Tensor) -> None:
        self.sent += reduced_bytes(tensor.nbytes, self.ranks.size)

    def mean(self, tensors: list[Tensor]) -> None:
        """Replace tensors by their means over the ranks. Collective."""
        for group in _pieces(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            self.reduces(flat)
            self.ranks.sum(flat)  # collective
            flat.div_(self.ranks.size)
            parts = flat.split([tensor.numel() for tensor in group])
            for tensor, part in zip(group, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, all of the same size. Collective."""
        self.sent += (self.ranks.size - 1) * tensor.nbytes
        gathered = [torch.empty_like(tensor) for _ in range(self.ranks.size)]
        dist.all_gather(gathered, tensor, group=self.ranks.group)
        return gathered

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """A context in which all-reduces of torch's own hooks are counted."""
        original = dist.all_reduce

        def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.reduces(tensor)
            return original(tensor, *args, **kwargs)

        dist.all_reduce = all_reduce
        try:
            yield
        finally:
            dist.all_reduce = original


def reduced_bytes(num_bytes: int, num_ranks: int) -> int:
    """The bytes that each rank of a ring sends to all-reduce `num_bytes` bytes."""
    return num_bytes * 2 * (num_ranks - 1) // num_ranks


def _pieces(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type, in groups that are exchanged together."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        piece: list[Tensor] = []
        for tensor in tensors:
            if tensor.dtype == dtype:
                if piece and sum(t.numel() for t in piece) + tensor.numel() > MEAN_ELEMENTS:
                    yield piece
                    piece = []
                piece.append(tensor)
        if piece:
            yield piece


def plain_bytes(model: nn.Module, ranks: Ranks) -> int:
    """What this rank sends in a step of plain DDP, by its own list of buckets; 0 without DDP."""
    if not isinstance(model, DistributedDataParallel):
        return 0
    data = model._get_ddp_logging_data()
    sizes = str(data.get("rebuilt_bucket_sizes") or data["bucket_sizes"])
    return sum(reduced_bytes(int(size), ranks.size) for size in sizes.split(","))


class Compression:
    """What the loop calls, whatever the method; what a method has no use for does nothing."""

    def __init__(self, settings: Compress, ranks: Ranks) -> None:
        self.settings = settings
        self.wire = Wire(ranks)

    def begin(self, model: nn.Module, step: int, schedule: Schedule) -> None:
        """Begin after `step` steps, once DDP has made its final buckets."""

    def after_step(self, step: int) -> None:
        """Average the weights if it is time. Collective."""

    def as_one_model(self) -> contextlib.AbstractContextManager[None]:
        """A context in which all ranks have the same model. Collective."""
        return contextlib.nullcontext()

    def prepare_to_save(self) -> None:
        """Average for a checkpoint what is not the same on all ranks. Collective."""

    def divide(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """What is the same on all ranks, which each save a share of; and what only this one has."""
        raise NotImplementedError

    def load(self, commit: Commit, num_ranks: int) -> None:
        """Take over the state in a checkpoint of `num_ranks` ranks; the model is already loaded."""
        raise NotImplementedError


class CompressedGradients(Compression):
    """Compresses what DDP exchanges: its hook, called with each bucket of gradients.

    What compression leaves out of a bucket is this rank's error, added to its next gradients.
    """

    def __init__(self, settings: Compress, model: nn.Module, ranks: Ranks, *, seed: int) -> None:
        super().__init__(settings, ranks)
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in named_parameters(model)
        }
        self._buckets: dict[int, list[tuple[str, int]]] = {}  # parameters and sizes, in order
        self._loaded: Tensors = {}  # from a checkpoint, until a bucket asks for it
        self._errors: dict[int, Tensor] = {}  # of a bucket, flat
        self._low_rank = powerSGD_hook.PowerSGDState(
            ranks.group,
            matrix_approximation_rank=settings.rank or 1,
            orthogonalization_epsilon=EPSILON,
            random_seed=seed,
        )
        if settings.name == "powersgd":
            self._errors = self._low_rank.error_dict
        self._exchange: Callable[[dist.GradBucket], Future[Tensor]] = {
            "bf16": self._in_bf16,
            "fp16": self._in_fp16,
            "powersgd": self._at_low_rank,
            "topk": self._largest,
        }[settings.name]

    def begin(self, model: nn.Module, step: int, schedule: Schedule) -> None:
        assert isinstance(model, DistributedDataParallel)
        start_step = self.settings.start_step
        start_step = schedule.warmup_steps if start_step is None else start_step
        # torch counts from the first pass, and wants to begin after the second: the buckets may
        # change before it.
        self._low_rank.start_powerSGD_iter = 2 + start_step
        self._low_rank.iter = 2 + step
        model.register_comm_hook(None, lambda _, bucket: self._hook(bucket))

    def _hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """DDP's exchange of a bucket. Collective."""
        if bucket.index() not in self._buckets:
            self._remember(bucket)
        with self.wire.counting():
            return self._exchange(bucket)

    def _in_bf16(self, bucket: dist.GradBucket) -> Future[Tensor]:
        return default_hooks.bf16_compress_hook(self.wire.ranks.group, bucket)  # type: ignore[arg-type]

    def _in_fp16(self, bucket: dist.GradBucket) -> Future[Tensor]:
        return default_hooks.fp16_compress_hook(self.wire.ranks.group, bucket)  # type: ignore[arg-type]

    def _at_low_rank(self, bucket: dist.GradBucket) -> Future[Tensor]:
        future = powerSGD_hook.powerSGD_hook(self._low_rank, bucket)
        if not bucket.buffer().is_cuda:
            # torch's hook makes its later exchanges in threads of gloo: those of several buckets
            # would be in another order on each rank, and could take all threads by waiting.
            future.wait()
        return future

    def _largest(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Send a bucket's largest entries, with where they are. Collective."""
        gradients, index = bucket.buffer(), bucket.index()
        error = self._errors.get(index)
        if error is not None:
            gradients += error
        assert self.settings.keep is not None
        count = max(1, round(self.settings.keep * gradients.numel()))
        places = gradients.abs().topk(count, sorted=False).indices
        values = gradients[places]
        all_places = self.wire.gather(places.int())  # collective
        all_values = self.wire.gather(values)  # collective
        self._errors[index] = gradients.clone().index_fill_(0, places, 0.0)
        gradients.zero_()
        for places, values in zip(all_places, all_values, strict=True):
            gradients.index_add_(0, places, values)
        gradients.div_(self.wire.ranks.size)
        future: Future[Tensor] = Future(devices=[gradients.device] if gradients.is_cuda else None)
        future.set_result(gradients)
        return future

    # Checkpoints.

    def _remember(self, bucket: dist.GradBucket) -> None:
        """Note which parameters a bucket has, and take over what a checkpoint has for it."""
        index, buffer = bucket.index(), bucket.buffer()
        members = [(self._names[p], p.numel()) for p in bucket.parameters()]
        self._buckets[index] = members
        if any(name in self._loaded for name, _ in members):
            self._errors[index] = torch.cat(
                [self._loaded.pop(name, buffer.new_zeros(size)) for name, size in members]
            ).to(buffer)
        p, q = (self._loaded.pop(self._matrices(index, kind), None) for kind in "pq")
        if p is not None and q is not None:
            self._low_rank.p_memory_dict[index] = p.to(buffer)
            self._low_rank.q_memory_dict[index] = q.to(buffer)

    def _matrices(self, index: int, kind: str) -> str:
        """The name of a bucket's matrices: others would not fit another bucket or rank."""
        size = sum(size for _, size in self._buckets[index])
        return f"compress.powersgd.rank={self.settings.rank}.{index}.{size}.{kind}"

    def divide(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        shared = dict(tensors)
        for index, p in self._low_rank.p_memory_dict.items():
            shared[self._matrices(index, "p")] = p.view(-1)
            shared[self._matrices(index, "q")] = self._low_rank.q_memory_dict[index].view(-1)
        own = {}
        for index, error in self._errors.items():
            names, sizes = zip(*self._buckets[index], strict=True)
            for name, part in zip(names, error.split(list(sizes)), strict=True):
                own[f"compress.error.rank-{self.wire.ranks.rank}.{name}"] = part
        return shared, own

    def load(self, commit: Commit, num_ranks: int) -> None:
        self._loaded = read_tensors(commit, "compress.powersgd.")
        self._loaded |= _of_rank(commit, "compress.error", self.wire.ranks, num_ranks)


class AveragedWeights(Compression):
    """Every rank trains by itself, with its own optimizer state; every few steps, weights meet.

    `local-sgd` replaces them by their mean. `diloco` takes the change from the last meeting to that
    mean as a gradient, for a step of SGD with Nesterov momentum that is the same on all ranks.
    Buffers, such as BatchNorm's statistics, are averaged.
    """

    def __init__(
        self, settings: Compress, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
    ) -> None:
        super().__init__(settings, ranks)
        assert settings.every is not None
        self._every = settings.every
        self._last_step = 0
        self._model = model
        self._optimizer = optimizer
        self._weights = {f"model.{name}": p.detach() for name, p in named_parameters(model)}
        buffers = {f"model.{n.replace(_CHECKPOINT_PREFIX, '')}" for n, _ in model.named_buffers()}
        self._own = self._weights | {
            name: tensor
            for name, tensor in model_tensors(model).items()
            if name in buffers and tensor.is_floating_point()
        }
        self._have_met = True  # since the last step
        self._mean: Tensors = {}  # of all ranks' models, for a checkpoint
        is_diloco = settings.name == "diloco"
        self._global = {n: w.clone() for n, w in self._weights.items()} if is_diloco else {}
        self._momentum = {n: torch.zeros_like(w) for n, w in self._global.items()}

    def begin(self, model: nn.Module, step: int, schedule: Schedule) -> None:
        self._last_step = schedule.num_steps

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Average in every `every`-th step, and in the last. Collective in these."""
        self._have_met = step % self._every == 0 or step == self._last_step
        if not self._have_met:
            return
        if self._global:
            self._outer_step()  # collective
        averaged = [t for n, t in self._own.items() if n not in self._global]
        self.wire.mean(averaged)  # collective

    def _outer_step(self) -> None:
        """Move all ranks from where they last met towards their mean. Collective."""
        rate, momentum = self.settings.outer_lr, self.settings.outer_momentum
        assert rate is not None and momentum is not None
        ways = [self._global[name] - weight for name, weight in self._weights.items()]
        self.wire.mean(ways)  # collective
        for (name, weight), way in zip(self._weights.items(), ways, strict=True):
            velocity = self._momentum[name].mul_(momentum).add_(way)
            start = self._global[name]
            start.sub_(way.add_(velocity, alpha=momentum), alpha=rate)
            weight.copy_(start)

    def _mean_of_all(self) -> Tensors:
        """Copies of what is averaged, averaged over the ranks. Collective."""
        copies = {name: tensor.clone() for name, tensor in self._own.items()}
        self.wire.mean([*copies.values()])  # collective
        return copies

    @contextlib.contextmanager
    def as_one_model(self) -> Iterator[None]:
        """A context in which the model is the mean of all ranks' models. Collective."""
        if self._have_met:
            yield
            return
        before = {name: tensor.clone() for name, tensor in self._own.items()}
        self._set(self._mean_of_all())
        try:
            yield
        finally:
            self._set(before)

    @torch.no_grad()
    def _set(self, values: Tensors) -> None:
        for name, tensor in self._own.items():
            tensor.copy_(values[name])

    # Checkpoints.

    def prepare_to_save(self) -> None:
        self._mean = {} if self._have_met else self._mean_of_all()

    def divide(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        shared = {n: self._mean.get(n, t) for n, t in tensors.items() if n.startswith("model.")}
        shared |= {f"compress.global.{name}": tensor for name, tensor in self._global.items()}
        shared |= {f"compress.momentum.{name}": t for name, t in self._momentum.items()}
        own = {
            f"compress.own.rank-{self.wire.ranks.rank}.{name}": tensor
            for name, tensor in tensors.items()
            if name in self._own or name.startswith("optimizer.")
        }
        return shared, own

    @torch.no_grad()
    def load(self, commit: Commit, num_ranks: int) -> None:
        tensors = training_tensors(self._model, self._optimizer)
        for name, value in _of_rank(commit, "compress.own", self.wire.ranks, num_ranks).items():
            if name in tensors:
                tensors[name].copy_(value)
        starts = read_tensors(commit, "compress.global.")
        moments = read_tensors(commit, "compress.momentum.")
        for name, start in self._global.items():
            start.copy_(starts.get(f"compress.global.{name}", tensors[name]))
            if f"compress.momentum.{name}" in moments:
                self._momentum[name].copy_(moments[f"compress.momentum.{name}"])
        # Ranks of another number all begin with the mean.
        self._have_met = commit.step % self._every == 0 or num_ranks != self.wire.ranks.size


def _of_rank(commit: Commit, kind: str, ranks: Ranks, num_ranks: int) -> Tensors:
    """This rank's tensors of a kind, by name; saved by another number of ranks, their mean."""
    found: Tensors = {}
    numbers = [ranks.rank] if num_ranks == ranks.size else range(num_ranks)
    for number in numbers:
        prefix = f"{kind}.rank-{number}."
        for name, tensor in read_tensors(commit, prefix).items():
            name = name.removeprefix(prefix)
            found[name] = found[name].add_(tensor) if name in found else tensor
    if len(numbers) > 1:
        for tensor in found.values():
            if tensor.is_floating_point():
                tensor.div_(len(numbers))
    return found
