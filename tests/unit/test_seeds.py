"""Seeds: a pure function of what they are for."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allranks.train.data import mix

NUMBERS = st.integers(0, 2**64 - 1)


def test_seeds_never_change() -> None:
    # A resumed run must draw what an older allranks drew.
    assert [mix(0), mix(0, 0), mix(1, 2, 3)] == PINNED


PINNED = [4624089581136127202, 2494760497517296962, 4934320057322007351]


@given(st.lists(NUMBERS, min_size=1, max_size=4))
def test_torch_takes_every_seed(values: list[int]) -> None:
    seed = mix(*values)
    assert 0 <= seed < 2**63
    assert mix(*values) == seed
    torch.Generator().manual_seed(seed)


@given(st.lists(NUMBERS, min_size=1, max_size=3), st.data())
def test_every_bit_of_every_value_matters(values: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(values) - 1))
    bit = data.draw(st.integers(0, 63))
    changed = [value ^ (1 << bit) if i == place else value for i, value in enumerate(values)]
    different = (mix(*values) ^ mix(*changed)).bit_count()
    assert 8 <= different <= 55  # about half of 63


def test_the_order_of_values_matters() -> None:
    assert mix(1, 2) != mix(2, 1)
    assert mix(1) != mix(1, 0)


@pytest.mark.parametrize("seed", [0, 1])
def test_steps_and_ranks_have_seeds_of_their_own(seed: int) -> None:
    seeds = {mix(seed, step, rank) for step, rank in product(range(500), range(16))}
    assert len(seeds) == 500 * 16
