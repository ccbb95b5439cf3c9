"""The ranks that are measured: how they meet, their groups, what they tell each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from allranks.bench.comm import Scope
from allranks.bench.comm_ops import Peers
from allranks.machine import allotted

MEMORY_SHARE = 0.4  # of the machine's, for the buffers of all its ranks: gloo has its own beside
GPU_MEMORY_SHARE = 0.8  # of what is free


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
    # Words between the ranks go through gloo, so that none of them has to wait for a GPU.
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
    """The one of these groups that this rank is in. Every rank must make all of them."""
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
    """The highest over all ranks of each value. Collective."""
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


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def is_played(world: World) -> bool:
    """Whether one machine plays several nodes."""
    return int(os.environ["ALLRANKS_RANKS_HERE"]) > world.per_node
