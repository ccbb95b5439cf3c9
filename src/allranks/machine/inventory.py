"""What the machine itself has for training: GPUs, CUDA, NCCL, MPI, UCX and its links. No torch.

Programs that are missing, or do not answer soon, leave None.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from allranks.machine.hardware import inventory, package_versions

SYS = Path("/sys")
PROGRAM_SECONDS = 5.0  # a module's wrapper on a busy network disk can take long
TOOLKIT_FOLDERS = (Path("/usr/local/cuda"),)
LIBRARY_FOLDERS = (
    Path("/usr/lib/x86_64-linux-gnu"),
    Path("/usr/lib/aarch64-linux-gnu"),
    Path("/usr/lib64"),
    Path("/usr/local/lib"),
    Path("/usr/local/cuda/lib64"),
)
LOOPBACK = "772"  # ARPHRD_LOOPBACK in /sys/class/net/*/type
INFINIBAND = "32"


def describe_machine(sys: Path = SYS, env: Mapping[str, str] = os.environ) -> dict[str, object]:
    """This machine in plain values; `sys` and `env` stand in for the real ones in tests."""
    packages = package_versions()
    machine = inventory()
    driver, newest = machine.pop("driver", None), machine.pop("cuda_driver", None)
    return {
        **machine,
        "cuda": {
            "driver": driver,
            "driver_runs": newest,  # the newest CUDA that it can
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
    """What a program prints, or None: it is not here, fails, or takes too long."""
    found = shutil.which(program)
    if found is None:
        return None
    try:
        done = subprocess.run(
            [found, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAM_SECONDS,
            env={**os.environ, "LC_ALL": "C"},
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout or done.stderr


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
    """NCCL's version and where it is from: torch's package first, which is what torch loads."""
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
    ports: list[dict[str, object]] = []
    root = sys / "class/infiniband"
    for device in names_in(root):
        for port in names_in(root / device / "ports"):
            folder = root / device / "ports" / port
            rate = read(folder / "rate")
            ports.append(
                {
                    "device": device,
                    "port": int(port) if port.isdecimal() else port,
                    "state": state_word(read(folder / "state")),
                    "rate": rate,
                    "bits_per_second": parse_rate(rate),
                    "link_layer": read(folder / "link_layer"),
                    "interfaces": names_in(root / device / "device/net"),
                }
            )
    return ports


def state_word(text: str | None) -> str | None:
    """'active' out of sysfs's '4: ACTIVE'."""
    return text.rpartition(":")[2].strip().lower() if text else None


def parse_rate(text: str | None) -> float | None:
    """Bits per second of sysfs's '200 Gb/sec (4X HDR)'."""
    match = re.match(r"(\d{1,6}(?:\.\d{1,6})?) Gb/sec", text or "")
    return float(match[1]) * 1e9 if match else None


def network(sys: Path = SYS) -> list[dict[str, object]]:
    """The network interfaces but loopback. The speed is None where the driver does not know it."""
    interfaces: list[dict[str, object]] = []
    root = sys / "class/net"
    for name in names_in(root):
        kind = read(root / name / "type")
        if kind is None or kind == LOOPBACK:  # without a type it is a file: bonding_masters
            continue
        megabits = read(root / name / "speed") or ""
        known = re.fullmatch(r"[0-9]{1,9}", megabits) and int(megabits) > 0
        interfaces.append(
            {
                "name": name,
                "state": read(root / name / "operstate"),
                "kind": "infiniband" if kind == INFINIBAND else "ethernet",
                "bits_per_second": int(megabits) * 1e6 if known else None,
                "physical": (root / name / "device").exists(),
            }
        )
    return interfaces


def names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def read(path: Path) -> str | None:
    """One value of sysfs; None where it is missing, or the driver refuses (EINVAL when down)."""
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None
