"""Run folders that grow while somebody looks, without the ranks."""

from __future__ import annotations

import json
import math
import random
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml

from allranks.run.folder import RunDir

GPU_MEMORY = 80 << 30


class GrowingRun:
    """A run of so many ranks. `live()` holds it as a launcher would; `steps()` makes some."""

    def __init__(
        self,
        runs: Path,
        layout: str = "1x4",
        *,
        name: str = "digits",
        number: int = 0,
        steps: int = 1000,
        step_seconds: float = 0.1,
        gpu: bool = True,
        begin: float | None = None,
        slowest: int | None = None,
        info: dict[str, Any] | None = None,
    ) -> None:
        self.run = RunDir(runs.absolute() / f"{name}-20261115-12{number:04}-{number:04x}")
        nodes, per_node = map(int, layout.split("x"))
        self.layout, self.ranks, self.per_node = layout, nodes * per_node, per_node
        self.last, self.step_seconds, self.gpu = steps, step_seconds, gpu
        self.slowest = self.ranks - 1 if slowest is None else slowest
        self.step, self.attempt = 0, 0
        self.now = time.time() if begin is None else begin
        self._noise = random.Random(number)
        self.run.path.mkdir(parents=True)
        settings = {"name": name, "task": "digits", "batch_size": 128, "epochs": 10}
        self.run.job_file.write_text(yaml.safe_dump(settings))
        created = {"run": self.run.name, "created": self.now, "layout": layout, "backend": "local"}
        self.run.write_info({"v": 1, **created, **(info or {})})

    def live(self) -> AbstractContextManager[None]:
        return self.run.held()

    def begin(self, attempt: int = 0, step: int = 0) -> None:
        """Start all ranks."""
        self.attempt, self.step = attempt, step
        self.run.attempt(attempt).mkdir(parents=True)
        for rank in range(self.ranks):
            self.write(
                rank,
                "start",
                **{"rank": rank, "world_size": self.ranks, "layout": self.layout, "step": step},
                **{"host": f"node{rank // self.per_node + 1}", "global_batch": 128},
                **{"steps": self.last, "steps_per_epoch": self.last // 10},
                device="NVIDIA H100 80GB HBM3" if self.gpu else "CPU",
            )
            self.run.log(attempt, rank).write_text(f"hello from rank {rank}\n")

    def steps(self, count: int = 1, *, device: bool = True) -> None:
        """So many steps of every rank, one after another in their files."""
        lines: dict[int, list[str]] = {rank: [] for rank in range(self.ranks)}
        for _ in range(count):
            self.step += 1
            self.now += self.step_seconds
            for rank, of_rank in lines.items():
                of_rank.append(event_line(self.now, "step", **self._step(rank)))
        for rank, of_rank in lines.items():
            if device:
                of_rank.append(event_line(self.now, "device", **self._device(rank)))
            with self.run.events(self.attempt, rank).open("a") as file:
                file.write("".join(of_rank))

    def end(self, state: str = "finished", **fields: Any) -> None:
        for rank in range(self.ranks):
            self.write(rank, "end", state=state, exit=0 if state == "finished" else 1, **fields)

    def write(self, rank: int, event: str, /, **fields: Any) -> None:
        with self.run.events(self.attempt, rank).open("a") as file:
            file.write(event_line(self.now, event, **fields))

    def _step(self, rank: int) -> dict[str, Any]:
        seconds = self.step_seconds
        wait = 0.1 * seconds if rank == self.slowest else 0.2 * seconds
        rest = seconds - wait
        shares = {"data": 0.05, "forward": 0.3, "backward": 0.55, "optimizer": 0.08, "other": 0.02}
        found = {"step": self.step, "epoch": 1 + (self.step - 1) // max(1, self.last // 10)}
        found |= {"samples": 128 // self.ranks, "seconds": round(seconds, 7)}  # type: ignore[dict-item]
        phases = {phase: round(share * rest, 7) for phase, share in shares.items()}
        loss = 2.0 * math.exp(-self.step / (0.3 * self.last)) + 0.1 * self._noise.random()
        has_loss = rank == 0 and (self.step % 10 == 0 or self.step == self.last)
        return {**found, **phases, "wait": round(wait, 7), **({"loss": loss} if has_loss else {})}

    def _device(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = {"cpu": 1.02, "host_memory": 3 << 30, "host_memory_now": 2 << 30}
        if rank % self.per_node == 0:
            found["network"] = {"sent": 11e9, "received": 12e9, "link": 12_500_000_000}
        if self.gpu:
            found |= {"utilization": 75 if rank == 1 else 97, "memory": 0.85 * GPU_MEMORY}
            found |= {"memory_total": GPU_MEMORY, "power": 640.0, "power_limit": 700.0}
            found |= {"temperature": 66, "clock": 1980, "clock_max": 1980}
        return found


def event_line(t: float, event: str, /, **fields: Any) -> str:
    return json.dumps({"v": 1, "t": t, "event": event, **fields}, separators=(",", ":")) + "\n"
