"""Layouts: read, written, and refused with the numbers and a layout that works."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allranks.errors import AllranksError
from allranks.layout import (
    MAX_GPUS_PER_NODE,
    MAX_NODES,
    Layout,
    place_in_words,
    split_layouts,
    with_place,
)

# A loaded machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("text", "layout", "written"),
    [
        ("1x1", Layout(1, 1, dp=1), "1x1"),
        ("2x4", Layout(2, 4, dp=8), "2x4"),
        (" 2x4 ", Layout(2, 4, dp=8), "2x4"),
        ("2x4:dp=8", Layout(2, 4, dp=8), "2x4"),
        ("2x4:tp=4", Layout(2, 4, dp=2, tp=4), "2x4:tp=4"),
        ("1x8:fsdp=4,dp=2", Layout(1, 8, dp=2, fsdp=4), "1x8:fsdp=4"),
        ("1x8:dp=2, fsdp=4", Layout(1, 8, dp=2, fsdp=4), "1x8:fsdp=4"),
        ("1 x 8 : fsdp = 4", Layout(1, 8, dp=2, fsdp=4), "1x8:fsdp=4"),
        ("1x4:pp=4", Layout(1, 4, dp=1, pp=4), "1x4:pp=4"),
        ("1x8:pp=2,tp=2,fsdp=2", Layout(1, 8, dp=1, fsdp=2, tp=2, pp=2), "1x8:fsdp=2,tp=2,pp=2"),
    ],
)
def test_parse_and_format(text: str, layout: Layout, written: str) -> None:
    assert Layout.parse(text) == layout
    assert str(layout) == written


def test_ranks_and_the_dp_that_is_left() -> None:
    layout = Layout(nodes=4, gpus=8, tp=4, pp=2)
    assert layout.ranks == 32
    assert layout.dp == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1x4", ["1x4"]),
        ("1x1, 1x2", ["1x1", "1x2"]),
        ("1x1,2x4:fsdp=2,tp=2,1x2", ["1x1", "2x4:fsdp=2,tp=2", "1x2"]),
        ("2x4:fsdp=2, tp = 2@a40,1x2@h100", ["2x4:fsdp=2, tp = 2@a40", "1x2@h100"]),
        ("1x4:pp=2,1x4:fdsp=4,tp=1", ["1x4:pp=2", "1x4:fdsp=4,tp=1"]),  # refused with its name
    ],
)
def test_a_list_of_layouts_keeps_the_commas_of_their_axes(text: str, words: list[str]) -> None:
    assert split_layouts(text, "--layouts") == words


@pytest.mark.parametrize("text", ["", ",", "1x1,", "1x4:tp=2,,1x1", ":,"])
def test_a_list_in_which_a_layout_is_missing_is_refused(text: str) -> None:
    with pytest.raises(AllranksError, match="a layout is missing") as refusal:
        split_layouts(text, "--layouts")
    assert split_layouts(refusal.value.fix.removeprefix("write "), "fix")


def test_where_ranks_are_in_a_layout_that_divides_the_model() -> None:
    whole = "2x4:fsdp=2,tp=2"  # and two replicas
    assert place_in_words(whole, [5]) == "shard 0, tp 1, replica 1"
    assert place_in_words(whole, [4, 5]) == "shard 0, replica 1"
    assert place_in_words(whole, range(8)) == ""
    assert with_place("rank 3", "1x4:pp=2@a40", [3]) == "rank 3 (stage 1, replica 1)"
    for unknown in ("1x4", "1x4:pp=2,1x2", "", None):  # copies; a queue's choice; not known
        assert with_place("rank 1", unknown, [1]) == "rank 1"


def test_an_axis_alone_is_larger() -> None:
    one = Layout.parse("1x2:tp=2")
    for text, axis in {"1x4:tp=2": "dp", "1x4:tp=4": "tp", "1x4:tp=2,pp=2": "pp"}.items():
        assert Layout.parse(text).axis_beyond(one) == axis
    for text in ("1x2:tp=2", "1x8:tp=4", "1x4", "1x1"):
        assert Layout.parse(text).axis_beyond(one) is None


sizes = st.integers(1, 5)


@unhurried
@given(sizes, sizes, sizes, sizes, st.integers(1, 50))
def test_round_trip(dp: int, fsdp: int, tp: int, pp: int, nodes: int) -> None:
    layout = Layout(nodes, dp * fsdp * tp * pp, dp * nodes, fsdp, tp, pp)
    assert Layout.parse(str(layout)) == layout
    assert layout.dp * layout.fsdp * layout.tp * layout.pp == layout.ranks


part = st.from_regex(r"(dp|fsdp|tp|pp|fdsp|foo|)=?[0-9]{0,2}", fullmatch=True)
shape = st.from_regex(r"[0-9]{0,6}x?[0-9]{0,3}(@a100)?", fullmatch=True)
axes = st.lists(part, max_size=2).map(",".join)
near_misses = shape | st.builds("{}:{}".format, shape, axes)


@unhurried
@given(st.text(max_size=20) | near_misses)
def test_any_text_parses_or_is_refused_with_layouts_that_are_accepted(text: str) -> None:
    try:
        layout = Layout.parse(text)
    except AllranksError as refusal:
        named = re.findall(r"[0-9]+x[0-9]+(?::[a-z]+=[0-9]+(?:,[a-z]+=[0-9]+)*)?", refusal.fix)
        suggested = [Layout.parse(one) for one in named]
        assert suggested[0].dp == suggested[0].ranks  # a task, too, can train in the first
    else:
        assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("8", "is not NODESxGPUS", "write 1x8 "),
        ("", "is not NODESxGPUS", "2x4"),
        ("2x", "is not NODESxGPUS", "2x1"),
        ("2x4,tp=2", "is not NODESxGPUS", "write 2x4:tp=2,"),
        ("1x1 6", "is not NODESxGPUS", "2x4"),
        ("2x4@slurm", "is not NODESxGPUS", "2x4"),
        ("-1x4", "is not NODESxGPUS", "2x4"),
        ("٣x٣", "is not NODESxGPUS", "2x4"),
        ("0x4", "nodes is 0", "2x4"),
        ("1x0", "gpus is 0", "2x4"),
        ("1x" + "9" * 5000, f"over {MAX_GPUS_PER_NODE}", "2x4"),
        (f"{MAX_NODES + 1}x1", f"over {MAX_NODES}", "2x4"),
        ("99999", "is not NODESxGPUS", "2x4"),
        ("1x8:", 'no axis after ":"', "write 1x8,"),
        ("1x8:fdsp=2", "dp, fsdp, tp and pp", "divide the model, 1x8:fsdp=2"),
        ("1x7:fdsp=2", "dp, fsdp, tp and pp", "write 1x7,"),
        ("1x2:foo=2", "dp, fsdp, tp and pp", "divide the model, 1x2:fsdp=2"),
        ("1x8:tp=2,tp=2", "tp twice", "divide the model, 1x8:tp=2"),
        ("1x8:TP=2", "dp, fsdp, tp and pp", "divide the model, 1x8:tp=2"),
        ("1x8:", 'no axis after ":"', "1x8:fsdp=2 or 1x8:fsdp=4"),
        ("1x8:tp", "positive integer", "write 1x8,"),
        ("1x8:tp=two", "positive integer", "divide the model, 1x8:tp=2"),
        ("1x8:tp=0", "positive integer", "1x8:tp=2 or 1x8:tp=4"),
        ("1x8:dp=4", "needs 4 ranks, not 8", "divide the model, 1x8:fsdp=2"),
        ("1x8:fsdp=4,tp=4", "takes 16 ranks", "1x8:fsdp=4,tp=2 or 1x8:fsdp=2,tp=4"),
        ("1x8:dp=0", "positive integer", "write 1x8,"),
        ("1x8:tp=-2", "positive integer", "write 1x8,"),
        ("1x8:tp=3", "does not divide 8", "1x8:tp=2 or 1x8:tp=4"),
        ("1x8:tp=16", "does not divide 8", "1x8:tp=8"),
        ("1x1:tp=2", "does not divide 1", "write 1x1,"),
        ("1x8:tp=3,pp=2", "takes 6 ranks", "write 1x8,"),
        (
            "1x8:dp=1,tp=2,pp=2",
            "dp=1 x fsdp=1 x tp=2 x pp=2 needs 4 ranks, not 8",
            "1x8:tp=2,pp=2",
        ),
        ("1x8:dp=3,tp=3", "needs 9 ranks, not 8", "1x8:tp=2 or 1x8:tp=4"),
        (f"{MAX_NODES}x{MAX_GPUS_PER_NODE}:tp=3", "does not divide", "tp=2"),
    ],
)
def test_refusals(text: str, what: str, fix: str) -> None:
    with pytest.raises(AllranksError) as refusal:
        Layout.parse(text)
    assert what in refusal.value.what
    assert fix in refusal.value.fix
    assert refusal.value.exit_code == 2
