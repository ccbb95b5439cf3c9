"""Explains SLURM's reasons: why a job is waiting, and why one has ended."""

from __future__ import annotations

import re
import signal

# States of a job on its nodes; squeue lists those in any other because they wait.
RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "SUSPENDED", "STOPPED")

WAITING = {
    "none": "not looked at by the scheduler yet",
    "waitingforscheduling": "not looked at by the scheduler yet",
    "scheddefer": "waits for the scheduler's next full pass",
    "resources": "next in line: waits for nodes or GPUs to become free",
    "priority": "jobs with a higher priority come first",
    "dependency": "waits for the jobs it depends on",
    "dependencyneversatisfied": "never starts: a job it depends on did not end as required",
    "begintime": "not before its begin time (a requeued job waits a minute or two as well)",
    "jobhelduser": "held by its user; scontrol release JOB releases it",
    "jobheldadmin": "held by the administrators",
    "jobholdmaxrequeue": "held: it was requeued too often",
    "maxrequeue": "held: it was requeued too often",
    "launchfailedrequeuedheld": "held: its start failed; scontrol release JOB tries again",
    "joblaunchfailure": "its start failed on a node",
    "reqnodenotavail": "nodes it needs are down, drained or reserved (often for maintenance)",
    "nodedown": "a node it needs is down",
    "nodesrequiredforjobaredowndrainedorreservedforjobsinhigherprioritypartitions": (
        "nodes it needs are down, drained or reserved for partitions that come first"
    ),
    "partitiondown": "the partition takes no new jobs for now",
    "partitioninactive": "the partition is closed for now",
    "partitionnodelimit": "asks for more (or fewer) nodes than the partition allows",
    "partitiontimelimit": "asks for more time than the partition allows",
    "partitionconfig": "asks for more time, nodes or resources than the partition has",
    "reservation": "waits for its reservation to begin",
    "reservationdeleted": "never starts: its reservation is gone",
    "licenses": "waits for a licence",
    "jobarraytasklimit": "as many tasks of its array are running as it allows",
    "arraytasklimit": "as many tasks of its array are running as it allows",
    "badconstraints": "never starts: no node can satisfy what it asks for",
    "accountnotallowed": "its account may not use this partition",
    "accountingpolicy": "a limit of its account or QOS is reached",
    "invalidaccount": "its account is no longer valid",
    "invalidqos": "its QOS is no longer valid",
    "qosnotallowed": "its QOS may not be used here",
    "qosusagethreshold": "the account has used more than its QOS allows",
    "associationjoblimit": "its account is running as many jobs as it may",
    "associationresourcelimit": "its account is using as much as it may",
    "associationtimelimit": "its account has used up its time",
    "maxmemperlimit": "asks for more memory than the limit",
    "deadline": "can no longer end before its deadline",
    "inactivelimit": "waited longer than the site allows",
    "cleaning": "its last attempt is still being cleaned up",
    "prolog": "its nodes are being prepared",
    "nodesbooting": "its nodes are starting",
    "burstbufferresources": "waits for space in the burst buffer",
    "burstbufferstagein": "its data are being copied in",
    "burstbufferoperation": "the burst buffer is busy",
    "frontenddown": "no front end is up",
    "powernotavail": "waits for electrical power",
    "powerreserved": "the power it needs is reserved for later",
    "fedjoblock": "another cluster of the federation decides first",
    "nonzeroexitcode": "its last attempt failed",
    "raisedsignal": "its last attempt was killed by a signal",
    "systemfailure": "SLURM or a node failed",
    "timelimit": "its last attempt ran out of time",
    "outofmemory": "its last attempt ran out of memory",
}
# What is limited, in names such as QOSMaxGRESPerUser or AssocGrpCPURunMinutesLimit.
LIMITED = (
    ("submitjob", "jobs in the queue"),
    ("jobs", "running jobs"),
    ("gres", "GPUs"),
    ("gpu", "GPUs"),
    ("node", "nodes"),
    ("cpu", "CPUs"),
    ("mem", "memory"),
    ("billing", "billing units"),
    ("wall", "time"),
    ("energy", "energy"),
    ("license", "licences"),
    ("bb", "burst buffer"),
)
OF_WHOM = (
    ("peruser", "one user"),
    ("peraccount", "one account"),
    ("perjob", "one job"),
    ("pernode", "one node"),
)

ENDS = {
    "COMPLETED": "finished",
    "TIMEOUT": "reached its time limit",
    "OUT_OF_MEMORY": "ran out of the node's memory: ask for more slurm.mem_per_gpu",
    "NODE_FAIL": "a node failed",
    "PREEMPTED": "preempted by a job with a higher priority",
    "BOOT_FAIL": "a node did not start",
    "DEADLINE": "reached its deadline",
    "REQUEUED": "put back into the queue",
    "REVOKED": "went to another cluster of the federation",
    "SPECIAL_EXIT": "put back into the queue and held",
    "LAUNCH_FAILED": "could not be started",
    "RECONFIG_FAIL": "a node could not be set up",
    "PENDING": "waits",
    "RUNNING": "runs",
    "SUSPENDED": "suspended",
    "RESIZING": "changes its size",
    "COMPLETING": "is ending",
    "CONFIGURING": "its nodes are being prepared",
}
SIGNALS = {
    signal.SIGKILL: "killed; if not by a time limit or scancel, usually for its memory",
    signal.SIGTERM: "told to end",
    signal.SIGSEGV: "crashed: a memory fault in native code",
    signal.SIGBUS: "crashed: often /dev/shm is full; fewer data workers, or more of it",
    signal.SIGABRT: "aborted itself: an assertion, or NCCL's watchdog",
    signal.SIGINT: "interrupted",
    signal.SIGFPE: "crashed: a division by zero",
    signal.SIGILL: "crashed: an instruction its CPU cannot run, often AMX in a virtual machine",
    signal.SIGXCPU: "reached its limit of CPU time",
}
CODES = {
    2: "wrong usage or job file",
    75: "stopped at a checkpoint: resume continues",
    126: "its command may not be executed",
    127: "its command was not found",
}
SLURM_CANNOT_WRITE = 53  # these two are codes of SLURM's own, which it reports as signals
SLURM_OUT_OF_MEMORY = 125


def waiting_reason(text: str) -> str:
    """Explains why a job waits, given squeue's %r or %R; returns the text itself if unknown."""
    said = text.strip().strip("()").strip()
    key = re.sub(r"[^a-z]", "", said.lower())
    if not key:
        return WAITING["none"]
    if key in WAITING:
        return WAITING[key]
    head, _, rest = said.partition(",")  # ReqNodeNotAvail, UnavailableNodes:node[1-3]
    head = re.sub(r"[^a-z]", "", head.lower())
    if rest and head in WAITING:
        nodes = re.search(r"Nodes:\s*([^\s,()]\S*)", rest)
        return WAITING[head] + (f": {nodes[1]}" if nodes else "")
    return _limit(key) or said


def _limit(key: str) -> str | None:
    match = re.fullmatch(r"(assoc|qos)?(grp|max|min)(.*)", key)
    if match is None:
        return None
    where, kind, rest = match.groups()
    what = next((words for name, words in LIMITED if name in rest), None)
    if what is None:
        return None
    if "minutes" in rest or "mins" in rest:
        what = {"GPUs": "GPU time", "CPUs": "CPU time"}.get(what, f"time on {what}")
    owner = {"assoc": "account", "qos": "QOS"}.get(where or "", "account or QOS")
    if kind == "min":
        return f"asks for fewer {what} than the {owner} demands"
    whom = next((words for name, words in OF_WHOM if name in rest), None)
    if "walldurationperjob" in rest:
        return f"asks for more time than the {owner} allows one job"
    if kind == "grp":
        return f"the {owner}'s limit on {what}, of all its jobs together, is reached"
    return f"the {owner}'s limit on {what}{f' of {whom}' if whom else ''} is reached"


def end_reason(state: str, exit_code: str = "", cancelled_by: str | None = None) -> str:
    """Explains why a job ended, given sacct's State and ExitCode.

    `cancelled_by` is a name to show in place of the number in 'CANCELLED by 1000'.
    """
    words = state.strip().split()
    name = words[0].upper() if words else ""
    if name.endswith("+"):  # truncated by sacct: OUT_OF_ME+
        name = name.rstrip("+")
        known_states = (*ENDS, "CANCELLED", "FAILED")
        name = next((whole for whole in known_states if name and whole.startswith(name)), name)
    if name == "CANCELLED":
        return _cancelled(words, cancelled_by)
    ended = _exit(exit_code)
    if name == "FAILED":
        return f"failed: {ended}" if ended else "failed"
    if name == "COMPLETED" and ended:
        return f"finished, but: {ended}"
    known = ENDS.get(name)
    if known is not None:
        return known
    return "unknown" if not name else name.lower().replace("_", " ")


def _cancelled(words: list[str], by: str | None) -> str:
    if by is None and len(words) > 2 and words[1] == "by":
        by = {"0": "root (the administrators or SLURM)"}.get(words[2], f"user {words[2]}")
    return f"cancelled by {by}" if by else "cancelled"


def _exit(exit_code: str) -> str | None:
    """What `code:signal` means; None for 0:0 and for anything else that is not an exit code."""
    match = re.fullmatch(r"\s*(\d{1,9})(?::(\d{1,9}))?\s*", exit_code)
    if match is None:
        return None
    code, number = int(match[1]), int(match[2] or 0)
    if number == SLURM_OUT_OF_MEMORY:
        return ENDS["OUT_OF_MEMORY"]
    if number == SLURM_CANNOT_WRITE:
        return "SLURM could not write the job's output, or could not enter its folder"
    if 128 < code < 160 and not number:  # as a shell reports it
        number = code - 128
    if number:
        try:
            known = signal.Signals(number)
        except ValueError:
            return f"signal {number}"
        return f"{SIGNALS.get(known, 'ended by a signal')} ({known.name})"
    return f"exit code {code}{f', {CODES[code]}' if code in CODES else ''}" if code else None
