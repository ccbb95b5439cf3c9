"""The exit codes, and the one error that users can fix: what is wrong, and what to type."""

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# How a command ends, besides 0 (done), 1 (the job failed) and 2 (wrong usage or job file).
STOPPED_AT_CHECKPOINT = 75  # resuming continues from there
STOPPED_AT_ONCE = 130  # by a second Ctrl-C, or where nothing could be saved

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class AllranksError(Exception):
    """Printed by the command line without a traceback.

    `exit_code` is the process's: 2 for wrong usage or a wrong job file, 1 for a job that failed.
    `lines` are shown between `what` and `fix`; `facts` are further fields with `--json`.
    """

    def __init__(
        self,
        what: str,
        *,
        fix: str,
        exit_code: int = 2,
        lines: Sequence[str] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(f"{what}\n  fix: {fix}")
        self.what = what
        self.fix = fix
        self.exit_code = exit_code
        self.lines = lines
        self.facts = facts or {}

    @property
    def shown(self) -> str:
        """The message for people."""
        first = f"error: {self.what}"
        if len(first) > 80 and self.lines:  # a location that would wrap gets its own line
            first = "\n  (".join(first.rsplit("  (", 1))
        return "\n".join([first, *self.lines, f"  fix: {self.fix}"])

    @property
    def fields(self) -> dict[str, Any]:
        """The fields for programs."""
        return {"what": self.what, "fix": self.fix, **self.facts}


def disk_error(error: OSError, path: Path) -> AllranksError:
    """The error to show when writing to the run folder failed."""
    return AllranksError(
        f"cannot write {path}: {error.strerror or error}",
        fix="free space or get permission to write there, or use another disk with --runs DIR; "
        "then continue with --resume: committed checkpoints are intact",
        exit_code=1,
    )


def file_error(error: OSError) -> AllranksError:
    """The error to show for any other OSError, with the fix chosen by its number."""
    where = str(error.filename) if error.filename else "a file"
    if error.errno in (*FULL, errno.EROFS):
        return disk_error(error, Path(where))
    fixes = {
        errno.ENOENT: "check the path",
        errno.EACCES: "get permission for it, or choose another path",
        errno.EPERM: "get permission for it, or choose another path",
        errno.EMFILE: "raise the limit on open files: ulimit -n 4096",
        errno.EIO: "check its disk: the kernel could not read or write it",
        errno.ESTALE: "its network disk has lost it: try again, or check the disk",
        errno.ENAMETOOLONG: "choose a shorter name",
    }
    fix = fixes.get(error.errno or 0, "--debug shows where it came from")
    return AllranksError(f"{where}: {error.strerror or error}", fix=fix, exit_code=1)
