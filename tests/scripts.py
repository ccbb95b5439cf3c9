"""`run_script`: a training script on ranks that record it, without starting Python anew.

The ranks come from a server that has torch imported already, and begin with the probe as a rank
does that `allranks run` starts; so a script takes a second and not ten.
"""

from __future__ import annotations

import os
import runpy
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.fork_server import fork_server
from tests.ports import free_port

from allranks.machine.processes import die_with_parent
from allranks.run import files
from allranks.run.events import read_events
from allranks.run.folder import RunDir
from allranks.timing.steps import Timing, timing
from allranks.timing.timeline import PHASES


@dataclass(frozen=True)
class Recorded:
    """What a script's ranks have left behind."""

    run: RunDir
    exits: list[int | None]

    def events(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        return [e for e in read_events(self.run.events(0, rank)) if e["event"] == kind]

    def steps(self, rank: int = 0) -> list[dict[str, Any]]:
        return self.events("step", rank)

    def samples(self, rank: int = 0) -> list[int]:
        return [event["samples"] for event in self.steps(rank)]

    def log(self, rank: int = 0) -> str:
        return self.run.log(0, rank).read_text()

    def said(self, word: str, rank: int = 0) -> list[str]:
        """What the script printed behind a word, line by line."""
        lines = [line.split(maxsplit=1) for line in self.log(rank).splitlines()]
        return [line[1] for line in lines if len(line) == 2 and line[0] == word]

    def timing(self) -> Timing:
        found = timing(self.run)
        assert found is not None, self.log()
        return found


def notes_on_events(run: RunDir) -> list[str]:
    """What readers leave out of the events of all ranks."""
    for rank in run.ranks(0):
        for _ in read_events(run.events(0, rank)):
            pass
    return files.notes_on(run.path)


def run_script(
    tmp_path: Path,
    text: str,
    num_ranks: int = 1,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> Recorded:
    """Run a script on ranks; none of them outlives the call."""
    folder = tmp_path / f"script-{time.time_ns()}"
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text))
    run = RunDir(folder)
    run.attempt(0).mkdir(parents=True)
    (folder / "run.json").write_text(f'{{"layout": "1x{num_ranks}"}}')
    context = fork_server()
    given = {
        "ALLRANKS_RUN_DIR": str(folder),
        "ALLRANKS_ATTEMPT": "0",
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        **(env or {}),
    }
    ranks = [
        context.Process(
            target=_be_rank, args=(script, run.log(0, rank), {**given, "RANK": str(rank)})
        )
        for rank in range(num_ranks)
    ]
    try:
        for process in ranks:
            process.start()
        end = time.monotonic() + timeout
        for process in ranks:
            process.join(max(0.0, end - time.monotonic()))
        found = Recorded(run, [process.exitcode for process in ranks])
        assert not notes_on_events(run), "what ranks write is what readers expect"
        return found
    finally:
        for process in ranks:
            process.kill()
            process.join()
            process.close()


def _be_rank(script: Path, log: Path, env: dict[str, str]) -> None:
    """In the rank's process."""
    import torch

    from allranks.probe.start import start

    die_with_parent()
    os.environ.update(env)
    os.chdir(script.parent)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # text streams
    torch.set_num_threads(1)
    start()
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")


# What most scripts here begin with: a model, 40 samples, an optimizer.
MODEL = """
import os, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
data = TensorDataset(torch.randn(40, 8), torch.randn(40, 1))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
def train(x, y):
    loss = mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""


def run(tmp_path: Path, text: str, num_ranks: int = 1, **env: str) -> Recorded:
    """A script that begins as all do, and must not fail nor hear of the probe."""
    lines = [line for line in text.splitlines() if line.strip()]
    indent = len(lines[0]) - len(lines[0].lstrip())
    body = "\n".join(line[indent:] for line in lines)
    found = run_script(tmp_path, MODEL + body + "\n", num_ranks, env=env)
    for rank in range(num_ranks):
        assert found.exits[rank] == 0, found.log(rank)
        assert "allranks" not in found.log(rank)
        for event in found.steps(rank):
            phases = sum(event[phase] for phase in PHASES)
            assert phases == pytest.approx(event["seconds"], abs=1e-6)
    return found


_HUNGRY = """
import os, pathlib, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
events = pathlib.Path(os.environ["ALLRANKS_RUN_DIR"], "attempts", "0", "rank-1.jsonl")
def is_seen():
    return events.exists() and "host_memory" in events.read_text()
for step in range(2000):
    if os.environ["RANK"] == "1" and (kept or is_seen()):
        kept.append(torch.ones({floats}))
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep({pause})
"""


def hungry(mebibytes: int, pause: float) -> str:
    """A script whose rank 1 keeps so much of every step, once the probe has seen its memory."""
    return _HUNGRY.format(floats=mebibytes << 18, pause=pause)
