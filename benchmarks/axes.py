"""Every layout computes what one rank computes, and goes on from the checkpoints of every other.

    python benchmarks/axes.py                                  # exit code 1 if one does not
    python benchmarks/axes.py --only equality --layouts 1x1,1x2:tp=2      # a quick look

Equality: all layouts of 1, 2 and 4 ranks, and a sample of 8, train a small language model for 100
steps. Its embeddings are tied, gradients are clipped and accumulated, the last batch of an epoch
is smaller, and each epoch ends with an evaluation. Every loss and evaluation is compared with that
of one rank: in fp32 with the default optimizer within 1e-5, in float64 with weighted samples within
1e-10. In fp16, where the first of 40 steps overflow and all ranks must skip them together, it is
compared with as many ranks of dp, within 5e-3. Norms of gradients are compared, too: a tenth as
strictly, as they have more of the weights' rounding where the loss is steep.

Checkpoints: a run that is saved on one layout goes on on another. What it reads is what was saved,
to the bit; each rank reads what it holds and no more; and the losses are those of a run on one rank
that was never stopped, within 1e-5.

Ranks are processes over gloo; there may be more of them than cores. A table has the largest
relative differences; in equality: of losses and evaluations, and of norms.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.moving import CHAIN, STEPS, Moving  # noqa: E402
from tests.training import CASES, LAYOUTS, Case, Trainings, difference  # noqa: E402

from allranks.layout import split_layouts  # noqa: E402

LIMIT = 1e-5  # of a run that goes on


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="only these")
    parser.add_argument("--only", choices=["equality", "checkpoints"])
    parser.add_argument("--steps", type=int, default=100, help="of each training in equality")
    options = parser.parse_args()
    layouts = split_layouts(options.layouts, "--layouts")
    failures: list[str] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "checkpoints":
            failures += equality(layouts, Path(folder), options.steps)
        if options.only != "equality":
            failures += checkpoints(layouts, Path(folder))
    print(*failures, sep="\n")
    verdict = f"{len(failures)} do not hold" if failures else "holds"
    print(f"{verdict} ({(time.monotonic() - began) / 60:.0f} min)")
    return 1 if failures else 0


def equality(layouts: Iterable[str], folder: Path, steps: int) -> list[str]:
    print(f"largest relative difference from one rank over {steps} steps")
    print("".ljust(22) + "".join(f"{name} (<{CASES[name].rel:g})".ljust(20) for name in CASES))
    failures: list[str] = []
    trainings = Trainings(folder)

    def compared(case: Case, layout: str) -> str:
        apart = trainings.compare(case, layout, steps)
        norms = f", {apart['norms']:.0e}" if apart["norms"] else ""
        return f"{max(apart['losses'], apart['metrics']):.0e}{norms}"

    for layout in layouts:
        print(layout.ljust(22), end="", flush=True)
        for name, case in CASES.items():
            seen = tried(partial(compared, case, layout), f"{layout}, {name}", failures)
            print(seen.ljust(20), end="", flush=True)
        print()
    print()
    return failures


def checkpoints(layouts: list[str], folder: Path) -> list[str]:
    """All pairs, and a chain over more."""
    failures: list[str] = []
    one = Moving(folder / "one").go_on("1x1", len(CHAIN) * STEPS).losses

    def compared(run: Moving) -> str:
        found = difference(run.losses, one[: len(run.losses)])
        assert found <= LIMIT, f"losses are off by {found}"
        return f"{found:.0e}"

    def moves(first: str, *others: str) -> str:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            run = saved[first].copy(Path(own, "run"))
            for layout in others:
                run.go_on(layout)
            return compared(run)

    saved = {}
    for layout in layouts:
        saved[layout] = Moving(folder / layout.replace(":", "-")).go_on(layout)
        compared(saved[layout])
    columns = [chr(ord("A") + number) for number in range(len(layouts))]
    print(f"saved on (down), gone on on (across): largest difference of {2 * STEPS} losses")
    print("".ljust(24) + "".join(column.ljust(8) for column in columns))
    for column, first in zip(columns, layouts, strict=True):
        print(f"{column} {first}".ljust(24), end="", flush=True)
        for other in layouts:
            seen = tried(partial(moves, first, other), f"{first} -> {other}", failures)
            print(seen.ljust(8), end="", flush=True)
        print()
    if set(CHAIN) <= set(layouts):
        print(" -> ".join(CHAIN), tried(partial(moves, *CHAIN), " -> ".join(CHAIN), failures))
    print()
    return failures


def tried(measure: Callable[[], str], what: str, failures: list[str]) -> str:
    """A cell of a table."""
    try:
        return measure()
    except AssertionError as error:
        failures.append(f"{what}: {error}")
        return "FAILS"


if __name__ == "__main__":
    sys.exit(main())
