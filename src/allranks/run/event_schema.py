"""The fields of each event of a rank: readers check them, and the docs show them.

docs/reference/events.md is generated from it. A field that is added here can be written; a reader
leaves out values of another type, and notes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from allranks.run import files
from allranks.run.files import Check, list_of, or_none, row_of, values_of


class Kind(NamedTuple):
    """A type: its name in the docs, and its check."""

    words: str
    check: Check


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an event. `by`: who writes it, if not every writer of the event does."""

    kind: Kind
    meaning: str
    by: str = ""
    needed: bool = False  # an event without it is left out
    null: bool = False  # whether it may be null

    @property
    def check(self) -> Check:
        return or_none(self.kind.check) if self.null else self.kind.check


@dataclass(frozen=True, slots=True)
class EventType:
    """One kind of event, and who writes it."""

    meaning: str
    by: str
    fields: dict[str, Field]


TASK, SCRIPT, LAUNCHER = "tasks", "scripts", "the launcher"
PROBE = "tasks and scripts"

TEXT = Kind("text", files.is_text)
FLAG = Kind("true or false", files.is_flag)
COUNT = Kind("count", files.is_count)
SIZE = Kind("count", files.is_size)
POSITIVE = Kind("count", files.is_positive)
WHOLE = Kind("number", files.is_whole)
NUMBER = Kind("number", files.is_number)
SECONDS = Kind("seconds", files.is_time)
PHASE = Kind("seconds", files.is_number)  # differences of two clocks
TIME = Kind("UNIX time", files.is_time)
CLOCK = Kind("UNIX time", files.is_number)  # by a host's clock, which may be wrong
BYTES = Kind("bytes", files.is_number)
PERCENT = Kind("percent", files.is_number)
WATTS = Kind("watts", files.is_number)
CELSIUS = Kind("°C", files.is_number)
MEGAHERTZ = Kind("MHz", files.is_number)
CPUS = Kind("CPUs", files.is_number)
CHECKSUM = Kind("checksum", lambda value: files.is_text(value) or files.is_whole(value))
STATE = Kind("`finished`, `stopped` or `failed`", files.one_of("finished", "stopped", "failed"))
PLACE = Kind("file, line, function", row_of(TEXT.check, files.is_whole, or_none(TEXT.check)))
FRAMES = Kind(
    "list of file, line, function, source",
    list_of(row_of(TEXT.check, files.is_whole, TEXT.check, TEXT.check)),
)
ERROR = Kind(
    "`what`, `fix`, `echo`, `stall`",
    files.mapping(
        {"what": TEXT.check, "fix": TEXT.check},
        {"echo": FLAG.check, "stall": FLAG.check, "own_ranks": FLAG.check},
    ),
)

STEP = Field(COUNT, "which step, counted from 1", needed=True)
PID = Field(COUNT, "its process")
HOST = Field(TEXT, "the machine that it runs on")
AT = Field(PLACE, "the innermost line of your own code that the rank is at")
HOST_MEMORY = Field(BYTES, "the most that the process has used so far", null=True)
MEMORY_PEAK = Field(BYTES, "the most of its GPU's memory that torch has used", null=True)
EPOCH_SIZE = Field(POSITIVE, "samples in the data set")


def _gpu(kind: Kind, meaning: str) -> Field:
    return Field(kind, f"of its GPU: {meaning}", null=True)


COMMON = {
    "v": Field(COUNT, "version of this schema: 1"),
    "t": Field(TIME, "when it was written", needed=True),
    "event": Field(TEXT, "which of the events below it is", needed=True),
    "nonfinite": Field(
        Kind("names and texts", values_of(TEXT.check)),
        "numbers that JSON does not have, null in their own fields: `nan`, `inf`, `-inf`",
    ),
}

EVENTS: dict[str, EventType] = {
    "start": EventType(
        "A rank has started. A script's rank does not know yet what it will train.",
        "tasks, and the launcher for scripts",
        {
            "rank": Field(COUNT, "which rank, counted from 0"),
            "world_size": Field(SIZE, "ranks in all"),
            "host": HOST,
            "pid": PID,
            "layout": Field(TEXT, "how the ranks are laid out, such as `2x4`"),
            "backend": Field(TEXT, "`nccl` or `gloo`; null for a script", null=True),
            "link": Field(TEXT, "what the ranks communicate over", TASK, null=True),
            "device": Field(TEXT, "the name of its GPU, or `CPU`", TASK),
            "threads": Field(COUNT, "of torch on a CPU", TASK),
            "precision": Field(TEXT, "what it computes in", TASK),
            "compile": Field(FLAG, "whether the model is compiled", TASK),
            "parameters": Field(COUNT, "of the model", TASK),
            "global_batch": Field(COUNT, "samples per step, of all ranks", TASK),
            "rank_batch": Field(
                Kind("list of counts", lambda v: COUNT.check(v) or list_of(COUNT.check)(v)),
                "how many of them each rank gets",
                TASK,
            ),
            "accumulation": Field(COUNT, "micro-batches per step", TASK),
            "samples_per_epoch": Field(POSITIVE, EPOCH_SIZE.meaning, TASK),
            "steps_per_epoch": Field(POSITIVE, "steps that an epoch takes", TASK),
            "num_workers": Field(COUNT, "processes that load its data", TASK),
            "step": Field(COUNT, "steps made by earlier attempts", TASK),
            "epoch": Field(COUNT, "epochs completed by earlier attempts", TASK),
            "steps": Field(COUNT, "the last step there will be", TASK),
        },
    ),
    "step": EventType(
        "An optimizer step was made.",
        PROBE,
        {
            "step": STEP,
            "epoch": Field(COUNT, "which epoch, counted from 1"),
            "samples": Field(COUNT, "this rank's"),
            "seconds": Field(
                SECONDS,
                "since the end of the previous step, or of an evaluation or a save in between",
            ),
            "data": Field(PHASE, "phase: waiting for the next batch"),
            "forward": Field(PHASE, "phase: the forward pass"),
            "backward": Field(PHASE, "phase: the backward pass"),
            "wait": Field(PHASE, "phase: waiting for other ranks, and exchanging data with them"),
            "optimizer": Field(PHASE, "phase: the update"),
            "other": Field(PHASE, "phase: everything else"),
            "arrive": Field(CLOCK, "when the longest wait began, by the clock of the rank's host"),
            "left": Field(CLOCK, "when the longest wait ended, by the same clock; not on a GPU"),
            "waits": Field(
                Kind("list of seconds", list_of(files.is_number)),
                "each wait, if there were several",
            ),
            "own": Field(
                Kind("list of seconds", list_of(files.is_number)),
                "how much of each wait (or of all, as one number) the rank spent in its own code "
                "around the exchange, if any",
            ),
            "loss": Field(
                NUMBER,
                "mean over the global batch before the update; only in rank 0's events, every "
                "`log_every` steps and at the last step",
                TASK,
                null=True,
            ),
        },
    ),
    "metric": EventType(
        "An evaluation: on `val` after every epoch, on `test` at the end.",
        "rank 0 of tasks",
        {
            "step": Field(COUNT, "steps made by then"),
            "name": Field(TEXT, "such as `val_accuracy`", needed=True),
            "value": Field(NUMBER, "what was measured", null=True),
        },
    ),
    "checkpoint": EventType(
        "A checkpoint was committed.",
        TASK,
        {
            "step": Field(COUNT, "the step that it was made at", needed=True),
            "seconds": Field(
                SECONDS, "from the save to the commit, in the background", needed=True
            ),
            "stall": Field(PHASE, "how long training paused for it"),
        },
    ),
    "device": EventType(
        "What the rank uses and where it is, every two seconds. It is written immediately, before "
        "steps whose loss or times are not known yet: a waiting rank shows that it is alive.",
        PROBE,
        {
            "cpu": Field(CPUS, "in use by the rank"),
            "workers_cpu": Field(CPUS, "in use by the processes that it has started"),
            "num_workers": Field(COUNT, "processes that it has started"),
            "processes": Field(
                Kind("list of process ids", list_of(COUNT.check)),
                "the rank's process and those that it has started, its loader's workers among them",
            ),
            "host_memory": HOST_MEMORY,
            "memory": _gpu(BYTES, "memory in use"),
            "memory_total": _gpu(BYTES, "total memory"),
            "memory_peak": MEMORY_PEAK,
            "utilization": _gpu(PERCENT, "how much of the time it was busy"),
            "power": _gpu(WATTS, "power in use"),
            "power_limit": _gpu(WATTS, "its power limit"),
            "temperature": _gpu(CELSIUS, "temperature"),
            "clock": _gpu(MEGAHERTZ, "clock of its processors"),
            "clock_max": _gpu(MEGAHERTZ, "their fastest clock"),
            "network": Field(
                Kind("bytes per second", values_of(files.is_number)),
                "`sent` and `received`, over InfiniBand if there is any; `link`: its "
                "capacity each way, if the system says so",
                "the first rank of a node",
            ),
            "step": Field(COUNT, "steps made by then"),
            "doing": Field(TEXT, "the phase that it is in"),
            "doing_seconds": Field(PHASE, "for how long"),
            "at": AT,
            "collectives": Field(
                COUNT,
                "how many it has entered in its default group, if it has peers and the backend "
                "counts them",
            ),
        },
    ),
    "place": EventType(
        "Where the rank is before and at its first step: all that is known about a rank that is "
        "killed early.",
        PROBE,
        {"step": Field(COUNT, "steps made by then"), "at": AT},
    ),
    "nonfinite": EventType(
        "The first step at which the loss of the rank's own samples was not a number.",
        TASK,
        {"step": STEP, "loss": Field(TEXT, "`nan`, `inf` or `-inf`")},
    ),
    "recorder": EventType(
        "The process that made these steps.",
        SCRIPT,
        {
            "pid": PID,
            "host": HOST,
            "of": Field(
                TEXT,
                "the rank of the process, or of its parent that was started as one",
                null=True,
            ),
        },
    ),
    "dataset": EventType(
        "The data set of the first step, if it has a length.",
        SCRIPT,
        {"samples_per_epoch": EPOCH_SIZE},
    ),
    "batch": EventType(
        "One of the first batches of two epochs of a DataLoader.",
        SCRIPT,
        {
            "epoch": Field(COUNT, "counted from 1", needed=True),
            "batch": Field(COUNT, "counted from 0", needed=True),
            "samples": Field(COUNT, "in it"),
            "loader": Field(COUNT, "which DataLoader, counted from 0"),
            "trained": Field(FLAG, "whether it is the one that is trained on"),
            "indices": Field(CHECKSUM, "of the indices that were read"),
            "content": Field(CHECKSUM, "of what was read"),
            "sorted": Field(FLAG, "whether its indices are in ascending order"),
        },
    ),
    "window": EventType(
        "The steps that a benchmark counts.",
        "rank 0 of tasks and scripts",
        {
            "first": Field(COUNT, "the first step", needed=True),
            "last": Field(COUNT, "the last step", null=True),
            "steady": Field(FLAG, "whether steps had become steady by the first", needed=True),
        },
    ),
    "profile": EventType(
        "Which steps were traced, or why none were.",
        PROBE,
        {
            "first": Field(COUNT, "the first step"),
            "last": Field(COUNT, "the last step"),
            "trace": Field(TEXT, "the trace file, in the same folder"),
            "with_device": Field(FLAG, "whether it shows a GPU's kernels"),
            "problem": Field(TEXT, "why there is no trace, or fewer steps"),
        },
    ),
    "error": EventType(
        "What ended the rank, written before its traceback is printed.",
        PROBE,
        {
            "type": Field(
                TEXT,
                "of an uncaught exception; `SystemExit` for `sys.exit`, `exit` and `os._exit` "
                "with a code that is not 0; empty for a signal to itself",
                needed=True,
            ),
            "message": Field(TEXT, "what it says", needed=True),
            "file": Field(
                TEXT,
                "of the innermost line of your own code; for an exception in a data worker or a "
                "child process, of the line there",
                null=True,
            ),
            "line": Field(COUNT, "its number", null=True),
            "function": Field(TEXT, "that it is in", null=True),
            "frames": Field(
                FRAMES,
                "each call, the outermost first, without those of allranks; an entry with an "
                "empty file stands for omitted calls, and its line is their number",
            ),
            "cause": Field(TEXT, "the first of the exceptions that led to this one, on one line"),
            "exit": Field(WHOLE, "its exit code, if known"),
            "signal": Field(TEXT, "the signal that ended it, if known"),
            "echo": Field(FLAG, "whether it failed only because another rank is gone", needed=True),
            "pid": PID,
        },
    ),
    "end": EventType(
        "How the rank ended. A rank that was killed cannot say so: the launcher does.",
        "tasks, and the launcher for scripts and for ranks that were killed",
        {
            "state": Field(STATE, "how it ended", needed=True),
            "exit": Field(
                WHOLE, "the exit code; null if it was ended because of another rank", null=True
            ),
            "signal": Field(TEXT, "the signal that stopped or killed it, if one did", null=True),
            "error": Field(
                ERROR,
                "`echo`: whether it failed only because another rank is gone; `stall`: whether the "
                "launcher ended ranks that made no steps",
                null=True,
            ),
            "memory_kills": Field(
                COUNT,
                "how many processes of its cgroup the kernel killed for their memory in this time",
                f"{LAUNCHER}, of a rank that failed",
            ),
            "step": Field(COUNT, "steps made, in all attempts", TASK),
            "epoch": Field(COUNT, "epochs completed, in all attempts", TASK),
            "samples": Field(COUNT, "seen by all ranks, in all attempts", TASK),
            "seconds": Field(SECONDS, "of training, in this attempt", TASK),
            "samples_per_second": Field(NUMBER, "of all ranks, in this attempt", TASK, null=True),
            "metrics": Field(
                Kind("names and numbers", values_of(or_none(files.is_number))),
                "the last value of each",
                TASK,
            ),
            "host_memory": Field(BYTES, "the most that this rank used", TASK, null=True),
            "memory_peak": Field(
                BYTES, "the most of its GPU's memory that this rank used", TASK, null=True
            ),
        },
    ),
}

# As readers use it.
COMMON_CHECKS: dict[str, Check] = {name: field.check for name, field in COMMON.items()}
CHECKS: dict[str, dict[str, Check]] = {
    name: COMMON_CHECKS | {field: each.check for field, each in event.fields.items()}
    for name, event in EVENTS.items()
}
NEEDED: dict[str, tuple[str, ...]] = {
    name: ("t", *(field for field, each in event.fields.items() if each.needed))
    for name, event in EVENTS.items()
}


def undeclared(event: dict[str, Any]) -> list[str]:
    """The fields of an event that are not declared, or have another type than declared."""
    kind = event.get("event")
    if kind not in CHECKS:
        return [f"the event {kind!r}"]
    checks = CHECKS[kind]
    return [
        f"{name} = {value!r} of {kind}"
        for name, value in event.items()
        if name not in checks or not checks[name](value)
    ]
