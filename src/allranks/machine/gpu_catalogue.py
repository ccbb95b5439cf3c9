"""What the vendors say of their GPUs: one row for each board, with the datasheet it refers to.

Peaks are dense (NVIDIA's headline figures from Ampere on are with sparsity: half of them stands
here) and at the datasheet's boost clock, so a card that clocks higher can beat them. Links count
one direction (NVIDIA and AMD print both directions added up: half of it stands here).

Most rows were compared with published tables that quote the datasheets; the documents themselves
are at the addresses given.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Link:
    """How one GPU reaches the others of its node."""

    kind: Literal["nvlink", "pcie", "infinity fabric"]
    bytes_per_second: float  # of one GPU, all its links together, one direction


@dataclass(frozen=True, slots=True)
class Chip:
    """What the boards with one chip at one clock have in common."""

    compute_capability: str  # as CUDA counts: "9.0"; AMD's target name: "gfx90a"
    source: str  # title and address of the datasheet
    peak_flops: Mapping[Precision, float] = field(hash=False)


@dataclass(frozen=True, slots=True)
class GPU:
    """One board of the catalogue."""

    name: str
    pattern: str  # matches the whole name as `gpus.plain_name` writes it, of NVML or of SLURM
    memory_bytes: int  # as sold; the driver keeps some of it, so NVML shows up to 8% less
    memory_bandwidth: float  # bytes per second
    chip: Chip = field(repr=False)
    link: Link  # what every such board has
    bridge: Link | None = None  # NVLink or Infinity Fabric where a bridge joins 2 to 4 cards

    @property
    def peak_flops(self) -> Mapping[Precision, float]:
        """Dense FLOP per second by precision; one that the chip lacks, or is unsure, is absent."""
        return self.chip.peak_flops

    @property
    def compute_capability(self) -> str:
        return self.chip.compute_capability

    @property
    def source(self) -> str:
        return self.chip.source


def _chip(compute_capability: str, source: str, **teraflops: float) -> Chip:
    names: tuple[Precision, ...] = ("fp32", "tf32", "fp16", "bf16", "fp8")
    peak_flops = {name: teraflops.pop(name) * 1e12 for name in names if name in teraflops}
    assert not teraflops, f"unknown precision: {teraflops}"
    return Chip(compute_capability, source, peak_flops)


def _gpu(
    name: str,
    pattern: str,
    gib: int,
    terabytes_per_second: float,
    chip: Chip,
    link: Link,
    bridge: Link | None = None,
) -> GPU:
    return GPU(name, pattern, gib * GIB, terabytes_per_second * 1e12, chip, link, bridge)


def _nvlink(both_directions: float) -> Link:
    return Link("nvlink", both_directions / 2 * 1e9)


def _fabric(both_directions: float) -> Link:
    return Link("infinity fabric", both_directions / 2 * 1e9)


# x16 slots, as the datasheets round them: 32, 64 and 128 GB/s both directions together.
_PCIE3, _PCIE4, _PCIE5 = (Link("pcie", rate * 1e9) for rate in (16, 32, 64))

_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_NVIDIA_PDF = "https://www.nvidia.com/content/dam/en-zz/Solutions"
_IMAGES = "https://images.nvidia.com"
_AMD = "https://www.amd.com/en/products/accelerators/instinct"

_VOLTA = (
    "NVIDIA V100 datasheet, "
    f"{_IMAGES}/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
)
_GA102 = (
    "NVIDIA Ampere GA102 whitepaper, "
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
)
_HOPPER = f"NVIDIA H100 datasheet, {_NVIDIA}/h100/"
_HOPPER_E = f"NVIDIA H200 datasheet, {_NVIDIA}/h200/"

_V100_SXM = _chip("7.0", _VOLTA, fp32=15.7, fp16=125)
_V100_PCIE = _chip("7.0", _VOLTA, fp32=14, fp16=112)
_V100S = _chip("7.0", _VOLTA, fp32=16.4, fp16=130)
_T4 = _chip(
    "7.5",
    f"NVIDIA T4 product brief, {_NVIDIA_PDF}/Data-Center/tesla-t4/t4-tensor-core-product-brief.pdf",
    fp32=8.1,
    fp16=65,
)
_A10 = _chip(
    "8.6",
    "NVIDIA A10 datasheet, "
    f"{_NVIDIA_PDF}/Data-Center/a10/pdf/datasheet-new/nvidia-a10-datasheet.pdf",
    fp32=31.2,
    tf32=62.5,
    fp16=125,
    bf16=125,
)
_A10G = _chip(  # more cores than the A10, but tensor cores at the half rate of the GeForce cards
    "8.6",
    "NVIDIA A10G datasheet, "
    "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
    fp32=35,
    tf32=35,
    fp16=70,
    bf16=70,
)
_A30 = _chip(
    "8.0",
    f"NVIDIA A30 datasheet, {_NVIDIA_PDF}/data-center/products/a30-gpu/pdf/a30-datasheet.pdf",
    fp32=10.3,
    tf32=82,
    fp16=165,
    bf16=165,
)
_A40 = _chip(
    "8.6",
    f"NVIDIA A40 datasheet, {_IMAGES}/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf",
    fp32=37.4,
    tf32=74.8,
    fp16=149.7,
    bf16=149.7,
)
_A100 = _chip(
    "8.0",
    f"NVIDIA A100 datasheet, {_NVIDIA_PDF}/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf",
    fp32=19.5,
    tf32=156,
    fp16=312,
    bf16=312,
)
_RTX_A6000 = _chip("8.6", _GA102, fp32=38.7, tf32=77.4, fp16=154.8, bf16=154.8)
# GeForce tensor cores run at half rate where they accumulate in fp32, as training does.
_RTX_3090 = _chip("8.6", _GA102, fp32=35.6, tf32=35.6, fp16=71, bf16=71)
_RTX_4090 = _chip(
    "8.9",
    "NVIDIA Ada whitepaper, "
    f"{_IMAGES}/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
    fp32=82.6,
    tf32=82.6,
    fp16=165.2,
    bf16=165.2,
    fp8=330.3,
)
_RTX_5090 = _chip(  # no fp8: a public benchmark measured nearly twice the rate we had for it
    "12.0",
    "NVIDIA RTX Blackwell whitepaper, "
    f"{_IMAGES}/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
    fp32=104.8,
    tf32=104.8,
    fp16=209.5,
    bf16=209.5,
)
_RTX_6000_ADA = _chip(
    "8.9",
    "NVIDIA Ada professional whitepaper, "
    f"{_IMAGES}/aem-dam/en-zz/Solutions/technologies/"
    "NVIDIA-ADA-GPU-PROVIZ-Architecture-Whitepaper_1.1.pdf",
    fp32=91.1,
    tf32=182.1,
    fp16=364.2,
    bf16=364.2,
    fp8=728.5,
)
_L4 = _chip(
    "8.9",
    f"NVIDIA L4 datasheet, {_NVIDIA}/l4/",
    fp32=30.3,
    tf32=60,
    fp16=121,
    bf16=121,
    fp8=242.5,
)
_L40 = _chip(
    "8.9",
    f"NVIDIA L40 datasheet, {_NVIDIA}/l40/",
    fp32=90.5,
    tf32=90.5,
    fp16=181.05,
    bf16=181.05,
    fp8=362,
)
_L40S = _chip(
    "8.9",
    f"NVIDIA L40S datasheet, {_NVIDIA}/l40s/",
    fp32=91.6,
    tf32=183,
    fp16=362.05,
    bf16=362.05,
    fp8=733,
)
_H100_SXM = _chip("9.0", _HOPPER, fp32=67, tf32=494.5, fp16=989.5, bf16=989.5, fp8=1979)
_H100_PCIE = _chip("9.0", _HOPPER, fp32=51, tf32=378, fp16=756.5, bf16=756.5, fp8=1513)
_H100_NVL = _chip("9.0", _HOPPER, fp32=60, tf32=417.5, fp16=835.5, bf16=835.5, fp8=1670.5)
_H200_SXM = _chip("9.0", _HOPPER_E, fp32=67, tf32=494.5, fp16=989.5, bf16=989.5, fp8=1979)
_H200_NVL = _chip("9.0", _HOPPER_E, fp32=60, tf32=417.5, fp16=835.5, bf16=835.5, fp8=1670.5)
_B200 = _chip(  # an eighth of the HGX B200 board
    "10.0",
    f"NVIDIA HGX B200 specifications, {_NVIDIA}/hgx/",
    fp32=75,
    tf32=1125,
    fp16=2250,
    bf16=2250,
    fp8=4500,
)
# AMD's fp32 is that of the matrix cores, which rocBLAS uses; the vector rate is half of it.
_MI210 = _chip(
    "gfx90a", f"AMD Instinct MI210, {_AMD}/mi200/mi210.html", fp32=45.3, fp16=181, bf16=181
)
_MI250X = _chip(  # of one of its two dies: to ROCm and most SLURM sites each is a GPU
    "gfx90a",
    f"AMD Instinct MI250X, {_AMD}/mi200/mi250x.html",
    fp32=47.85,
    fp16=191.5,
    bf16=191.5,
)
_MI300X = _chip(
    "gfx942",
    f"AMD Instinct MI300X, {_AMD}/mi300/mi300x.html",
    fp32=163.4,
    tf32=653.7,
    fp16=1307.4,
    bf16=1307.4,
    fp8=2614.9,
)

_16, _32, _40, _80, _141 = (rf"( ?{size} ?g?b?)?" for size in (16, 32, 40, 80, 141))

# Where a name fits several rows, the least memory wins, then the row that stands first: a bare
# a100 or h100 is the SXM module, which is what a node with several of them mostly has.
CATALOGUE: tuple[GPU, ...] = (
    _gpu("V100 SXM2 16GB", rf"v100( ?sxm2)?{_16}", 16, 0.9, _V100_SXM, _nvlink(300)),
    _gpu("V100 SXM2 32GB", rf"v100( ?sxm2)?{_32}", 32, 0.9, _V100_SXM, _nvlink(300)),
    _gpu("V100 PCIe 16GB", rf"v100 ?pcie{_16}", 16, 0.9, _V100_PCIE, _PCIE3),
    _gpu("V100 PCIe 32GB", rf"v100 ?pcie{_32}", 32, 0.9, _V100_PCIE, _PCIE3),
    _gpu("V100S PCIe 32GB", rf"v100s( ?pcie)?{_32}", 32, 1.134, _V100S, _PCIE3),
    _gpu("T4", r"t4", 16, 0.32, _T4, _PCIE3),
    _gpu("A10", r"a10", 24, 0.6, _A10, _PCIE4),
    _gpu("A10G", r"a10g", 24, 0.6, _A10G, _PCIE4),
    _gpu("A30", r"a30", 24, 0.933, _A30, _PCIE4, _nvlink(200)),
    _gpu("A40", r"a40", 48, 0.696, _A40, _PCIE4, _nvlink(112.5)),
    _gpu("A100 SXM4 40GB", rf"a100( ?sxm4?)?{_40}", 40, 1.555, _A100, _nvlink(600)),
    _gpu("A100 SXM4 80GB", rf"a100( ?sxm4?)?{_80}", 80, 2.039, _A100, _nvlink(600)),
    _gpu("A100 PCIe 40GB", rf"a100{_40} ?pcie{_40}", 40, 1.555, _A100, _PCIE4, bridge=_nvlink(600)),
    _gpu("A100 PCIe 80GB", rf"a100{_80} ?pcie{_80}", 80, 1.935, _A100, _PCIE4, bridge=_nvlink(600)),
    _gpu("RTX A6000", r"(rtx ?)?a6000", 48, 0.768, _RTX_A6000, _PCIE4, _nvlink(112.5)),
    _gpu("RTX 3090", r"(rtx ?)?3090", 24, 0.936, _RTX_3090, _PCIE4, _nvlink(112.5)),
    _gpu("RTX 4090", r"(rtx ?)?4090", 24, 1.008, _RTX_4090, _PCIE4),
    _gpu("RTX 5090", r"(rtx ?)?5090", 32, 1.792, _RTX_5090, _PCIE5),
    _gpu(
        "RTX 6000 Ada",
        r"(rtx ?)?(6000 ?ada( generation)?|ada ?6000)",
        48,
        0.96,
        _RTX_6000_ADA,
        _PCIE4,
    ),
    _gpu("L4", r"l4", 24, 0.3, _L4, _PCIE4),
    _gpu("L40", r"l40", 48, 0.864, _L40, _PCIE4),
    _gpu("L40S", r"l40s", 48, 0.864, _L40S, _PCIE4),
    _gpu("H100 SXM5", rf"h100( ?sxm5?)?{_80}( ?hbm3)?", 80, 3.35, _H100_SXM, _nvlink(900)),
    _gpu("H100 PCIe", rf"h100{_80} ?pcie{_80}", 80, 2.0, _H100_PCIE, _PCIE5, _nvlink(600)),
    _gpu("H100 NVL", r"h100 ?nvl( ?94 ?g?b?)?", 94, 3.9, _H100_NVL, _PCIE5, _nvlink(600)),
    _gpu("H200 SXM5", rf"h200( ?sxm5?)?{_141}( ?hbm3e)?", 141, 4.8, _H200_SXM, _nvlink(900)),
    _gpu("H200 NVL", rf"h200 ?nvl{_141}", 141, 4.8, _H200_NVL, _PCIE5, _nvlink(900)),
    _gpu("B200", r"b200( ?sxm)?( ?180 ?g?b?)?", 180, 8.0, _B200, _nvlink(1800)),
    # Links of 100 GB/s both directions: 3 by a bridge, 4 of the package's 8 for each die.
    _gpu("MI210", r"mi210", 64, 1.6384, _MI210, _PCIE4, _fabric(300)),
    _gpu("MI250X die", r"mi250x", 64, 1.6384, _MI250X, _fabric(400)),
    _gpu("MI300X", r"mi300x( ?oam)?", 192, 5.3, _MI300X, _fabric(7 * 128)),
)
