"""Prices: each with its source, the user's own first, none where nobody knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from allranks.errors import AllranksError
from allranks.machine.gpus import catalogue
from allranks.machine.prices import Price, find_price, list_prices, parse_price, read_prices

GIB = 2**30


def test_every_list_price_is_of_a_board_we_know_with_source_and_date() -> None:
    boards = {gpu.name for gpu in catalogue()}
    for price in list_prices():
        assert price.gpu in boards
        assert price.usd_per_hour > 0
        assert "https://" in price.source
        assert price.date is not None and re.fullmatch(r"20\d\d-\d\d-\d\d", price.date)
    assert len({price.gpu for price in list_prices()}) == len(list_prices())


def test_boards_of_one_name_are_told_apart_by_their_memory() -> None:
    small = find_price("NVIDIA A100-SXM4-40GB", 40 * GIB)
    large = find_price("NVIDIA A100-SXM4-80GB", 80 * GIB)
    assert small and large and small.gpu != large.gpu


@pytest.mark.parametrize(
    "name", ["CPU", "NVIDIA Mystery 9000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_no_price_is_made_up(name: str) -> None:
    assert find_price(name) is None


def test_the_users_price_comes_first_and_the_closest_of_several() -> None:
    own = [parse_price("h100=2.5"), parse_price("h100 hbm3=2"), parse_price("cpu=$0.05")]
    found = find_price("NVIDIA H100 80GB HBM3", 80 * GIB, own)
    assert found and found.usd_per_hour == 2.0 and found.source == "--price"
    cpu = find_price("CPU", None, own)
    assert cpu and cpu.usd_per_hour == 0.05


def test_a_price_of_the_whole_gpu_is_not_that_of_a_slice() -> None:
    assert find_price("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, [parse_price("h100=2.5")]) is None


@pytest.mark.parametrize("text", ["h100", "=2", "h100=cheap", "h100=-1", "h100=nan", "h100="])
def test_what_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(AllranksError, match="price") as caught:
        parse_price(text)
    assert "h100=2.5" in caught.value.fix


def test_a_file_of_prices(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("h100: 2.5\na100: {usd_per_hour: 1.1, source: our centre, date: 2026-01-02}\n")
    assert read_prices(file) == [
        Price("h100", 2.5, str(file), None),
        Price("a100", 1.1, "our centre", "2026-01-02"),
    ]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "no prices"),
        ("[1]", "no prices"),
        ("h100: {price: 2}", "unknown key price"),
        ("h100: {source: x}", "usd_per_hour is missing"),
        ("h100: true", "not a price"),
        ("h100: [", "not YAML"),
    ],
)
def test_a_file_with_mistakes_is_refused(tmp_path: Path, content: str, what: str) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(content)
    with pytest.raises(AllranksError, match=what):
        read_prices(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(AllranksError, match=r"cannot read .*nowhere\.yaml"):
        read_prices(tmp_path / "nowhere.yaml")
