"""What changed since the last run of the same job, with the same layout and device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from allranks.run import files
from allranks.run.folder import NAME, RunDir
from allranks.show.numbers import count, percent
from allranks.timing.comparison import bench_of, device_name

MOST_LOOKED_AT = 20  # of the job's newest runs: each run.json has to be read


@dataclass(frozen=True, slots=True)
class Earlier:
    """What was concluded about an earlier run."""

    run: str
    limit: str
    share: float
    pace: float | None  # samples/s

    def until(self, shares: Mapping[str, float], pace: float | None) -> dict[str, Any]:
        """What has changed since then, as JSON and in words."""
        job, _, code = self.run.rpartition("-")
        match = NAME.fullmatch(self.run)
        name = f"{match['job'] if match else job}-...-{code}"
        now = percent(shares.get(self.limit, 0.0), 0)
        text = f"{name}: {self.limit} {percent(self.share, 0)} -> {now}"
        if self.pace and pace:
            text += f", {count(self.pace)} -> {count(pace)} samples/s"
        return {
            "run": self.run,
            "limit": self.limit,
            "share": self.share,
            "samples_per_second": self.pace,
            "text": text,
        }


def comparable_before(run: RunDir) -> Iterator[RunDir]:
    """Earlier runs of the same job, layout and device that have ended, the newest first.

    Cheap even in a folder of many runs, since their names say the job and the time.
    """
    info, own = run.info(), NAME.fullmatch(run.name)
    if own is None or bench_of(info):
        return
    names = (NAME.fullmatch(entry.name) for entry in files.entries(run.path.parent))
    before = sorted(
        (match["time"], match.string)
        for match in names
        if match and match["job"] == own["job"] and match["time"] < own["time"]
    )
    alike = _setting(run, info)
    for _, name in itertools.islice(reversed(before), MOST_LOOKED_AT):
        other = RunDir(run.path.with_name(name))
        is_alike = not bench_of(other.info()) and _setting(other, other.info()) == alike
        if is_alike and other.state() not in ("queued", "running"):
            yield other


def _setting(run: RunDir, info: Mapping[str, Any]) -> tuple[Any, ...]:
    """The layout and the device of a run."""
    attempt = max(run.attempts(), default=0)
    start = run.start(attempt, min(run.ranks(attempt), default=0)) or {}
    return info.get("layout"), device_name(start, info, uses_gpu=False)
