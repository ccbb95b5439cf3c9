"""Runs on hosts over ssh: two machines in network namespaces, each with an sshd. Needs root."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.slurm.live import unavailable
from tests.slurm.runs import SLOW_TASK
from tests.ssh.hosts import SSHD, Hosts, two_hosts

from allranks.run import commits
from allranks.run.folder import RunDir, find_run

pytestmark = pytest.mark.ranks

SECRET = "hush-hush-4711"
JOB = "task: slow:Slow\nbatch_size: 32\ncheckpoint: {every: 1000}\n"
JOB += f"env: {{API_TOKEN: {SECRET}}}\n"
LONG, SHORT = "steps=100000", "steps=12"


@contextlib.contextmanager
def hosts_in(folder: Path, unshared: Path | None = None) -> Iterator[Hosts]:
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "ssh", "rsync", SSHD))):
        unavailable("ssh hosts need root, openssh-server, rsync, iproute2 and util-linux")
    folder.mkdir()
    try:
        with two_hosts(folder, unshared) as hosts:
            yield hosts
    except subprocess.CalledProcessError as error:
        unavailable(f"no network namespaces here: {error.stderr}")


class Work:
    """A user's folder, from which hosts are reached."""

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        self.folder, self.hosts = folder, hosts
        (folder / "job.yaml").write_text(JOB)
        (folder / "slow.py").write_text(SLOW_TASK)
        self.env = {**os.environ, "PATH": f"{hosts.bin}:{os.environ['PATH']}"}
        self.process: subprocess.Popen[str] | None = None

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "allranks", *words]
        self.process = subprocess.Popen(
            command, cwd=self.folder, env=self.env, text=True, stdout=-1, stderr=-2
        )
        return self.process

    def run(self, *words: str) -> tuple[int, str]:
        process = self.start(*words)
        said, _ = process.communicate(timeout=240)
        return process.returncode, said

    def ended(self) -> tuple[int, str]:
        assert self.process is not None
        said, _ = self.process.communicate(timeout=240)
        return self.process.returncode, said

    @property
    def last(self) -> RunDir:
        return find_run(self.folder / "runs", "last")

    def wait_for_step(self, attempt: int) -> None:
        until = time.monotonic() + 240
        while True:
            assert self.process is not None
            found = list((self.folder / "runs").glob(f"*/attempts/{attempt}/rank-0.jsonl"))
            if found and '"event":"step"' in found[0].read_text():
                return
            assert time.monotonic() < until and self.process.poll() is None, self.ended()
            time.sleep(0.2)


def check_secret(run: RunDir) -> None:
    """It is with the ranks, and in one file that only its user can read; nowhere else."""
    holders, variable = [], f"API_TOKEN={SECRET}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            words, env = ((folder / name).read_bytes() for name in ("cmdline", "environ"))
            assert SECRET.encode() not in words
            holders += [words.split(b"\0")[2]] if variable in env.split(b"\0") else []
    assert holders == [b"allranks.launch.rank_env"] * 2
    kept = [file for file in run.path.rglob("*") if file.is_file()]
    (only,) = [file for file in kept if SECRET.encode() in file.read_bytes()]
    assert (only.name, stat.S_IMODE(only.stat().st_mode)) == ("secrets.json", 0o600)


def steps(run: RunDir, attempt: int) -> list[int]:
    lines = run.events(attempt, 0).read_text().splitlines()
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [event["step"] for event in events if event["event"] == "step"]


def test_a_run_on_two_hosts_is_stopped_resumed_loses_a_host_and_goes_on(tmp_path: Path) -> None:
    work_folder = tmp_path / "work"
    work_folder.mkdir()
    with hosts_in(tmp_path / "ssh") as hosts:
        work = Work(work_folder, hosts)
        launcher = work.start("run", "job.yaml", LONG, "--hosts", "a,b", "--layout", "2x1")
        work.wait_for_step(0)
        run = work.last
        check_secret(run)
        code, said = work.run("watch", run.name, "--once")
        assert code == 0 and run.name in said and "running" in said, said
        (seen,) = json.loads(work.run("watch", run.name, "--json")[1])
        assert (seen["state"], len(seen["ranks"])) == ("running", 2)
        assert run.name in work.run("status")[1]
        assert work.run("stop", run.name) == (0, f"{run.name}: saves a checkpoint and stops\n")
        said, _ = launcher.communicate(timeout=240)
        assert (launcher.returncode, run.state()) == (75, "stopped"), said
        info = run.info()
        assert (info["backend"], info["hosts"]) == ("ssh", ["a", "b"])
        last = commits.commits(run.checkpoints)[0]
        assert last.damage() is None
        assert not list(run.path.glob(".door-*"))
        code, said = work.run("logs", run.name, "--rank", "-1")
        assert code == 0 and "GLOO_SOCKET_IFNAME=eth0" in said

        work.start("resume", "last")
        work.wait_for_step(1)
        assert steps(run, 1)[0] == last.step + 1  # at the very next one
        hosts.crash("b")
        code, said = work.ended()
        assert code == 1 and "error: host b was lost in attempt 1" in said, said
        assert run.state() == "failed"

        last = commits.commits(run.checkpoints)[0]  # attempt 1 may have saved another
        more = f"steps={last.step + 3}"
        code, said = work.run("resume", "last", more, "--hosts", "a", "--layout", "1x1")
        assert code == 0 and run.state() == "finished", said
        assert steps(run, 2)[-1] == last.step + 3
        code, said = work.run("run", "job.yaml", SHORT, "--hosts", "a,b", "--layout", "2x1")
        assert code == 1 and "host b cannot be used" in said and "ssh b true" in said


def test_hosts_that_do_not_share_the_folder_get_a_copy_and_give_back_what_they_wrote(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    with hosts_in(tmp_path / "ssh", unshared=folder) as hosts:
        work = Work(folder, hosts)
        process = work.start("run", "job.yaml", LONG, "--hosts", "a,b", "--layout", "2x1")
        work.wait_for_step(0)
        process.send_signal(signal.SIGINT)  # a Ctrl-C
        code, said = work.ended()
        assert code == 75, said
        run = work.last
        last = commits.commits(run.checkpoints)[0]
        assert last.damage() is None  # the parts of both hosts are here
        assert all(run.end(0, rank) for rank in (0, 1))
        code, said = work.run("resume", "last", f"steps={last.step + 3}")
        assert code == 0, said
        assert steps(run, 1)[0] == last.step + 1
        assert run.state() == "finished"
