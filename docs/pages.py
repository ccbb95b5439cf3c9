"""The generated parts of docs/reference, called from cog blocks: `make docs` regenerates them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from allranks.cli.main import COMMANDS
from allranks.job.job import json_schema
from allranks.job.problems import in_words
from allranks.job.template import commented_job
from allranks.run.event_schema import Field, declared


def help_of(*command: str) -> str:
    """What `allranks COMMAND --help` prints in 80 columns, as a code block."""
    env = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    script = str(Path(sys.executable).with_name("allranks"))
    done = subprocess.run(
        [script, *command, "--help"], env=env, capture_output=True, text=True, check=True
    )
    lines = [line.rstrip() for line in done.stdout.strip().splitlines()]
    return "\n".join(["```", f"$ allranks {' '.join([*command, '--help'])}", *lines, "```"])


def commands() -> list[tuple[str, ...]]:
    """The words of every command that there is, in the order of `allranks --help`."""
    words: list[tuple[str, ...]] = [()]
    for row in itertools.chain(*COMMANDS.values()):
        inner = itertools.chain(*row.panels.values())
        words += [(row.name,), *((row.name, one.name) for one in inner)]
    return words


def job_keys() -> str:
    """A table of the job's own keys, then one for each key that is a mapping."""
    schema = json_schema()
    parts = ["\n".join(table(schema["properties"]))]
    for key, value in schema["properties"].items():
        section = section_of(value, schema)
        if section is not None:
            lines = [f"### {key}", "", section["description"], "", *table(section["properties"])]
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def table(keys: Mapping[str, Any]) -> Iterator[str]:
    yield "| key | value | default | |"
    yield "|---|---|---|---|"
    for key, value in keys.items():
        is_section = "$ref" in value or any("$ref" in each for each in value.get("anyOf", []))
        allowed = "[see below](#" + key + ")" if is_section else in_words(value)
        default = value.get("default")
        shown = "" if is_section and default is not None else f"`{json.dumps(default)}`"
        cells = [f"`{key}`", allowed, shown if "default" in value else "", value["description"]]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def section_of(value: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for part in [value, *value.get("anyOf", [])]:
        if "$ref" in part:
            section: Mapping[str, Any] = schema["$defs"][part["$ref"].rpartition("/")[2]]
            return section
    return None


def job_example() -> str:
    """The file that `allranks init` writes, as a code block."""
    return "```yaml\n" + commented_job().rstrip() + "\n```"


def events() -> str:
    """What all events have, then a part for each event: what it says, who writes it, its fields."""
    parts = []
    for name, event in declared().items():
        head = [f"## {name}", "", f"{event.meaning} Written by {event.by}.", ""]
        parts.append("\n".join([*([] if name == "common" else head), *field_rows(event.fields)]))
    return "\n\n".join(parts)


def field_rows(fields: Mapping[str, Field]) -> Iterator[str]:
    has_writers = any(field.by for field in fields.values())
    yield "| field | type | |" + (" only by |" if has_writers else "")
    yield "|---|---|---|" + ("---|" if has_writers else "")
    for name, field in fields.items():
        kind = field.kind.words + (" or null" if field.or_null else "")
        yield f"| `{name}` | {kind} | {field.meaning} |" + (f" {field.by} |" if has_writers else "")
