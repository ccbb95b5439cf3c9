"""Where the probe begins in a rank: called when torch has been imported."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from pathlib import Path

from allranks import timeline
from allranks.probe import hooks
from allranks.probe.profile import profile_if_asked
from allranks.probe.recorder import Recorder
from allranks.probe.surroundings import Surroundings
from allranks.probe.window import Window

MEASURE = "ALLRANKS_MEASURE"  # how many steady steps a benchmark wants before the script ends


def start() -> None:
    """Begin to record this process's steps, as the rank that its environment says it is."""
    env = os.environ
    if env.get("ALLRANKS_PROBE") == "off":
        return
    recorder = Recorder(events_path(env))
    timeline.current = recorder.timeline
    hooks.install(recorder)
    os.register_at_fork(after_in_child=lambda: setattr(recorder, "is_on", False))
    Surroundings(recorder, env).begin_with_steps()
    if env.get(MEASURE):
        Window(recorder, int(env[MEASURE]), rank=int(env["RANK"]))
    profile_if_asked(recorder, env)
    atexit.register(recorder.flush)


def events_path(env: Mapping[str, str]) -> Path:
    attempt = Path(env["ALLRANKS_RUN_DIR"]) / "attempts" / env["ALLRANKS_ATTEMPT"]
    return attempt / f"rank-{env['RANK']}.jsonl"
