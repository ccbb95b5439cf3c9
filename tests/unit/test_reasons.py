"""SLURM's reasons in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.slurm.reasons import end_reason, waiting_reason, words

MEMORY = words()["ends"]["OUT_OF_MEMORY"]

# What squeue of SLURM 20.02 to 25.05 shows, and a word that the answer must have.
WAITING_TEXTS = {
    "Resources": "free",
    "(Resources)": "free",
    "Priority": "higher priority",
    "None": "not looked at",
    "": "not looked at",
    "Dependency": "depends on",
    "DependencyNeverSatisfied": "never starts",
    "BeginTime": "begin time",
    "JobHeldUser": "scontrol release",
    "JobHeldAdmin": "administrators",
    "(launch failed requeued held)": "held",
    "PartitionTimeLimit": "more time than the partition",
    "PartitionNodeLimit": "nodes",
    "Licenses": "licence",
    "Reservation": "reservation",
    "ReqNodeNotAvail": "down, drained or reserved",
    "(ReqNodeNotAvail, May be reserved for other job)": "down, drained or reserved",
    "ReqNodeNotAvail, UnavailableNodes:gpu[01-03,07]": "gpu[01-03,07]",
    "(Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority "
    "partitions)": "come first",
    "QOSMaxGRESPerUser": "QOS's limit on GPUs of one user",
    "QOSMaxCpuPerUserLimit": "QOS's limit on CPUs of one user",
    "QOSMaxJobsPerUserLimit": "running jobs of one user",
    "QOSMaxSubmitJobPerUserLimit": "jobs in the queue of one user",
    "QOSMaxMemoryPerUser": "memory of one user",
    "QOSMaxWallDurationPerJobLimit": "more time than the QOS allows",
    "QOSGrpGRES": "limit on GPUs, for all its jobs together",
    "QOSGrpNodeLimit": "nodes",
    "QOSMinGRES": "fewer GPUs than the QOS",
    "AssocGrpGRES": "account's limit on GPUs",
    "AssocGrpGRESMinutes": "GPU time",
    "AssocGrpCPUMinutesLimit": "CPU time",
    "AssocGrpCPURunMinutesLimit": "CPU time",
    "AssocGrpBillingMinutes": "time on billing units",
    "AssocMaxJobsLimit": "account's limit on running jobs",
    "AssocMaxWallDurationPerJobLimit": "more time than the account allows",
    "MaxGRESPerAccount": "GPUs of one account",
    "JobArrayTaskLimit": "array",
    "BadConstraints": "no node",
}


@pytest.mark.parametrize(("text", "part"), WAITING_TEXTS.items())
def test_reasons_of_waiting_are_in_words(text: str, part: str) -> None:
    assert part in waiting_reason(text)


def test_an_unknown_reason_is_shown_as_it_is() -> None:
    assert waiting_reason("(SolarEclipse)") == "SolarEclipse"
    assert waiting_reason("QOSMaxSolarPerUser") == "QOSMaxSolarPerUser"


def test_every_row_of_the_table_can_be_found() -> None:
    assert all(waiting_reason(key) == meaning for key, meaning in words()["waiting"].items())


@given(st.text())
def test_any_text_is_a_reason(text: str) -> None:
    assert waiting_reason(text)
    assert end_reason(text, text)


END_TEXTS = {
    ("FAILED", "1:0"): "failed: exit code 1",
    ("FAILED", "2:0"): "failed: exit code 2, wrong usage or job file",
    ("FAILED", "127:0"): "failed: exit code 127, its command was not found",
    ("FAILED", "75:0"): "failed: exit code 75, stopped at a checkpoint: resume continues",
    ("FAILED", "0:9"): "failed: killed; if not by a time limit or scancel, usually for its memory "
    "(SIGKILL)",
    (
        "FAILED",
        "137:0",
    ): "failed: killed; if not by a time limit or scancel, usually for its memory (SIGKILL)",
    ("FAILED", "0:15"): "failed: told to end (SIGTERM)",
    (
        "FAILED",
        "0:53",
    ): "failed: SLURM could not write the job's output, or could not enter its folder",
    ("FAILED", "0:125"): f"failed: {MEMORY}",
    ("FAILED", "255:0"): "failed: exit code 255",
    ("FAILED", ""): "failed",
    ("TIMEOUT", "0:0"): "reached its time limit",
    ("TIMEOUT", "0:1"): "reached its time limit",
    ("OUT_OF_MEMORY", "0:125"): MEMORY,
    ("OUT_OF_ME+", "0:125"): MEMORY,
    ("NODE_FAIL", "1:0"): "a node failed",
    ("PREEMPTED", "0:0"): "preempted by a job with a higher priority",
    ("BOOT_FAIL", "0:0"): "a node did not start",
    ("DEADLINE", "0:0"): "reached its deadline",
    ("REQUEUED", "0:0"): "put back into the queue",
    ("CANCELLED by 1000", "0:15"): "cancelled by user 1000",
    ("CANCELLED by 0", "0:0"): "cancelled by root (the administrators or SLURM)",
    ("CANCELLED+", "0:0"): "cancelled",
    ("SOMETHING_NEW", "0:0"): "something new",
    ("", ""): "unknown",
}


@pytest.mark.parametrize(("end", "said"), END_TEXTS.items())
def test_ends_are_in_words(end: tuple[str, str], said: str) -> None:
    assert end_reason(*end) == said
