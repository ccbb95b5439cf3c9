"""Imports a job's task and gives it its options."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from allranks.errors import AllranksError
from allranks.job.job import Job
from allranks.job.task_source import find_task
from allranks.tasks import Task


def load_task(job: Job) -> Task:
    """Import the task's class and construct it with the job's options."""
    assert job.task is not None
    module_name, _, class_name = find_task(job.task).path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    cls = getattr(importlib.import_module(module_name), class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise AllranksError(
            f"task: {job.task} is not a subclass of allranks.tasks.Task",
            fix=f"write `class {class_name}(Task):` in {module_name}",
        )
    return _construct(cls, job.options)


def _construct(cls: type[Task], options: dict[str, Any]) -> Task:
    try:
        if dataclasses.is_dataclass(cls):
            return TypeAdapter(cls).validate_python(options)
        return cls(**options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise AllranksError(
            f"options.{key}: {first['msg']}, got {first.get('input')!r}",
            fix=f"correct options.{key} in the job file; {cls.__name__} takes "
            + ", ".join(field.name for field in dataclasses.fields(cls)),  # type: ignore[arg-type]
        ) from None
    except TypeError as error:
        raise AllranksError(
            f"options: {error}", fix="correct the options in the job file"
        ) from None
