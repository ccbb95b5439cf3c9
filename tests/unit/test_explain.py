"""How explain draws a layout and words its tables; which axes a model can have."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.commandline import call_allranks

from allranks.errors import AllranksError
from allranks.job.axes import ModelFacts, check_tp
from allranks.layout import Layout
from allranks.plan.explain import picture, show
from allranks.show.console import PeopleConsole

GIB = 1 << 30


def kinds(layout: Layout, *axes: str) -> list[dict[str, Any]]:
    """Ranks that differ along these axes, as different kinds."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.ranks):
        groups.setdefault(tuple(layout.place_of(rank)[axis] for axis in axes), []).append(rank)
    return [{"kind": "ABCDEFGH"[i], "ranks": ranks} for i, ranks in enumerate(groups.values())]


def drawn(text: str, width: int, *axes: str) -> str:
    layout = Layout.parse(text)
    return "\n".join(picture(layout, kinds(layout, *axes), width))


def test_nodes_are_boxes_side_by_side_where_they_fit() -> None:
    assert drawn("2x4:tp=4", 60) == (
        "╭ node 0 ──────────────╮  ╭ node 1 ──────────────╮\n"
        "│ rank  0   1   2   3  │  │ rank  4   5   6   7  │\n"
        "│ dp   ╶───── 0 ─────╴ │  │ dp   ╶───── 1 ─────╴ │\n"
        "│ tp    0   1   2   3  │  │ tp    0   1   2   3  │\n"
        "╰──────────────────────╯  ╰──────────────────────╯"
    )


def test_kinds_of_ranks_are_shown_if_there_are_several() -> None:
    assert drawn("1x8:fsdp=2,tp=2,pp=2", 80, "pp") == (
        "╭ node 0 ──────────────────────────────╮\n"
        "│ rank  0   1   2   3   4   5   6   7  │\n"
        "│ pp   ╶───── 0 ─────╴ ╶───── 1 ─────╴ │\n"
        "│ fsdp ╶─ 0 ─╴ ╶─ 1 ─╴ ╶─ 0 ─╴ ╶─ 1 ─╴ │\n"
        "│ tp    0   1   0   1   0   1   0   1  │\n"
        "│ kind ╶───── A ─────╴ ╶───── B ─────╴ │\n"
        "╰──────────────────────────────────────╯"
    )


def test_nodes_in_the_middle_are_folded() -> None:
    assert drawn("8x8:fsdp=8", 80) == (
        "╭ node 0 ──────────────────────────────╮\n"
        "│ rank  0   1   2   3   4   5   6   7  │\n"
        "│ dp   ╶───────────── 0 ─────────────╴ │\n"
        "│ fsdp  0   1   2   3   4   5   6   7  │\n"
        "╰──────────────────────────────────────╯\n"
        "╭ node 1 ──────────────────────────────╮\n"
        "│ rank  8   9  10  11  12  13  14  15  │\n"
        "│ dp   ╶───────────── 1 ─────────────╴ │\n"
        "│ fsdp  0   1   2   3   4   5   6   7  │\n"
        "╰──────────────────────────────────────╯\n"
        "  ⋮ nodes 2-6 likewise: ranks 16-55, dp 2-6\n"
        "╭ node 7 ──────────────────────────────╮\n"
        "│ rank 56  57  58  59  60  61  62  63  │\n"
        "│ dp   ╶───────────── 7 ─────────────╴ │\n"
        "│ fsdp  0   1   2   3   4   5   6   7  │\n"
        "╰──────────────────────────────────────╯"
    )


def test_ranks_in_the_middle_of_a_large_node_are_folded() -> None:
    assert drawn("1x64:fsdp=64", 60) == (
        "╭ node 0 ──────────────────────────────╮\n"
        "│ rank  0   1   2   3   4   5   6   7  │\n"
        "│ fsdp  0   1   2   3   4   5   6   7  │\n"
        "├──────────────────────────────────────┤\n"
        "│ rank  8   9  10  11  12  13  14  15  │\n"
        "│ fsdp  8   9  10  11  12  13  14  15  │\n"
        "├──────────────────────────────────────┤\n"
        "│ ⋮ ranks 16-55, fsdp 16-55            │\n"
        "├──────────────────────────────────────┤\n"
        "│ rank 56  57  58  59  60  61  62  63  │\n"
        "│ fsdp 56  57  58  59  60  61  62  63  │\n"
        "╰──────────────────────────────────────╯"
    )


@given(
    st.integers(1, 40), st.integers(1, 80), st.sampled_from((1, 2, 4)), st.sampled_from((60, 80))
)
def test_a_picture_is_never_wider_than_the_terminal(
    nodes: int, gpus: int, tp: int, width: int
) -> None:
    layout = Layout(nodes, gpus * tp, tp=tp)
    lines = picture(layout, kinds(layout), width)
    assert max(map(len, lines)) <= width
    assert len(lines) < 80


FOUND = {
    "layout": "2x4:fsdp=2,pp=2",
    "task": "language",
    "parameters": 1_557_686_400,
    "precision": "bf16",
    "optimizer": "adamw",
    "batch_size": 64,
    "micro_batch_size": 4,
    "micro_batches": 4,
    "stages": [25, 25],
    "warnings": ["pipeline.schedule has no effect"],
    "ranks": [
        {
            "kind": kind,
            "ranks": ranks,
            "coordinates": {"dp": [0, 1], "pp": [pp], "fsdp": [0, 1], "tp": [0]},
            "bytes": {
                "parameters": (2 + pp) * GIB,
                "buffers": 0,
                "gradients": (2 + pp) * GIB,
                "optimizer": (4 + 2 * pp) * GIB,
                "activations": 5 * GIB,
            },
            "peak": (14 + 4 * pp) * GIB,
        }
        for pp, (kind, ranks) in enumerate((("A", [0, 1, 4, 5]), ("B", [2, 3, 6, 7])))
    ],
    "collectives": [
        {"kind": kind, "axis": axis, "group_size": 2, "when": when, "stages": stages, **sizes}
        for kind, axis, when, stages, sizes in (
            ("all-gather", "fsdp", "forward", [0, 1], {"bytes": GIB, "count": 3}),
            ("all-gather", "fsdp", "forward", [0, 1], {"bytes": GIB // 2, "count": 1}),
            ("send", "pp", "forward", [0], {"bytes": 1 << 20, "count": 4}),
        )
    ],
}


def test_the_tables_at_80_columns() -> None:
    out = io.StringIO()
    show(PeopleConsole(file=out, width=80), FOUND)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert "\n".join(lines[lines.index("") + 1 :]) == (
        "Held by each rank\n"
        "                  parameters  gradients  optimizer  activations    peak\n"
        "A: pp 0, 4 ranks       2 GiB      2 GiB      4 GiB        5 GiB  14 GiB\n"
        "B: pp 1, 4 ranks       3 GiB      3 GiB      6 GiB        5 GiB  18 GiB\n"
        "\n"
        "Sent in each step\n"
        "exchange         ranks  in       pp            size  times   in all\n"
        "fsdp all-gather      2  forward  0 and 1  512Mi-1Gi      4  3.5 GiB\n"
        "pp send              2  forward  0              1Mi      4    4 MiB\n"
        "\n"
        "language: 1,557,686,400 parameters, adamw, bf16; each step 64 samples, 4\n"
        "micro-batches of 4 on each rank\n"
        "stages of 25 + 25 blocks, predicted from their floating-point operations\n"
        "predicted: activations, which the forward pass keeps for the backward pass, and\n"
        "the peak: the most that there is at once in a step, with what exists only for a\n"
        "moment\n"
        "note: pipeline.schedule has no effect"
    )


# --- Which axes a model can have ----------------------------------------------------------------

LANGUAGE = ModelFacts(task="Language", divided={"heads": 12, "outputs of up": 3072})
UNKNOWN = ModelFacts(task="Digits")


@pytest.mark.parametrize(
    ("layout", "facts", "error", "fix"),
    [
        ("1x4:fsdp=4", UNKNOWN, None, ""),
        ("1x4:tp=4", LANGUAGE, None, ""),
        ("1x24:tp=12,pp=2", LANGUAGE, None, ""),
        ("1x8:tp=8", LANGUAGE, "tp=8 does not divide the model's 12 heads", "1x8:fsdp=2,tp=4"),
        ("1x5:tp=5", LANGUAGE, "12 heads and 3,072 outputs of up evenly", "1x5:fsdp=5"),
        ("1x5:tp=5", LANGUAGE, "tp=5", "can have tp=1, 2, 3, 4, 6 or 12 (12 heads"),
        ("1x4:tp=2", UNKNOWN, "Digits has none", "write --layout 1x4:fsdp=2"),
    ],
)
def test_axes_that_a_model_cannot_have_are_answered_with_those_that_it_can(
    layout: str, facts: ModelFacts, error: str | None, fix: str
) -> None:
    if error is None:
        check_tp(Layout.parse(layout), facts)
        return
    with pytest.raises(AllranksError) as refused:
        check_tp(Layout.parse(layout), facts)
    assert error in refused.value.what
    assert fix in refused.value.fix


def test_a_script_cannot_be_explained(tmp_path: Path) -> None:
    done = call_allranks("explain", "--layout", "1x2", "--", "python", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "only for tasks" in done.stderr and "bench scaling" in done.stderr
