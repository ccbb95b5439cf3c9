"""Seconds to the first optimizer step: at most 1.15x a hand-written start, here and on SLURM.

    python benchmarks/first_step.py               # about 6 minutes; exit code 1 if it takes longer
    python benchmarks/first_step.py --only here   # without SLURM: 2 minutes

Here, `allranks run --layout 1x2 -- python train.py` against `torchrun --nproc-per-node 2 train.py`.
On SLURM, `allranks submit --layout 2x1 -- python train.py` against an sbatch file with `srun
torchrun --nnodes 2`, on the cluster at hand, or else on that of tests/slurm/cluster.sh (as root).
Its nodes must be free: both sides wait for the same scheduler.

Both train the same script, in turns, one at a time. The script records when its process and its
launcher were started, when Python reaches its first line, when torch is imported, when the process
group is up, and when its first optimizer step is done; the last rank counts. The rest comes from
the timestamps of files that a job leaves. allranks itself measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
LIMIT = 1.15
PYTHON = sys.executable
TORCHRUN = str(Path(PYTHON).with_name("torchrun"))
POLL_SECONDS = 0.02
MOST_SECONDS = 180.0

SCRIPT = '''\
import json, os, sys, time
marks = {"script": time.time()}

def started(pid):
    """When a process was started, by the clock of time.time()."""
    ticks = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")

marks |= {"rank": started(os.getpid()), "launcher": started(os.getppid())}
import torch
import torch.distributed as dist
marks["torch"] = time.time()
dist.init_process_group("gloo")
marks["group"] = time.time()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(32, 64)).square().mean().backward()
optimizer.step()
marks["step"] = time.time()
path = os.path.join(sys.argv[1], f"{dist.get_rank()}.json")
with open(path + ".part", "w") as file:
    json.dump(marks, file)
os.rename(path + ".part", path)
dist.destroy_process_group()
'''

BATCH = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:1
#SBATCH --output={folder}/job.log
export OMP_NUM_THREADS=1
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {torchrun} --nnodes 2 --nproc-per-node 1 --rdzv-id "$SLURM_JOB_ID" \\
  --rdzv-backend c10d --rdzv-endpoint "$head:29500" {script} {marks}
"""

# Where the time goes: the name of a mark, and what ends with it.
PARTS = {
    "command": "command line, to sbatch",
    "job": "sbatch and scheduler, to the job's start",
    "claim": "allranks' first process, to its claim",
    "launcher": "srun, to the launchers' start",
    "opened": "launcher: torch, the nodes checked",
    "rank": "launcher: (torch,) rendezvous, ranks started",
    "script": "rank: to the script's first line",
    "torch": "script: import torch",
    "group": "script: process group",
    "step": "script: first step",
}
Marks = dict[str, float]


class Turn:
    """One start of the script, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.marks = self.folder / "marks"
        self.marks.mkdir()
        self.script = self.folder / "train.py"
        self.script.write_text(SCRIPT)

    def run(self, *words: str) -> str:
        """Run a command that must succeed, or whose ranks have; return what it prints."""
        done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=False)
        # gloo's threads sometimes abort a rank that has ended well, under torchrun as well.
        if done.returncode and len(list(self.marks.iterdir())) < 2:
            sys.exit(f"{words} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def of_ranks(self) -> Marks:
        """The last rank's time of each mark, once both have made a step."""
        deadline = time.monotonic() + MOST_SECONDS
        while len(files := list(self.marks.glob("*.json"))) < 2:
            if time.monotonic() > deadline:
                logs = [*self.folder.glob("*.log"), *self.folder.glob("runs/*/*.log")]
                sys.exit("no first step:\n" + "\n".join(log.read_text() for log in logs))
            time.sleep(POLL_SECONDS)
        both = [json.loads(file.read_text()) for file in files]
        return {name: max(marks[name] for marks in both) for name in both[0]}


def here_by_hand(turn: Turn) -> Marks:
    typed = time.time()
    turn.run(TORCHRUN, "--nproc-per-node", "2", str(turn.script), str(turn.marks))
    return {**turn.of_ranks(), "typed": typed, "launcher": typed}


def here_by_allranks(turn: Turn) -> Marks:
    typed = time.time()
    words = [PYTHON, "-m", "allranks", "run", "--layout", "1x2", "--"]
    turn.run(*words, PYTHON, str(turn.script), str(turn.marks))
    return {**turn.of_ranks(), "typed": typed, "launcher": typed}


def slurm_by_hand(turn: Turn) -> Marks:
    batch = turn.folder / "job.sbatch"
    names = {"torchrun": TORCHRUN, "script": turn.script, "marks": turn.marks}
    batch.write_text(BATCH.format(folder=turn.folder, **names))
    typed = time.time()
    job = turn.run("sbatch", "--parsable", str(batch)).strip()
    marks = {"typed": typed, **turn.of_ranks()}
    wait_until_gone(turn, job)
    return {**marks, "command": typed, "job": born(turn.folder / "job.log")}


def slurm_by_allranks(turn: Turn) -> Marks:
    typed = time.time()
    words = [PYTHON, "-m", "allranks", "submit", "--json", "--layout", "2x1", "--"]
    told = json.loads(turn.run(*words, PYTHON, str(turn.script), str(turn.marks)))
    marks = {"typed": typed, **turn.of_ranks()}
    wait_until_gone(turn, told["jobs"][0])
    run = Path(told["run_dir"])
    marks["command"] = (run / "submit.sbatch").stat().st_mtime
    marks["job"] = born(run / f"slurm-{told['jobs'][0]}.log")
    marks["claim"] = (run / "claims" / "0").stat().st_mtime
    marks["opened"] = json.loads((run / "run.json").read_text())["attempts"][0]["started"]
    return marks


def born(path: Path) -> float:
    """When a file was made."""
    words = ["stat", "-c", "%.W", str(path)]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def wait_until_gone(turn: Turn, job: str) -> None:
    """Wait until the job is over and its nodes are free."""
    states = "PENDING,RUNNING,COMPLETING"
    while turn.run("squeue", "-h", "-t", states, "-j", job):
        time.sleep(0.2)
    time.sleep(1)  # let the scheduler come to rest, too


def parts(marks: Marks) -> dict[str, float]:
    """Seconds between each mark and the next one that exists."""
    found, last = {}, marks["typed"]
    for name in PARTS:
        if name in marks:
            found[name], last = marks[name] - last, marks[name]
    return found


def measure(
    title: str, by_hand: Callable[[Turn], Marks], ours: Callable[[Turn], Marks], num_pairs: int
) -> bool:
    """Print both sides, their ratio and where the time goes; whether the claim holds."""
    pairs = []
    with tempfile.TemporaryDirectory(prefix="allranks-benchmark-") as folder:
        for number in range(num_pairs + 1):
            turns = [by_hand, ours] if number % 2 else [ours, by_hand]
            marks = {way: way(Turn(Path(folder))) for way in turns}
            if number:  # the first compiles and fills the disk's cache
                pairs.append((marks[by_hand], marks[ours]))
    seconds = [tuple(one["step"] - one["typed"] for one in pair) for pair in pairs]
    ratios = [b / a for a, b in seconds]
    ratio = statistics.median(ratios)
    print(f"\n{title}: seconds to the first step, medians of {num_pairs} pairs")
    for name, values in zip(("by hand", "allranks"), zip(*seconds, strict=True), strict=True):
        median = statistics.median(values)
        print(f"  {name:9} {median:6.2f} s  ({min(values):.2f} to {max(values):.2f})")
    print(f"  ratio     {ratio:6.3f}x  ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"  {'of which':44} by hand  allranks")
    both = [[parts(one) for one in side] for side in zip(*pairs, strict=True)]
    for name, words in PARTS.items():
        each = [[turn[name] for turn in side if name in turn] for side in both]
        if any(map(any, each)):
            cells = [f"{statistics.median(cell):6.2f} s" if cell else "       -" for cell in each]
            print(f"  {words:44} {'  '.join(cells)}")
    print(f"  at most {LIMIT}x: {'yes' if ratio <= LIMIT else 'NO'}", flush=True)
    return ratio <= LIMIT


@contextmanager
def slurm_cluster() -> Iterator[None]:
    """SLURM's commands talk to the cluster at hand, or to one that is brought up for this."""
    if shutil.which("sinfo") and subprocess.run(["sinfo"], capture_output=True).returncode == 0:
        yield
        return
    from tests.slurm.live import Cluster

    live = Cluster.start()
    try:
        os.environ.update(live.variables)
        yield
    finally:
        live.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", choices=("here", "slurm"))
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    holds = True
    if options.only != "slurm":
        holds &= measure("here, 1x2", here_by_hand, here_by_allranks, options.pairs)
    if options.only != "here":
        with slurm_cluster():
            holds &= measure("SLURM, 2x1", slurm_by_hand, slurm_by_allranks, options.pairs)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
