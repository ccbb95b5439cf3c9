"""After a failure on several nodes: which of them have the path that a rank did not find.

One short srun step finds out, since disks that are thought to be shared may not be.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from allranks.launch.backends.slurm.inside import SlurmNodes, srun, step_environment
from allranks.machine.processes import output_of
from allranks.run.failures import missing_path
from allranks.run.folder import RunDir
from allranks.run.logs import tail
from allranks.run.record import RankRecord, read_ends

LOOK_SECONDS = 30.0
MOST_RANKS = 64  # whose last words are read
LOOK = 'for path; do [ -e "$path" ]; echo "$? $SLURMD_NODENAME $path"; done'


def look_for_missing(
    run: RunDir, attempt: int, place: SlurmNodes, said: Iterable[str]
) -> dict[str, Any] | None:
    """The missing path that a run failed for, and the nodes that have it; None if there is none.

    `said`: srun's last lines.
    """
    cwd = run.info().get("cwd", os.getcwd())
    path = path_of_failure(run, attempt) or missing_path(said)
    if path is None or len(place.nodes) < 2:
        return None
    wanted = [cwd, os.path.normpath(os.path.join(cwd, path))]
    nodes = ask_nodes(place, wanted)
    # If the folder is missing, so is everything named relative to it: then that is the reason.
    for one in wanted:
        has_it = nodes.get(one, {})
        if not all(has_it.values()):
            return {
                "attempt": attempt,
                "path": one,
                "on": [node for node, has in has_it.items() if has],
                "not_on": [node for node, has in has_it.items() if not has],
            }
    return None


def path_of_failure(run: RunDir, attempt: int) -> str | None:
    """The path that the first rank to fail for a missing file did not find."""
    failed = []
    for rank in run.ranks(attempt)[:MOST_RANKS]:
        end = run.end(attempt, rank)
        if end is not None and end["state"] == "failed":
            failed.append((end["t"], rank))
    for _, rank in sorted(failed):
        words = said_by(read_ends(run, attempt, rank))
        path = missing_path(words) or missing_path(tail(run.log(attempt, rank)))
        if path is not None:
            return path
    return None


def said_by(record: RankRecord) -> list[str]:
    """What a rank says about the error that ended it."""
    errors = [f"{event['type']}: {event['message']}" for event in record.others["error"]]
    return [*errors, str(((record.end or {}).get("error") or {}).get("what", ""))]


def ask_nodes(place: SlurmNodes, paths: Sequence[str]) -> dict[str, dict[str, bool]]:
    """For each path, whether each node has it; empty where they do not answer in time."""
    step = srun(place, tasks_per_node=1, ends_together=False)
    command = [*step, "--overlap", "--chdir=/", "sh", "-c", LOOK, "sh", *paths]
    printed = output_of(command, LOOK_SECONDS, step_environment(os.environ)) or ""
    answers: dict[str, dict[str, bool]] = {}
    for line in printed.splitlines():
        code, node, path = [*line.split(" ", 2), "", ""][:3]
        if node in place.nodes and path in paths:
            answers.setdefault(path, {})[node] = code == "0"
    # Unless every node has answered, it is not known where the path is.
    return {
        path: {node: nodes[node] for node in place.nodes}
        for path, nodes in answers.items()
        if len(nodes) == len(place.nodes)
    }
