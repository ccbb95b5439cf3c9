"""The rank's GPU, CPUs and memory, and its node's network, sampled every two seconds."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks.machine.allotted import cpus_allotted
from allranks.machine.gpus import POWER_CAP, SLOWDOWNS
from allranks.machine.network import infiniband_bytes, infiniband_ports
from allranks.probe.recorder import Recorder
from allranks.run.tracebacks import is_worker, record, where_now

SAMPLE_SECONDS = 2.0
FIRST_LOOK_SECONDS = 0.25
MAX_PROCESSES = 256  # that a sample names
LIST_SECONDS = 30.0  # between two listings of all descendants, which are costly


class DeviceSampler:
    """Writes a `device` event every two seconds, from its own thread, after the first step."""

    def __init__(self, recorder: Recorder, env: Mapping[str, str]) -> None:
        self.recorder = recorder
        self.speaks_for_node = env.get("LOCAL_RANK", "0") == "0"
        self._cpu: dict[str, float] | None = None
        self._network: dict[str, int] | None = None
        self._link: int | None = None
        self._started: list[str] | None = None  # this process's children
        self._processes: list[int] = []  # this process and its descendants
        self._list_due = 0.0
        self._time = 0.0
        self._gpu: Any = None
        self._cpus: int | None = None
        self._cpu_wait: float | None = None

    def begin_with_steps(self) -> None:
        self.recorder.at_step.append(self._begin)
        if not is_worker():
            threading.Thread(target=self._follow_start, name="place", daemon=True).start()

    def _follow_start(self) -> None:
        """Record where the rank is before its first step, in case it is killed there."""
        pause, last = FIRST_LOOK_SECONDS, None
        while self.recorder.is_on:
            time.sleep(pause)
            pause = min(SAMPLE_SECONDS, 2 * pause)
            at = where_now(sys._current_frames().get(threading.main_thread().ident or 0))
            if self.recorder.step:
                return
            if at is not None and at != last:
                with suppress(OSError):
                    record("place", {"step": 0, "at": at})
                last = at

    def _begin(self, step: int) -> None:
        self.recorder.at_step.remove(self._begin)
        # Immediately: if the rank is killed soon, this is all that is known.
        at = where_now(sys._getframe())
        if at is not None and not self.recorder.timeline.is_taken:
            self.recorder.write_past("place", step=step, at=at)
        threading.Thread(target=self._run, name="device_sampler", daemon=True).start()

    def _run(self) -> None:
        with self.recorder.guarded:
            self._gpu = gpu_handle(self.recorder.device)
            self.sample()  # rates need two samples
            while self.recorder.is_on:
                time.sleep(SAMPLE_SECONDS)
                with suppress(OSError, ValueError):  # the next sample may succeed
                    # Ahead of steps that are not written yet: a waiting rank must look alive.
                    self.recorder.write_past("device", **self.sample(), **self.whereabouts())

    def sample(self) -> dict[str, Any]:
        """The current values; rates are since the last sample."""
        now = time.monotonic()
        passed, self._time = now - self._time, now
        started = children()
        fields = {**self._cpu_fields(passed, started), **host_memory()}
        # The kernel's messages have process ids; only here are those of loader workers known.
        if started != self._started or now > self._list_due:
            self._started, self._list_due = started, now + LIST_SECONDS
            self._processes = [os.getpid(), *descendants(started)]
        fields["processes"] = self._processes
        if self.speaks_for_node:
            before, self._network = self._network, network_bytes()
            if before is not None:
                fields["network"] = {
                    key: round((self._network.get(key, 0) - count) / passed)
                    for key, count in before.items()
                }
                if self._link is not None:
                    fields["network"]["link"] = self._link
            else:
                self._link = link_bytes()  # once: it takes as long as everything else
        if self._gpu is not None:
            fields |= gpu_fields(*self._gpu, own=self._processes)
        return fields

    def _cpu_fields(self, passed: float, started: list[str]) -> dict[str, Any]:
        if self._cpus is None:
            self._cpus = cpus_allotted()
        fields: dict[str, Any] = {"cpus_allotted": self._cpus}
        cpu, self._cpu = self._cpu, cpu_seconds(started)
        if cpu is not None:
            fields["cpu"] = round((self._cpu["rank"] - cpu["rank"]) / passed, 3)
            workers = max(0.0, self._cpu["workers"] - cpu["workers"])
            if self._cpu["num_workers"]:
                fields["workers_cpu"] = round(workers / passed, 3)
                fields["num_workers"] = int(self._cpu["num_workers"])
        waited, self._cpu_wait = self._cpu_wait, cpu_wait_seconds(self.recorder.timeline.thread)
        if waited is not None and self._cpu_wait is not None:
            fields["cpu_wait"] = round(100 * (self._cpu_wait - waited) / passed, 1)
        return fields

    def whereabouts(self) -> dict[str, Any]:
        """How far the rank has got and where it is, to find the rank that others wait for."""
        doing, seconds = self.recorder.timeline.doing()
        fields: dict[str, Any] = {"step": self.recorder.step}
        fields |= {"doing": doing, "doing_seconds": round(seconds, 3)}
        at = where_now(sys._current_frames().get(self.recorder.timeline.thread))
        if at is not None:
            fields["at"] = at
        count = num_collectives() if self.recorder.has_peers() else None
        return fields if count is None else fields | {"collectives": count}


def num_collectives() -> int | None:
    """How many collectives this rank has entered, by torch's count, which all ranks share."""
    import torch.distributed as dist

    with suppress(Exception):  # not every backend counts
        group: Any = dist.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    return None


def cpu_seconds(started: list[str]) -> dict[str, float]:
    """CPU time of this process and of its children, from /proc."""
    own = os.times()
    tick = os.sysconf("SC_CLK_TCK")
    workers, num_workers = 0.0, 0
    for child in started:
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            workers += (int(fields[11]) + int(fields[12])) / tick
            num_workers += 1
    return {"rank": own.user + own.system, "workers": workers, "num_workers": num_workers}


def cpu_wait_seconds(thread: int) -> float | None:
    """How long a thread of this process has been ready to run but had no CPU; None if unknown."""
    ids = [one.native_id for one in threading.enumerate() if one.ident == thread]
    with suppress(OSError, ValueError, IndexError):
        counts = Path(f"/proc/self/task/{ids[0]}/schedstat").read_text().split()
        return int(counts[1]) / 1e9
    return None


def children(process: str = "self") -> list[str]:
    found: list[str] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            found += path.read_text().split()
    return found


def descendants(started: list[str]) -> list[int]:
    """These processes and all their descendants, such as those of a fork server."""
    found = list(started)
    for child in found:  # the list grows while it is read
        if len(found) >= MAX_PROCESSES:
            break
        with suppress(OSError):
            found += children(child)
    return [int(process) for process in found[:MAX_PROCESSES]]


def host_memory() -> dict[str, int | None]:
    """This process's memory in bytes: its peak, its use now, and how much of that may be shared.

    The kernel also knows each process's part of shared pages, but to count it (smaps_rollup) it
    walks through all memory, which takes hundreds of times as long.
    """
    sizes: dict[str, int] = {}
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                sizes[name] = int(value.split()[0]) * 1024
    found: dict[str, int | None] = {"host_memory": sizes.get("VmHWM")}
    if "VmRSS" in sizes:
        found["host_memory_now"] = sizes["VmRSS"]
        found["host_memory_shared"] = sizes.get("RssFile", 0) + sizes.get("RssShmem", 0)
    return found


def network_bytes() -> dict[str, int]:
    """Bytes that this node has sent and received: over InfiniBand if it has any, else in total."""
    if (counted := infiniband_bytes()) is not None:
        return {"sent": counted[0], "received": counted[1]}
    sums = {"sent": 0, "received": 0}
    with suppress(OSError):
        for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
            name, _, counters = line.partition(":")
            numbers = counters.split()
            if name.strip() != "lo":
                sums["received"] += int(numbers[0])
                sums["sent"] += int(numbers[8])
    return sums


def link_bytes() -> int | None:
    """Bytes per second that these links carry each way; None if the system does not say."""
    bits = sum(port.bits_per_second or 0.0 for port in infiniband_ports())
    if not bits:
        for speed in Path("/sys/class/net").glob("*/speed"):  # megabits; -1 where it has none
            with suppress(OSError, ValueError):  # a link that is down cannot be read
                bits += max(0, int(speed.read_text())) * 1e6
    return round(bits / 8) or None


def gpu_handle(device: Any) -> tuple[Any, Any, Any] | None:
    """NVML, and this rank's GPU in NVML and in torch; None without a GPU or NVML."""
    if device is None:
        return None
    try:
        import pynvml
        import torch

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode()), device
    except Exception:  # an old driver, no permission, another vendor's GPU: do without
        return None


def gpu_fields(nvml: Any, handle: Any, device: Any, *, own: list[int]) -> dict[str, Any]:
    """What this GPU reports about itself; not every GPU reports everything."""
    import torch

    asked: dict[str, Callable[[], Any]] = {
        "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "memory_total": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
        # The device is passed because this thread's current one may not be the training's.
        "memory_peak": lambda: torch.cuda.max_memory_allocated(device),
        "memory_allocated": lambda: torch.cuda.memory_allocated(device),
        "temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "clock": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "clock_max": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "power_limit": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "slowed_by": lambda: slowed_by(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        "neighbours": lambda: neighbours(
            [one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)], own
        ),
    }
    fields = {}
    for name, ask in asked.items():
        with suppress(Exception):
            fields[name] = ask()
    return fields


def slowed_by(reasons: int) -> list[str]:
    """What keeps a GPU's clock low, from NVML's bits."""
    words = {POWER_CAP: "power cap", **SLOWDOWNS}
    return [meaning for bit, meaning in words.items() if reasons & bit]


def neighbours(on_gpu: list[int], own: list[int]) -> int:
    """How many of the processes on a GPU are not this rank's.

    In a container, NVML may report the host's process ids: then one of them is this rank.
    """
    others = [process for process in on_gpu if process not in own]
    return len(others) if len(others) < len(on_gpu) else max(0, len(others) - 1)
