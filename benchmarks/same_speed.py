"""The claim: training is as fast under `allranks run` and `bench scaling` as under torchrun.

    python benchmarks/same_speed.py [--rounds 3] [--kinds plain,loader,lightning,task]

Three kinds of scripts and a task are started in turns by torchrun, by `allranks run` and by
`allranks bench scaling`, which measures all layouts in one process. The same stopwatch in the
script reads the clock after every step in all three; what `run` and `bench scaling` report is
printed too. torchrun also starts the task's ranks, and their events are the stopwatch. Each rank
has as many threads as it has cores; torchrun must be told that.

Medians must agree within the noise: the spread between repeats that are started the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allranks.machine.allotted import cpus_allotted
from allranks.machine.gpus import local_gpus
from allranks.run.folder import RunDir
from allranks.timing.steps import timing

BIN = Path(sys.executable).parent
OUT = "SAME_SPEED_OUT"
WARM_UP, STEPS, BLOCKS = 40, 300, 10
WAYS = ("torchrun", "run", "bench")
LEAST_NOISE = 0.02
TRIES = 3  # gloo's threads sometimes abort a rank that has ended well, under torchrun as well

STOPWATCH = f"""
import atexit, json, os, time
looks = []
def save():
    if os.environ.get("RANK", "0") == "0" and looks:
        with open(os.path.join(os.environ["{OUT}"], f"{{os.getpid()}}.json"), "w") as file:
            json.dump(looks, file)
atexit.register(save)
"""
PLAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
batch = 512 // dist.get_world_size()
inputs, targets = torch.randn(batch, 256), torch.randint(0, 10, (batch,))
layers = [torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()]
model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(512, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    looks.append(time.perf_counter())
dist.destroy_process_group()
"""
LOADER = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    world = dist.get_world_size()
    size = 64 * {steps}
    data = TensorDataset(torch.randn(size, 1, 28, 28), torch.randint(0, 10, (size,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64 // world, sampler=sampler, num_workers=1)
    layers = [torch.nn.Conv2d(1, 16, 3), torch.nn.ReLU(), torch.nn.Flatten()]
    model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(16 * 26 * 26, 10)))
    optimizer = torch.optim.Adam(model.parameters())
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        looks.append(time.perf_counter())
    dist.destroy_process_group()
main()
"""
LIGHTNING = """
import warnings
warnings.simplefilter("ignore")
import lightning, torch
from torch.utils.data import DataLoader, TensorDataset
world = int(os.environ["WORLD_SIZE"])
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)
        )
    def training_step(self, batch, index):
        return self.layers(batch[0]).square().mean()
    def on_train_batch_end(self, *_):
        looks.append(time.perf_counter())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
data = DataLoader(TensorDataset(torch.randn(256 * {steps}, 256)), batch_size=256 // world)
lightning.Trainer(
    max_steps={steps}, accelerator="cpu", devices=world, strategy="ddp", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
).fit(Model(), data)
"""
SCRIPTS = {"plain": PLAIN, "loader": LOADER, "lightning": LIGHTNING}
BATCH = {"plain": 512, "loader": 64, "lightning": 256}
TASK = ["task=language", "batch_size=16"]
# The task's ranks under torchrun: this process becomes torchrun, with a run's folder prepared.
BECOME_TORCHRUN = """
import os, sys
from pathlib import Path
from allranks.launch.prepare import Request, open_run, prepare, ranks_environment
layout, runs, *overrides = sys.argv[1:]
prepared = prepare(Request(overrides=overrides, layout=layout, runs=Path(runs)))
run = open_run(prepared)
ranks = prepared.layout.ranks
env = {**os.environ, **ranks_environment(prepared, run, here=ranks, oversubscribe=False)}
env |= {"ALLRANKS_ATTEMPT": "0", "ALLRANKS_LAUNCHER": str(os.getpid())}
words = ["torchrun", "--standalone", "--nproc-per-node", str(ranks)]
os.execvpe(words[0], [*words, "-m", "allranks.launch.rank_env"], env)
"""


def main() -> int:
    options = parse()
    layouts = [f"1x{ranks}" for ranks in (1, 2, 4) if ranks <= cpus_allotted()]
    print(f"{cpus_allotted()} cores, {len(local_gpus())} GPUs; layouts {', '.join(layouts)}")
    print("samples/s: the stopwatch's median (range of its repeats); [what is reported]\n")
    holds = True
    for kind in options.kinds.split(","):
        found = measure(kind, layouts, options.rounds)
        for layout in layouts:
            holds &= show(kind, layout, found)
        print(flush=True)
    print("holds" if holds else "does not hold")
    return 0 if holds else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of two runs each way")
    parser.add_argument("--kinds", default="plain,loader,lightning,task")
    return parser.parse_args()


def measure(kind: str, layouts: Sequence[str], rounds: int) -> dict[tuple[str, str], list[Any]]:
    """By way and layout: (by the stopwatch, as reported) of every run, in turns."""
    found: dict[tuple[str, str], list[Any]] = {(w, one): [] for w in WAYS for one in layouts}
    with tempfile.TemporaryDirectory() as folder:
        if kind in SCRIPTS:
            text = STOPWATCH + SCRIPTS[kind].replace("{steps}", str(STEPS))
            Path(folder, "train.py").write_text(text)
        trial = Trial(kind, Path(folder))
        for _ in range(rounds):
            for layout in layouts:
                for _ in range(2):
                    found["torchrun", layout].append(trial.torchrun(layout))
                    found["run", layout].append(trial.run(layout))
            for layout, measured in trial.bench(layouts):
                found["bench", layout].append(measured)
    return found


class Trial:
    """One training, started in three ways."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.command = ["--", "python", "train.py"]

    def torchrun(self, layout: str) -> tuple[float, None]:
        ranks = int(layout[2:])
        if self.kind == "task":
            words = [sys.executable, "-c", BECOME_TORCHRUN, layout, "runs", *TASK]
            self.start([*words, f"steps={STEPS}"])
            return self.by_events(newest(self.folder / "runs")), None
        words = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(ranks), "train.py"]
        self.start(words, OMP_NUM_THREADS=str(max(1, cpus_allotted() // ranks)))
        return self.by_stopwatch(), None

    def run(self, layout: str) -> tuple[float, float]:
        words = [str(BIN / "allranks"), "run", "--layout", layout, "--json"]
        more = [*TASK, f"steps={STEPS}"] if self.kind == "task" else self.command
        said = json.loads(self.start([*words, *more]))
        reported = float(said["samples_per_second"])
        if self.kind == "task":
            return self.by_events(RunDir(Path(said["run_dir"]))), reported
        return self.by_stopwatch(), reported

    def bench(self, layouts: Sequence[str]) -> list[tuple[str, tuple[float, float]]]:
        words = [str(BIN / "allranks"), "bench", "scaling", "--repeats", "2", "--steps", "200"]
        words += ["--layouts", ",".join(layouts), "--json"]
        said = json.loads(self.start([*words, *(TASK if self.kind == "task" else self.command)]))
        repeats = {
            one["run"]: (row["layout"], one) for row in said["rows"] for one in row["repeats"]
        }
        found = []
        stopwatches = self.stopwatches()
        for index, run in enumerate(sorted(repeats, key=started(self.folder / "runs"))):
            layout, one = repeats[run]
            seen = self.by_events(RunDir(self.folder / "runs" / run))
            if self.kind != "task":
                seen = stopwatches[index]
            found.append((layout, (seen, float(one["samples_per_second"]))))
        return found

    def start(self, words: Sequence[str], **env: str) -> str:
        given = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
        given |= {OUT: str(self.folder), "PATH": f"{BIN}:{os.environ['PATH']}", **env}
        for _ in range(TRIES):
            for path in self.folder.glob("*.json"):
                path.unlink()
            done = subprocess.run(words, cwd=self.folder, env=given, capture_output=True, text=True)
            if done.returncode == 0:
                return done.stdout
        raise SystemExit(f"{words}: {done.stdout}\n{done.stderr}")

    def by_stopwatch(self) -> float:
        (rate,) = self.stopwatches()
        return rate

    def stopwatches(self) -> list[float]:
        """The rate of each run since the last start, the oldest first."""
        paths = sorted(self.folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        found = []
        for path in paths:
            looks = json.loads(path.read_text())[WARM_UP:]
            size = (len(looks) - 1) // BLOCKS
            blocks = [looks[size * (i + 1)] - looks[size * i] for i in range(BLOCKS)]
            found.append(BATCH[self.kind] * size / statistics.median(blocks))
        return found

    def by_events(self, run: RunDir) -> float:
        measured = timing(run)
        assert measured is not None
        return float(measured.samples_per_second)


def newest(runs: Path) -> RunDir:
    return RunDir(max(runs.iterdir(), key=lambda path: path.stat().st_mtime))


def started(runs: Path) -> Any:
    return lambda name: RunDir(runs / name).info()["created"]


def show(kind: str, layout: str, found: dict[tuple[str, str], list[Any]]) -> bool:
    """Whether the three ways agree."""
    rates = {way: [seen for seen, _ in found[way, layout]] for way in WAYS}
    medians = {way: statistics.median(rates[way]) for way in WAYS}
    noise = max((max(rates[way]) - min(rates[way])) / medians[way] for way in WAYS)
    noise = max(noise, LEAST_NOISE)
    apart = max(medians.values()) / min(medians.values()) - 1
    parts = []
    for way in WAYS:
        told = [reported for _, reported in found[way, layout] if reported is not None]
        said = f" [{statistics.median(told):,.0f}]" if told else ""
        least, most = min(rates[way]), max(rates[way])
        parts.append(f"{way} {medians[way]:,.0f} ({least:,.0f}-{most:,.0f}){said}")
    holds = bool(apart <= noise)
    verdict = f"apart {apart:.1%}, noise {noise:.1%}: {'agree' if holds else 'DO NOT AGREE'}"
    print(f"{kind} {layout}: {'; '.join(parts)}; {verdict}", flush=True)
    return holds


if __name__ == "__main__":
    sys.exit(main())
