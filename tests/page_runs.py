"""Run folders as live runs have them, of any size, for the tests and the benchmark of the page."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from allranks.run.folder import RunDir

H100 = "NVIDIA H100 80GB HBM3"
STEP_SECONDS = 0.2
BATCH = 1024


class LiveRun:
    """A made-up run of equal ranks, of which one is slower; it goes on when it is told to."""

    def __init__(
        self,
        runs: Path,
        *,
        name: str = "language",
        number: int = 0,
        ranks: int = 4,
        steps: int = 100_000,
        slow_rank: int = 1,
        rate: float = 1.0,
    ) -> None:
        self.run = RunDir(runs.absolute() / f"{name}-20261115-1200{number:02}-{number:04x}")
        self.ranks, self.steps, self.slow_rank, self.rate = ranks, steps, slow_rank, rate
        self.step = 0
        self.begin = time.time()
        nodes, per_node = max(1, ranks // 8), min(8, ranks)
        self.layout = f"{nodes}x{per_node}"
        self.run.attempt(0).mkdir(parents=True)
        job = {
            "name": name,
            "task": "language",
            "batch_size": BATCH,
            "steps": steps,
            "seed": number,
        }
        self.run.job_file.write_text(yaml.safe_dump(job))
        self.run.write_info(
            {
                **{"v": 1, "run": self.run.name, "created": self.begin + number},
                **{"layout": self.layout, "backend": "local", "attempts": [{"attempt": 0}]},
                "hardware": {"gpus": [{"name": H100, "memory_bytes": 85_520_809_984}] * per_node},
            }
        )

    def start(self, *, before: int = 0) -> None:
        """Every rank's first words; with `before` steps made until now."""
        self.begin = time.time() - before * STEP_SECONDS
        for rank in range(self.ranks):
            start = {
                **{"v": 1, "t": self.begin, "event": "start", "rank": rank},
                **{"world_size": self.ranks, "host": f"node{rank // 8 + 1}", "pid": 1000 + rank},
                **{"layout": self.layout, "backend": "nccl", "device": H100, "step": 0, "epoch": 0},
                **{"global_batch": BATCH, "steps": self.steps, "steps_per_epoch": 1000},
                "samples_per_epoch": 1000 * BATCH,
            }
            self.run.events(0, rank).write_text(json.dumps(start, separators=(",", ":")) + "\n")
            self.run.log(0, rank).write_text(f"rank {rank} begins\n")
        self.advance(before)

    def advance(self, steps: int) -> None:
        """So many steps more, of all ranks."""
        first, self.step = self.step + 1, self.step + steps
        for rank in range(self.ranks):
            with self.run.events(0, rank).open("a") as file:
                file.writelines(self._lines(rank, first, self.step))

    def log(self, rank: int, text: str) -> None:
        with self.run.log(0, rank).open("a") as file:
            file.write(text + "\n")

    def end(self, state: str = "finished", **more: Any) -> None:
        for rank in range(self.ranks):
            event = {"v": 1, "t": time.time(), "event": "end", "state": state, "exit": 0, **more}
            with self.run.events(0, rank).open("a") as file:
                file.write(json.dumps(event, separators=(",", ":")) + "\n")

    def _lines(self, rank: int, first: int, last: int) -> Iterator[str]:
        samples = BATCH // self.ranks
        is_slow = rank == self.slow_rank
        own = 0.021 if is_slow else 0.0
        for step in range(first, last + 1):
            now = self.begin + step * STEP_SECONDS
            wobble = (step * 7919 + rank * 104729) % 1000 / 1000
            late = own * (1 if step // 500 % 3 else 0.2)
            wait = 0.046 - late - 0.012 * wobble
            took = 0.181 + 0.004 * wobble
            loss = ""
            if rank == 0 and step % 10 == 0:
                wave = 0.05 * math.sin(step / 7) / (1 + step / 4000)
                loss = f'"loss":{4.1 * math.exp(-self.rate * step / 20000) + 1.9 + wave:.6f},'
            yield (
                f'{{"v":1,"t":{now:.3f},"event":"step","step":{step},"epoch":{step // 1000},'
                f'"samples":{samples},"seconds":{took:.6f},{loss}'
                f'"data":{0.004 + 0.003 * wobble:.6f},'
                f'"forward":0.041,"backward":{took - wait - 0.06:.6f},"wait":{wait:.6f},'
                f'"optimizer":0.009,"other":0.003,"arrive":{now - wait:.3f}}}\n'
            )
            if step % 25 == 0:
                use = 97 - 5 * wobble - (9 if step // 500 % 3 and not is_slow else 0)
                yield (
                    f'{{"v":1,"t":{now:.3f},"event":"device","utilization":{use:.0f},'
                    f'"memory":{61_000_000_000 + rank * 10_000_000},"memory_total":85520809984,'
                    f'"power":{640 + 40 * wobble:.0f},"power_limit":700,'
                    f'"temperature":{62 + rank % 7},"cpu":1.{rank % 10},'
                    f'"host_memory":9100000000}}\n'
                )


@contextmanager
def held(*runs: LiveRun) -> Iterator[None]:
    """While it lasts, the runs are live: their locks are taken."""
    with ExitStack() as stack:
        for one in runs:
            stack.enter_context(one.run.held())
        yield
