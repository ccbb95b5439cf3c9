"""Where a rank of a native task begins: `python -m allranks.train.worker`.

Started by allranks.launch.rank_env, with stop signals blocked.
"""

from __future__ import annotations

import os

from allranks.train import signals


def main() -> None:
    signals.listen()  # before the seconds that importing torch takes: a stop must not be lost
    if os.environ.get("ALLRANKS_BENCH_DATA"):
        from allranks.train import feed_bench

        feed_bench.run()
        return
    from allranks.train import rank

    rank.run()


if __name__ == "__main__":
    main()
