"""Scripts that fail in known ways, for tests of the doctor.

    python -m tests.failing CASE                       # one process, or one rank of a launcher's
    python -m tests.failing --into FOLDER CASE:2 …     # each with so many ranks, to FOLDER/CASE.log

The second form imports torch once and forks, so that dozens of failures take seconds. It ends the
other ranks a moment after one has failed, as launchers do, and prints nothing itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tests.ports import free_port
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ.get("RANK", "0"))
AT_ONCE = 4
GRACE_SECONDS = 8.0  # what the other ranks have to say after one has ended
SCRATCH = Path(os.environ.get("SCRATCH", "."))


class Net(nn.Module):
    def __init__(self, hidden: int = 8, *, extra: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, hidden), nn.Linear(hidden, 4)
        if extra:
            self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x).relu())
        return y


class Items(Dataset[torch.Tensor]):
    def __init__(self, case: str, count: int = 64) -> None:
        self.case, self.count = case, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 37:
            if self.case == "worker_killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.case == "worker_segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.case == "worker_raised":
                raise ValueError("sample 37 has no label")
            if self.case == "worker_exits":
                os._exit(3)
            if self.case == "collate":
                return torch.zeros(9)
        return torch.zeros(8)


def init(seconds: float = 20) -> None:
    """Ranks that meet, however busy the machine is, and then wait so long for each other."""
    meet(60)
    _set_pg_timeout(timedelta(seconds=seconds))


def meet(seconds: float) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))


def steps(count: int, model: nn.Module, *, die_at: int = -1, how: str = "") -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(count):
        if step == die_at:
            fail(how)
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if RANK == 0:
            print(f"step {step} loss 0.5", flush=True)


def fail(how: str) -> None:
    if how == "raise":
        raise RuntimeError("the schedule of this rank is empty")
    if how == "exit":
        os._exit(3)
    if how == "sleep":
        time.sleep(60)
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))


def one_rank(how: str, rank: int = 1, seconds: float = 20) -> None:
    init(seconds)
    steps(8, DDP(Net()), die_at=3 if rank == RANK else -1, how=how)


def peer_killed() -> None:
    one_rank("SIGKILL")


def peer_segfault() -> None:
    one_rank("SIGSEGV")


def peer_abort() -> None:
    one_rank("SIGABRT")


def peer_exits() -> None:
    one_rank("exit")


def rank_raised() -> None:
    one_rank("raise")


def rank0_raised() -> None:
    one_rank("raise", rank=0)


def never_arrives() -> None:
    one_rank("sleep", rank=2, seconds=4)


def hang_all_reduce() -> None:
    init(4)
    if RANK == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(4))


def hang_barrier() -> None:
    init(4)
    if RANK == 0:
        time.sleep(60)
    dist.barrier()


def monitored() -> None:
    init(20)
    if RANK == 1:
        time.sleep(60)
    dist.monitored_barrier(timeout=timedelta(seconds=3))


def monitored_several() -> None:
    init(20)
    if RANK in (1, 2):
        time.sleep(60)
    dist.monitored_barrier(timeout=timedelta(seconds=3), wait_all_ranks=True)


def uneven() -> None:
    init(5)
    steps(6 if RANK == 0 else 3, DDP(Net()))


def uneven_barrier() -> None:
    init(5)
    steps(6 if RANK == 0 else 3, DDP(Net()))
    dist.barrier()
    dist.destroy_process_group()


def uneven_join() -> None:
    from torch.distributed.algorithms.join import Join

    init()
    model = DDP(Net())
    with Join([model], throw_on_early_termination=True):
        steps(6 if RANK == 0 else 3, model)


def shape_mismatch() -> None:
    init(5)
    dist.all_reduce(torch.ones(4 if RANK else 8000))


def shape_detail() -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    init(5)
    dist.all_reduce(torch.ones(6 if RANK == 2 else 4))


def op_mismatch() -> None:
    init(5)
    if RANK:
        dist.broadcast(torch.ones(4), 0)
    else:
        dist.all_reduce(torch.ones(4))


def gather_mismatch() -> None:
    init(5)
    tensor = torch.ones(4 if RANK else 6)
    dist.all_gather([torch.ones(4) for _ in range(dist.get_world_size())], tensor)


def unused_parameters() -> None:
    init()
    model = DDP(Net(extra=True))
    steps(3, model)


def ready_twice() -> None:
    from torch.utils.checkpoint import checkpoint

    init()

    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.a, x, use_reentrant=True)
            y: torch.Tensor = checkpoint(self.a, x, use_reentrant=True)
            return y

    model = DDP(Twice())
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()


def model_differs() -> None:
    init(5)
    DDP(Net(16 if RANK == 1 else 8))


def model_count_differs() -> None:
    init(5)
    DDP(Net(extra=RANK == 1))


def nccl_without_gpu() -> None:
    dist.init_process_group("nccl")


def cuda_without_gpu() -> None:
    init()
    torch.cuda.set_device(RANK)


def ddp_wrong_device() -> None:
    init()
    DDP(Net(), device_ids=[RANK])


def loader(case: str) -> None:
    for _ in DataLoader(Items(case), 4, num_workers=2):
        pass


def worker_killed() -> None:
    loader("worker_killed")


def worker_segfault() -> None:
    loader("worker_segfault")


def worker_raised() -> None:
    loader("worker_raised")


def worker_exits() -> None:
    loader("worker_exits")


def collate() -> None:
    for _ in DataLoader(Items("collate"), 4):
        pass


def open_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    kept = list(DataLoader(Items("", 2000), 1, num_workers=1))
    print(len(kept))


def open_files_plain() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept = [(SCRATCH / f"shard-{number}").open("w") for number in range(200)]
    print(len(kept))


def missing_file() -> None:
    torch.load(SCRATCH / "nothing-here.pt")


def missing_module() -> None:
    __import__("flash_attn_of_another_world")


def wrong_name() -> None:
    from torch.nn import Conv7d  # type: ignore[attr-defined]  # noqa: F401


def saved() -> Path:
    path = SCRATCH / "model.pt"
    torch.save({"model": Net().state_dict()}, path)
    return path


def checkpoint_keys() -> None:
    Net().load_state_dict({f"module.{k}": v for k, v in Net().state_dict().items()})


def checkpoint_shape() -> None:
    Net(16).load_state_dict(Net(8).state_dict())


def checkpoint_optimizer() -> None:
    old = torch.optim.Adam(Net().parameters())
    torch.optim.Adam(Net(extra=True).parameters()).load_state_dict(old.state_dict())


def checkpoint_groups() -> None:
    old = torch.optim.Adam([{"params": [p]} for p in Net().parameters()])
    torch.optim.Adam(Net().parameters()).load_state_dict(old.state_dict())


def checkpoint_pickle() -> None:
    path = SCRATCH / "args.pt"
    torch.save({"args": argparse.Namespace(lr=0.1)}, path)
    torch.load(path)


def truncate(keep: float) -> None:
    path = saved()
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    torch.load(path)


def truncated_half() -> None:
    truncate(0.5)


def truncated_tail() -> None:
    truncate(0.98)


def truncated_empty() -> None:
    truncate(0.0)


def truncated_legacy() -> None:
    path = SCRATCH / "old.pt"
    torch.save(Net().state_dict(), path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:-80])
    torch.load(path)


def garbage() -> None:
    path = SCRATCH / "noise.pt"
    path.write_bytes(b"\x13\x37" * 500)
    torch.load(path)


def dcp_truncated() -> None:
    import torch.distributed.checkpoint as dcp

    state = Net().state_dict()
    dcp.save(state, checkpoint_id=SCRATCH / "dcp")
    for path in (SCRATCH / "dcp").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:200])
    dcp.load(state, checkpoint_id=SCRATCH / "dcp")


def dcp_shape() -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(Net().state_dict(), checkpoint_id=SCRATCH / "dcp")
    dcp.load(Net(16).state_dict(), checkpoint_id=SCRATCH / "dcp")


def dcp_missing_folder() -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(Net().state_dict(), checkpoint_id=SCRATCH / "no-such-folder")


def disk_full() -> None:
    torch.save({"w": torch.zeros(8_000_000)}, os.environ.get("FULL", "/dev/full"))


def disk_full_log() -> None:
    with open("/dev/full", "w") as file:
        for step in range(10_000):
            file.write(f"step {step}\n")


def small_disk(at: Path, size: str) -> None:
    """A small disk at a path, that this process and its children alone see. Takes root."""
    import ctypes
    import subprocess

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000):  # CLONE_NEWNS; os.unshare is of Python 3.12
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", at], check=True)


def disk_full_saving() -> None:
    init(5)
    if RANK == 1:
        small_disk(SCRATCH, "1m")
        torch.save({"w": torch.zeros(1_000_000)}, SCRATCH / "model.pt")
    dist.barrier()


def shared_memory() -> None:
    class Large(Items):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(1 << 20)

    small_disk(Path("/dev/shm"), "1m")
    for _ in DataLoader(Large(""), 4, num_workers=1):
        pass


def file_limit() -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    torch.save({"w": torch.zeros(1_000_000)}, SCRATCH / "large.pt")


def host_memory() -> None:
    kept = torch.empty(1 << 50, dtype=torch.uint8)
    print(kept.shape)


def host_memory_limit() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    kept = [bytearray(1 << 28) for _ in range(100)]
    print(len(kept))


def nan_loss() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    for step in range(6):
        loss = model(torch.randn(4, 8)).square().mean()
        print(f"step {step} loss {loss.item()}", flush=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def nan_anomaly() -> None:
    with torch.autograd.set_detect_anomaly(True):
        x = torch.zeros(2, requires_grad=True)
        (x / x).sqrt().sum().backward()


def nan_clip() -> None:
    model = Net()
    (model(torch.randn(4, 8)) * float("nan")).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def scaler_underflow() -> None:
    """What a script with an overflow in every step does, and says when it gives up."""
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while scaler.get_scale() > 1e-4:
        loss = model(torch.randn(4, 8)).sum() * torch.inf
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"Gradient overflow. Skipping step, reducing loss scale to {scaler.get_scale()}")
    raise FloatingPointError(f"Minimum loss scale reached ({scaler.get_scale():g})")


def label_range() -> None:
    nn.functional.cross_entropy(torch.randn(8, 10), torch.full((8,), 10))


def embedding_range() -> None:
    nn.Embedding(10, 4)(torch.tensor([11]))


def batch_size() -> None:
    nn.functional.cross_entropy(torch.randn(8, 10), torch.zeros(4, dtype=torch.long))


def wrong_input() -> None:
    Net()(torch.randn(4, 9))


def no_environment() -> None:
    meet(20)


def no_local_rank() -> None:
    torch.set_num_threads(int(os.environ["LOCAL_RANK"]) + 1)


def no_group() -> None:
    dist.all_reduce(torch.ones(1))


def only_init() -> None:
    meet(float(os.environ.get("SECONDS", "4")))


def interrupted() -> None:
    init()
    time.sleep(60)


def memory_error() -> None:
    raise MemoryError


def port_taken() -> None:
    import socket

    if RANK == 0:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
            meet(3)


def rank_absent() -> None:
    if RANK == 0:
        meet(3)


def rank_late() -> None:
    """Rank 1 is up, but does not come."""
    if RANK == 1:
        time.sleep(60)
    init(3)


def master_absent() -> None:
    if RANK == 1:
        meet(3)


def master_unknown() -> None:
    os.environ["MASTER_ADDR"] = "no-such-host.invalid"
    if RANK == 1:
        meet(3)


def wrong_interface() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "ib7"
    meet(3)


def wrong_world_size() -> None:
    print(f"SLURM_NTASKS=2 WORLD_SIZE={2 * int(os.environ['WORLD_SIZE'])}", flush=True)
    os.environ["WORLD_SIZE"] = str(2 * int(os.environ["WORLD_SIZE"]))
    meet(3)


def healthy() -> None:
    init()
    steps(5, DDP(Net()))
    dist.destroy_process_group()


def run_forked(folder: Path, case: str, num_ranks: int, port: int) -> None:
    """One case in processes of its own, all writing to one log."""
    log = os.open(folder / f"{case}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    ranks = [fork_rank(case, rank, num_ranks, port, log) for rank in range(max(1, num_ranks))]
    os.close(log)
    left, deadline = set(ranks), time.monotonic() + 60
    while left and time.monotonic() < deadline:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                if status:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def fork_rank(case: str, rank: int, num_ranks: int, port: int, log: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    global RANK
    global SCRATCH
    os.dup2(log, 1)
    os.dup2(log, 2)
    SCRATCH = SCRATCH / f"{case}.files"
    SCRATCH.mkdir(exist_ok=True)
    if num_ranks:
        RANK = rank
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = 1
    try:
        globals()[case]()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # torch's own, which says the rank
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def warm_up() -> None:
    """What torch imports when it is first used: once, in place of once for every rank."""
    import torch.distributed.algorithms.join
    import torch.distributed.checkpoint
    import torch.utils.checkpoint

    torch.optim.SGD(Net().parameters(), lr=0.1)


def main(words: list[str]) -> None:
    if words[0] != "--into":
        globals()[words[0]]()
        return
    warm_up()
    running: list[int] = []
    for word in words[2:]:
        case, _, number = word.partition(":")
        if len(running) >= AT_ONCE:  # most of them wait most of the time
            running.remove(os.wait()[0])
        port = free_port()
        pid = os.fork()
        if pid == 0:
            run_forked(Path(words[1]), case, int(number or 0), port)
            os._exit(0)
        running.append(pid)
    for pid in running:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
