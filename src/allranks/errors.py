"""The one error that is a user's to mend: what is wrong, and the fix to type."""

from collections.abc import Mapping, Sequence
from typing import Any


class AllranksError(Exception):
    """Printed by the command line without a traceback.

    `exit_code` is the process's: 2 for wrong usage or a wrong job file, 1 for a job that failed.
    `lines`: what is shown between what and fix; `facts`: further fields with `--json`.
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
        """As people see it."""
        first = f"error: {self.what}"
        if len(first) > 80 and self.lines:  # a place that would be cut in two gets its own line
            first = "\n  (".join(first.rsplit("  (", 1))
        return "\n".join([first, *self.lines, f"  fix: {self.fix}"])

    @property
    def fields(self) -> dict[str, Any]:
        """As programs see it."""
        return {"what": self.what, "fix": self.fix, **self.facts}
