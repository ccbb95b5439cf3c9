"""The diagnosis of run folders, and how findings are shown."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.commandline import call_allranks

from allranks.doctor.diagnose import compare, diagnose_run, without_findings
from allranks.doctor.finding import UNKNOWN, WELL, Evidence, Finding
from allranks.doctor.show import show_findings
from allranks.run.folder import RunDir

GIB = 1 << 30


def make_run(folder: Path, job: str = "task: digits\nseed: 0\n", **info: Any) -> RunDir:
    run = RunDir(folder / "digits-20261115-142301-3f9a")
    (run.path / "attempts" / "0").mkdir(parents=True)
    run.write_info({"run": run.name, "layout": "1x2", "backend": "local", **info})
    run.job_file.write_text(job)
    return run


def write_rank(
    run: RunDir, rank: int, events: list[dict[str, Any]], log: str = "", world: int = 2
) -> None:
    start = {
        "event": "start",
        "rank": rank,
        "world_size": world,
        "host": "node1",
        "pid": 900 + rank,
    }
    start |= {"rank_batch": [64, 64], "accumulation": 1}
    lines = [json.dumps({"v": 1, "t": 100.0 + i, **e}) for i, e in enumerate([start, *events])]
    run.events(0, rank).write_text("\n".join(lines) + "\n")
    run.log(0, rank).write_text(log)


def failed(code: int | None, **more: Any) -> dict[str, Any]:
    return {"event": "end", "state": "failed", "exit": code, **more}


ECHO = failed(None, error={"what": "ended because another rank failed", "fix": "", "echo": True})
STEP = {"event": "step", "step": 1, "samples": 64, "seconds": 0.1}


def test_a_rank_killed_with_all_the_memory_in_use(tmp_path: Path) -> None:
    run = make_run(tmp_path, hardware={"memory_bytes": 32 * GIB})
    grows = [{"event": "device", "host_memory": size * GIB} for size in (2, 9, 20, 28)]
    write_rank(run, 0, [STEP, {"event": "device", "host_memory": 2 * GIB}, ECHO])
    write_rank(run, 1, [STEP, *grows, failed(-9, signal="SIGKILL")])
    found = diagnose_run(run)[0]
    assert (found.cause, found.rank, found.confidence) == ("host-out-of-memory", 1, "medium")
    assert any("2 GiB to 28 GiB" in line.text for line in found.evidence)


def test_what_ranks_share_of_their_memory_is_counted_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, hardware={"memory_bytes": 10 * GIB})
    used = {"host_memory": 9 * GIB, "host_memory_now": 6 * GIB, "host_memory_shared": 3 * GIB}
    memory = [{"event": "device", **used}]
    write_rank(run, 0, [STEP, *memory, ECHO])
    write_rank(run, 1, [STEP, *memory, failed(-9, signal="SIGKILL")])
    found = diagnose_run(run)[0]
    assert (found.cause, found.rank) == ("host-out-of-memory", 1)
    assert "9 GiB of 10 GiB" in f"{found.title} {found.fix}"


def test_a_rank_killed_with_memory_left(tmp_path: Path) -> None:
    run = make_run(tmp_path, hardware={"memory_bytes": 320 * GIB})
    write_rank(run, 0, [STEP, ECHO])
    memory = [{"event": "device", "host_memory": 2 * GIB}]
    write_rank(run, 1, [STEP, *memory, failed(-9, signal="SIGKILL")])
    found = diagnose_run(run)[0]
    assert (found.cause, found.rank, found.node) == ("rank-died", 1, "node1")
    assert "SIGKILL" in found.title


def test_a_rank_killed_on_a_machine_of_unknown_memory(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_rank(run, 0, [STEP, ECHO])
    memory = [{"event": "device", "host_memory": 2 * GIB}]
    write_rank(run, 1, [STEP, *memory, failed(-9, signal="SIGKILL")])
    assert diagnose_run(run)[0].cause == "rank-died"


def test_memory_of_another_process_does_not_surely_explain_an_exception(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    log = 'Traceback (most recent call last):\n  File "train.py", line 7, in step\n'
    log += "    raise ShardError(name)\nShardError: shard 3 is not there\n"
    write_rank(run, 0, [STEP, ECHO])
    write_rank(run, 1, [STEP, failed(1, memory_kills=1)], log)
    found = diagnose_run(run)
    assert ("host-out-of-memory", "high") not in [(one.cause, one.confidence) for one in found]


def test_out_of_gpu_memory_says_the_micro_batch_to_write(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    log = f"Traceback (most recent call last):\n  File 'x', line 1\n{oom}\n"
    write_rank(run, 0, [STEP, ECHO])
    write_rank(run, 1, [STEP, failed(1, error={"what": oom, "fix": "", "echo": False})], log)
    found = diagnose_run(run)[0]
    assert (found.cause, found.rank) == ("cuda-out-of-memory", 1)
    assert "micro_batch_size: 32" in found.fix


def test_a_loss_that_is_no_number_in_events(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    bad = {"event": "step", "step": 7, "loss": None, "nonfinite": {"loss": "nan"}}
    done = {"event": "end", "state": "finished", "exit": 0}
    write_rank(run, 0, [STEP, bad, done])
    write_rank(run, 1, [STEP, done])
    assert [one.cause for one in diagnose_run(run)] == ["nan-loss"]


def test_a_finished_run_has_no_finding_whatever_it_printed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    done = {"event": "end", "state": "finished", "exit": 0}
    for rank in range(2):
        write_rank(run, rank, [STEP, done], "RuntimeError: Address already in use\n")
    assert diagnose_run(run) == []


def batches(same_order: bool, offset: int = 0, sorted_: bool = False) -> list[dict[str, Any]]:
    found = []
    for epoch in (1, 2):
        for batch in range(3):
            number = 10 * batch + offset + (0 if same_order else 100 * epoch)
            found.append(
                {
                    "event": "batch",
                    "epoch": epoch,
                    "batch": batch,
                    "indices": number,
                    "content": number,
                    "sorted": sorted_,
                }
            )
    return found


@pytest.mark.parametrize(
    ("same_order", "offset", "sorted_", "causes"),
    [
        (False, 1, False, []),
        (True, 1, False, ["missing-set-epoch"]),
        (True, 1, True, []),  # read from the first sample to the last, on purpose
        (False, 0, False, ["ranks-read-same-data"]),
    ],
)
def test_what_ranks_and_epochs_read(
    same_order: bool, offset: int, sorted_: bool, causes: list[str], tmp_path: Path
) -> None:
    run = make_run(tmp_path, "command: python train.py\n")
    done = {"event": "end", "state": "finished", "exit": 0}
    for rank in range(2):
        write_rank(run, rank, [*batches(same_order, offset * rank, sorted_), STEP, done])
    assert [one.cause for one in diagnose_run(run)] == causes


def test_two_runs_of_which_one_has_the_larger_batch(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b", "task: digits\nseed: 1\n")
    write_rank(one, 0, [STEP])
    for rank in range(2):
        write_rank(other, rank, [STEP])
    found = compare([one, other])
    assert [each.cause for each in found] == ["effective-batch-grew", "seeds-differ"]
    assert "128 samples instead of 64" in found[0].title


def test_findings_fit_into_80_columns() -> None:
    long = "a_very_long_word_" * 12
    line = Evidence(f"runs/{long}/rank-3.log", 12, long)
    found = Finding("rank-died", f"Rank 3 died {long}", f"type {long}", 3, "node7", "high", (line,))
    console = Console(file=io.StringIO(), width=80)
    show_findings(console, [found, found], {})
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, printed.splitlines())) <= 80
    assert "rank 3 on node7" in printed and "fix" in printed


def test_what_the_doctor_does_not_know_is_not_called_well(tmp_path: Path) -> None:
    contents = {
        "pip.log": (b"ERROR: No matching distribution found for torhc\n", UNKNOWN),
        "empty.log": (b"", "it is empty"),
        "bin.dat": (b"\x7fELF\0\0", "it is not a text file"),
    }
    for name, (content, said) in contents.items():
        (tmp_path / name).write_bytes(content)
        assert without_findings(tmp_path, [str(tmp_path / name)]) == {str(tmp_path / name): said}
    run = make_run(tmp_path)
    for end, said in ((failed(1), UNKNOWN), ({"event": "end", "state": "finished"}, WELL)):
        write_rank(run, 0, [STEP, end], world=1)
        assert without_findings(tmp_path, ["last"]) == {run.name: said}


def test_the_command(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("RuntimeError: Address already in use\n")
    done = call_allranks("doctor", log, "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert done.returncode == 0
    keys = ["cause", "title", "rank", "place", "node", "confidence", "evidence", "fix"]
    assert list(found[0]) == keys
    assert found[0]["evidence"] == [
        {"file": "job.log", "line": 1, "text": "RuntimeError: Address already in use"}
    ]
    log.write_text("all is well\n")
    assert json.loads(call_allranks("doctor", log, "--json", cwd=tmp_path).stdout) == []
    assert (
        f"{log}: no cause that the doctor knows"
        in call_allranks("doctor", log, cwd=tmp_path).stdout
    )
    known = json.loads(call_allranks("doctor", "--list", "--json", cwd=tmp_path).stdout)
    assert "port-in-use" in {one["cause"] for one in known}
    wrong = call_allranks("doctor", "nothing-here", cwd=tmp_path)
    assert wrong.returncode == 2 and "nothing-here" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    missing = call_allranks("doctor", "slurm-9.out", cwd=tmp_path)
    assert missing.returncode == 2 and "there is no file slurm-9.out" in missing.stderr


def test_a_rank_that_used_what_its_cpu_may_not_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, hardware={"memory_bytes": 32 * GIB})
    write_rank(run, 0, [STEP, ECHO])
    write_rank(run, 1, [STEP, failed(-4, signal="SIGILL")])
    (found,) = diagnose_run(run)
    assert (found.cause, found.rank) == ("illegal-instruction", 1)
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in found.fix and "memory" not in found.fix
