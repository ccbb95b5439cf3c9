"""A run's folder: its paths, run.json and the lock on it, how its ranks ended; finding runs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from allranks.errors import FULL, AllranksError, disk_error
from allranks.run import claims, files
from allranks.run.events import read_events, read_last_events
from allranks.show.text import plain, printable

State = Literal["queued", "running", "finished", "failed", "stopped"]

TWICE = "twice.json"  # written by a second process that wanted to record the same rank

NAME = re.compile(r"(?P<job>.+)-(?P<time>\d{8}-\d{6})-[0-9a-f]{4}", re.ASCII | re.DOTALL)
HEAD_BYTES = 1 << 20  # at the beginning of a rank's events, which contain its start
MAX_TRIES = 100  # to find a name that is free
MAX_SHOWN_PROBLEMS = 3
ODD = "something is wrong with its folder: "


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths in one run's folder, and what its files say."""

    path: Path

    @property
    def name(self) -> str:
        """The name as it is shown and typed."""
        return printable(self.path.name)

    @property
    def job_name(self) -> str:
        match = NAME.fullmatch(self.name)
        return match["job"] if match else self.name

    @property
    def resume_command(self) -> str:
        """What to type to continue the run."""
        return f"allranks resume {self.reference}"

    @property
    def reference(self) -> str:
        """What commands call it: its name if they would find it, otherwise its path."""
        is_here = self.path.parent == Path("runs").absolute()
        return self.name if is_here else printable(str(self.path))

    @property
    def job_file(self) -> Path:
        return self.path / "job.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def claims(self) -> Path:
        return self.path / "claims"

    def attempt(self, number: int) -> Path:
        return self.path / "attempts" / str(number)

    def log(self, attempt: int, rank: int) -> Path:
        return self.attempt(attempt) / f"rank-{rank}.log"

    def events(self, attempt: int, rank: int) -> Path:
        return self.attempt(attempt) / f"rank-{rank}.jsonl"

    def twice(self, attempt: int) -> Path:
        return self.attempt(attempt) / TWICE

    def attempts(self) -> list[int]:
        """Numbers of the attempts made so far, oldest first."""
        found = files.numbers_in(self.path / "attempts")
        while found and not self._has_begun(found[-1]):
            found.pop()
        return found

    def _has_begun(self, attempt: int) -> bool:
        """Whether an attempt has a rank. Asked often, and there may be hundreds."""
        names = (entry.name for entry in files.entries(self.attempt(attempt)))
        return any(name.startswith("rank-") and name.endswith((".jsonl", ".log")) for name in names)

    def ranks(self, attempt: int) -> list[int]:
        """Ranks that wrote events in an attempt."""
        return files.numbers_in(self.attempt(attempt), "rank-", ".jsonl")

    def logs(self, attempt: int) -> list[int]:
        """Ranks that have printed anything in an attempt."""
        return files.numbers_in(self.attempt(attempt), "rank-", ".log")

    def job_logs(self) -> list[Path]:
        """The logs of the jobs that it ran in, besides those of its ranks, the newest last."""
        named = [e for e in files.entries(self.folder) if re.fullmatch(r"[\w-].*\.log", e.name)]
        found = [(e.stat().st_mtime, e.name) for e in named if e.is_file(follow_symlinks=False)]
        return [self.path / name for _, name in sorted(found)]

    @property
    def folder(self) -> Path:
        """Where it really is: the run's folder, or the one around it, may be a link."""
        return Path(os.path.realpath(self.path))

    def info(self) -> dict[str, Any]:
        """The content of run.json, checked; empty if there is none (yet)."""
        return files.read_mapping(self.path / "run.json", files.INFO)

    def job(self) -> dict[str, Any]:
        """The content of job.yaml, checked; empty if there is none that can be read."""
        return files.read_mapping(self.job_file, files.JOB, files.parse_yaml)

    def problem(self) -> str | None:
        """What is wrong with the folder itself, or was left out when it was read, on one line."""
        if not self.path.is_dir():
            return "it is not a folder"
        found = files.odd_entries(self.folder, spared=("checkpoints",))
        attempts = self.attempts()
        if attempts:
            odd = files.odd_entries(self.attempt(attempts[-1]))
            found += [f"attempts/{attempts[-1]}/{one}" for one in odd]
        if not files.is_regular(self.path / "run.json"):
            found.append("it has no run.json")
        found = list(dict.fromkeys([*found, *files.notes_on(self.path)]))
        more = len(found) - MAX_SHOWN_PROBLEMS
        shown = "; ".join(found[:MAX_SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        return f"{ODD}{shown}" if found else None

    def write_info(self, info: dict[str, Any]) -> None:
        write_atomically(self.path / "run.json", json.dumps(info, indent=2) + "\n")

    def update_info(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change run.json, while another process may be changing it too."""
        lock_file = self.path / ".run.json.lock"
        with _opened(lock_file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644) as lock:
            # Without locks in the file system, one of two changes in the same millisecond is lost.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            info, before = self.info(), self._raw_info()
            left_out = {name: before[name] for name in before if name not in info}
            change(info)
            self.write_info({**left_out, **info})

    def _raw_info(self) -> dict[str, Any]:
        """run.json with its wrong values; raises if it cannot be read."""
        path = self.path / "run.json"
        try:
            found = json.loads(files.read_bytes(path))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise AllranksError(
                f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
                fix="repair it, or start a new run",
            ) from None
        return found if isinstance(found, dict) else {}

    def start(self, attempt: int, rank: int = 0) -> dict[str, Any] | None:
        """The start event of a rank, if it got that far."""
        return next(read_events(self.events(attempt, rank), HEAD_BYTES, kind="start"), None)

    def end(self, attempt: int, rank: int) -> dict[str, Any] | None:
        """The end event of a rank, if it has one."""
        return next(reversed(self._last(attempt, rank, "end")), None)

    def errors(self, attempt: int, rank: int) -> list[dict[str, Any]]:
        """The error events of a rank: what ended its processes, as they recorded it."""
        return self._last(attempt, rank, "error")

    def _last(self, attempt: int, rank: int, kind: str) -> list[dict[str, Any]]:
        """Events of a kind that is written near the end of a file."""
        path = self.events(attempt, rank)
        for num_bytes in (1 << 14, 1 << 20):  # an error can be long
            events = read_last_events(path, num_bytes, kind=kind)
            if events or not files.is_regular(path) or path.stat().st_size <= num_bytes:
                break
        return events

    def window(self, attempt: int) -> dict[str, Any] | None:
        """The steps that a benchmark counts, if it got that far: first, last, steady."""
        return next(read_events(self.events(attempt, 0), kind="window"), None)

    def state(self) -> State:
        """The state of the run by its folder alone (SLURM may know better).

        A run that has neither a live process nor an end has failed.
        """
        if self.is_live():
            return "running"
        info = self.info()
        return "queued" if info.get("queued") else self.ended_state()

    def ended_state(self) -> State:
        """The state of a run that is known to have ended."""
        given_up = self.info().get("ended")  # by a launcher or a job, with a reason
        if given_up:
            return given_up["state"]  # type: ignore[no-any-return]  # a State
        attempts = self.attempts()
        if not attempts:
            return "failed"
        ranks = self.ranks(attempts[-1])
        ends = [self.end(attempts[-1], rank) for rank in ranks]
        states = {end["state"] if end else "failed" for end in ends}
        for state in ("failed", "stopped", "finished"):
            if state in states:
                return state
        return "failed"

    def ask_to_stop(self, why: str, jobs: Sequence[str], *, moves: bool = False) -> None:
        """Ask jobs of this run to stop; `moves`: other jobs will continue it."""
        content = {"why": why, "jobs": list(jobs), "moves": moves}
        write_atomically(self.path / "stop.json", json.dumps(content))

    def asked_to_stop(self, job: str) -> dict[str, Any] | None:
        """Why a job was asked to stop, and whether the run moves; None if it was not."""
        content = files.read_mapping(self.path / "stop.json", files.STOP)
        said = {"why": content.get("why", "stops"), "moves": content.get("moves", False)}
        return {**content, **said} if job in content.get("jobs", []) else None

    def is_live(self) -> bool:
        """Whether some process, on this or another machine, holds the run."""
        holder = claims.newest(self.claims)
        files = [self._lock_file, *([self.claims / str(holder.number)] if holder else [])]
        return any(_is_locked(file) for file in files)

    @property
    def is_held(self) -> bool:
        """Whether `allranks run` holds the run, outside of SLURM."""
        return _is_locked(self._lock_file)

    def look_anew(self) -> None:
        """Call this before a decision that depends on files that other machines create."""
        claims.look_anew(self.path)

    def refuse_if_held_unseen(self) -> str | None:
        """Raise if the last holder is alive here without a lock; otherwise, maybe return a remark.

        Some network disks do not show locks to other machines, and some have none.
        """
        holder = claims.newest(self.claims)
        opened = [one["attempt"] for one in self.info().get("attempts", [])]
        last = max([*opened, *self.attempts()], default=0)
        ends = [self.end(last, rank) for rank in self.ranks(last)]
        if holder is None or holder.job or (ends and all(ends)):
            return None
        who = f"process {holder.pid} on {holder.host}"
        if holder.is_alive_here:
            raise self._is_live(who)
        if not holder.is_of_another_machine:
            return None
        return (
            f"this attempt takes the run from {who}, which never recorded how it "
            "ended: if it is still alive, it will stop and commit nothing more"
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the run's only writer; raises if another process is. Even SIGKILL releases it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(self._lock_file, flags, 0o644)
        except OSError as error:
            raise disk_error(error, self._lock_file) from None
        try:
            if not claims.lock(descriptor):
                holder = os.pread(descriptor, 200, 0).decode(errors="replace")
                raise self._is_live(holder or "another process")
            said = f"process {os.getpid()} on {socket.gethostname()}".encode()
            try:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, said, 0)
            except OSError as error:
                raise disk_error(error, self._lock_file) from None
            yield
        finally:
            os.close(descriptor)

    def holder(self) -> tuple[int, str]:
        """The process id and the host of the process that holds a live run."""
        try:
            said = plain(files.read_bytes(self._lock_file, 1 << 12).decode(errors="replace"))
        except OSError:
            said = ""
        match = re.fullmatch(r"process (\d{1,9}) on (\S+)", said)
        return (int(match[1]), match[2]) if match else (0, "another machine")

    def is_open_in(self, process: int) -> bool:
        """Whether a process has the run's lock open, as its holder does: numbers are reused.

        True if the system does not say what a process has open.
        """
        folder = Path(f"/proc/{process}/fd")
        if not Path("/proc/self/fd").is_dir():
            return True
        lock = self._lock_file.stat()
        for name in os.listdir(folder) if folder.exists() else []:
            with suppress(FileNotFoundError):  # it was closed in the meantime
                if os.path.samestat((folder / name).stat(), lock):
                    return True
        return False

    def _is_live(self, holder: str) -> AllranksError:
        return AllranksError(
            f"run {self.name} is live: {holder} is writing to it",
            fix="wait for it or stop it (Ctrl-C in its terminal), then resume; "
            "or leave out --resume for a new run",
        )

    @property
    def _lock_file(self) -> Path:
        return self.path / ".lock"


def _is_locked(path: Path) -> bool:
    try:
        with files.open_file(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or its file system has no locks
        return False
    return False


def create_run(runs: Path, job_name: str) -> RunDir:
    """A new folder `<job name>-<date>-<time>-<4 hex>` under `runs`."""
    runs = runs.absolute()
    elsewhere = "choose another place with --runs DIR (or ALLRANKS_RUNS)"
    if runs.is_symlink() and not runs.exists():
        raise AllranksError(
            f"{runs} is a link to {os.readlink(runs)}, which does not exist",
            fix=f"make that folder, or {elsewhere}",
        )
    for left in reversed(range(MAX_TRIES)):
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = runs / f"{job_name}-{stamp}-{secrets.token_hex(2)}"
        try:
            runs.mkdir(parents=True, exist_ok=True)
            path.mkdir(0o775)  # never writable by everyone: code is started from it
        except OSError as error:
            if error.errno != errno.EEXIST or not runs.is_dir() or not left:
                raise AllranksError(
                    f"cannot make the run folder {path}: {error.strerror}", fix=elsewhere
                ) from None
        else:
            break
    return RunDir(path)


def find_run(runs: Path, reference: str, job_name: str | None = None) -> RunDir:
    """The run that a name, a unique prefix, a path, or `last` stands for."""
    as_path = Path(reference).expanduser()
    if reference != "last" and (as_path / "run.json").is_file():
        return RunDir(as_path.resolve())
    known = list_runs(runs)
    if reference == "last":
        known = [run for run in known if job_name in (None, run.job_name)]
        # A run without a job was killed in its first millisecond: there is nothing to continue.
        known = [run for run in known if run.job_file.exists()] or known
        if known:
            return known[0]
        of_job = f" of job {job_name}" if job_name else ""
        raise AllranksError(f"no run{of_job} in {runs}", fix="start one: allranks run job.yaml")
    matches = _matches(known, reference)
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(run.name for run in matches[:5])
        raise AllranksError(
            f"{reference!r} matches {len(matches)} runs: {names}", fix="write more of the name"
        )
    newest = ", ".join(run.name for run in known[:3]) or "none"
    raise AllranksError(
        f"no run {reference!r} in {runs} (newest: {newest})",
        fix="write a run's name, a unique prefix of it, its path, or last",
    )


def find_runs(runs: Path, reference: str) -> list[RunDir]:
    """The runs that a job's name or a prefix stands for, newest first; otherwise as `find_run`."""
    if reference in ("", "last") or (Path(reference).expanduser() / "run.json").is_file():
        return [find_run(runs, reference)]
    known = list_runs(runs)
    of_job = [run for run in known if run.job_name == reference]
    return of_job or _matches(known, reference) or [find_run(runs, reference)]


def _matches(known: Sequence[RunDir], reference: str) -> list[RunDir]:
    """The run of that name, else those whose names begin with it."""
    matches = [run for run in known if run.name.startswith(reference)]
    return [run for run in matches if run.name == reference] or matches


def no_readable_checkpoint(run: RunDir, damaged: list[str]) -> AllranksError:
    """The error if all checkpoints are damaged: only the user may start again from step 0."""
    return AllranksError(
        f"run {run.name} has no readable checkpoint: {'; '.join(damaged)}",
        fix="restore the folder from a backup, or start again without --resume",
        exit_code=1,
    )


def list_runs(runs: Path) -> list[RunDir]:
    """All runs in a folder, newest first."""
    paths = [runs.absolute() / entry.name for entry in files.entries(runs.resolve())]
    found = [(match["time"], path) for path in paths if (match := NAME.fullmatch(path.name))]
    found.sort(key=lambda item: (item[0], _created(item[1])), reverse=True)
    return [RunDir(path) for _, path in found]


def _created(path: Path) -> float:
    """When a run was created, from run.json: its name has a resolution of one second."""
    return float(RunDir(path).info().get("created", 0.0))


def write_atomically(path: Path, text: str, mode: int = 0o664) -> None:
    """Write a file so that readers see the old content or the new one, even after a crash.

    Raises AllranksError if there is no room for it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process, or somebody's link
        with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        if error.errno not in FULL:
            raise
        temporary.unlink(missing_ok=True)
        raise disk_error(error, path) from None


def _opened(path: Path, flags: int, mode: int) -> BinaryIO:
    """Open a file to write it, never through a link that somebody left there."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.fdopen(os.open(path, flags, mode), "rb+" if flags & os.O_RDWR else "wb")
