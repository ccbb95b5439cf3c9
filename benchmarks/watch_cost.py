"""`allranks watch` follows 50 live runs of 64 ranks with at most 5% of a core and few SLURM calls.

    python benchmarks/watch_cost.py              # about 2 minutes; exit code 1 if it takes more

One process makes all event files grow: every rank makes two steps a second, and is sampled every
two seconds. The command itself runs in a terminal of 160x48, with a run of 64 ranks selected. Its
CPU time is read from /proc after its first screens, and compared with that of the same process with
no run to follow. A script that counts its calls replaces `squeue`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

from allranks.run.folder import RunDir

LIMIT = 0.05
MAX_CALLS_A_MINUTE = 7
STEP_SECONDS = 0.5
PHASES = {"data": 0.01, "forward": 0.15, "backward": 0.25, "wait": 0.06, "optimizer": 0.02}
SQUEUE = """#!/bin/sh
echo call >> {calls}
for job in $(seq 1 {count}); do echo "$job|RUNNING|None|2026-11-15T12:00:00|node1|1:00|2:00|1"; done
"""


def make_run(runs: Path, number: int, ranks: int) -> RunDir:
    """The folder of a run that has just begun."""
    run = RunDir(runs / f"job{number}-20261115-12{number:04}-{number:04x}")
    run.attempt(0).mkdir(parents=True)
    run.job_file.write_text(f"name: job{number}\ntask: digits\nepochs: 10\n")
    layout = f"{ranks // 8 or 1}x{min(8, ranks)}"
    info = {"run": run.name, "layout": layout, "backend": "slurm", "jobs": [str(number + 1)]}
    run.write_info({"v": 1, "created": time.time(), **info})
    for rank in range(ranks):
        start = {"rank": rank, "world_size": ranks, "layout": layout, "host": f"node{rank // 8}"}
        start |= {"global_batch": 1024, "steps": 200_000, "steps_per_epoch": 20_000, "step": 0}
        write(run, rank, [line("start", **start, device="NVIDIA H100 80GB HBM3")])
    return run


def line(event: str, **fields: object) -> str:
    content = {"v": 1, "t": time.time(), "event": event, **fields}
    return json.dumps(content, separators=(",", ":")) + "\n"


def write(run: RunDir, rank: int, lines: list[str]) -> None:
    with run.events(0, rank).open("a") as file:
        file.writelines(lines)


def grow(runs: Path, num_runs: int, ranks: int, ready: Path) -> None:
    """Hold all runs and let them grow, until this process is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ExitStack() as held:
        made = [make_run(runs, number, ranks) for number in range(num_runs)]
        for run in made:
            held.enter_context(run.held())
        ready.touch()
        for step in range(1, 1 << 30):
            begin = time.monotonic()
            common = {"step": step, "epoch": 1, "samples": 16, "seconds": STEP_SECONDS, **PHASES}
            plain = line("step", **common, other=0.01, arrive=time.time())
            with_loss = line("step", **common, other=0.01, loss=4.0 / step)
            use = {"utilization": 97, "memory": 68 << 30, "memory_total": 80 << 30, "power": 640.0}
            device = line("device", cpu=1.0, **use, power_limit=700.0, temperature=66)
            for run in made:
                for rank in range(ranks):
                    lines = [with_loss if rank == 0 and step % 10 == 0 else plain]
                    write(run, rank, lines + ([device] if step % 4 == 0 else []))
            time.sleep(max(0.0, STEP_SECONDS - (time.monotonic() - begin)))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(runs: Path, folder: Path, first: float, seconds: float) -> tuple[float, int, float]:
    """The share of a core, bytes drawn and peak memory in MB of the command in a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
        os.environ["TERM"] = "xterm-256color"
        words = [sys.executable, "-m", "allranks", "watch", "--runs", str(runs)]
        os.execv(sys.executable, words)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 48, 160, 0, 0))
    read(terminal, first)
    before, begin = cpu_seconds(pid), time.monotonic()
    drawn = read(terminal, seconds)
    share = (cpu_seconds(pid) - before) / (time.monotonic() - begin)
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    peak = next(int(row.split()[1]) / 1024 for row in status if row.startswith("VmHWM"))
    os.write(terminal, b"q")
    read(terminal, 2.0)
    _, code = os.waitpid(pid, 0)
    os.close(terminal)
    if code:
        raise SystemExit(f"allranks watch ended with {code}")
    return share, drawn, peak


def read(terminal: int, seconds: float) -> int:
    """Read what is drawn, as a terminal would; return how many bytes it was."""
    deadline, total = time.monotonic() + seconds, 0
    while (left := deadline - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            try:
                total += len(os.read(terminal, 1 << 16))
            except OSError:  # it has ended
                break
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calls = folder / "calls"
        squeue = folder / "bin" / "squeue"
        squeue.parent.mkdir()
        squeue.write_text(SQUEUE.format(calls=calls, count=options.runs))
        squeue.chmod(0o755)
        (folder / "none").mkdir()
        idle, _, _ = watch(folder / "none", squeue.parent, 4.0, min(20.0, options.seconds))
        ready = folder / "ready"
        arguments = (folder / "runs", options.runs, options.ranks, ready)
        writer = get_context("spawn").Process(target=grow, args=arguments, daemon=True)
        writer.start()
        while not ready.exists():
            time.sleep(0.1)
        begin = time.monotonic()
        share, drawn, peak = watch(folder / "runs", squeue.parent, 12.0, options.seconds)
        minutes = (time.monotonic() - begin) / 60
        steps = max((folder / "runs").glob("*/attempts/0/rank-0.jsonl")).read_text().count('step"')
        writer.kill()
        writer.join()
        asked = calls.read_text().count("call") / minutes
    print(f"runs x ranks         {options.runs} x {options.ranks}, {steps} steps each")
    print(f"CPU, no runs         {idle:.1%} of a core")
    print(f"CPU, all of them     {share:.1%} of a core   (claim: at most {LIMIT:.0%})")
    print(
        f"squeue               {asked:.1f} calls a minute   (claim: at most {MAX_CALLS_A_MINUTE})"
    )
    print(f"drawn                {drawn / options.seconds / 1024:.1f} KiB/s")
    print(f"memory               {peak:.0f} MB at most")
    sys.exit(share > LIMIT or asked > MAX_CALLS_A_MINUTE)


if __name__ == "__main__":
    main()
