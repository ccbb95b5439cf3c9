"""Environment variables that fight each other, or what is there: pure functions of facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from allranks.doctor.check import Check, failed, passed, warned
from allranks.doctor.machine.facts import MachineFacts
from allranks.machine.gpus import visible_devices

LEFT_OVER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Variables that were renamed, and no longer read or soon not.
RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
}
SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel is waited for"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by another one"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a node exchange through the host's memory"),
    "NCCL_SHM_DISABLE": ("1", "ranks of a node exchange over the network"),
}
PINNING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")


def env_checks(facts: MachineFacts) -> list[Check]:
    rules: tuple[Callable[[MachineFacts], Iterator[Check]], ...] = (
        interface_names,
        infiniband,
        devices,
        left_over,
        threads,
        allocator,
        slow,
        renamed,
    )
    found = [check for rule in rules for check in rule(facts)]
    return found or [passed("environment", "no variable that fights another, or what is here")]


def interface_names(facts: MachineFacts) -> Iterator[Check]:
    real = [each.name for each in facts.interfaces if not each.is_loopback]
    first = next(iter(real), "eth0")
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = facts.env.get(variable)
        if not value:
            continue
        chosen = matching(value, facts.names)
        seen = f"{variable}={value}"
        there = " ".join(dict.fromkeys(real)) or "none but the loopback"
        if not chosen:
            fix = f"export {variable}={first}, or unset {variable}"
            yield failed(variable, f"{seen} names no interface of this machine ({there})", fix)
        elif facts.num_nodes > 1 and set(chosen) == {"lo"}:
            fix = f"export {variable}={first}"
            yield failed(variable, f"{seen}: other nodes are not reached through it", fix)


def matching(value: str, names: tuple[str, ...]) -> list[str]:
    """What NCCL makes of NCCL_SOCKET_IFNAME: beginnings of names, `=` whole ones, `^` all but."""
    excludes = value.startswith("^")
    text = value.removeprefix("^")
    is_exact = text.startswith("=")
    wanted = [part for part in text.removeprefix("=").split(",") if part]
    fits = [
        name
        for name in names
        if any(name == part if is_exact else name.startswith(part) for part in wanted)
    ]
    return [name for name in names if name not in fits] if excludes else fits


def infiniband(facts: MachineFacts) -> Iterator[Check]:
    active = [port for port in facts.ports if port.state == "ACTIVE"]
    env = facts.env
    if active and env.get("NCCL_IB_DISABLE") == "1":
        rate = active[0].rate
        value = f"NCCL_IB_DISABLE=1, but {active[0].name} is active at {rate}: NCCL uses sockets"
        yield warned("NCCL_IB_DISABLE", value, "unset NCCL_IB_DISABLE")
    if active and env.get("NCCL_NET", "").lower() == "socket":
        value = f"NCCL_NET={env['NCCL_NET']}, but {active[0].name} is active at {active[0].rate}"
        yield warned("NCCL_NET", value, "unset NCCL_NET")
    wanted = env.get("NCCL_IB_HCA", "")
    if wanted and facts.ports and not wanted.startswith("^"):
        devices = tuple(dict.fromkeys(port.device for port in facts.ports))
        plain = ",".join(part.partition(":")[0] for part in wanted.split(","))
        if not matching(plain, devices):
            value = f"NCCL_IB_HCA={wanted} names none of {' '.join(devices)}"
            yield failed("NCCL_IB_HCA", value, "unset NCCL_IB_HCA")


def devices(facts: MachineFacts) -> Iterator[Check]:
    value = facts.env.get("CUDA_VISIBLE_DEVICES")
    if value is None or not facts.num_gpus_in_all:
        return
    seen, words = f"CUDA_VISIBLE_DEVICES={value}", [part for part in value.split(",") if part]
    if not value.strip() or value.strip() in ("-1", "NoDevFiles"):
        yield failed(
            "CUDA_VISIBLE_DEVICES", f"{seen} hides every GPU", "unset CUDA_VISIBLE_DEVICES"
        )
        return
    uuids = [f"GPU-{number}" for number in range(facts.num_gpus_in_all)]
    plain = all(word.strip().isdecimal() for word in words)
    chosen = visible_devices(value, uuids) if plain else None
    if chosen is not None and len(chosen) < len(words):
        value = f"{seen} ends at its first wrong entry: {len(chosen)} of {len(words)} are used"
        fix = f"name each of 0 to {facts.num_gpus_in_all - 1} once at most"
        yield failed("CUDA_VISIBLE_DEVICES", value, fix)
        return
    given = facts.env.get("SLURM_STEP_GPUS") or facts.env.get("SLURM_JOB_GPUS") or ""
    count = len([part for part in given.split(",") if part.strip().isdecimal()])
    if count and len(words) != count:
        value = f"{seen}, but SLURM gave this job {count} GPUs ({given})"
        fix = "unset what sets it (.bashrc, the script): SLURM sets it itself"
        yield warned("CUDA_VISIBLE_DEVICES", value, fix)


def left_over(facts: MachineFacts) -> Iterator[Check]:
    env = facts.env
    if "ALLRANKS_RUN_DIR" in env or "TORCHELASTIC_RUN_ID" in env:
        return  # within a rank they belong there
    names = [name for name in LEFT_OVER if env.get(name)]
    if not names:
        return
    value = " ".join(f"{name}={env[name]}" for name in names)
    why = "a script started without a launcher takes them for its own, and may wait for ranks"
    check = failed if int_of(env.get("WORLD_SIZE")) > 1 else warned
    yield check("left over", f"{value}: {why}", f"unset {' '.join(names)}")


def threads(facts: MachineFacts) -> Iterator[Check]:
    wanted = int_of(facts.env.get("OMP_NUM_THREADS"))
    if wanted > facts.cpus_allotted:
        value = f"OMP_NUM_THREADS={wanted}, but {facts.cpus_allotted} CPUs may be used"
        fix = "unset OMP_NUM_THREADS: allranks sets each rank's share"
        yield warned("OMP_NUM_THREADS", value, fix)
    for name in PINNING:
        value = facts.env.get(name, "")
        if value and value.lower() not in ("false", "disabled", "none"):
            why = "binds threads to CPUs: all ranks of a node may end up on the same ones"
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
        yield warned(name, f"{name}={value}: {why}", f"unset {name}, unless you debug with it")


def renamed(facts: MachineFacts) -> Iterator[Check]:
    for old, new in RENAMED.items():
        if facts.env.get(old):
            yield warned(old, f"{old} is now {new}", f"export {new}={facts.env[old]}; unset {old}")
    if facts.env.get("NCCL_TIMEOUT"):
        fix = "unset NCCL_TIMEOUT; timeout: 10m in the job, or init_process_group(timeout=…)"
        yield warned("NCCL_TIMEOUT", "NCCL_TIMEOUT is set, but nothing reads it", fix)


def int_of(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
