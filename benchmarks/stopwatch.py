"""The claim: for any training script, samples/s by the probe are within 3% of a stopwatch.

    python benchmarks/stopwatch.py --layout 1x2 --samples 16 -- python train.py …

runs the script unchanged under `allranks run` with a stopwatch in the same processes: a function
around the `step` of every optimizer class, which reads the clock when it returns. It does not use
torch's hooks, as the probe does, and the probe's own work is included in its times. `--samples` is
what one step of one rank trains on, according to the script's arguments; multiplied by the ranks
and the steps that the probe measured, it gives the samples that the probe must have seen. The steps
are those of rank 0's first optimizer, the times those of rank 0. On a GPU the clock is the GPU's:
the host may be a hundred steps ahead of it.

Also claimed: the phases of each step add up to it within 2%, and so do the parts of the mean step;
what the probe cannot attribute (`other`) is at most 10%. `--import MODULE` makes every rank import
a module of yours first, if the script needs something that this machine does not have.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

OUT, IMPORT = "STOPWATCH_OUT", "STOPWATCH_IMPORT"
MAX_RATIO, MAX_SUM, MAX_OTHER = 0.03, 0.02, 0.10
PHASES = ("data", "forward", "backward", "wait", "optimizer", "other")
INJECT = """
import os, runpy
if os.environ.get("RANK"):
    runpy.run_path({path!r}, run_name="stopwatch")["begin"]()
"""


def begin() -> None:
    """In every rank, before the script: look at the clock after each step of an optimizer."""
    import multiprocessing.util

    import torch

    optimizer: Any = torch.optim.Optimizer
    looks: list[tuple[Any, int]] = []
    own, prepare = os.getpid(), optimizer._patch_step_function

    def _patch_step_function(self: Any) -> None:
        kind = type(self)
        if not hasattr(kind.step, "is_timed"):  # a class may have the step of another
            kind.step = timed(kind.step, looks)
        prepare(self)

    def save() -> None:
        if os.getpid() == own and looks:
            rank = os.environ["RANK"]
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                rank = str(torch.distributed.get_rank())
            found = json.dumps(in_seconds(looks))
            Path(os.environ[OUT], f"{rank}-{own}.json").write_text(found)

    optimizer._patch_step_function = _patch_step_function
    multiprocessing.util.Finalize(None, save, exitpriority=100)
    if os.environ.get(IMPORT):
        __import__(os.environ[IMPORT])


def in_seconds(looks: list[tuple[Any, int]]) -> list[tuple[float, int]]:
    """The looks of one clock: the device's, if any was made at it."""
    events = [(time, optimizer) for time, optimizer in looks if not isinstance(time, float)]
    if not events:
        return looks
    first, last = events[0][0], events[-1][0]
    last.synchronize()
    return [(first.elapsed_time(event) / 1000, optimizer) for event, optimizer in events]


def timed(step: Callable[..., Any], looks: list[tuple[Any, int]]) -> Callable[..., Any]:
    import functools

    import torch

    def now() -> Any:
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @functools.wraps(step)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        looks.append((now(), id(self)))
        return result

    call.is_timed = True  # type: ignore[attr-defined]
    return call


def main() -> int:
    options = read_arguments()
    with tempfile.TemporaryDirectory() as folder:
        done, looks = run(options, Path(folder))
    answer = json.loads(done.stdout.strip().splitlines()[-1]) if done.stdout.strip() else {}
    if "run_dir" not in answer:
        print(done.stderr[-3000:], file=sys.stderr)
        return 1
    found = compare(Path(answer["run_dir"]), looks, options.samples)
    found = {"script": options.name, "layout": options.layout, "exit": done.returncode, **found}
    if options.json:
        print(json.dumps(found))
    else:
        print(row_of(found))
    if "problem" in found:
        print(done.stderr[-2000:], file=sys.stderr)
    return 0 if holds(found) else 1


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layout", default="1x1")
    parser.add_argument("--samples", type=float, help="of one step of one rank")
    parser.add_argument("--steps", default="60", help='to measure, or "all"')
    parser.add_argument("--name", help="in the table; the script's by default")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--import", dest="module", default="", help="what every rank imports first")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- python train.py …")
    options = parser.parse_args()
    if options.command[:1] == ["--"]:
        options.command = options.command[1:]
    if not options.command:
        parser.error("name the script after --")
    scripts = [word for word in options.command if word.endswith(".py")]
    options.name = options.name or Path(scripts[0] if scripts else options.command[0]).name
    return options


def run(
    options: argparse.Namespace, folder: Path
) -> tuple[subprocess.CompletedProcess[str], list[list[float]]]:
    """The script under allranks and the stopwatch; when its first optimizer's steps ended."""
    (folder / "sitecustomize.py").write_text(INJECT.format(path=str(Path(__file__).resolve())))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, OUT: str(folder), IMPORT: options.module}
    env["PYTHONPATH"] = os.pathsep.join(paths)
    if options.steps != "all":
        env["ALLRANKS_MEASURE"] = options.steps
    words = ["run", "--json", "--runs", str(options.runs), "--layout", options.layout, "--"]
    done = subprocess.run(
        [sys.executable, "-m", "allranks", *words, *options.command],
        env=env,
        capture_output=True,
        text=True,
        timeout=options.timeout,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    files = sorted(folder.glob("0-*.json"))
    return done, json.loads(files[0].read_text()) if files else []


def compare(run_dir: Path, looks: list[list[float]], samples: float | None) -> dict[str, Any]:
    """The probe's numbers beside the stopwatch's, over the same steps."""
    from allranks.run.events import read_events
    from allranks.run.folder import RunDir
    from allranks.timing.steps import timing

    run = RunDir(run_dir)
    measured = timing(run)
    if measured is None or not looks:
        what = "no step was measured" if measured is None else "the stopwatch saw no step"
        return {"problem": what}
    attempt = max(run.attempts())
    steps = [
        event
        for rank in run.ranks(attempt)
        for event in read_events(run.events(attempt, rank))
        if event["event"] == "step" and "seconds" in event
    ]
    off = [abs(sum(e[name] for name in PHASES) / e["seconds"] - 1) for e in steps if e["seconds"]]
    ends = [time for time, optimizer in looks if optimizer == looks[0][1]]
    seconds = ends[measured.last_step - 1] - ends[measured.first_step - 2]
    found: dict[str, Any] = {
        "ranks": measured.ranks,
        "steps": len(ends),
        "optimizers": len({optimizer for _, optimizer in looks}),
        "measured": [measured.first_step, measured.last_step],
        "steady": measured.steady,
        "step_seconds": measured.step_seconds,
        "samples_per_second": measured.samples_per_second,
        "stopwatch": None,
        "seconds_ratio": measured.seconds / seconds,
        "phases_off": max(off, default=0.0),
        "slowest_rank": measured.slowest_rank,
    }
    if samples is not None:
        found["stopwatch"] = measured.ranks * samples * measured.num_steps / seconds
        found["ratio"] = measured.samples_per_second / found["stopwatch"]
    if measured.parts is not None:
        whole = measured.step_seconds
        found["parts"] = {name: value / whole for name, value in measured.parts.items()}
        found["parts_off"] = abs(sum(measured.parts.values()) / whole - 1)
    return found


def holds(found: dict[str, Any]) -> bool:
    """Whether every claim holds."""
    if "problem" in found or "parts" not in found:
        return False
    ratio = found.get("ratio", 1 / found["seconds_ratio"])
    return bool(
        abs(ratio - 1) <= MAX_RATIO
        and max(found["phases_off"], found["parts_off"]) <= MAX_SUM
        and found["parts"]["other"] <= MAX_OTHER
    )


def row_of(found: dict[str, Any]) -> str:
    """A row of a Markdown table."""
    head = f"| {found['script']} | {found['layout']} |"
    if "problem" in found:
        return f"{head} {found['problem']} (exit code {found['exit']}) |"
    first, last = found["measured"]
    watch = "-" if found["stopwatch"] is None else f"{found['stopwatch']:,.2f}"
    ratio = found.get("ratio", 1 / found["seconds_ratio"])
    off = max(found["phases_off"], found.get("parts_off", 0.0))
    other = f"{found['parts']['other']:.1%}" if "parts" in found else "-"
    return (
        f"{head} {found['steps']:,} | {first:,}-{last:,} | {found['samples_per_second']:,.2f} | "
        f"{watch} | {ratio:.4f} | {off:.1%} | {other} |"
    )


if __name__ == "__main__":
    sys.exit(main())
