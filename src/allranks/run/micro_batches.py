"""How many micro-batches a rank's share of a batch is cut into, so that it fits in memory.

It is kept in the run's folder, where the next attempt and the launcher read it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from allranks.run.files import read_bytes
from allranks.run.folder import RunDir, write_atomically

FILE = "micro_batches.json"


def counts_for(share: int) -> list[int]:
    """The numbers of micro-batches that are worth trying: the smallest for each size."""
    return sorted({-(-share // size) for size in range(1, share + 1)})


@dataclass(slots=True, kw_only=True)
class Search:
    """Searches the smallest number of micro-batches that fits: doubling, then bisection."""

    about: str  # what it holds for: the layout, the batch, the device
    counts: Sequence[int]  # that are possible, in ascending order
    guess: int = 0  # to be tried first; 0: nothing is known
    too_few: int = 0  # the most that are known not to fit
    enough: int | None = None  # the least that are known to fit

    @property
    def next(self) -> int | None:
        """What to try; None if the search is over: `enough` is found, or nothing fits."""
        if self.too_few < self.guess and self.enough is None:
            return self.guess
        between = [n for n in self.counts if self.too_few < n < (self.enough or n + 1)]
        if between and self.enough is None:
            return next((n for n in between if n >= 2 * self.too_few), between[-1])
        return between[len(between) // 2] if between else None

    def tried(self, count: int, *, fits: bool) -> None:
        """Take the result of a trial. A guess that fits is the answer: it was found before."""
        if not fits:
            self.too_few = count
        else:
            self.enough = count
            self.too_few = count - 1 if count == self.guess else self.too_few

    def ran_out(self, count: int) -> int | None:
        """What to train with after `count` were too few in training; None if nothing is left.

        Half the size, without a search: trials had not shown that this many are too few.
        """
        more = [n for n in self.counts if n > count]
        if not more:
            return None
        self.enough = next((n for n in more if n >= 2 * count), more[-1])
        self.too_few = self.enough - 1
        return self.enough

    def keep(self, run: RunDir, ended: int | None = None) -> None:
        """Write what is known; `ended`: the attempt that ends, to go on with more of them."""
        known = {"about": self.about, "too_few": self.too_few, "enough": self.enough}
        write_atomically(run.path / FILE, json.dumps({**known, "ended": ended}) + "\n")

    def resume(self, run: RunDir) -> None:
        """Take over what earlier attempts found, if it was about the same thing."""
        kept = _read(run)
        if kept.get("about") == self.about:
            with suppress(KeyError, TypeError, ValueError):
                enough = kept["enough"]
                known = int(kept["too_few"]), None if enough is None else int(enough)
                self.too_few, self.enough = known


def goes_on(run: RunDir, attempt: int) -> bool:
    """Whether an attempt has ended only to be continued with smaller micro-batches."""
    run.look_anew()
    return _read(run).get("ended") == attempt


def _read(run: RunDir) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_bytes(run.path / FILE))
        return found if isinstance(found, dict) else {}
    return {}
