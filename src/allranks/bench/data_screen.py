"""`bench data` for people, drawn from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from allranks.bench.data import count_of

WIDE = 90
Found = Mapping[str, Any]


def show(console: Console, found: Found) -> None:
    """What `as_json` or `script_as_json` made."""
    if found["mode"] == "script":
        console.print(script_table(found))
    else:
        if found["rows"]:
            console.print(workers_table(found, is_wide=console.width >= WIDE))
        for line in notes(found):
            console.print(Text(line), soft_wrap=True)
    console.print(Text(found["verdict"], style="bold"), soft_wrap=True)
    console.print(Text(found["run_dir"], style="dim"), soft_wrap=True)


def workers_table(found: Found, *, is_wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="samples/s by loader workers a rank, measured")
    has_cold = any(row["cold_samples_per_second"] is not None for row in found["rows"])
    names = ["workers", "data\nalone"]
    names += ["range", "batches/s"] if is_wide else []
    names += ["from\ndisk"] if has_cold else []
    names += ["train-\ning", "of the\nstep"]
    for name in names:
        table.add_column(name.replace("-\n", "") if is_wide else name, justify="right")
    chosen = (found["recommendation"] or {}).get("num_workers")
    for row in found["rows"]:
        cells = [f"{row['workers']}", number(row["samples_per_second"])]
        if is_wide:
            cells += [span(row["range"]), number(row["batches_per_second"], digits=1)]
        cells += [number(row["cold_samples_per_second"])] if has_cold else []
        share = row["of_step"]
        cells += [
            number(row["training_samples_per_second"]),
            "-" if share is None else f"{share:.0%}",
        ]
        table.add_row(*cells, style="bold" if row["workers"] == chosen else None)
    return table


def notes(found: Found) -> list[str]:
    """What the table does not say."""
    lines = []
    step = found["step"]
    if step is not None:
        lines.append(
            f"the step alone takes {step['samples_per_second']:,.0f} samples/s "
            f"({step['batches_per_second']:,.1f} batches of {found['batch_size']})"
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
    plural = "" if files["count"] == 1 else "s"
    return f"data: {files['count']:,} file{plural}{more}, {in_bytes(files['bytes'])}"


def disk_line(disk: Mapping[str, Any]) -> str:
    where = "network" if disk["is_network"] else "local"
    role = "data on" if disk["role"] == "data" else "copies would be on"
    line = f"{role} {disk['mount']} ({disk['kind']}, {where})"
    if disk["bytes_per_second"]:
        read = in_bytes(disk["bytes"])
        return f"{line}: {disk['bytes_per_second'] / 1e6:,.0f} MB/s from the disk, over {read}"
    if disk.get("problem"):
        return f"{line}: not measured: {disk['problem']}"
    return f"{line}: the same disk"


def script_table(found: Found) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    without = found["samples_per_second_without_waiting"]
    table.add_row("samples/s", number(found["samples_per_second"], digits=1))
    table.add_row("a step", milliseconds(found["step_seconds"]))
    if found["data_seconds"] is not None:
        waits = f"{milliseconds(found['data_seconds'])} ({found['data_share']:.1%})"
        table.add_row("of it waiting for data", waits)
    if without is not None:
        table.add_row("samples/s if it did not wait", number(without, digits=1))
    return table


def number(value: float | None, digits: int = 0) -> str:
    if value is None:
        return "-"
    return f"{value:,.{digits if value < 1000 else 0}f}"


def span(values: list[float] | None) -> str:
    return "-" if values is None else f"{number(values[0])} - {number(values[1])}"


def in_bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"
