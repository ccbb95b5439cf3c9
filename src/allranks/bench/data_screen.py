"""`bench data` for people, drawn from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.bench.data import count_of
from allranks.show.numbers import between, count, duration, number, percent, rate, size
from allranks.show.tables import Table, facts, show_table, without_empty

Found = Mapping[str, Any]


def show(console: Console, found: Found) -> None:
    """What `as_json` or `script_as_json` made."""
    if found["mode"] == "script":
        show_table(console, script_table(found))
    else:
        if found["rows"]:
            show_table(console, workers_table(found))
        for line in notes(found):
            console.print(Text(line), soft_wrap=True)
    console.print(Text(found["verdict"], style="bold"), soft_wrap=True)
    console.print(Text(found["run_dir"], style="dim"), soft_wrap=True)


def workers_table(found: Found) -> Table:
    chosen = (found["recommendation"] or {}).get("num_workers")
    cells = []
    for row in found["rows"]:
        shown = (
            count(row["workers"]),
            number(row["samples_per_second"]),
            between(row["range"]),
            number(row["batches_per_second"]),
            number(row["cold_samples_per_second"]),
            number(row["training_samples_per_second"]),
            percent(row["of_step"]),
        )
        style = "bold" if row["workers"] == chosen else ""
        cells.append([Text(cell, style=style) for cell in shown])
    columns = (
        "workers",
        "data alone",
        "range",
        "batches/s",
        "from disk",
        "training",
        "of the step",
    )
    return without_empty(Table("samples/s by loader workers a rank, measured", columns, cells))


def notes(found: Found) -> list[str]:
    """What the table does not say."""
    lines = []
    step = found["step"]
    if step is not None:
        lines.append(
            f"the step alone takes {number(step['samples_per_second'])} samples/s "
            f"({number(step['batches_per_second'])} batches of {found['batch_size']})"
        )
    if any(row["is_direct"] for row in found["rows"]):
        lines.append("without workers whole batches are fetched at once, with no loader in between")
    if found["knee"] is not None and len(found["rows"]) > 1:
        lines.append(knee_line(found))
    files = found["files"]
    if files["why_not_cold"] is not None:
        lines.append(f"reading from the disk was not measured: {files['why_not_cold']}")
    if files["count"]:
        lines.append(files_line(files))
        lines += [disk_line(disk) for disk in found["disks"]]
    if found["recommendation"] is not None:  # else the verdict says why
        lines += [f"note: {said}: something else may run here" for said in found["remarks"][:1]]
    return lines


def knee_line(found: Found) -> str:
    """Of the data alone: what a training needs of them is the verdict's to say."""
    most, knee = found["rows"][-1]["workers"], found["knee"]
    if knee == most:
        return f"knee: none, the data alone still gain with {count_of(most)}"
    if knee == 0:
        return "knee: the data alone gain less than a tenth from workers"
    return f"knee: the data alone gain less than a tenth beyond {count_of(knee)}"


def files_line(files: Mapping[str, Any]) -> str:
    more = "" if files["is_all"] else " at least"
    return f"data: {count(files['count'], 'file')}{more}, {size(files['bytes'])}"


def disk_line(disk: Mapping[str, Any]) -> str:
    where = "network" if disk["is_network"] else "local"
    role = "data on" if disk["role"] == "data" else "copies would be on"
    line = f"{role} {disk['mount']} ({disk['kind']}, {where})"
    if disk["bytes_per_second"]:
        speed = rate(disk["bytes_per_second"])
        return f"{line}: {speed} from the disk, over {size(disk['bytes'])}"
    if disk.get("problem"):
        return f"{line}: not measured: {disk['problem']}"
    return f"{line}: the same disk"


def script_table(found: Found) -> Table:
    rows = [
        ("samples/s", number(found["samples_per_second"])),
        ("a step", duration(found["step_seconds"])),
    ]
    if found["data_seconds"] is not None:
        waits = f"{duration(found['data_seconds'])} ({percent(found['data_share'])})"
        rows.append(("of it waiting for data", waits))
    if found["samples_per_second_without_waiting"] is not None:
        without = number(found["samples_per_second_without_waiting"])
        rows.append(("samples/s if it did not wait", without))
    return facts(rows)
