"""Shows what each rank of a layout would hold and send, as found by the process that tried it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any

from rich.console import Console
from rich.text import Text

from allranks.errors import AllranksError
from allranks.launch import checks, models
from allranks.launch.prepare import Prepared
from allranks.layout import NESTING, Layout
from allranks.show.numbers import count, ranks_in_words, size
from allranks.show.tables import Table, show_table

Found = Mapping[str, Any]
LABEL, CELL, GAP = 5, 4, 2  # characters: of a line's name, of a rank at least, between boxes
MOST_ROWS = 4  # of ranks in a box: of more, the middle ones are left out


def explain(prepared: Prepared) -> dict[str, Any]:
    """What the job's layout means for its model. Nothing is written, and no rank starts."""
    job = prepared.job
    if job.command is not None:
        raise AllranksError(
            "explain works only for tasks: what a script does is not known before it runs",
            fix="measure it: allranks bench scaling --layouts 1x1,1x2 -- YOUR COMMAND; "
            "or make it a task: docs/how-to/own-task.md",
        )
    checks.check_supported(job)
    if job.compress is not None:
        raise AllranksError(
            f"explain does not know what ranks send with compress {job.compress.name}",
            fix="write compress=null; or measure it: allranks bench comm-opt",
        )
    found = models.explain(job)
    placement = [
        {"rank": rank, "node": rank // job.layout.gpus, **job.layout.place_of(rank)}
        for rank in range(job.layout.ranks)
    ]
    return {
        **{"name": job.name, "task": job.task, **found},
        "placement": placement,
        "warnings": checks.warnings(job),
    }


def show(console: Console, found: Found) -> None:
    layout = Layout.parse(found["layout"])
    console.print(Text(title(layout), style="bold"), soft_wrap=True)
    for line in picture(layout, found["ranks"], console.width):
        console.print(Text(line), soft_wrap=True)
    console.print()
    show_table(console, memory_table(found))
    console.print()
    if found["collectives"]:
        show_table(console, exchanges_table(found))
        console.print()
    for line in notes(found):
        console.print(Text(line, style="dim"))
    for remark in found["warnings"]:
        console.print(Text(f"note: {remark}", style="yellow"), soft_wrap=True)


def title(layout: Layout) -> str:
    """`layout 2x4:tp=4: 8 ranks = dp 2 x tp 4`."""
    axes = [f"{axis} {getattr(layout, axis)}" for axis in shown_axes(layout)]
    return f"layout {layout}: {count(layout.ranks, 'rank')} = {' x '.join(axes)}"


def shown_axes(layout: Layout) -> list[str]:
    """The axes along which ranks differ, from the outermost."""
    return [axis for axis in NESTING if getattr(layout, axis) > 1] or ["dp"]


# The picture.


def picture(layout: Layout, kinds: Sequence[Found], width: int) -> list[str]:
    """Each node as a box of its ranks, with their places along the axes; of many, some left out."""
    cell = max(CELL, len(str(layout.ranks - 1)) + 2)
    per_row = _per_row(layout.gpus, (width - LABEL - 4) // cell)
    kind_of = {rank: kind["kind"] for kind in kinds for rank in kind["ranks"]}
    boxes = width // (LABEL + 3 + per_row * cell + GAP) or 1
    head = max(2, boxes)
    shown = [*range(layout.nodes)]
    if layout.nodes > head + boxes:
        shown = [*range(head), *range(layout.nodes - boxes, layout.nodes)]
    lines: list[str] = []
    for start in range(0, len(shown), boxes):
        row = shown[start : start + boxes]
        if start == head and len(shown) < layout.nodes:
            hidden = range(head * layout.gpus, (layout.nodes - boxes) * layout.gpus)
            nodes = ranks_in_words(range(head, layout.nodes - boxes)).replace("rank", "node")
            lines.append(f"  ⋮ {nodes} likewise: {_differences(layout, hidden)}")
        drawn = [_box(layout, node, per_row, cell, kind_of) for node in row]
        lines += [(" " * GAP).join(parts) for parts in zip_longest(*drawn, fillvalue="")]
    return lines


def _per_row(gpus: int, room: int) -> int:
    """Ranks in a row of a box: all of a node, or a part that leaves no rest."""
    if gpus <= room:
        return gpus
    room = max(1, room)
    divisor = max(n for n in range(1, room + 1) if gpus % n == 0)
    return divisor if 2 * divisor > room else room


def _box(
    layout: Layout, node: int, per_row: int, cell: int, kind_of: Mapping[int, str]
) -> list[str]:
    ranks = range(node * layout.gpus, (node + 1) * layout.gpus)
    rows = [ranks[start : start + per_row] for start in range(0, len(ranks), per_row)]
    name = f" node {node} "
    inner = max(LABEL + 1 + per_row * cell, len(name) + 1)
    between = ["├" + "─" * inner + "┤"]
    blocks = [
        [f"│ {line.ljust(inner - 1)}│" for line in _rows(layout, row, cell, kind_of)]
        for row in rows
    ]
    if len(rows) > MOST_ROWS:
        hidden = _differences(layout, range(rows[2][0], rows[-1][0]))
        blocks[2:-1] = [[f"│ ⋮ {hidden}".ljust(inner + 1) + "│"]]
    body = blocks[0]
    for block in blocks[1:]:
        body = [*body, *between, *block]
    return ["╭" + name.ljust(inner, "─") + "╮", *body, "╰" + "─" * inner + "╯"]


def _rows(
    layout: Layout, ranks: Sequence[int], cell: int, kind_of: Mapping[int, str]
) -> Iterator[str]:
    yield "rank".ljust(LABEL) + _spans(ranks, cell)
    for axis in shown_axes(layout):
        yield axis.ljust(LABEL) + _spans([layout.place_of(rank)[axis] for rank in ranks], cell)
    if len(set(kind_of.values())) > 1:
        yield "kind".ljust(LABEL) + _spans([kind_of[rank] for rank in ranks], cell)


def _spans(values: Iterable[object], cell: int) -> str:
    """One value for each run of ranks that have it: `╶── 0 ──╴╶── 1 ──╴`."""
    line = ""
    for value, group in groupby(values):
        width = len([*group]) * cell - 1
        if width < cell:
            line += f"{value}".rjust(width - 1) + "  "
        else:
            line += "╶" + f" {value} ".center(width - 2, "─") + "╴ "
    return line


def _differences(layout: Layout, ranks: range) -> str:
    """`ranks 16-55, dp 2-6`: these, and where along the axes they are."""
    places = [layout.place_of(rank) for rank in ranks]
    along = {axis: {place[axis] for place in places} for axis in shown_axes(layout)}
    return ", ".join([ranks_in_words(ranks), *_only(layout, along)])


def _only(layout: Layout, along: Mapping[str, Iterable[int]]) -> list[str]:
    """`pp 0`, `dp 2-6`: the places along axes, where they are not all of them."""
    parts = [(axis, [*along[axis]]) for axis in shown_axes(layout)]
    return [
        f"{axis} {ranks_in_words(values).partition(' ')[2]}"
        for axis, values in parts
        if len(values) < getattr(layout, axis)
    ]


# The tables.


def memory_table(found: Found) -> Table:
    """Bytes that each rank holds, a row for each kind of ranks."""
    kinds, rows = found["ranks"], []
    names = [name for name in kinds[0]["bytes"] if any(kind["bytes"][name] for kind in kinds)]
    for kind in kinds:
        held = [kind["bytes"][name] for name in names]
        who = "each rank"
        if len(kinds) > 1:
            where = _only(Layout.parse(found["layout"]), kind["coordinates"])
            who = f"{kind['kind']}: {', '.join([*where, count(len(kind['ranks']), 'rank')])}"
        rows.append([who, *map(size, held), size(kind["peak"])])
    return Table("Held by each rank", ("", *names, "peak"), rows)


def exchanges_table(found: Found) -> Table:
    """What is sent in a step, a row for each kind of exchange along an axis."""

    def key(one: Found) -> tuple[Any, ...]:
        return one["when"], one["kind"], one["axis"], one["group_size"], tuple(one["stages"])

    groups: dict[tuple[Any, ...], list[Found]] = {}
    for one in found["collectives"]:
        groups.setdefault(key(one), []).append(one)
    rows, has_stages = [], bool(found["stages"])
    for (when, kind, axis, ranks, stages), group in groups.items():
        sizes = sorted({one["bytes"] for one in group})
        each = "-".join(size(one, narrow=True) for one in dict.fromkeys((sizes[0], sizes[-1])))
        times = sum(one["count"] for one in group)
        total = sum(one["bytes"] * one["count"] for one in group)
        pp = [ranks_in_words(stages).partition(" ")[2]] if has_stages else []
        rows.append([f"{axis} {kind}", count(ranks), when, *pp, each, count(times), size(total)])
    columns = ("exchange", "ranks", "in", *["pp"] * has_stages, "size", "times", "in all")
    return Table("Sent in each step", columns, rows, texts=("in", "pp"))


def notes(found: Found) -> list[str]:
    """What the tables do not say."""
    number = found["micro_batches"]
    micro = "1 micro-batch" if number == 1 else f"{count(number)} micro-batches"
    lines = [
        f"{found['task']}: {count(found['parameters'], 'parameter')}, {found['optimizer']}, "
        f"{found['precision']}; each step {count(found['batch_size'], 'sample')}, "
        f"{micro} of {count(found['micro_batch_size'])} on each rank",
    ]
    if found["stages"]:
        sizes = " + ".join(map(str, found["stages"]))
        lines.append(f"stages of {sizes} blocks, predicted from their floating-point operations")
    if on_host := max(kind.get("host_bytes", 0) for kind in found["ranks"]):
        lines.append(
            f"in host memory: up to {size(on_host)} of a rank's optimizer state, and copies of its "
            "parameters and gradients (optimizer.offload)"
        )
    lines.append(
        "predicted: activations, which the forward pass keeps for the backward pass, and the peak: "
        "the most that there is at once in a step, with what exists only for a moment"
    )
    return lines
