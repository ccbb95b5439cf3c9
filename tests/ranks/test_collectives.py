"""Collectives on real ranks over gloo: right results, wrong ones found, the command as a whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.commandline import Allranks
from tests.ranks import run_ranks

from allranks.bench.comm_counts import COLLECTIVES, FAR, counted_bytes

pytestmark = pytest.mark.ranks

KEYS = ["collective", "bytes", "ranks", "median_us", "p99_us", "algbw_GBps", "busbw_GBps"]


def results_by_hand() -> dict[str, list[float]]:
    """What each collective leaves in this rank's memory, given 1, 2, 3... times its rank + 1."""
    import torch
    import torch.distributed as dist

    from allranks.bench.comm_calls import Peers, make_operation

    world = dist.get_world_size()
    peers = Peers(tuple(range(world)), dist.get_rank())
    results = {}
    for name in COLLECTIVES:
        size = counted_bytes(name, 16 * world, world)
        operation = make_operation(name, size, peers, torch.device("cpu"))
        given = torch.arange(1, len(operation.given) + 1) * (dist.get_rank() + 1.0)
        operation.result.fill_(0)
        operation.given.copy_(given)
        operation.run()
        results[name] = operation.result.tolist()
    return results


def test_every_collective_is_the_one_it_is_called(tmp_path: Path) -> None:
    first, second = run_ranks(results_by_hand, 2, tmp_path)
    sums = [3.0 * i for i in range(1, 9)]
    ones, twos = [float(i) for i in range(1, 9)], [2.0 * i for i in range(1, 9)]
    assert first["all_reduce"] == second["all_reduce"] == sums
    assert first["all_gather"] == second["all_gather"] == ones[:4] + twos[:4]
    assert (first["reduce_scatter"], second["reduce_scatter"]) == (sums[:4], sums[4:])
    assert first["broadcast"] == second["broadcast"] == ones
    assert first["reduce"] == sums
    assert first["all_to_all"] == ones[:4] + twos[:4]
    assert second["all_to_all"] == ones[4:] + twos[4:]
    assert (first["send_recv"], second["send_recv"]) == (twos, ones)


def verdicts(corrupt: int | None) -> dict[str, str]:
    """What a sweep says of each collective, where one rank's memory loses one value or none."""
    import torch
    import torch.distributed as dist

    from allranks.bench import comm_ranks
    from allranks.bench.comm_calls import Operation, Peers, World, make_operation
    from allranks.errors import AllranksError

    def damaged(*args: Any) -> Operation:
        operation = make_operation(*args)
        run = operation.run

        def run_and_damage() -> None:
            run()
            if dist.get_rank() == corrupt:
                operation.result[-1] += 1

        operation.run = run_and_damage
        return operation

    rank, size = dist.get_rank(), dist.get_world_size()
    peers = Peers(tuple(range(size)), rank)
    world = World(rank, size, size, torch.device("cpu"), {"node": peers})
    said = {}
    for name in COLLECTIVES:
        sweep = comm_ranks.Sweep(world, "node", name)
        try:
            with (
                patch.object(comm_ranks, "make_operation", damaged),
                patch.object(comm_ranks, "SECONDS_PER_SIZE", 0.01),
            ):
                sweep.measure([4096, 300_000], 1e9, 600)
            said[name] = "right"
            assert [row["ranks"] for row in sweep.rows] == [size, size]
        except AllranksError as error:
            said[name] = error.what
    return said


@pytest.mark.parametrize("ranks", [2, 3])
def test_right_results_are_found_right(tmp_path: Path, ranks: int) -> None:
    for said in run_ranks(verdicts, ranks, tmp_path, None):
        assert said == dict.fromkeys(COLLECTIVES, "right")


def test_one_wrong_value_is_found_on_its_rank(tmp_path: Path) -> None:
    for said in run_ranks(verdicts, 2, tmp_path, 1):
        for name in COLLECTIVES:
            if name == "reduce":  # only the first rank gets a result
                assert said[name] == "right"
            else:
                assert said[name] == f"{name} of 4 KiB over 2 ranks gave a wrong result on rank 1"
    assert "reduce of 4 KiB" in run_ranks(verdicts, 2, tmp_path, 0)[1]["reduce"]


def missing_collective() -> tuple[str | None, list[Any]]:
    import torch
    import torch.distributed as dist

    from allranks.bench import comm_calls, comm_ranks
    from allranks.bench.comm_calls import Peers, World

    def reduce_scatter(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("ProcessGroupGloo does not support reduce_scatter")

    peers = Peers((0, 1), dist.get_rank())
    world = World(dist.get_rank(), 2, 2, torch.device("cpu"), {"node": peers})
    sweep = comm_ranks.Sweep(world, "node", "reduce_scatter")
    with patch.object(comm_calls, "_reduce_scatter", reduce_scatter):
        sweep.measure([4096], 1e9, 20)
    return sweep.lacking, sweep.rows


def test_a_collective_that_the_library_lacks_is_named(tmp_path: Path) -> None:
    for lacking, rows in run_ranks(missing_collective, 2, tmp_path):
        assert lacking == "ProcessGroupGloo does not support reduce_scatter"
        assert rows == []


def check_rows(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        assert list(row)[:7] == KEYS
        assert row["iterations"] >= 5
        assert 0 < row["median_us"] <= row["p99_us"]
        algorithm = row["bytes"] / row["median_us"] / 1e3
        assert row["algbw_GBps"] == pytest.approx(algorithm, rel=1e-4)
        factor = COLLECTIVES[row["collective"]].bus_factor(row["ranks"])
        assert row["busbw_GBps"] == pytest.approx(factor * algorithm, rel=1e-4)


def test_two_ranks_measure_all_collectives(allranks: Allranks, tmp_path: Path) -> None:
    done = allranks(
        *("bench", "comm", "--layout", "1x2", "--sizes", "1KiB-16KiB", "--seconds", "2", "--json")
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    check_rows(found)
    assert (found["layout"], found["backend"], found["library"]) == ("1x2", "local", "gloo")
    assert {row["collective"] for row in found["rows"]} == set(COLLECTIVES)
    assert {(row["ranks"], row["scope"]) for row in found["rows"]} == {(2, "node")}
    assert found["transport"]["node"]["words"] == "TCP over lo"
    assert found["peak_GBps"] == {"node": None}
    assert found["complete"] and not found["played"]
    run_dir = Path(found["run_dir"])
    assert run_dir == tmp_path / "runs" / found["run"]
    assert json.loads((run_dir / "comm.json").read_text()) == found
    for fit in found["fits"]:
        assert fit["latency_us"] >= 0 and fit["error"] <= FAR
    shown = allranks("bench", "comm", "--from", "last")
    assert shown.returncode == 0
    assert "off by up to" in shown.stdout or "no line fits" in shown.stdout


@pytest.mark.soak
def test_nodes_are_measured_within_across_and_together(allranks: Allranks) -> None:
    done = allranks(
        *("bench", "comm", "--layout", "2x2", "--sizes", "1KiB-4KiB", "--seconds", "2", "--json"),
        *("--collectives", "all_reduce,send_recv"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    check_rows(found)
    scopes = {(row["scope"], row["ranks"]) for row in found["rows"]}
    assert scopes == {("node", 2), ("nodes", 2), ("all", 4)}
    assert found["played"] and found["nodes"] == 2
    for row in found["rows"]:
        if row["scope"] == "node":
            assert max(row["node_median_us"]) == row["median_us"]
            assert len(row["node_median_us"]) == 2
    assert "one machine played the 2 nodes" in done.stderr


@pytest.mark.soak
def test_a_rank_that_dies_is_named_and_what_was_measured_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "allranks", "bench", "comm", "--layout", "1x2", "--json"]
    command += ["--collectives", "broadcast,all_reduce", "--sizes", "1KiB-256KiB"]
    bench = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    written = wait_for(tmp_path, "runs/*/comm.json")
    events = next(tmp_path.glob("runs/*/attempts/0/rank-1.jsonl")).read_text()
    os.kill(json.loads(events.splitlines()[0])["pid"], signal.SIGKILL)
    stdout, stderr = bench.communicate(timeout=50)
    error = json.loads(stdout)["error"]
    assert bench.returncode == 1
    assert error["what"] == "rank 1 was killed by SIGKILL"
    assert "rank-1.log" in error["fix"] and "measure again" in error["fix"]
    assert "Traceback" not in stderr
    kept = json.loads(written.read_text())
    assert not kept["complete"]
    assert {row["collective"] for row in kept["rows"]} == {"broadcast"}


def wait_for(folder: Path, pattern: str) -> Path:
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        for path in folder.glob(pattern):
            return path
        time.sleep(0.02)
    raise AssertionError(f"no {pattern}")
