"""Initial weights of models that are too large to build whole on every rank.

Such a model is built without memory, and what its constructor does to each tensor is recorded. A
rank repeats this for the tensors that it holds, one at a time. Random numbers have a seed for each
tensor, so every layout starts from the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from allranks.train.data import mix

# Of tensors made by a model's constructor. What is larger is recorded, on every layout.
LARGE_BYTES = 4 << 30


class TooLarge(BaseException):
    """A constructor has made too much. No Exception: a constructor might catch that."""


def fresh_model(make: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Recording | None]:
    """A model with its weights; or, if they are large, a model without memory and a recording."""
    try:
        with _Counting():
            return make(), None
    except TooLarge:
        recording = Recording(seed)
    try:
        with _WithoutMemory(), recording:
            model = make()
        recording.check(model)
    except Exception as error:  # whatever a constructor may do with numbers that are not there
        print(
            f"note: every rank builds the whole model, as its weights cannot be recorded: {error}"
        )
        return make(), None
    return model, recording


def fill(module: nn.Module, recording: Recording | None) -> None:
    """Give each tensor without memory this rank's part of its values."""
    if recording is None:
        return
    made: dict[int, Any] = {}  # tied weights stay tied
    for part in module.modules():
        for tensors in (part._parameters, part._buffers, vars(part)):
            for name, tensor in tensors.items():
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    if id(tensor) not in made:
                        made[id(tensor)] = _filled(tensor, recording.whole(tensor))
                    tensors[name] = made[id(tensor)]


def _filled(tensor: Tensor, value: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, tensor.requires_grad)
    return value


class _Counting(TorchDispatchMode):
    """Raises TooLarge once the tensors made in it take too much memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = 0  # bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(isinstance(one, Tensor) for one in tree_leaves((args, kwargs))):
            # Not those of a dry run, which have a type of their own, and no memory.
            self.made += sum(one.nbytes for one in tree_leaves(result) if type(one) is Tensor)
        if self.made > LARGE_BYTES:
            raise TooLarge
        return result


class _WithoutMemory(TorchFunctionMode):
    """Tensors are made on the device `meta`, except those made from given numbers."""

    made_of_numbers = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False  # some initialisations, as orthogonal_, do nothing without memory
        is_maker = func in _device_constructors() and func not in self.made_of_numbers
        if is_maker and kwargs.get("device") is None:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


@dataclass(slots=True)
class _Step:
    """An operator that made a tensor's memory, or changed it."""

    number: int
    run: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    made: tuple[int, Tensor] | None = None  # which of its results; None: it changes an argument


class Recording(TorchDispatchMode):
    """Records how tensors without memory were made, and makes them."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        # By storage; they keep the storages alive, whose numbers could be used again.
        self._steps: dict[int, list[_Step]] = {}
        self._num_steps = 0
        self._whole: dict[int, Tensor] = {}  # by the number of what stands for it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:  # as to draw again what is too large
            return self.whole(args[0]).item()
        result = func(*args, **kwargs)
        self._num_steps += 1
        # As they are now: `tensor.data = other`, as in `model.bfloat16()`, gives them other memory.
        args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known = {_storage(tensor) for tensor in given}
        for at, tensor in enumerate(tree_leaves(result)):
            if isinstance(tensor, Tensor) and tensor.is_meta and _storage(tensor) not in known:
                step = _Step(self._num_steps, func, args, kwargs, made=(at, tensor.detach()))
                self._steps[_storage(tensor)] = [step]
        written = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
        if written and given and given[0].is_meta:  # in place
            step = _Step(self._num_steps, func, args, kwargs)
            self._steps[_storage(given[0])].append(step)
        return result

    def check(self, model: nn.Module) -> None:
        """Raise ValueError if some tensor of the model was not made by operators."""
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta and _storage(tensor) not in self._steps:
                raise ValueError(f"{name} was made in an unknown way")

    def replaced(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Note which tensors now stand for those of the same names."""
        self._whole = {id(tensor): before[name] for name, tensor in after.items()}

    def whole(self, tensor: Tensor) -> Tensor:
        """All values of a tensor."""
        return self._view(self._whole.get(id(tensor), tensor), self._num_steps + 1, {})

    def _view(self, tensor: Tensor, until: int, own: dict[int, Tensor]) -> Tensor:
        if not tensor.is_meta:
            return tensor
        key = _storage(tensor)
        base = own[key] if key in own else self._memory(key, until)
        return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _memory(self, key: int, until: int) -> Tensor:
        """The memory of a storage as it was before a step."""
        own: dict[int, Tensor] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(mix(self._seed, list(self._steps).index(key)))
            for step in self._steps[key]:
                if step.number >= until:
                    break
                given = partial(self._view, until=step.number, own=own)
                args, kwargs = tree_map_only(Tensor, given, (step.args, step.kwargs))
                if "device" in kwargs:
                    kwargs["device"] = torch.device("cpu")
                result = step.run(*args, **kwargs)
                if step.made is not None:
                    at, like = step.made  # its strides may be others without memory
                    own[key] = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
                    own[key].copy_(tree_leaves(result)[at])
        return own[key]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
