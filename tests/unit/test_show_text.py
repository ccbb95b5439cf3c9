"""Nothing that a terminal would obey is left of a text."""

from __future__ import annotations

import pytest

from allranks.show.text import as_code, clean, coloured, in_markdown, plain, printable


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


def test_a_log_on_a_terminal_keeps_its_colours_alone() -> None:
    assert coloured("\x1b[1;31mred\x1b[0m\tand") == "\x1b[1;31mred\x1b[0m\tand\x1b[0m"
    assert coloured("\x1b]52;c;eA==\x07a\x1b[2J\x9b5n\x1b]8;;x\x1b\\b\u202e") == "ab"
    assert coloured("\x1b]0;\x1b[31mtitle\x07") == "\x1b[31mtitle\x1b[0m"


def test_what_is_shared_is_inert() -> None:
    assert in_markdown("<b>&[x](y) |`*\x1b[0m") == r"&lt;b&gt;&amp;\[x\](y) \|\`\*"
    assert as_code("a`<b>\n") == "`a\ufffd\ufffdb\ufffd`"
    assert printable("a\x1b\ud800\u202e b") == "a\ufffd\ufffd\ufffd b"
