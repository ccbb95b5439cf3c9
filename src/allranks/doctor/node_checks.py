"""Checks of one node that need no other node: disks and GPUs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from allranks.doctor.finding import Check, failed, not_here, passed, warned
from allranks.machine.gpus import DRIVER_FILES, SLOWDOWNS, local_gpus, nvml
from allranks.show.numbers import size

WRITE_BYTES = 1 << 20
LEAST_FREE_BYTES = 1 << 30
LEFT_OVER_BYTES = 1 << 30  # of GPU memory in use before the job has started


def write_test(folder: Path, node: str) -> Check:
    """Create, flush, read back and delete a file."""
    path = folder / f".write-{node}"
    data = os.urandom(WRITE_BYTES)
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        back = path.read_bytes()
        path.unlink()
    except OSError as error:
        return failed("write", f"cannot write in {folder}: {error.strerror}")
    if back != data:
        return failed("write", f"{folder} does not return the bytes that were written")
    return passed("write", f"{len(data)} bytes written to {folder} and read back")


def free_disk(folder: Path) -> Check:
    """How much space is left where the run is kept. This does not see a user's quota."""
    try:
        free = shutil.disk_usage(folder).free
        inodes = os.statvfs(folder)
    except OSError as error:
        return not_here("disk", f"not known for {folder}: {error.strerror}")
    if free < LEAST_FREE_BYTES:
        return warned("disk", f"only {size(free)} free in the run folder", free_bytes=free)
    if inodes.f_files and not inodes.f_favail:
        value = "the run folder's disk is out of inodes: no file can be created"
        return warned("disk", value, free_bytes=free)
    return passed("disk", f"{size(free)} free in the run folder", free_bytes=free)


def visible_gpus(wanted: int) -> Check:
    """Whether the job can use as many GPUs as it asked for, by NVML and CUDA_VISIBLE_DEVICES."""
    if wanted == 0:
        return not_here("gpus", "no GPU was asked for")
    if not any(map(os.path.exists, DRIVER_FILES)):
        return not_here("gpus", "no GPU driver on this node")
    with nvml() as pynvml:
        if pynvml is None:
            return failed("gpus", "the GPU driver does not answer (NVML does not start)")
        names = [gpu.name for gpu in local_gpus()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    where = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    detail = f"{len(names)} of {wanted} GPUs visible{where}: {', '.join(names) or 'none'}"
    return (passed if len(names) >= wanted else failed)("gpus", detail, gpus=len(names))


def gpu_health(wanted: int) -> Check:
    """ECC errors, failed row remapping, slowdowns, and memory still in use."""
    if wanted == 0:
        return not_here("health", "no GPU was asked for")
    with nvml() as pynvml:
        gpus = local_gpus() if pynvml is not None else []
        if not gpus:
            return not_here("health", "no GPU to check")
        broken: list[str] = []
        worries: list[str] = []
        for gpu in gpus:
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                broken += [f"GPU {gpu.index}: {words}" for words in _broken(pynvml, handle)]
                worries += [f"GPU {gpu.index}: {words}" for words in _worries(pynvml, handle)]
            except pynvml.NVMLError as error:
                broken.append(f"GPU {gpu.index}: {error}")
    if broken:
        return failed("health", "; ".join(broken), warning="; ".join(worries))
    if worries:
        return warned("health", "; ".join(worries))
    return passed("health", f"{len(gpus)} GPUs are healthy")


def _broken(pynvml: Any, handle: Any) -> Iterator[str]:
    """Reasons not to train on a GPU."""
    pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)  # a lost GPU raises
    rows = _ask(pynvml, pynvml.nvmlDeviceGetRemappedRows, handle)
    if rows and rows[3]:
        yield "a faulty row of its memory could not be remapped"


def _worries(pynvml: Any, handle: Any) -> Iterator[str]:
    """What the user should know about a GPU that works."""

    def ask(function: Callable[..., Any], *args: Any) -> Any:
        return _ask(pynvml, function, handle, *args)

    errors = ask(
        pynvml.nvmlDeviceGetTotalEccErrors,
        pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        pynvml.NVML_VOLATILE_ECC,
    )
    if errors:
        yield f"{errors} uncorrected memory errors since its last reset"
    rows = ask(pynvml.nvmlDeviceGetRemappedRows)
    if (rows and rows[2]) or ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus):
        yield "faulty memory will be remapped at the next reset"
    reasons = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
    slow = [words for bit, words in SLOWDOWNS.items() if reasons & bit]
    if slow:
        yield f"slowed down: {', '.join(slow)}"
    temperature = ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
    limit = ask(
        pynvml.nvmlDeviceGetTemperatureThreshold, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    )
    if temperature and limit and temperature >= limit:
        yield f"{temperature} °C, and it slows down at {limit} °C"
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo)
    if memory and memory.used > max(LEFT_OVER_BYTES, memory.total // 20):
        yield f"{size(memory.used)} of its memory is already in use"


def _ask(pynvml: Any, function: Callable[..., Any], *args: Any) -> Any:
    """NVML's answer, or None if this GPU or driver has none."""
    try:
        return function(*args)
    except pynvml.NVMLError:
        return None
