"""A server that has torch imported, from which tests fork in milliseconds: one in each worker."""

from __future__ import annotations

import contextlib
import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).parents[1]


def fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded", "torch._dynamo"])
    with contextlib.chdir(ROOT):  # where it finds that
        forkserver.ensure_running()
    return context
