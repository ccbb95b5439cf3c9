"""Counts what a rank holds and sends: parts of tensors, what backward needs, exchanges."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.layout import NESTING, Layout

# By words in the names of torch's operators, the longer ones first.
KINDS = {
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}
UPDATES = (torch.ops.aten._fused_adamw_.default, torch.ops.aten._fused_sgd_.default)
Place = dict[str, int]  # a rank's number along each axis


# What ranks hold.


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor, of which each rank may hold a part."""

    shape: tuple[int, ...]
    element_bytes: int
    # The axis along which each of its dims is cut, the inner axes first: they cut what others left.
    cuts: tuple[tuple[str, int, int], ...] = ()  # axis, ranks along it, dim

    @classmethod
    def of(cls, tensor: Tensor) -> Part:
        cuts: list[tuple[str, int, int]] = []
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            names = mesh.mesh_dim_names or ()
            for axis, size, placement in zip(names, mesh.shape, tensor.placements, strict=True):
                if not placement.is_replicate():
                    cuts.insert(0, (axis, size, placement.dim))  # type: ignore[attr-defined]
        return cls(tuple(tensor.shape), tensor.element_size(), tuple(cuts))

    def bytes_at(self, place: Place) -> int:
        """The bytes that the rank at this place holds; the last may have less, as in chunk()."""
        shape = list(self.shape)
        for axis, size, dim in self.cuts:
            chunk = -(-shape[dim] // size)
            shape[dim] = max(0, min(chunk, shape[dim] - place[axis] * chunk))
        return math.prod(shape) * self.element_bytes


def bytes_at(parts: Counter[Part], place: Place) -> int:
    return sum(part.bytes_at(place) * number for part, number in parts.items())


def parts_of(tensors: Iterable[Tensor]) -> Counter[Part]:
    return Counter(map(Part.of, {id(tensor): tensor for tensor in tensors}.values()))


def gathered(parts: Counter[Part]) -> Counter[Part]:
    """The parts that FSDP has cut, as they are when it has gathered them."""
    found: Counter[Part] = Counter()
    for part, number in parts.items():
        cuts = tuple(cut for cut in part.cuts if cut[0] != "fsdp")
        if cuts != part.cuts:
            found[replace(part, cuts=cuts)] += number
    return found


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [
        x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)
    ]


@dataclass(slots=True)
class Held:
    """What the ranks of one pipeline stage hold between two steps, as tensors that are cut."""

    parameters: Counter[Part]
    buffers: Counter[Part]
    optimizer: Counter[Part]
    gradients: Counter[Part] = field(default_factory=Counter)


class SavedTensors:
    """Counts the bytes that are kept for the backward pass, and their largest sum.

    Each storage counts once, and parameters do not: they are there anyway.
    """

    def __init__(self, model: nn.Module) -> None:
        held = [*model.parameters(), *model.buffers()]
        self._not_counted = {storage_of(tensor)._cdata for tensor in held}
        self._uses: Counter[int] = Counter()  # by storage
        self.now = self.most = 0

    def counted(self) -> saved_tensors_hooks:
        """A context whose forward passes are counted."""
        return saved_tensors_hooks(lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor)

    def add(self, tensor: Tensor) -> tuple[int, int]:
        base = tensor._base if tensor._is_view() else tensor
        storage = storage_of(tensor)
        key, size = storage._cdata, storage.nbytes()
        # A parameter that FSDP has gathered has a storage of its own.
        if isinstance(base, nn.Parameter) or key in self._not_counted:
            return key, 0
        self._uses[key] += 1
        if self._uses[key] == 1:
            self.now += size
            self.most = max(self.most, self.now)
        return key, size

    def remove(self, key: int, size: int) -> None:
        if size:
            self._uses[key] -= 1
            self.now -= size if not self._uses[key] else 0


class _Saved:
    """A tensor for as long as autograd keeps it."""

    def __init__(self, tensor: Tensor, kept: SavedTensors) -> None:
        self.tensor, self._kept = tensor, kept
        self._key, self._size = kept.add(tensor)

    def __del__(self) -> None:
        self._kept.remove(self._key, self._size)


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that are made under it while they exist, and their peak.

    Each storage counts once. FSDP resizes some instead of making new ones.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}  # by storage
        self._before: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Self:
        ours: Any = lambda storage, size: self._resized(storage, size)  # noqa: E731
        torch.UntypedStorage.resize_ = ours  # type: ignore[method-assign]
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it calls operators on this rank's part
        result = func(*args, **(kwargs or {}))
        for storage in storages_of(result):
            self._add(storage)
        return result

    def start(self) -> None:
        """Look for a peak over what there is now."""
        self.most, self._before = self.now, dict(self._sizes)

    def added(self, gradients: Iterable[Tensor]) -> int:
        """The peak over what there was at the start, and gradients that were there already.

        DDP has room for them from the beginning, without it they are made in backward passes.
        """
        own = storages_of([*gradients])
        old = sum(storage.nbytes() for storage in own if storage._cdata in self._before)
        return self.most - sum(self._before.values()) + old

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes:  # some operators resize what they write to
            self._count(storage._cdata, storage.nbytes())
        else:
            weakref.finalize(storage, self._count, storage._cdata, None).atexit = False
            self._count(storage._cdata, storage.nbytes())

    def _resized(self, storage: torch.UntypedStorage, size: int) -> Any:
        if storage._cdata in self._sizes:
            self._count(storage._cdata, size)
        return self._resize(storage, size)

    def _count(self, key: int, size: int | None) -> None:
        """Note a storage's size; None: it is gone."""
        self.now += (size or 0) - self._sizes.pop(key, 0)
        self.most = max(self.most, self.now)
        if size is not None:
            self._sizes[key] = size


def bytes_of(values: Any) -> int:
    """This rank's memory behind all tensors among these."""
    return sum(storage.nbytes() for storage in storages_of(values))


def storages_of(values: Any) -> set[torch.UntypedStorage]:
    return {storage_of(x) for x in pytree.tree_leaves(values) if isinstance(x, Tensor)}


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """This rank's memory behind a tensor."""
    for name in ("_local_tensor", "elem"):  # of a DTensor, and of what is still on its way
        tensor = getattr(tensor, name, tensor)
    return tensor.untyped_storage()


# What ranks send.


@dataclass(frozen=True, slots=True)
class Sent:
    """One exchange between ranks."""

    kind: str
    axis: str  # along which its ranks differ
    group_size: int
    bytes: int  # of the whole tensor: what was gathered, or is to be scattered or reduced
    when: str  # forward, backward, passes (either) or update


class Exchanges(TorchDispatchMode):
    """Notes each exchange of a rank, and answers every question about a value with 0."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layout = layout
        self.sent: Counter[Sent] | None = None  # None: they are not counted now
        # A pipeline's rank makes passes of several micro-batches in turn.
        self.when = "forward" if layout.pp == 1 else "passes"
        self.times = 1  # how many times what is done now happens in a step
        self._axes: dict[str, tuple[str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in UPDATES:
            return None  # they send nothing, and take long to prepare for DTensors
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it calls operators on this rank's part
        may_be_real = FakeTensor not in types and func is not torch.ops.aten.lift_fresh.default
        if may_be_real and any(isinstance(x, Tensor) for x in pytree.tree_leaves((args, kwargs))):
            with unset_fake_temporarily():  # the numbers of ranks in a mesh
                return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self._note(func, args, result)
            if func.namespace == "c10d":
                result = with_results(result)
        return result

    def _note(self, func: Any, args: Any, result: Any) -> None:
        kind = next((kind for word, kind in KINDS.items() if word in func.__name__), None)
        group = next(filter(None, map(group_in, args)), None)
        if self.sent is None or kind is None or group is None:
            return  # a barrier, or waiting for what was sent
        axis, size = self._axis(group)
        tensors = [pytree.tree_leaves(one) for one in (*args, result)]
        sizes = [sum(t.nbytes for t in some if isinstance(t, Tensor)) for some in tensors]
        if size > 1 or kind in ("send", "receive"):
            is_backward = torch._C._current_graph_task_id() != -1 and self.when == "forward"
            when = "backward" if is_backward else self.when
            self.sent[Sent(kind, axis, size, max(sizes), when)] += self.times

    def _axis(self, group: dist.ProcessGroup) -> tuple[str, int]:
        """The axes along which a group's ranks differ, and how many ranks it has."""
        if group.group_name not in self._axes:
            ranks = dist.get_process_group_ranks(group)
            places = [self.layout.place_of(rank) for rank in ranks]
            axes = [axis for axis in NESTING if len({place[axis] for place in places}) > 1]
            self._axes[group.group_name] = " x ".join(axes), len(ranks)
        return self._axes[group.group_name]


def group_in(value: Any) -> dist.ProcessGroup | None:
    """The group that an argument of an operator is, or names."""
    group: dist.ProcessGroup | None = None
    if isinstance(value, str):
        with suppress(RuntimeError, ValueError):  # "sum" is no name of a group
            group = dist.distributed_c10d._resolve_process_group(cast(Any, value))
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        group = dist.ProcessGroup.unbox(value)
    return group


def with_results(result: Any) -> Any:
    """What an exchange returned, its work done and with the tensors: DDP reads them from it.

    The work of a fake process group holds nothing.
    """
    if not isinstance(result, tuple) or not isinstance(result[-1], torch.ScriptObject):
        return result
    done: Future[Any] = Future()
    done.set_result(result[0])
    return (*result[:-1], _create_work_from_future(done).boxed())
