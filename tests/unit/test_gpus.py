"""The GPU catalogue, and the GPUs of a machine as told by a NVML that is not there."""

import dataclasses
import itertools
import re
import sys
import time
import types
from typing import Any

import pytest

from allranks.machine import gpus
from allranks.machine.gpus import (
    GIB,
    GPU,
    catalogue,
    driver_versions,
    find_gpu,
    gpu_link,
    local_gpus,
)

NVML_NAMES = {
    "Tesla V100-SXM2-16GB": "V100 SXM2 16GB",
    "Tesla V100-SXM2-32GB": "V100 SXM2 32GB",
    "Tesla V100-PCIE-16GB": "V100 PCIe 16GB",
    "Tesla V100-PCIE-32GB": "V100 PCIe 32GB",
    "Tesla V100S-PCIE-32GB": "V100S PCIe 32GB",
    "Tesla T4": "T4",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA A30": "A30",
    "NVIDIA A40": "A40",
    "NVIDIA A100-SXM4-40GB": "A100 SXM4 40GB",
    "A100-SXM4-80GB": "A100 SXM4 80GB",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe 80GB",
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA H100 80GB HBM3": "H100 SXM5",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200 SXM5",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA B200": "B200",
    "AMD Instinct MI210": "MI210",
    "AMD Instinct MI250X": "MI250X die",
    "AMD Instinct MI300X": "MI300X",
}
SLURM_NAMES = {
    "a100": "A100 SXM4 40GB",  # the least memory of what it may be
    "a100-80gb": "A100 SXM4 80GB",
    "a100_80gb": "A100 SXM4 80GB",
    "a100-sxm4-80gb": "A100 SXM4 80GB",
    "nvidia_a100_80gb_pcie": "A100 PCIe 80GB",
    "a100-pcie-40gb": "A100 PCIe 40GB",
    "h100": "H100 SXM5",
    "nvidia_h100_80gb_hbm3": "H100 SXM5",
    "h100_nvl": "H100 NVL",
    "h200": "H200 SXM5",
    "l40s": "L40S",
    "v100": "V100 SXM2 16GB",
    "tesla_v100-sxm2-32gb": "V100 SXM2 32GB",
    "rtx_a6000": "RTX A6000",
    "a6000": "RTX A6000",
    "rtx3090": "RTX 3090",
    "nvidia_geforce_rtx_4090": "RTX 4090",
    "rtx_6000_ada": "RTX 6000 Ada",
    "mi250x": "MI250X die",
}
STRANGERS = (
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "a100_3g.20gb",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5090 D",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "Quadro RTX 6000",
    "a1000",
    "gpu",
    "nvidia",
    "",
)


@pytest.mark.parametrize(("name", "board"), [*NVML_NAMES.items(), *SLURM_NAMES.items()])
def test_names_of_nvml_and_slurm_find_their_board(name: str, board: str) -> None:
    found = find_gpu(name)
    assert found is not None
    assert found.name == board


@pytest.mark.parametrize("name", STRANGERS)
def test_other_boards_and_slices_find_nothing(name: str) -> None:
    assert find_gpu(name) is None


def test_no_two_boards_claim_one_nvml_name() -> None:
    for name in NVML_NAMES:
        matches = [g.name for g in catalogue() if re.fullmatch(g.pattern, gpus.plain_name(name))]
        assert len(matches) == 1, (name, matches)
    assert set(NVML_NAMES.values()) == {gpu.name for gpu in catalogue()}


@pytest.mark.parametrize(
    ("name", "mebibytes", "board"),
    [
        ("a100", 81920, "A100 SXM4 80GB"),
        ("a100", 40536, "A100 SXM4 40GB"),
        ("v100", 32510, "V100 SXM2 32GB"),
        ("NVIDIA L40S", 46068, "L40S"),
        ("Tesla T4", 15109, "T4"),
        ("NVIDIA H200", 143771, "H200 SXM5"),
        ("NVIDIA B200", 183359, "B200"),
        ("a100", 65536, None),  # a site's own board
        ("h100", 95830, None),  # nor is every h100 an 80 GB one
    ],
)
def test_memory_settles_the_variant(name: str, mebibytes: int, board: str | None) -> None:
    found = find_gpu(name, mebibytes * 2**20)
    assert (found.name if found else None) == board


@pytest.mark.parametrize("gpu", catalogue(), ids=lambda gpu: gpu.name)
def test_catalogue_is_plausible(gpu: GPU) -> None:
    assert "https://" in gpu.source
    peaks = gpu.peak_flops
    order = [peaks[name] for name in ("fp32", "tf32", "bf16", "fp8") if name in peaks]
    assert order == sorted(order)
    assert peaks["fp16"] >= peaks["fp32"]
    assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]
    assert 1e12 < min(peaks.values()) <= max(peaks.values()) < 1e16
    assert 16 * GIB <= gpu.memory_bytes <= 192 * GIB
    assert 0.3e12 <= gpu.memory_bandwidth <= 8e12
    assert 16e9 <= gpu.link.bytes_per_second <= 900e9
    assert gpu.bridge is None or gpu.bridge.bytes_per_second > gpu.link.bytes_per_second
    old = gpu.compute_capability.startswith("7.")
    assert ("bf16" in peaks) is not old
    with pytest.raises(dataclasses.FrozenInstanceError):
        gpu.name = ""  # type: ignore[misc]
    assert hash(gpu)


# --- NVML


@dataclasses.dataclass
class Board:
    name: str = "NVIDIA A100-SXM4-80GB"
    uuid: str = "GPU-0"
    mebibytes: int = 81920
    index: int = 0


class FakeNVMLError(Exception):
    pass


def install_nvml(
    monkeypatch: pytest.MonkeyPatch,
    boards: list[Board],
    *,
    nvlinks: set[tuple[int, int]] | None = frozenset(),  # type: ignore[assignment]
    far: set[tuple[int, int]] = frozenset(),  # type: ignore[assignment]
    switch: bool = False,
    broken: str | None = None,
) -> types.ModuleType:
    """A pynvml with these boards; `nvlinks` None: P2P cannot be asked; `broken`: raises there."""
    for index, board in enumerate(boards):
        board.index = index
    slice_of_0 = Board("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "MIG-7", 40192, -1)
    by_uuid = {board.uuid: board for board in [*boards, slice_of_0]}

    def p2p(a: Board, b: Board, _: int) -> int:
        if nvlinks is None:
            raise FakeNVMLError
        return 0 if (a.index, b.index) in nvlinks else 5

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(boards),
        "nvmlDeviceGetHandleByIndex": lambda index: boards[index],
        "nvmlDeviceGetHandleByUUID": lambda uuid: by_uuid[uuid],
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda _: boards[0],
        "nvmlDeviceGetUUID": lambda board: board.uuid,
        "nvmlDeviceGetName": lambda board: board.name,
        "nvmlDeviceGetIndex": lambda board: board.index,
        "nvmlDeviceGetMemoryInfo": lambda b: types.SimpleNamespace(total=b.mebibytes * 2**20),
        "nvmlDeviceGetCudaComputeCapability": lambda _: (8, 0),
        "nvmlSystemGetDriverVersion": lambda: "580.65.06",
        "nvmlSystemGetCudaDriverVersion": lambda: 13010,
        "nvmlDeviceGetP2PStatus": p2p,
        "nvmlDeviceGetTopologyCommonAncestor": lambda a, b: 50 if (a.index, b.index) in far else 30,
        "nvmlDeviceGetNvLinkState": lambda *_: int(switch),
        "nvmlDeviceGetNvLinkRemoteDeviceType": lambda *_: 2,
    }

    def fail(*_: object) -> None:
        raise FakeNVMLError

    module = types.ModuleType("pynvml")
    constants = {
        "NVMLError": FakeNVMLError,
        "NVML_P2P_CAPS_INDEX_NVLINK": 2,
        "NVML_P2P_STATUS_OK": 0,
        "NVML_TOPOLOGY_SYSTEM": 50,
        "NVML_NVLINK_DEVICE_TYPE_SWITCH": 2,
    }
    module.__dict__.update(answers | constants | ({broken: fail} if broken else {}))
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return module


def four() -> list[Board]:
    return [Board(uuid=f"GPU-{letter}000") for letter in "abcd"]


def test_local_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, [Board("NVIDIA H200", "GPU-a", 143771), Board("Mystery", "GPU-b")])
    first, second = local_gpus()
    assert (first.index, first.uuid, first.name) == (0, "GPU-a", "NVIDIA H200")
    assert first.memory_bytes == 143771 * 2**20
    assert first.compute_capability == "8.0"
    assert first.catalogue is find_gpu("h200")
    assert second.catalogue is None


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("1,-1,2", [1]),
        ("0,9,1", [0]),
        ("0,,1", [0]),
        ("GPU-c000,GPU-a", [2, 0]),
        ("GPU-x,0", []),
        ("1,1", [1]),
    ],
)
def test_cuda_visible_devices(
    visible: str, indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nvml(monkeypatch, four())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in local_gpus()] == indices


def test_a_mig_slice_is_no_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, four())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")
    (gpu,) = local_gpus()
    assert (gpu.uuid, gpu.memory_bytes, gpu.catalogue) == ("MIG-7", 40192 * 2**20, None)


@pytest.mark.parametrize(
    "broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName"]
)
def test_nvml_errors_mean_no_gpus(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, four(), broken=broken)
    assert local_gpus() == []


def test_a_gpu_without_memory_of_its_own_is_still_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, [Board("NVIDIA GB10")], broken="nvmlDeviceGetMemoryInfo")
    assert [gpu.memory_bytes for gpu in local_gpus()] == [0]


def test_no_module_and_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "DRIVER_FILES", ("/",))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert local_gpus() == []
    monkeypatch.delitem(sys.modules, "pynvml")
    monkeypatch.setattr(gpus, "DRIVER_FILES", ("/no/such/file",))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert local_gpus() == []
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.005
    assert "pynvml" not in sys.modules


PAIRS = set(itertools.combinations(range(4), 2))


@pytest.mark.parametrize(
    ("settings", "link"),
    [
        ({"nvlinks": PAIRS}, "NVLink"),
        ({"nvlinks": PAIRS, "far": PAIRS}, "NVLink"),
        ({"nvlinks": {(0, 1), (2, 3)}}, "PCIe"),  # bridges join pairs only
        ({"nvlinks": {(0, 1), (2, 3)}, "far": {(0, 3)}}, "PCIe across sockets"),
        ({}, "PCIe"),
        ({"far": {(1, 2)}}, "PCIe across sockets"),
        ({"nvlinks": None, "switch": True}, "NVLink"),
        ({"nvlinks": None}, "PCIe"),
        ({"broken": "nvmlDeviceGetTopologyCommonAncestor"}, "unknown"),
    ],
)
def test_the_weakest_pair_is_the_link(
    settings: dict[str, Any], link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nvml(monkeypatch, four(), **settings)
    found = local_gpus()
    assert gpu_link(found) == link
    assert gpu_link(found[:1]) == "none"
    assert gpu_link([]) == "none"


def test_driver_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, four())
    assert driver_versions() == {"driver": "580.65.06", "cuda_driver": "13.1"}
    install_nvml(monkeypatch, four(), broken="nvmlInit")
    assert driver_versions() == {"driver": None, "cuda_driver": None}
