"""What a machine has for training: hardware, packages, code, CUDA, NCCL, MPI, UCX and links.

What only a program could say is None if that is missing, or does not answer soon.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import allranks
from allranks.machine.allotted import PROC, cpus_allotted, memory_allotted, memory_total
from allranks.machine.gpus import driver_versions, gpu_link, local_gpus, nvml
from allranks.machine.network import SYS, infiniband_ports, names_in, network
from allranks.machine.processes import output_of

GIT_SECONDS = 5.0  # a status on a busy network disk can take minutes
PACKAGES = (
    *("torch", "numpy", "torchvision", "lightning", "pytorch-lightning", "accelerate"),
    *("transformers", "datasets", "deepspeed", "xgboost", "lightgbm", "scikit-learn"),
    *("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-ml-py"),
)
PROGRAM_SECONDS = 5.0  # a module's wrapper on a busy network disk can take long
TOOLKIT_FOLDERS = (Path("/usr/local/cuda"),)
LIBRARY_FOLDERS = tuple(
    Path("/usr", below)
    for below in (
        *("lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "lib64"),
        *("local/lib", "local/cuda/lib64"),
    )
)


def describe_machine(sys: Path = SYS, env: Mapping[str, str] = os.environ) -> dict[str, object]:
    """This machine in plain values; `sys` and `env` stand in for the real ones in tests."""
    packages = package_versions()
    machine = inventory()
    driver, newest = machine.pop("driver", None), machine.pop("cuda_driver", None)
    return {
        **machine,
        "cuda": {
            "driver": driver,
            "driver_runs": newest,  # the newest CUDA that it supports
            "toolkit": cuda_toolkit(env),
            "torch": packages.get("torch"),
            "torch_cuda": torch_cuda(),
        },
        "nccl": nccl(packages, env),
        "mpi": first_line(answer("mpirun", "--version")),
        "ucx": parse_ucx(answer("ucx_info", "-v")),
        "infiniband": infiniband(sys),
        "network": network(sys),
    }


def answer(program: str, *arguments: str) -> str | None:
    """What a program prints in English; None if it is not installed, fails, or takes too long."""
    return output_of([program, *arguments], PROGRAM_SECONDS, {**os.environ, "LC_ALL": "C"})


def first_line(text: str | None) -> str | None:
    lines = (text or "").strip().splitlines()
    return lines[0].strip() if lines else None


def parse_nvcc(text: str | None) -> str | None:
    """'12.4.131' out of 'Cuda compilation tools, release 12.4, V12.4.131'."""
    match = re.search(r"\bV(\d+(?:\.\d+)+)", text or "") or re.search(
        r"release (\d+(?:\.\d+)+)", text or ""
    )
    return match[1] if match else None


def parse_ucx(text: str | None) -> str | None:
    """The version in '# Library version: 1.15.0' or, before 1.14, '# UCT version=1.12.1'."""
    match = re.search(r"version\s*[=:]\s*(\d+(?:\.\d+)+)", text or "", re.IGNORECASE)
    return match[1] if match else None


def parse_torch_version(text: str) -> str | None:
    """The CUDA in torch/version.py: `cuda: Optional[str] = '12.4'`; None for a CPU build."""
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"\n]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def cuda_toolkit(env: Mapping[str, str]) -> str | None:
    """The version of nvcc on PATH, in CUDA_HOME or in /usr/local/cuda."""
    homes = [Path(env[name]) for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    for program in ("nvcc", *(str(home / "bin/nvcc") for home in (*homes, *TOOLKIT_FOLDERS))):
        version = parse_nvcc(answer(program, "--version"))
        if version is not None:
            return version
    return None


def torch_cuda() -> str | None:
    """The CUDA that the installed torch was built for, read as text: torch is not imported."""
    from importlib.util import find_spec

    try:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        return parse_torch_version(Path(spec.origin).with_name("version.py").read_text())
    except (OSError, ValueError, ImportError):
        return None


def nccl(packages: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str] | None:
    """NCCL's version and where it was found: first in the package, which torch loads."""
    for package, version in sorted(packages.items()):
        if package.startswith("nvidia-nccl-cu"):
            return {"version": version, "from": package}
    homes = [Path(env[name]) / "lib" for name in ("NCCL_HOME", "CONDA_PREFIX") if env.get(name)]
    paths = [Path(part) for part in env.get("LD_LIBRARY_PATH", "").split(":") if part]
    for folder in (*homes, *paths, *LIBRARY_FOLDERS):
        found = newest_nccl(names_in(folder))
        if found is not None:
            return {"version": found, "from": str(folder)}
    return None


def newest_nccl(names: Iterable[str]) -> str | None:
    """The newest version among files such as libnccl.so.2.18.3."""
    found = (re.fullmatch(r"libnccl\.so\.([0-9]+(?:\.[0-9]+)+)", name) for name in names)
    versions = [match[1] for match in found if match]
    return max(versions, key=lambda text: [int(part) for part in text.split(".")], default=None)


def infiniband(sys: Path = SYS) -> list[dict[str, object]]:
    """Every port of every RDMA device, with its rate; RoCE ports have the link layer Ethernet."""
    return [
        {
            "device": port.device,
            "port": port.number,
            "state": None if port.state == "unknown" else port.state.lower(),
            "rate": port.rate or None,
            "bits_per_second": port.bits_per_second,
            "link_layer": None if port.link_layer == "unknown" else port.link_layer,
            "interfaces": list(port.interfaces),
        }
        for port in infiniband_ports(sys)
    ]


def inventory() -> dict[str, object]:
    """What run.json records about the machine; plain values only."""
    with nvml():  # one start of NVML for the three below
        gpus = local_gpus()
        link = gpu_link(gpus)
        versions = driver_versions()
    return {
        "host": socket.gethostname(),
        "os": _system(),
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count() or 1,
        "cpus_allotted": cpus_allotted(),
        "memory_bytes": memory_total(),
        "memory_allotted_bytes": memory_allotted(),
        "gpus": [
            {**asdict(gpu), "catalogue": gpu.catalogue.name if gpu.catalogue else None}
            for gpu in gpus
        ],
        "gpu_link": link,
        **versions,
    }


def package_versions() -> dict[str, str]:
    """The versions of Python, allranks and packages that matter, without importing them."""
    from importlib import metadata  # takes 20 ms, which --help saves

    versions = {"python": platform.python_version(), "allranks": allranks.__version__}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def code_version(folder: Path) -> dict[str, object] | None:
    """The git commit of `folder`, and whether tracked files were changed since; None without git.

    `dirty` is None where git did not answer in time.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "dirty": None if changes is None else bool(changes.strip())}


def _git(folder: Path, *arguments: str) -> str | None:
    # GIT_DIR and the like of a surrounding git hook would name another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    return output_of(command, GIT_SECONDS, env | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"})


def _cpu_model() -> str:
    try:
        lines = (PROC / "cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(itertools.chain(names, [platform.processor() or platform.machine()]))


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()
