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

from allranks.doctor.node import free_disk, gpu_health, visible_gpus, write_test
from allranks.doctor.reach import Directory, Listener, reach_all
from allranks.gpus import LocalGPU
from allranks.launch.cluster.checks import verdict

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(90)]

NODES = ["n1", "n2", "n3"]
Start = Callable[..., subprocess.Popen[str]]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(tmp_path: Path, port: int) -> Iterator[Start]:
    """`start(node)` plays one node; what still runs afterwards is killed."""
    processes = []

    def play(
        node: str, folder: Path = tmp_path, *, seconds: float = 50, nodes: list[str] | None = None
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "allranks.doctor.preflight", "--folder", str(folder)]
        command += ["--nodes", ",".join(nodes or NODES), "--node", node]
        command += ["--master", f"127.0.0.1:{port}", "--gpus", "2", "--seconds", str(seconds)]
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield play
    for process in processes:
        process.kill()
        with process:  # closes its pipe, and waits
            pass


def checks(folder: Path, node: str) -> dict[str, dict[str, Any]]:
    record = json.loads((folder / f"{node}.json").read_text())
    assert record["node"] == node
    return {check["name"]: check for check in record["checks"]}


def test_three_nodes_that_are_well(start: Start, tmp_path: Path) -> None:
    begun = time.monotonic()
    for process in [start(node) for node in NODES]:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert "all well" in errors
    assert time.monotonic() - begun < 50
    found = verdict(tmp_path, NODES)
    assert found.ok, found
    assert found.bandwidth is not None and found.bandwidth > 1e6 and found.backend == "gloo"
    for node in NODES:
        each = checks(tmp_path, node)
        assert each["reach"]["silent"] == {} and each["rendezvous"]["missing"] == []
        assert each["write"]["ok"] and each["disk"]["free_bytes"] > 0 and each["tmp"]["ok"]
        assert each["allreduce"]["sizes"][0]["bytes"] == 65536
        assert not (tmp_path / f".write-{node}").exists()
    assert abs(checks(tmp_path, "n2")["clock"]["offset"]) < 0.5
    assert "clock" not in checks(tmp_path, "n1")


def test_a_missing_node_is_named_by_all_in_time(start: Start, tmp_path: Path) -> None:
    begun = time.monotonic()
    processes = [start(node, seconds=14) for node in ("n1", "n3")]
    assert [process.wait() for process in processes] == [0, 0]
    assert time.monotonic() - begun < 16
    assert verdict(tmp_path, NODES).failed == {"n2": "did not answer"}
    for node in ("n1", "n3"):
        each = checks(tmp_path, node)
        assert each["reach"]["silent"] == {"n2": "never came"}
        met = each["rendezvous"]
        assert met["ok"] is None or met["missing"] == ["n2"]  # None: no time was left after import


def test_without_the_first_node_the_others_end_in_time(start: Start, tmp_path: Path) -> None:
    begun = time.monotonic()
    processes = [start(node, seconds=10) for node in ("n2", "n3")]
    assert [process.wait() for process in processes] == [0, 0]
    assert time.monotonic() - begun < 12
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
    start: Start, tmp_path: Path, how: signal.Signals
) -> None:
    begun = time.monotonic()
    processes = {node: start(node, seconds=14) for node in NODES}
    while not (tmp_path / "n3.listen").exists():
        assert time.monotonic() - begun < 12
        time.sleep(0.02)
    processes["n3"].send_signal(how)
    assert [processes[node].wait() for node in ("n1", "n2")] == [0, 0]
    assert time.monotonic() - begun < 16
    found = verdict(tmp_path, NODES)
    assert found.failed == {"n3": "did not answer"} and not found.trouble


def test_a_node_that_hangs_in_the_all_reduce(start: Start, tmp_path: Path, port: int) -> None:
    """Played by this process: it comes to the rendezvous and does nothing more."""
    import torch.distributed as dist

    begun = time.monotonic()
    processes = [start(node, seconds=16) for node in ("n1", "n2")]
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=16))
    store.set("came/n3", json.dumps({"addresses": [], "port": 9, "cuda": False}))
    assert [process.wait() for process in processes] == [0, 0]
    assert time.monotonic() - begun < 20
    assert verdict(tmp_path, NODES).failed == {"n3": "did not answer"}
    hung = checks(tmp_path, "n1")["allreduce"]
    assert hung["ok"] is False and hung["seconds"] > 1


def test_one_node_alone_needs_no_torch(start: Start, tmp_path: Path) -> None:
    begun = time.monotonic()
    process = start("n1", nodes=["n1"])
    assert process.wait() == 0
    assert time.monotonic() - begun < 5
    assert verdict(tmp_path, ["n1"]).ok
    assert set(checks(tmp_path, "n1")) == {"write", "disk", "tmp", "gpus", "health"}


def test_a_taken_port_is_no_nodes_fault(start: Start, tmp_path: Path, port: int) -> None:
    begun = time.monotonic()
    with socket.create_server(("127.0.0.1", port)):
        processes = [start(node, seconds=16, nodes=NODES[:2]) for node in NODES[:2]]
        assert [process.wait() for process in processes] == [0, 0]
    assert time.monotonic() - begun < 20
    found = verdict(tmp_path, NODES[:2])
    assert not found.failed and "cannot serve at" in found.trouble


@pytest.fixture
def listener() -> Iterator[Callable[..., Listener]]:
    made: list[Listener] = []

    def listen(*args: Any) -> Listener:
        made.append(Listener(*args))
        return made[-1]

    yield listen
    for each in made:
        each.close()


def reach(peer: str, port: int, tmp_path: Path, **more: Any) -> Any:
    directory = Directory(tmp_path)
    directory.publish(peer, {"addresses": ["127.0.0.1"], "port": port})
    return reach_all([peer], directory, deadline=time.monotonic() + 1, **more)


def test_clocks_that_differ_are_found_out(
    listener: Callable[..., Listener], tmp_path: Path
) -> None:
    port = listener("a", lambda: time.time() + 7.5).port
    clock = reach("a", port, tmp_path, ask_clock_of="a").answered["a"]
    assert clock.offset == pytest.approx(7.5, abs=0.2) and 0 < clock.round_trip < 0.5


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
    found = reach_all(["a"], directory, deadline=time.monotonic() + 5)
    timer.join()
    assert found.answered == {"a": None} and not found.silent


def test_disks(tmp_path: Path) -> None:
    assert write_test(tmp_path, "a").ok and list(tmp_path.iterdir()) == []
    assert free_disk(tmp_path).ok
    missing = write_test(tmp_path / "missing", "a")
    assert missing.ok is False and "No such file" in missing.detail
    assert free_disk(tmp_path / "missing").ok is None


def test_a_node_without_gpus_is_not_asked_for_their_health() -> None:
    assert visible_gpus(0).ok is None and gpu_health(0).ok is None


def test_a_driver_that_does_not_answer_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr("allranks.doctor.node.DRIVER_FILES", (str(driver),))
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
    monkeypatch.setattr("allranks.doctor.node.nvml", lambda: nullcontext(fake))
    monkeypatch.setattr("allranks.doctor.node.local_gpus", lambda: [gpu])
    monkeypatch.setattr("allranks.doctor.node.DRIVER_FILES", ("/",))


def test_as_many_gpus_as_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpu(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert visible_gpus(1).ok and gpu_health(1).ok and not gpu_health(1).warning
    few = visible_gpus(2)
    assert few.ok is False
    assert few.detail == "1 of 2 GPUs visible (CUDA_VISIBLE_DEVICES=3): NVIDIA A40"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"TotalEccErrors": 7}, "7 uncorrected memory errors"),
        ({"RemappedRows": (0, 1, 1, 0)}, "waits for a reset"),
        ({"RemappedRows": Lost(), "RetiredPagesPendingStatus": 1}, "waits for a reset"),
        ({"CurrentClocksThrottleReasons": 0x48}, "hardware slowdown, hardware thermal slowdown"),
        ({"Temperature": 91}, "91 degrees, and it slows down at 90"),
        ({"MemoryInfo": SimpleNamespace(used=2**35, total=2**36)}, "32.0 GiB of its memory"),
    ],
)
def test_worries_about_a_gpu(
    answers: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_gpu(monkeypatch, **answers)
    found = gpu_health(1)
    assert found.ok and words in found.warning and found.warning.startswith("GPU 3: ")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"RemappedRows": (0, 9, 0, 1)}, "could not be replaced"),
        ({"Temperature": Lost("lost")}, "lost"),
    ],
)
def test_a_broken_gpu(answers: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpu(monkeypatch, **answers)
    found = gpu_health(1)
    assert found.ok is False and words in found.detail
