"""`allranks --help` takes at most 1.1x an empty Typer app with the same commands, without torch.

    python benchmarks/help_cost.py              # about 1 minute; exit code 1 if it takes more

The empty app has the same command names and nothing else: no options, no bodies, no imports but
typer. Both are started as an installed command is, in turns; the times are of whole processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 1.1
OURS = "from allranks.cli.main import main\n\nmain()\n"
EMPTY_HEAD = """\
import typer

app = typer.Typer(add_completion=False)


@app.callback()
def _root() -> None: ...
"""
EMPTY_COMMAND = "\n\n@app.command('{name}')\ndef command_{number}() -> None: ...\n"


def command_names() -> list[str]:
    """Names as the command line takes them."""
    from allranks.cli.main import COMMANDS

    return [row.name for rows in COMMANDS.values() for row in rows]


def empty_app(names: list[str]) -> str:
    commands = [EMPTY_COMMAND.format(name=name, number=i) for i, name in enumerate(names)]
    return EMPTY_HEAD + "".join(commands) + "\n\napp()\n"


def seconds(script: Path) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, script, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def imported(script: Path) -> set[str]:
    """The modules that `--help` imports."""
    command = [sys.executable, "-X", "importtime", str(script), "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=50)
    num_pairs = parser.parse_args().pairs
    os.environ.setdefault("COLUMNS", "100")
    with tempfile.TemporaryDirectory(prefix="allranks-benchmark-") as folder:
        ours, empty = Path(folder, "ours.py"), Path(folder, "empty.py")
        ours.write_text(OURS)
        empty.write_text(empty_app(command_names()))
        for script in (ours, empty):
            seconds(script)  # the first start compiles
        times = [(seconds(empty), seconds(ours), seconds(empty)) for _ in range(num_pairs)]
        has_torch = "torch" in imported(ours)
    ratio = statistics.median(2 * b / (a + c) for a, b, c in times)
    noise = statistics.median(c / a for a, _, c in times)
    print(f"medians of {num_pairs} pairs of processes")
    print("empty app  allranks  allranks/empty  empty/empty  torch imported")
    print(
        f"{1000 * statistics.median(a for a, _, _ in times):6.0f} ms"
        f"  {1000 * statistics.median(b for _, b, _ in times):5.0f} ms"
        f"  {ratio:13.3f}x  {noise:10.3f}x  {'yes' if has_torch else 'no'}"
    )
    holds = ratio <= LIMIT and not has_torch
    print(f"at most {LIMIT}x and no torch: {'yes' if holds else 'NO'}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
