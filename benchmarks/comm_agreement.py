"""`allranks bench comm` measures the same times as a hand-written loop of all-reduces.

    python benchmarks/comm_agreement.py          # about 6 minutes; exit code 1 if they disagree
    python benchmarks/comm_agreement.py --blocks 5 --sizes 1KiB-1MiB          # a first look

Both run in the same processes, on CPU over gloo, in alternating blocks: hand-written, ours,
hand-written. Ours is what `bench comm` runs for one size: it makes the buffers, checks a result,
estimates how long a call takes, and then times calls. The hand-written loop has a tensor, a few
warm-up calls, a barrier, and a clock around each call; its time is rank 0's median. Each block of
ours is compared with the mean of the two hand-written blocks around it; the ratio of those two is
the noise. The claim is about the median ratio over the blocks: within 5% from 1 MiB up, 15% below.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from allranks.bench.comm_calls import join, memory_for_buffers
from allranks.bench.comm_counts import parse_sizes, sizes_between
from allranks.bench.comm_ranks import SHARE_BY_CHOICE, Sweep
from allranks.show.numbers import size as num_bytes

LARGE = 1 << 20
LIMITS = {"large": 0.05, "small": 0.15}
WARM_UP_CALLS = 5


# In a rank.


def by_hand(size: int, num_calls: int) -> float:
    """The median time of a call on this rank."""
    tensor = torch.zeros(size // 4)
    for _ in range(WARM_UP_CALLS):
        dist.all_reduce(tensor)
    dist.barrier()
    seconds = []
    for _ in range(num_calls):
        started = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def run_rank(sizes: list[int], num_blocks: int, block_seconds: float) -> None:
    world = join(torch.device("cpu"))
    memory = memory_for_buffers(world)
    found = []
    for size in sizes:
        blocks: dict[str, list[float]] = {"before": [], "ours": [], "after": []}

        def ours(size: int = size) -> dict[str, Any]:
            sweep = Sweep(world, "node", "all_reduce")
            sweep.measure([size], memory, block_seconds / SHARE_BY_CHOICE)
            return sweep.rows[0]

        num_calls = [ours()["iterations"]]
        for _ in range(num_blocks):
            blocks["before"].append(by_hand(size, num_calls[-1]))
            row = ours()
            blocks["ours"].append(row["median_us"] * 1e-6)
            num_calls.append(row["iterations"])  # as many as the machine's load allows by now
            blocks["after"].append(by_hand(size, num_calls[-1]))
        calls = round(statistics.median(num_calls))
        found.append({"bytes": size, "calls": calls, **blocks})
        if world.rank == 0:
            print(f"{num_bytes(size)} is done", flush=True)
    if world.rank == 0:
        path = Path(os.environ["ALLRANKS_RUN_DIR"]) / "agreement.json"
        path.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# In the process that starts the ranks.


def measure(wanted: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the ranks as `allranks run` starts any script, and wait for their numbers."""
    turn = ["--sizes", wanted.sizes, "--blocks", str(wanted.blocks)]
    turn += ["--block-seconds", str(wanted.block_seconds), "--rank"]
    with tempfile.TemporaryDirectory(prefix="allranks-benchmark-") as folder:
        command = [sys.executable, "-m", "allranks", "run", "--layout", wanted.layout]
        command += ["--runs", folder, "--json", "--", sys.executable, __file__, *turn]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise SystemExit("the ranks failed: see above")
        run = Path(json.loads(done.stdout)["run_dir"])
        return json.loads((run / "agreement.json").read_text())  # type: ignore[no-any-return]


def summarise(blocks: dict[str, Any]) -> tuple[float, float, float]:
    """The time by hand in µs, the ratio of ours to it, and the noise."""
    pairs = list(zip(blocks["before"], blocks["after"], strict=True))
    ratios = [
        ours / ((before + after) / 2)
        for ours, (before, after) in zip(blocks["ours"], pairs, strict=True)
    ]
    by_hand_us = 1e6 * statistics.median([before for before, _ in pairs])
    noise = statistics.median(after / before for before, after in pairs)
    return by_hand_us, statistics.median(ratios), noise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="1x2")
    parser.add_argument("--sizes", default="1KiB-64MiB")
    parser.add_argument("--blocks", type=int, default=20, help="of each side")
    parser.add_argument("--block-seconds", type=float, default=0.5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.rank:
        sizes = sizes_between(*parse_sizes(wanted.sizes))
        run_rank(sizes, wanted.blocks, wanted.block_seconds)
        return 0
    found = measure(wanted)
    print(f"all_reduce on {wanted.layout} over gloo, medians of {wanted.blocks} blocks")
    print("    size   calls      by hand  ours/hand  hand/hand  within")
    holds = True
    for blocks in found:
        size = blocks["bytes"]
        by_hand_us, ratio, noise = summarise(blocks)
        limit = LIMITS["large" if size >= LARGE else "small"]
        agrees = abs(ratio - 1) <= limit
        holds = holds and agrees
        print(
            f"{num_bytes(size):>8}  {blocks['calls']:>6}  {by_hand_us:>8.1f} µs"
            f"  {ratio:8.3f}x  {noise:8.3f}x  {limit:.0%}: {'yes' if agrees else 'NO'}"
        )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
