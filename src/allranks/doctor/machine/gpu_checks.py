"""GPUs, their driver, and whether torch can use them: pure functions of facts."""

from __future__ import annotations

from collections.abc import Iterator

from allranks.doctor.check import Check, failed, not_here, passed, warned
from allranks.doctor.machine.facts import MachineFacts

SLOW_IMPORT = 15.0  # seconds
WHEELS = "https://download.pytorch.org/whl"


def gpu_checks(facts: MachineFacts) -> list[Check]:
    return [
        driver(facts),
        torch(facts),
        *cuda(facts),
        health(facts),
        peers(facts),
        nccl(facts),
    ]


def driver(facts: MachineFacts) -> Check:
    if not facts.has_driver:
        if facts.has_nvidia_card:
            return failed(
                "driver",
                "there is an NVIDIA card, but no driver for it",
                "install NVIDIA's driver, or ask the site; in a container: docker run --gpus all, "
                "apptainer exec --nv",
            )
        return not_here("driver", "no GPU and no driver")
    if not facts.nvml_answers:
        return failed(
            "driver",
            "the driver is there, but NVML does not start",
            "run nvidia-smi to see why; after an update of the driver reboot, or have the node "
            "drained",
        )
    if not facts.gpus:
        visible = facts.env.get("CUDA_VISIBLE_DEVICES")
        where = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
        fix = "unset CUDA_VISIBLE_DEVICES" if visible is not None else "ask for GPUs: --gres=gpu:1"
        return failed("driver", f"driver {facts.driver}, but no GPU may be used{where}", fix)
    names = ", ".join(sorted({gpu.name for gpu in facts.gpus}))
    value = f"driver {facts.driver} (CUDA {facts.driver_cuda}), {len(facts.gpus)} x {names}"
    return passed("driver", value)


def torch(facts: MachineFacts) -> Check:
    found = facts.torch
    if found.version is None:
        return failed("torch", "torch is not installed in this Python", "pip install torch")
    if found.problem:
        fix = "python -c 'import torch' shows it whole; install torch anew in a new environment"
        if "had not ended" in found.problem:
            fix = "keep the environment on a local disk, or run once more: it is in memory then"
        return failed("torch", f"torch {found.version}: {found.problem}", fix)
    value = f"torch {found.version}"
    seconds = (found.asked or {}).get("seconds")
    if seconds is not None and seconds > SLOW_IMPORT:
        fix = "keep the environment on a local disk: every rank pays this at every start"
        return warned("torch", f"{value} took {seconds:.0f} s to import", fix)
    return passed("torch", value)


def cuda(facts: MachineFacts) -> Iterator[Check]:
    """Torch's CUDA against the driver's, and its kernels against the GPUs."""
    built, runs = facts.torch.cuda, facts.driver_cuda
    if not facts.gpus or facts.torch.version is None:
        yield not_here("cuda", f"no GPU to use torch's CUDA {built}" if built else "no GPU")
        return
    wheel = f"{WHEELS}/cu{(runs or '12.8').replace('.', '')}"
    fix = f"pip install torch --index-url {wheel}, or the closest that is there"
    if built is None:
        yield failed("cuda", "GPUs are here, but this torch was built without CUDA", fix)
        return
    if runs is not None and _numbers(built)[0] > _numbers(runs)[0]:
        value = f"torch needs CUDA {built}, the driver runs {runs} at most"
        yield failed("cuda", value, f"update the driver ({facts.driver} is too old), or {fix}")
        return
    asked = facts.torch.asked
    if asked is not None and not asked["available"]:
        yield failed(
            "cuda",
            f"torch with CUDA {built} finds no GPU, although NVML finds {len(facts.gpus)}",
            "python -c 'import torch; torch.cuda.init()' says why; after a suspend or an update "
            "of the driver: reboot",
        )
        return
    if runs is not None and _numbers(built) > _numbers(runs):
        value = f"torch's CUDA {built} is newer than the driver's {runs}; works within one major"
        yield warned("cuda", value, "update the driver if a kernel fails to load")
    else:
        yield passed("cuda", f"torch's CUDA {built} runs on the driver's {runs}")
    yield from kernels(facts)


def kernels(facts: MachineFacts) -> Iterator[Check]:
    """Whether torch was compiled for these GPUs."""
    archs = (facts.torch.asked or {}).get("archs") or []
    if not archs:
        return
    lacking = [gpu for gpu in facts.gpus if not has_kernels(gpu.compute_capability, archs)]
    if lacking:
        gpu = lacking[0]
        newest = max(_capability(arch) for arch in archs)
        is_old = tuple(_numbers(gpu.compute_capability)) < newest
        fix = "install an older torch, built for it" if is_old else "install a newer torch"
        value = f"{gpu.name} is sm_{gpu.compute_capability.replace('.', '')}, torch has "
        yield failed("kernels", f"{value}{' '.join(archs)}", fix)
        return
    yield passed("kernels", "torch has kernels for every GPU here")


def has_kernels(capability: str, archs: list[str]) -> bool:
    """sm_80 runs on 8.0 to 8.9; compute_90 is compiled for anything newer when it is loaded."""
    major, minor = _numbers(capability)[:2]
    for arch in archs:
        known = _capability(arch)
        if arch.startswith("sm_") and known[0] == major and known[1] <= minor:
            return True
        if arch.startswith("compute_") and known <= (major, minor):
            return True
    return False


def health(facts: MachineFacts) -> Check:
    found = facts.health
    if found is None or found.ok is None:
        return not_here("gpu health", "no GPU to look at")
    if not found.ok:
        fix = "use other GPUs (#SBATCH --exclude=NODE), and tell the site"
        return failed("gpu health", found.value, fix)
    if found.status == "warn":
        fix = "nvidia-smi -q -d ECC,PERFORMANCE,TEMPERATURE; end what is left over, or tell the "
        return warned("gpu health", found.value, f"{fix}site: this node will be slow")
    return passed("gpu health", f"{found.value}: no ECC error, no slowdown")


def peers(facts: MachineFacts) -> Check:
    if len(facts.gpus) < 2:
        return not_here("peer access", f"{len(facts.gpus) or 'no'} GPU")
    if facts.peer_access is None:
        return not_here("peer access", "NVML does not say")
    if not facts.peer_access:
        return warned(
            "peer access",
            "no GPU can read another's memory: everything goes through the host",
            "in a virtual machine or with ACS on that stays so (nvidia-smi topo -p2p r); prefer "
            "layouts of one GPU a node, or nodes with NVLink",
        )
    return passed("peer access", f"GPUs reach each other by {facts.gpu_link}")


def nccl(facts: MachineFacts) -> Check:
    if facts.other_nccl:
        return warned(
            "nccl",
            f"{facts.other_nccl[0]} is loaded in place of torch's own {facts.torch.nccl or 'NCCL'}",
            "unset LD_LIBRARY_PATH (or LD_PRELOAD), or take that folder out: all nodes must have "
            "the same version",
        )
    if facts.torch.nccl is None:
        if facts.gpus:
            fix = "pip install torch with CUDA: NCCL comes with it"
            return failed("nccl", "GPUs are here, but no NCCL", fix)
        return not_here("nccl", "no GPU and no NCCL: ranks talk over gloo")
    return passed("nccl", f"NCCL {facts.torch.nccl}")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()] or [0]


def _capability(arch: str) -> tuple[int, int]:
    digits = "".join(filter(str.isdecimal, arch.partition("_")[2])) or "0"
    return int(digits[:-1] or 0), int(digits[-1])
