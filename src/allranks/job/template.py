"""Writes a job file to start from, with every key explained, and its schema for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from allranks.errors import AllranksError
from allranks.job.job import COMMAND_ONLY, Job, json_schema, parse_job
from allranks.job.problems import choices
from allranks.job.yaml_lines import Dumper

SCHEMA_FILE = "job.schema.json"
HEAD = f"""\
# yaml-language-server: $schema={SCHEMA_FILE}
# What to train: `allranks run job.yaml`. These are the defaults: delete what you do not need.
"""
COMMENT_COLUMN = 36

# Shown, but commented out: each replaces a key above it.
_INSTEAD = {"batch_size_per_rank": 32, "steps": 1000, "command": "python train.py"}
_COMMAND_EXAMPLES = {"last": "checkpoints/{run}/last.ckpt", "resume": "--ckpt_path {last}"}


def commented_job() -> str:
    """The bundled job's file as text; it gives the same job as no file at all."""
    schema = json_schema()
    values = parse_job({}).to_mapping()
    lines = []
    for key in Job.model_fields:
        part = schema["properties"][key]
        if key in _INSTEAD:
            lines.append(_line(f"# {key}: {_text(_INSTEAD[key])}", part))
        elif key in COMMAND_ONLY:
            example = _COMMAND_EXAMPLES.get(key, part.get("default"))
            lines.append(_line(f"# {key}: {_text(example)}", part))
        else:
            lines += _key_lines(key, values[key], part, schema)
    return HEAD + "\n".join(lines) + "\n"


def _key_lines(
    key: str, value: Any, part: Mapping[str, Any], schema: Mapping[str, Any]
) -> Iterator[str]:
    """The key's line and, for a section, one line for each of its keys."""
    if "$ref" not in part:
        yield _line(f"{key}: {_text(value)}", part)
        return
    yield _line(f"{key}:", part)
    section = schema["$defs"][part["$ref"].rpartition("/")[2]]
    for name, below in section["properties"].items():
        yield _line(f"  {name}: {_text(value[name])}", below)


def _line(written: str, part: Mapping[str, Any]) -> str:
    allowed = choices(part)
    words = [part["description"], *([" | ".join(allowed)] if allowed else [])]
    return f"{written:<{COMMENT_COLUMN}}  # {'; '.join(reversed(words))}"


def _text(value: Any) -> str:
    """The value on one line, as YAML."""
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")


def write_job(folder: Path, *, force: bool) -> dict[str, str]:
    """Write job.yaml and its schema; return their absolute paths as `job` and `schema`."""
    if "=" in folder.name or folder.suffix in (".yaml", ".yml"):  # as other commands take them
        raise AllranksError(
            f"init takes a folder, and {folder} does not look like one",
            fix="allranks init writes job.yaml here; then change its keys, or rename it",
        )
    files = {
        folder / "job.yaml": commented_job(),
        folder / SCHEMA_FILE: json.dumps(json_schema(), indent=2) + "\n",
    }
    existing = [str(file) for file in files if file.exists()]
    if existing and not force:
        verb = "exist" if len(existing) > 1 else "exists"
        raise AllranksError(
            f"{' and '.join(existing)} already {verb}: nothing was written",
            fix="add --force to overwrite, or run it in another folder",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AllranksError(
            f"{error.filename or folder} cannot be written: {error.strerror}",
            fix="run it in a folder that you can write to",
        ) from None
    job, schema = (str(file.resolve()) for file in files)
    return {"job": job, "schema": schema}
