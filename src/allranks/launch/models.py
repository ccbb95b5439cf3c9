"""Asks a process that imports torch about the models of jobs: importing it takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from allranks.errors import AllranksError
from allranks.job.job import Job

CHECK_SECONDS = 120.0  # ranks find the same errors: nobody should wait longer for them
_found_right: set[str] = set()


def check_models(jobs: Sequence[Job]) -> None:
    """Refuse layouts whose axes their models cannot have. Data parallelism suits any model."""
    divided = [job for job in jobs if job.command is None and job.layout.tp * job.layout.pp > 1]
    new = {_as_text([job]): job for job in divided if _as_text([job]) not in _found_right}
    if new:
        _ask("check", _as_text([*new.values()]), CHECK_SECONDS)
        _found_right.update(new)  # a command checks what it is asked, then what it starts


def explain(job: Job) -> dict[str, Any]:
    """What each rank of the job's layout would hold and send."""
    answer = _ask("explain", _as_text([job]), None)
    if answer is None:
        raise AllranksError(
            "the process that was trying the model died",
            fix="look for its message above; if it was killed, it may need more memory",
            exit_code=1,
        )
    found: dict[str, Any] = answer[0]
    return found


def _as_text(jobs: Sequence[Job]) -> str:
    return json.dumps([job.to_mapping() for job in jobs])


def _ask(question: str, jobs: str, seconds: float | None) -> Any:
    """The answer of allranks.train.explain; None if there is none. Raises the error in it."""
    env = {**os.environ, **json.loads(jobs)[0]["env"]}
    command = [sys.executable, "-m", "allranks.train.explain", question]
    quiet = subprocess.DEVNULL if question == "check" else None
    try:
        done = subprocess.run(
            command,
            input=jobs,
            stdout=subprocess.PIPE,
            stderr=quiet,
            env=env,
            text=True,
            process_group=0,  # Ctrl-C reaches this process alone, which ends that one silently
            timeout=seconds,
            check=True,
        )
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    if isinstance(answer, dict):
        error = answer["error"]
        raise AllranksError(error["what"], fix=error["fix"], exit_code=error["exit_code"])
    return answer
