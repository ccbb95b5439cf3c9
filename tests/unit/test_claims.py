"""Claims: one winner whoever tries, the newest holds the run, and who lost it is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.errors import AllranksError
from allranks.run import claims
from allranks.run.claims import Claim
from allranks.run.folder import RunDir

CONTENDERS, ROUNDS = 8, 30
CONTENDER = """
import json, sys, time
from pathlib import Path
from allranks.run.claims import Claim, take
folder, job, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
start = float(sys.stdin.readline())
won = []
for number in range(rounds):
    time.sleep(max(0.0, start + 0.01 * number - time.time()))
    if take(folder, Claim(number=number, job=job)):
        won.append(number)
print(json.dumps(won))
"""
HOLDER = """
import sys, time
from pathlib import Path
from allranks.run import claims
with claims.locked(Path(sys.argv[1]), int(sys.argv[2])):
    print("held", flush=True)
    time.sleep(60)
"""


def take(folder: Path, number: int, **content: str) -> None:
    assert claims.take(folder, Claim(number=number, **content))  # type: ignore[arg-type]


def test_exactly_one_of_many_processes_wins_every_claim(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, folder, str(job), str(ROUNDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for job in range(CONTENDERS)
    ]
    for contender in contenders:
        assert contender.stdout is not None
        assert contender.stdout.readline() == "ready\n"
    start = f"{time.time() + 0.3}\n"
    won = [json.loads(contender.communicate(start)[0]) for contender in contenders]
    assert sorted(number for numbers in won for number in numbers) == list(range(ROUNDS))
    winners = {number: str(job) for job, numbers in enumerate(won) for number in numbers}
    assert {claim.number: claim.job for claim in claims.all_of(folder)} == winners
    assert sorted(os.listdir(folder), key=int) == [str(number) for number in range(ROUNDS)]


def test_a_winner_whose_answer_was_lost_is_still_the_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def asked_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", asked_twice)
    assert claims.take(tmp_path, Claim(number=0, job="1"))
    assert not claims.take(tmp_path, Claim(number=0, job="2"))
    assert os.listdir(tmp_path) == ["0"]
    holder = claims.newest(tmp_path)
    assert holder is not None and holder.job == "1"


def test_two_processes_of_one_name_are_told_apart_by_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that SLURM runs again, in a container, say: all but the token is the same."""
    same = {"number": 0, "job": "1", "restart": 0, "host": "node", "pid": 1, "time": 1.0}
    first, second = (Claim(**same) for _ in range(2))  # type: ignore[arg-type]
    assert first != second
    assert claims.take(tmp_path, first)
    assert not claims.take(tmp_path, second)
    assert claims.newest(tmp_path) == first


def test_a_file_system_without_links_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(AllranksError, match="has no hard links"):
        claims.take(tmp_path, Claim(number=0))
    assert os.listdir(tmp_path) == []


def test_a_claim_says_who_and_where(tmp_path: Path) -> None:
    claim = Claim(number=3, job="17", restart=2, layout="2x2", nodes=("a", "b"))
    assert claims.take(tmp_path, claim)
    assert claims.newest(tmp_path) == claim
    assert claim.pid == os.getpid()


def test_a_holder_that_nobody_has_reaped_is_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as holder:
        assert Claim(number=0, pid=holder.pid).is_alive_here
        holder.kill()
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        assert not Claim(number=0, pid=holder.pid).is_alive_here


def test_the_newest_is_the_highest_number(tmp_path: Path) -> None:
    assert claims.newest(tmp_path / "none") is None
    assert claims.all_of(tmp_path / "none") == []
    for number in (0, 9, 10):
        take(tmp_path, number, job=f"job{number}")
    (tmp_path / ".11.host.1.abcd").write_text("half of a cl")  # of one that was killed
    holder = claims.newest(tmp_path)
    assert holder is not None and holder.number == 10
    assert [claim.number for claim in claims.all_of(tmp_path)] == [0, 9, 10]


def test_an_older_holder_is_told_that_it_lost_the_run(tmp_path: Path) -> None:
    take(tmp_path, 0, job="1")
    claims.raise_if_lost(tmp_path, 0)
    take(tmp_path, 1, job="2", host="node7")
    claims.raise_if_lost(tmp_path, 1)
    with pytest.raises(AllranksError, match="lost the run to job 2 on node7") as refusal:
        claims.raise_if_lost(tmp_path, 0)
    assert refusal.value.exit_code == 1
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_a_holder_outside_of_slurm_is_named_by_its_process(tmp_path: Path) -> None:
    take(tmp_path, 0, job="1")
    take(tmp_path, 1)
    with pytest.raises(AllranksError, match=f"lost the run to process {os.getpid()} on"):
        claims.raise_if_lost(tmp_path, 0)


def test_a_rank_checks_the_claim_that_it_works_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(tmp_path, 0)
    take(tmp_path, 1)
    monkeypatch.delenv(claims.VARIABLE, raising=False)
    claims.raise_if_lost(tmp_path, claims.own())  # under none
    monkeypatch.setenv(claims.VARIABLE, "1")
    claims.raise_if_lost(tmp_path, claims.own())
    monkeypatch.setenv(claims.VARIABLE, "0")
    with pytest.raises(AllranksError, match="lost the run"):
        claims.raise_if_lost(tmp_path, claims.own())


def test_a_locked_claim_makes_a_run_live_until_its_holder_is_killed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    take(run.claims, 0)
    assert not run.is_live()
    command = [sys.executable, "-c", HOLDER, str(run.claims), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            assert run.is_live()
            assert run.state() == "running"
            take(run.claims, 1)  # a lost holder that still lives is not the run's any more
            assert not run.is_live()
        finally:
            process.kill()
    assert not run.is_live()


def test_a_lock_of_ones_own_is_seen_and_ends_with_its_descriptor(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    take(run.claims, 0)
    with claims.locked(run.claims, 0):
        assert run.is_live()
    assert not run.is_live()
