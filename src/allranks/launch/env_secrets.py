"""Secrets in a job's `env`: their values are kept in one file that only its user can read.

job.yaml, run.json and the script for SLURM hold placeholders, so that others can read the run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from allranks.errors import AllranksError
from allranks.job.job import Job
from allranks.run import files
from allranks.run.folder import RunDir, write_atomically
from allranks.show.secrets import redact

FILE = "secrets.json"
PLACEHOLDER = f"(in {FILE})"


def is_secret(name: str, value: Any) -> bool:
    """Whether a variable looks like a secret, by its name or by the form of its value."""
    text = f"{name}={value}"
    return value != PLACEHOLDER and redact(text) != text


def write_job(run: RunDir, job: Job) -> None:
    """job.yaml as resolved; the values of secrets beside it."""
    hidden = {name: value for name, value in job.env.items() if is_secret(name, value)}
    if hidden:
        text = json.dumps({**_read(run), **hidden}, indent=2) + "\n"
        write_atomically(run.path / FILE, text, mode=0o600)
    env = {name: PLACEHOLDER if name in hidden else value for name, value in job.env.items()}
    write_atomically(run.job_file, job.model_copy(update={"env": env}).to_yaml())


def restored(job: Job, run: RunDir) -> Job:
    """The job with its secret values filled in, as far as they can be read here."""
    if PLACEHOLDER not in job.env.values():
        return job
    known = _read(run)
    env = {name: known.get(name, v) if v == PLACEHOLDER else v for name, v in job.env.items()}
    return job.model_copy(update={"env": env})


def check(job: Job, run: RunDir) -> None:
    """Refuse to start ranks with placeholders in place of values."""
    missing = [name for name, value in job.env.items() if value == PLACEHOLDER]
    if missing:
        raise AllranksError(
            f"the values of {', '.join(missing)} are missing: {run.path / FILE} cannot be read, "
            "or does not contain them",
            fix=f"give them again: {' '.join(f'env.{name}=VALUE' for name in missing)}",
        )


def in_public(key: str, value: Any) -> Any:
    """The value of a job's key as it may be recorded or shown: secrets as placeholders."""
    place, _, name = key.partition(".")
    return PLACEHOLDER if place == "env" and is_secret(name, value) else value


def public_override(override: str) -> str:
    """An override as run.json keeps it."""
    key, _, text = override.partition("=")
    if key != "env":
        shown = in_public(key, text)
        return override if shown == text else f"{key}={shown}"
    values = yaml.safe_load(text) or {}  # it was read before: a mapping or nothing
    public = {name: in_public(f"env.{name}", value) for name, value in values.items()}
    if public == values:
        return override
    return f"env={yaml.safe_dump(public, default_flow_style=True, width=1 << 20).strip()}"


def public_changes(changes: Sequence[Any]) -> list[dict[str, Any]]:
    """Differences between jobs, as run.json keeps them."""
    return [
        {"key": c.key, "before": in_public(c.key, c.ours), "now": in_public(c.key, c.theirs)}
        for c in changes
    ]


def _read(run: RunDir) -> dict[str, Any]:
    try:
        content = json.loads(files.read_bytes(run.path / FILE))
    except (OSError, ValueError):  # there is none, or it is another user's
        return {}
    return content if files.values_of(files.is_text)(content) else {}
