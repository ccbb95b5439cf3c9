"""`allranks doctor` reads 1 GB of logs in under 20 seconds, in bounded memory, and finds nothing.

    python benchmarks/doctor_speed.py         # makes 1 GB in the temporary folder; 1-2 minutes

The log has what a healthy run prints (steps, NCCL's INFO lines, progress) and random words and
letters as noise. CPU and wall-clock seconds and peak memory are those of the whole process. A
second log has a failure at its end, which must be found.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LIMIT_SECONDS = 20.0
LIMIT_BYTES = 512 << 20
WORDS = """
    tensor loading batch worker momentum done node data shard epoch validation accuracy metric
    process start stop file write model forward backward optimizer gradient schedule memory
    connection network error_rate warning device checkpoint saved resumed world collective
"""
FAILURE = "OSError: [Errno 98] Address already in use\n"


def lines(chance: random.Random) -> Iterator[str]:
    while True:
        number = chance.randrange(10**6)
        yield f"2026-11-15 01:02:03,{number % 1000} INFO step {number} loss {chance.random():.5f}\n"
        yield f"[rank{number % 64}]: step={number} loss={9 * chance.random():.4f} mem=61.2GiB\n"
        yield " ".join(chance.choices(WORDS.split(), k=14)) + "\n"
        yield f"vm:{number}:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"
        yield f"{chance.getrandbits(256):064x}\n"
        yield f"\r 42%|####      | {number}/1000000 [01:02<03:04, 5.1it/s]"


def write(path: Path, num_bytes: int) -> None:
    """Ten megabytes of lines, over and over: making new ones takes longer than reading them."""
    chance = random.Random(0)
    piece, size = [], 0
    for line in lines(chance):
        piece.append(line)
        size += len(line)
        if size >= min(num_bytes, 10**7):
            break
    data = "".join(piece).encode()
    with path.open("wb") as file:
        for _ in range(max(1, num_bytes // len(data))):
            file.write(data)


def measure(path: Path) -> tuple[float, float, int, list[str]]:
    """Wall clock, CPU seconds, peak bytes and causes of one `allranks doctor LOG --json`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    command = [sys.executable, "-m", "allranks", "doctor", str(path), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, after.ru_maxrss * 1024, [one["cause"] for one in json.loads(done.stdout)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    gigabytes = parser.parse_args().gigabytes
    with tempfile.TemporaryDirectory(prefix="allranks-benchmark-") as folder:
        log = Path(folder, "job.log")
        write(log, int(gigabytes * 1e9))
        size = log.stat().st_size / 1e9
        wall, cpu, peak, healthy = measure(log)
        with log.open("a") as file:
            file.write("\n" + FAILURE)
        _, _, _, failed = measure(log)
    print("GB     wall s/GB  CPU s/GB  peak memory  findings  with a failure at the end")
    print(
        f"{size:.2f}  {wall / size:10.1f} {cpu / size:9.1f} {peak / 2**20:8.0f} MiB"
        f"  {len(healthy):8}  {', '.join(failed)}"
    )
    holds = cpu / size < LIMIT_SECONDS and peak < LIMIT_BYTES
    holds &= not healthy and failed == ["port-in-use"]
    print(f"under {LIMIT_SECONDS:.0f} s/GB on one core, nothing found in noise: {holds}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
