"""How a node reaches the others, and what NCCL and gloo must be told about it.

Nothing is set without a reason found on this very node; what the user set is never touched. Run as

    python -m allranks.launch.network --peers a,b[1-3] -- COMMAND ...

it becomes COMMAND with these settings in its environment, having printed each with its reason.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from allranks.machine.gpus import local_gpus, peer_access
from allranks.machine.network import (
    SYS,
    Interface,
    Port,
    addresses_towards,
    common_route,
    infiniband_ports,
    up_interfaces,
)
from allranks.machine.nodelist import expand
from allranks.machine.processes import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNetwork:
    """What was found on one node."""

    interface: str | None = None  # the one that all routes to the peers use
    address: str | None = None  # of this node, as the peers see it
    interfaces: tuple[Interface, ...] = ()  # all that are up and have an address
    ports: tuple[Port, ...] = ()
    num_gpus: int = 0
    # What NVML says of GPUs reading each other's memory: None where it does not say, or of 1 GPU.
    gpus_reach_each_other: bool | None = None


def settings(node: NodeNetwork, env: Mapping[str, str], *, num_nodes: int) -> list[Setting]:
    """The variables that this node needs and `env` does not have yet. Nodes may differ.

    Left to NCCL, whatever the facts: NCCL_NET_GDR_LEVEL and NCCL_P2P_LEVEL. NCCL finds the
    distances, nvidia_peermem and DMA-BUF by itself, and its manual lists them for debugging only.
    """
    found = []
    if node.num_gpus > 1 and node.gpus_reach_each_other is False:
        reason = "NVML: no GPU here can read another's memory, so NCCL goes through the host's"
        found.append(Setting("NCCL_P2P_DISABLE", "1", reason))
    if num_nodes > 1:
        found += [*_socket_settings(node), *_infiniband_settings(node)]
    return [setting for setting in found if setting.name not in env]


def _socket_settings(node: NodeNetwork) -> Iterator[Setting]:
    if node.interface is None:
        return
    real = {interface.name for interface in node.interfaces if not interface.is_loopback}
    others = sorted(real - {node.interface})
    if node.interface in real and others:
        reason = f"the other nodes are reached through it, not through {', '.join(others)}"
        # `=`: without it NCCL takes every interface whose name starts like this.
        yield Setting("NCCL_SOCKET_IFNAME", f"={node.interface}", reason)
    reason = f"the other nodes are reached through it (from {node.address}); by default, gloo "
    reason += "takes the address that this host's own name resolves to, often a loopback one"
    yield Setting("GLOO_SOCKET_IFNAME", node.interface, reason)


def _infiniband_settings(node: NodeNetwork) -> Iterator[Setting]:
    active = [port for port in node.ports if port.state == "ACTIVE"]
    down = [port for port in node.ports if port.state != "ACTIVE"]
    if not down:
        return
    words = ", ".join(f"{port.name} is {port.state}" for port in down)
    if not active:
        yield Setting("NCCL_IB_DISABLE", "1", f"no InfiniBand or RoCE port is active: {words}")
    else:
        names = ",".join(port.name for port in active)
        # `=`: without it mlx5_1 also means mlx5_10.
        yield Setting("NCCL_IB_HCA", f"={names}", f"only the active ports: {words}")


def describe_node(peers: Sequence[str], sys_root: Path = SYS) -> NodeNetwork:
    """Look at this node: routes to the peers (host names or addresses), cards, GPUs."""
    interfaces = tuple(up_interfaces())
    interface, address = common_route(addresses_towards(peers), interfaces)
    gpus = local_gpus()
    return NodeNetwork(
        interface=interface,
        address=address,
        interfaces=interfaces,
        ports=tuple(infiniband_ports(sys_root)),
        num_gpus=len(gpus),
        gpus_reach_each_other=peer_access(gpus),
    )


def variables(nodes: Sequence[str]) -> dict[str, str]:
    """The variables that ranks on this node need, printed with their reasons; `nodes`: all."""
    own = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    own |= {os.environ.get("SLURMD_NODENAME", "")}
    node = describe_node([name for name in nodes if name not in own])
    found = settings(node, os.environ, num_nodes=len(nodes))
    say_once([f"{setting.name}={setting.value}: {setting.reason}" for setting in found])
    return {setting.name: setting.value for setting in found}


def say_once(lines: Sequence[str]) -> None:
    """Print lines into the job's log, from only one of a node's tasks."""
    if os.environ.get("SLURM_LOCALID", "0") == "0":
        host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        for line in lines:
            print(f"allranks: {host}: {line}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m allranks.launch.network")
    parser.add_argument("--peers", required=True, help="the nodes of the job, this one among them")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    env = {**os.environ, **variables(expand(options.peers))}
    os.execvpe(options.command[0], options.command, env)


if __name__ == "__main__":
    main()
