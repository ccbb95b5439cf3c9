"""Which runs a report is of where none, or only a word for several, was named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.run.folder import RunDir, find_run, find_runs, list_runs
from allranks.timing.comparison import bench_of, is_comparable, is_compared


def chosen_runs(runs: Path, references: Sequence[str]) -> tuple[list[RunDir], str | None]:
    """The runs to compare, newest first, and in words which they are where that was not typed."""
    if references:
        return named_runs(runs, references)
    known = [one for one in list_runs(runs) if one.job_file.exists()]
    infos = {one.name: one.info() for one in known}
    newest = next((one for one in known if is_comparable(infos[one.name])), None)
    if newest is None:
        find_run(runs, "last")  # says so, if there is none at all
        raise nothing_to_compare(runs, [bench_of(info) for info in infos.values()])
    mine = infos[newest.name]
    those = [
        one
        for one in known
        if one.job_name == newest.job_name and is_compared(mine, infos[one.name])
    ]
    others = [one.job_name for one in known if is_comparable(infos[one.name])]
    is_bench = bool(bench_of(mine))
    return those, chosen_words(newest.job_name, len(those), is_bench=is_bench, jobs=others)


def named_runs(runs: Path, references: Sequence[str]) -> tuple[list[RunDir], str | None]:
    """Every run that was named; of several that one word stands for, those that train."""
    named: dict[Path, RunDir] = {}
    num_left = 0
    for reference in references:
        found = find_runs(runs, reference)
        those = [one for one in found if is_comparable(one.info())] or found
        num_left += len(found) - len(those)
        named |= {one.path: one for one in those}
    ordered = sorted(named.values(), key=lambda one: one.info().get("created", 0.0), reverse=True)
    if not num_left:
        return ordered, None
    what, are = ("run", "is") if num_left == 1 else ("runs", "are")
    return ordered, f"{num_left} {what} of other benchmarks than bench scaling {are} left out."


def chosen_words(job: str, number: int, *, is_bench: bool, jobs: Sequence[str]) -> str:
    """Which runs are compared where none was named, and how to compare others."""
    count = f"{number} run{'s' if number > 1 else ''}"
    if is_bench:
        more = f"; all of {job}: allranks report {job}" if jobs.count(job) > number else ""
        words = f"Compared: the {count} of the newest bench scaling, of {job}{more}."
    else:
        words = f"Compared: the {count} of {job}, the newest job."
    others = [name for name in dict.fromkeys(jobs) if name != job]
    if others:
        names = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        words += f" Other jobs: {names} (allranks report NAME)."
    return words


def nothing_to_compare(runs: Path, benches: Sequence[Mapping[str, Any]]) -> AllranksError:
    kinds = " and ".join(sorted({f"bench {bench.get('kind')}" for bench in benches}))
    what = f"what is there is of {kinds}" if kinds else "none has the job.yaml of a run"
    return AllranksError(
        f"no run in {runs} is there to be compared: {what}",
        fix="measure layouts: allranks bench scaling job.yaml; or name runs: allranks report RUN",
    )
