"""How often the doctor's first finding is the true cause, on a folder of logs with known causes.

    python benchmarks/doctor_score.py FOLDER            # FOLDER/ID.log and FOLDER/index.csv
    python benchmarks/doctor_score.py FOLDER --verbose  # and each log that was missed

The index has the columns id, slugs, cause, fix, culprit. A log's first finding must be one of its
`slugs` (`none`: there must be no finding). The culprit is scored if the index names one rank, as
"rank 2" or "(1)".
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from pathlib import Path

from allranks.doctor.diagnose import diagnose_logs


def rank_named(culprit: str) -> int | None:
    """The one rank that an index's words blame; None if they name none or several."""
    ranks = re.findall(r"(?:rank|task) (\d+)(?! (?:line|shown))|\((\d+)\)", culprit)
    numbers = {int(one or other) for one, other in ranks}
    if "ranks " in culprit or "reported by" in culprit or "each" in culprit:
        return None
    return numbers.pop() if len(numbers) == 1 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    total = right = culprits = right_culprits = wrong_high = 0
    with (options.folder / "index.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        accepted = row["slugs"].split("|")
        found = diagnose_logs([options.folder / f"{row['id']}.log"])
        first = found[0] if found else None
        is_right = (first.cause if first else "none") in accepted
        total, right = total + 1, right + is_right
        wrong_high += not is_right and first is not None and first.confidence == "high"
        rank = rank_named(row["culprit"])
        is_culprit = rank is None or (first is not None and first.rank == rank)
        if rank is not None:
            culprits, right_culprits = culprits + 1, right_culprits + is_culprit
        if options.verbose and not (is_right and is_culprit and (not first or first.rank == rank)):
            said = f"{first.cause} rank {first.rank} {first.confidence}" if first else "nothing"
            print(f"{row['id']}: {said}; accepted {row['slugs']}, culprit {row['culprit']!r}")
    print(f"first cause right      {right}/{total} ({100 * right / total:.1f}%)")
    print(f"culprit rank right     {right_culprits}/{culprits}")
    print(f"wrong at high          {wrong_high}/{total} ({100 * wrong_high / total:.1f}%)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
