"""Failures made for real: the doctor names the cause and the rank of each.

The first half is made without a launcher, by processes that share one import of torch; the second
half (in `make soak`) by torchrun and by `allranks run`, whose lists of failures name
innocent ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commandline import Allranks

from allranks.doctor.diagnose import diagnose_logs

pytestmark = pytest.mark.ranks

NOBODY = None
# Case, ranks (0: one process without a rank), the cause, and whose it is.
# Without a launcher's words nobody knows how many ranks there were: no silent one is named.
MADE_HERE: list[tuple[str, int, str, int | None]] = [
    ("peer_killed", 2, "rank-died", NOBODY),
    ("peer_exits", 2, "rank-died", NOBODY),
    ("peer_segfault", 2, "rank-died", NOBODY),
    ("rank_raised", 2, "rank-raised", 1),
    ("rank0_raised", 2, "rank-raised", 0),
    ("never_arrives", 3, "rank-missing-from-collective", NOBODY),
    ("hang_barrier", 2, "rank-missing-from-collective", NOBODY),
    ("monitored", 2, "rank-missing-from-collective", 1),
    ("uneven_barrier", 2, "uneven-inputs", 1),
    ("uneven_join", 2, "uneven-inputs", 1),
    ("shape_mismatch", 2, "collective-mismatch", NOBODY),
    ("shape_detail", 3, "collective-mismatch", 2),
    ("gather_mismatch", 3, "collective-mismatch", 0),
    ("op_mismatch", 2, "collective-mismatch", NOBODY),
    ("unused_parameters", 2, "ddp-unused-parameters", NOBODY),
    ("ready_twice", 2, "ddp-ready-twice", NOBODY),
    ("model_differs", 2, "model-differs-between-ranks", 1),
    ("model_count_differs", 2, "model-differs-between-ranks", 1),
    ("port_taken", 2, "port-in-use", 0),
    ("rank_absent", 2, "rendezvous-timeout", 1),
    ("master_absent", 2, "master-unreachable", 0),
    ("master_unknown", 2, "master-unreachable", NOBODY),
    ("wrong_interface", 2, "wrong-network-interface", NOBODY),
    ("wrong_world_size", 2, "rank-count-mismatch", NOBODY),
    ("nccl_without_gpu", 2, "no-gpu", NOBODY),
    ("ddp_wrong_device", 2, "backend-device-mismatch", NOBODY),
    ("no_environment", 0, "not-launched-with-launcher", NOBODY),
    ("worker_killed", 0, "worker-killed", NOBODY),
    ("worker_raised", 0, "worker-raised", NOBODY),
    ("collate", 0, "batch-shape-mismatch", NOBODY),
    ("open_files", 0, "too-many-open-files", NOBODY),
    ("missing_file", 0, "missing-file", NOBODY),
    ("missing_module", 0, "missing-module", NOBODY),
    ("checkpoint_keys", 0, "checkpoint-keys", NOBODY),
    ("checkpoint_shape", 0, "checkpoint-shape", NOBODY),
    ("checkpoint_optimizer", 0, "checkpoint-optimizer", NOBODY),
    ("checkpoint_pickle", 0, "checkpoint-unsafe-pickle", NOBODY),
    ("truncated_half", 0, "checkpoint-truncated", NOBODY),
    ("truncated_empty", 0, "checkpoint-truncated", NOBODY),
    ("dcp_shape", 0, "checkpoint-shape", NOBODY),
    ("disk_full_log", 0, "disk-full", NOBODY),
    ("disk_full_saving", 2, "disk-full", 1),
    ("shared_memory", 0, "shared-memory-full", NOBODY),
    ("open_files_plain", 0, "too-many-open-files", NOBODY),
    ("host_memory", 0, "host-out-of-memory", NOBODY),
    ("nan_loss", 0, "nan-loss", NOBODY),
    ("scaler_underflow", 0, "loss-scale-underflow", NOBODY),
    ("label_range", 0, "label-out-of-range", NOBODY),
]
# torchrun's "Root Cause" names an innocent rank, or the guilty one is not in its list.
BY_TORCHRUN: list[tuple[str, int, str, int | None]] = [
    ("hang_all_reduce", 2, "rank-missing-from-collective", 1),
    ("uneven", 2, "uneven-inputs", 1),
    ("op_mismatch", 2, "collective-mismatch", NOBODY),
    ("model_count_differs", 2, "model-differs-between-ranks", 1),
    ("peer_segfault", 2, "rank-died", 1),
    ("rank0_raised", 2, "rank-raised", 0),
    ("peer_killed", 3, "rank-died", 1),
    ("peer_abort", 2, "rank-died", 1),
    ("rank_raised", 2, "rank-raised", 1),
    ("never_arrives", 3, "rank-missing-from-collective", 2),
    ("monitored_several", 3, "rank-missing-from-collective", 1),
    ("shape_mismatch", 2, "collective-mismatch", NOBODY),
    ("model_differs", 2, "model-differs-between-ranks", 1),
    ("missing_module", 2, "missing-module", NOBODY),
    ("rank_late", 3, "rendezvous-timeout", 1),
]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logs of all failures of the first half, made at once."""
    folder = tmp_path_factory.mktemp("failures")
    env = {**os.environ, "SCRATCH": str(folder), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    cases = [f"{case}:{ranks}" for case, ranks, _, _ in [*MADE_HERE, ("healthy", 2, "", None)]]
    command = [sys.executable, "-m", "tests.failing", "--into", str(folder), *cases]
    subprocess.run(command, env=env, check=True, timeout=250)
    return folder


@pytest.mark.parametrize(("case", "ranks", "cause", "rank"), MADE_HERE)
def test_a_failure(logs: Path, case: str, ranks: int, cause: str, rank: int | None) -> None:
    found = diagnose_logs([logs / f"{case}.log"])
    assert found, (logs / f"{case}.log").read_text()[-2000:]
    assert (found[0].cause, found[0].rank) == (cause, rank), found[0].evidence


def test_a_run_without_failure(logs: Path) -> None:
    log = logs / "healthy.log"
    assert "step 4" in log.read_text()
    assert diagnose_logs([log]) == []


@pytest.mark.soak
@pytest.mark.parametrize(("case", "ranks", "cause", "rank"), BY_TORCHRUN)
def test_a_failure_under_torchrun(
    case: str, ranks: int, cause: str, rank: int | None, tmp_path: Path
) -> None:
    env = {
        **os.environ,
        "SCRATCH": str(tmp_path),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={ranks}", "-m", "tests.failing", case]
    log = tmp_path / "job.log"
    with log.open("w") as file:
        done = subprocess.run(command, env=env, stdout=file, stderr=file, check=False, timeout=250)
    assert done.returncode != 0
    found = diagnose_logs([log])
    assert found, log.read_text()[-2000:]
    assert (found[0].cause, found[0].rank) == (cause, rank), found[0].evidence


@pytest.mark.soak  # one is killed in test_doctor_machine_failures.py, too
def test_a_run_folder_of_a_killed_rank(allranks: Allranks, tmp_path: Path) -> None:
    script = [sys.executable, "-m", "tests.failing", "peer_killed"]
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    run = allranks("run", "--layout", "1x2", "--oversubscribe", "--", *script, env=env)
    assert run.returncode == 1, run.stderr
    found = json.loads(allranks("doctor", "last", "--json").stdout)
    assert (found[0]["cause"], found[0]["rank"]) == ("rank-died", 1)
