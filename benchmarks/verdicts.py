"""The claim: a run says correctly what limited it, for unchanged scripts of any kind.

    python benchmarks/verdicts.py                     # on a CPU: 25 minutes
    python benchmarks/verdicts.py --only host-3-ms    # one situation, or several
    python benchmarks/verdicts.py --gpu               # on a GPU: 15 minutes, see --only and --keep
    python benchmarks/verdicts.py --traceml ~/traceml/bin/python   # beside TraceML, see below
    python benchmarks/verdicts.py --quick             # only the verdicts, not whether gains hold
    python benchmarks/verdicts.py --keep DIR          # what DIR already has is not run again

Every situation in situations/table.py is a script with something planted in it. The scripts are in
the same folder, and each planted line is in an `if` that can switch it off, so that the same script
can run without what limits it. Under `allranks run --json` the script is unchanged, and the verdict
is right if it names the expected limit (and rank), and if the expected warning, if any, is given.

A stopwatch in every rank (stopwatch.py) times the steps in the same way under allranks, under
TraceML and bare. Without what was planted, a step must take 0.95 to 2 times what `gain` predicts.
Healthy loops on a GPU are also traced from outside: torch's profiler, without allranks, must see
the GPU busy for 90% of the time. On a GPU, some situations start at once and then take turns, so
that only one at a time uses it, from CUDA's initialisation to its end.

Claimed: at least 90% right, none wrong and sure, no warning on a healthy loop, the planted line
named in at least 90% of the situations that have one, and gains that hold in at least 80%.

TraceML (`traceml-ai`) runs on the same situations if it is installed, here or for the Python that
`--traceml` names, which needs torch, Lightning and Accelerate as well. It needs `trace_step` in
plain loops: the line is added to the same source. Its words are read generously: `RESIDUAL-HEAVY`
counts as right for both `host` and `pauses`, and no clear bottleneck for `compute`.

Runs with made-up events (situations/written.py) stand for hardware that cannot be slowed down on
demand: clocks, power limits and other processes on a GPU.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import importlib.util
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from situations.table import ON_16_CORES, ON_CPU, ON_GPU, Situation
from situations.written import WRITTEN, write_run

from allranks.machine import allotted
from allranks.run.folder import RunDir
from allranks.timing.verdict import judge

HERE = Path(__file__).resolve().parent
MIN_RIGHT, MIN_NAMED, MIN_GAINS = 0.9, 0.9, 0.8
GAIN_RANGE = (0.95, 2.0)
MIN_BUSY = 0.9
MAX_SECONDS = 180
MAX_LOAD = 0.3  # of the cores
STEPS_PER_BLOCK = 20  # evaluations come every ten steps, batches in bursts of four workers
OUTSIDE_TRACE = "VERDICTS_OUTSIDE_TRACE"
AT_ONCE, TURN = 3, "VERDICTS_TURN"  # situations that share a GPU, and a file that one of them locks
# Before anything else in every rank: its turn, the stopwatch, and the trace from outside.
INJECT = f"""
import os, runpy
if os.environ.get("RANK"):
    if os.environ.get("{TURN}"):
        import fcntl, torch
        def wait_for_turn(init=torch.cuda._lazy_init, cuda=torch.cuda, fcntl=fcntl, os=os):
            turn = os.open(os.environ.pop("{TURN}"), os.O_RDWR | os.O_CREAT)  # until the rank ends
            fcntl.flock(turn, fcntl.LOCK_EX)
            cuda._lazy_init = init
            init()
        torch.cuda._lazy_init = wait_for_turn
    runpy.run_path({str(HERE / "stopwatch.py")!r}, run_name="stopwatch")["begin"]()
    if os.environ.get("{OUTSIDE_TRACE}"):
        runpy.run_path({str(HERE / "situations" / "outside_trace.py")!r})["begin"]()
"""
# What TraceML's diagnoses are called here.
LIMITS_OF_TRACEML = {
    "INPUT_BOUND": {"data"},
    "INPUT_STRAGGLER": {"data"},
    "H2D_BOUND": {"copies"},
    "H2D_STRAGGLER": {"straggler"},
    "COMPUTE_STRAGGLER": {"straggler"},
    "STRAGGLER": {"straggler"},
    "RESIDUAL_HEAVY": {"host", "pauses"},
    "COMPUTE_BOUND": {"compute"},
    "NO_CLEAR_PERFORMANCE_BOTTLENECK": {"compute"},
    "INSUFFICIENT_STEP_TIME_DATA": {"too-short", "unknown"},
}


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a script left behind."""

    code: int
    output: str
    step_seconds: float | None  # by the stopwatch, evaluations and such included


@dataclass(kw_only=True)
class Row:
    """What was expected in a situation, and what was said."""

    situation: Situation
    answer: Mapping[str, Any] = field(default_factory=dict)  # verdict, warnings
    run_dir: str = ""
    problem: str = ""
    lines: Collection[str] = ()  # those that are planted
    planted: float | None = None  # seconds of a step
    removed: float | None = None
    bare: float | None = None
    traceml: Mapping[str, Any] = field(default_factory=dict)
    busy: float | None = None  # in a trace from outside

    @property
    def verdict(self) -> Mapping[str, Any]:
        return self.answer.get("verdict") or {"limit": None, "sure": False, "why": self.problem}

    @property
    def warnings(self) -> list[str]:
        return [warning["kind"] for warning in self.answer.get("warnings", [])]

    @property
    def is_right(self) -> bool:
        expected, said = self.situation, self.verdict
        return (
            said["limit"] == expected.limit
            and (expected.rank is None or said["rank"] == expected.rank)
            and expected.reason in said["why"]
            and (not expected.warning or any(expected.warning in kind for kind in self.warnings))
        )

    @property
    def is_surely_wrong(self) -> bool:
        return bool(self.verdict["sure"]) and not self.is_right

    @property
    def is_named(self) -> bool | None:
        """Whether the planted line is named; None if there is none to name."""
        if self.situation.is_named:
            return self.verdict.get("line") in self.lines
        if self.situation.is_warning_named:
            return any(one["line"] in self.lines for one in self.answer.get("warnings", []))
        return None

    @property
    def gain_off(self) -> float | None:
        """How long a step takes without what was planted, over what the gain predicts."""
        gain = self.verdict.get("gain")
        if not (self.planted and self.removed and gain and self.is_right):
            return None
        return float(self.removed / (self.planted / gain))

    @property
    def is_gain_right(self) -> bool | None:
        """Whether the gain holds; None where nothing can be gained."""
        if not self.situation.plant or self.situation.limit in {"compute", "too-short", "unknown"}:
            return None
        return self.gain_off is not None and GAIN_RANGE[0] <= self.gain_off <= GAIN_RANGE[1]

    @property
    def is_traceml_right(self) -> bool | None:
        if not self.traceml or self.situation.limit == "unknown":  # it needs no optimizer
            return None
        accepted = LIMITS_OF_TRACEML.get(self.traceml["kind"], set())
        rank = self.traceml["rank"]
        return self.situation.limit in accepted and (
            self.situation.rank is None or rank in {None, self.situation.rank}
        )


def planted_source(situation: Situation) -> tuple[str, frozenset[str]]:
    """The script of a situation, and its planted lines as `train.py:52`."""
    plant = dict(situation.plant)
    found: list[str] = []
    for line in (HERE / "situations" / f"{situation.script}.py").read_text().splitlines():
        place = line.strip().removeprefix("# plant: ")
        if line.strip().startswith("# plant: ") and place in plant:
            indent = line[: line.index("#")]
            found += textwrap.indent(branches(place, plant.pop(place)), indent).split("\n")
        elif not line.strip().startswith("# plant: "):
            found.append(line)
    assert not plant, f"{situation.name}: {situation.script}.py has no place {', '.join(plant)}"
    numbered = enumerate(found, start=1)
    lines = frozenset(f"train.py:{number}" for number, line in numbered if "# planted" in line)
    return "\n".join(found) + "\n", lines


def branches(place: str, code: str | tuple[str, str]) -> str:
    """What is planted in a place, in an `if` that can switch it off."""
    planted, otherwise = code if isinstance(code, tuple) else (code, "")
    lines = [f"    {line}  # planted" for line in planted.strip().split("\n")]
    if otherwise:
        lines += ["else:", *(f"    {line}" for line in otherwise.strip().split("\n"))]
    return "\n".join([f'if "{place}" not in REMOVED:', *lines])


def with_traceml(source: str) -> str:
    """The script with the lines that TraceML asks for: around the body of the training loop."""
    tree = ast.parse(source)
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and "backward" in ast.unparse(node)
    ]
    lines = source.splitlines()
    if loops:
        loop = max(loops, key=lambda node: node.lineno)
        first, last = loop.body[0].lineno - 1, loop.end_lineno
        while lines[first - 1].lstrip().startswith("#"):
            first -= 1
        indent = " " * loop.body[0].col_offset
        body = [f"    {line}" if line else line for line in lines[first:last]]
        lines[first:last] = [f"{indent}with traceml.trace_step(model):", *body]
    begin = next(n for n, line in enumerate(lines) if line.startswith("import "))
    if loops:  # Lightning needs no line
        lines.insert(begin, 'import traceml_ai as traceml\ntraceml.init(mode="auto")')
    return "\n".join(lines) + "\n"


def step_seconds(folder: Path) -> float | None:
    """How long a step of rank 0 takes, by the stopwatch: the median block of the later steps."""
    files = sorted(folder.glob("0-*.json"))
    looks = json.loads(files[0].read_text()) if files else []
    ends = [time for time, optimizer in looks if optimizer == looks[0][1]]
    ends = ends[int(0.4 * len(ends)) :]
    blocks = [
        (ends[n + STEPS_PER_BLOCK] - ends[n]) / STEPS_PER_BLOCK
        for n in range(0, len(ends) - STEPS_PER_BLOCK, STEPS_PER_BLOCK)
    ]
    return statistics.median(blocks) if blocks else None


class Stage:
    """Where the scripts run: a folder each, with the stopwatch in every rank."""

    def __init__(self, keep: Path | None, traceml: str | None, *, quick: bool) -> None:
        self.traceml, self.quick = traceml, quick
        self.folder = keep or Path(tempfile.mkdtemp(prefix="allranks-verdicts-"))
        self.keep = keep is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        self.turn = self.folder / "turn"

    def run(
        self,
        situation: Situation,
        command: Sequence[str],
        *,
        planted: bool = True,
        has_turn: bool = False,
        ranks: Sequence[Mapping[str, str]] = ({},),
    ) -> Ran:
        """A command in the situation's folder; several at once, each with variables of its own."""
        looks = Path(tempfile.mkdtemp(prefix="allranks-stopwatch-"))
        (looks / "sitecustomize.py").write_text(INJECT)
        paths = [str(looks), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {
            **os.environ,
            "REMOVED": "" if planted else ",".join(situation.removable),
            "STOPWATCH_OUT": str(looks),
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
        }
        if not situation.gpu:
            env["CUDA_VISIBLE_DEVICES"] = ""
        elif not has_turn:
            env[TURN] = str(self.turn)
        errors = (looks / "stderr").open("w+")
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": errors}
        pipes |= {"stdin": subprocess.DEVNULL, "text": True, "cwd": self.folder / situation.name}
        started = [subprocess.Popen(command, env={**env, **own}, **pipes) for own in ranks]
        try:
            output = "".join(process.communicate(timeout=MAX_SECONDS)[0] for process in started)
            code = max(process.returncode for process in started)
            errors.seek(0)
            return Ran(
                code=code,
                output=output if code == 0 else output + errors.read()[-2000:],
                step_seconds=step_seconds(looks),
            )
        except subprocess.TimeoutExpired:
            return Ran(code=124, output=f"more than {MAX_SECONDS} s", step_seconds=None)
        finally:
            for process in started:
                process.kill()
            errors.close()
            shutil.rmtree(looks)

    def under_allranks(self, situation: Situation, *, planted: bool) -> tuple[dict[str, Any], Ran]:
        """What `allranks run --json` says about a situation."""
        runs = str(self.folder / "runs" / situation.name)
        words = ["run", "--json", "--runs", runs, "--layout", f"1x{situation.ranks}", "--"]
        script = [sys.executable, "train.py", *situation.args.split()]
        command = [sys.executable, "-m", "allranks", *words, *script]
        ran = self.run(situation, command, planted=planted)
        lines = [line for line in ran.output.splitlines() if line.startswith("{")]
        return json.loads(lines[-1]) if lines else {}, ran

    def bare(self, situation: Situation, env: Mapping[str, str] = {}) -> Ran:
        """The script alone: its ranks, as torchrun would start them."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        world = {"WORLD_SIZE": str(situation.ranks), "TORCHELASTIC_RUN_ID": "none", **env}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [
            {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(situation.ranks)
        ]
        command = [sys.executable, "train.py", *situation.args.split()]
        return self.run(situation, command, ranks=ranks)

    def under_traceml(self, situation: Situation) -> dict[str, Any]:
        """What TraceML says about a situation."""
        assert self.traceml
        logs = Path(tempfile.mkdtemp(prefix="traceml-"))
        command = [
            *(self.traceml, "-c", "from traceml_ai.launcher.cli import main; main()"),
            *("run", "train_traceml.py", "--mode", "summary"),
            *("--logs-dir", str(logs), "--run-name", "run"),
            *("--nproc-per-node", str(situation.ranks), "--args", *situation.args.split()),
        ]
        with self.turn.open("w") as turn:  # from its start: it also looks at the machine
            fcntl.flock(turn, fcntl.LOCK_EX)
            ran = self.run(situation, command, has_turn=True)
        summary = logs / "run" / "final_summary.json"
        if not summary.is_file():
            return {"kind": f"no summary, exit code {ran.code}", "rank": None, "seconds": None}
        said = json.loads(summary.read_text())
        shutil.rmtree(logs)
        names = ("step_time", "step_memory", "system", "process")
        sections = [said[name].get("diagnosis") or {} for name in names]
        warned = [one["kind"] for one in sections if one.get("severity") in {"warn", "crit"}]
        return {
            "kind": said["primary_diagnosis"]["kind"],
            "rank": (sections[0].get("evidence") or {}).get("culprit_rank"),
            "seconds": ran.step_seconds,
            # A CPU that trains is busy.
            "warnings": [kind for kind in warned if not kind.endswith("_CPU") or situation.gpu],
        }

    def row(self, situation: Situation, *, judge_again: bool) -> Row:
        """The result of a situation, or what an earlier command has kept of it."""
        kept = self.folder / f"{situation.name}.json"
        if situation in WRITTEN:
            return self.write(situation)
        if self.quick:
            return self.play(situation)
        if not kept.is_file():
            row = self.play(situation)
            saved = {**vars(row), "situation": situation.name, "lines": sorted(row.lines)}
            kept.write_text(json.dumps(saved))
            return row
        row = Row(**{**json.loads(kept.read_text()), "situation": situation})
        if judge_again and row.run_dir:
            row.answer = judge(RunDir(Path(row.run_dir))).as_json()
        return row

    def play(self, situation: Situation) -> Row:
        """Run a situation in all its variants."""
        folder = self.folder / situation.name
        folder.mkdir(parents=True, exist_ok=True)
        source, lines = planted_source(situation)
        (folder / "train.py").write_text(source)
        (folder / "train_traceml.py").write_text(with_traceml(source))
        answer, ran = self.under_allranks(situation, planted=True)
        row = Row(situation=situation, answer=answer, lines=lines, planted=ran.step_seconds)
        row.run_dir = answer.get("run_dir", "")
        if ran.code or "verdict" not in answer:
            row.problem = f"exit code {ran.code}: {ran.output[-300:]}"
        if self.quick:
            return row
        if row.is_gain_right is not None:
            row.removed = self.under_allranks(situation, planted=False)[1].step_seconds
        row.bare = self.bare(situation).step_seconds
        if self.traceml:
            row.traceml = self.under_traceml(situation)
        if situation.gpu and situation.is_healthy:
            trace = folder / "busy.json"
            self.bare(situation, {OUTSIDE_TRACE: str(trace)})
            row.busy = json.loads(trace.read_text()) if trace.is_file() else None
        return row

    def write(self, situation: Situation) -> Row:
        """The result of a situation whose events are made up, not measured."""
        runs = Path(tempfile.mkdtemp(dir=self.folder))
        run = write_run(runs, situation.name, WRITTEN[situation])
        return Row(situation=situation, answer=judge(run).as_json(), run_dir=str(run.path))


def table(rows: Sequence[Row]) -> str:
    """All rows as a Markdown table."""
    head = (
        "| situation | ranks | limited by | allranks | line | gain | without it |"
        " bare / allranks / TraceML, ms | warnings | TraceML |"
    )
    return "\n".join([head, "|" + "---|" * 10, *(table_row(row) for row in rows)])


def table_row(row: Row) -> str:
    expected, said = row.situation, row.verdict
    mark = "right" if row.is_right else "SURELY WRONG" if said["sure"] else "WRONG"
    rank = f" rank {said['rank']}" if said.get("rank") is not None else ""
    share = f" {said['share']:.0%}" if said.get("share") is not None else ""
    line = {None: "", True: said.get("line") or "named", False: f"NOT NAMED ({said.get('line')})"}
    gain = f"{said['gain']:.2f}x" if said.get("gain") else ""
    off = f"{row.gain_off:.2f}" if row.gain_off is not None else "-"
    held = {None: "", True: off, False: f"{off} DOES NOT HOLD"}[row.is_gain_right]
    held = held if row.removed else ""
    steps = (row.bare, row.planted, row.traceml.get("seconds"))
    times = " / ".join(f"{1e3 * one:.1f}" if one else "-" for one in steps)
    peer = {None: "", True: "right", False: "wrong"}[row.is_traceml_right]
    peer_words = ", ".join([row.traceml.get("kind", ""), *row.traceml.get("warnings", [])])
    cells = [
        expected.name,
        str(expected.ranks),
        expected.limit + (f" rank {expected.rank}" if expected.rank is not None else ""),
        f"{mark}: {said['limit']}{rank}{share}{', sure' if said['sure'] else ''}",
        line[row.is_named],
        gain,
        held,
        "written" if expected in WRITTEN else times,
        ", ".join(row.warnings) + (f"; {row.busy:.0%} busy" if row.busy is not None else ""),
        f"{peer}: {peer_words}" if peer else "",
    ]
    return "| " + " | ".join(cells) + " |"


def totals(rows: Sequence[Row]) -> tuple[list[str], bool]:
    """What was claimed, and whether all of it holds."""
    named = [row.is_named for row in rows if row.is_named is not None]
    gains = [row.is_gain_right for row in rows if row.removed and row.is_gain_right is not None]
    right = [row.is_right for row in rows]
    surely_wrong = sum(row.is_surely_wrong for row in rows)
    warned = sum(len(row.warnings) for row in rows if row.situation.is_healthy)
    idle = [row.situation.name for row in rows if row.busy is not None and row.busy < MIN_BUSY]
    claims = [
        (f"right              {share(right)}, at least {MIN_RIGHT:.0%}", is_met(right, MIN_RIGHT)),
        (f"surely wrong       {surely_wrong}, none allowed", not surely_wrong),
        (f"false warnings     {warned} on healthy loops, none allowed", not warned),
        (f"lines named        {share(named)}, at least {MIN_NAMED:.0%}", is_met(named, MIN_NAMED)),
        (f"gains that hold    {share(gains)}, at least {MIN_GAINS:.0%}", is_met(gains, MIN_GAINS)),
    ]
    words = [f"{words}: {'holds' if met else 'DOES NOT HOLD'}" for words, met in claims]
    if idle:
        words.append(f"not healthy, by a trace from outside: {', '.join(idle)}")
    peers = [row for row in rows if row.is_traceml_right is not None]
    if peers:
        peer_right = [bool(row.is_traceml_right) for row in peers]
        own_right = [row.is_right for row in peers]
        healthy = [row for row in peers if row.situation.is_healthy]
        alarms = sum(len(row.traceml.get("warnings", [])) for row in healthy)
        words += [
            f"TraceML            right {share(peer_right)} (allranks: {share(own_right)});"
            f" {alarms} warnings on healthy loops",
            "cost, median       allranks "
            + cost([(row.planted, row.bare) for row in peers])
            + ", TraceML "
            + cost([(row.traceml.get("seconds"), row.bare) for row in peers])
            + " of the bare step",
        ]
    return words, all(met for _, met in claims) and not idle


def share(found: Sequence[bool]) -> str:
    return f"{sum(found)}/{len(found)}" + (f" ({sum(found) / len(found):.0%})" if found else "")


def is_met(found: Sequence[bool], least: float) -> bool:
    return not found or sum(found) / len(found) >= least


def cost(pairs: Sequence[tuple[float | None, float | None]]) -> str:
    ratios = [with_it / bare for with_it, bare in pairs if with_it and bare]
    return f"{statistics.median(ratios):.3f}x" if ratios else "-"


def main() -> int:
    options = read_arguments()
    chosen = situations(options)
    traceml = options.traceml
    if not traceml and importlib.util.find_spec("traceml_ai"):
        traceml = sys.executable
    stage = Stage(options.keep, traceml, quick=options.quick)
    print(
        f"{platform.machine()}, {allotted.cpus_allotted()} cores, Python {sys.version.split()[0]}"
    )
    rows = []
    at_once = AT_ONCE if all(situation.gpu for situation in chosen) else 1
    play = partial(stage.row, judge_again=options.judge_again)
    for row in ThreadPoolExecutor(at_once).map(play, chosen):
        rows.append(row)
        print(table_row(row) if len(chosen) > 1 else table([row]), flush=True)
        if not row.is_right or options.verbose:
            print(f"    {json.dumps(row.verdict)}\n    {row.run_dir}", flush=True)
    if len(rows) > 1:
        print(table(rows))
    words, holds = totals(rows)
    print("\n".join(words))
    if not stage.keep:
        shutil.rmtree(stage.folder)
    return 0 if holds else 1


def situations(options: argparse.Namespace) -> list[Situation]:
    """The situations that can run here, or those that were named."""
    every = [*ON_CPU, *ON_16_CORES, *WRITTEN, *ON_GPU]
    if options.only:
        unknown = set(options.only) - {situation.name for situation in every}
        if unknown:
            names = ", ".join(situation.name for situation in every)
            raise SystemExit(f"no situation {', '.join(sorted(unknown))}; there are {names}")
        return [situation for situation in every if situation.name in options.only]
    if options.gpu:
        return ON_GPU
    many = ON_16_CORES if allotted.cpus_allotted() >= 16 else []
    here = [*ON_CPU, *many, *WRITTEN]
    missing = {
        script for script in ("accelerate", "lightning") if importlib.util.find_spec(script) is None
    }
    if missing:
        print(f"not installed, and left out: {', '.join(sorted(missing))}")
    return [one for one in here if one.script.removeprefix("with_") not in missing]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="may be given repeatedly")
    parser.add_argument("--gpu", action="store_true", help="the situations of a GPU")
    parser.add_argument("--quick", action="store_true", help="only the verdicts")
    parser.add_argument("--traceml", metavar="PYTHON", help="of an environment that has TraceML")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep scripts and runs there")
    parser.add_argument(
        "--judge-again", action="store_true", help="what --keep has kept, by today's rules"
    )
    parser.add_argument("--verbose", action="store_true", help="the whole verdict of every run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
