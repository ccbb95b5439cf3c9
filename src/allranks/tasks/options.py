"""Checks of a task's options; the error for a wrong value says what is allowed."""

from collections.abc import Sequence

from allranks.errors import AllranksError


def check_choice(task: str, name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise unless `value` is one of `allowed`."""
    if value not in allowed:
        raise _wrong(task, name, value, f"one of: {', '.join(allowed)}")


def check_flag(task: str, name: str, value: object) -> None:
    """Raise unless `value` is a bool."""
    if not isinstance(value, bool):
        raise _wrong(task, name, value, "true or false")


def check_number(task: str, name: str, value: object, low: float, high: float) -> None:
    """Raise unless `value` is a number from `low` to `high`, both included."""
    # In Python True is a number; in a job file `noise: true` is a mistake.
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise _wrong(task, name, value, f"a number from {low} to {high}")


def check_count(task: str, name: str, value: object, low: int, high: int) -> None:
    """Raise unless `value` is an integer from `low` to `high`, both included."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _wrong(task, name, value, f"an integer from {low} to {high}")


def _wrong(task: str, name: str, value: object, allowed: str) -> AllranksError:
    return AllranksError(
        f"option {name} of the task {task} cannot be {value!r}",
        fix=f"set options.{name} to {allowed}",
    )
