"""Seeds as a pure function of what they are used for: no layout and no restart changes them."""

from __future__ import annotations

MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """A 63-bit seed from several integers; every bit of each matters (SplitMix64's finaliser)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ value) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state = ((state ^ (state >> 31)) + 0x9E3779B97F4A7C15) & MASK
    return state >> 1
