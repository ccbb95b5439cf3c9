"""The preflight with real processes that play nodes of one machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fork_server import fork_server
from tests.ports import free_port

from allranks.doctor import preflight
from allranks.doctor.connectivity import Directory, Listener, reach_all
from allranks.doctor.node_checks import free_disk, gpu_health, visible_gpus, write_test
from allranks.launch.backends.slurm.node_gate import ENDED, OPEN, verdict
from allranks.machine.gpus import LocalGPU
from allranks.machine.processes import die_with_parent

pytestmark = pytest.mark.ranks

NODES = ["n1", "n2", "n3"]
SECONDS = 10.0  # that nodes have which cannot all meet: they wait so long
LATE_SECONDS = 20.0  # that a busy machine may take longer
GLOO = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
Start = Callable[..., subprocess.Popen[str]]


def command(folder: Path, node: str, nodes: list[str], port: int, seconds: float) -> list[str]:
    words = ["--folder", str(folder), "--nodes", ",".join(nodes), "--node", node]
    words += ["--master", f"127.0.0.1:{port}", "--seconds", str(seconds)]
    return [*words, "--gpus", "0"]  # whatever this machine has: none of them is visible to tests


class Played:
    """Nodes played by processes that have torch imported already.

    How long an import takes on a busy machine is not for a test to guess; `python -m` is what
    those tests start in which no time is short.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.nodes: list[Any] = []
        self._context = fork_server()

    def start(self, *names: str, ends_by: int | None = None, of: list[str] | None = None) -> None:
        """All at once. `ends_by`: the signal that each gives itself once it listens."""
        for name in names:
            words = command(self.folder, name, of or NODES, self.port, SECONDS)
            node = self._context.Process(target=_play, args=(words, ends_by))
            self.nodes.append(node)
            node.start()

    def wait(self) -> list[int | None]:
        """Exit codes of the first two; they must have ended in time."""
        until = time.monotonic() + SECONDS + LATE_SECONDS
        for node in self.nodes[:2]:
            node.join(max(0.0, until - time.monotonic()))
        return [node.exitcode for node in self.nodes[:2]]

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
            node.join()
            node.close()


def _play(words: list[str], ends_by: int | None) -> None:
    """In the node's process."""
    die_with_parent()
    os.environ.update(GLOO)
    if ends_by is not None:
        publish = Directory.publish

        def publish_and_end(*args: Any) -> None:
            publish(*args)
            os.kill(os.getpid(), ends_by)

        Directory.publish = publish_and_end  # type: ignore[assignment, method-assign]
    preflight.main(words)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def played(tmp_path: Path, port: int) -> Iterator[Played]:
    nodes = Played(tmp_path, port)
    yield nodes
    nodes.close()


@pytest.fixture
def start(tmp_path: Path, port: int) -> Iterator[Start]:
    """`start(node)` is one node as srun starts it; what still runs afterwards is killed."""
    processes = []

    def start_one(
        node: str, folder: Path = tmp_path, *, nodes: list[str] | None = None, **env: str
    ) -> subprocess.Popen[str]:
        words = command(folder, node, nodes or NODES, port, seconds=200)
        process = subprocess.Popen(
            [sys.executable, "-m", "allranks.doctor.preflight", *words],
            env={**os.environ, **GLOO, **env},
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start_one
    for process in processes:
        process.kill()
        with process:  # closes its pipe, and waits
            pass


def checks(folder: Path, node: str) -> dict[str, dict[str, Any]]:
    record = json.loads((folder / f"{node}.json").read_text())
    assert record["node"] == node
    return {check["name"]: check for check in record["checks"]}


def test_three_nodes_that_are_well(start: Start, tmp_path: Path) -> None:
    for process in [start(node) for node in NODES]:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert "all well" in errors
    found = verdict(tmp_path, NODES)
    assert found.ok, found
    assert found.bandwidth is not None and found.bandwidth > 1e5 and found.backend == "gloo"
    for node in NODES:
        each = checks(tmp_path, node)
        assert each["reach"]["silent"] == {} and each["rendezvous"]["missing"] == []
        assert each["write"]["ok"] and each["disk"]["free_bytes"] > 0
        assert each["allreduce"]["sizes"][0]["bytes"] == 65536
        assert not (tmp_path / f".write-{node}").exists()
    clock = checks(tmp_path, "n2")["clock"]
    assert abs(clock["offset"]) <= clock["round_trip"] / 2 + 0.01
    assert "clock" not in checks(tmp_path, "n1")


def test_a_missing_node_is_named_by_all_in_time(played: Played, tmp_path: Path) -> None:
    played.start("n1", "n3")
    assert played.wait() == [0, 0]
    assert verdict(tmp_path, NODES).failed == {"n2": "did not answer"}
    for node in ("n1", "n3"):
        each = checks(tmp_path, node)
        assert each["reach"]["silent"] == {"n2": "never came"}
        assert each["rendezvous"]["missing"] == ["n2"]


def test_without_the_first_node_the_others_end_in_time(played: Played, tmp_path: Path) -> None:
    played.start("n2", "n3")
    assert played.wait() == [0, 0]
    assert verdict(tmp_path, NODES).failed == {"n1": "did not answer"}
    # Even so they have seen each other: by the files in the folder.
    assert checks(tmp_path, "n2")["reach"]["silent"] == {"n1": "never came"}


def test_a_node_that_cannot_write_is_reported_by_another(start: Start, tmp_path: Path) -> None:
    # A folder that is not there, for a read-only one: root may write everywhere.
    processes = [start("n1"), start("n2", tmp_path / "elsewhere"), start("n3")]
    assert [process.wait() for process in processes] == [0, 0, 0]
    found = verdict(tmp_path, NODES)
    assert list(found.failed) == ["n2"]
    assert found.failed["n2"].startswith("cannot write in ")
    assert checks(tmp_path, "n1")["reach"]["ok"] and checks(tmp_path, "n2")["allreduce"]["ok"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_dies_or_hangs_midway(
    played: Played, tmp_path: Path, how: signal.Signals
) -> None:
    played.start("n1", "n2")
    played.start("n3", ends_by=how)
    assert played.wait() == [0, 0]
    found = verdict(tmp_path, NODES)
    assert found.failed == {"n3": "did not answer"} and not found.trouble


def test_a_node_that_hangs_in_the_all_reduce(played: Played, tmp_path: Path, port: int) -> None:
    """Played by this process: it comes to the rendezvous and does nothing more."""
    import torch.distributed as dist

    played.start("n1", "n2")
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    store.set("came/n3", json.dumps({"addresses": [], "port": 9, "cuda": False}))
    assert played.wait() == [0, 0]
    assert verdict(tmp_path, NODES).failed == {"n3": "did not answer"}
    hung = checks(tmp_path, "n1")["allreduce"]
    assert hung["ok"] is False and hung["seconds"] > 0


LAUNCHER = """
import sys
from allranks.launch.backends.slurm.node_gate import pass_gate
pass_gate(sys.argv[2:], {}, node_rank=int(sys.argv[1]), num_nodes=2)
assert "torch" in sys.modules
"""


def test_launchers_check_their_nodes_and_wait_for_the_verdict(tmp_path: Path, port: int) -> None:
    nodes = NODES[:2]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(rank), *command(tmp_path, node, nodes, port, 200)],
            env={**os.environ, **GLOO},
        )
        for rank, node in enumerate(nodes)
    ]
    try:
        assert started[1].wait(250) == 0  # it goes on to wait for the first node
        while not (tmp_path / ENDED).exists():
            assert started[0].poll() is None
            time.sleep(0.05)
        assert verdict(tmp_path, nodes).ok and started[0].poll() is None
        (tmp_path / OPEN).touch()
        assert started[0].wait(60) == 0
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_one_node_alone_needs_no_torch(start: Start, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise AssertionError('imported')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = start("n1", nodes=["n1"], PYTHONPATH=path)
    assert process.wait() == 0
    assert verdict(tmp_path, ["n1"]).ok
    assert set(checks(tmp_path, "n1")) == {"write", "disk", "gpus", "health"}


def test_a_taken_port_is_no_nodes_fault(played: Played, tmp_path: Path, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        played.start(*NODES[:2], of=NODES[:2])
        assert played.wait() == [0, 0]
    found = verdict(tmp_path, NODES[:2])
    assert not found.failed and "cannot listen at" in found.trouble


@pytest.fixture
def listener() -> Iterator[Callable[..., Listener]]:
    made: list[Listener] = []

    def listen(*args: Any) -> Listener:
        made.append(Listener(*args))
        return made[-1]

    yield listen
    for each in made:
        each.close()


def reach(peer: str, port: int, tmp_path: Path, seconds: float = 2, **more: Any) -> Any:
    directory = Directory(tmp_path)
    directory.publish(peer, {"addresses": ["127.0.0.1"], "port": port})
    return reach_all([peer], directory, deadline=time.monotonic() + seconds, **more)


def test_clocks_that_differ_are_found_out(
    listener: Callable[..., Listener], tmp_path: Path
) -> None:
    port = listener("a", lambda: time.time() + 7.5).port
    clock = reach("a", port, tmp_path, 60, ask_clock_of="a").answered["a"]
    assert clock.offset == pytest.approx(7.5, abs=clock.round_trip / 2 + 0.01)
    assert 0 < clock.round_trip < 1.0  # of several, the quickest


def test_a_closed_port_and_a_stranger_are_not_the_peer(
    listener: Callable[..., Listener], tmp_path: Path
) -> None:
    closed = reach("a", free_port(), tmp_path)
    assert not closed.answered and "Connection refused" in closed.silent["a"]
    stranger = reach("a", listener("b").port, tmp_path)
    assert not stranger.answered and "answered by 'b'" in stranger.silent["a"]


def test_a_peer_told_of_late_is_reached(listener: Callable[..., Listener], tmp_path: Path) -> None:
    directory, port = Directory(tmp_path / "not there"), listener("a").port
    entry = {"addresses": ["127.0.0.1"], "port": port}
    timer = threading.Timer(0.3, directory.tell, ("a", entry))
    timer.start()
    found = reach_all(["a"], directory, deadline=time.monotonic() + 60)
    timer.join()
    assert found.answered == {"a": None} and not found.silent


def test_disks(tmp_path: Path) -> None:
    assert write_test(tmp_path, "a").ok and list(tmp_path.iterdir()) == []
    assert free_disk(tmp_path).ok
    missing = write_test(tmp_path / "missing", "a")
    assert missing.ok is False and "No such file" in missing.value
    assert free_disk(tmp_path / "missing").ok is None


def test_a_node_without_gpus_is_not_asked_for_their_health() -> None:
    assert visible_gpus(0).ok is None and gpu_health(0).ok is None


def test_a_driver_that_does_not_answer_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr("allranks.doctor.node_checks.DRIVER_FILES", (str(driver),))
    assert visible_gpus(2).ok is None
    driver.touch()
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):
        assert visible_gpus(2).ok is False


class Lost(Exception):
    """What NVML raises."""


def install_gpu(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    """One GPU, well but for these answers; an exception among them is raised."""
    usual = {
        "TotalEccErrors": 0,
        "RemappedRows": (0, 0, 0, 0),
        "RetiredPagesPendingStatus": Lost(),  # as where rows are remapped
        "CurrentClocksThrottleReasons": 0x1,  # idle
        "Temperature": 40,
        "TemperatureThreshold": 90,
        "MemoryInfo": SimpleNamespace(used=2**29, total=2**36),
    }

    def answer(value: Any) -> Callable[..., Any]:
        def ask(*_: Any) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        return ask

    functions = {f"nvmlDeviceGet{name}": answer(value) for name, value in (usual | answers).items()}
    names = (
        "MEMORY_ERROR_TYPE_UNCORRECTED VOLATILE_ECC TEMPERATURE_GPU TEMPERATURE_THRESHOLD_SLOWDOWN"
    )
    constants = {f"NVML_{name}": 0 for name in names.split()}
    fake = SimpleNamespace(NVMLError=Lost, nvmlDeviceGetHandleByUUID=str, **functions, **constants)
    gpu = LocalGPU(3, "GPU-3", "NVIDIA A40", 2**36, "8.6", None)
    monkeypatch.setattr("allranks.doctor.node_checks.nvml", lambda: nullcontext(fake))
    monkeypatch.setattr("allranks.doctor.node_checks.local_gpus", lambda: [gpu])
    monkeypatch.setattr("allranks.doctor.node_checks.DRIVER_FILES", ("/",))


def test_as_many_gpus_as_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpu(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert visible_gpus(1).ok and gpu_health(1).ok and gpu_health(1).status == "pass"
    few = visible_gpus(2)
    assert few.ok is False
    assert few.value == "1 of 2 GPUs visible (CUDA_VISIBLE_DEVICES=3): NVIDIA A40"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"TotalEccErrors": 7}, "7 uncorrected memory errors"),
        ({"RemappedRows": (0, 1, 1, 0)}, "next reset"),
        ({"RemappedRows": Lost(), "RetiredPagesPendingStatus": 1}, "next reset"),
        ({"CurrentClocksThrottleReasons": 0x48}, "hardware slowdown, hardware thermal slowdown"),
        ({"Temperature": 91}, "91 °C, and it slows down at 90 °C"),
        ({"MemoryInfo": SimpleNamespace(used=2**35, total=2**36)}, "32 GiB of its memory"),
    ],
)
def test_worries_about_a_gpu(
    answers: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_gpu(monkeypatch, **answers)
    found = gpu_health(1)
    assert found.status == "warn" and words in found.value and found.value.startswith("GPU 3: ")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"RemappedRows": (0, 9, 0, 1)}, "could not be remapped"),
        ({"Temperature": Lost("lost")}, "lost"),
    ],
)
def test_a_broken_gpu(answers: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpu(monkeypatch, **answers)
    found = gpu_health(1)
    assert found.ok is False and words in found.value
