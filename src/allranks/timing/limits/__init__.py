"""What is said about each limit: why, with which numbers, which rank and line, what to type."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from allranks.timing.limits.data import data
from allranks.timing.limits.device import compute, copies, host, launches, pauses
from allranks.timing.limits.facts import Facts, Said
from allranks.timing.limits.ranks import communication, straggler

SAYING: Mapping[str, Callable[[Facts], Said]] = {
    "compute": compute,
    "launches": launches,
    "host": host,
    "copies": copies,
    "data": data,
    "communication": communication,
    "straggler": straggler,
    "pauses": pauses,
}
