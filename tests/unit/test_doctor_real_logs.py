"""Shortened logs of real failures: what follows from another rank's end is not the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.doctor.diagnose import diagnose_logs
from allranks.doctor.finding import Finding

# NCCL 2.28, torch 2.11: rank 0 tells that its peer is gone, in words of watchdogs and timeouts.
REMOTE = """\
[rank0]:[E1115 15:44:48.701620780 ProcessGroupNCCL.cpp:612] [Rank 0] Collective WorkNCCL(SeqNum=24, OpType=ALLREDUCE, NumelIn=262656, NumelOut=262656, Timeout(ms)=15000) raised the following async exception: NCCL error: remote process exited or there was a network error, NCCL version 2.28.9
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer
[rank0]:[E1115 15:44:48.702718083 ProcessGroupNCCL.cpp:2303] [PG ID 0 PG GUID 0(default_pg) Rank 0]  failure detected by watchdog at work sequence id: 24 PG status: last enqueued work: 26, last completed work: 23
[rank0]:[E1115 15:44:50.403599997 ProcessGroupNCCL.cpp:1914] [PG ID 0 PG GUID 0(default_pg) Rank 0] Received a dump signal due to a collective timeout from this local rank and we will try our best to dump the debug info. Last enqueued NCCL work: 26, last completed NCCL work: 23.
"""  # noqa: E501
CLOSING = "W1115 15:44:48.239000 467 torch/distributed/elastic/multiprocessing/api.py:1012] Sending process {pid} closing signal SIGTERM\n"  # noqa: E501
FAILED = "E1115 15:44:48.454000 467 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: {code}) local_rank: {rank} (pid: {pid}) of binary: python\n"  # noqa: E501
STOPPED = """\
W1115 15:45:36.038000 495 torch/distributed/elastic/agent/server/api.py:739] Received 15 death signal, shutting down workers
{closing}torch.distributed.elastic.multiprocessing.api.SignalException: Process 495 got signal: 15
"""  # noqa: E501
GLOO_WAITED = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:133] Timed out waiting 6000ms for send operation to complete"  # noqa: E501
GLOO_LOST = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:55450"  # noqa: E501


def entry(rank: int, code: int, pid: int, time: str = "15:44:48") -> str:
    return (
        f"  time      : 2026-11-15_{time}\n  host      : localhost\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: {pid})\n"
    )


def ended(rank: int, code: int, *others: int) -> str:
    """torchrun's last words: the other ranks were sent SIGTERM."""
    closing = "".join(CLOSING.format(pid=700 + other) for other in others)
    block = "".join(f"[{other + 1}]:\n" + entry(other, -15, 700 + other) for other in others)
    first = f"Root Cause (first observed failure):\n[0]:\n{entry(rank, code, 700 + rank)}"
    return closing + FAILED.format(code=code, rank=rank, pid=700 + rank) + block + first


def raised(rank: int, error: str, where: str = "/home/u/train.py") -> str:
    lines = ["Traceback (most recent call last):", f'  File "{where}", line 25, in train']
    lines += ["    raise ShardError(name)", error]
    return "".join(f"[rank{rank}]: {line}\n" for line in lines)


def diagnose(folder: Path, text: str, name: str = "job.log") -> list[Finding]:
    log = folder / name
    log.write_text(text)
    return diagnose_logs([log])


OWN_ERROR = raised(1, "ValueError: bad batch in shard 7")
NAN = "[0] step=20 train_loss=1.000\n[1] step=20 train_loss=nan\n"
REAL: dict[str, tuple[str, str, int | None]] = {
    "exits": (REMOTE + ended(1, 3, 0), "rank-died", 1),
    "terminated": (REMOTE + ended(1, -15, 0), "rank-died", 1),
    "killed": (REMOTE + ended(1, -9, 0), "rank-died", 1),
    "raises": (OWN_ERROR + REMOTE + ended(1, 1, 0), "rank-raised", 1),
    "loss is nan": (
        NAN + raised(1, "AssertionError: loss is nan at step 20") + REMOTE + ended(1, 1, 0),
        "nan-loss",
        1,
    ),
    "raises a class of a function": (
        raised(3, "main.<locals>.ShardError: checksum of shard 4 differs")
        + raised(0, GLOO_LOST)
        + ended(3, 1, 0),
        "rank-raised",
        3,
    ),
    "has no more batches": (
        REMOTE + STOPPED.format(closing=CLOSING.format(pid=730)),
        "uneven-inputs",
        1,
    ),
    "comes late": (
        f"0: {raised(0, GLOO_WAITED)}srun: error: node01: task 0: Exited with exit code 1\n"
        f"1: {raised(1, GLOO_LOST)}srun: error: node01: task 1: Exited with exit code 1\n",
        "rank-missing-from-collective",
        1,
    ),
    "was still there": (
        raised(0, GLOO_WAITED) + CLOSING.format(pid=878) + FAILED.format(code=1, rank=0, pid=877),
        "rank-missing-from-collective",
        1,
    ),
    "does not come to the first collective": (
        raised(
            1,
            "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and "
            "retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but "
            "store->get('0') got error: wait timeout after 14000ms, keys: /default_pg/0//cuda//0",
        )
        + ended(1, 1, 0),
        "rank-missing-from-collective",
        0,
    ),
    "is killed by torchrun after the others": (
        "Failures:\n[1]:\n"
        + entry(3, 1, 703)
        + "[2]:\n"
        + entry(0, -9, 700, "15:45:19")
        + "Root Cause (first observed failure):\n[0]:\n"
        + entry(1, 1, 701),
        "rank-died",
        1,
    ),
    "is killed on another node, after which srun ends its step": (
        "srun: error: node1: task 0: Exited with exit code 1\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=1.0\n"
        "srun: error: node2: task 1: Terminated\nsrun: Force Terminated StepId=1.0\n"
        "error: rank 1 on node2 was killed by SIGKILL  (after step 11)\n",
        "rank-died",
        1,
    ),
    "is told by a logger": (
        "ERROR:root:rank 1 failed\nTraceback (most recent call last):\n"
        '  File "/home/u/train.py", line 28, in bad\n    raise LookupError(name)\n'
        "LookupError: no such class: 17\n" + STOPPED.format(closing=CLOSING.format(pid=536)),
        "rank-raised",
        1,
    ),
    "raises behind a progress bar": (
        "Epoch 0:  50%|█████     | 3/6 [00:00<00:00, 41.2it/s]" + OWN_ERROR + ended(1, 1, 0),
        "rank-raised",
        1,
    ),
}


STEP = """\
srun: launch/slurm: _step_signal: Terminating StepId=7.0
slurmstepd-gpu01: error: *** STEP 7.0 ON gpu01 CANCELLED AT 2026-11-15T01:40:01 ***
srun: error: gpu01: task 0: Terminated
"""
REAL |= {
    "raises, and srun cancels the step": (
        OWN_ERROR + "srun: error: gpu02: task 1: Exited with exit code 1\n" + STEP,
        "rank-raised",
        1,
    ),
    "is killed, and srun cancels the step": (
        "srun: error: gpu02: task 1: Killed\n" + STEP,
        "rank-died",
        1,
    ),
    "is ended by srun since it did not come": (
        raised(0, GLOO_WAITED)
        + "srun: error: gpu01: task 0: Exited with exit code 1\n"
        + STEP.replace("task 0: Terminated", "task 1: Killed"),
        "rank-missing-from-collective",
        1,
    ),
    "is cancelled with its step": (STEP, "job-cancelled", None),
}


@pytest.mark.parametrize(("text", "cause", "rank"), REAL.values(), ids=REAL)
def test_a_rank(text: str, cause: str, rank: int | None, tmp_path: Path) -> None:
    found = diagnose(tmp_path, text)
    assert (found[0].cause, found[0].rank) == (cause, rank)
    if cause != "rank-missing-from-collective":
        assert "rank-missing-from-collective" not in [one.cause for one in found]


def test_what_others_raise_from_a_lost_connection_is_not_theirs(tmp_path: Path) -> None:
    link = "[rank0]: The above exception was the direct cause of the following exception:\n"
    text = raised(0, GLOO_LOST) + link + raised(0, "SystemError: training step failed, see above")
    found = diagnose(tmp_path, text + ended(1, -9, 0))
    assert [(one.cause, one.rank) for one in found] == [("rank-died", 1)]


def test_a_call_that_others_are_through_with_was_not_the_same_call(tmp_path: Path) -> None:
    """all_gather of 4 and of 5 numbers: one rank goes on to the next call."""
    waits = "[rank{0}]:[E1115 16:13:31.717637893 ProcessGroupNCCL.cpp:689] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={1}, OpType={2}, NumelIn={3}, NumelOut={3}, Timeout(ms)=14000) ran for 14027 milliseconds before timing out.\n"  # noqa: E501
    came = "[rank{0}]:[E1115 16:13:31.717827348 ProcessGroupNCCL.cpp:2303] [PG ID 0 PG GUID 0(default_pg) Rank {0}]  failure detected by watchdog at work sequence id: {1} PG status: last enqueued work: {1}, last completed work: {2}\n"  # noqa: E501
    text = waits.format(1, 1, "ALLGATHER", 5) + came.format(1, 1, -1)
    text += waits.format(0, 2, "ALLREDUCE", 1) + came.format(0, 2, 1)
    assert diagnose(tmp_path, text)[0].cause == "collective-mismatch"


def test_a_rank_of_a_file_name_is_not_that_of_lines_that_name_others(tmp_path: Path) -> None:
    text = raised(1, GLOO_WAITED) + ended(1, 1, 0)
    found = diagnose(tmp_path, text, "tokenise_rank0.log")
    assert (found[0].cause, found[0].rank) == ("rank-missing-from-collective", 0)


PREFIXES = {
    "a minute": "2025-02-18 12:54 ",
    "a time": "2025-02-18T12:54:01.123Z ",
    "a time in brackets": "[2025-02-18 12:54:01,123] ",
    "Ray": "(RayTrainWorker pid=19, ip=10.0.0.6) ",
    "docker compose": "trainer-1  | ",
    "kubectl": "[pod/train-0/main] ",
    "journalctl": "Nov 15 16:00:01 gpu01 python[4242]: ",
    "a quote": "> ",
    "a colour": "\x1b[31m",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_what_collected_the_log_changes_nothing(prefix: str, tmp_path: Path) -> None:
    for text, cause, rank in REAL.values():
        found = diagnose(tmp_path, "".join(prefix + line for line in text.splitlines(True)))
        assert (found[0].cause, found[0].rank) == (cause, rank), text


def test_a_rank_in_a_subgroup_is_not_the_rank(tmp_path: Path) -> None:
    line = "[rank13]:[E218 04:54:22.8 ProcessGroupNCCL.cpp:616] [Rank 1] some words: CUDA error: an illegal memory access was encountered"  # noqa: E501
    assert diagnose(tmp_path, line)[0].rank == 13


PROGRESS = "".join(f"step {step} loss {1 / (step + 1):.4f}\n" for step in range(8))
CAUGHT = 'Traceback (most recent call last):\n  File "/home/u/io.py", line 3, in get\n    read()\n'
HEALTHY = {
    "an upload": f"no upload\n{CAUGHT}ConnectionResetError: [Errno 104] Connection reset",
    "a cache": f"cache miss\n{CAUGHT}FileNotFoundError: [Errno 2] No such file: 'x.idx'",
    "an own error": f"attempt 1 failed\n{CAUGHT}LookupError: hub not reachable",
    "a checkpoint": f"{CAUGHT}RuntimeError: PytorchStreamReader failed reading zip archive",
    "a batch size": "batch 64: CUDA out of memory, trying 32",
    "absent classes": "| class | AP |\n| train | nan |\nmIoU: 0.43  (nan for 3 absent classes)",
    "a port of the agent": "[W1115 01:00:00.0 socket.cpp:469] [c10d] The server socket on [::]:29500 has failed to bind. TORCHELASTIC_USE_AGENT_STORE is enabled so ignoring the error.",  # noqa: E501
    "an end": "EarlyStopping: terminating training\nTerminated early after 9 epochs",
    "a start": "best val_loss: inf -> 0.34 (initial best_loss=inf)",
    "metrics": "error: 0.123 val_error: 0.2 timeout: 30 nan_count=0 inf_count=0 killed=0",
    "a second try": "vm:1:1 [0] NCCL INFO Call to connect returned Connection refused, retrying",
}


@pytest.mark.parametrize("text", HEALTHY.values(), ids=HEALTHY)
def test_work_that_goes_on_had_no_failure(text: str, tmp_path: Path) -> None:
    assert diagnose(tmp_path, f"{PROGRESS}{text}\n{PROGRESS}") == []


def test_a_library_that_raises_is_believed_less_than_own_code(tmp_path: Path) -> None:
    own = raised(1, "KeyError: 'caption'") + ended(1, 1, 0)
    assert diagnose(tmp_path, own)[0].confidence == "high"
    library = raised(1, "KeyError: 'caption'", "/env/site-packages/x/y.py") + ended(1, 1, 0)
    assert diagnose(tmp_path, library)[0].confidence == "medium"


# Python was about to print an exception when torch's handler for dead workers raised another one.
CUT = """\
object address  : 0x7f36a70d63c0
object refcount : 4
object type     : 0x7f36a7850f20
object type name: {0}
object repr     : {0}(104, 'Connection reset by peer')
lost sys.stderr
"""
TOLD = "RuntimeError: DataLoader worker (pid 24321) is killed by signal: Killed. \n"


@pytest.mark.parametrize("above", ["", "Traceback (most recent call last):\n"])
def test_a_dead_worker_by_an_exception_that_could_not_be_printed(
    above: str, tmp_path: Path
) -> None:
    first, *others = diagnose(tmp_path, f"epoch 1\n{above}{CUT.format('ConnectionResetError')}")
    assert (first.cause, first.confidence, others) == ("worker-killed", "medium", [])
    told = f"Traceback (most recent call last):\n  File 'x', line 3, in step\n{TOLD}"
    first, *others = diagnose(tmp_path, told + CUT.format("ConnectionResetError"))
    assert (first.cause, first.confidence, others) == ("worker-killed", "high", [])
    # Another type says nothing of workers.
    found = diagnose(tmp_path, f"epoch 1\n{above}{CUT.format('ValueError')}")
    assert "worker-killed" not in [one.cause for one in found]


def test_ranks_on_one_line_that_call_different_collectives(tmp_path: Path) -> None:
    def waits(rank: int, call: str) -> str:
        lines = [
            "Traceback (most recent call last):",
            '  File "/home/u/train.py", line 83, in <module>',
            "    dist.all_reduce(t) if rank != 3 else dist.broadcast(t, 0)",
            f'  File "/env/torch/distributed/distributed_c10d.py", line 3151, in {call}',
            "    work.wait()",
            GLOO_WAITED,
        ]
        return "".join(f"[rank{rank}]: {line}\n" for line in lines)

    calls = ["all_reduce", "all_reduce", "all_reduce", "broadcast"]
    text = "".join(waits(rank, call) for rank, call in enumerate(calls))
    text += FAILED.format(code=1, rank=0, pid=700)
    text += "".join(f"[{rank}]:\n" + entry(rank, 1, 700 + rank) for rank in range(4))
    first, *_ = diagnose(tmp_path, text)
    assert (first.cause, first.rank) == ("collective-mismatch", 3)
    assert "in broadcast" in first.title
