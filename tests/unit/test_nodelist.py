"""SLURM's node lists: the forms it writes, and there and back again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import AllranksError
from allranks.machine.nodelist import compress, expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("\n", []),
        ("login", ["login"]),
        ("a,b-1,c.d_e", ["a", "b-1", "c.d_e"]),
        ("node[1-3,07,10-12]", ["node1", "node2", "node3", "node07", "node10", "node11", "node12"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[98-101]", ["n98", "n99", "n100", "n101"]),
        ("n[09-10]-ib,x", ["n09-ib", "n10-ib", "x"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("[1-2]a", ["1a", "2a"]),
        ("r[1-2][5,7]", ["r15", "r17", "r25", "r27"]),
        ("b,a,b", ["b", "a", "b"]),
    ],
)
def test_the_forms_of_slurm(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a[1-3", "not closed"),
        ("a1-3]", "does not match"),
        ("a[[1]]", "does not match"),
        ("a[]", "not a list of numbers"),
        ("a[x-y]", "not a list of numbers"),
        ("a[1-]", "not a list of numbers"),
        ("a[3-1]", "ends before it starts"),
        ("a,,b", "not the name of a node"),
        ("a b", "not the name of a node"),
        ("$(reboot)", "not the name of a node"),
        ("a[0-999999999999]", "more than 100000"),
        ("a[0-999][0-999]", "more than 100000"),
    ],
)
def test_what_is_no_node_list_is_refused_with_a_fix(text: str, words: str) -> None:
    with pytest.raises(AllranksError, match=words) as error:
        expand(text)
    assert "a[1-3,07]" in error.value.fix


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "a", "b"], "a,a,b"),
        (["a1", "a2", "a3", "a07", "a08"], "a[1-3,07-08]"),
        (["a9", "a10", "b1"], "a[9-10],b1"),
        (["n1-ib", "n2-ib"], "n[1-2]-ib"),
        (["a1b3", "a1b4", "a2b3"], "a1b[3-4],a2b3"),
    ],
)
def test_the_short_form(names: list[str], text: str) -> None:
    assert compress(names) == text


@pytest.mark.parametrize("name", ["", "a,b", "a[1]", "a b", "a\n"])
def test_the_short_form_of_no_name_is_refused(name: str) -> None:
    with pytest.raises(AllranksError, match="not the name of a node"):
        compress([name])


any_name = st.from_regex(r"[A-Za-z0-9._-]{1,12}", fullmatch=True)
numbered = st.builds(
    lambda prefix, number, width, suffix: f"{prefix}{number:0{width}d}{suffix}",
    st.sampled_from(["n", "node", "r1-n", ""]),
    st.integers(0, 1200),
    st.integers(1, 4),
    st.sampled_from(["", "-ib"]),
)


@given(st.lists(any_name | numbered, max_size=40))
def test_there_and_back_again(names: list[str]) -> None:
    assert expand(compress(names)) == names
    assert expand(compress(sorted(names))) == sorted(names)


@given(st.integers(0, 2000), st.integers(1, 60), st.integers(1, 5))
def test_a_row_of_nodes_is_one_range(first: int, count: int, width: int) -> None:
    names = [f"n{number:0{width}d}" for number in range(first, first + count)]
    assert compress(names).count(",") == 0
    assert expand(compress(names)) == names


def test_a_name_without_a_number_stays_beside_its_neighbours() -> None:
    for names in (["gpu1", "gpu"], ["gpu", "gpu1", "gpu2"], ["-0", "-"]):
        assert expand(compress(names)) == names


@given(st.text(alphabet="ab1290[],- ", max_size=20))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    try:
        names = expand(text)
    except AllranksError:
        return
    assert expand(compress(names)) == names
