"""Which ranks train on different samples, and which hold one copy of the model together.

Ranks are counted along the axes dp, pp, fsdp, tp, the last of them fastest: neighbours, which share
a node, exchange the most. Everything that ranks exchange names one of the groups made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from allranks.layout import NESTING, Layout

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that exchange tensors, this one among them."""

    size: int = 1
    rank: int = 0  # this rank's number among them
    group: dist.ProcessGroup | None = None  # None if this rank is alone

    def sum(self, value: Tensor) -> Tensor:
        """Sum over these ranks, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(value, group=self.group)
        return value

    def largest(self, value: Tensor) -> Tensor:
        """The largest of these ranks' values, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return value

    def from_first(self, value: Result) -> Result:
        """The first rank's value, on all of them. Collective."""
        return self._from(0, value)

    def from_last(self, value: Result) -> Result:
        """The last rank's value, on all of them. Collective."""
        return self._from(self.size - 1, value)

    def _from(self, rank: int, value: Result) -> Result:
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, group=self.group, group_src=rank)
        return values[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The layout's axes as groups of ranks."""

    layout: Layout = field(default_factory=Layout)
    world: Ranks = Ranks()
    data: Ranks = Ranks()  # train on different samples: dp x fsdp
    replica: Ranks = Ranks()  # hold one copy of the model together: pp x fsdp x tp
    stages: Ranks = Ranks()  # of the pipeline
    devices: DeviceMesh | None = None  # the axes as torch knows them; None without fsdp, tp and pp

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Mesh:
        """The mesh of a layout whose ranks have met. Collective."""
        world = Ranks(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
        if layout.dp == layout.ranks:
            return cls(layout=layout, world=world, data=world)
        numbers = _numbers(layout)
        return cls(
            layout=layout,
            world=world,
            data=_ranks_along(("dp", "fsdp"), numbers),
            replica=_ranks_along(("pp", "fsdp", "tp"), numbers),
            stages=_ranks_along(("pp",), numbers),
            devices=DeviceMesh(device.type, numbers, mesh_dim_names=NESTING),
        )

    def among_stages(self, places: Sequence[int]) -> Ranks:
        """The ranks at these places along pp that work on the same data as this one. Collective."""
        along = torch.tensor(places)
        return _ranks_along(("pp",), _numbers(self.layout).index_select(NESTING.index("pp"), along))

    @property
    def is_heard(self) -> bool:
        """Whether this rank's results for its samples count: others may compute the same."""
        at = self.layout.place_of(self.world.rank)
        return at["tp"] == 0 and at["pp"] == self.layout.pp - 1


def _numbers(layout: Layout) -> Tensor:
    """The ranks' numbers, by their places along the axes."""
    return torch.arange(layout.ranks).view([getattr(layout, axis) for axis in NESTING])


def _ranks_along(axes: tuple[str, ...], numbers: Tensor) -> Ranks:
    """The ranks that differ from this one only along these axes. Collective."""
    inner = [NESTING.index(axis) for axis in axes]
    outer = [index for index in range(len(NESTING)) if index not in inner]
    size = prod(numbers.shape[index] for index in inner)
    if size == 1:
        return Ranks()
    if size == dist.get_world_size():
        return Ranks(size, dist.get_rank(), dist.group.WORLD)
    sets: list[list[int]] = numbers.permute(*outer, *inner).reshape(-1, size).tolist()
    group, _ = dist.new_subgroups_by_enumeration(sets)
    return Ranks(size, dist.get_rank(group), group) if group is not None else Ranks()
