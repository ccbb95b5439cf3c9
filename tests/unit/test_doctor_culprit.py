"""The one rank that is unlike the others is named where it is certain, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.test_doctor_order import LOST, WAITED, block
from tests.unit.test_doctor_runs import ECHO, failed, make_run, write_rank

from allranks.doctor.culprit import odd_one
from allranks.doctor.diagnose import diagnose_logs, diagnose_run

CALL = "CollectiveFingerPrint(SequenceNumber={}, OpType={}, TensorShape=[{}], TensorDtypes=Float, "
CALL += "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda:{}))"
KEYS = "torch.distributed.DistStoreError: wait timeout after 3000ms, keys: /default_pg/0//cpu//0/{}"
JOINED = "torch.distributed.DistStoreError: Timed out after 4 seconds waiting for clients. "
JOINED += "{}/{} clients joined."
BARRIER = "RuntimeError: Timed out initializing process group in store based barrier on rank: {}, "
BARRIER += "for key: store_based_barrier_key:1 (world_size=4, worker_count={}, timeout=0:30:00)"


def first(folder: Path, *lines: str) -> tuple[str, int | None]:
    log = folder / "job.log"
    log.write_text("\n".join(lines) + "\n")
    found = diagnose_logs([log])
    return found[0].cause, found[0].rank


def raised(error: str, rank: int | None = None, frame: str = "train.py:7 step") -> str:
    file, _, rest = frame.partition(":")
    line, _, function = rest.partition(" ")
    lines = ["Traceback (most recent call last):"]
    lines += [f'  File "/home/u/{file}", line {line}, in {function}', error]
    return "\n".join(f"[rank{rank}]: {one}" if rank is not None else one for one in lines)


def mismatch(rank: int, other: int, calls: list[str]) -> str:
    text = f"RuntimeError: Detected mismatch between collectives on ranks. Rank {rank} is running "
    text += f"collective: {calls[rank]}, but Rank {other} is running collective: {calls[other]}."
    return raised(text, rank)


@pytest.mark.parametrize(
    ("values", "num_ranks", "rank"),
    [
        ("AAB", 3, 2),
        ("AB", 2, None),  # either may be the wrong one
        ("AABB", 4, None),
        ("AAB", 4, None),  # the fourth may be a B
        ("AAAB", 5, 3),
        ("ABC", 3, None),
        ("AAA", 3, None),
    ],
)
def test_one_against_all_others(values: str, num_ranks: int, rank: int | None) -> None:
    assert odd_one(dict(enumerate(values)), num_ranks) == rank


def test_the_rank_with_another_shape(tmp_path: Path) -> None:
    calls = [CALL.format(3, "ALLREDUCE", 6 if rank == 1 else 4, rank) for rank in range(3)]
    lines = [mismatch(0, 1, calls), mismatch(1, 0, calls), mismatch(2, 1, calls)]
    assert first(tmp_path, *lines) == ("collective-mismatch", 1)
    title = diagnose_logs([tmp_path / "job.log"])[0].title
    assert "ALLREDUCE [6] on rank 1, ALLREDUCE [4] on the others" in title


def test_of_two_ranks_with_different_shapes_none_is_named(tmp_path: Path) -> None:
    calls = [CALL.format(3, "ALLREDUCE", 6 if rank == 1 else 4, rank) for rank in range(2)]
    lines = [mismatch(0, 1, calls), mismatch(1, 0, calls)]
    assert first(tmp_path, *lines) == ("collective-mismatch", None)


def test_ranks_of_a_group_are_not_the_ranks_of_the_world(tmp_path: Path) -> None:
    """Here the group is of ranks 1 to 3, which it counts from 0."""
    calls = [CALL.format(3, "ALLREDUCE", 6 if rank == 1 else 4, rank) for rank in range(3)]
    text = "\n".join(mismatch(rank, 0 if rank == 1 else 1, calls) for rank in range(3))
    for rank in (2, 1, 0):
        text = text.replace(f"[rank{rank}]", f"[rank{rank + 1}]")
    assert first(tmp_path, text) == ("collective-mismatch", None)


def test_a_rank_that_finds_its_own_tensors_unequal(tmp_path: Path) -> None:
    own = "RuntimeError: ProcessGroupGloo::allgather: invalid tensor size at index 0 "
    own += "(expected (6), got (4))"
    lines = [raised(own, 2), raised(LOST, 0), raised(LOST, 1)]
    assert first(tmp_path, *lines) == ("collective-mismatch", 2)
    lines = [raised(own, rank) for rank in range(3)]
    assert first(tmp_path, *lines) == ("collective-mismatch", None)


def test_the_rank_that_nccl_saw_in_another_call(tmp_path: Path) -> None:
    line = "[rank{0}]:[E1115 01:00:00 ProcessGroupNCCL.cpp:632] [PG ID 0 PG GUID 0(default_pg) Rank"
    line += " {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType={1}, "
    line += "NumelIn={2}, NumelOut={2}, Timeout(ms)=600000) ran for 600029 milliseconds"
    lines = [line.format(rank, "ALLREDUCE", 7 if rank == 3 else 512) for rank in range(4)]
    assert first(tmp_path, *lines) == ("collective-mismatch", 3)
    lines = [line.format(rank, "ALLREDUCE", 7 if rank > 1 else 512) for rank in range(4)]
    assert first(tmp_path, *lines) == ("collective-mismatch", None)


def test_ranks_in_different_calls_of_which_one_gave_up_first(tmp_path: Path) -> None:
    """The other one finds the connection closed, but was not late."""
    where = "torch/distributed/distributed_c10d.py:3252 {}"
    lines = [raised(WAITED, 1, where.format("broadcast"))]
    lines += [raised(LOST, 0, where.format("all_reduce"))]
    assert first(tmp_path, *lines) == ("collective-mismatch", None)
    lines[1] = raised(LOST, 0, where.format("broadcast"))
    assert first(tmp_path, *lines) == ("rank-missing-from-collective", 0)


def test_a_rank_without_batches_that_waited_less_long_than_the_other(tmp_path: Path) -> None:
    """Whichever of the two gives up first: the one in the barrier had no more batches."""
    barrier = "torch/distributed/distributed_c10d.py:5356 barrier"
    backward = "torch/_tensor.py:623 backward"
    for errors in ((WAITED, LOST), (LOST, WAITED), (WAITED, WAITED)):
        lines = [raised(errors[0], 0, backward), raised(errors[1], 1, barrier)]
        for some in (lines, lines[::-1]):
            assert first(tmp_path, *some) == ("uneven-inputs", 1)


def test_the_rank_whose_key_all_others_wait_for(tmp_path: Path) -> None:
    lines = [raised(KEYS.format(1)), raised(KEYS.format(1)), block(0, 1, terminated=(1, 2))]
    assert first(tmp_path, *lines) == ("rendezvous-timeout", 1)


def test_rank_0_that_serves_the_store_waits_itself(tmp_path: Path) -> None:
    """Who waits for its key is not told who is missing."""
    lines = [raised(KEYS.format(0)), raised(JOINED.format(2, 3))]
    assert first(tmp_path, *lines) == ("rendezvous-timeout", None)
    assert first(tmp_path, raised(KEYS.format(0))) == ("rendezvous-timeout", None)
    # torchrun serves it itself.
    lines = [raised(KEYS.format(0)), block(1, 1, terminated=(0,))]
    assert first(tmp_path, *lines) == ("rendezvous-timeout", 0)


def test_those_that_say_that_they_waited_are_there(tmp_path: Path) -> None:
    lines = [raised(BARRIER.format(rank, 3)) for rank in (0, 1, 3)]
    assert first(tmp_path, *lines) == ("rendezvous-timeout", 2)
    lines = [raised(BARRIER.format(rank, 2)) for rank in (0, 1, 3)]  # one more had come
    assert first(tmp_path, *lines) == ("rendezvous-timeout", None)
    lines = [raised(BARRIER.format(rank, 3)) for rank in (0, 1)]
    assert first(tmp_path, *lines) == ("rendezvous-timeout", None)


def test_tasks_that_ended_by_themselves_had_come(tmp_path: Path) -> None:
    ended = [f"srun: error: node1: task {task}: Exited with exit code 1" for task in (0, 2)]
    lines = [raised(KEYS.format(0)), raised(JOINED.format(2, 3))]
    assert first(tmp_path, *lines, *ended) == ("rendezvous-timeout", 1)
    assert first(tmp_path, *lines[1:], *ended) == ("rendezvous-timeout", None)


def test_a_run_folder_tells_whose_log_has_no_word(tmp_path: Path) -> None:
    run = make_run(tmp_path, "command: python train.py\n")
    write_rank(run, 0, [failed(1)], raised(JOINED.format(2, 3)) + "\n", world=3)
    write_rank(run, 1, [ECHO], "loading\n", world=3)
    write_rank(run, 2, [failed(1)], raised(KEYS.format(0)) + "\n", world=3)
    found = diagnose_run(run)[0]
    assert (found.cause, found.rank) == ("rendezvous-timeout", 1)


def test_the_only_task_there_is(tmp_path: Path) -> None:
    lines = [
        "slurmstepd-gpu01: error: StepId=9.0 exceeded memory limit (8597 > 8388), being killed"
    ]
    lines += ["slurmstepd-gpu01: error: *** STEP 9.0 ON gpu01 CANCELLED AT 2026-11-15T01:33:17 ***"]
    one = [*lines, "srun: error: gpu01: task 0: Killed"]
    assert first(tmp_path, *one) == ("host-out-of-memory", 0)
    two = [*lines, "srun: error: gpu01: tasks 0-1: Killed"]
    assert first(tmp_path, *two) == ("host-out-of-memory", None)


def test_numbers_in_a_log_are_not_believed_beyond_measure(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. "
        "1/3000000000 clients joined.\n"
    )
    (found,) = diagnose_logs([log])
    assert found.cause == "rendezvous-timeout"


def test_a_loss_that_is_no_number_at_no_step(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text('{"v":1,"event":"nonfinite","loss":"nan"}\nstep 3 loss: nan\n')
    assert [one.cause for one in diagnose_logs([log])] == ["nan-loss"]
