# mypy: ignore-errors
"""Runs at the start of every Python process of a user's script that allranks launched.

Python imports `sitecustomize` from PYTHONPATH by itself. When the script imports torch's
distributed package, the job's `timeout` becomes the default of its process groups. Nothing here
may break the script, and nothing is imported that the script would not import itself.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

TARGET = "torch.distributed.distributed_c10d"


class TimeoutFinder(importlib.abc.MetaPathFinder):
    """Lets the usual finders find the module, then adds a step to its loading."""

    def find_spec(self, name, path=None, target=None):
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                try:
                    impose_timeout(module)
                except Exception as error:
                    print(f"allranks: timeout not imposed: {error!r}", file=sys.stderr)

            spec.loader.exec_module = exec_module
        return spec


def impose_timeout(c10d):
    """Make the job's timeout the default; one that the job sets expressly beats the script's."""
    from datetime import timedelta

    timeout = timedelta(seconds=float(os.environ["ALLRANKS_TIMEOUT"]))
    for module in (c10d, sys.modules["torch.distributed.constants"]):  # Lightning asks the second
        module.default_pg_timeout = timeout
        module.default_pg_nccl_timeout = timeout
    if os.environ.get("ALLRANKS_TIMEOUT_IS_SET") != "1":
        return
    for name in ("init_process_group", "new_group"):
        setattr(c10d, name, with_timeout(getattr(c10d, name), timeout))


def with_timeout(function, timeout):
    import functools
    import inspect

    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.arguments["timeout"] = timeout
        return function(*bound.args, **bound.kwargs)

    return call


def run_hidden_sitecustomize() -> None:
    """The environment's own sitecustomize, which this one stands in front of."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("ALLRANKS_TIMEOUT"):
    sys.meta_path.insert(0, TimeoutFinder())
run_hidden_sitecustomize()
