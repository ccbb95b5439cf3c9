"""The screen of `allranks cluster`: tables made from its JSON alone, readable at 60 columns."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.show.numbers import NOTHING, bit_rate, count, duration, moment, size
from allranks.show.tables import Cell, Table, facts, show_table

MAX_JOBS = 20  # that are shown; --json has all
STATES = ("idle", "mixed", "allocated", "reserved", "down")
STYLES = {"idle": "green", "mixed": "yellow", "down": "red"}


def show_cluster(console: Console, view: Mapping[str, Any]) -> None:
    """Print what `describe_cluster()` returns."""
    if view["slurm"] is not None:
        _line(console, headline(view), style="bold")
        show_table(console, partition_table(view["partitions"]))
        if any(kind["nodes"]["down"] for part in view["partitions"] for kind in part["types"]):
            _line(console, "down: takes no new job (down, draining or failed)", style="dim")
        if view["accounts"]:
            show_table(console, account_table(view["accounts"]))
        if view["qos"]:
            show_table(console, qos_table(view["qos"]))
        if view["accounts"] == []:
            _line(console, f"{view['user']} has no account on this cluster", style="yellow")
    for note in view["notes"]:
        _line(console, f"note: {note}", style="yellow")
    _line(console, f"this machine: {view['machine']['host']}", style="bold")
    show_table(console, facts(machine_rows(view["machine"])))


def show_queue(console: Console, view: Mapping[str, Any]) -> None:
    """Print what `queue()` returns."""
    where = f"partition {view['partition']}" if view["partition"] else "all partitions"
    running, waiting = view["running"], view["waiting"]
    _line(console, where, style="bold")
    _line(console, f"running: {sums(running)}")
    _line(console, f"waiting: {sums(waiting)}")
    if view["jobs"]:
        show_table(console, queue_table(view))
    if len(view["jobs"]) > MAX_JOBS:
        _line(console, f"and {len(view['jobs']) - MAX_JOBS} more (--json has all)", style="dim")
    for job in view["mine"][:MAX_JOBS]:
        _line(console, standing(job))
    if not view["mine"]:
        _line(console, f"no job of {view['user']} is waiting here")


def headline(view: Mapping[str, Any]) -> str:
    slurm, nodes, gpus = view["slurm"], view["nodes"], view["gpus"]
    return (
        f"cluster {slurm['cluster'] or '?'}, SLURM {slurm['version'] or '?'}: "
        f"{count(nodes['total'], 'node')}, {nodes['up']} up; "
        f"{count(gpus['total'], 'GPU')}, {gpus['free']} free now"
    )


def partition_table(partitions: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each type of node."""
    rows: list[list[Cell]] = []
    for partition in partitions:
        name = partition_name(partition)
        for kind in partition["types"]:
            gpus = f"{kind['gpus_free']}/{kind['gpus_total']}" if kind["gpus_total"] else NOTHING
            rows.append([name, gpus, state_words(kind["nodes"]), node_words(kind)])
            name = Text()
        if not partition["types"]:
            rows.append([name, NOTHING, NOTHING, Text("no nodes", style="dim")])
    columns = ("partition", "GPUs\nfree", "nodes", "each node has")
    return Table("", columns, rows, texts=("nodes", "each node has"))


def partition_name(partition: Mapping[str, Any]) -> Text:
    name = Text(partition["name"], style="bold")
    if partition["default"]:
        name.append("\ndefault", style="not bold")
    limit = partition["max_seconds"]
    name.append(f"\n{'up to ' + duration(limit) if limit else 'no limit'}", style="not bold dim")
    if partition["state"] != "up":
        name.append(f"\n{partition['state']}", style="red")
    return name


def node_words(kind: Mapping[str, Any]) -> Text:
    words = Text(" + ".join(gpu_words(gpu) for gpu in kind["gpus"]) or "no GPU")
    model = f" ({kind['cpu_model']})" if kind["cpu_model"] else ""
    words.append(f"\n{count(kind['cpus'], 'CPU')}{model}, {size(kind['memory_bytes'])}")
    for name, number in kind["other_gres"].items():
        words.append(f", {name} {number}")
    if kind["features"]:
        words.append(f"\n{', '.join(kind['features'])}", style="dim")
    if kind["some_features"]:
        words.append(f"\nsome: {', '.join(kind['some_features'])}", style="dim")
    return words.append(f"\n{kind['suits'] or 'unknown'}", style="cyan")


def gpu_words(gpu: Mapping[str, Any]) -> str:
    """'4 x A100 SXM4, 80 GiB (a100)': the board, and SLURM's name for it."""
    if gpu["slice_of"]:
        return f"{gpu['count']} x {gpu['type']} (slice, {size(gpu['memory_bytes'])})"
    memory = " or ".join(map(size, gpu["memory_options"]))
    if gpu["model"] is None:
        return f"{gpu['count']} x {gpu['type'] or 'GPU'}{f', {memory}' if memory else ''}"
    model = f"{re.sub(r' [0-9]+GB$', '', gpu['model'])}, {memory}" if memory else gpu["model"]
    return f"{gpu['count']} x {model}" + (f" ({gpu['type']})" if gpu["type"] else "")


def state_words(counts: Mapping[str, int]) -> Text:
    """A line for each state that any node is in."""
    words = Text()
    for state in STATES:
        if counts[state]:
            style = STYLES.get(state, "")
            words.append("\n" if words else "").append(f"{counts[state]} {state}", style=style)
    return words


def account_table(accounts: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for row in accounts:
        where = f" (in {row['partition']})" if row["partition"] else ""
        default = row["default_qos"]
        qos = [f"{name} (default)" if name == default else name for name in row["qos"]]
        rows.append((row["account"] + where, ", ".join(qos) or NOTHING, limit_words(row)))
    return Table("", ("account", "QOS", "limits"), rows, texts=("QOS", "limits"))


def qos_table(found: Sequence[Mapping[str, Any]]) -> Table:
    rows = [(row["qos"], count(row["priority"]), limit_words(row)) for row in found]
    return Table("", ("QOS", "priority", "limits"), rows, texts=("limits",))


def limit_words(row: Mapping[str, Any]) -> str:
    """One limit per line, in SLURM's own numbers."""
    words = [f"time: {duration(row['max_seconds'])}"] if row["max_seconds"] else []
    words += [f"{what}: {limit.replace('gres/', '')}" for what, limit in row["limits"].items()]
    return "\n".join(words) or "none"


def machine_rows(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    cuda, nccl = machine["cuda"], machine["nccl"]
    allotted = f" ({machine['cpus_allotted']} of them yours)"
    cpus = machine["cpus_allotted"] != machine["cpus"]
    versions = {
        "driver": cuda["driver"],
        "runs up to": cuda["driver_runs"],
        "toolkit": cuda["toolkit"],
        "torch built for": cuda["torch_cuda"],
    }
    found = [f"{name} {version}" for name, version in versions.items() if version]
    if cuda["torch"] and not cuda["torch_cuda"]:
        found.append(f"torch {cuda['torch']} without CUDA")
    rows = [
        ("system", f"{machine['os']}, Linux {machine['kernel']}"),
        ("CPU", f"{count(machine['cpus'], 'CPU')}{allotted if cpus else ''}, {machine['cpu']}"),
        ("memory", size(machine["memory_bytes"])),
        ("GPUs", local_gpu_words(machine)),
        ("CUDA", ", ".join(found) or "none"),
        ("NCCL", f"{nccl['version']} ({nccl['from']})" if nccl else "none"),
        ("MPI", machine["mpi"] or "none"),
        ("UCX", machine["ucx"] or "none"),
    ]
    links = [
        f"{port['device']}:{port['port']} {port['state']}, {port['rate']}, {port['link_layer']}"
        for port in machine["infiniband"]
    ]
    rows.append(("InfiniBand", "\n".join(links) or "none"))
    up = [link for link in machine["network"] if link["state"] != "down"]
    real = [link for link in up if link["physical"]] or up  # a container has no real ones
    rows.append(("network", "\n".join(map(interface_words, real)) or "none"))
    return rows


def local_gpu_words(machine: Mapping[str, Any]) -> str:
    gpus = [
        f"{gpu['index']}: {gpu['name']}"
        + (f", {size(gpu['memory_bytes'])}" if gpu["memory_bytes"] else "")
        for gpu in machine["gpus"]
    ]
    if len(gpus) > 1:
        gpus.append(f"joined by {machine['gpu_link']}")
    return "\n".join(gpus) or "none that NVML shows"


def interface_words(interface: Mapping[str, Any]) -> str:
    speed = interface["bits_per_second"]
    words = [interface["name"], interface["state"] or "?"]
    if speed:
        words.append(bit_rate(speed))
    if interface["kind"] == "infiniband":
        words.append("IP over InfiniBand")
    return " ".join(words[:2]) + "".join(f", {word}" for word in words[2:])


def queue_table(view: Mapping[str, Any]) -> Table:
    """The waiting jobs, the next one first, with the user's own marked."""
    rows = []
    for job in view["jobs"][:MAX_JOBS]:
        since = job["waiting_since"]
        each = "" if job["tasks"] == 1 else f"{job['tasks']} x "
        cells = (
            job["job"],
            job["user"],
            f"{each}{job['nodes']}",
            f"{each}{job['gpus']}",
            duration(job["seconds"] or None),
            f"{job['priority']}",
            duration(max(0, time.time() - since) if since else None, whole=True),
            moment(job["expected_start"]),
            job["reason"],
        )
        style = "bold cyan" if job["user"] == view["user"] else ""
        rows.append([Text(cell, style=style) for cell in cells])
    columns = ("job", "user", "nodes", "GPUs", "time", "priority", "waits", "starts", "reason")
    return Table("", columns, rows, texts=("user", "reason"))


def standing(job: Mapping[str, Any]) -> str:
    """The position of one of the user's jobs in the queue."""
    if job["position"] is None:
        return f"{job['job']}: {job['reason_words']}"
    ahead = job["ahead"]
    before = f"before it {sums(ahead)}" if ahead["jobs"] else "none before it"
    when = f", expected start {moment(job['expected_start'])}" if job["expected_start"] else ""
    place = f"{job['position']} of {job['of']} in line"
    return f"{job['job']}: {place}, {before}{when}; {job['reason_words']}"


def sums(totals: Mapping[str, int]) -> str:
    mine = f" ({totals['mine']} yours)" if totals.get("mine") else ""
    nodes, gpus = count(totals["nodes"], "node"), count(totals["gpus"], "GPU")
    return f"{count(totals['jobs'], 'job')}{mine} on {nodes} with {gpus}"


def _line(console: Console, text: str, *, style: str = "") -> None:
    console.print(Text(text, style=style))
