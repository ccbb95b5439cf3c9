"""One collective of one size in a rank of `bench comm`: buffers, call, expected result, time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from allranks.bench.comm_counts import COLLECTIVES, ELEMENT_BYTES, Scope
from allranks.machine import allotted

# Lengths of the patterns that are sent, both prime. Where values are added, the sum of 65,000
# ranks must still be exact in fp32; where they are moved, each rank's values must be its own.
ADDED_PERIOD = 251
MOVED_PERIOD = 65_521
BLOCK_ELEMENTS = 1 << 20
STALE = -1.0  # in no pattern: a result that never arrived is noticed

MEMORY_SHARE = 0.4  # of the machine's, for the buffers of all its ranks: gloo needs its own too
GPU_MEMORY_SHARE = 0.8  # of what is free

ADDS = ("all_reduce", "reduce_scatter", "reduce")

# torch 2.13 renamed these two, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that take part, and this one's place among them."""

    ranks: tuple[int, ...]  # of the world, in order
    place: int
    group: dist.ProcessGroup | None = None  # None: the world

    @property
    def count(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Piece:
    """`result[start : start + length]` must be `source`'s pattern from `first` on."""

    start: int
    length: int
    source: int | None  # a place among the peers; None: the sum over all
    first: int = 0


@dataclass(slots=True)
class Operation:
    """A collective that is ready to be called. All peers must call the same one."""

    run: Callable[[], object]
    given: Tensor
    result: Tensor  # may be `given` itself
    pieces: list[Piece]
    peers: Peers
    period: int
    _cycles: dict[int | None, Tensor] = field(default_factory=dict)

    def fill(self) -> None:
        """Write the values whose result `is_right` knows."""
        self.result.fill_(STALE)
        write_cycle(self.given, self._cycle(self.peers.place))

    def is_right(self) -> bool:
        """Whether every value of the result follows from the peers' patterns."""
        return all(
            matches_cycle(
                self.result[piece.start : piece.start + piece.length],
                self._cycle(piece.source).roll(-(piece.first % self.period)),
            )
            for piece in self.pieces
        )

    def clear(self) -> None:
        """Zeros stay zeros however often they are added: no overflow, no slow denormals."""
        self.given.zero_()
        self.result.zero_()

    def _cycle(self, source: int | None) -> Tensor:
        if source not in self._cycles:
            sources = range(self.peers.count) if source is None else [source]
            places = torch.arange(self.period, device=self.given.device)
            values = sum((places + 17 * each) % self.period + 1 for each in sources)
            self._cycles[source] = torch.as_tensor(values).to(self.given.dtype)
        return self._cycles[source]


def make_operation(
    collective: str, num_bytes: int, peers: Peers, device: torch.device
) -> Operation:
    """Buffers and call for `num_bytes`, as `comm_counts.counted_bytes` counts them."""
    length = num_bytes // ELEMENT_BYTES
    part = length // peers.count
    is_first = peers.place == 0
    split = COLLECTIVES[collective].is_split
    given = torch.empty(part if collective == "all_gather" else length, device=device)
    result = given  # in place, unless torch takes two buffers
    if split or collective == "send_recv":
        result = torch.empty(part if collective == "reduce_scatter" else length, device=device)
    pieces = {
        "all_reduce": [Piece(0, length, None)],
        "all_gather": [Piece(each * part, part, each) for each in range(peers.count)],
        "reduce_scatter": [Piece(0, part, None, peers.place * part)],
        "broadcast": [Piece(0, length, 0)],
        "reduce": [Piece(0, length, None)] if is_first else [],
        "all_to_all": [
            Piece(each * part, part, each, peers.place * part) for each in range(peers.count)
        ],
        "send_recv": [Piece(0, length, (peers.place - 1) % peers.count)],
    }
    period = ADDED_PERIOD if collective in ADDS else MOVED_PERIOD
    run = _call(collective, given, result, peers)
    return Operation(run, given, result, pieces[collective], peers, period)


def _call(collective: str, given: Tensor, result: Tensor, peers: Peers) -> Callable[[], object]:
    group, first = peers.group, peers.ranks[0]

    def send_recv() -> None:
        following, preceding = (peers.ranks[(peers.place + n) % peers.count] for n in (1, -1))
        send = dist.P2POp(dist.isend, given, following, group)
        receive = dist.P2POp(dist.irecv, result, preceding, group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(given, group=group),
        "all_gather": lambda: _all_gather(result, given, group=group),
        "reduce_scatter": lambda: _reduce_scatter(result, given, group=group),
        "broadcast": lambda: dist.broadcast(given, first, group=group),
        "reduce": lambda: dist.reduce(given, first, group=group),
        "all_to_all": lambda: dist.all_to_all_single(result, given, group=group),
        "send_recv": send_recv,
    }
    return calls[collective]


def write_cycle(tensor: Tensor, cycle: Tensor) -> None:
    """Repeat a cycle over the whole tensor, without a second one of its size."""
    block = _block(cycle, len(tensor))
    for start in range(0, len(tensor), max(1, len(block))):
        part = tensor[start : start + len(block)]
        part.copy_(block[: len(part)])


def matches_cycle(tensor: Tensor, cycle: Tensor) -> bool:
    block = _block(cycle, len(tensor))
    parts = (tensor[at : at + len(block)] for at in range(0, len(tensor), max(1, len(block))))
    return all(torch.equal(part, block[: len(part)]) for part in parts)


def _block(cycle: Tensor, length: int) -> Tensor:
    """Whole cycles, so that every block begins with one."""
    return cycle.repeat(max(1, -(-min(length, BLOCK_ELEMENTS) // len(cycle))))


def time_calls(run: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Seconds of each of `count` back-to-back calls on this rank.

    Only the calls themselves keep the ranks together, as in nccl-tests. On a GPU the time is the
    device's, by an event after each call, and nothing waits for the device until the last one.
    """
    if device.type == "cuda":
        return _time_on_gpu(run, count, device)
    stamps = [time.perf_counter()]
    for _ in range(count):
        run()
        stamps.append(time.perf_counter())
    return [after - before for before, after in pairwise(stamps)]


def _time_on_gpu(run: Callable[[], object], count: int, device: torch.device) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for event in events:  # CUDA creates an event when it is first recorded: not while it is timed
        event.record()
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize(device)
    stamps = [events[0].elapsed_time(event) / 1000 for event in events]
    return [after - before for before, after in pairwise(stamps)]


@dataclass(slots=True)
class World:
    """This rank among all, and the groups that are measured."""

    rank: int
    size: int
    per_node: int
    device: torch.device
    scopes: dict[Scope, Peers | None] = field(default_factory=dict)  # None: not this rank

    @property
    def library(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    def members(self, scope: Scope) -> int:
        """The number of ranks that work together in a scope."""
        if scope == "node":
            return self.per_node
        return self.size // self.per_node if scope == "nodes" else self.size


def join(device: torch.device) -> World:
    """Meet the others and make the groups. Collective."""
    # What the ranks tell each other goes through gloo, so that none has to wait for a GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    if os.environ.get("ALLRANKS_OWN_GPU"):
        per_node = int(os.environ["ALLRANKS_RANKS_PER_NODE"])
    world = World(dist.get_rank(), dist.get_world_size(), per_node, device)
    everyone = Peers(tuple(range(world.size)), world.rank)
    num_nodes = world.size // per_node
    if num_nodes == 1:
        world.scopes = {"node": everyone}
    elif per_node == 1:
        world.scopes = {"nodes": everyone}
    else:
        nodes = [range(node * per_node, (node + 1) * per_node) for node in range(num_nodes)]
        world.scopes["node"] = own_group(nodes, world.rank)
        world.scopes["nodes"] = own_group([range(0, world.size, per_node)], world.rank)
        world.scopes["all"] = everyone
    return world


def own_group(groups: Sequence[Sequence[int]], rank: int) -> Peers | None:
    """The group that this rank is in, if any. Every rank must create all of them. Collective."""
    own = None
    for ranks in groups:
        group = dist.new_group(list(ranks))
        if rank in ranks:
            own = Peers(tuple(ranks), list(ranks).index(rank), group)
    return own


def choose_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def highest(*values: float) -> list[float]:
    """The maximum over all ranks of each value. Collective."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def of_every_rank(*values: float) -> list[list[float]]:
    """Each rank's values, in the order of ranks. Collective."""
    own = torch.tensor(values, dtype=torch.float64)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [each.tolist() for each in gathered]


def memory_for_buffers(world: World) -> float:
    """Bytes that a rank may take, the same on all. Collective."""
    if world.device.type == "cuda":
        free = torch.cuda.mem_get_info(world.device)[0]
        sharing = -(-int(os.environ["ALLRANKS_RANKS_HERE"]) // torch.cuda.device_count())
        if os.environ.get("ALLRANKS_OWN_GPU"):
            sharing = 1
        own = GPU_MEMORY_SHARE * free / sharing
    else:
        own = MEMORY_SHARE * allotted.memory_allotted() / int(os.environ["ALLRANKS_RANKS_HERE"])
    return -highest(-own)[0]
