"""Makes sure that only one process records a rank: a second one is a second training."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO

from allranks.run.events import append_event, read_events, to_json
from allranks.run.folder import TWICE, write_atomically

STARTED_AS = "ALLRANKS_RANK"  # the rank that the launcher started, whatever that rank then starts
EARLY_BYTES = 1 << 16
MOST_PARENTS = 100


def claim_rank(path: Path, rank: int) -> IO[bytes]:
    """Open and lock the rank's file, to keep other processes out for as long as it is open.

    Raises RuntimeError if another process has recorded the rank. The launcher then ends the run,
    unless that process started this one, say for an evaluation that trains something small.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    own = {"pid": os.getpid(), "host": socket.gethostname(), "of": os.environ.get(STARTED_AS)}
    is_free = True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_free = False
    except OSError:
        pass  # a disk without locks
    if is_free:
        append_event(path, "recorder", **own)
    before = [*read_events(path, EARLY_BYTES, kind="recorder")]
    others = [one for one in before if (one["pid"], one["host"]) != (own["pid"], own["host"])]
    # A script may train several things in sequence, each in its own process.
    if is_free and all(one["of"] == own["of"] for one in others):
        return file
    file.close()
    if not any(one["host"] == own["host"] and one["pid"] in ancestors() for one in others):
        write_atomically(path.parent / TWICE, to_json({"rank": rank, **own}))
    raise RuntimeError(f"another process already records rank {rank}")


def ancestors() -> list[int]:
    """The ids of this process's ancestors, as far as the system shows them."""
    found = [os.getppid()]
    with suppress(OSError, ValueError, IndexError):
        while found[-1] > 1 and len(found) < MOST_PARENTS:
            stat = Path(f"/proc/{found[-1]}/stat").read_text()
            found.append(int(stat.rpartition(")")[2].split()[1]))
    return found
