"""What the checks of a machine look at: plain data, which `collect` reads from the machine."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from allranks.doctor.finding import Check
from allranks.doctor.node_checks import gpu_health
from allranks.errors import AllranksError
from allranks.machine import allotted
from allranks.machine import inventory as machine
from allranks.machine.disks import FolderFacts, look_at
from allranks.machine.gpus import (
    DRIVER_FILES,
    LocalGPU,
    driver_versions,
    gpu_link,
    local_gpus,
    nvml,
    peer_access,
)
from allranks.machine.network import (
    Interface,
    Port,
    infiniband_ports,
    is_taken,
    names_in,
    read_value,
    up_interfaces,
)
from allranks.machine.nodelist import expand
from allranks.show.numbers import duration

TORCH_SECONDS = 20.0
RESOLVE_SECONDS = 3.0
DEFAULT_PORT = 29500  # where torch's ranks meet if nobody says otherwise
NVIDIA = "0x10de"
TIME_ERROR = 5  # adjtimex: the clock is not synchronised
ASK_TORCH = """
import json, time
start = time.perf_counter()
import torch
nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
print(json.dumps({"seconds": time.perf_counter() - start, "version": torch.__version__,
    "cuda": torch.version.cuda, "available": torch.cuda.is_available(),
    "count": torch.cuda.device_count(), "archs": torch.cuda.get_arch_list(), "nccl": nccl}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """The installed torch, by its files; `asked` is its own answer, if it was asked."""

    version: str | None = None
    cuda: str | None = None  # the version it was built for
    nccl: str | None = None  # the version that comes with it
    asked: Mapping[str, Any] | None = None
    problem: str = ""  # why it could not be asked


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """One machine at one moment."""

    env: Mapping[str, str] = field(default_factory=dict)
    host: str = "localhost"
    host_address: str | None = "10.0.0.1"  # what its own name resolves to
    default_port_taken: bool = False
    has_nvidia_card: bool = False  # on the PCI bus
    has_driver: bool = False
    nvml_answers: bool = False
    driver: str | None = None
    driver_cuda: str | None = None  # the newest version it supports
    gpus: tuple[LocalGPU, ...] = ()
    num_gpus_in_all: int = 0  # whatever CUDA_VISIBLE_DEVICES says
    gpu_link: str = "none"
    peer_access: bool | None = None
    health: Check | None = None
    torch: TorchFacts = TorchFacts()
    other_nccl: tuple[str, ...] = ()  # libraries found before torch's own
    interfaces: tuple[Interface, ...] = ()
    names: tuple[str, ...] = ()  # of all interfaces, up or not
    ports: tuple[Port, ...] = ()  # of InfiniBand and RoCE
    cpus: int = 1
    cpus_allotted: int = 1
    memory_bytes: int = 0
    memory_allotted: int = 0
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # soft, hard; -1: none
    shm: tuple[int, int] | None = None  # bytes of /dev/shm, and how many are free
    clock_synchronised: bool | None = None
    clock_error: float | None = None  # seconds at most, as the kernel estimates
    folders: tuple[FolderFacts, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Nodes of the SLURM job that this runs in; 1 outside of a job."""
        try:
            return max(1, len(expand(self.env.get("SLURM_JOB_NODELIST", ""))))
        except AllranksError:
            return 1


def collect(
    runs: Path,
    data: Sequence[Path] = (),
    *,
    env: Mapping[str, str] = os.environ,
    sys_root: Path = Path("/sys"),
    shm: Path = Path("/dev/shm"),
) -> MachineFacts:
    """Look at this machine; takes a few seconds where torch must be asked."""
    has_driver = any(map(os.path.exists, DRIVER_FILES))
    with ThreadPoolExecutor(4) as pool:
        torch = pool.submit(torch_facts, ask=has_driver)
        address = pool.submit(own_address)
        folders = [pool.submit(look_at, runs, "runs", writes=True)]
        folders += [pool.submit(look_at, folder, "data", writes=False) for folder in data]
        synchronised, error = clock_state()
        return MachineFacts(
            **gpu_facts(),
            env=dict(env),
            has_driver=has_driver,
            has_nvidia_card=has_nvidia_card(sys_root),
            host=socket.gethostname(),
            default_port_taken=is_taken(DEFAULT_PORT),
            interfaces=tuple(up_interfaces()),
            names=tuple(names_in(sys_root / "class/net")),
            ports=tuple(infiniband_ports(sys_root)),
            cpus=os.cpu_count() or 1,
            cpus_allotted=allotted.cpus_allotted(),
            memory_bytes=allotted.memory_total(),
            memory_allotted=allotted.memory_allotted(),
            limits=limits(),
            shm=_size_of(shm),
            clock_synchronised=synchronised,
            clock_error=error,
            other_nccl=other_nccl(env),
            torch=torch.result(),
            host_address=address.result(),
            folders=tuple(folder.result() for folder in folders),
        )


def gpu_facts() -> dict[str, Any]:
    with nvml() as pynvml:
        if pynvml is None:
            return {"nvml_answers": False}
        gpus, in_all = local_gpus(), 0
        with suppress(pynvml.NVMLError):
            in_all = int(pynvml.nvmlDeviceGetCount())
        versions = driver_versions()
        return {
            "nvml_answers": True,
            "gpus": tuple(gpus),
            "num_gpus_in_all": in_all,
            "driver": versions["driver"],
            "driver_cuda": versions["cuda_driver"],
            "gpu_link": gpu_link(gpus),
            "peer_access": peer_access(gpus),
            "health": gpu_health(len(gpus)),
        }


def has_nvidia_card(sys_root: Path) -> bool:
    """Whether there is an NVIDIA display or 3D controller, with or without a driver."""
    for folder in (sys_root / "bus/pci/devices").glob("*"):
        kind = read_value(folder / "class") or ""
        if read_value(folder / "vendor") == NVIDIA and kind.startswith("0x03"):
            return True
    return False


def torch_facts(*, ask: bool) -> TorchFacts:
    """From torch's files and, where there are GPUs, from a process that imports it."""
    packages = machine.package_versions()
    nccl = (machine.nccl(packages, {}) or {}).get("version")
    known = TorchFacts(version=packages.get("torch"), cuda=machine.torch_cuda(), nccl=nccl)
    if not ask or known.version is None:
        return known
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_TORCH],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TORCH_SECONDS,
            check=False,
        )
        if done.returncode == 0:
            return replace(known, asked=json.loads(done.stdout))
        problem = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        problem = f"its import had not finished after {duration(TORCH_SECONDS, whole=True)}"
    except (OSError, ValueError) as error:
        problem = str(error)
    return replace(known, problem=problem)


def own_address() -> str | None:
    """The address that this machine's own name resolves to, if any."""
    found: list[str] = []

    def look_up() -> None:
        with suppress(OSError, UnicodeError):
            found.append(socket.gethostbyname(socket.gethostname()))

    thread = threading.Thread(target=look_up, daemon=True)  # a name server may never answer
    thread.start()
    thread.join(RESOLVE_SECONDS)
    return found[0] if found else None


def limits() -> dict[str, tuple[int, int]]:
    """The soft and hard limits of this process; -1 means unlimited."""
    kinds = {
        "nofile": resource.RLIMIT_NOFILE,
        "memlock": resource.RLIMIT_MEMLOCK,
        "stack": resource.RLIMIT_STACK,
        "nproc": resource.RLIMIT_NPROC,
    }
    return {name: resource.getrlimit(kind) for name, kind in kinds.items()}


class _Timex(ctypes.Structure):
    """The beginning of Linux's struct timex, with room for the rest."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("max_error", ctypes.c_long),  # microseconds
        ("room", ctypes.c_char * 256),
    ]


def clock_state() -> tuple[bool | None, float | None]:
    """Whether the kernel trusts its clock, and how many seconds it may be off at most."""
    if sys.platform != "linux":
        return None, None
    state = _Timex()
    answer = ctypes.CDLL(None).adjtimex(ctypes.byref(state))
    if answer < 0:
        return None, None
    return answer != TIME_ERROR, state.max_error / 1e6


def _size_of(folder: Path) -> tuple[int, int] | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def other_nccl(env: Mapping[str, str]) -> tuple[str, ...]:
    """NCCL libraries that the dynamic loader finds before the one that came with torch."""
    folders = [Path(part) for part in env.get("LD_LIBRARY_PATH", "").split(":") if part]
    found = [
        str(folder / name)
        for folder in folders
        if "nvidia/nccl" not in str(folder)  # torch's own
        for name in names_in(folder)
        if name.startswith("libnccl.so.")
    ]
    preloaded = env.get("LD_PRELOAD", "").replace(":", " ").split()
    return (*found, *(name for name in preloaded if "libnccl.so" in name))
