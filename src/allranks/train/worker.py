"""The entry point of a task's rank: `python -m allranks.train.worker`.

allranks.launch.rank_env starts it with stop signals blocked.
"""

from __future__ import annotations

import os

from allranks.machine.processes import quick_imports
from allranks.train import signals


def main() -> None:
    signals.listen()  # first: importing torch takes seconds, and a stop must not be lost
    with quick_imports():
        from allranks.train import rank

    if os.environ.get("ALLRANKS_BENCH_DATA"):
        from allranks.train import feed_bench

        rank.run(feed_bench.measure)
    else:
        rank.run(rank.train_task)


if __name__ == "__main__":
    main()
