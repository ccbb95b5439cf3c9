"""Checks on the nodes of an allocation before training: one process per node, all at once.

    srun --ntasks-per-node=1 python -m allranks.doctor.preflight --folder RUN/preflight/KEY \\
        --nodes a,b,c --node b --master HOST:PORT --gpus N --seconds 25

The folder must exist. Each node writes NODE.json there: every check with `ok` (null: not made),
`detail`, `warning` and `seconds`. It does so in time, whatever hangs: a check that has not ended is
recorded as such. The first node serves the store at --master. Run it in the environment that the
ranks will have, including NCCL's and gloo's variables.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.doctor.connectivity import Clock, Directory, Listener, reach_all
from allranks.doctor.finding import Check, failed, not_here, passed, warned
from allranks.doctor.node_checks import free_disk, gpu_health, visible_gpus, write_test
from allranks.machine.network import address_towards
from allranks.machine.nodelist import expand
from allranks.machine.processes import quick_imports
from allranks.run.folder import write_atomically
from allranks.show.numbers import duration, rate, size

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

MEETING_SHARE = 0.75  # of the time, at least, for all nodes to arrive
ALL_REDUCE_SECONDS = 5.0  # kept for the all-reduce
CLOSING_SECONDS = 1.0  # to write what is known
LEAVING_SECONDS = 4.0  # that a finished node waits for the others
POLL_SECONDS = 0.1  # at most
MOST_SKEW_SECONDS = 1.0
SIZES = (1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28)  # bytes of an all-reduce
SECONDS_PER_SIZE = 0.06
SECONDS_OF_ALL_SIZES = 0.3  # the training waits for it
MOST_REPEATS = 50
FAIL_IF_HUNG = ("write", "gpus", "health", "rendezvous", "allreduce")  # a failure if they hang


@dataclass(slots=True)
class Preflight:
    """One node's part of the preflight, and what it knows so far."""

    folder: Path
    nodes: list[str]
    node: str
    host: str
    port: int
    gpus: int
    seconds: float
    start: float = field(default_factory=time.monotonic)
    checks: dict[str, Check] = field(default_factory=dict)
    begun: dict[str, float] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    store: dist.TCPStore | None = None

    @property
    def rank(self) -> int:
        return self.nodes.index(self.node)

    @property
    def others(self) -> list[str]:
        return [node for node in self.nodes if node != self.node]

    @property
    def poll_seconds(self) -> float:
        """The first node answers everyone: with more nodes each asks less often."""
        return min(POLL_SECONDS, 0.005 * len(self.nodes))

    @property
    def deadline(self) -> float:
        return self.start + self.seconds - CLOSING_SECONDS

    @property
    def meeting_deadline(self) -> float:
        """When nodes that have not arrived are given up."""
        return self.start + max(MEETING_SHARE * self.seconds, self.seconds - ALL_REDUCE_SECONDS)

    def check(self, name: str, function: Callable[..., Check], *args: Any) -> Check:
        """Make one check; if it raises, it has failed."""
        begun = self.begun[name] = time.monotonic()
        try:
            check = function(*args)
        except Exception as error:  # a check must not take the others down
            check = failed(name, _words(error))
        self.took[name] = time.monotonic() - begun
        self.checks[name] = check
        return check

    def record(self) -> dict[str, Any]:
        """What is known now, in the form it is written."""
        checks = []
        for name, begun in list(self.begun.items()):
            check = self.checks.get(name)
            took = self.took.get(name, time.monotonic() - begun)
            if check is None:
                outcome = failed if name in FAIL_IF_HUNG else not_here
                warning = _slow_import(took) if name == "torch" else ""
                check = outcome(name, f"had not ended after {duration(took)}", warning=warning)
            warning = check.value if check.status == "warn" else ""
            said = {"ok": check.ok, "detail": check.value, "warning": warning}
            checks.append({"name": name, **said, "seconds": round(took, 4), **check.more})
        spent = time.monotonic() - self.start
        return {
            "v": 1,
            "t": time.time(),
            "node": self.node,
            "host": socket.gethostname(),
            "seconds": round(spent, 4),
            "checks": checks,
        }


def main(arguments: Sequence[str] | None = None) -> None:
    preflight = _parse(arguments)
    # Even if a library blocks the interpreter for good, for example reading from a dead disk.
    faulthandler.dump_traceback_later(preflight.seconds + 2, exit=True)
    is_known = run(preflight)
    sys.stderr.flush()
    os._exit(0 if is_known else 1)  # threads that hang are left behind


def _parse(arguments: Sequence[str] | None) -> Preflight:
    parser = argparse.ArgumentParser(prog="python -m allranks.doctor.preflight")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--nodes", type=expand, required=True)
    parser.add_argument("--node", default=os.environ.get("SLURMD_NODENAME"))
    parser.add_argument("--master", required=True, help="HOST:PORT of the first node")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=25)
    options = parser.parse_args(arguments)
    if options.node not in options.nodes:
        parser.error(f"--node {options.node} is not among --nodes {','.join(options.nodes)}")
    host, _, port = options.master.rpartition(":")
    if not host or not port.isdecimal():
        parser.error(f"--master {options.master} is not HOST:PORT")
    return Preflight(
        folder=options.folder.absolute(),
        nodes=options.nodes,
        node=options.node,
        host=host.strip("[]"),
        port=int(port),
        gpus=options.gpus,
        seconds=options.seconds,
    )


def run(preflight: Preflight) -> bool:
    """All checks at once; whether their outcome was written or given to another node."""
    directory = Directory(preflight.folder)
    listener = Listener(preflight.node)
    alone = [_thread(_check_gpus, preflight), _thread(_check_disks, preflight)]
    threads = list(alone)
    if preflight.others:
        reach = _thread(preflight.check, "reach", _reach, preflight, directory, listener.port)
        meet = _thread(_meet, preflight, directory, listener.port, [*alone, reach])
        threads += [reach, meet]
    for thread in threads:
        thread.join(max(0.0, preflight.deadline - time.monotonic()))
    if preflight.store is None:
        _stay(preflight, listener)
    is_known = _close(preflight)
    listener.close()
    return is_known


def _stay(preflight: Preflight, listener: Listener) -> None:
    """Wait for late nodes: they would find nobody here, and this node would be blamed."""
    until = min(preflight.deadline, time.monotonic() + LEAVING_SECONDS)
    while len(listener.greeted) < len(preflight.others) and time.monotonic() < until:
        time.sleep(preflight.poll_seconds / 2)


def _thread(function: Callable[..., Any], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def _check_disks(preflight: Preflight) -> None:
    preflight.check("write", write_test, preflight.folder, preflight.node)
    preflight.check("disk", free_disk, preflight.folder)


def _check_gpus(preflight: Preflight) -> None:
    preflight.check("gpus", visible_gpus, preflight.gpus)
    preflight.check("health", gpu_health, preflight.gpus)


def _entry(preflight: Preflight, port: int) -> dict[str, Any]:
    """Where the others find this node's listener."""
    is_first = preflight.rank == 0
    address = preflight.host if is_first else address_towards(preflight.host)
    return {"addresses": [address] if address else [], "port": port}


def _reach(preflight: Preflight, directory: Directory, port: int) -> Check:
    entry = _entry(preflight, port)
    with suppress(OSError):  # the write test reports it; the store will tell the others
        directory.publish(preflight.node, entry)
    first = preflight.nodes[0]
    ask = first if preflight.rank else None
    reached = reach_all(
        preflight.others, directory, deadline=preflight.meeting_deadline, ask_clock_of=ask
    )
    if ask is not None:
        preflight.check("clock", _skew, reached.answered.get(first), first)
    more = {"silent": reached.silent, "addresses": entry["addresses"]}
    if not reached.silent:
        return passed("reach", f"reaches all {len(preflight.others)} other nodes", **more)
    words = [f"{node} ({why})" for node, why in reached.silent.items()]
    return failed("reach", f"cannot reach {', '.join(words)}", **more)


def _skew(clock: Clock | None, first: str) -> Check:
    if clock is None:
        return not_here("clock", f"not known: {first} did not answer")
    sign = "behind" if clock.offset > 0 else "ahead of"
    slack = clock.round_trip / 2
    detail = f"{duration(abs(clock.offset))} {sign} {first}, give or take {duration(slack)}"
    more: dict[str, Any] = {"offset": clock.offset, "round_trip": clock.round_trip}
    if abs(clock.offset) - slack > MOST_SKEW_SECONDS:
        return warned("clock", f"the clock is {detail}", **more)
    return passed("clock", detail, **more)


def _meet(
    preflight: Preflight, directory: Directory, port: int, before: list[threading.Thread]
) -> None:
    """Everything that needs torch; then wait until the other nodes are done too."""
    if not preflight.check("torch", _import_torch).ok:
        return
    if time.monotonic() > preflight.meeting_deadline:
        # Not the node's fault: a machine this busy, or with a disk this slow, can still train.
        words = _slow_import(preflight.took["torch"])
        preflight.check("rendezvous", lambda: not_here("rendezvous", "not made", warning=words))
        return
    # NCCL is used only if the GPU checks have passed, and torch may be imported before they end.
    before[0].join(max(0.0, preflight.start + preflight.seconds / 2 - time.monotonic()))
    found = preflight.check("rendezvous", _rendezvous, preflight, directory, port)
    if found.ok:
        preflight.check("allreduce", _all_reduce, preflight)
    for thread in before:
        thread.join(max(0.0, preflight.deadline - time.monotonic()))
    if preflight.store is not None:
        missing = found.more.get("missing", [])
        came = [node for node in preflight.others if node not in missing]
        with suppress(Exception):  # the first node is gone: nobody needs this one any more
            _leave(preflight, preflight.store, came)


def _import_torch() -> Check:
    with quick_imports():
        import torch.distributed

    return passed("torch", f"torch {torch.__version__}")


def _slow_import(seconds: float) -> str:
    took = duration(seconds, whole=True)
    return f"torch took over {took} to import: rendezvous and all-reduce were not checked"


def _rendezvous(preflight: Preflight, directory: Directory, port: int) -> Check:
    """Meet in a store on the first node, which decides whether all came in time."""
    import torch
    import torch.distributed as dist

    where = f"{preflight.host}:{preflight.port}"
    is_first = preflight.rank == 0
    try:
        if not is_first:
            _wait_for_port(preflight)
        store = dist.TCPStore(
            preflight.host,
            preflight.port,
            is_master=is_first,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(1.0, preflight.deadline - time.monotonic())),
        )
    except (RuntimeError, OSError) as error:
        verb = "listen at" if is_first else "reach the store at"
        # A taken port is not the node's fault: another port will do.
        fault = "port" if "EADDRINUSE" in str(error) else ""
        value = f"cannot {verb} {where}: {_words(error)}"
        return failed("rendezvous", value, missing=[], store=False, fault=fault)
    preflight.store = store
    gpus = preflight.checks.get("gpus")
    has_gpus = gpus is not None and gpus.ok is True
    own = _entry(preflight, port) | {"cuda": has_gpus and torch.cuda.is_available()}
    store.set(f"came/{preflight.node}", json.dumps(own))
    came: dict[str, dict[str, Any]] = {}
    while time.monotonic() < preflight.meeting_deadline and len(came) < len(preflight.nodes):
        for node in preflight.nodes:
            if node not in came and store.check([f"came/{node}"]):
                came[node] = json.loads(store.get(f"came/{node}"))
                directory.tell(node, came[node])
        if store.check(["backend"]):
            break
        time.sleep(preflight.poll_seconds)
    missing = [node for node in preflight.nodes if node not in came]
    if is_first:
        usable = "nccl" if all(entry["cuda"] for entry in came.values()) else "gloo"
        store.set("backend", "" if missing else usable)
    backend = store.get("backend").decode()
    more: dict[str, Any] = {"missing": [] if backend else missing, "store": True}
    if backend:
        more["backend"] = backend
        return passed("rendezvous", f"all {len(preflight.nodes)} nodes met at {where}", **more)
    late = ", ".join(missing) or "a node"
    return failed("rendezvous", f"{late} did not arrive at {where}", **more)


def _wait_for_port(preflight: Preflight) -> None:
    """Wait until the store listens: torch's own waiting has a limit of its own."""
    while True:
        left = preflight.meeting_deadline - time.monotonic()
        try:
            address = (preflight.host, preflight.port)
            with socket.create_connection(address, timeout=max(0.2, min(2.0, left))):
                return
        except OSError:
            if left <= 0:
                raise
        time.sleep(preflight.poll_seconds)


def _all_reduce(preflight: Preflight) -> Check:
    """Sum over all nodes, one rank per node, checked and timed. Every node must call it."""
    import torch
    import torch.distributed as dist

    assert preflight.store is not None
    num_nodes, backend = len(preflight.nodes), preflight.checks["rendezvous"].more["backend"]
    device = torch.device("cpu")
    if backend == "nccl":
        # Our own deadline comes first: torch would kill the process before it reports anything.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        try:
            device = torch.device("cuda", 0)
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
        except RuntimeError as error:
            return failed("allreduce", f"GPU 0 cannot be used: {_words(error)}", fault="own")
    torch.set_num_threads(1)
    left = preflight.deadline - time.monotonic()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("allreduce", preflight.store),
        rank=preflight.rank,
        world_size=num_nodes,
        timeout=timedelta(seconds=max(1.0, left)),
    )
    rows, wrong = _measure(device, preflight.rank, num_nodes, min(SECONDS_OF_ALL_SIZES, left / 2))
    more: dict[str, Any] = {"backend": backend, "sizes": rows}
    if wrong:
        return failed("allreduce", wrong, **more)
    more["bus_bandwidth"] = best = max(row["bus_bandwidth"] for row in rows)
    detail = f"correct sums over {num_nodes} nodes with {backend}, bus bandwidth {rate(best)}"
    return passed("allreduce", detail, **more)


def _measure(
    device: torch.device, rank: int, num_nodes: int, seconds: float
) -> tuple[list[dict[str, float]], str]:
    """Seconds and bandwidth of the sizes there was time for; and what was wrong, if anything."""
    import torch
    import torch.distributed as dist

    _slowest(0.0, device)  # the first call opens the connections
    start = time.monotonic()
    rows: list[dict[str, float]] = []
    expected = num_nodes * (num_nodes + 1) / 2
    for num_bytes in SIZES:
        tensor = torch.full((num_bytes // 4,), rank + 1.0, device=device)
        begun = time.monotonic()
        dist.all_reduce(tensor)
        is_right = bool((tensor == expected).all())  # waits for the GPU too
        once = _slowest(time.monotonic() - begun if is_right else math.inf, device)
        if once == math.inf:  # wrong on some node: all stop together
            where = "another node" if is_right else "this node"
            return rows, f"an all-reduce of {size(num_bytes)} gave a wrong sum on {where}"
        repeats = max(1, min(MOST_REPEATS, int(SECONDS_PER_SIZE / once)))
        tensor.zero_()
        _synchronize(device)
        begun = time.monotonic()
        for _ in range(repeats):
            dist.all_reduce(tensor)
        _synchronize(device)
        each = _slowest((time.monotonic() - begun) / repeats, device)
        bus = num_bytes / each * 2 * (num_nodes - 1) / num_nodes
        rows.append({"bytes": num_bytes, "seconds": each, "bus_bandwidth": bus})
        # The next size takes at least four times as long, twice. All ranks must agree to stop.
        if _slowest(time.monotonic() - start, device) + 8 * each > seconds:
            break
    return rows, ""


def _slowest(seconds: float, device: torch.device) -> float:
    """The largest over all ranks. Every rank must call it."""
    import torch
    import torch.distributed as dist

    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return max(1e-9, value.item())


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _leave(preflight: Preflight, store: dist.TCPStore, came: list[str]) -> None:
    """Say what was found, and stay: others may still be connecting to this node."""
    is_written = _write(preflight, preflight.node, preflight.record())
    done = {"written": is_written, "record": preflight.record()}
    store.set(f"done/{preflight.node}", json.dumps(done))
    until = min(preflight.deadline, time.monotonic() + LEAVING_SECONDS)
    waiting = list(came)
    while waiting and time.monotonic() < until:
        for node in list(waiting):
            if not store.check([f"done/{node}"]):
                continue
            waiting.remove(node)
            theirs = json.loads(store.get(f"done/{node}"))
            if is_written and not theirs["written"]:
                _write(preflight, node, theirs["record"])  # it could not do it itself
        time.sleep(preflight.poll_seconds / 2)


def _write(preflight: Preflight, node: str, record: dict[str, Any]) -> bool:
    try:
        write_atomically(preflight.folder / f"{node}.json", json.dumps(record, indent=1) + "\n")
    except OSError:
        return False
    return True


def _close(preflight: Preflight) -> bool:
    """Write the result, in a thread of its own: the disk may be what hangs."""
    record = preflight.record()
    outcome: list[bool] = []
    closing = _thread(lambda: outcome.append(_write(preflight, preflight.node, record)))
    closing.join(CLOSING_SECONDS)
    notes = [f"{c['name']}: {c['detail']}" for c in record["checks"] if c["ok"] is False]
    notes += [c["warning"] for c in record["checks"] if c["warning"]]
    words, took = "; ".join(notes) or "all well", duration(record["seconds"])
    print(f"preflight of {preflight.node}: {words} ({took})", file=sys.stderr)
    return any(outcome) or preflight.store is not None


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


if __name__ == "__main__":
    main()
