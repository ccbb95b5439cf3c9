"""A test that leaves something behind is failed, and the one after it is not."""

import os
import subprocess
import sys
from pathlib import Path

LEAKS = """
import os, signal, subprocess, threading, time

def test_variable():
    os.environ["LEAKED"] = "1"

def test_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])

def test_thread():
    threading.Thread(target=time.sleep, args=(9,), name="lazy", daemon=True).start()

def test_orphan():
    subprocess.run(["sh", "-c", "sleep 100 & exit 0"])

def test_nothing(monkeypatch):
    assert "LEAKED" not in os.environ
    monkeypatch.setenv("MENDED", "1")
    subprocess.run(["true"])
"""


def test_leaks_are_found(tmp_path: Path) -> None:
    conftest = (Path(__file__).parents[1] / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest.replace("SECONDS = 20.0", "SECONDS = 0.2"))
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    # Its own marker of processes, not this session's.
    env = {name: value for name, value in os.environ.items() if name != "ALLRANKS_TESTS"}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "pytest", "-q", "-rE", "-p", "no:cacheprovider"]
    outcome = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert "5 passed, 4 errors" in outcome.stdout
    assert "left behind: variable LEAKED" in outcome.stdout
    assert "left behind: signal 2" in outcome.stdout
    assert "left behind: thread lazy" in outcome.stdout
    assert "sleep 100" in outcome.stdout
