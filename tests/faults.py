"""Runs that are killed at chosen moments, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forked import Forked
from torch import Tensor

from allranks.run.commits import commits
from allranks.train.checkpoint import read_tensors


@dataclass
class Live:
    """A run under way in a process of its own."""

    process: Forked
    runs: Path
    started: float

    def wait(self, seconds: float = 200) -> tuple[int, dict[str, Any]]:
        """Exit code and the JSON that it printed."""
        out, _ = self.process.communicate(timeout=seconds)
        return self.process.wait(), json.loads(out) if out.strip() else {}

    def ranks(self) -> dict[int, int]:
        """Process id of every rank that is alive now."""
        return {rank: pid for pid, rank in _children(self.process.pid)}

    def descendants(self) -> list[int]:
        """The launcher, its ranks and whatever they started."""
        return [self.process.pid, *_descendants(self.process.pid)]

    def wait_until(self, condition: Any, seconds: float = 150) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"never came true; exit code {self.process.poll()}")
            time.sleep(0.005)


def start(cwd: Path, *arguments: str, env: dict[str, str] | None = None) -> Live:
    """`allranks run ARGUMENTS --json`; what it says to people is in stderr.txt."""
    words = ["run", *arguments, "--json"]
    process = Forked(words, cwd, env or {}, cwd / "stderr.txt")
    return Live(process, cwd / "runs", time.monotonic())


def kill_a_rank(live: Live, chance: random.Random) -> int:
    """SIGKILL one rank that is alive; its number, or -1 if there was none."""
    ranks = live.ranks()
    if not ranks:
        return -1
    rank = chance.choice(sorted(ranks))
    _kill(ranks[rank])
    return rank


def kill_the_tree(live: Live) -> None:
    """SIGKILL everything at once, as a power cut would; the launcher first, so nothing restarts."""
    for process in live.descendants():
        _kill(process)
    live.process.wait()


def gone(processes: list[int], seconds: float = 60) -> bool:
    """Whether all of these processes end within a time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(_is_alive(process) for process in processes):
            return True
        time.sleep(0.02)
    return False


def newest_weights(run_dir: Path) -> tuple[int, dict[str, Tensor]]:
    """Step and every tensor (optimizer included) of the newest checkpoint."""
    commit = commits(run_dir / "checkpoints")[0]
    return commit.step, read_tensors(commit)


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def losses(run_dir: Path) -> dict[int, float]:
    """Loss by step; a step that was repeated counts as it was last."""
    found: dict[int, float] = {}
    attempts = sorted((run_dir / "attempts").iterdir(), key=lambda path: int(path.name))
    for attempt in attempts:
        for line in (attempt / "rank-0.jsonl").read_text().splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if "loss" in event:
                found[event["step"]] = event["loss"]
    return found


def _children(parent: int) -> list[tuple[int, int]]:
    """Process id and rank of the direct children that are ranks: by their name, or a command's."""
    found = []
    for pid in _child_pids(parent):
        try:
            name = Path(f"/proc/{pid}/comm").read_text().split()
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [item[5:].decode() for item in environment if item.startswith(b"RANK=")]
        ranks += name[1:] if name[0] == "rank" else []
        found += [(pid, int(ranks[0]))] if ranks else []
    return found


def _descendants(parent: int) -> list[int]:
    found = []
    for pid in _child_pids(parent):
        found += [pid, *_descendants(pid)]
    return found


def _child_pids(parent: int) -> list[int]:
    pids = []
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            pids += [int(pid) for pid in task.read_text().split()]
        except OSError:
            continue
    return pids


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _is_alive(process: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def sample_of(count: int, *sample: int) -> list[object]:
    """Trials by number: those in the sample run always, the others in `make soak`."""
    return [
        pytest.param(number, marks=[] if number in sample else pytest.mark.soak)
        for number in range(count)
    ]
