"""The checks of one machine: pure functions of its facts, each with what to type if it fails."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from allranks.doctor.finding import Check, failed, not_here, passed, warned
from allranks.doctor.machine.facts import DEFAULT_PORT, MachineFacts
from allranks.machine.disks import FolderFacts
from allranks.machine.gpus import visible_devices
from allranks.show.numbers import duration, rate, size

GIB = 1 << 30
SLOW_IMPORT = 15.0  # seconds
WHEELS = "https://download.pytorch.org/whl"
FEW_FILES, ENOUGH_FILES = 1024, 4096
ENOUGH_PROCESSES = 2048
ENOUGH_STACK = 1 << 20
DOCKERS_SHM = 64 << 20
ENOUGH_SHM = GIB
LEAST_FREE, ENOUGH_FREE = GIB, 10 * GIB
SLOW_WRITE = 50e6  # bytes per second: a checkpoint of 1 GB takes 20 s
SLOW_READ = 100e6
MOST_CLOCK_ERROR = 1.0  # seconds
NO_LIMIT = -1
LEFT_OVER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Variables that were renamed: the old names are no longer read, or soon will not be.
RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
}
SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel is waited for"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by a second one"),
    "NCCL_P2P_DISABLE": ("1", "GPUs in a node exchange data through host memory"),
    "NCCL_SHM_DISABLE": ("1", "ranks on a node exchange data over the network"),
}
PINNING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")


def check_machine(facts: MachineFacts) -> list[Check]:
    """All checks of one machine, in the order they are shown."""
    return [
        driver(facts),
        torch(facts),
        *cuda(facts),
        health(facts),
        peers(facts),
        nccl(facts),
        interfaces(facts),
        infiniband(facts),
        own_name(facts),
        default_port(facts),
        open_files(facts),
        locked_memory(facts),
        *other_limits(facts),
        shared_memory(facts),
        cpus(facts),
        memory(facts),
        clock(facts),
        *(folder_check(folder) for folder in facts.folders),
        *variables(facts),
    ]


def driver(facts: MachineFacts) -> Check:
    if not facts.has_driver and facts.has_nvidia_card:
        return failed(
            "driver",
            "there is an NVIDIA card, but no driver for it",
            "install NVIDIA's driver, or ask the site; in a container: docker run --gpus all, "
            "apptainer exec --nv",
        )
    if not facts.has_driver:
        return not_here("driver", "no GPU and no driver")
    if not facts.nvml_answers:
        fix = "run nvidia-smi to see why; after a driver update reboot, or have the node drained"
        return failed("driver", "the driver is installed, but NVML does not start", fix)
    if not facts.gpus:
        visible = facts.env.get("CUDA_VISIBLE_DEVICES")
        where = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
        fix = "unset CUDA_VISIBLE_DEVICES" if visible is not None else "ask for GPUs: --gres=gpu:1"
        return failed("driver", f"driver {facts.driver}, but no GPU is available{where}", fix)
    names = ", ".join(sorted({gpu.name for gpu in facts.gpus}))
    value = f"driver {facts.driver} (CUDA {facts.driver_cuda}), {len(facts.gpus)} x {names}"
    return passed("driver", value)


def torch(facts: MachineFacts) -> Check:
    found = facts.torch
    if found.version is None:
        return failed("torch", "torch is not installed in this Python", "pip install torch")
    if found.problem:
        fix = "python -c 'import torch' shows all of it; reinstall torch in a new environment"
        if "had not finished" in found.problem:
            fix = "keep the environment on a local disk, or try again: it will be cached in memory"
        return failed("torch", f"torch {found.version}: {found.problem}", fix)
    seconds = (found.asked or {}).get("seconds", 0.0)
    if seconds > SLOW_IMPORT:
        fix = "keep the environment on a local disk: every rank pays this at every start"
        took = duration(seconds, whole=True)
        return warned("torch", f"torch {found.version} took {took} to import", fix)
    return passed("torch", f"torch {found.version}")


def cuda(facts: MachineFacts) -> Iterator[Check]:
    """Torch's CUDA against the driver's, and its kernels against the GPUs."""
    built, runs, asked = facts.torch.cuda, facts.driver_cuda, facts.torch.asked or {}
    if not facts.gpus or facts.torch.version is None:
        yield not_here("cuda", f"no GPU to use torch's CUDA {built}" if built else "no GPU")
        return
    wheel = f"{WHEELS}/cu{(runs or '12.8').replace('.', '')}"
    fix = f"pip install torch --index-url {wheel}, or the closest one available"
    if built is None:
        yield failed("cuda", "there are GPUs, but this torch was built without CUDA", fix)
        return
    if runs is not None and _numbers(built)[0] > _numbers(runs)[0]:
        value = f"torch needs CUDA {built}, but the driver supports {runs} at most"
        yield failed("cuda", value, f"update the driver ({facts.driver} is too old), or {fix}")
        return
    if not asked.get("available", True):
        yield failed(
            "cuda",
            f"torch with CUDA {built} finds no GPU, although NVML finds {len(facts.gpus)}",
            "python -c 'import torch; torch.cuda.init()' shows why; after a suspend or a driver "
            "update: reboot",
        )
        return
    if runs is not None and _numbers(built) > _numbers(runs):
        value = (
            f"torch's CUDA {built} is newer than the driver's {runs}; fine within one major version"
        )
        yield warned("cuda", value, "update the driver if a kernel fails to load")
    else:
        yield passed("cuda", f"torch's CUDA {built} runs on the driver's {runs}")
    archs = asked.get("archs") or []
    lacking = [gpu for gpu in facts.gpus if not has_kernels(gpu.compute_capability, archs)]
    if archs and lacking:
        gpu = lacking[0]
        is_old = tuple(_numbers(gpu.compute_capability)) < max(map(_capability, archs))
        fix = "install an older torch, built for it" if is_old else "install a newer torch"
        value = f"{gpu.name} is sm_{gpu.compute_capability.replace('.', '')}, torch has "
        yield failed("kernels", f"{value}{' '.join(archs)}", fix)
    elif archs:
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
        return not_here("gpu health", "no GPU to check")
    if not found.ok:
        fix = "use other GPUs (#SBATCH --exclude=NODE), and tell the site"
        return failed("gpu health", found.value, fix)
    if found.status == "warn":
        fix = "nvidia-smi -q -d ECC,PERFORMANCE,TEMPERATURE; end leftover processes, or tell the "
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
            "no GPU can read another's memory: all data goes through the host",
            "nothing can be done in a virtual machine or with ACS on (nvidia-smi topo -p2p r); "
            "prefer layouts with one GPU per node, or nodes with NVLink",
        )
    return passed("peer access", f"GPUs reach each other over {facts.gpu_link}")


def nccl(facts: MachineFacts) -> Check:
    if facts.other_nccl:
        return warned(
            "nccl",
            f"{facts.other_nccl[0]} is loaded instead of torch's own {facts.torch.nccl or 'NCCL'}",
            "unset LD_LIBRARY_PATH (or LD_PRELOAD), or remove that folder from it: all nodes must "
            "have the same version",
        )
    if facts.torch.nccl is not None:
        return passed("nccl", f"NCCL {facts.torch.nccl}")
    if facts.gpus:
        fix = "pip install torch with CUDA: NCCL comes with it"
        return failed("nccl", "there are GPUs, but no NCCL", fix)
    return not_here("nccl", "no GPU and no NCCL: ranks talk over gloo")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()] or [0]


def _capability(arch: str) -> tuple[int, int]:
    digits = "".join(filter(str.isdecimal, arch.partition("_")[2])) or "0"
    return int(digits[:-1] or 0), int(digits[-1])


def interfaces(facts: MachineFacts) -> Check:
    words = [f"{each.name} ({each.address})" for each in facts.interfaces if not each.is_loopback]
    if not words:
        return not_here("interfaces", "only the loopback is up: this machine can only work alone")
    return passed("interfaces", ", ".join(words))


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
        return warned("own name", f"{facts.host} does not resolve to an address", fix)
    value = f"{facts.host} is {facts.host_address}"
    if ipaddress.ip_address(facts.host_address).is_loopback and outward is not None:
        value += ", a loopback address, which no other machine can reach"
        if facts.num_nodes > 1:
            return failed("own name", value, f"{through}; and --master {outward.address}:29500")
        return passed("own name", f"{value}; {through} for several machines")
    return passed("own name", value)


def default_port(facts: MachineFacts) -> Check:
    if facts.default_port_taken:
        fix = f"torchrun --master-port=0 or another number; ss -ltnp 'sport = :{DEFAULT_PORT}' "
        value = f"{DEFAULT_PORT}, where torch's ranks meet by default, is in use"
        return warned("port", value, f"{fix}shows what uses it. allranks itself picks a free port")
    return passed("port", f"{DEFAULT_PORT} is free")


def _limit(facts: MachineFacts, name: str) -> tuple[int, int]:
    return facts.limits.get(name, (NO_LIMIT, NO_LIMIT))


def open_files(facts: MachineFacts) -> Check:
    soft, hard = _limit(facts, "nofile")
    value = f"ulimit -n is {'unlimited' if soft == NO_LIMIT else soft}"
    if soft == NO_LIMIT or soft >= ENOUGH_FILES:
        return passed("open files", value)
    fix = "ask the site for more; or torch.multiprocessing.set_sharing_strategy('file_system')"
    if hard == NO_LIMIT or hard > soft:
        more = 65536 if hard == NO_LIMIT else min(hard, 65536)
        fix = f"ulimit -n {more}, in the shell or in the job's slurm.setup"
    check = failed if soft < FEW_FILES else warned
    return check("open files", f"{value}: loader workers pass tensors as open files", fix)


def locked_memory(facts: MachineFacts) -> Check:
    soft, _ = _limit(facts, "memlock")
    if soft == NO_LIMIT:
        return passed("locked memory", "ulimit -l is unlimited")
    value = f"ulimit -l is {size(soft)}"
    if not facts.ports:
        return passed("locked memory", f"{value}; only InfiniBand would need more")
    return failed(
        "locked memory",
        f"{value}, and InfiniBand must lock the memory it sends from",
        "ulimit -l unlimited; in SLURM the site sets it (LimitMEMLOCK=infinity for slurmd)",
    )


def other_limits(facts: MachineFacts) -> Iterator[Check]:
    soft, _ = _limit(facts, "stack")
    value = f"ulimit -s is {'unlimited' if soft == NO_LIMIT else size(soft)}"
    if soft != NO_LIMIT and soft < ENOUGH_STACK:
        yield warned("stack", value, "ulimit -s 8192")
    else:
        yield passed("stack", value)
    soft, hard = _limit(facts, "nproc")
    if soft != NO_LIMIT and soft < ENOUGH_PROCESSES:
        fix = f"ulimit -u {hard if hard != NO_LIMIT else 'unlimited'}"
        if hard == soft:
            fix = "ask the site for more processes (ulimit -u)"
        value = f"ulimit -u is {soft}: ranks, loader workers and their threads count against it"
        yield warned("processes", value, fix)


def shared_memory(facts: MachineFacts) -> Check:
    if facts.shm is None:
        fix = "docker run --ipc=host, or mount a tmpfs there: loader workers and NCCL need it"
        return failed("shared memory", "there is no /dev/shm", fix)
    whole, free = facts.shm
    value = f"/dev/shm has {size(free)} free of {size(whole)}"
    fix = "docker run --ipc=host (or --shm-size=16g); without root: data.num_workers=0"
    if whole <= DOCKERS_SHM:
        return failed("shared memory", f"{value}: loader workers will die of a bus error", fix)
    if whole < ENOUGH_SHM:
        return warned("shared memory", value, fix)
    if free < ENOUGH_SHM:
        fix = "ls -l /dev/shm shows what others or killed runs have left there: remove yours"
        return warned("shared memory", value, fix)
    return passed("shared memory", value)


def cpus(facts: MachineFacts) -> Check:
    allotted, num_gpus = facts.cpus_allotted, len(facts.gpus)
    value = f"{allotted} of {facts.cpus} CPUs are available"
    if num_gpus:
        value += f", for {num_gpus} GPUs"
    in_slurm = "SLURM_JOB_ID" in facts.env
    wanted = 4 * max(1, num_gpus)
    more = f"#SBATCH --cpus-per-task={wanted} (slurm.cpus_per_gpu in a job), and srun -c {wanted}"
    if in_slurm and allotted == 1 and facts.cpus > 1:
        return warned("cpus", f"{value}: ranks, loader workers and NCCL share it", more)
    if num_gpus and allotted < 2 * num_gpus:
        fix = more if in_slurm else "use fewer ranks, or a machine with more CPUs per GPU"
        return warned("cpus", f"{value}: too few for loader workers", fix)
    return passed("cpus", value)


def memory(facts: MachineFacts) -> Check:
    value = f"{size(facts.memory_allotted)} of {size(facts.memory_bytes)} is available"
    on_gpus = sum(gpu.memory_bytes for gpu in facts.gpus)
    if on_gpus and facts.memory_allotted < on_gpus / 2:
        fix = "#SBATCH --mem=0 (all of the node), or slurm.mem_per_gpu in a job"
        return warned(
            "memory", f"{value}, which is little next to {size(on_gpus)} on the GPUs", fix
        )
    return passed("memory", value)


def clock(facts: MachineFacts) -> Check:
    if facts.clock_synchronised is None:
        return not_here("clock", "the kernel does not say whether its clock is synchronised")
    error = facts.clock_error or 0.0
    fix = "timedatectl set-ntp true, or start chrony: otherwise nodes' logs cannot be compared"
    if not facts.clock_synchronised:
        return warned("clock", "this clock is not synchronised with a time server", fix)
    if error > MOST_CLOCK_ERROR:
        return warned("clock", f"the clock may be off by {duration(error)}", fix)
    return passed("clock", f"synchronised with a time server, to within {duration(error)}")


def folder_check(folder: FolderFacts) -> Check:
    name, is_data = f"{folder.use} folder", folder.use == "data"
    if folder.problem or folder.free_bytes is None:
        fix = "--runs DIR (or ALLRANKS_RUNS) on a writable disk"
        if is_data:
            fix = "mount it on this machine, or name another with --data"
        return failed(name, f"{folder.path}: {folder.problem or 'cannot be read'}", fix)
    kind = "network disk" if folder.is_network else "memory" if folder.is_memory else "local disk"
    value = f"{folder.path} ({folder.kind}, {kind}): {size(folder.free_bytes)} free"
    return (_data_speed if is_data else _run_space)(name, folder, folder.free_bytes, value)


def _run_space(name: str, folder: FolderFacts, free: int, value: str) -> Check:
    speed = folder.write_speed
    if speed is not None:
        value += f", written at {rate(speed)}"
    fix = "remove old runs and checkpoints, or use another disk with --runs DIR"
    if folder.free_files == 0:
        return failed(name, f"{value}, but it is out of inodes: no file can be created", fix)
    if free < ENOUGH_FREE:
        return (failed if free < LEAST_FREE else warned)(name, value, fix)
    if folder.is_memory:
        return warned(name, f"{value}; lost when the machine restarts", "--runs DIR on a disk")
    if speed is not None and speed < SLOW_WRITE:
        return warned(name, value, "checkpoint.every=1h, or a faster disk with --runs DIR")
    return passed(name, value)


def _data_speed(name: str, folder: FolderFacts, free: int, value: str) -> Check:
    if folder.read_speed is None:
        return warned(name, f"{value}, no file to read", "name the folder that has the files")
    value += f", read at {rate(folder.read_speed)}"
    if folder.read_speed >= SLOW_READ:
        return passed(name, value)
    fix = "allranks bench data JOB.yaml measures whether that is enough"
    if folder.is_network:
        fix += f"; data.stage=local, or stage: [{folder.path}] for a script, copies it to each node"
    return warned(name, value, fix)


def variables(facts: MachineFacts) -> list[Check]:
    """Environment variables that conflict with each other, or with what this machine has."""
    rules = (
        *(interface_names, infiniband_variables, visible_gpus, left_over),
        *(threads, allocator, slow, renamed),
    )
    found = [check for rule in rules for check in rule(facts)]
    return found or [
        passed("environment", "no variable conflicts with another one or with the machine")
    ]


def interface_names(facts: MachineFacts) -> Iterator[Check]:
    real = [each.name for each in facts.interfaces if not each.is_loopback]
    first = next(iter(real), "eth0")
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = facts.env.get(variable)
        if not value:
            continue
        chosen = matching(value, facts.names)
        there = " ".join(dict.fromkeys(real)) or "only the loopback"
        fix = f"export {variable}={first}"
        if not chosen:
            value = f"{variable}={value} names no interface of this machine ({there})"
            yield failed(variable, value, f"{fix}, or unset {variable}")
        elif facts.num_nodes > 1 and set(chosen) == {"lo"}:
            yield failed(variable, f"{variable}={value} does not reach other nodes", fix)


def matching(value: str, names: tuple[str, ...]) -> list[str]:
    """The names that NCCL picks: value is prefixes, whole names after `=`, or all but after `^`."""
    text = value.removeprefix("^")
    wanted = tuple(part for part in text.removeprefix("=").split(",") if part)
    is_exact, excludes = text.startswith("="), value.startswith("^")
    fits = [name for name in names if (name in wanted if is_exact else name.startswith(wanted))]
    return [name for name in names if name not in fits] if excludes else fits


def infiniband_variables(facts: MachineFacts) -> Iterator[Check]:
    active = [port for port in facts.ports if port.state == "ACTIVE"]
    for name, switched_off in (("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "socket")):
        value = facts.env.get(name, "")
        if active and value.lower() == switched_off:
            found = f"{active[0].name} is active at {active[0].rate}"
            yield warned(name, f"{name}={value}: NCCL uses sockets, but {found}", f"unset {name}")
    wanted = facts.env.get("NCCL_IB_HCA", "")
    if wanted and facts.ports and not wanted.startswith("^"):
        devices = tuple(dict.fromkeys(port.device for port in facts.ports))
        plain = ",".join(part.partition(":")[0] for part in wanted.split(","))
        if not matching(plain, devices):
            value = f"NCCL_IB_HCA={wanted} names none of {' '.join(devices)}"
            yield failed("NCCL_IB_HCA", value, "unset NCCL_IB_HCA")


def visible_gpus(facts: MachineFacts) -> Iterator[Check]:
    name = "CUDA_VISIBLE_DEVICES"
    value = facts.env.get(name)
    if value is None or not facts.num_gpus_in_all:
        return
    seen, words = f"{name}={value}", [part for part in value.split(",") if part]
    if value.strip() in ("", "-1", "NoDevFiles"):
        yield failed(name, f"{seen} hides every GPU", f"unset {name}")
        return
    uuids = [f"GPU-{number}" for number in range(facts.num_gpus_in_all)]
    plain = all(word.strip().isdecimal() for word in words)
    chosen = visible_devices(value, uuids) if plain else None
    if chosen is not None and len(chosen) < len(words):
        value = (
            f"{seen} is cut off at its first invalid entry: {len(chosen)} of {len(words)} are used"
        )
        yield failed(name, value, f"name each of 0 to {facts.num_gpus_in_all - 1} at most once")
        return
    given = facts.env.get("SLURM_STEP_GPUS") or facts.env.get("SLURM_JOB_GPUS") or ""
    count = len([part for part in given.split(",") if part.strip().isdecimal()])
    if count and len(words) != count:
        value = f"{seen}, but SLURM gave this job {count} GPUs ({given})"
        yield warned(name, value, "remove what sets it (.bashrc, the script): SLURM sets it itself")


def left_over(facts: MachineFacts) -> Iterator[Check]:
    env = facts.env
    names = [name for name in LEFT_OVER if env.get(name)]
    if not names or "ALLRANKS_RUN_DIR" in env or "TORCHELASTIC_RUN_ID" in env:
        return  # within a rank they belong there
    value = " ".join(f"{name}={env[name]}" for name in names)
    why = "a script started without a launcher uses them, and may wait for other ranks"
    check = failed if _integer(env.get("WORLD_SIZE")) > 1 else warned
    yield check("left over", f"{value}: {why}", f"unset {' '.join(names)}")


def threads(facts: MachineFacts) -> Iterator[Check]:
    wanted = _integer(facts.env.get("OMP_NUM_THREADS"))
    if wanted > facts.cpus_allotted:
        value = f"OMP_NUM_THREADS={wanted}, but {facts.cpus_allotted} CPUs are available"
        fix = "unset OMP_NUM_THREADS: allranks sets each rank's share"
        yield warned("OMP_NUM_THREADS", value, fix)
    for name in PINNING:
        value = facts.env.get(name, "")
        if value and value.lower() not in ("false", "disabled", "none"):
            why = "binds threads to CPUs: all ranks on a node may end up on the same ones"
            yield warned(name, f"{name}={value} {why}", f"unset {name}")


def allocator(facts: MachineFacts) -> Iterator[Check]:
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    if facts.env.get(old) and facts.env.get(new) and facts.env[old] != facts.env[new]:
        value = f"{old}={facts.env[old]} and {new}={facts.env[new]} differ"
        yield warned(new, value, f"keep one: unset {old}")


def slow(facts: MachineFacts) -> Iterator[Check]:
    for name, (value, why) in SLOW.items():
        if facts.env.get(name, "").upper() != value:
            continue
        if name == "NCCL_P2P_DISABLE" and (len(facts.gpus) < 2 or facts.peer_access is False):
            continue  # as it should be
        yield warned(name, f"{name}={value}: {why}", f"unset {name}, unless you are debugging")


def renamed(facts: MachineFacts) -> Iterator[Check]:
    for old, new in RENAMED.items():
        if facts.env.get(old):
            yield warned(old, f"{old} is now {new}", f"export {new}={facts.env[old]}; unset {old}")
    if facts.env.get("NCCL_TIMEOUT"):
        fix = "unset NCCL_TIMEOUT; timeout: 10m in the job, or init_process_group(timeout=…)"
        yield warned("NCCL_TIMEOUT", "NCCL_TIMEOUT is set, but nothing reads it", fix)


def _integer(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
