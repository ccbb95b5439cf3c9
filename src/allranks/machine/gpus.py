"""The GPUs of this machine, through NVML, and the catalogue of boards in gpus.yaml."""

import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

# pynvml takes 25 ms to import: look for a driver (Linux, WSL) before paying that.
DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")
MEMORY_TOLERANCE = 0.12  # between a board's memory as sold and as NVML or a site's SLURM says it
READ = 0  # pynvml's NVML_P2P_CAPS_INDEX_READ is a tuple by mistake, which NVML does not take
# Bits of NVML's "clocks event reasons". A busy GPU reaches its power cap even if nothing is wrong.
POWER_CAP = 0x04
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
LINKS = ("NVLink", "PCIe", "PCIe across sockets", "unknown")  # from the fastest to the slowest

Answer = TypeVar("Answer")
Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Link:
    """How one GPU reaches the others of its node."""

    kind: Literal["nvlink", "pcie", "infinity fabric"]
    bytes_per_second: float  # of one GPU, all its links together, one direction


@dataclass(frozen=True, slots=True)
class GPU:
    """One board of the catalogue."""

    name: str
    pattern: str  # matches the whole name, of NVML or of SLURM, as `plain_name` writes it
    memory_bytes: int  # as sold; the driver keeps some of it, so NVML shows up to 8% less
    memory_bandwidth: float  # bytes per second
    compute_capability: str  # as CUDA counts: "9.0"; AMD's target name: "gfx90a"
    source: str  # title and address of the datasheet
    # Dense FLOP per second by precision, without those that the chip lacks or that are unsure.
    peak_flops: Mapping[Precision, float] = field(hash=False, repr=False)
    link: Link  # that every such board has
    bridge: Link | None = None  # NVLink or Infinity Fabric, if a bridge joins 2 to 4 cards


@dataclass(frozen=True, slots=True)
class LocalGPU:
    """One GPU that this process may use; its position in `local_gpus()` is the local rank."""

    index: int  # nvidia-smi's
    uuid: str
    name: str
    memory_bytes: int  # 0 if the GPU has no memory of its own (it shares the host's)
    compute_capability: str  # "9.0"
    catalogue: GPU | None


def plain_name(name: str) -> str:
    """A name of NVML's or of a SLURM gres in the form that the catalogue's patterns match.

    'NVIDIA A100-SXM4-80GB' and 'nvidia_a100-sxm4-80gb' are both 'a100 sxm4 80gb'.
    """
    words = re.split(r"[\s_-]+", name.strip().lower())
    vendors = ("nvidia", "tesla", "geforce", "amd", "instinct")
    return " ".join(itertools.dropwhile(lambda word: word in vendors, words))


@cache
def catalogue() -> tuple[GPU, ...]:
    """The boards of gpus.yaml, in its order."""
    import yaml  # takes 15 ms, which a machine without GPUs saves

    content = yaml.safe_load(Path(__file__).with_name("gpus.yaml").read_text())
    gpus = []
    for board in content["boards"]:
        chip, bridge = content["chips"][board["chip"]], board.get("bridge")
        gpu = GPU(
            name=board["name"],
            pattern=board["matches"],
            memory_bytes=board["memory"]["gib"] * GIB,
            memory_bandwidth=board["memory"]["terabytes_per_second"] * 1e12,
            compute_capability=chip["compute_capability"],
            source=chip["source"],
            peak_flops={name: number * 1e12 for name, number in chip["teraflops"].items()},
            link=Link(board["link"]["kind"], board["link"]["rate"] / 2 * 1e9),
            bridge=Link(bridge["kind"], bridge["rate"] / 2 * 1e9) if bridge else None,
        )
        gpus.append(gpu)
    return tuple(gpus)


def find_gpu(name: str, memory_bytes: int | None = None) -> GPU | None:
    """The board with a name of NVML's or SLURM's; None for a MIG slice or an unknown board.

    `memory_bytes` decides between several boards of one name (a100: 40 or 80 GB). Without it, the
    one with the least memory is taken, SXM modules first: a plan for it does not run out of memory.
    """
    plain = plain_name(name)
    found = [gpu for gpu in catalogue() if re.fullmatch(gpu.pattern, plain)]
    if memory_bytes is None:
        return min(found, key=lambda gpu: gpu.memory_bytes, default=None)

    def misfit(gpu: GPU) -> float:
        return abs(memory_bytes / gpu.memory_bytes - 1)

    best = min(found, key=misfit, default=None)
    return best if best is not None and misfit(best) <= MEMORY_TOLERANCE else None


def visible_devices(value: str | None, uuids: Sequence[str]) -> list[int | str] | None:
    """What CUDA_VISIBLE_DEVICES selects: places in `uuids`, or the UUID of a MIG slice.

    As in CUDA: None (not set) is everything, the first wrong entry ends the list, and a UUID may
    be cut short as long as it stays unique.
    """
    if value is None:
        return None
    chosen: list[int | str] = []
    for entry in (text.strip() for text in value.split(",")):
        if entry.startswith("MIG-"):
            place: int | str = entry
        elif entry.startswith("GPU-"):
            matches = [i for i, uuid in enumerate(uuids) if uuid.startswith(entry)]
            if len(matches) != 1:
                break
            place = matches[0]
        elif entry.isdecimal() and int(entry) < len(uuids):
            place = int(entry)
        else:
            break
        if place in chosen:
            break
        chosen.append(place)
    return chosen


@contextmanager
def nvml() -> Iterator[Any]:
    """The pynvml module while NVML is up, or None without module, driver or GPU.

    May be nested at no cost: NVML counts its users.
    """
    if "pynvml" not in sys.modules and not any(map(os.path.exists, DRIVER_FILES)):
        yield None
        return
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _ask(question: Callable[[Any], Answer], otherwise: Answer) -> Answer:
    """What NVML answers; `otherwise` without it, or if it fails."""
    with nvml() as pynvml:
        if pynvml is None:
            return otherwise
        try:
            return question(pynvml)
        except pynvml.NVMLError:
            return otherwise


def local_gpus() -> list[LocalGPU]:
    """The NVIDIA GPUs that CUDA would show this process; empty without any, or if NVML fails.

    Numbers in CUDA_VISIBLE_DEVICES are read in NVML's order, that of the PCI bus. CUDA's own
    default is CUDA_DEVICE_ORDER=FASTEST_FIRST, which differs only where the GPUs of a machine do.
    """

    def find(pynvml: Any) -> list[LocalGPU]:
        handles = [*map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))]
        uuids = [*map(pynvml.nvmlDeviceGetUUID, handles)]
        chosen = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
        if chosen is not None:
            handles = [
                pynvml.nvmlDeviceGetHandleByUUID(place)
                if isinstance(place, str)
                else handles[place]
                for place in chosen
            ]
        return [_describe(pynvml, handle) for handle in handles]

    return _ask(find, [])


def _pairs(pynvml: Any, gpus: Sequence[LocalGPU]) -> Iterator[tuple[Any, Any]]:
    handles = [pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus]
    return itertools.combinations(handles, 2)


def gpu_link(gpus: Sequence[LocalGPU]) -> str:
    """The slowest link between any two of these GPUs of this machine, in words.

    One of `LINKS`, or 'none' for fewer than two GPUs; 'unknown' if NVML does not say.
    """
    if len(gpus) < 2:
        return "none"

    def slowest(pynvml: Any) -> str:
        return max((_link(pynvml, a, b) for a, b in _pairs(pynvml, gpus)), key=LINKS.index)

    return _ask(slowest, "unknown")


def peer_access(gpus: Sequence[LocalGPU]) -> bool | None:
    """Whether any of these GPUs can read another's memory; None for one, or if NVML is silent."""
    if len(gpus) < 2 or any(gpu.uuid.startswith("MIG-") for gpu in gpus):
        return None

    def reads(pynvml: Any) -> bool | None:
        known = {
            pynvml.NVML_P2P_STATUS_OK: True,
            pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED: False,
            pynvml.NVML_P2P_STATUS_GPU_NOT_SUPPORTED: False,
            pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY: False,
        }
        pairs = _pairs(pynvml, gpus)
        states = {known.get(pynvml.nvmlDeviceGetP2PStatus(a, b, READ)) for a, b in pairs}
        return True if True in states else None if None in states else False

    return _ask(reads, None)


def driver_versions() -> dict[str, str | None]:
    """The version of the NVIDIA driver, and of the newest CUDA that it runs; None without one."""

    def versions(pynvml: Any) -> dict[str, str | None]:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()  # 12040 is 12.4
        newest = f"{cuda // 1000}.{cuda % 1000 // 10}"
        return {"driver": pynvml.nvmlSystemGetDriverVersion(), "cuda_driver": newest}

    return _ask(versions, {"driver": None, "cuda_driver": None})


def _describe(pynvml: Any, handle: Any) -> LocalGPU:
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    name = pynvml.nvmlDeviceGetName(handle)
    board = handle  # a MIG slice has no index and no capability of its own
    if uuid.startswith("MIG-"):
        board = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(board)
    try:
        memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:
        memory_bytes = 0
    return LocalGPU(
        index=pynvml.nvmlDeviceGetIndex(board),
        uuid=uuid,
        name=name,
        memory_bytes=memory_bytes,
        compute_capability=f"{major}.{minor}",
        catalogue=find_gpu(name, memory_bytes or None) if board is handle else None,
    )


def _link(pynvml: Any, a: Any, b: Any) -> str:
    if _nvlinked(pynvml, a, b):
        return "NVLink"
    try:
        ancestor = pynvml.nvmlDeviceGetTopologyCommonAncestor(a, b)
    except pynvml.NVMLError:
        return "unknown"
    return "PCIe across sockets" if ancestor >= pynvml.NVML_TOPOLOGY_SYSTEM else "PCIe"


def _nvlinked(pynvml: Any, a: Any, b: Any) -> bool:
    try:  # right for direct links, bridges and NVSwitch alike
        status = pynvml.nvmlDeviceGetP2PStatus(a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        return bool(status == pynvml.NVML_P2P_STATUS_OK)
    except pynvml.NVMLError:  # virtual machines may hide it: a switch joins all its GPUs
        return all(_reaches_switch(pynvml, handle) for handle in (a, b))


def _reaches_switch(pynvml: Any, handle: Any) -> bool:
    try:
        return bool(
            pynvml.nvmlDeviceGetNvLinkState(handle, 0)
            and pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, 0)
            == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        )
    except pynvml.NVMLError:
        return False
