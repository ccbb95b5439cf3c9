"""The types of a job's values: times, layouts, commands, texts of a given form."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from allranks import layout as layouts
from allranks.errors import AllranksError
from allranks.job.problems import OWN
from allranks.layout import Layout

PLACEHOLDERS = ("nodes", "gpus", "ranks", "run", "last", "stage")

_UNIT_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
# Enough digits for a lifetime in each unit: more would overflow a timedelta.
_DURATION = r"^([0-9]{1,5}d)?([0-9]{1,6}h)?([0-9]{1,8}m)?([0-9]{1,9}s)?$"
_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$"


@dataclass(frozen=True, slots=True)
class Duration:
    """A time as people write it: 30s, 10m, 1h30m."""

    seconds: int

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Read what `str` writes. Raises AllranksError."""
        match = re.fullmatch(_DURATION, text)
        parts = [part for part in match.groups() if part] if match else []
        seconds = sum(int(part[:-1]) * _UNIT_SECONDS[part[-1]] for part in parts)
        if seconds <= 0:
            raise AllranksError(
                f'expected a time such as 30s, 10m or 1h30m, got "{text}"',
                fix="write a number with its unit, s, m, h or d",
            )
        return cls(seconds)

    def __str__(self) -> str:
        left, text = self.seconds, ""
        for unit, size in _UNIT_SECONDS.items():
            text += f"{left // size}{unit}" if left >= size else ""
            left %= size
        return text


def _own_error(what: str, fix: str) -> PydanticCustomError:
    return PydanticCustomError(OWN, "{what}", {"what": what, "fix": fix})


def _to_layout(value: Any) -> Layout:
    if isinstance(value, Layout):
        return value
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError("not a layout")
    try:
        return Layout.parse(str(value))
    except AllranksError as error:
        raise _own_error(error.what, error.fix) from None


def _to_duration(value: Any) -> Duration:
    if isinstance(value, Duration):
        return value
    try:
        return Duration.parse(value if isinstance(value, str) else "")
    except AllranksError as error:
        # Not shown: the message comes from the schema, which knows what else the key allows.
        raise ValueError(error.what) from None


def _to_command(value: Any) -> str:
    """The command as one line; a list of arguments is joined. It is not run by a shell."""
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = shlex.join(value)
    # A line continued with a backslash, as copied from a shell script.
    line = value.replace("\\\n", " ").strip() if isinstance(value, str) else ""
    if not line:
        raise ValueError("not a command")
    try:
        first = shlex.split(line)[0]
    except ValueError as error:
        raise _own_error(f"{error} in {line}", "close the quote") from None
    if re.match(r"[A-Za-z_]\w*=", first):
        raise _own_error(
            f"the command is not run by a shell, so {first} is not an assignment",
            f"write env: {{{first.replace('=', ': ', 1)}}}, and the command without it",
        )
    return line


def _check_placeholders(value: str) -> str:
    for name in re.findall(r"\{(\w*)\}", value):
        if name not in PLACEHOLDERS:
            known = " ".join(f"{{{known}}}" for known in PLACEHOLDERS)
            raise _own_error(f"{{{name}}} is not a placeholder", f"use one of {known}")
    return value


def _check_name(value: str) -> str:
    if not re.fullmatch(_NAME, value):
        safe = re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip(".-")[:100]
        raise _own_error(
            f'expected up to 100 letters, digits, ".", "_" and "-" that can name a folder (no '
            f'"." or "-" first), got "{value}"',
            f"write name: {safe or 'my-job'}",
        )
    return value


def _check_env_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise _own_error(
            f'"{value}" cannot name an environment variable',
            "use letters, digits and _, and do not begin with a digit",
        )
    return value


def _to_env_text(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _schema(pattern: str, *examples: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": list(examples)})


def _text(pattern: str, *examples: str) -> Any:
    return Field(pattern=pattern, examples=list(examples))


_AsText = PlainSerializer(str, return_type=str)
DurationText = Annotated[
    Duration, PlainValidator(_to_duration), _AsText, _schema(_DURATION, "10m", "1h30m")
]
LayoutText = Annotated[
    Layout, PlainValidator(_to_layout), _AsText, _schema(layouts.PATTERN, "1x4", "2x4:tp=4")
]
_COMMAND_SCHEMA = {
    "anyOf": [
        {"type": "string", "examples": ["python train.py"]},
        {"type": "array", "items": {"type": "string"}},
    ]
}
CommandText = Annotated[str, PlainValidator(_to_command), WithJsonSchema(_COMMAND_SCHEMA)]
Template = Annotated[
    str, _text(r"\S", "checkpoints/last.ckpt"), AfterValidator(_check_placeholders)
]
NameText = Annotated[
    str, AfterValidator(_check_name), WithJsonSchema({"type": "string", "pattern": _NAME})
]
Word = Annotated[str, _text(r"^\S+$", "gpu")]
# SLURM's own forms (minutes, h:m:s, days-hours), or ours.
SlurmTime = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int and value > 0 else value),
    _text(
        r"^([0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}|([0-9]+[dhms])+)$", "12:00:00", "2h"
    ),
]
SlurmMemory = Annotated[str, _text(r"^[0-9]+[KMGT]?$", "32G")]
# Values in directives: nothing that sbatch or a shell would read as more than a value.
SlurmName = Annotated[str, _text(r"^[A-Za-z0-9_][A-Za-z0-9_.,:@+-]*$", "gpu")]
SlurmFeatures = Annotated[str, _text(r"^[A-Za-z0-9_(\[!][A-Za-z0-9_.&|()\[\]*!,:-]*$", "ib&a100")]
SlurmNodes = Annotated[str, _text(r"^[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]*$", "node[3-4]")]
SlurmJobs = Annotated[str, _text(r"^[a-z]+(:[0-9+_]+)*([,?][a-z]+(:[0-9+_]+)*)*$", "afterok:123")]
SlurmText = Annotated[str, _text(r"^[A-Za-z0-9 _.,:;@%+=/()\[\]&|*!?~^<>{}-]*$", "mail me")]
EnvName = Annotated[str, AfterValidator(_check_env_name)]
_ENV_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]}
EnvText = Annotated[str, BeforeValidator(_to_env_text), WithJsonSchema(_ENV_SCHEMA)]
