"""What a SLURM cluster has, from the output of its commands: partitions, node types, accounts.

Uses text formats that have not changed since SLURM 20.02. Whatever SLURM does not say is None,
never guessed; the parsers skip what they do not understand, and never raise.
"""

from __future__ import annotations

import itertools
import os
import pwd
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from allranks.errors import AllranksError
from allranks.machine.inventory import describe_machine
from allranks.slurm import commands as slurm
from allranks.slurm.commands import (
    NOT_SET,
    names,
    number_of,
    parse_fields,
    parse_gres,
    parse_time,
    tres_gpus,
)
from allranks.slurm.node_kinds import Gpus, cpu_model, resolve_gpus, suits

MIB = 2**20
DATABASE_SECONDS = 15.0  # then the rest is shown without the accounts
MEMORY_SPREAD = 1.05  # nodes of one type differ by what their firmware reserves
TAKEN = {"ALLOCATED", "ALLOC", "COMPLETING", "COMP"}
OUT_OF_USE = ("DOWN", "DRAIN", "DRNG", "FAIL", "INVAL", "ERROR", "UNKNOWN", "UNK", "REBOOT")
RESERVED = ("RESERVED", "RESV", "MAINT")
# In the order of sacctmgr's columns; all of these names exist in SLURM 20.02.
ACCOUNT_FIELDS = (
    "cluster,account,partition,qos,defaultqos,maxjobs,maxsubmitjobs,maxwall,maxtres,grptres,"
    "grptresmins,grpjobs"
)
QOS_FIELDS = (
    "name,priority,maxwall,maxtres,maxtrespu,maxtrespa,maxjobspu,maxsubmitpu,grptres,grpjobs,"
    "mintres,preempt,flags"
)
LIMITS = {
    "maxjobs": "running jobs",
    "maxsubmitjobs": "jobs in the queue",
    "maxtres": "one job",
    "grptres": "all jobs together",
    "grptresmins": "minutes in all",
    "grpjobs": "running jobs of all",
    "maxtrespu": "one user",
    "maxtrespa": "one account",
    "maxjobspu": "running jobs of a user",
    "maxsubmitpu": "jobs in the queue of a user",
    "mintres": "at least",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node as shown by `scontrol -d -o show node`."""

    name: str
    host: str
    state: str  # idle, mixed, allocated, reserved, down
    cpus: int
    memory_bytes: int
    features: tuple[str, ...]
    gpus: tuple[tuple[str | None, int], ...]  # the gres type and how many
    gpus_used: int
    other_gres: tuple[tuple[str, int], ...]  # shard, mps, nvme
    partitions: tuple[str, ...]

    @property
    def gpus_total(self) -> int:
        return sum(count for _, count in self.gpus)

    @property
    def gpus_free(self) -> int:
        """GPUs that a job could get now: none if no CPU is left or the node is out of use."""
        free = max(0, self.gpus_total - self.gpus_used)
        return free if self.state in ("idle", "mixed") else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """Identical nodes of one partition."""

    gpus: tuple[Gpus, ...]
    gpus_per_node: int
    other_gres: dict[str, int]
    cpus: int
    cpu_model: str | None
    memory_bytes: int  # of the smallest
    features: tuple[str, ...]  # of all of them
    some_features: tuple[str, ...]  # of some of them, such as a rack's
    nodes: dict[str, int]
    gpus_total: int
    gpus_free: int
    example: str  # the name of one
    suits: str | None


def describe_cluster(only: str | None = None) -> dict[str, Any]:
    """What this cluster (or one partition) and this machine have; without SLURM, only the latter.

    Raises SlurmError if the controller does not answer.
    """
    machine = describe_machine()
    if not slurm.is_here() and only is None:
        return cluster_view("", [], [], machine) | {"slurm": None}
    config = slurm.call("scontrol", "show", "config")
    nodes = parse_nodes(slurm.call("scontrol", "-d", "-o", "show", "node"))
    partitions = list_partitions()
    if only is not None:
        partitions = [find_partition(partitions, only)]
        nodes = [node for node in nodes if only in node.partitions]
    view = cluster_view(config, nodes, partitions, machine)
    try:
        who, fields = f"user={current_user()}", f"format={ACCOUNT_FIELDS}"
        text = slurm.call("sacctmgr", "-nP", "show", "assoc", who, fields, seconds=DATABASE_SECONDS)
        accounts = parse_accounts(text, view["slurm"]["cluster"])
        fields = f"format={QOS_FIELDS}"
        text = slurm.call("sacctmgr", "-nP", "show", "qos", fields, seconds=DATABASE_SECONDS)
        qos = parse_qos(text, accounts)
    except slurm.SlurmError as error:  # many sites have no accounting
        return view | {"notes": [f"no accounts or QOS: {error.what}"]}
    return view | {"accounts": accounts, "qos": qos}


def list_partitions() -> list[dict[str, Any]]:
    return parse_partitions(slurm.call("scontrol", "-o", "show", "partition"))


def find_partition(partitions: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """The partition with that name. Raises AllranksError with the existing names."""
    found = {partition["name"]: partition for partition in partitions}
    if name not in found:
        raise AllranksError(
            f'this cluster has no partition "{name}"',
            fix=f"name one of {', '.join(found)}, or leave it out to see all",
        )
    return found[name]


def cluster_view(
    config: str,
    nodes: Sequence[Node],
    partitions: Sequence[dict[str, Any]],
    machine: dict[str, Any],
) -> dict[str, Any]:
    """The JSON of `allranks cluster`, without the accounts."""
    known_cpus = {str(machine.get("host", "")).partition(".")[0]: machine.get("cpu")}
    return {
        "slurm": {
            "cluster": _setting(config, "ClusterName"),
            "version": _setting(config, "SLURM_VERSION"),
        },
        "user": current_user(),
        "nodes": count_states(nodes),
        "gpus": {
            "total": sum(node.gpus_total for node in nodes),
            "free": sum(node.gpus_free for node in nodes),
        },
        "partitions": [
            partition
            | {"nodes": count_states(inside)}
            | {"types": [asdict(kind) for kind in node_types(inside, known_cpus)]}
            for partition in partitions
            for inside in [[node for node in nodes if partition["name"] in node.partitions]]
        ],
        "accounts": None,
        "qos": None,
        "notes": [],
        "machine": machine,
    }


def current_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # an account that only the site's directory knows
        return os.environ.get("USER") or str(os.getuid())


def parse_nodes(text: str) -> list[Node]:
    """The nodes in `scontrol -d -o show node`, without those that do not exist yet (FUTURE)."""
    nodes = []
    for line in text.splitlines():
        fields = parse_fields(line)
        name, state = fields.get("NodeName"), fields.get("State", "")
        if not name or "FUTURE" in state.upper():
            continue
        gres = parse_gres(fields.get("Gres", ""))
        used = fields.get("GresUsed")
        if used is None or used in NOT_SET:
            used_gpus = tres_gpus(fields.get("AllocTRES", ""))
        else:
            used_gpus = sum(n for kind, _, n in parse_gres(used) if kind == "gpu")
        others: Counter[str] = Counter()
        for kind, _, number in gres:
            if kind != "gpu":
                others[kind] += number
        nodes.append(
            Node(
                name=name,
                host=fields.get("NodeHostName") or name,
                state=node_state(state),
                cpus=number_of(fields.get("CPUTot")),
                memory_bytes=number_of(fields.get("RealMemory")) * MIB,
                features=names(fields.get("ActiveFeatures") or fields.get("AvailableFeatures")),
                gpus=tuple((model, n) for kind, model, n in gres if kind == "gpu" and n),
                gpus_used=used_gpus,
                other_gres=tuple(sorted(others.items())),
                partitions=names(fields.get("Partitions")),
            )
        )
    return nodes


def node_state(text: str) -> str:
    """The Node.state for SLURM's state with its flags, such as IDLE+CLOUD or DOWN*+DRAIN.

    Powered-down nodes count as idle: SLURM starts them for a job. A draining node is down: it
    takes no new jobs.
    """
    flags = re.sub(r"[~#!%$^@-]", "", text.upper()).split("+")
    if re.search(r"[*@^]|NOT_RESPONDING", text) or any(f.startswith(OUT_OF_USE) for f in flags):
        return "down"
    if "$" in text or any(flag.startswith(RESERVED) for flag in flags):
        return "reserved"
    if TAKEN.intersection(flags):
        return "allocated"
    if flags[0].startswith("MIX"):
        return "mixed"
    return "idle" if flags[0] in ("IDLE", "PLANNED", "PLND") else "down"


def count_states(nodes: Iterable[Node]) -> dict[str, int]:
    """How many nodes there are in total, up, and in each state; `down` takes no new jobs."""
    counts = Counter(node.state for node in nodes)
    total = counts.total()
    states = ("idle", "mixed", "allocated", "reserved", "down")
    return {"total": total, "up": total - counts["down"]} | {name: counts[name] for name in states}


def node_types(nodes: Sequence[Node], known_cpus: Mapping[str, Any]) -> list[NodeType]:
    """Groups of identical nodes, those with the most GPU memory first."""

    def likeness(node: Node) -> tuple[Any, ...]:
        gpus = tuple(resolve_gpus(model, n, node.features) for model, n in node.gpus)
        return gpus, node.other_gres, node.cpus, cpu_model(node.features)

    groups: dict[tuple[Any, ...], list[list[Node]]] = {}
    for node in sorted(nodes, key=lambda node: node.memory_bytes):
        alike = groups.setdefault(likeness(node), [])
        if alike and node.memory_bytes <= alike[-1][0].memory_bytes * MEMORY_SPREAD:
            alike[-1].append(node)
        else:
            alike.append([node])
    types = [
        _node_type(group, *likeness(group[0]), known_cpus=known_cpus)
        for group in itertools.chain.from_iterable(groups.values())
    ]
    return sorted(types, key=_size, reverse=True)


def _node_type(
    nodes: Sequence[Node],
    gpus: tuple[Gpus, ...],
    other_gres: tuple[tuple[str, int], ...],
    cpus: int,
    model: str | None,
    *,
    known_cpus: Mapping[str, Any],
) -> NodeType:
    features = [set(node.features) for node in nodes]
    all_have = set.intersection(*features)
    least = min(node.memory_bytes for node in nodes)
    here = (known_cpus.get(node.host.partition(".")[0]) for node in nodes)
    return NodeType(
        gpus=gpus,
        gpus_per_node=sum(kind.count for kind in gpus),
        other_gres=dict(other_gres),
        cpus=cpus,
        cpu_model=model or next((known for known in here if known), None),
        memory_bytes=least,
        features=tuple(name for name in nodes[0].features if name in all_have),
        some_features=tuple(sorted(set.union(*features) - all_have)),
        nodes=count_states(nodes),
        gpus_total=sum(node.gpus_total for node in nodes),
        gpus_free=sum(node.gpus_free for node in nodes),
        example=min(node.name for node in nodes),
        suits=suits(gpus, memory_bytes=least),
    )


def _size(kind: NodeType) -> tuple[int, ...]:
    gpu_memory = max((gpu.memory_bytes or 1 for gpu in kind.gpus), default=0)
    return gpu_memory, kind.gpus_per_node, kind.memory_bytes, kind.cpus


def parse_partitions(text: str) -> list[dict[str, Any]]:
    """The partitions in `scontrol -o show partition`, the default one first.

    None: no limit, or not shown.
    """
    found = []
    for fields in map(parse_fields, text.splitlines()):
        if not fields.get("PartitionName"):
            continue
        max_nodes = fields.get("MaxNodes", "")
        found.append(
            {
                "name": fields["PartitionName"],
                "default": fields.get("Default", "").upper() == "YES",
                "state": fields.get("State", "").lower() or "unknown",
                "max_seconds": parse_time(fields.get("MaxTime", "")),
                "default_seconds": parse_time(fields.get("DefaultTime", "")),
                "max_nodes": number_of(max_nodes) if max_nodes.isdecimal() else None,
                "qos": None if fields.get("QoS", "") in NOT_SET else fields["QoS"],
                "allow_accounts": names(fields.get("AllowAccounts")) or None,
                "deny_accounts": names(fields.get("DenyAccounts")) or None,
                "allow_groups": names(fields.get("AllowGroups")) or None,
                "allow_qos": names(fields.get("AllowQos")) or None,
            }
        )
    return sorted(found, key=lambda partition: not partition["default"])


def parse_accounts(text: str, cluster: str | None = None) -> list[dict[str, Any]]:
    """The user's accounts on one cluster, from `sacctmgr -nP show assoc` with ACCOUNT_FIELDS.

    An account that is valid for certain partitions only has a row for each.
    """
    rows = _rows(text, ACCOUNT_FIELDS)
    return [
        {
            "account": row["account"],
            "partition": row["partition"] or None,
            "qos": list(names(row["qos"])),
            "default_qos": row["defaultqos"] or None,
            "max_seconds": parse_time(row["maxwall"]),
            "limits": _limits(row),
        }
        for row in rows
        if row["account"] and (cluster is None or row["cluster"].lower() == cluster.lower())
    ]


def parse_qos(text: str, accounts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The QOS that these accounts may use, from `sacctmgr -nP show qos` with QOS_FIELDS."""
    allowed = {name for account in accounts for name in account["qos"]}
    return [
        {
            "qos": row["name"],
            "priority": number_of(row["priority"]),
            "max_seconds": parse_time(row["maxwall"]),
            "limits": _limits(row),
            "preempts": list(names(row["preempt"])),
            "flags": list(names(row["flags"])),
        }
        for row in _rows(text, QOS_FIELDS)
        if row["name"] in allowed
    ]


def _rows(text: str, fields: str) -> list[dict[str, str]]:
    keys = fields.split(",")
    rows = (line.split("|") for line in text.splitlines())
    return [dict(zip(keys, row, strict=True)) for row in rows if len(row) == len(keys)]


def _limits(row: Mapping[str, str]) -> dict[str, str]:
    """What is limited, and to what, as SLURM writes it (cpu=64,gres/gpu=8)."""
    return {words: row[key] for key, words in LIMITS.items() if row.get(key)}


def _setting(config: str, key: str) -> str | None:
    match = re.search(rf"^{key}\s*=\s*(\S+)", config, re.MULTILINE)
    return match[1] if match else None
