"""Scripts with CUDA graphs, by hand: `pytest -m gpu`. Traced, counted, and not changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.commandline import run_allranks

pytestmark = pytest.mark.gpu

# Steps of a small network in four forms, the loss at the end, and how long a replayed step takes
# before and after our trace. It also makes two profiles of its own, after ours.
SCRIPT = """
import sys, time, statistics, torch
from torch import nn
form, profiles = sys.argv[1], "--profiles" in sys.argv
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(40))).cuda()
inputs, target = torch.randn(256, 512, device="cuda"), torch.randn(256, 512, device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
call = model
if form == "callables":
    call = torch.cuda.make_graphed_callables(model, (inputs.clone().requires_grad_(),))
elif form == "reduce-overhead":
    call = torch.compile(model, mode="reduce-overhead")

def work():
    loss = nn.functional.mse_loss(call(inputs), target)
    loss.backward()
    return loss

def step():
    loss = work()
    optimizer.step()
    optimizer.zero_grad(set_to_none=form != "whole")
    return loss

if form == "whole":
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
            optimizer.zero_grad(set_to_none=False)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = work()
    def work():
        graph.replay()
        return held

times = []
for number in range(600):
    began = time.perf_counter()
    loss = step()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - began)
if profiles:
    for _ in range(2):
        with torch.profiler.profile() as own:
            for _ in range(3):
                loss = step()
            torch.cuda.synchronize()
        assert sum(e.device_time_total > 0 for e in own.key_averages()) > 3
        step()
print("loss", loss.item())
print("early", statistics.median(times[7:11]), "late", statistics.median(times[-300:]))
"""


def facts(output: str) -> dict[str, float]:
    words = [word for line in output.splitlines() for word in line.split()]
    names = ("loss", "early", "late")
    return {name: float(words[words.index(name) + 1]) for name in names}


def run(folder: Path, *arguments: str) -> tuple[dict[str, float], Any, dict[str, Any]]:
    """What a script says under allranks, the run's JSON, and its trace event."""
    words = ["run", "--json", "--", sys.executable, "train.py", *arguments]
    done = run_allranks(*words, cwd=folder, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    attempt = Path(answer["run_dir"], "attempts", "0")
    events = map(json.loads, (attempt / "rank-0.jsonl").read_text().splitlines())
    trace = next(event for event in events if event["event"] == "trace")
    return facts((attempt / "rank-0.log").read_text()), answer, trace


@pytest.mark.parametrize("form", ["whole", "callables", "reduce-overhead"])
def test_graphs_are_counted_traced_and_left_alone(tmp_path: Path, form: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "train.py", form, "--profiles"]
    bare = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert bare.returncode == 0, bare.stderr[-3000:]
    expected = facts(bare.stdout)
    found, answer, trace = run(tmp_path, form, "--profiles")
    print(f"{form}: bare {expected}, with a trace {found}, {trace}, mfu {answer['mfu']}")
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    # Every layer: forward, the gradient of its weights, and that of its inputs.
    product = 2 * 256 * 512 * 512
    assert sum(trace["flops"].values()) == pytest.approx(3 * 40 * product, rel=0.03)
    assert answer["mfu"] > 0
