"""Every test leaves the process as it found it; and the command line as a fixture."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.commandline import Allranks, run_allranks

LONG_IN_SLURM = ("test_going_on.py", "test_nodes.py", "test_race.py")
LEAVE_SECONDS = 20.0  # what a process or thread may take to end after its test

# Inherited by every process that a test starts, so that orphans are known too.
MARK = uuid.uuid4().hex
os.environ["ALLRANKS_TESTS"] = MARK
STRANGERS: set[int] = set()  # processes that are not of these tests
CPU_SECONDS = pytest.StashKey[float]()  # when the last part of a test had ended
# Before torch is imported: threads that spin while they wait starve everything beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The same examples every time, however long a busy machine takes for one; `make soak` draws others.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", unhurried, derandomize=True)
settings.register_profile("others", unhurried, max_examples=1000)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    ours = parser.getgroup("allranks")
    ours.addoption("--cpu-times", action="store_true", help="show what takes most CPU time")
    ours.addoption(
        "--alone",
        action="store_true",
        help="these tests have failed beside others: name those that pass now",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tests see no GPU, so that they do the same on every machine; those marked `gpu` see all."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # In the background of a shell; what tests start would ignore it, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what takes longest: the other workers do the rest meanwhile."""
    items.sort(key=lambda item: item.get_closest_marker("slurm") is None)


def pytest_collection_finish() -> None:
    """Thousands of tests and what they imported stay: garbage need not be looked for among them."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of the workers, two wait for SLURM most of the time, and the others have the CPUs.

    pytest-xdist's own groups (3.8) are not seen by pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class FileByFile(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            if not path.startswith("tests/slurm/"):
                return path
            # Two clusters, which take about as long as each other.
            return "slurm, long" if Path(path).name in LONG_IN_SLURM else "slurm, rest"

    return FileByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Note what CPU time a test has taken; reports bring it from the workers."""
    if item.config.option.cpu_times:
        now = cpu_seconds()
        item.user_properties.append(("cpu", now - item.config.stash.get(CPU_SECONDS, 0.0)))
        item.config.stash[CPU_SECONDS] = now


def cpu_seconds() -> float:
    """Of this process, those that have ended below it, and ranks; not of what SLURM starts."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    found = sum(use.ru_utime + use.ru_stime for use in uses)
    server = getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        found += sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")
    return found


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reports = [report for some in terminalreporter.stats.values() for report in some]
    reports = [report for report in reports if isinstance(report, pytest.TestReport)]
    if config.option.alone:
        failed = {report.nodeid for report in reports if report.failed}
        flaky = [r.nodeid for r in reports if r.when == "call" and r.nodeid not in failed]
        terminalreporter.write_line(f"flaky: {len(flaky)}")
        for name in flaky:
            terminalreporter.write_line(f"flaky: {name}")
    if config.option.cpu_times:
        show_cpu_times(terminalreporter, reports)


def show_cpu_times(terminal: Any, reports: list[pytest.TestReport]) -> None:
    tests = {r.nodeid: sum(float(str(cpu)) for _, cpu in r.user_properties) for r in reports}
    files: dict[str, float] = {}
    for name, seconds in tests.items():
        file = name.partition("::")[0]
        files[file] = files.get(file, 0.0) + seconds
    terminal.write_line(f"CPU time of {len(tests)} tests: {sum(files.values()):.1f} s")
    for found in (files, tests):
        for name in sorted(found, key=found.__getitem__, reverse=True)[:30]:
            terminal.write_line(f"{found[name]:8.2f} s  {name}")


@pytest.fixture
def allranks(tmp_path: Path) -> Allranks:
    """`allranks(*args)` runs the command line, in the test's own folder unless told otherwise."""

    def run(
        *args: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 280,
    ) -> subprocess.CompletedProcess[str]:
        return run_allranks(*args, cwd=cwd or tmp_path, env=env, timeout=timeout)

    return run


@pytest.fixture(scope="session", autouse=True)
def nothing_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tasks build and keep goes elsewhere than to the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("ALLRANKS_RUNS", raising=False)
        yield


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> Iterator[None]:
    """A world of this one rank."""
    import torch.distributed as dist

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a variable, a signal, a thread, a process or a process group."""
    variables, signals = dict(os.environ), signals_here()
    threads, processes = set(threading.enumerate()), set(descendants())
    yield
    leaks = [
        *changed_variables(variables),
        *changed_signals(signals),
        *(f"thread {thread.name}" for thread in new_threads(threads)),
        *(f"process {pid}: {words}" for pid, words in new_processes(processes).items()),
        *process_groups(),
    ]
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


def changed_variables(before: dict[str, str]) -> list[str]:
    now = dict(os.environ)
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    # torch (at its first optimizer) and scikit-learn set variables of their own for good.
    foreign = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_")
    names = sorted(name for name in names if not name.startswith(foreign))
    for name in names:  # the next test is not to blame
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"variable {name}" for name in names]


def signals_here() -> tuple[set[int], dict[int, Any]]:
    """Those that are blocked, which processes started later inherit; and what handles each."""
    foreign = {signal.SIGCHLD, signal.SIGALRM}  # torch's loaders and pytest-timeout handle these
    numbers = set(range(1, signal.SIGRTMIN)) - foreign
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return set(blocked), {number: signal.getsignal(number) for number in numbers}


def changed_signals(before: tuple[set[int], dict[int, Any]]) -> list[str]:
    (blocked, handlers), (blocked_now, handlers_now) = before, signals_here()
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)  # the next test is not to blame
    changed = blocked ^ blocked_now
    changed |= {number for number in handlers if handlers[number] != handlers_now[number]}
    return [f"signal {number}" for number in sorted(changed)]


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    left = [thread for thread in threading.enumerate() if thread not in before]
    deadline = time.monotonic() + LEAVE_SECONDS
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in left if thread.is_alive()]


def new_processes(before: set[int]) -> dict[int, str]:
    """Processes that do not go by themselves; they are killed."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while left := {pid: words for pid, words in descendants().items() if pid not in before}:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def process_groups() -> list[str]:
    if "torch.distributed" not in sys.modules:
        return []
    import torch.distributed as dist

    if not dist.is_initialized():
        return []
    dist.destroy_process_group()
    return ["a process group"]


def descendants() -> dict[int, str]:
    """Living processes of these tests, orphans among them; not the servers of multiprocessing."""
    servers = {
        os.getpid(),
        getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None),
        getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None),
    }
    numbers = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
    STRANGERS.intersection_update(numbers)
    found = {}
    for pid in numbers - servers - STRANGERS:
        folder = Path("/proc", str(pid))
        try:
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(parent) in (0, 2):  # the kernel's, whose environment cannot be read
                STRANGERS.add(pid)
                continue
            is_marked = MARK.encode() in (folder / "environ").read_bytes()
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # gone, or not ours to look at
            continue
        if is_marked or int(parent) == os.getpid():
            if state != "Z":
                found[pid] = words[:200]
        elif words or state == "Z":  # has become what it is
            STRANGERS.add(pid)
    return found
