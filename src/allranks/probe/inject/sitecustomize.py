# mypy: ignore-errors
"""Runs at the start of every Python process of a user's script that allranks launched.

Python imports `sitecustomize` from PYTHONPATH automatically. When the script imports torch, the
job's `timeout` becomes the default of its process groups, and the probe starts to record the rank's
steps. It also makes the process write its stacks at a signal, in case it hangs, and record what
ends it. Nothing here may break the script, and nothing of ours is imported before the script
imports torch or fails.
"""

import builtins
import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function after one of certain modules has been loaded as usual."""

    def __init__(self, steps):
        self.steps = steps  # module -> function of the loaded module

    def find_spec(self, name, path=None, target=None):
        step = self.steps.pop(name, None)
        spec = importlib.util.find_spec(name) if step is not None else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                # All that torch creates stays. Looking for garbage among it would take a second of
                # CPU time: while it is imported, at the first optimizer and when Python ends.
                collects = gc.isenabled()
                gc.disable()
                try:
                    load(module)
                    report_failure(step, module)
                finally:
                    if name == "torch":
                        gc.freeze()
                    if collects:
                        gc.enable()

            spec.loader.exec_module = exec_module
        return spec


def find_allranks():
    """Make allranks importable, even if the script's Python does not have it."""
    if "allranks" not in sys.modules and importlib.util.find_spec("allranks") is None:
        folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        init = os.path.join(folder, "__init__.py")
        spec = importlib.util.spec_from_file_location(
            "allranks", init, submodule_search_locations=[folder]
        )
        package = importlib.util.module_from_spec(spec)
        sys.modules["allranks"] = package
        spec.loader.exec_module(package)


def report_failure(step, module):
    try:
        step(module)
    except Exception as error:
        print(f"allranks: {step.__name__} failed: {error!r}", file=sys.stderr)


def start_probe(torch):
    """Record the rank's steps from now on."""
    find_allranks()
    from allranks.probe.start import start

    start()


def write_stacks_when_asked():
    """Write all stacks at a signal, by a handler in C that works even if Python hangs.

    They go to a file in memory, which others find by its name in /proc, not to the script's log.
    """
    import faulthandler

    file = os.memfd_create("allranks-stacks")
    faulthandler.register(int(os.environ["ALLRANKS_DUMP_SIGNAL"]), file=file, all_threads=True)


def note_the_end():
    """Let allranks.run.tracebacks record what ends this process, before it is printed.

    Not in processes that it forks or spawns: a loader's worker reports to its parent. Signals,
    which Python does not see, are reported by a handler in C.
    """
    import atexit
    import faulthandler

    process, told = os.getpid(), []

    def tell(function, *args, **kwargs):
        if os.getpid() == process:
            with contextlib.suppress(Exception):
                find_allranks()
                from allranks.run import tracebacks

                getattr(tracebacks, function)(*args, **kwargs)

    def excepthook(kind, error, trace):
        told.append(error)
        tell("record_exception", error)
        before(kind, error, error.__traceback__)

    def tell_late():
        error = getattr(sys, "last_value", None)  # if the script has its own excepthook
        if isinstance(error, BaseException) and not any(error is one for one in told):
            tell("record_exception", error)
        window = sys.modules.get("allranks.probe.window")
        if window is not None and window.has_left:
            # Torch's threads may abort an interpreter that ends where the script did not expect it.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    before, sys.excepthook = sys.excepthook, excepthook
    atexit.register(tell_late)  # registered first, so called last
    note_exits(tell)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)


def note_exits(tell):
    """Record calls that exit with a code other than 0 or kill this process; change nothing else."""
    import threading

    def noted(function, counts, **kwargs):
        def call(*args, **named):
            with contextlib.suppress(Exception):
                given = [*args, *named.values()]
                if counts(*given):
                    tell("record_exit", given[-1], **kwargs)
            return function(*args, **named)

        call.__name__, call.__doc__ = function.__name__, function.__doc__
        call.__module__, call.__qualname__ = function.__module__, function.__qualname__
        return call

    def fails(code=None):
        return code not in (None, 0)

    def exits(code=None):  # in another thread it ends only that thread
        return fails(code) and threading.current_thread() is threading.main_thread()

    def kills(target, number):
        return target == os.getpid() and number in (9, 15)

    sys.exit = noted(sys.exit, exits)
    # Also in the module in which pickle looks for them.
    posix = sys.modules.get(os.kill.__module__, os)
    os._exit = posix._exit = noted(os._exit, fails)
    os.kill = posix.kill = noted(os.kill, kills, kills=True)
    quitter = type(getattr(builtins, "exit", None))  # made by site, as is quit
    if quitter.__name__ == "Quitter":
        quitter.__call__ = noted(quitter.__call__, lambda quitter, code=None: exits(code))


def hide_probe(rules):
    """Hide the probe from torch.compile, which has been imported."""
    if "allranks.probe.hooks" in sys.modules:
        sys.modules["allranks.probe.compilers"].hide_from_compilers()


def impose_timeout(c10d):
    """Make the job's timeout the default; if the job sets it, it overrides the script's."""
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
    """Run the environment's own sitecustomize, which this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


steps = {}
if os.environ.get("ALLRANKS_PROFILE"):
    # torch's profiler reports each start and stop on stderr at its highest level: only full silence
    # keeps these lines out of the script's output. It reads the variable when it is loaded.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
if os.environ.get("ALLRANKS_TIMEOUT"):
    steps["torch.distributed.distributed_c10d"] = impose_timeout
if os.environ.get("RANK") and os.environ.get("ALLRANKS_RUN_DIR"):
    steps["torch"] = start_probe
    steps["torch._dynamo.trace_rules"] = hide_probe
    if not any("multiprocessing" in word for word in getattr(sys, "orig_argv", ())):
        with contextlib.suppress(Exception):
            note_the_end()
if os.environ.get("ALLRANKS_DUMP_SIGNAL", "0") != "0" and os.environ.get("RANK"):
    # Not on this system, or (RuntimeError) not in this thread.
    with contextlib.suppress(AttributeError, OSError, ValueError, RuntimeError):
        write_stacks_when_asked()
if steps:
    sys.meta_path.insert(0, AfterImport(steps))
if __name__ == "sitecustomize":
    run_hidden_sitecustomize()
