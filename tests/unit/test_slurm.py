"""SLURM's commands: what they say, what it means, and what to do about it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from allranks.errors import AllranksError
from allranks.slurm.commands import (
    SlurmError,
    call,
    clean_words,
    environment,
    is_here,
    parse_job_id,
)
from allranks.slurm.reasons import words

BATCH = "sbatch: error: Batch job submission failed: "
# SLURM's sentence, a word of what it means, a word of the fix
SENTENCES = {
    "account": (
        BATCH + "Invalid account or account/partition combination specified",
        "not yours",
        "slurm.account=",
    ),
    "partition": (
        "sbatch: error: invalid partition specified: nope\n"
        + BATCH
        + "Invalid partition name specified",
        "no such partition",
        "slurm.partition=",
    ),
    "group": (
        BATCH + "User's group not permitted to use this partition",
        "may not use this partition",
        "another one",
    ),
    "gpus": (
        BATCH + "Requested node configuration is not available",
        "that many GPUs",
        "fewer GPUs",
    ),
    "nodes": (
        BATCH + "Node count specification invalid",
        "more nodes",
        "fewer nodes",
    ),
    "time": (
        BATCH + "Requested time limit is invalid (missing or exceeds some limit)",
        "over the limit",
        "shorter slurm.time",
    ),
    "qos": (BATCH + "Invalid qos specification", "QOS does not exist", "slurm.qos="),
    "limits": (
        "sbatch: error: QOSMaxSubmitJobPerUserLimit\n"
        + BATCH
        + "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
        "limit of your account or QOS",
        "wait for your other jobs",
    ),
    "gres": (
        BATCH + "Invalid generic resource (gres) specification",
        "no GPUs under that name",
        "gpus-per-node",
    ),
    "feature": (BATCH + "Invalid feature specification", "features", "slurm.constraint"),
    "reservation": (
        BATCH + "Requested reservation is invalid",
        "reservation does not exist",
        "scontrol show reservation",
    ),
    "memory": (
        BATCH + "Memory specification can not be satisfied",
        "that much memory",
        "smaller slurm.mem",
    ),
    "dependency": (BATCH + "Job dependency problem", "is gone", "slurm.dependency"),
    "rights": ("scancel: error: Kill job error on job id 7: Access/permission denied", "", "rules"),
    "gone": (
        "slurm_load_jobs error: Invalid job id specified",
        "left the queue",
        "allranks ls",
    ),
    "option": (
        "sbatch: unrecognized option '--frobnicate=1'\nTry \"sbatch --help\" for more information",
        "does not know one of the directives",
        "submit.sbatch",
    ),
    "no configuration": (
        "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "sbatch: error: fetch_config: DNS SRV lookup failed\n"
        "sbatch: fatal: Could not establish a configuration source",
        "not configured for a cluster",
        "SLURM_CONF",
    ),
}
SILENCES = [
    BATCH + "Unable to contact slurm controller (connect failure)",
    "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    BATCH + "Socket timed out on send/recv operation",
    "sbatch: error: Slurm backup controller in standby mode",
    BATCH + "Zero Bytes were transmitted or received",
    "allocation failure: Unable to contact slurm controller (connect failure)",
    BATCH + "Resource temporarily unavailable",
]


@pytest.mark.parametrize("case", SENTENCES, ids=lambda case: case.replace(" ", "-"))
def test_a_refusal_has_slurms_words_their_meaning_and_a_fix(case: str) -> None:
    words, meaning, fix = SENTENCES[case]
    error = SlurmError("sbatch", words)
    last = clean_words(words.splitlines()[-1] if case != "option" else words.splitlines()[0])
    assert last in error.what
    assert last in error.words
    assert meaning in error.what
    assert fix in error.fix
    assert error.exit_code == 1
    assert not error.is_silence
    assert "sbatch: error:" not in error.what


@pytest.mark.parametrize("words", SILENCES)
def test_a_controller_that_is_down_is_silence(words: str) -> None:
    error = SlurmError("sbatch", words)
    assert error.is_silence
    assert "did not answer" in error.what
    assert "scontrol ping" in error.fix


def test_what_is_not_known_is_repeated_and_nothing_is_named_as_such() -> None:
    error = SlurmError("sbatch", "sbatch: error: lua: come back on Monday\n")
    assert error.what == "sbatch: lua: come back on Monday"
    assert "man sbatch" in error.fix
    assert SlurmError("squeue", " \n").what == "squeue: no reason given"


def test_a_sentence_that_comes_twice_is_said_once() -> None:
    words = BATCH + "Invalid qos specification"
    assert SlurmError("sbatch", f"{words}\n{words}").words.count("Invalid qos") == 1


@pytest.mark.parametrize(
    ("line", "cleaned"),
    [
        ("sbatch: error: Invalid qos", "Invalid qos"),
        ("  sbatch: fatal: error: x: y ", "x: y"),
        ("slurm_load_jobs error: Invalid job id", "slurm_load_jobs error: Invalid job id"),
        ("plain", "plain"),
        ("", ""),
    ],
)
def test_words_without_the_program(line: str, cleaned: str) -> None:
    assert clean_words(line) == cleaned


def test_every_refusal_says_what_to_do() -> None:
    assert all(row["meaning"] and row["fix"] for row in words()["refusals"])


# --- Job ids ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "job"),
    [
        ("123\n", "123"),
        ("123;cluster\n", "123"),
        ("Welcome to the site!\nyour balance: 12\n 77 \n", "77"),
        ("5\n\nthank you\n", "5"),
    ],
)
def test_the_job_id_in_what_sbatch_prints(printed: str, job: str) -> None:
    assert parse_job_id(printed) == job


@pytest.mark.parametrize("printed", ["", "Submitted batch job 12", "12a", "-3", "1 2"])
def test_an_answer_without_a_job_id_is_an_error(printed: str) -> None:
    with pytest.raises(SlurmError, match="no job id in its answer"):
        parse_job_id(printed)


# --- Environment --------------------------------------------------------------------------------

ENVIRONMENT = {
    "HOME": "/home/me",
    "LC_ALL": "de_DE.UTF-8",
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_JOB_ID": "7",
    "SLURM_TIME_FORMAT": "relative",
    "SLURMD_NODENAME": "n1",
    "SQUEUE_FORMAT": "%j",
    "SQUEUE_SORT": "i",
    "SINFO_FORMAT": "%n",
    "SACCT_FORMAT": "user",
    "SBATCH_ACCOUNT": "theirs",
    "SCANCEL_STATE": "PENDING",
    "ALLRANKS_CLAIM": "3",
    "ALLRANKS_RUNS": "/runs",
}


def test_what_users_set_for_their_eyes_does_not_change_what_is_read() -> None:
    kept = environment(ENVIRONMENT, "squeue")
    assert kept == {
        "HOME": "/home/me",
        "LC_ALL": "C",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": "n1",
        "ALLRANKS_CLAIM": "3",
        "ALLRANKS_RUNS": "/runs",
    }


def test_a_job_inherits_nothing_of_the_job_it_is_sent_from() -> None:
    assert environment(ENVIRONMENT, "sbatch") == {
        "HOME": "/home/me",
        "LC_ALL": "de_DE.UTF-8",
        "SLURM_CONF": "/etc/slurm.conf",
        "ALLRANKS_RUNS": "/runs",
    }


# --- Calling ------------------------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install(folder: Path, name: str, body: str, mode: int = 0o755) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(mode)


def test_a_program_that_answers(programs: Path) -> None:
    install(programs, "squeue", 'echo "$1,$2,$LC_ALL"; echo aside >&2')
    assert call("squeue", "-h", "a b") == "-h,a b,C\n"
    assert call("squeue", both=True) == ",,C\naside\n"
    assert not is_here()
    install(programs, "sbatch", "true")
    assert is_here()


def test_bytes_that_are_no_text_do_no_harm(programs: Path) -> None:
    install(programs, "squeue", r"printf 'a\377b'")
    assert call("squeue") == "a\ufffdb"


@pytest.mark.parametrize("mode", [None, 0o644])
def test_a_program_that_is_missing(programs: Path, mode: int | None) -> None:
    if mode is not None:
        install(programs, "sbatch", "true", mode)
    with pytest.raises(SlurmError, match="sbatch: no such command") as error:
        call("sbatch")
    assert "allranks run" in error.value.fix
    assert not error.value.is_silence
    assert isinstance(error.value, AllranksError)


def test_a_program_that_refuses_on_either_stream(programs: Path) -> None:
    install(programs, "sbatch", f"echo '{BATCH}Invalid qos specification' >&2; exit 1")
    with pytest.raises(SlurmError, match="Invalid qos specification"):
        call("sbatch")
    install(programs, "sbatch", "echo 'Invalid qos specification'; exit 3")
    with pytest.raises(SlurmError, match="Invalid qos specification"):
        call("sbatch")


def test_a_program_that_does_not_answer_in_time(programs: Path) -> None:
    install(programs, "squeue", "exec /bin/sleep 30")
    started = time.monotonic()
    with pytest.raises(SlurmError, match="no answer for 0 seconds") as error:
        call("squeue", seconds=0.3)
    assert time.monotonic() - started < 25
    assert error.value.is_silence
