"""One collective in one group of ranks, from the smallest size up: checked, then timed."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from allranks.bench import comm
from allranks.bench.comm_ops import Operation, make_operation, time_calls
from allranks.bench.comm_world import World, highest, of_every_rank
from allranks.errors import AllranksError
from allranks.show.numbers import size as num_bytes

FEWEST_CALLS = 5
ROUNDS = 10  # after each of which the ranks look at the clock
FEWEST_CALLS_A_ROUND = 20  # so that what comes between the rounds does not show in a median
MOST_CALLS = 2000
SECONDS_PER_SIZE = 2.0
SHARE_BY_CHOICE = 0.4  # of a series' time; the rest is for sizes whose fewest calls take longer
LACKING = r"not support|unsupported|not implemented|no support"


@dataclass(slots=True)
class Budget:
    """Seconds for everything, shared out evenly over the series that are still to come."""

    seconds: float
    series: int
    _begun: float = field(default_factory=time.monotonic)

    def share(self) -> float:
        """For the next series, whose turn it is. Collective: all go by the slowest clock."""
        spent = highest(time.monotonic() - self._begun)[0]
        self.series -= 1
        return max(0.0, self.seconds - spent) / max(1, self.series + 1)


@dataclass(slots=True)
class Series:
    """One collective in one scope, from the smallest size up."""

    world: World
    scope: comm.Scope
    collective: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    lacking: str | None = None  # what the library says if it has no such collective
    stopped: str | None = None  # why the largest sizes are missing
    _cost: float = 0.0  # seconds of the fewest calls of the last size, with its check

    def measure(self, sizes: Sequence[int], memory_bytes: float, seconds: float) -> None:
        """Add to `rows` the sizes that are not there, as far as memory and time go. Collective."""
        ranks = self.world.members(self.scope)
        limit = comm.largest_fitting(self.collective, ranks, memory_bytes)
        counted = {comm.counted_bytes(self.collective, size, ranks): None for size in sizes}
        wanted = [size for size in counted if size > 0]
        fitting = [size for size in wanted if size <= limit]
        self.stopped = "memory" if len(fitting) < len(wanted) else None
        begun = time.monotonic()
        for number in range(len(self.rows), len(fitting)):
            size = fitting[number]
            spent = highest(time.monotonic() - begun)[0]
            growth = size / fitting[number - 1] if number else 1.0
            if number and spent + self._cost * growth > seconds:
                self.stopped = "time"
                return
            target = min(SECONDS_PER_SIZE, SHARE_BY_CHOICE * seconds / len(fitting))
            self._cost = self._measure_size(size, target)
            if self.lacking:
                return

    def _measure_size(self, size: int, seconds: float) -> float:
        """Add a row; what the fewest calls and the check took here, on the slowest rank."""
        peers, device = self.world.scopes[self.scope], self.world.device
        begun = time.monotonic()
        operation = make_operation(self.collective, size, peers, device) if peers else None
        self._check(operation, size)
        if self.lacking:
            return 0.0
        once = sum(time_calls(operation.run, 1, device)) if operation else 0.0
        fixed, once = highest(time.monotonic() - begun, once)
        if seconds / once > 20:  # one call alone says little of how long a short one takes
            once = sum(time_calls(operation.run, 10, device)) / 10 if operation else 0.0
            once = highest(once)[0]
        times = self._time(operation, max(FEWEST_CALLS, int(seconds / once)), seconds)
        median = comm.quantile(times, 0.5) if operation else 0.0
        p99 = comm.quantile(times, 0.99) if operation else 0.0
        count = int(highest(len(times))[0])
        self._add_row(size, count, of_every_rank(median, p99))
        return fixed + FEWEST_CALLS * once

    def _time(self, operation: Operation | None, wanted: int, seconds: float) -> list[float]:
        """Seconds of about so many calls: fewer if the machine is slower than it seemed."""
        count = min(wanted, MOST_CALLS)
        rounds = max(1, min(ROUNDS, count // FEWEST_CALLS_A_ROUND))
        times: list[float] = []
        begun = time.monotonic()
        for _ in range(rounds):
            if operation:
                times += time_calls(operation.run, count // rounds, self.world.device)
            if highest(time.monotonic() - begun)[0] > seconds:
                break
        return times

    def _check(self, operation: Operation | None, size: int) -> None:
        """One call, whose result must be right on every rank. Collective."""
        lacking, is_wrong = "", False
        if operation:
            operation.fill()
            try:
                operation.run()
                is_wrong = not operation.is_right()
                operation.clear()
            except (RuntimeError, NotImplementedError) as error:
                lacking = str(error).splitlines()[0]
                if self.rows or not re.search(LACKING, lacking, re.IGNORECASE):
                    raise
        flags = of_every_rank(float(bool(lacking)), float(is_wrong))
        if any(flag[0] for flag in flags):
            self.lacking = lacking or f"{self.world.library} does not have it"
            return
        wrong = [rank for rank, flag in enumerate(flags) if flag[1]]
        if wrong:
            raise wrong_result(self.collective, size, self.world.members(self.scope), wrong)

    def _add_row(self, size: int, count: int, times: list[list[float]]) -> None:
        """`times`: median and p99 of every rank of the world."""
        ranks = self.world.members(self.scope)
        step = self.world.per_node if self.scope == "nodes" else 1
        members = times[::step]  # every node has its own group where the scope is the node
        groups = [members[at : at + ranks] for at in range(0, len(members), ranks)]
        medians = [comm.over_ranks(self.collective, [m for m, _ in group]) for group in groups]
        slowest = medians.index(max(medians))
        p99 = max(p99 for _, p99 in groups[slowest])
        found = comm.row(self.collective, size, ranks, self.scope, median=medians[slowest], p99=p99)
        found["iterations"] = count
        if len(groups) > 1:
            found["node_median_us"] = [round(median * 1e6, 3) for median in medians]
        self.rows.append(found)


class WrongResult(AllranksError):
    """A collective that does not compute what it should; `ranks` have it in their memory."""

    ranks: list[int]


def wrong_result(collective: str, size: int, members: int, wrong: list[int]) -> WrongResult:
    names = ", ".join(str(rank) for rank in wrong)
    noun = "rank" if len(wrong) == 1 else "ranks"
    error = WrongResult(
        f"{collective} of {num_bytes(size)} over {members} ranks gave a wrong result on "
        f"{noun} {names}",
        fix="measure again; if it is wrong again, train nothing there: a link, a driver or the "
        "memory of that rank's node is at fault",
        exit_code=1,
    )
    error.ranks = wrong
    return error
