"""Network, limits, shared memory, CPUs, clock and disks of a machine: pure functions of facts."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from allranks.doctor.check import Check, failed, not_here, passed, warned
from allranks.doctor.machine.facts import DEFAULT_PORT, MachineFacts
from allranks.machine.disks import FolderFacts
from allranks.show.numbers import rate
from allranks.show.numbers import size as num_bytes


def network_checks(facts: MachineFacts) -> list[Check]:
    return [interfaces(facts), infiniband(facts), own_name(facts), default_port(facts)]


def interfaces(facts: MachineFacts) -> Check:
    real = [each for each in facts.interfaces if not each.is_loopback]
    if not real:
        return not_here("interfaces", "no interface is up but the loopback: one machine alone")
    words = ", ".join(f"{each.name} ({each.address})" for each in real)
    return passed("interfaces", words)


def infiniband(facts: MachineFacts) -> Check:
    if not facts.ports:
        return not_here("infiniband", "no InfiniBand or RoCE device: NCCL uses sockets")
    active = [port for port in facts.ports if port.state == "ACTIVE"]
    down = [port for port in facts.ports if port.state != "ACTIVE"]
    words = ", ".join(f"{port.name} is {port.state}" for port in down)
    if not active:
        fix = "tell the site (ibstat); until then export NCCL_IB_DISABLE=1: sockets are slower"
        return failed("infiniband", f"no port is active: {words}", fix)
    value = ", ".join(f"{port.name} {port.rate}" for port in active)
    if down:
        names = ",".join(port.name for port in active)
        return warned("infiniband", f"{value}; but {words}", f"export NCCL_IB_HCA=={names}")
    return passed("infiniband", value)


def own_name(facts: MachineFacts) -> Check:
    outward = next((each for each in facts.interfaces if not each.is_loopback), None)
    through = f"export GLOO_SOCKET_IFNAME={outward.name}" if outward else ""
    if facts.host_address is None:
        fix = through or f"add '127.0.1.1 {facts.host}' to /etc/hosts"
        return warned("own name", f"{facts.host} stands for no address", fix)
    value = f"{facts.host} is {facts.host_address}"
    if ipaddress.ip_address(facts.host_address).is_loopback and outward is not None:
        value += ", a loopback address: other machines that are told it reach themselves"
        # On one machine alone nothing is wrong with it.
        if facts.num_nodes > 1:
            return failed("own name", value, f"{through}; and --master {outward.address}:29500")
        return passed("own name", f"{value}; {through} for several machines")
    return passed("own name", value)


def default_port(facts: MachineFacts) -> Check:
    if facts.default_port_taken:
        fix = f"torchrun --master-port=0 or another number; ss -ltnp 'sport = :{DEFAULT_PORT}' "
        value = f"{DEFAULT_PORT}, where torch's ranks meet by default, is in use"
        return warned("port", value, f"{fix}shows whose it is. allranks takes a free one itself")
    return passed("port", f"{DEFAULT_PORT} is free")


MIB, GIB = 1 << 20, 1 << 30
FEW_FILES, ENOUGH_FILES = 1024, 4096
ENOUGH_PROCESSES = 2048
ENOUGH_STACK = 1 << 20
DOCKERS_SHM = 64 * MIB
ENOUGH_SHM = GIB
LEAST_FREE, ENOUGH_FREE = GIB, 10 * GIB
SLOW_WRITE = 50e6  # bytes a second: a checkpoint of 1 GB takes 20 s
SLOW_READ = 100e6
MOST_CLOCK_ERROR = 1.0  # seconds
NO_LIMIT = -1


def system_checks(facts: MachineFacts) -> list[Check]:
    return [
        *limit_checks(facts),
        shared_memory(facts),
        cpus(facts),
        memory(facts),
        clock(facts),
        *(check for folder in facts.folders for check in folder_checks(folder)),
    ]


def limit_checks(facts: MachineFacts) -> Iterator[Check]:
    yield open_files(facts)
    yield locked_memory(facts)
    soft, _ = facts.limits.get("stack", (NO_LIMIT, NO_LIMIT))
    if soft != NO_LIMIT and soft < ENOUGH_STACK:
        yield warned("stack", f"ulimit -s is {soft >> 10} KiB", "ulimit -s 8192")
    else:
        size = "unlimited" if soft == NO_LIMIT else num_bytes(soft)
        yield passed("stack", f"ulimit -s is {size}")
    soft, hard = facts.limits.get("nproc", (NO_LIMIT, NO_LIMIT))
    if soft != NO_LIMIT and soft < ENOUGH_PROCESSES:
        top = "" if hard == soft else f" {hard if hard != NO_LIMIT else 'unlimited'}"
        fix = f"ulimit -u{top}" if top else "ask the site for more processes (ulimit -u)"
        value = f"ulimit -u is {soft}: ranks, loader workers and their threads count against it"
        yield warned("processes", value, fix)


def open_files(facts: MachineFacts) -> Check:
    soft, hard = facts.limits.get("nofile", (NO_LIMIT, NO_LIMIT))
    value = f"ulimit -n is {'unlimited' if soft == NO_LIMIT else soft}"
    if soft == NO_LIMIT or soft >= ENOUGH_FILES:
        return passed("open files", value)
    if hard == NO_LIMIT or hard > soft:
        more = 65536 if hard == NO_LIMIT else min(hard, 65536)
        fix = f"ulimit -n {more}, in the shell or slurm.setup of the job"
    else:
        fix = "ask the site for more; or torch.multiprocessing.set_sharing_strategy('file_system')"
    value += ": loader workers hand over tensors as open files"
    return (
        failed("open files", value, fix) if soft < FEW_FILES else warned("open files", value, fix)
    )


def locked_memory(facts: MachineFacts) -> Check:
    soft, _ = facts.limits.get("memlock", (NO_LIMIT, NO_LIMIT))
    if soft == NO_LIMIT:
        return passed("locked memory", "ulimit -l is unlimited")
    value = f"ulimit -l is {num_bytes(soft)}"
    if not facts.ports:
        return passed("locked memory", f"{value}; only InfiniBand would need more")
    return failed(
        "locked memory",
        f"{value}, and InfiniBand must lock the memory it sends from",
        "ulimit -l unlimited; in SLURM the site sets it (LimitMEMLOCK=infinity for slurmd)",
    )


def shared_memory(facts: MachineFacts) -> Check:
    size, free = facts.shm_bytes, facts.shm_free
    if size is None or free is None:
        fix = "docker run --ipc=host, or mount a tmpfs there: loader workers and NCCL need it"
        return failed("shared memory", "there is no /dev/shm", fix)
    value = f"/dev/shm has {num_bytes(free)} free of {num_bytes(size)}"
    fix = "docker run --ipc=host (or --shm-size=16g); without root: data.num_workers=0"
    if size <= DOCKERS_SHM:
        return failed("shared memory", f"{value}: loader workers will die of a bus error", fix)
    if size < ENOUGH_SHM:
        return warned("shared memory", value, fix)
    if free < ENOUGH_SHM:
        old = "ls -l /dev/shm shows what is left over by others or by killed runs: remove yours"
        return warned("shared memory", value, old)
    return passed("shared memory", value)


def cpus(facts: MachineFacts) -> Check:
    allotted = facts.cpus_allotted
    value = f"{allotted} of {facts.cpus} CPUs may be used"
    if facts.gpus:
        value += f", for {len(facts.gpus)} GPUs"
    in_slurm = "SLURM_JOB_ID" in facts.env
    wanted = 4 * max(1, len(facts.gpus))
    more = f"#SBATCH --cpus-per-task={wanted} (slurm.cpus_per_gpu in a job), and srun -c {wanted}"
    if in_slurm and allotted == 1 and facts.cpus > 1:
        return warned("cpus", f"{value}: ranks, loader workers and NCCL share one", more)
    if facts.gpus and allotted < 2 * len(facts.gpus):
        fix = more if in_slurm else "use fewer ranks, or a machine with more CPUs a GPU"
        return warned("cpus", f"{value}: loader workers will be short of them", fix)
    return passed("cpus", value)


def memory(facts: MachineFacts) -> Check:
    value = f"{num_bytes(facts.memory_allotted)} of {num_bytes(facts.memory_bytes)} may be used"
    on_gpus = sum(gpu.memory_bytes for gpu in facts.gpus)
    if on_gpus and facts.memory_allotted < on_gpus / 2:
        fix = "#SBATCH --mem=0 (all of the node), or slurm.mem_per_gpu in a job"
        return warned("memory", f"{value}, beside {num_bytes(on_gpus)} on the GPUs", fix)
    return passed("memory", value)


def clock(facts: MachineFacts) -> Check:
    if facts.clock_synchronised is None:
        return not_here("clock", "the kernel does not say whether its clock is right")
    error = facts.clock_error or 0.0
    fix = "timedatectl set-ntp true, or start chrony: the logs of nodes cannot be compared"
    if not facts.clock_synchronised:
        return warned("clock", "no time server keeps this clock right", fix)
    if error > MOST_CLOCK_ERROR:
        return warned("clock", f"the clock may be off by {error:.1f} s", fix)
    return passed("clock", f"kept right by a time server, to {error * 1e3:.0f} ms")


def folder_checks(folder: FolderFacts) -> Iterator[Check]:
    name = f"{folder.use} folder"
    if folder.problem or folder.free_bytes is None:
        fix = "--runs DIR (or ALLRANKS_RUNS) on a disk that can be written to"
        if folder.use == "data":
            fix = "mount it on this machine, or name another with --data"
        yield failed(name, f"{folder.path}: {folder.problem or 'cannot be looked at'}", fix)
        return
    kind = "network disk" if folder.is_network else "memory" if folder.is_memory else "local disk"
    value = f"{folder.path} ({folder.kind}, {kind}): {num_bytes(folder.free_bytes)} free"
    if folder.use == "runs":
        yield run_space(name, folder, value)
    else:
        yield data_speed(name, folder, value)


def run_space(name: str, folder: FolderFacts, value: str) -> Check:
    if folder.write_speed is not None:
        value += f", written at {rate(folder.write_speed)}"
    assert folder.free_bytes is not None
    other = "remove old runs and checkpoints, or use another disk with --runs DIR"
    if folder.free_files == 0:
        return failed(name, f"{value}, but no file can be made: out of inodes", other)
    if folder.free_bytes < LEAST_FREE:
        return failed(name, value, other)
    if folder.free_bytes < ENOUGH_FREE:
        return warned(name, value, other)
    if folder.is_memory:
        return warned(name, f"{value}; gone when the machine restarts", "--runs DIR on a disk")
    if folder.write_speed is not None and folder.write_speed < SLOW_WRITE:
        return warned(name, value, "checkpoint.every=1h, or a faster disk with --runs DIR")
    return passed(name, value)


def data_speed(name: str, folder: FolderFacts, value: str) -> Check:
    if folder.read_speed is None:
        return warned(name, f"{value}, no file to read", "name the folder that has the files")
    value += f", read at {rate(folder.read_speed)}"
    if folder.read_speed >= SLOW_READ:
        return passed(name, value)
    fix = "allranks bench data JOB.yaml tells whether that is enough"
    if folder.is_network:
        fix += f"; data.stage=local, or stage: [{folder.path}] for a script, copies it to each node"
    return warned(name, value, fix)
