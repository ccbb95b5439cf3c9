"""Counts the samples and epochs of a script, and says how reliable the counts are.

A batch that is fetched while gradients are on is trained on by the next backward pass, if it is the
only one. Otherwise the counter picks the likeliest batch, and keeps track of how many samples the
alternative would have given: if that is more than one in a hundred, its count is an estimate. It
then asks to see the model's inputs, which settle it if they have as many samples as some of these
batches.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from allranks.probe.loaders import MAX_WAITING, Loader, Pass
from allranks.run.events import SCHEMA_VERSION, WhatIsLate
from allranks.run.record import MEASURED, Certainty, Counted
from allranks.timing.timeline import EVALUATION, Mark, Step

MAX_SIZES = 1000  # distinct batch sizes that are counted
MAX_DOUBT = 0.01  # of the samples
MIN_MATCHED = 3  # steps
# Where gradients are off in every step, a pause that is this many times longer is an evaluation.
LONG_PAUSE, LEAST_PAUSE_SECONDS, USUAL_PAUSES = 5, 0.001, 32
CHECKED_STEPS = 8  # in which the probe checks that whole batches are trained on
SAY_AGAIN_STEPS = 100  # for those who read only the last events
# Why a count is not certain.
NO_LOADER = "it trains without a DataLoader, so samples are counted from the model's inputs"
NOTHING_SEEN = "what its backward passes train on was not seen"
SUMMED = "several batches are fetched for one backward pass"
OTHER_LOADER = "it is not clear which of several loaders it trains on"
SKIPPED = "some batches are fetched but do not seem to be trained on"
KEPT = "it trains on batches that it keeps or fetched earlier"
NO_GRADIENTS = "batches are fetched while gradients are off"
PART = "it seems to train on only part of each batch"
UNSEEN = "some steps had no backward pass in the training thread"
THREAD = "batches are fetched in another thread"
LEFT = "it leaves its loader before the end"
ENDLESS = "its loader never ends, or continues after its end"
DATA_SETS = "it trains on several data sets"


@dataclass(slots=True, eq=False)
class Fetched:
    """A batch that may be trained on."""

    of: Pass
    samples: int
    at: int  # which mark of its step; -1 in a later step


class SampleCounter:
    """Follows the script's batches and backward passes in order.

    Its methods are called from notes on the timeline, some time after the step; `at` is the number
    of the mark that has the note.
    """

    def __init__(self, switch_off: Callable[[Exception], None] | None = None) -> None:
        self.switch_off = switch_off  # called if anything fails here
        self.at = 0
        self.now = 0.0  # when that mark was made
        self.total = 0  # samples so far
        self.epochs = 0  # completed
        self.counted = MEASURED
        self.training: Loader | None = None  # the one that gave the last trained batch
        self.epoch: int | None = None  # of that batch
        self.began = 0  # at which mark the first step begins, once it was taken
        self.ended_epochs: list[dict[str, int]] = []  # and what is known: events to be written
        self.changes: list[Counted] = []
        # What other threads fetch: a method's name and its arguments.
        self.elsewhere: deque[tuple[Any, ...]] = deque(maxlen=MAX_WAITING)
        self._step = 0
        self._num_backwards = 0  # since the beginning
        self._waiting: list[Fetched] = []  # batches that were not trained on yet
        self._passes: list[Pass] = []  # trained on and not complete
        self._sizes: Counter[int] = Counter()  # number of trained batches of each size
        self._num_excess = 0  # steps in a row with more batches than backward passes
        self._num_unseen = 0  # steps without a backward pass
        self._num_alone = 0  # steps that were trained on no loader's batch
        self._data_sets: set[int] = set()
        self._epoch_total = 0  # samples by the end of the last epoch
        self.wants_model = False  # whether what the model is given would help
        self.has_models = False  # several, of which only one is looked at
        self._num_matched = self._num_unmatched = (
            0  # steps in which that was the batches trained on
        )
        self._part: float | None = None  # of a batch that is trained on
        self._doubts: Counter[str] = Counter()  # samples that each reason may have made wrong
        self._epoch_doubts: dict[str, Certainty] = {}
        # Of the step under way:
        self._backwards = 0
        self._without_gradients: list[Fetched] = []
        self._called = self._computed = 0  # samples that a model was given, and trained on
        self._calls: list[int] = []  # samples of each call of the model
        self._lengths: list[tuple[int, frozenset[int]] | None] = []  # of each backward pass
        self._spans: list[tuple[int, int]] = []  # marks of evaluations, from and to
        self._evaluating: int | None = None  # the mark since which it evaluates
        self._in_eval_mode: int | None = None  # the mark since which the model is in that mode
        self._pauses: list[tuple[int, int]] = []  # marks between which gradients were switched off
        self._num_paused = 0  # steps before which they were
        self._paused_at = 0.0
        self._pause_seconds: list[float] = []  # of each of these pauses
        self._usual_pauses: deque[float] = deque(maxlen=USUAL_PAUSES)  # seconds, of earlier steps

    # What happens in the script.

    def started(self, new: Pass, left: Sequence[Pass] = (), gradients: bool = True) -> None:
        """A pass over a loader begins; `left`: passes that can no longer continue."""
        for one in left:
            self._leave(one)
        for one in list(self._passes):
            if one.is_read and one.loader.dataset == new.loader.dataset:
                self._leave(one)
        new.step, new.began, new.num_backwards = self._step, self.at, self._num_backwards
        self._want_gradients(gradients, self.at)

    def ended(self, one: Pass) -> None:
        """A pass has reached the end of its loader."""
        one.ended = self.at
        one.is_silent = one.num_backwards == self._num_backwards and one.step == self._step
        self._want_gradients(True, self.at)
        self._complete_if_done(one)

    def fetched(self, one: Pass, samples: int, gradients: bool = True) -> None:
        """A batch has arrived; `gradients`: whether gradients were on."""
        one.batches += 1
        new = Fetched(one, samples, self.at)
        if self._evaluating is not None or not gradients:
            self._want_gradients(gradients, self.at - 1)
        if not gradients:
            self._without_gradients.append(new)
            return
        self._waiting.append(new)
        loader = one.loader
        if loader.last_step != self._step:
            loader.last_step = self._step
            loader.num_steps += 1
            if loader.first_step is None:
                loader.first_step = self._step
        if len(self._waiting) > MAX_WAITING:
            del self._waiting[0]

    def trained(self, lengths: tuple[int, frozenset[int]] | None = None) -> None:
        """A backward pass begins; `lengths`: what it shows of its batch."""
        self._lengths.append(lengths)
        self._num_backwards += 1
        self._backwards += 1
        if self._evaluating is not None:
            self._want_gradients(True, self.at)
        self._in_eval_mode = None
        # A model that was called several times was probably given the same samples.
        self._computed, self._called = self._computed + self._called, 0

    def computed(self, samples: int) -> None:
        """The model was called with gradients on."""
        self._called = max(self._called, samples)
        self._calls.append(samples)

    def switched(self, is_training: bool) -> None:
        """A model was switched to training or to evaluation."""
        since = self._in_eval_mode
        if not is_training:
            self._in_eval_mode = self.at if since is None else since
        elif since is not None:
            self._in_eval_mode = None
            seen = [one for one in self._waiting if one.at > since]
            # Many scripts switch back once they have the first batch to train on.
            last = seen[-1:] if self._is_next(seen) else []
            self._spans.append((since, last[0].at - 1 if last else self.at))
            self._drop([one for one in seen if one not in last])

    def _is_next(self, seen: list[Fetched]) -> bool:
        """Whether the last of these batches, fetched in evaluation mode, is for training."""
        if not seen or seen[-1].of.ended is not None:
            return False
        return self.training is None or seen[-1].of.loader.dataset == self.training.dataset

    def paused(self) -> None:
        """The script switches gradients off between two steps."""
        self._pauses.append((self.at, self.at))
        self._pause_seconds.append(0.0)
        self._paused_at = self.now

    def resumed(self) -> None:
        if self._pauses:
            self._pauses[-1] = (self._pauses[-1][0], self.at)
            self._pause_seconds[-1] = self.now - self._paused_at

    def take(self) -> int:
        """The samples of the step that ends here."""
        self._step += 1
        if self._evaluating is not None:
            self._want_gradients(True, self.at)
        if self._pauses:
            self._num_paused += 1
            self._spans += self._evaluating_pauses()
        samples = 0
        if self._backwards:
            chosen = self._waiting
            if len(chosen) == 1 and chosen[0].at >= 0:
                self._waiting = []
            elif chosen:
                chosen = self._choose()
            samples = self._train(chosen) if chosen else self._train_on_nothing_new()
            if chosen:
                samples = self._trained_part(samples, {samples, *(one.samples for one in chosen)})
            if chosen and self._calls:
                is_match = sum(self._calls) == samples
                self._num_matched += is_match
                self._num_unmatched += not is_match
        else:
            self._num_unseen += 1
        self.total += samples
        for batch in self._waiting:
            batch.at = -1
        for one in list(self._passes):
            self._complete_if_done(one)
        if self._doubts or self._epoch_doubts or self._num_unseen or not self.total:
            self._judge()
        return samples

    def clear(self) -> None:
        """Begin the next step."""
        self._backwards = self._called = self._computed = 0
        self._spans, self._evaluating, self._in_eval_mode = [], None, None
        self._calls, self._lengths, self.began = [], [], 0
        self._pauses, self._pause_seconds = [], []
        if self._without_gradients:
            self._without_gradients = []

    def finish(self, notes: Iterable[Any]) -> None:
        """Complete passes that ended after the last step (`notes`): the script may end here."""
        again: set[Loader] = set()
        for note in notes:
            if note[0] is SampleCounter.started:
                again.add(note[1].loader)
            elif note[0] is SampleCounter.ended and note[1].loader not in again:
                note[1].ended = self.at
        while self.elsewhere and self.elsewhere[0][0] is not SampleCounter.fetched:
            method, *args = self.elsewhere.popleft()
            method(self, *args)
        for one in list(self._passes):
            if one.is_read:
                self._complete(one)
            elif one.loader.length is None and not self.epochs:
                self._epoch_doubts[ENDLESS] = "unknown"
        self._judge()

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first and last marks of each evaluation in the step that was taken last."""
        return self._spans

    # Which batches a step was trained on.

    def _choose(self) -> list[Fetched]:
        """Choose this step's batches from all that it may have been trained on."""
        candidates = self._without_evaluated(self._waiting)
        loaders = {one.of.loader for one in candidates}
        if given := self._given_to_model(candidates):
            chosen = given
            self._evaluate([one for one in candidates if self._is_aside(one, chosen)], candidates)
        elif len(loaders) > 1:
            chosen = self._choose_loaders(candidates)
        else:
            chosen = candidates[: self._how_many(candidates)]
        self._waiting = candidates
        self._drop(chosen)
        return chosen

    def _without_evaluated(self, waiting: list[Fetched]) -> list[Fetched]:
        """Leave out passes that began and ended in this step without a backward pass."""
        whole = [one for one in waiting if one.of.is_silent and one.of.step == self._step - 1]
        if not whole:
            return list(waiting)
        rest = [one for one in waiting if one not in whole]
        known = [one for one in whole if one.of.loader.num_trained]
        if not rest and self._num_alone and self.training is None:
            known = []  # it does not train on the batches of any loader
        elif not rest:
            rest = known or whole
        for of in {one.of for one in whole if one not in rest}:
            self._spans.append((of.began, of.ended or of.began))
        return rest

    def _choose_loaders(self, candidates: list[Fetched]) -> list[Fetched]:
        """The batches of the loaders that deliver one in most steps."""
        usual = [one for one in candidates if self._is_usual(one.of.loader)]
        if usual:
            chosen = usual
        elif self._backwards >= len(candidates):
            chosen = candidates
        else:
            chosen = [one for one in candidates if one.of.loader is candidates[-1].of.loader]
        others = [one for one in candidates if one not in chosen]
        self._doubt(OTHER_LOADER, others)
        self._evaluate(others, candidates)
        if len({one.of.loader for one in chosen}) == 1:
            return chosen[: self._how_many(chosen)]
        if self._backwards < len(chosen):
            self._doubt(SUMMED, chosen)
        return chosen

    def _evaluate(self, others: list[Fetched], candidates: list[Fetched]) -> None:
        """Note that `others` were fetched for something other than training."""
        for one in others:
            if one.at > 0:
                self._spans.append((one.at - 1, one.at + 1))
            candidates.remove(one)

    def _is_aside(self, one: Fetched, chosen: list[Fetched]) -> bool:
        """Whether a batch comes from a loader that is not trained on."""
        return all(one.of.loader is not each.of.loader for each in chosen)

    def _given_to_model(self, candidates: list[Fetched]) -> list[Fetched]:
        """The candidates that match the model's inputs; empty if none do."""
        calls = self._calls
        if not calls or self._num_unmatched or self.has_models or len(calls) < self._backwards:
            return []
        # A loader that rarely delivers a batch may be for validation, even with gradients on.
        usual = [one for one in candidates if self._is_usual(one.of.loader)]
        new = [one for one in usual if one.at >= 0]
        if len(calls) == 1 < len(new) and calls[0] == sum(one.samples for one in new):
            return new
        left, given = list(usual), []
        for samples in calls:
            found = next((one for one in left if one.samples == samples), None)
            if found is None:
                return []
            given.append(found)
            left.remove(found)
        return [one for one in candidates if one in given]

    def _is_usual(self, loader: Loader) -> bool:
        """Whether a loader has delivered a batch in most steps since its first."""
        now = self._step - 1
        before = loader.num_steps - (loader.last_step == now)
        return before > 0 and 2 * before >= now - (loader.first_step or 0)

    def _how_many(self, waiting: list[Fetched]) -> int:
        """How many of one loader's batches, the oldest first, this step was trained on."""
        new, backwards = sum(one.at >= 0 for one in waiting), self._backwards
        self._num_excess = self._num_excess + 1 if new > backwards else 0
        if self._num_excess > 1:  # fetching ahead shows only once
            self._doubt(SUMMED, waiting[backwards:])
            return len(waiting)
        if new and len(waiting) > new and waiting[0].of.ended is None:
            return min(new, backwards)
        return min(len(waiting), backwards)

    def _train(self, chosen: list[Fetched]) -> int:
        samples = 0
        if self._step == 1:
            self.began = max(0, chosen[0].at - 1)
        for one in chosen:
            of = one.of
            samples += one.samples
            if of.epoch is None:
                of.epoch = self.epochs + 1
                self._passes.append(of)
            of.trained += 1
            if of.loader.length is not None and of.batches > of.loader.length:
                self._epoch_doubts[ENDLESS] = "unknown"
            of.loader.num_trained += 1
            if of.loader.doubt is not None:
                self._doubts[of.loader.doubt] += one.samples
            if len(self._sizes) < MAX_SIZES or one.samples in self._sizes:
                self._sizes[one.samples] += 1
        self.training, self.epoch = of.loader, of.epoch
        return samples

    def _trained_part(self, samples: int, whole: set[int]) -> int:
        """How many samples of this step's batches were trained on: usually all of them.

        `whole`: the length of each batch, and of all together.
        """
        if self._step <= CHECKED_STEPS:
            known = [one for one in self._lengths if one is not None]
            given = sum(first for first, _ in known)
            is_part = len(known) == len(self._lengths) and given < samples
            self._part = None
            if is_part and all(whole.isdisjoint(lengths) for _, lengths in known):
                self._part = given / samples
        if self._part is None:
            return samples
        part = round(self._part * samples)
        self._doubts[PART] += part
        return part

    def _train_on_nothing_new(self) -> int:
        """Samples of a step for which no batch was fetched."""
        aside = self._without_gradients
        if len(aside) == 1 and aside[0].of.ended is None and not self._num_alone:
            return self._train_in_doubt(self._without_gradients[-1:], NO_GRADIENTS)
        if self.elsewhere:
            return self._train_in_doubt(self._fetched_elsewhere(), THREAD)
        self._num_alone += 1
        if self.training is None:
            self._doubts[NO_LOADER] += self._computed
            self._epoch_doubts[NO_LOADER] = "unknown"
            return self._computed
        # The script trains on the same batch repeatedly, or on batches that it keeps.
        if not self._passes:
            self._epoch_doubts[KEPT] = "unknown"
        samples = self._usual_size()
        if self._calls and (not self._num_unmatched or sum(self._calls) < samples):
            samples = sum(self._calls)
            if self._num_matched >= MIN_MATCHED and not self._num_unmatched:
                return samples
        self._doubts[KEPT] += samples
        self.wants_model = True
        return samples

    def _usual_size(self) -> int:
        return max(self._sizes, key=self._sizes.__getitem__, default=0)

    def _doubt(self, why: str, batches: list[Fetched]) -> None:
        """Note that it is not certain whether these batches were trained on."""
        self._doubts[why] += sum(one.samples for one in batches)
        self.wants_model = True

    def _train_in_doubt(self, chosen: list[Fetched], why: str) -> int:
        if not chosen:
            return 0
        samples = self._train(chosen)
        self._doubts[why] += samples
        self._epoch_doubts[why] = "about"
        return samples

    def _fetched_elsewhere(self) -> list[Fetched]:
        """The next batches that another thread has fetched, one for each backward pass."""
        found: list[Fetched] = []
        while self.elsewhere:
            method, *args = self.elsewhere[0]
            if method is SampleCounter.fetched and len(found) == self._backwards:
                break
            if method is SampleCounter.started and found:
                break
            self.elsewhere.popleft()
            if method is SampleCounter.fetched:
                args[0].batches += 1
                found.append(Fetched(args[0], args[1], -1))
            elif found:  # the end of the pass that these are of
                args[0].ended = self.at
            else:
                method(self, *args)
        return found

    # Evaluations.

    def _evaluating_pauses(self) -> list[tuple[int, int]]:
        """The pauses before this step that are not part of every step, as an EMA's updates are."""
        if 2 * self._num_paused <= self._step:
            return self._pauses
        usual = statistics.median(self._usual_pauses) if self._usual_pauses else None
        timed = list(zip(self._pauses, self._pause_seconds, strict=True))
        long = [
            pause
            for pause, took in timed
            if usual is not None and took > max(LONG_PAUSE * usual, LEAST_PAUSE_SECONDS)
        ]
        self._usual_pauses.extend(took for pause, took in timed if pause not in long)
        return long

    def _want_gradients(self, wanted: bool, at: int) -> None:
        """From this mark on, the script trains or evaluates."""
        if wanted and self._evaluating is not None:
            self._spans.append((self._evaluating, at))
            self._evaluating = None
        elif not wanted and self._evaluating is None:
            self._evaluating = at

    def _drop(self, batches: list[Fetched]) -> None:
        """Consider these batches no longer."""
        if batches:
            self._waiting = [one for one in self._waiting if one not in batches]

    # Epochs.

    def _leave(self, one: Pass) -> None:
        """This pass will not continue."""
        rest = [each for each in self._waiting if each.of is one]
        self._drop(rest)
        if one.trained and rest and not self._num_matched:
            self._doubt(SKIPPED, rest)
        elif one.is_silent and one.step == self._step:
            self._spans.append((one.began, one.ended or one.began))
        if one not in self._passes:
            return
        if one.is_read:
            self._complete(one)
            return
        self._passes.remove(one)
        if (one.epoch or 0) > self.epochs:  # no pass alongside it has reached its end
            self._epoch_doubts[LEFT] = "unknown"

    def _complete_if_done(self, one: Pass) -> None:
        """Complete a pass that has reached its end, once its last batch was trained on."""
        if one.ended is not None and all(each.of is not one for each in self._waiting):
            self._complete(one)

    def _complete(self, one: Pass) -> None:
        if one not in self._passes:
            return
        self._passes.remove(one)
        if one.epoch is not None and one.epoch <= self.epochs:
            # Another pass has reached its end in the meantime: this one ran alongside it.
            if one.epoch < self.epochs:
                self._epoch_doubts[OTHER_LOADER] = "about"
            return
        self.epochs += 1
        self._data_sets.add(one.loader.dataset)
        if len(self._data_sets) > 1:
            self._epoch_doubts[DATA_SETS] = "about"
        samples, self._epoch_total = self.total - self._epoch_total, self.total
        ended = {"epoch": self.epochs, "step": self._step, "samples": samples}
        self.ended_epochs.append(ended)

    # How certain the counts are.

    def _judge(self) -> None:
        if self._num_unseen:
            self._doubts[UNSEEN] = self._num_unseen * self._usual_size()
        doubt = sum(self._doubts.values())
        epochs: Certainty = "unknown" if "unknown" in self._epoch_doubts.values() else "about"
        epochs = epochs if self._epoch_doubts else "measured"
        if not self._step:
            return
        if not self.total and self._step > 2:
            found = Counted("unknown", "unknown", NOTHING_SEEN)
        elif doubt > MAX_DOUBT * self.total:
            why = max(self._doubts, key=self._doubts.__getitem__)
            found = Counted("about", epochs, why)
        elif self._epoch_doubts:
            found = Counted("measured", epochs, next(iter(self._epoch_doubts)))
        else:
            found = MEASURED
        if found != self.counted or (found != MEASURED and self._step % SAY_AGAIN_STEPS == 0):
            self.counted = found
            self.changes.append(found)


class CountedStep(Step):
    """A finished step and its samples. Must be created in the order of the steps."""

    __slots__ = ("epoch", "samples")

    def __init__(
        self, marks: list[Mark], unix: float, counter: SampleCounter, is_traced: bool = False
    ) -> None:
        super().__init__(marks, unix, is_traced)
        self.epoch: int | None = None
        self.samples = 0
        try:
            for at, (_, when, _, note) in enumerate(marks):
                if note.__class__ is tuple:
                    counter.at, counter.now = at, when
                    note[0](counter, *note[1:])
            counter.at = len(marks) - 1
            self.samples = counter.take()
            self.epoch = counter.epoch
            for first, end in counter.spans:
                for at in range(first, end):
                    marks[at] = (EVALUATION, *marks[at][1:])
            del marks[: counter.began]  # what comes before the first batch belongs to no step
            counter.clear()
        except Exception as error:
            if counter.switch_off is None:
                raise
            counter.switch_off(error)

    def line(self, late: WhatIsLate = "wait") -> str:
        """The step's event, without times that the device never delivered."""
        _, end, _, step = self._marks[-1]
        line = f'{{"v":{SCHEMA_VERSION},"t":{self._unix + end:.6f},"event":"step","step":{step}'
        try:
            if late == "wait" or self.ready():
                epoch = "" if self.epoch is None else f'"epoch":{self.epoch},'
                line += f',{epoch}"samples":{self.samples},{self.text()}'
        except Exception:  # the device is lost; this is faster than contextlib.suppress
            pass
        return line + "}\n"
