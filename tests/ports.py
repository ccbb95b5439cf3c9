"""Ports that nothing else takes between being found free and being used."""

from __future__ import annotations

import itertools
import os
import socket

# Below those that the kernel hands out by itself (from 32768 on), which any process may get.
FIRST, NUMBER = 20_000, 9_000
_next = itertools.count(7919 * os.getpid())


def free_port() -> int:
    """One that nobody listens on now, and that this process gives out once in a long while."""
    for number in itertools.islice(_next, NUMBER):
        port = FIRST + number % NUMBER
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"no port is free from {FIRST} to {FIRST + NUMBER}")
