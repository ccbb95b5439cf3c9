"""The first cause, not the loudest; the rank that did it, not the ranks that complain."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from allranks.doctor import log_search
from allranks.doctor.diagnose import diagnose_logs, rank_in_name
from allranks.doctor.finding import Finding

LOST = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
)
WAITED = (
    "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv"
)
WAITED += " operation to complete"
BLOCK = """\
    torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
    Failures:
    {others}
    Root Cause (first observed failure):
    [0]:
      host      : {host}
      rank      : {rank} (local_rank: {rank})
      exitcode  : {code} (pid: 100{rank})
      error_file: <N/A>
"""


def traceback(rank: int, error: str, where: str = "train.py", function: str = "step") -> str:
    lines = [
        "Traceback (most recent call last):",
        f'  File "/home/u/{where}", line 7, in {function}',
    ]
    return (
        "\n".join(f"[rank{rank}]: {line}" for line in [*lines, f"    raise {function}()", error])
        + "\n"
    )


def block(rank: int, code: int, terminated: tuple[int, ...] = (), host: str = "localhost") -> str:
    others = [
        f"[{number + 1}]:\n  host      : {host}\n  rank      : {other} (local_rank: {other})\n"
        f"  exitcode  : -15 (pid: 200{other})  (SIGTERM)"
        for number, other in enumerate(terminated)
    ]
    text = "\n".join(others) or "  <NO_OTHER_FAILURES>"
    return textwrap.dedent(BLOCK).format(others=text, host=host, rank=rank, code=code)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "job.log"


def diagnose(log: Path, text: str) -> list[Finding]:
    log.write_text(text)
    return diagnose_logs([log])


def first(log: Path, text: str) -> tuple[str, int | None, str]:
    found = diagnose(log, text)
    assert found, "nothing was found"
    return found[0].cause, found[0].rank, found[0].confidence


def test_a_rank_out_of_memory_counts_not_the_63_that_wait(log: Path) -> None:
    waiting = "".join(traceback(rank, WAITED) for rank in range(64) if rank != 17)
    killed = "slurmstepd-node5: error: Detected 1 oom-kill event(s) in StepId=7.0.\n"
    ended = "srun: error: node5: task 17: Out Of Memory\n"
    found = diagnose(log, waiting + killed + ended)
    assert (found[0].cause, found[0].rank, found[0].node) == ("host-out-of-memory", 17, "node5")
    assert "--mem" in found[0].fix


def test_a_crash_counts_not_the_lost_connections(log: Path) -> None:
    text = traceback(0, LOST) + traceback(2, LOST) + block(1, -11, (0, 2), "node3")
    assert first(log, text) == ("rank-died", 1, "high")
    assert diagnose(log, text)[0].node == "node3"


def test_an_exception_counts_not_the_lost_connections(log: Path) -> None:
    text = traceback(0, LOST) + traceback(1, "ValueError: no such column") + block(0, 1, (1,))
    assert first(log, text) == ("rank-raised", 1, "high")


def test_in_a_hang_the_silent_rank_counts_though_torchrun_names_another(log: Path) -> None:
    text = traceback(0, WAITED) + traceback(1, LOST) + traceback(3, LOST) + block(0, 1, (1, 2, 3))
    assert first(log, text) == ("rank-missing-from-collective", 2, "medium")


@pytest.mark.parametrize(
    ("group", "sure"),
    [
        ("PG ID 0 PG GUID 0(default_pg) ", "high"),
        ("PG 0 ", "high"),
        ("PG 3 ", "medium"),
        ("", "medium"),
    ],
)
def test_sequence_numbers_tell_who_is_behind(log: Path, group: str, sure: str) -> None:
    line = "[rank{0}]:[E1115 01:00:00.1 ProcessGroupNCCL.cpp:1] [{2}Rank {0}] {1}\n"
    caught = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=45, OpType=ALLREDUCE)"
    text = line.format(0, caught, group) + line.format(2, caught, group)
    for rank, number in enumerate((96, 44, 95)):
        said = f"Last enqueued NCCL work: {number}, last completed NCCL work: 44."
        text += line.format(rank, said, group)
    text += (
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: 15\n"
    )
    assert first(log, text) == ("rank-missing-from-collective", 1, sure)


def test_only_the_group_that_timed_out_is_compared(log: Path) -> None:
    line = "[rank{0}]:[E1115 01:00:00.1 ProcessGroupNCCL.cpp:1] [PG ID 1 PG GUID {1}(tp) Rank 0] "
    caught = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=45, OpType=ALLREDUCE)\n"
    text = line.format(0, "7") + caught
    for rank, group, number in ((0, "7", 45), (1, "7", 44), (2, "8", 12), (3, "8", 10)):
        text += line.format(rank, group) + f"Last enqueued NCCL work: {number}, last completed\n"
    assert first(log, text) == ("rank-missing-from-collective", 1, "high")


def test_equal_sequence_numbers_with_different_calls_are_a_mismatch(log: Path) -> None:
    line = "[rank{0}]:[E1115 01:00:00.1 P.cpp:1] [Rank {0}] Watchdog caught collective operation "
    line += "timeout: WorkNCCL(SeqNum=7, OpType={1}, NumelIn={2}) ran for 15057 milliseconds\n"
    text = line.format(0, "ALLREDUCE", 8) + line.format(1, "ALLREDUCE", 4)
    assert first(log, text)[0] == "collective-mismatch"


def test_a_rank_that_ended_well_had_fewer_batches(log: Path) -> None:
    text = traceback(0, LOST, function="backward") + block(0, 1)
    assert first(log, text) == ("uneven-inputs", 1, "medium")


def test_ranks_in_different_places_had_uneven_batches(log: Path) -> None:
    text = traceback(0, WAITED, function="backward")
    text += traceback(1, WAITED, where="end.py", function="barrier") + block(0, 1, (1,))
    assert first(log, text) == ("uneven-inputs", 1, "medium")


@pytest.mark.parametrize(
    ("rank", "error", "cause"),
    [
        (1, LOST, "rank-died"),
        (0, LOST, "rank-died"),
        (6, WAITED, "rank-missing-from-collective"),
        (0, WAITED, "rank-missing-from-collective"),
    ],
)
def test_the_log_of_one_rank_names_no_other(log: Path, rank: int, error: str, cause: str) -> None:
    assert first(log, traceback(rank, error)) == (cause, None, "medium")


def test_an_exception_whose_end_a_thread_turns_into_an_abort(log: Path) -> None:
    text = traceback(1, "ValueError: no label").replace("[rank1]: ", "")
    text += "terminate called without an active exception\nFatal Python error: Aborted\n"
    assert first(log, text + block(1, -6, (0,)))[:2] == ("rank-raised", 1)


def test_a_copied_log_is_given_no_interface_of_this_machine(log: Path) -> None:
    text = "RuntimeError: [../gloo/transport/tcp/device.cc:84] Unable to find address for: ib7\n"
    (found,) = diagnose(log, text)
    assert "GLOO_SOCKET_IFNAME=eth0" in found.fix


def test_an_exit_code_without_a_word(log: Path) -> None:
    assert first(log, block(1, 3, (0,))) == ("rank-died", 1, "medium")


def test_only_one_of_all_ranks_differs(log: Path) -> None:
    oom = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total "
    )
    oom += "capacity of 79.10 GiB of which 1.00 GiB is free."
    text = traceback(3, oom) + "".join(traceback(rank, LOST) for rank in (0, 1, 2))
    assert first(log, text) == ("cuda-out-of-memory", 3, "high")


def test_the_same_error_on_every_rank_is_nobodys(log: Path) -> None:
    text = "".join(traceback(rank, "IndexError: Target 10 is out of bounds.") for rank in range(2))
    assert first(log, text) == ("label-out-of-range", None, "high")


def test_tasks_and_world_size_that_differ(log: Path) -> None:
    text = "SLURM_NTASKS=2 WORLD_SIZE=4\n"
    text += "torch.distributed.DistStoreError: Timed out after 16 seconds waiting for clients. "
    text += "2/4 clients joined.\nsrun: error: gpu01: task 0: Exited with exit code 1\n"
    found = diagnose(log, text)[0]
    assert found.cause == "rank-count-mismatch" and "WORLD_SIZE is 4" in found.title
    assert "--ntasks-per-node" in found.fix


STEP = "slurmstepd-gpu01: error: *** JOB 5 ON gpu01 CANCELLED AT 2026-11-15T01:32:31 {} ***\n"
ENDED = "srun: error: gpu02: task 1: Terminated\n"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (STEP.format("DUE TO TIME LIMIT") + ENDED, "slurm-time-limit"),
        (STEP.format("DUE TO PREEMPTION") + "   Requeue=1 Restarts=1\n", "slurm-preempted"),
        (STEP.format("DUE TO NODE FAILURE, SEE SLURMCTLD LOG") + ENDED, "slurm-node-failure"),
        (
            STEP.format("DUE TO JOB REQUEUE") + "JobState=PENDING Reason=BeginTime\n",
            "slurm-requeued",
        ),
        (STEP.format("") + ENDED, "job-cancelled"),
        ("   13  gpu  PENDING  2 (BeginTime)\n", "slurm-pending"),
        ("  1 gpu PENDING 1 (ReqNodeNotAvail, UnavailableNodes:gpu02)\n", "slurm-pending"),
        (
            "sbatch: error: Memory specification can not be satisfied\n"
            "sbatch: error: Batch job submission failed: Requested node configuration is not "
            "available",
            "slurm-request-impossible",
        ),
        (
            "sbatch: error: invalid partition specified: nosuch\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
            "slurm-bad-option",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid feature specification",
            "slurm-bad-option",
        ),
        ("sbatch: error: invalid number of nodes (-N 0)", "slurm-bad-option"),
    ],
)
def test_words_of_slurm(text: str, cause: str, log: Path) -> None:
    assert first(log, text)[0] == cause


def test_a_killed_task_names_its_node(log: Path) -> None:
    text = (
        traceback(0, LOST)
        + "srun: error: gpu02: task 1: Killed\nsrun: error: gpu01: task 0: Terminated\n"
    )
    found = diagnose(log, text)[0]
    assert (found.cause, found.rank, found.node) == ("rank-died", 1, "gpu02")


def test_warnings_alone_are_nothing(log: Path) -> None:
    text = (
        "[W1115 01:03:02.2 socket.cpp:764] [c10d] The client socket has failed to connect to "
        "[::]:29667 (errno: 111 - Connection refused).\n"
        "vm:930:930 [0] NCCL INFO NET/IB : No device found.\n"
        "vm:930:930 [0] NCCL INFO Failed to initialize NET plugin IB\n"
        "WARNING: Connection reset by peer, retrying\n"
        "UserWarning: Torch was not compiled with flash attention.\n"
        "loss 0.12 nansum 3\n0 errors, 0 failures\n"
    )
    assert diagnose(log, text) == []


def test_an_error_that_a_run_went_on_after_is_nothing(log: Path) -> None:
    handled = "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nKeyError: 'lr'\n"
    steps = "".join(f"step {step} loss 0.5\n" for step in range(2000))
    assert (
        diagnose(log, steps + handled + "OSError: [Errno 28] No space left on device\n" + steps)
        == []
    )


def test_two_causes_are_said_with_less_confidence(log: Path) -> None:
    text = "OSError: [Errno 28] No space left on device: '/a'\n"
    text += "ModuleNotFoundError: No module named 'x'\n"
    found = diagnose(log, text)
    assert [one.cause for one in found] == ["disk-full", "missing-module"]
    assert found[0].confidence == "medium"


def test_evidence_has_file_line_and_text(log: Path) -> None:
    line = diagnose(log, "fine\n\nRuntimeError: Address already in use\n")[0].evidence[0]
    assert (line.file, line.line) == (str(log), 3)
    assert line.text == "RuntimeError: Address already in use"


@pytest.mark.parametrize("prefix", ["[rank3]: ", "3: ", "[3] ", "[default3]:[rank3]: "])
def test_whose_line_it_is(prefix: str, log: Path) -> None:
    text = f"{prefix}torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    assert first(log, text)[:2] == ("cuda-illegal-access", 3)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank-3.log", 3),
        ("run.rank12.out", 12),
        ("slurm-77.out", None),
        ("attempt_0/2/stderr.log", 2),
        ("franka-4.log", None),
        ("lora_rank_16.log", None),
        ("node7.rank_3.log", 3),
        ("slurm-77_rank_2.out", 2),
    ],
)
def test_a_file_of_one_rank(name: str, rank: int | None) -> None:
    assert rank_in_name(Path("logs") / name) == rank


def test_ranks_in_files_of_their_own(tmp_path: Path) -> None:
    for rank in range(3):
        text = "rank up\n" if rank == 1 else f"Traceback (most recent call last):\n{WAITED}\n"
        (tmp_path / f"rank-{rank}.log").write_text(text)
    found = diagnose_logs(sorted(tmp_path.iterdir()))[0]
    assert (found.cause, found.rank) == ("rank-missing-from-collective", 1)


def test_words_across_pieces_and_very_long_lines(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_search, "CHUNK_BYTES", 512)
    monkeypatch.setattr(log_search, "_BLOCK", 64)
    error = "RuntimeError: Address already in use"
    for offset in range(0, 70, 3):
        text = "x" * offset + "\n" + "a line of a log\n" * 20 + error + "\n"
        found = diagnose(log, text)
        assert [(one.cause, one.evidence[0].line) for one in found] == [("port-in-use", 22)], offset
    assert diagnose(log, "y" * 5000 + error)[0].cause == "port-in-use"


def test_progress_bars_and_colours_are_taken_off(log: Path) -> None:
    text = "  1%| | 1/100\r  2%| | 2/100\r\x1b[31mRuntimeError: Address already in use\x1b[0m\n"
    assert diagnose(log, text)[0].evidence[0].text == "RuntimeError: Address already in use"


def test_a_rank_that_waited_less_long_for_a_third_one_is_not_the_missing_one(log: Path) -> None:
    ready = "".join(f"[rank{rank}]: ready\n" for rank in range(3))
    text = ready + traceback(0, WAITED) + traceback(1, LOST) + block(0, 1, (1, 2))
    found = diagnose(log, text)[0]
    assert (found.cause, found.rank) == ("rank-missing-from-collective", 2)


FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
STEPS = "".join(f"step {number} loss 0.5\n" for number in range(20, 30))
OTHER = "Traceback (most recent call last):\n  File \"/home/u/a.py\", line 7, in f\nKeyError: 'x'\n"


@pytest.mark.parametrize(
    ("text", "cause", "confidence"),
    [
        (traceback(0, FULL), "cuda-out-of-memory", "high"),
        (f"{FULL}\n", "cuda-out-of-memory", "high"),  # the log ends with it
        (f"it said {FULL}\n", "cuda-out-of-memory", "medium"),  # somebody writes about it
        (f"{FULL}\n" + "still here\n" * 100, "cuda-out-of-memory", "medium"),
        (traceback(0, FULL) + "\n" * 9 + OTHER, "cuda-out-of-memory", "medium"),
        (f"{FULL}\n{STEPS}{OTHER}", "rank-raised", "medium"),  # it was overcome
        (
            OTHER.replace("KeyError: 'x'", "FileNotFoundError: [Errno 2] No such file: 'a'")
            + f"\nDuring handling of the above exception, another exception occurred:\n\n{OTHER}",
            "missing-file",
            "medium",
        ),
        (traceback(1, "ValueError: no label"), "rank-raised", "medium"),
        (traceback(1, "ValueError: no label") + traceback(0, LOST), "rank-raised", "high"),
        (traceback(1, "ValueError: no label") + block(1, 1, (0,)), "rank-raised", "high"),
    ],
)
def test_what_earns_high_confidence(log: Path, text: str, cause: str, confidence: str) -> None:
    assert first(log, text)[::2] == (cause, confidence)
