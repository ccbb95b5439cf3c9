"""Nothing that a terminal would obey is left of a text."""

from __future__ import annotations

import pytest

from allranks.plain import clean, plain


@pytest.mark.parametrize(
    "sequence",
    [
        "\x1b[1;31m",
        "\x1b]0;title\x07",
        "\x1b]52;c;cm0gLXJm\x1b\\",  # into the clipboard
        "\x1b]8;;https://example.org\x1b\\",
        "\x1bP+q544e\x1b\\",
        "\x1b_Gf=100;AAAA\x1b\\",
        "\x1b(0",
        "\x1bc",
        "\x9b31m",
        "\x9d0;title\x9c",
        "\x08\x00\x7f",
        "\u202e",
    ],
)
def test_a_sequence_goes_with_all_that_it_carries(sequence: str) -> None:
    assert plain(f"before {sequence}after\n\tnext") == "before after\n\tnext"


def test_what_must_be_one_line_is_one() -> None:
    assert clean("a\tb\nc\rd") == "a   bcd"
