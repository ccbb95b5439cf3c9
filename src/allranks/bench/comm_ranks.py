"""What each rank of `bench comm` runs: collectives from the smallest size up, checked, then timed.

Which way their bytes went is read from NCCL's own log. Rank 0 writes comm.json.

    python -m allranks.bench.comm_ranks --sizes 1KiB-1GiB --seconds 120 all_reduce broadcast

Started by the launcher, as a user's script is.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from allranks.bench import comm_counts as comm
from allranks.bench.comm_calls import (
    Operation,
    World,
    choose_device,
    highest,
    join,
    make_operation,
    memory_for_buffers,
    of_every_rank,
    time_calls,
)
from allranks.errors import STOPPED_AT_ONCE, AllranksError
from allranks.machine import gpus
from allranks.machine.network import infiniband_ports
from allranks.run import tracebacks
from allranks.run.events import to_json
from allranks.run.folder import RunDir, write_atomically
from allranks.show.numbers import duration, ranks_in_words
from allranks.show.numbers import size as num_bytes

TIMING = "median of back-to-back calls, mean over ranks; with a root, the slowest rank's"
FEWEST_CALLS = 5
ROUNDS = 10  # after each of which the ranks look at the clock
FEWEST_CALLS_A_ROUND = 20  # so that what happens between rounds does not affect a median
MOST_CALLS = 2000
SECONDS_PER_SIZE = 2.0
SHARE_BY_CHOICE = 0.4  # of a sweep's time; the rest is for sizes whose fewest calls take longer
LACKING = r"not support|unsupported|not implemented|no support"

# What a rank asks NCCL to write while it is measured, and nothing else is.
NCCL_LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH"}

# `Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM`, `... [send] via NET/IB/0(1)/GDRDMA` (by rank 1).
_CHANNEL = re.compile(r"\[\w+\] -> \d+\[\w+\](?: \[\w+\])? via ([\w/]+(?:\(\d+\)[\w/]*)?)")
_USING = re.compile(r"NCCL INFO NET/(\w+) : Using (.*)")
_DEVICE = re.compile(r"\[(\d+)\]([^\s\[\];]+)")
_NETWORK = re.compile(r"NCCL INFO Using network (.+)")
_VERSION = re.compile(r"NCCL version (\d[\w.]*)")


@dataclass(slots=True)
class Budget:
    """Seconds for everything, divided evenly among the sweeps still to come."""

    seconds: float
    sweeps: int
    _begun: float = field(default_factory=time.monotonic)

    def share(self) -> float:
        """Seconds for the next sweep. Collective: the slowest rank's clock counts."""
        spent = highest(time.monotonic() - self._begun)[0]
        self.sweeps -= 1
        return max(0.0, self.seconds - spent) / max(1, self.sweeps + 1)


@dataclass(slots=True)
class Sweep:
    """One collective in one scope, from the smallest size up."""

    world: World
    scope: comm.Scope
    collective: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    lacking: str | None = None  # what the library says if it does not have this collective
    stopped: str | None = None  # why the largest sizes are missing
    _cost: float = 0.0  # seconds of the fewest calls of the last size, with its check

    def measure(self, sizes: Sequence[int], memory_bytes: float, seconds: float) -> None:
        """Add the missing sizes to `rows`, as far as memory and time allow. Collective."""
        ranks = self.world.members(self.scope)
        limit = comm.largest_fitting(self.collective, ranks, memory_bytes)
        counted = {comm.counted_bytes(self.collective, size, ranks): None for size in sizes}
        wanted = [size for size in counted if size > 0]
        fitting = [size for size in wanted if size <= limit]
        self.stopped = "memory" if len(fitting) < len(wanted) else None
        begun = time.monotonic()
        for number in range(len(self.rows), len(fitting)):
            size = fitting[number]
            spent = highest(time.monotonic() - begun)[0]
            growth = size / fitting[number - 1] if number else 1.0
            if number and spent + self._cost * growth > seconds:
                self.stopped = "time"
                return
            target = min(SECONDS_PER_SIZE, SHARE_BY_CHOICE * seconds / len(fitting))
            self._cost = self._measure_size(size, target)
            if self.lacking:
                return

    def _measure_size(self, size: int, seconds: float) -> float:
        """Add a row; returns the seconds of the check and the fewest calls on the slowest rank."""
        peers, device = self.world.scopes[self.scope], self.world.device
        begun = time.monotonic()
        operation = make_operation(self.collective, size, peers, device) if peers else None
        self._check(operation, size)
        if self.lacking:
            return 0.0
        once = sum(time_calls(operation.run, 1, device)) if operation else 0.0
        fixed, once = highest(time.monotonic() - begun, once)
        if seconds / once > 20:  # one short call says little about the next
            once = sum(time_calls(operation.run, 10, device)) / 10 if operation else 0.0
            once = highest(once)[0]
        times = self._time(operation, max(FEWEST_CALLS, int(seconds / once)), seconds)
        median = statistics.median(times) if operation else 0.0
        p99 = statistics.quantiles(times, n=100, method="inclusive")[98] if operation else 0.0
        count = int(highest(len(times))[0])
        self._add_row(size, count, of_every_rank(median, p99))
        return fixed + FEWEST_CALLS * once

    def _time(self, operation: Operation | None, wanted: int, seconds: float) -> list[float]:
        """Seconds of about `wanted` calls; of fewer on a machine slower than it seemed."""
        count = min(wanted, MOST_CALLS)
        rounds = max(1, min(ROUNDS, count // FEWEST_CALLS_A_ROUND))
        times: list[float] = []
        begun = time.monotonic()
        for _ in range(rounds):
            if operation:
                times += time_calls(operation.run, count // rounds, self.world.device)
            if highest(time.monotonic() - begun)[0] > seconds:
                break
        return times

    def _check(self, operation: Operation | None, size: int) -> None:
        """One call, whose result must be right on every rank. Collective."""
        lacking, is_wrong = "", False
        if operation:
            operation.fill()
            try:
                operation.run()
                is_wrong = not operation.is_right()
                operation.clear()
            except (RuntimeError, NotImplementedError) as error:
                lacking = str(error).splitlines()[0]
                if self.rows or not re.search(LACKING, lacking, re.IGNORECASE):
                    raise
        flags = of_every_rank(float(bool(lacking)), float(is_wrong))
        if any(flag[0] for flag in flags):
            self.lacking = lacking or f"{self.world.library} does not have it"
            return
        wrong = [rank for rank, flag in enumerate(flags) if flag[1]]
        if wrong:
            raise WrongResult(self.collective, size, self.world.members(self.scope), wrong)

    def _add_row(self, size: int, count: int, times: list[list[float]]) -> None:
        """`times`: median and p99 of every rank of the world."""
        ranks = self.world.members(self.scope)
        step = self.world.per_node if self.scope == "nodes" else 1
        members = times[::step]  # every node has its own group where the scope is the node
        groups = [members[at : at + ranks] for at in range(0, len(members), ranks)]
        medians = [comm.over_ranks(self.collective, [m for m, _ in group]) for group in groups]
        slowest = medians.index(max(medians))
        p99 = max(p99 for _, p99 in groups[slowest])
        found = comm.row(self.collective, size, ranks, self.scope, median=medians[slowest], p99=p99)
        found["iterations"] = count
        if len(groups) > 1:
            found["node_median_us"] = [round(median * 1e6, 3) for median in medians]
        self.rows.append(found)


class WrongResult(AllranksError):
    """A collective that computed something wrong; `ranks` have the wrong values in memory."""

    def __init__(self, collective: str, size: int, members: int, ranks: list[int]) -> None:
        super().__init__(
            f"{collective} of {num_bytes(size)} over {members} ranks gave a wrong result on "
            f"{ranks_in_words(ranks)}",
            fix="measure again; if it is wrong again, do not train there: a link, a driver or the "
            "memory of that rank's node is at fault",
            exit_code=1,
        )
        self.ranks = ranks


class Bench:
    """All sweeps, and what is known about the route the bytes took."""

    def __init__(
        self, world: World, run: RunDir, nccl_log: Path, wanted: argparse.Namespace
    ) -> None:
        self.world = world
        self.path = run.path / "comm.json"
        self.nccl_log = nccl_log
        self.wanted = wanted
        least, largest = comm.parse_sizes(wanted.sizes)
        self.sizes = comm.sizes_between(least, largest)
        self.memory_bytes = memory_for_buffers(world)
        self.sweeps: list[Sweep] = []
        self.link = gpus.gpu_link(gpus.local_gpus()) if world.library == "nccl" else "none"
        self.found: dict[str, Any] = {
            "run": run.name,
            "run_dir": str(run.path),
            "layout": os.environ["ALLRANKS_LAYOUT"],
            "backend": run.info().get("backend"),  # local or slurm
            "library": world.library,
            "device": torch.cuda.get_device_name(world.device)
            if world.library == "nccl"
            else "CPU",
            "ranks": world.size,
            "nodes": world.size // world.per_node,
            "played": int(os.environ["ALLRANKS_RANKS_HERE"]) > world.per_node,
            "rows": [],
            "fits": [],
            "transport": {},
            "peak_GBps": dict.fromkeys(world.scopes),
            "not_supported": [],
            "stopped": [],
            "sizes": [least, largest],
            "seconds": wanted.seconds,
            "timing": TIMING,
            "versions": {"torch": torch.__version__},
            "complete": False,
        }

    def run(self) -> None:
        """Measure scope after scope, collective after collective. Collective."""
        budget = Budget(self.wanted.seconds, len(self.world.scopes) * len(self.wanted.collectives))
        try:
            for scope in self.world.scopes:
                log_start = len(read_from(self.nccl_log, 0))
                for collective in self.wanted.collectives:
                    self.sweeps.append(Sweep(self.world, scope, collective))
                    self.measure(self.sweeps[-1], budget)
                self.note_transport(scope, log_start)
            # Larger sizes, in the time that other sweeps left over.
            stopped = [sweep for sweep in self.sweeps if sweep.stopped == "time"]
            budget.sweeps = len(stopped)
            for sweep in stopped:
                self.measure(sweep, budget)
            self.found["complete"] = True
        finally:
            self.write()  # after a Ctrl-C, too: with what the sweep cut short has measured

    def measure(self, sweep: Sweep, budget: Budget) -> None:
        """Measure as far as its share of the time allows; print a line if there is progress."""
        before, begun = len(sweep.rows), time.monotonic()
        sweep.measure(self.sizes, self.memory_bytes, budget.share())
        if self.world.rank == 0 and (not before or len(sweep.rows) > before):
            print(progress(sweep, time.monotonic() - begun), flush=True)
        self.write()

    def write(self) -> None:
        """Write what is known by now: it is kept if a rank dies later."""
        if self.world.rank != 0:
            return
        found = self.found
        found["rows"] = [row for sweep in self.sweeps for row in sweep.rows]
        for row in found["rows"]:
            peak = found["peak_GBps"][row["scope"]]
            row["of_peak"] = comm.significant(row["busbw_GBps"] / peak) if peak else None
        found["fits"] = comm.fits(found["rows"], found["peak_GBps"])
        found["not_supported"] = [
            {"collective": each.collective, "scope": each.scope, "why": each.lacking}
            for each in self.sweeps
            if each.lacking
        ]
        found["stopped"] = [
            {
                "collective": each.collective,
                "scope": each.scope,
                "after_bytes": each.rows[-1]["bytes"] if each.rows else None,
                "why": each.stopped,
            }
            for each in self.sweeps
            if each.stopped
        ]
        write_atomically(self.path, to_json(found, indent=1) + "\n")

    def note_transport(self, scope: comm.Scope, log_start: int) -> None:
        """Collective. NCCL connects a group at its first use: its log then grows by that group."""
        own: Any = None
        if self.world.scopes[scope] is not None:
            own = gloo_route()
            if self.world.library == "nccl":
                own = parse_nccl_log(read_from(self.nccl_log, log_start))
                own["peak"] = self._peak(scope, own)
        gathered: list[Any] = [None] * self.world.size
        dist.all_gather_object(gathered, own)
        known = [each for each in gathered if each is not None]
        if self.world.library == "gloo":
            protocols, interfaces = ([*dict.fromkeys(names)] for names in zip(*known, strict=True))
            words = f"{'/'.join(protocols)} over {', '.join(interfaces)}"
            self.found["transport"][scope] = {"words": words, "interfaces": interfaces}
            return
        merged = merge(known)
        self.found["transport"][scope] = {"words": in_words(merged, self.link), **merged}
        peaks = [each["peak"] for each in known]
        self.found["peak_GBps"][scope] = min(peaks) if all(peaks) else None

    def _peak(self, scope: comm.Scope, parsed: dict[str, Any]) -> float | None:
        """GB/s that this rank's hardware could carry in a scope, where that is known."""
        if scope == "nodes":
            return network_peak(parsed)
        if scope == "all" or not any(route.startswith("P2P") for route in parsed["via"]):
            return None  # several kinds of links, or not the one between the GPUs
        kinds = {gpu.catalogue for gpu in gpus.local_gpus()}
        return comm.link_peak(next(iter(kinds)), self.link) if len(kinds) == 1 else None


def progress(sweep: Sweep, seconds: float) -> str:
    """A line from rank 0, shown while the rest is measured."""
    where = f"{sweep.collective:<15} {comm.SCOPES[sweep.scope]}"
    if sweep.lacking:
        return f"{where}: not supported by {sweep.world.library}"
    if not sweep.rows:
        return f"{where}: not even the smallest size fits"
    span = " to ".join(num_bytes(sweep.rows[end]["bytes"]) for end in (0, -1))
    return f"{where}: {span}, {duration(seconds)}"


def read_from(path: Path, start: int) -> str:
    """A log's text from a position on; empty if there is no log."""
    return path.read_text(errors="replace")[start:] if path.exists() else ""


def parse_nccl_log(text: str) -> dict[str, Any]:
    """What NCCL (2.x, with INFO of INIT, NET and GRAPH) says of the connections that it made."""
    via = Counter(re.sub(r"\(\d+\)", "", route) for route in _CHANNEL.findall(text))
    devices: dict[str, str] = {}
    for plugin, rest in _USING.findall(text):
        for number, name in _DEVICE.findall(rest.partition("; OOB")[0]):
            devices[f"{plugin}/{number}"] = re.sub(r":[\d.:a-f]+<\d+>$", "", name)
    networks = _NETWORK.findall(text)
    versions = _VERSION.findall(text)
    return {
        "via": dict(sorted(via.items())),
        "network": networks[-1].strip() if networks else None,
        "devices": devices,
        # In GRAPH's picture of the machine: `+ NVL[132.0] - GPU/...`
        "nvlink": bool(re.search(r"\+ NVL\[", text)),
        "nvls": "NVLS multicast support is available" in text,
        "version": versions[-1] if versions else None,
    }


def merge(logs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks of a scope saw, as one."""
    via: Counter[str] = Counter()
    devices: dict[str, str] = {}
    for log in logs:
        via.update(log["via"])
        devices |= log["devices"]
    merged: dict[str, Any] = {"via": dict(sorted(via.items())), "devices": devices}
    for key in ("network", "version"):
        merged[key] = next((log[key] for log in logs if log[key]), None)
    for key in ("nvlink", "nvls"):
        merged[key] = any(log[key] for log in logs)
    return merged


def in_words(parsed: Mapping[str, Any], link: str = "unknown") -> str:
    """One line for people; `link`: between the GPUs of a node, as NVML says (gpus.gpu_link)."""
    words = [_route_in_words(route, parsed, link) for route in parsed["via"]]
    if not words:
        return "NCCL's log does not say"
    return ", ".join(dict.fromkeys(words))


def _route_in_words(route: str, parsed: Mapping[str, Any], link: str) -> str:
    kind, _, rest = route.partition("/")
    if kind == "P2P":
        if parsed["nvlink"] or link == "NVLink":
            return f"NVLink ({route})"
        return f"PCIe ({route})" if link.startswith("PCIe") else f"GPU to GPU ({route})"
    if kind == "SHM":
        return f"host memory ({route})"
    if kind != "NET":
        return route
    plugin, _, number = rest.partition("/")
    number = number.partition("/")[0]
    family = "IB" if plugin.startswith("IB") else plugin
    device = parsed["devices"].get(f"{family}/{number}", "")
    direct = ", GPUDirect RDMA" if "GDRDMA" in route else ""
    if family == "Socket":
        return f"sockets (NET/Socket over {device or 'an interface that is not named'})"
    if family == "IB":
        name = "RoCE" if device.endswith("/RoCE") else "InfiniBand"
        port = f" over {device.rpartition('/')[0]}" if device else ""
        return f"{name} (NET/{plugin}{port}{direct})"
    return f"network plugin (NET/{plugin}{direct})"


def network_peak(parsed: Mapping[str, Any], sys_root: Path = Path("/sys")) -> float | None:
    """GB/s of the InfiniBand or RoCE ports that the channels of this rank use; None if unknown."""
    used = set()
    for route in parsed["via"]:
        match = re.match(r"NET/(IB)\w*/(\d+)", route)
        if match:
            used.add(parsed["devices"].get(f"{match[1]}/{match[2]}"))
        elif route.startswith("NET/"):
            return None
    rates = [_port_rate(device, sys_root) for device in used]
    return sum(rate for rate in rates if rate) / 1e9 if rates and all(rates) else None


def _port_rate(device: str | None, sys_root: Path) -> float | None:
    """Bytes per second of `mlx5_0:1/IB`, in the kernel's words "200 Gb/sec (4X HDR)"."""
    name = (device or "").rpartition("/")[0]
    port = next((port for port in infiniband_ports(sys_root) if port.name == name), None)
    return port.bits_per_second / 8 if port is not None and port.bits_per_second else None


def gloo_route(env: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The protocol and the interface that gloo talks through, as torch chooses it."""
    protocol = env.get("GLOO_DEVICE_TRANSPORT", "TCP")
    interface = env.get("GLOO_SOCKET_IFNAME")
    if interface:
        return protocol, interface
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "an address that does not resolve"
    return protocol, f"{address}, that of the name {name}"


def fail(error: BaseException) -> None:
    """Write why to the end event and the log, and exit without waiting for the other ranks."""
    if isinstance(error, KeyboardInterrupt):
        os._exit(STOPPED_AT_ONCE)  # the launcher reports that it was stopped
    described = tracebacks.describe(error)
    what, fix, code, is_echo = tracebacks.in_a_line(described), "", 1, described["echo"]
    if isinstance(error, AllranksError):
        what, fix, code = error.what, error.fix, error.exit_code
        is_echo = isinstance(error, WrongResult) and int(os.environ["RANK"]) not in error.ranks
        print(what, file=sys.stderr)
    elif is_echo:
        print(
            f"lost the connection to another rank: {described['message'].splitlines()[0]}",
            file=sys.stderr,
        )
    else:
        traceback.print_exception(error)
    fields = {"what": what, "fix": fix, "echo": is_echo}
    tracebacks.record("end", {"state": "failed", "exit": code, "error": fields})
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("collectives", nargs="+", choices=list(comm.COLLECTIVES))
    parser.add_argument("--sizes", default=comm.DEFAULT_SIZES)
    parser.add_argument("--seconds", type=float, default=120.0)
    wanted = parser.parse_args()
    run = RunDir(Path(os.environ["ALLRANKS_RUN_DIR"]))
    attempt = run.attempt(int(os.environ["ALLRANKS_ATTEMPT"]))
    nccl_log = attempt / f"rank-{os.environ['RANK']}.nccl.log"
    # Before NCCL is first called: that is when it reads them.
    os.environ |= {**NCCL_LOG, "NCCL_DEBUG_FILE": str(nccl_log)}
    try:
        Bench(join(choose_device()), run, nccl_log, wanted).run()
        highest(0.0)  # others may still be reading what this rank sent last
        dist.destroy_process_group()
    except BaseException as error:
        fail(error)


if __name__ == "__main__":
    main()
