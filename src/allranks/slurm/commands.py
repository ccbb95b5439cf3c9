"""Calls SLURM's commands, which nothing else does, explains their refusals, reads what they print.

Only text formats that have not changed since SLURM 20.02 are read: JSON is not available
everywhere, and where it is, it ignores filters and gets exit codes wrong.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from allranks.errors import AllranksError
from allranks.machine.processes import die_with_parent
from allranks.slurm import reasons

ANSWER_SECONDS = 60.0
NOT_SET = {"", "(null)", "N/A", "n/a", "NONE", "None", "UNLIMITED", "ALL", "INFINITE", "infinite"}


class SlurmError(AllranksError):
    """A refusal of SLURM's, or its silence: its message, what that means and what to change."""

    def __init__(self, program: str, said: str) -> None:
        lines = [clean_words(line) for line in said.splitlines()]
        self.words = "; ".join(dict.fromkeys(filter(None, lines))) or "no reason given"
        rows = reasons.words()["refusals"]
        fits = (row for row in rows if re.search(row["pattern"], self.words, re.IGNORECASE))
        known: dict[str, Any] = next(fits, {})
        self.meaning = known.get("meaning", "")
        self.is_silence = known.get("silence", False)  # it may answer later
        what = f"{program}: {self.words}{f' ({self.meaning})' if known else ''}"
        super().__init__(what, fix=known.get("fix", f"see `man {program}` here"), exit_code=1)

    @property
    def is_gone(self) -> bool:
        """Whether the job that was asked about has left the queue."""
        return "invalid job id" in self.words.lower()


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
        raise SlurmError(program, "no such command") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(program, f"no answer for {seconds:.0f} seconds") from None
    if done.returncode < 0:
        raise SlurmError(program, f"no answer: it was killed by signal {-done.returncode}")
    if done.returncode != 0:
        raise SlurmError(program, done.stderr or done.stdout)
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
        raise SlurmError(program, "no such command") from None
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


def clean_words(line: str) -> str:
    """A line from SLURM without the program's name and `error:`."""
    return re.sub(r"^(\w+: )?((fatal|error): )*", "", line.strip()).strip()


def parse_job_id(printed: str) -> str:
    """The id in what `sbatch --parsable` prints, `123` or `123;cluster`. Raises SlurmError."""
    for line in reversed(printed.strip().splitlines()):  # a site's plugin may print lines before
        match = re.fullmatch(r"(\d+)(;\S+)?", line.strip())
        if match:
            return match[1]
    raise SlurmError("sbatch", f"no job id in its answer: {printed.strip()[:200]}")


# --- The forms in which they write numbers, times, lists and resources. Nothing here raises. -----


def parse_fields(line: str) -> dict[str, str]:
    """The Key=value of one line of scontrol -o; values may hold spaces, the first of a key wins."""
    fields: dict[str, str] = {}
    parts = re.split(r"(?:^|\s)([A-Za-z][\w:/]*)=", line)
    for key, value in zip(parts[1::2], parts[2::2], strict=True):
        fields.setdefault(key, value.strip())
    return fields


def parse_time(text: str) -> int | None:
    """Seconds of 1-02:03:04, 02:03:04, 03:04 or minutes alone; None for no limit or no time."""
    match = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,6})(?::(\d{1,6}))?(?::(\d{1,6}))?", text.strip())
    if match is None:
        return None
    days, *parts = (None if part is None else int(part) for part in match.groups())
    given = [part for part in parts if part is not None]
    if days is not None or len(given) == 3:
        hours, minutes, seconds = (*given, 0, 0)[:3]
    else:
        hours, minutes, seconds = 0, *(*given, 0)[:2]
    return (days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def tres_gpus(text: str) -> int:
    """The GPUs in cpu=4,mem=1G,gres/gpu=2,gres/gpu:a100=2: typed ones are counted in both."""
    counts = re.findall(r"gres/gpu(:[^=,\s]*)?=(\d{1,9})", text)
    untyped = sum(int(number) for kind, number in counts if not kind)
    return untyped or sum(int(number) for kind, number in counts if kind)


def names(text: str | None) -> tuple[str, ...]:
    """A comma list of SLURM's; empty where nothing is set, or everything is allowed."""
    parts = (part.strip() for part in (text or "").split(","))
    return tuple(dict.fromkeys(part for part in parts if part not in NOT_SET))


def number_of(text: str | None) -> int:
    match = re.match(r"\s*(\d{1,15})", text or "")
    return int(match[1]) if match else 0


def parse_gres(text: str) -> list[tuple[str, str | None, int]]:
    """The generic resources of a node: the kind, the type if it has one, and how many.

    `gpu:a100:4(S:0-1),shard:16`, also as used (`gpu:a100:1(IDX:0,2)`) and as asked for by a job
    (`gres/gpu:2`, `gres:gpu:2`).
    """
    text = re.sub(r"\([^)]*\)?", "", text.replace("(null)", ""))  # may hold commas
    found: list[tuple[str, str | None, int]] = []
    for part in text.split(","):
        kind, *words = re.sub(r"^gres[:/]", "", part.strip()).split(":")
        words = [word for word in words if word != "no_consume"]
        number = 1
        if words and (match := re.fullmatch(r"([0-9]{1,12})([KkMm]?)", words[-1])):
            number = int(match[1]) * {"k": 1024, "m": 1024**2}.get(match[2].lower(), 1)
            words.pop()
        if kind and kind not in NOT_SET:
            found.append((kind, ":".join(words) or None, number))
    return found
