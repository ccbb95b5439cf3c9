"""The one error that is a user's to mend: what is wrong, and the fix to type."""


class AllranksError(Exception):
    """Printed by the command line without a traceback.

    `exit_code` is the process's: 2 for wrong usage or a wrong job file, 1 for a job that failed.
    """

    def __init__(self, what: str, *, fix: str, exit_code: int = 2) -> None:
        super().__init__(f"{what}\n  fix: {fix}")
        self.what = what
        self.fix = fix
        self.exit_code = exit_code
