"""Starts the probe in a rank, once torch has been imported."""

from __future__ import annotations

import os
from pathlib import Path

from allranks.probe import hooks
from allranks.probe.device_memory import DeviceMemory
from allranks.probe.device_sampler import DeviceSampler
from allranks.probe.memory_use import STATM, MemoryUse
from allranks.probe.profile import VARIABLE as PROFILE
from allranks.probe.profile import profile_if_asked
from allranks.probe.profilers import Profilers
from allranks.probe.recorder import Recorder
from allranks.probe.tracing import VARIABLE as TRACE
from allranks.probe.tracing import Tracer
from allranks.probe.window import Window
from allranks.timing import timeline

MEASURE = "ALLRANKS_MEASURE"  # how many steady steps a benchmark wants before the script ends


def start() -> None:
    """Start to record this process's steps, as the rank that its environment names."""
    env = os.environ
    if env.get("ALLRANKS_PROBE") == "off":
        return
    attempt = Path(env["ALLRANKS_RUN_DIR"]) / "attempts" / env["ALLRANKS_ATTEMPT"]
    recorder = Recorder(attempt, int(env["RANK"]))
    timeline.current = recorder.timeline
    hooks.install(recorder)
    os.register_at_fork(after_in_child=recorder.forget)
    DeviceSampler(recorder, env).begin_with_steps()
    traces = env.get(TRACE) != "off"
    if traces:
        DeviceMemory(recorder)
    if STATM.exists():  # Linux
        MemoryUse(recorder, looks_for_lines=traces)
    if env.get(MEASURE):
        Window(recorder, int(env[MEASURE]))
    if traces or env.get(PROFILE):
        profilers = Profilers(recorder)
        if not profile_if_asked(recorder, profilers, env) and traces:
            Tracer(recorder, profilers, once=bool(env.get(MEASURE)))
