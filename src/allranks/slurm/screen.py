"""`allranks cluster` for people: tables drawn from its JSON alone, readable at 60 columns."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from allranks.show.numbers import count, duration

GIB = 2**30
WIDE_NODES = 110  # columns from which what a node suits has room beside it
WIDE_QUEUE = 76
MAX_JOBS = 20  # of the queue; --json has all
STATES = ("idle", "mixed", "allocated", "reserved", "down")
STYLES = {"idle": "green", "mixed": "yellow", "down": "red"}


def show_cluster(console: Console, view: Mapping[str, Any]) -> None:
    """What `describe_cluster()` found."""
    if view["slurm"] is not None:
        _line(console, headline(view), style="bold")
        console.print(partition_table(view["partitions"], wide=console.width >= WIDE_NODES))
        if any(kind["nodes"]["down"] for part in view["partitions"] for kind in part["types"]):
            _line(console, "down: takes no new job (down, draining or failed)", style="dim")
        if view["accounts"]:
            console.print(account_table(view["accounts"]))
        if view["qos"]:
            console.print(qos_table(view["qos"]))
        if view["accounts"] == []:
            _line(console, f"{view['user']} has no account on this cluster", style="yellow")
    for note in view["notes"]:
        _line(console, f"note: {note}", style="yellow")
    _line(console, f"this machine: {view['machine']['host']}", style="bold")
    console.print(machine_table(view["machine"]))


def show_queue(console: Console, view: Mapping[str, Any]) -> None:
    """What `queue()` found."""
    where = f"partition {view['partition']}" if view["partition"] else "all partitions"
    running, waiting = view["running"], view["waiting"]
    _line(console, where, style="bold")
    _line(console, f"running: {sums(running)}")
    _line(console, f"waiting: {sums(waiting)}")
    if view["jobs"]:
        console.print(queue_table(view, wide=console.width >= WIDE_QUEUE))
    if len(view["jobs"]) > MAX_JOBS:
        _line(console, f"and {len(view['jobs']) - MAX_JOBS} more (--json has all)", style="dim")
    for job in view["mine"][:MAX_JOBS]:
        _line(console, standing(job))
    if not view["mine"]:
        _line(console, f"no job of {view['user']} waits here")


def headline(view: Mapping[str, Any]) -> str:
    slurm, nodes, gpus = view["slurm"], view["nodes"], view["gpus"]
    return (
        f"cluster {slurm['cluster'] or '?'}, SLURM {slurm['version'] or '?'}: "
        f"{count(nodes['total'], 'node')}, {nodes['up']} up; "
        f"{count(gpus['total'], 'GPU')}, {gpus['free']} free now"
    )


def partition_table(partitions: Sequence[Mapping[str, Any]], *, wide: bool) -> Table:
    """One row for each type of node; a narrow table has what it suits below the node."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), leading=1)
    table.add_column("partition", overflow="fold", max_width=16)
    table.add_column("each node has", overflow="fold")
    table.add_column("nodes", no_wrap=True)
    table.add_column("GPUs\nfree", justify="right", no_wrap=True)
    if wide:
        table.add_column("suits")
    for partition in partitions:
        name = partition_name(partition)
        for kind in partition["types"]:
            suits = kind["suits"] or "unknown"
            node = node_words(kind)
            if not wide:
                node.append(f"\n{suits}", style="cyan")
            gpus = f"{kind['gpus_free']}/{kind['gpus_total']}" if kind["gpus_total"] else "-"
            row = [name, node, state_words(kind["nodes"]), Text(gpus)]
            table.add_row(*row, *([Text(suits, style="cyan")] if wide else []))
            name = Text()
        if not partition["types"]:
            table.add_row(name, Text("no nodes", style="dim"), Text("-"), Text("-"))
    return table


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
    words.append(f"\n{count(kind['cpus'], 'CPU')}{model}, {gigabytes(kind['memory_bytes'])}")
    for name, number in kind["other_gres"].items():
        words.append(f", {name} {number}")
    if kind["features"]:
        words.append(f"\n{', '.join(kind['features'])}", style="dim")
    if kind["some_features"]:
        words.append(f"\nsome: {', '.join(kind['some_features'])}", style="dim")
    return words


def gpu_words(gpu: Mapping[str, Any]) -> str:
    """'4 x A100 SXM4 80GB (a100)': the board, and in brackets what SLURM calls it."""
    if gpu["slice_of"]:
        return f"{gpu['count']} x {gpu['type']} (slice, {gigabytes(gpu['memory_bytes'])})"
    options = [f"{size / GIB:.0f}" for size in gpu["memory_options"]]
    memory = f"{' or '.join(options)} GB" if options else ""
    if gpu["model"] is None:
        return f"{gpu['count']} x {gpu['type'] or 'GPU'}{f', {memory}' if memory else ''}"
    model = f"{re.sub(r' [0-9]+GB$', '', gpu['model'])} {memory}"
    return f"{gpu['count']} x {model}" + (f" ({gpu['type']})" if gpu["type"] else "")


def state_words(counts: Mapping[str, int]) -> Text:
    """A line for each state that some nodes are in."""
    words = Text()
    for state in STATES:
        if counts[state]:
            style = STYLES.get(state, "")
            words.append("\n" if words else "").append(f"{counts[state]} {state}", style=style)
    return words


def account_table(accounts: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("account", "QOS", "limits"):
        table.add_column(name, overflow="fold")
    for row in accounts:
        where = f" (in {row['partition']})" if row["partition"] else ""
        default = row["default_qos"]
        qos = [f"{name} (default)" if name == default else name for name in row["qos"]]
        table.add_row(
            Text(row["account"] + where), Text(", ".join(qos) or "-"), Text(limit_words(row))
        )
    return table


def qos_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("QOS", overflow="fold")
    table.add_column("priority", justify="right")
    table.add_column("limits", overflow="fold")
    for row in rows:
        table.add_row(Text(row["qos"]), Text(f"{row['priority']:,}"), Text(limit_words(row)))
    return table


def limit_words(row: Mapping[str, Any]) -> str:
    """One limit a line, in SLURM's own numbers."""
    words = [f"time: {duration(row['max_seconds'])}"] if row["max_seconds"] else []
    words += [f"{what}: {limit.replace('gres/', '')}" for what, limit in row["limits"].items()]
    return "\n".join(words) or "none"


def machine_table(machine: Mapping[str, Any]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in machine_rows(machine):
        table.add_row(name, Text(value))
    return table


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
        ("memory", gigabytes(machine["memory_bytes"])),
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
        + (f", {gigabytes(gpu['memory_bytes'])}" if gpu["memory_bytes"] else "")
        for gpu in machine["gpus"]
    ]
    if len(gpus) > 1:
        gpus.append(f"joined by {machine['gpu_link']}")
    return "\n".join(gpus) or "none that NVML shows"


def interface_words(interface: Mapping[str, Any]) -> str:
    speed = interface["bits_per_second"]
    words = [interface["name"], interface["state"] or "?"]
    if speed:
        words.append(f"{speed / 1e9:g} Gb/s")
    if interface["kind"] == "infiniband":
        words.append("IP over InfiniBand")
    return " ".join(words[:2]) + "".join(f", {word}" for word in words[2:])


def queue_table(view: Mapping[str, Any], *, wide: bool) -> Table:
    """The jobs that wait, the next first; the user's own are marked."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("job", overflow="fold", max_width=16)
    table.add_column("user", overflow="fold", max_width=12)
    for name in ("nodes", "GPUs"):
        table.add_column(name, justify="right")
    if wide:
        for name in ("time", "priority", "waits"):
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("starts", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for job in view["jobs"][:MAX_JOBS]:
        limit, since = job["seconds"], job["waiting_since"]
        each = "" if job["tasks"] == 1 else f"{job['tasks']} x "
        cells = [job["job"], job["user"], f"{each}{job['nodes']}", f"{each}{job['gpus']}"]
        if wide:
            waits = duration(max(0, time.time() - since)) if since else "-"
            cells += [duration(limit) if limit else "-", f"{job['priority']}", waits]
        cells += [moment(job["expected_start"]), job["reason"]]
        style = "bold cyan" if job["user"] == view["user"] else ""
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def standing(job: Mapping[str, Any]) -> str:
    """Where one job of the user stands."""
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


def moment(unix_seconds: float | None) -> str:
    """The time of today, or the day and time; local, as SLURM's."""
    if unix_seconds is None:
        return "-"
    when = datetime.fromtimestamp(unix_seconds)
    today = when.date() == datetime.now().date()
    return f"{when:%H:%M}" if today else f"{when:%d %b %H:%M}"


def gigabytes(size: int) -> str:
    if size >= 1000 * GIB:
        return f"{size / GIB / 1024:.1f} TB"
    return f"{size / GIB:.0f} GB"


def _line(console: Console, text: str, *, style: str = "") -> None:
    console.print(Text(text, style=style))
