"""What a rank is doing at each moment: marks along a step, read later as phases that sum to it.

A mark costs under a microsecond. On a GPU each one also records a device event, and the phases are
times of the device, read when it has passed them: nothing ever waits for it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, Protocol

DATA = "data"  # waiting for the next batch
FORWARD = "forward"
BACKWARD = "backward"
WAIT = "wait"  # for other ranks: for them to come, and for the bytes to be exchanged
OPTIMIZER = "optimizer"
OTHER = "other"
REPLAY = "replay"  # of a whole step as one graph; its note has each phase's share of it
EVALUATION = "evaluation"  # between training: not part of a step's time
AROUND = "around"  # in the code around an exchange: waiting, as far as the others are concerned
AFTER = "after"  # after backward: the next mark shows what it was
BEGIN = "begin"  # of a step: what came before belongs to no step
END = "end"  # of a step, and the beginning of the next

PHASES = (DATA, FORWARD, BACKWARD, WAIT, OPTIMIZER, OTHER)
_TEXT = ",".join(f'"{name}":%.7f' for name in ("seconds", *PHASES))
# What time was spent on shows only by what came next: preparing an exchange belongs to it, clipping
# and unscaling belong to the update, and a script may take its batches from no loader.
_UNCERTAIN = (AFTER, OTHER, END, BEGIN)
_MEANINGS = {
    (AFTER, WAIT): AROUND,
    (AFTER, AROUND): AROUND,
    (AFTER, OPTIMIZER): OPTIMIZER,
    (AFTER, OTHER): OPTIMIZER,  # of an optimizer whose steps are not those of the training
    (AFTER, END): OPTIMIZER,
    (AFTER, BACKWARD): FORWARD,
    (OTHER, BACKWARD): FORWARD,
    (END, BACKWARD): FORWARD,
    (BEGIN, BACKWARD): FORWARD,
}
MAX_MARKS = 50_000  # of a step
COUNT_AFTER = 250  # calls of hooks: to count marks in each takes a microsecond
CLOCK_SECONDS = 1.0  # two clocks drift apart by less, unless somebody sets one
MAX_WAITS = 16  # of a step; of more, only the sum is recorded


class DeviceEvent(Protocol):
    """What is used of torch.cuda.Event."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any) -> float: ...


# A label, the time from which it holds (perf_counter), the DeviceEvent recorded at the same moment,
# and a note: a function and its arguments, called when the step is read; for END, the number of the
# step; for WAIT and AROUND, the name of the exchange. A plain tuple, and nothing is computed yet: a
# dozen marks are made at every step, between kernels that leave little in a processor's caches.
Note = tuple[Any, ...] | str
Mark = tuple[str, float, DeviceEvent | None, Any]


class Timeline:
    """The marks of one rank's steps. Only the thread that trains makes any.

    Everything that hooks read is here, in one piece of memory: every other object that they touch
    between a model's kernels has to be fetched again, which takes longer than what they do.
    """

    __slots__ = (
        *("_cutting", "_num_taken", "calls", "depth", "expect", "is_choosing", "is_on"),
        *("is_taken", "kept", "label", "marks", "num_steps", "offset", "record_event"),
        *("thread", "traced", "unix"),
    )

    def __init__(self) -> None:
        self.is_on = True
        self.label = OTHER
        self.calls = 0  # of hooks since marks were last counted
        self.depth = 0  # of backward passes within backward passes
        # Called with the tensors that a backward pass starts from; returns a hook to remove.
        self.expect: Callable[[Any], Any] | None = None
        self.is_taken = False  # by a loop of our own, which says where its steps end
        self.is_choosing = False  # whether such a loop is still looking for its fastest step
        self.num_steps = 0  # that have ended
        self.offset = 0  # how many steps an earlier attempt had made
        self.thread = threading.get_ident()
        self.record_event: Callable[[], DeviceEvent | None] | None = None
        # Of the step under way, behind those of the steps that nobody has taken yet. The first step
        # begins with its first mark. It is always the same list, so that hooks may append to it.
        self.marks: list[Mark] = []
        self.kept: list[Mark] | None = None  # those taken, while a trace needs them too
        self.traced: set[int] = set()  # steps that tracing slows
        self._num_taken = 0  # steps
        self._cutting = threading.Lock()
        # What to add to a mark's time for UNIX time: kept, so that steps add up.
        self.unix = time.time() - perf_counter()

    def follow_clock(self) -> None:
        """Read the wall clock again if the machine has slept, or its clock was set."""
        unix = time.time() - perf_counter()
        if abs(unix - self.unix) > CLOCK_SECONDS:
            self.unix = unix

    def mark(self, label: str, note: Note | None = None) -> None:
        self.label = label
        event = None if self.record_event is None else self.record_event()
        self.marks.append((label, perf_counter(), event, note))

    def mark_instead(self, of: str, label: str, note: Note | None = None) -> None:
        """A mark in place of the last one if that is `of`, to save the device an event."""
        if self.label != of:
            self.mark(label, note)
            return
        self.label = label
        _, began, event, _ = self.marks[-1]
        self.marks[-1] = (label, began, event, note)

    def restart(self) -> None:
        """Begin the step here: what came before belongs to no step."""
        self.mark(BEGIN)
        self.label = OTHER

    def end(self) -> None:
        """End the step here, and begin the next."""
        self.label = OTHER
        self.num_steps = step = self.num_steps + 1
        event = None if self.record_event is None else self.record_event()
        self.marks.append((END, perf_counter(), event, step))

    def close(self) -> Step:
        """End the step here, begin the next, and return the one that ended."""
        self.end()
        return Step(self.take_steps()[-1], self.unix, self.num_steps in self.traced)

    def take_steps(self) -> list[list[Mark]]:
        """The marks of all steps that have ended since the last time. Any thread may ask."""
        marks, steps = self.marks, []
        with self._cutting:
            first = 0
            for index in range(len(marks)):
                label, _, _, step = marks[index]
                if label == BEGIN:
                    first = index
                elif label == END and step != self._num_taken:
                    steps.append(marks[first : index + 1])
                    first, self._num_taken = index, step
            if self.kept is not None:
                self.kept += marks[:first]
            del marks[:first]
        return steps

    def shorten(self) -> None:
        """Limit the marks of a script that rarely steps: dropped time counts as other.

        Must be called now and then wherever marks are made.
        """
        self.calls = 0
        if len(self.marks) <= MAX_MARKS:
            return
        with self._cutting:
            marks = self.marks
            # Steps that have ended stay until somebody takes them.
            ends = (at for at in range(len(marks) - 1, 0, -1) if marks[at][0] in (END, BEGIN))
            first = next(ends, 0)
            if len(marks) - first > MAX_MARKS:
                _, began, event, _ = marks[first]
                marks[first + 1 : -MAX_MARKS // 2] = [(OTHER, began, event, None)]

    def doing(self) -> tuple[str, float]:
        """What the rank is doing, and for how many seconds. Any thread may ask."""
        try:
            label, since, _, _ = self.marks[-1]
        except IndexError:
            return OTHER, 0.0
        label = {AROUND: WAIT, REPLAY: FORWARD}.get(label, label)
        return label if label in PHASES else OTHER, perf_counter() - since


current: Timeline | None = None  # of this process, if it has a probe


def take() -> Timeline:
    """This process's timeline, for a loop of our own that will close its steps."""
    taken = current or Timeline()
    taken.is_taken = True
    return taken


def mark(label: str) -> None:
    """A mark for what no hook can see, made by a loop of our own."""
    if current is not None:
        current.mark(label)


class Step:
    """The marks of a step that is over; a `Late` value of its event (see events.py)."""

    __slots__ = ("_marks", "_unix", "is_traced")

    def __init__(self, marks: list[Mark], unix: float, is_traced: bool = False) -> None:
        self._marks = marks
        self._unix = unix
        self.is_traced = is_traced

    @property
    def host_seconds(self) -> float:
        """By the host's clock, and at once."""
        return self._marks[-1][1] - self._marks[0][1]

    def ready(self) -> bool:
        event = self._marks[-1][2]
        return event is None or bool(event.query())

    def text(self) -> str:
        """The fields of a step event that say where its time went, as JSON without braces.

        Seconds of each phase, exclusive; they sum to `seconds`. `arrive`: when the longest wait
        began, in UNIX time by the host's clock; `left`: when it ended, unless a device waits.
        `waits`: each wait, if there were several. `own`: how much of each the rank spent in its own
        code around the exchange; only their sum if there are too many. `exchanges`: waiting by the
        name of the exchange, where it has one.
        """
        event = self._marks[-1][2]
        if event is not None and not event.query():
            event.synchronize()  # the script has ended, and somebody waits for the rest
        sums, waits, own, arrive, left, exchanges = _read(self._marks)
        evaluation = sums.pop(EVALUATION, 0.0)
        text = _TEXT % (sum(sums.values()), *sums.values())  # formatting by hand: once a step
        if evaluation:
            text += f',"evaluation":{evaluation:.7f}'
        if self.is_traced:
            text += ',"traced":true'
        if arrive is not None:
            text += f',"arrive":{self._unix + arrive:.6f}'
        if left is not None:
            text += f',"left":{self._unix + left:.6f}'
        if 1 < len(waits) <= MAX_WAITS:
            text += f',"waits":[{",".join(f"{seconds:.7f}" for seconds in waits)}]'
        if own:
            text += f',"own":[{",".join(f"{seconds:.7f}" for seconds in own)}]'
        if exchanges:
            each = (f'"{name}":{seconds:.7f}' for name, seconds in exchanges.items())
            text += f',"exchanges":{{{",".join(each)}}}'
        return text


def shares(marks: Sequence[Mark]) -> dict[str, float]:
    """Each phase's share of the time between the first mark and the last; empty if unknown."""
    if len(marks) < 2:
        return {}
    sums = _read(marks)[0]
    total = sum(sums.values())
    return {phase: seconds / total for phase, seconds in sums.items() if seconds and total}


def _spans(marks: Sequence[Mark]) -> Iterator[tuple[str, str, float, float, Any]]:
    """Each label, the one that follows, when it began, how many seconds it held, and its note."""
    for (label, begin, event, note), (following, end, end_event, _) in itertools.pairwise(marks):
        if event is None or end_event is None:
            seconds = end - begin
        else:
            seconds = event.elapsed_time(end_event) / 1e3
        if label == REPLAY:
            for phase, share in (note[0] or {FORWARD: 1.0}).items():
                yield phase, OTHER, begin, share * seconds, None
        else:
            yield label, following, begin, seconds, note


def _read(
    marks: Sequence[Mark],
) -> tuple[
    dict[str, float], list[float], list[float], float | None, float | None, dict[str, float]
]:
    """Seconds by phase, of each wait, and of own code in it; when the longest began and ended.

    Then the seconds of waiting by the name of the exchange.
    """
    sums = dict.fromkeys(PHASES, 0.0)
    waits: list[float] = []
    own: list[float] = []
    exchanges: dict[str, float] = {}
    longest, arrive = -1.0, None
    is_open = False  # whether more waiting would belong to the same exchange
    for label, following, begin, seconds, note in _spans(marks):
        phase = _MEANINGS.get((label, following), OTHER) if label in _UNCERTAIN else label
        is_own = phase == AROUND
        phase = WAIT if is_own else phase
        sums[phase] = sums.get(phase, 0.0) + seconds
        if phase == WAIT:
            if not is_open:
                waits.append(0.0)
                own.append(0.0)
                is_open = True
            waits[-1] += seconds
            if is_own:
                own[-1] += seconds
            if note.__class__ is str:
                exchanges[note] = exchanges.get(note, 0.0) + seconds
            if seconds > longest:
                longest, arrive = seconds, begin
        elif label != BACKWARD:
            # The exchanges of one backward pass are one: a rank that prepares its gradients longer
            # in a hook of DDP's communicates longer, and does not compute longer.
            is_open = False
    left = None
    if arrive is not None and marks[-1][2] is None:  # a device waits at other times than its host
        left = arrive + longest
    if not any(own):
        own = []
    elif len(own) > MAX_WAITS:
        own = [sum(own)]
    return sums, waits, own, arrive, left, exchanges
