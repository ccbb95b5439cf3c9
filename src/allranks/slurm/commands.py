"""Calls SLURM's commands, which nothing else does, and explains their refusals.

Only text formats that have not changed since 20.02 are read: JSON is not available everywhere, and
where it is, it ignores filters and gets exit codes wrong.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from allranks.errors import AllranksError
from allranks.machine.processes import die_with_parent

ANSWER_SECONDS = 60.0


class SlurmError(AllranksError):
    """SLURM refused, or did not answer. `words` is its own message."""

    def __init__(self, what: str, *, fix: str, words: str = "", meaning: str = "") -> None:
        super().__init__(what, fix=fix, exit_code=1)
        self.words = words
        self.meaning = meaning  # of that message, if it is known

    @property
    def is_silence(self) -> bool:
        """Whether the controller did not answer: it may do so later."""
        return bool(re.search(SILENCE, self.words, re.IGNORECASE))


SILENCE = (
    r"unable to contact slurm controller|socket timed out|connection refused|no answer"
    r"|slurm backup controller|zero bytes were transmitted|communication connection failure"
    r"|resource temporarily unavailable|unable to establish controller"
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A message of SLURM's, what it means, and what to change."""

    pattern: str
    meaning: str
    fix: str


REFUSALS = (
    Refusal(
        SILENCE,
        "the controller of the cluster did not answer",
        "try again in a minute; `scontrol ping` says whether it is up",
    ),
    Refusal(
        r"could not establish a configuration source|failed to fetch config",
        "SLURM's commands are here, but they do not know the cluster",
        "log in to a login node of the cluster, or set SLURM_CONF to its slurm.conf",
    ),
    Refusal(
        r"invalid account",
        "the account is not yours, or may not use this partition",
        "write slurm.account=NAME, one of those that `allranks cluster` lists",
    ),
    Refusal(
        r"invalid partition|partition.*(not available|does not exist|not found)",
        "there is no such partition here",
        "write slurm.partition=NAME, one of those that `allranks cluster` lists",
    ),
    Refusal(
        r"user's group not permitted|access.*denied to.*partition",
        "you may not use this partition",
        "choose another one (`allranks cluster` lists them), or ask the site for access",
    ),
    Refusal(
        r"invalid qos",
        "the QOS does not exist, or is not yours",
        "write slurm.qos=NAME, one of those that `allranks cluster` lists, or remove slurm.qos",
    ),
    Refusal(
        r"time limit is invalid|time limit.*exceeds|qosmaxwalldurationperjob|partitiontimelimit",
        "slurm.time is over the limit of the partition or the QOS, or missing where it is required",
        "write a shorter slurm.time: the run continues by itself in the next job",
    ),
    Refusal(
        r"node configuration is not available|requested nodes? .*not available",
        "no node of the partition has that many GPUs or CPUs, that much memory, or that type",
        "compare with `allranks cluster`: fewer GPUs per node, another slurm.gpu, "
        "smaller slurm.cpus_per_gpu or slurm.mem_per_gpu, or another partition",
    ),
    Refusal(
        r"node count specification invalid|partitionnodelimit|too many nodes|requested too many",
        "the layout has more nodes than the partition allows or has",
        "write a layout of fewer nodes, or another slurm.partition",
    ),
    Refusal(
        r"invalid (generic resource|gres)|invalid gres|gres specification",
        "this cluster has no GPUs under that name",
        "write slurm.gpu=TYPE as `allranks cluster` shows it, try "
        "slurm.gpu_request=gpus-per-node, or slurm.gpus=0 for a job without GPUs",
    ),
    Refusal(
        r"invalid feature|invalid constraint",
        "no node has these features",
        "write slurm.constraint with features that `allranks cluster` lists",
    ),
    Refusal(
        r"reservation.*(invalid|not)|invalid reservation",
        "the reservation does not exist, is over, or is not yours",
        "see `scontrol show reservation`, or remove slurm.reservation",
    ),
    Refusal(
        r"memory specification|memory.*(invalid|limit)",
        "no node has that much memory",
        "write a smaller slurm.mem or slurm.mem_per_gpu",
    ),
    Refusal(
        r"assoc.*limit|accounting/qos policy|qos.*(limit|max)|assocmax|maxsubmit",
        "a limit of your account or QOS is reached (GPUs, jobs or time)",
        "wait for your other jobs, ask for less, or use another slurm.account or slurm.qos",
    ),
    Refusal(
        r"dependency",
        "the job that this one depends on is gone",
        "remove slurm.dependency, or name a job that is in the queue",
    ),
    Refusal(
        r"access/permission denied|permission denied|not authorized",
        "the site does not allow that",
        "see the site's rules; jobs of other users cannot be changed",
    ),
    Refusal(
        r"invalid job id|job.*not found",
        "the job has left the queue",
        "see `allranks ls`",
    ),
    Refusal(
        r"unrecognized option|invalid option|unknown option|ambiguous|invalid directive",
        "this SLURM does not know one of the directives",
        "see the line in submit.sbatch (`--dry-run` prints it), and `man sbatch` here",
    ),
)


def is_here() -> bool:
    """Whether this machine can send jobs to a SLURM."""
    return shutil.which("sbatch") is not None


def call(program: str, *arguments: str, seconds: float = ANSWER_SECONDS, both: bool = False) -> str:
    """What a SLURM command prints; `both`: also on stderr, where `--test-only` answers.

    Raises SlurmError with SLURM's message if it refuses.
    """
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            env=environment(os.environ, program),
            check=False,
        )
    except (FileNotFoundError, PermissionError):
        raise SlurmError(
            f"{program} is not here: this machine is not part of a SLURM cluster, "
            "or its commands are not on PATH",
            fix="log in to the cluster, or load its module; to run on this machine: allranks run",
            words="no such command",
        ) from None
    except subprocess.TimeoutExpired:
        raise refusal(program, f"no answer for {seconds:.0f} seconds") from None
    if done.returncode < 0:
        raise refusal(program, f"no answer: it was killed by signal {-done.returncode}")
    if done.returncode != 0:
        raise refusal(program, done.stderr or done.stdout)
    return done.stdout + done.stderr if both else done.stdout


def start(program: str, *arguments: str, text: str = "") -> subprocess.Popen[str]:
    """Start a SLURM command in the background; it ends with this process. `text` is its input."""
    try:
        running = subprocess.Popen(
            [program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment(os.environ, "sbatch"),  # without the variables of a surrounding job
            preexec_fn=partial(die_with_parent, os.getpid()),
            start_new_session=True,  # Ctrl-C is for the caller
        )
    except (FileNotFoundError, PermissionError):
        raise refusal(program, "no such command") from None
    assert running.stdin is not None
    with suppress(BrokenPipeError):  # it has already ended: its stderr says why
        running.stdin.write(text)
        running.stdin.close()
    return running


def environment(env: Mapping[str, str], program: str) -> dict[str, str]:
    """The environment without variables that change what SLURM's commands print or send.

    A job file says everything that is asked for: SBATCH_* would silently add to it, and a job sent
    from within another would inherit that job's settings.
    """
    unwanted = ["SQUEUE_", "SINFO_", "SACCT_", "SBATCH_", "SCANCEL_", "SLURM_TIME_FORMAT"]
    unwanted += ["SLURM_CLUSTERS"]  # jobs are sent to, and looked up on, this machine's cluster
    if program == "sbatch":
        unwanted += ["SLURM_", "SLURMD_", "ALLRANKS_CLAIM", "ALLRANKS_ATTEMPT"]
    kept = {key: value for key, value in env.items() if not key.startswith(tuple(unwanted))}
    if "SLURM_CONF" in env:
        kept["SLURM_CONF"] = env["SLURM_CONF"]
    # Jobs inherit sbatch's environment, so the user's language stays.
    return kept if program == "sbatch" else kept | {"LC_ALL": "C"}


def refusal(program: str, words: str) -> SlurmError:
    """The error for a refusal: SLURM's message, what it means and what to change."""
    lines = [clean_words(line) for line in words.splitlines()]
    said = "; ".join(dict.fromkeys(line for line in lines if line)) or "no reason given"
    for known in REFUSALS:
        if re.search(known.pattern, said, re.IGNORECASE):
            what = f"{program}: {said} ({known.meaning})"
            return SlurmError(what, fix=known.fix, words=said, meaning=known.meaning)
    return SlurmError(f"{program}: {said}", fix=f"see `man {program}` on this cluster", words=said)


def clean_words(line: str) -> str:
    """A line from SLURM without the program's name and `error:`."""
    return re.sub(r"^(\w+: )?((fatal|error): )*", "", line.strip()).strip()


def parse_job_id(printed: str) -> str:
    """The id in what `sbatch --parsable` prints, `123` or `123;cluster`. Raises SlurmError."""
    for line in reversed(printed.strip().splitlines()):  # a site's plugin may print lines before
        match = re.fullmatch(r"(\d+)(;\S+)?", line.strip())
        if match:
            return match[1]
    raise refusal("sbatch", f"no job id in its answer: {printed.strip()[:200]}")
