"""Who may train a run: numbered claims, each taken by one SLURM job or one `allranks run`.

A claim is a file `claims/N` that is created by a hard link: on any file system, even a network's,
exactly one of those who try succeeds. The newest claim holds the run. An older holder may still be
alive somewhere (on a node that SLURM lost sight of, on a machine whose locks others do not see),
and must not commit anything any more.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from allranks.errors import AllranksError
from allranks.run import files

FIELDS: dict[str, files.Check] = {
    **dict.fromkeys(("job", "layout", "host", "token"), files.is_text),
    **dict.fromkeys(("number", "restart", "pid"), files.is_count),
    "nodes": files.list_of(files.is_text),
    "time": files.is_time,
}
VARIABLE = "ALLRANKS_CLAIM"  # the number of the claim under which a rank works
WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
LOOK_SECONDS = 5.0  # between a launcher's checks for a newer claim


class NoLinks(AllranksError):
    """The file system has no hard links, so no claim can be taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a holder says about itself. `job` is SLURM's id; empty outside of SLURM."""

    number: int
    job: str = ""
    restart: int = 0  # how many times SLURM has requeued the job
    layout: str = ""
    nodes: tuple[str, ...] = ()
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    time: float = field(default_factory=time.time)
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def is_of_another_machine(self) -> bool:
        return self.host != socket.gethostname()

    @property
    def is_alive_here(self) -> bool:
        """Whether the process that took it runs here, and not another one with its number."""
        if self.is_of_another_machine or self.pid == os.getpid():
            return False
        with suppress(OSError, ValueError, LookupError):
            state, *facts = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            if state in "ZX":  # it has ended, and its parent has not noticed
                return False
            boot = next(
                line for line in Path("/proc/stat").read_text().splitlines() if "btime" in line
            )
            # The kernel gives the time of its boot in whole seconds.
            started = int(boot.split()[1]) + int(facts[18]) / os.sysconf("SC_CLK_TCK")
            return started < self.time + 1.5
        return False


def take(folder: Path, claim: Claim) -> bool:
    """Take a claim for this process; False if another one was first. Safe on network disks."""
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f".{claim.number}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
    with own.open("w") as file:
        json.dump(asdict(claim), file)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(own, folder / str(claim.number))
    except FileExistsError:
        # If a server's answer got lost, the system asked again, and found our own link.
        return _read_claim(folder, claim.number).token == claim.token
    except OSError as error:
        if error.errno not in WITHOUT_LINKS:
            raise
        raise NoLinks(
            f"the file system of {folder} has no hard links ({error.strerror}), which jobs need to "
            "agree on who trains a run",
            fix="keep runs on another disk that all nodes see: --runs DIR",
            exit_code=1,
        ) from None
    finally:
        own.unlink()
    return True


def take_next(folder: Path, *, layout: str, run: str) -> int:
    """Take the next claim for this process, outside of SLURM; return its number."""
    claim = Claim(number=next_number(folder), layout=layout)
    if not take(folder, claim):
        raise AllranksError(
            f"another process took run {run} just now", fix=f"see allranks ls {run}"
        )
    return claim.number


def newest(folder: Path) -> Claim | None:
    """The claim of the run's holder, or its last one; None if there never was one."""
    numbers = files.numbers_in(folder)
    return _read_claim(folder, numbers[-1]) if numbers else None


def next_number(folder: Path) -> int:
    """The number of the claim that the next holder has to take."""
    look_anew(folder)
    return max(files.numbers_in(folder), default=-1) + 1


def all_of(folder: Path) -> list[Claim]:
    """Every claim so far, oldest first."""
    return [_read_claim(folder, number) for number in files.numbers_in(folder)]


def raise_if_lost(folder: Path, number: int | None) -> None:
    """Raise if the run has a newer holder than claim `number`; None: it is held without a claim."""
    if number is None:
        return
    look_anew(folder)
    highest = max(files.numbers_in(folder), default=number)
    if highest > number:
        holder = _read_claim(folder, highest)
        who = f"job {holder.job}" if holder.job else f"process {holder.pid}"
        raise AllranksError(
            f"this attempt has lost the run to {who} on {holder.host}: nothing more is committed",
            fix="nothing to do: the newer attempt continues from the last checkpoint",
            exit_code=1,
        )


def own() -> int | None:
    """The number of the claim that this rank works under; None if there is none."""
    number = os.environ.get(VARIABLE)
    return int(number) if number else None


class Watch:
    """A launcher's regular check for a newer holder of its run than claim `number`.

    Only the leading launcher `looks`; in SLURM, launch/backends/slurm/step.py does it for all.
    """

    def __init__(self, folder: Path, number: int | None, *, looks: bool) -> None:
        self._folder = folder
        self._number = number if looks else None
        self._next_look = 0.0

    def is_lost(self) -> bool:
        """Whether there is a newer holder, as far as is known by now."""
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + LOOK_SECONDS
        try:
            self.raise_if_lost()
        except AllranksError:
            return True
        except OSError:  # the disk does not answer: that says nothing about the claim
            return False
        return False

    def raise_if_lost(self) -> None:
        raise_if_lost(self._folder, self._number)


@contextmanager
def locked(folder: Path, number: int) -> Iterator[None]:
    """Show that the claim's holder is alive, as long as this process is."""
    descriptor = os.open(folder / str(number), os.O_RDWR | os.O_CLOEXEC)
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Lock a file for this process; False if another one has it.

    Also True if the file system has no locks: then only SLURM knows who is alive.
    """
    times_held = 0
    for _ in range(500):  # readers hold it for a moment, which can be long on a busy machine
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            times_held += not _is_only_looked_at(descriptor)
        except OSError:
            return True
        if times_held == 20:
            break
        time.sleep(0.02)
    return False


def _is_only_looked_at(descriptor: int) -> bool:
    """Whether those who have the lock share it, as readers do and a holder does not."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def _read_claim(folder: Path, number: int) -> Claim:
    said = files.read_mapping(folder / str(number), FIELDS)
    said = {name: value for name, value in said.items() if name in FIELDS}
    unknown = {"host": "an unknown machine", "pid": 0, "time": 0.0, "token": ""}
    return Claim(**{**unknown, **said, "nodes": tuple(said.get("nodes", ())), "number": number})


def look_anew(folder: Path) -> None:
    """Make a network file system read the folder again: a change to it empties its cache."""
    probe = folder / f".look.{socket.gethostname()}.{os.getpid()}"
    with suppress(OSError):  # there is no folder yet, or it is read-only
        probe.touch()
        probe.unlink(missing_ok=True)
