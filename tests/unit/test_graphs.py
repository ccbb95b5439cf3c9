"""What CUDA graphs compute, counted at their capture and where a traced step replays them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from allranks.probe import hooks
from allranks.probe.graphs import Graphs
from allranks.probe.profilers import Profilers
from allranks.probe.recorder import Recorder
from allranks.probe.tracing import Session
from allranks.timing.flops import Flops
from allranks.timing.trace import Span, read_trace

ROWS, WIDTH, OUT = 4, 6, 5
PRODUCT = 2 * ROWS * WIDTH * OUT


class OnCpu:
    """A CUDA graph as a script uses it: what is captured, it calls again."""

    def __init__(self) -> None:
        self.work: Any = None

    def capture_begin(self) -> None:
        pass

    def capture_end(self) -> None:
        pass

    def replay(self) -> Any:
        return self.work() if self.work is not None else None


class Replays(torch.autograd.Function):
    """A forward pass that replays one graph, and a backward pass that replays another."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, forward: OnCpu, backward: OnCpu) -> torch.Tensor:
        ctx.backward = backward
        forward.replay()
        return one * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.backward.replay()
        return gradients[0], None, None


class Stage:
    """A recorder whose hooks see these graphs, and the traced steps of a script."""

    def __init__(self, folder: Path) -> None:
        self.recorder = Recorder(folder, 0)
        hooks.hook_graphs(self.recorder)
        self.profilers = Profilers(self.recorder)
        self.graphs = Graphs(self.profilers)
        self.folder = folder
        self.linear = nn.Linear(WIDTH, OUT, bias=False)
        self.inputs = torch.randn(ROWS, WIDTH)

    def forward(self) -> torch.Tensor:
        return torch.as_tensor(self.linear(self.inputs)).sum()

    def captured(self, work: Any) -> OnCpu:
        graph = OnCpu()
        graph.capture_begin()
        work()
        graph.capture_end()
        return graph

    def reduced(self, step: Any, *, launches: int = 0) -> Any:
        """The trace event of two steps, in which so many graphs were launched."""
        session = Session(self.recorder, self.profilers, self.graphs)
        session.start(1, lambda why: None, at_once=True)
        for number in (2, 3):
            step()
            session.end_step(number)
        session.end()
        path = self.folder / "trace.json"
        session.made.export_chrome_trace(str(path))
        trace = read_trace(path, 0)
        assert trace is not None
        launch = Span("cudaGraphLaunch", "cuda_runtime", trace.begin, trace.begin, 0, {})
        trace.runtime = [launch] * launches
        fields = session.reduce(trace)
        session.close()
        return fields


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr("torch.cuda.CUDAGraph", OnCpu)
    for name in ("capture_begin", "capture_end", "replay"):  # hooks stay within this test
        monkeypatch.setattr(OnCpu, name, vars(OnCpu)[name])
    return Stage(tmp_path)


def test_a_graph_of_the_whole_step_counts_as_the_step_does(stage: Stage) -> None:
    graph = stage.captured(lambda: stage.forward().backward())
    assert stage.graphs.flops == [Flops({"float32": 3 * PRODUCT})]
    assert stage.reduced(lambda: graph.replay(), launches=2)["flops"] == {"float32": 3 * PRODUCT}
    assert OnCpu.replay is vars(OnCpu)["replay"]
    graph.replay()  # after the trace, without a mark


def test_a_graph_in_a_forward_pass_is_trained_and_one_in_a_backward_pass_is_not(
    stage: Stage,
) -> None:
    forward, backward = stage.captured(stage.forward), stage.captured(stage.forward)
    one = torch.ones(1, requires_grad=True)

    def step() -> None:
        Replays.apply(one, forward, backward).sum().backward()  # type: ignore[no-untyped-call]

    assert stage.reduced(step)["flops"] == {"float32": 3 * PRODUCT}


def test_nothing_is_said_of_graphs_that_were_not_counted(stage: Stage) -> None:
    early = OnCpu()  # captured before the probe began
    assert "flops" not in stage.reduced(lambda: (early.replay(), stage.forward()))
    known = stage.captured(stage.forward)
    # Launched by what calls no `replay` of the class, such as a C++ extension.
    assert "flops" not in stage.reduced(known.replay, launches=2)
    nothing = stage.captured(lambda: torch.ones(2).add_(1))
    both = stage.reduced(lambda: (known.replay(), nothing.replay()))
    assert both["flops"] == {"float32": PRODUCT}


def test_a_capture_that_fails_is_not_counted(stage: Stage) -> None:
    broken = OnCpu()
    broken.capture_begin()
    stage.recorder.capture_ended(None)
    assert not stage.profilers.is_running and stage.graphs.flops == []
    stage.captured(stage.forward)
    assert len(stage.graphs.flops) == 1


def test_an_error_of_ours_leaves_the_script_and_the_rest_of_the_probe_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.probe.graphs.counted", lambda made: 1 / 0)
    graph = stage.captured(stage.forward)
    assert stage.recorder.is_on and stage.graphs.flops == []
    assert "flops" not in stage.reduced(lambda: graph.replay())


def test_a_profiler_of_the_script_during_a_capture_ends_ours(stage: Stage) -> None:
    graph = OnCpu()
    graph.capture_begin()
    assert stage.profilers.is_running
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        stage.forward()
    assert any(event.key == "aten::mm" for event in own.key_averages())
    graph.capture_end()
    assert not stage.profilers.is_running and stage.graphs.flops == []
    stage.captured(stage.forward)
    assert stage.graphs.flops == []  # the script profiles: never again
