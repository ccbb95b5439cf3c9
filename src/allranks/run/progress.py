"""When a run that makes no steps is called stalled: the one rule of launcher, watcher and doctor.

A run is judged by its own steps. Where one rank keeps the others waiting, or all wait in an
exchange, that is soon more than usual. Where all ranks are alike they may be at an evaluation or a
checkpoint, which takes longer. `--stalled SECONDS` takes the place of all of it.
"""

from __future__ import annotations

LEAST_SECONDS = 10.0  # less than that is nothing to speak of
USUAL_STEPS = 20.0  # times the usual step
LONGEST_PAUSES = 3.0  # times the longest pause between two steps so far
FIRST_STEP_SECONDS = 120.0  # to import, to meet, to compile
# Of ranks that are alike.
ALIKE_SECONDS = 120.0
ALIKE_TIMES = 2.0
ALIKE_FIRST_SECONDS = 300.0  # imports from a network disk, copies of data, compiling
# Before a run without a step is ended, if that is asked for; a script may prepare its data first.
END_FIRST_SECONDS, END_SCRIPT_SECONDS = ALIKE_FIRST_SECONDS, 3600.0


def patience(
    usual: float | None, longest: float, *, stands_out: bool = True, asked: float | None = None
) -> float:
    """Seconds without a step after which a run is stalled.

    `usual`: seconds of a step, None before the first; `longest`: of the pauses between steps so
    far. `stands_out`: whether anything tells the run from one that is busy elsewhere, as a rank
    that the others wait for. `asked`: what the user has set in place of this.
    """
    if asked is not None:
        return asked
    if usual is None:
        return FIRST_STEP_SECONDS if stands_out else ALIKE_FIRST_SECONDS
    soon = max(LEAST_SECONDS, USUAL_STEPS * usual, LONGEST_PAUSES * longest)
    return soon if stands_out else max(ALIKE_SECONDS, ALIKE_TIMES * soon)


def patience_to_end(timeout: float, *, has_stepped: bool, is_script: bool) -> float:
    """Seconds without a step after which a run with `stall_timeout` is ended."""
    if has_stepped:
        return timeout
    return max(timeout, END_SCRIPT_SECONDS if is_script else END_FIRST_SECONDS)
