"""Traces of scripts: what they show, and that they change nothing."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from tests.scripts import MODEL, run, run_script

from allranks.probe.profilers import ITS_OWN

pytestmark = pytest.mark.ranks

# A busy machine may hold a step up for as long as an evaluation would, which ends a trace.
PATIENT = "from allranks.probe import tracing; tracing.PAUSE_SECONDS = 100.0"
LOOP = f"""
    {PATIENT}
    dist.init_process_group("gloo")
    model = DDP(model)
    for epoch in range(4):
        for x, y in DataLoader(data, batch_size=4, shuffle=True):
            time.sleep(0.003)
            loss = train(x, y)
    print("loss", loss.item().hex())
    dist.destroy_process_group()
    """


def body(text: str) -> str:
    return MODEL + textwrap.dedent(text)


def test_all_ranks_trace_the_same_steps_and_name_the_line_that_holds_them_up(
    tmp_path: Path,
) -> None:
    found = run(tmp_path, LOOP, 2)
    bare = run(tmp_path, LOOP, 2, ALLRANKS_TRACE="off")
    traced = []
    for rank in range(2):
        (event,) = found.events("trace", rank)
        assert event["device"] == "cpu" and "problem" not in event, event
        assert event["host"] >= 0.002 and event["busy"] > 0 and event["cost"] >= 0
        line, seconds = event["lines"][0]
        assert line.startswith("train.py:") and seconds >= 0.002, event
        text = (tmp_path / found.run.path / "train.py").read_text().splitlines()
        assert "sleep" in text[int(line.split(":")[1]) - 1]
        traced.append([step["step"] for step in found.steps(rank) if step.get("traced")])
        assert {event["first"], event["last"]} <= set(traced[-1])
        assert found.said("loss", rank) == bare.said("loss", rank) != []
        assert found.log(rank) == bare.log(rank)
    assert traced[0] == traced[1] and traced[0][0] == 12 and traced[0][-1] < 30
    assert not bare.events("trace") and not any("traced" in step for step in bare.steps())


OF_ITS_OWN = f"""
    {PATIENT}
    from torch.profiler import profile, record_function, schedule
    numbers, step, own, around = [], 0, None, None
    for epoch in range(6):
        for x, y in DataLoader(data, batch_size=4):
            step += 1
            if step == AROUND:
                around = record_function("around").__enter__()
            if step == FIRST:
                own = profile(
                    activities=[torch.profiler.ProfilerActivity.CPU],
                    schedule=schedule(wait=1, warmup=2, active=4, repeat=1),
                    on_trace_ready=lambda p: numbers.extend(
                        one.count for one in p.key_averages() if one.key == "aten::addmm"
                    ),
                )
                own.start()
            loss = train(x, y)
            if own is not None:
                own.step()
            if step == FIRST + 10:
                own.stop()
                own = None
            if around is not None and step == FIRST + 5:
                around.__exit__(None, None, None)
    print("loss", loss.item().hex(), numbers)
    """


@pytest.mark.parametrize(
    ("first", "around", "profile"),
    [
        pytest.param(2, 0, "", id="before"),
        pytest.param(14, 0, "", id="during"),
        pytest.param(15, 14, "", id="within an operation that began under ours"),
        pytest.param(30, 20, "", id="after"),
        pytest.param(2, 0, "5", id="before a profile"),
        pytest.param(9, 9, "5", id="during the trial of a profile"),
        pytest.param(15, 14, "5", id="during a profile"),
    ],
)
def test_a_script_that_profiles_itself_is_left_alone(
    tmp_path: Path, first: int, around: int, profile: str
) -> None:
    script = OF_ITS_OWN.replace("FIRST", str(first)).replace("AROUND", str(around))
    found = run_script(tmp_path, body(script), env={"ALLRANKS_PROFILE": profile})
    assert found.exits == [0], found.log()
    bare = run(tmp_path, script, ALLRANKS_PROBE="off")
    assert found.said("loss") == bare.said("loss") != []
    assert len(found.steps()) == 60
    problems = [event.get("problem") for event in found.events("profile" if profile else "trace")]
    assert problems == [None] if first == 30 else ITS_OWN in str(problems[0])


def test_later_traces_are_of_the_same_steps_on_all_ranks(tmp_path: Path) -> None:
    script = f"""
        {PATIENT}
        tracing.LATER_SHARE, tracing.AHEAD_SECONDS = 1.0, 0.02
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
        own = tracing.Tracer._wait

        def wait(self, step):
            own(self, step)
            # However late the writing threads come on a busy machine, they come in time.
            said = self.recorder.folder / tracing.ANNOUNCED
            while True:
                announced = int(said.read_text().split()[0]) if said.exists() else 0
                planned = self._start_after or 0
                if planned == announced or max(planned, announced) <= max(step, 11):
                    return
                time.sleep(0.001)

        tracing.Tracer._wait = wait
        dist.init_process_group("gloo")
        model = DDP(model)
        ends, until = torch.zeros(1), time.monotonic() + 60
        while not ends:
            for x, y in DataLoader(data, batch_size=4):
                time.sleep(0.004)
                train(x, y)
            at = os.environ["ALLRANKS_RUN_DIR"] + "/attempts/0/rank-0.jsonl"
            ends.fill_(open(at).read().count('"trace"') > 1 or time.monotonic() > until)
            dist.all_reduce(ends, dist.ReduceOp.MAX)
        dist.destroy_process_group()
        """
    found = run(tmp_path, script, 2)
    ranks = [
        [(event["first"], event["last"]) for event in found.events("trace", rank)]
        for rank in range(2)
    ]
    assert len(ranks[0]) > 1 and ranks[0] == ranks[1]
    marked = [[one["step"] for one in found.steps(rank) if one.get("traced")] for rank in range(2)]
    assert marked[0] == marked[1]


def test_an_evaluation_within_a_trace_ends_it(tmp_path: Path) -> None:
    script = """
        for epoch in range(8):
            for x, y in DataLoader(data, batch_size=4):
                train(x, y)
            if epoch == 1:  # after step 20
                model.eval()
                end = time.monotonic() + 1
                while time.monotonic() < end:
                    model(x)
                model.train()
        """
    (event,) = run(tmp_path, script).events("trace")
    steps = event["last"] - event["first"] + 1
    assert steps >= 2 and event["busy"] * steps < 0.9, event


@pytest.mark.parametrize(
    "end",
    [
        "raise ValueError('gone')",
        "sys.exit(3)",
        "os._exit(4)",
        "os.kill(os.getpid(), 15)",
        "raise KeyboardInterrupt",
    ],
)
def test_a_script_that_ends_within_a_trace_ends_as_without(tmp_path: Path, end: str) -> None:
    """With a process that is forked in it, and an operation that is never ended."""
    script = f"""
        import sys
        steps = 0
        for epoch in range(6):
            for x, y in DataLoader(data, batch_size=10):
                train(x, y)
                steps += 1
                if steps == 14:
                    torch.profiler.record_function("open").__enter__()
                    if not (child := os.fork()):
                        model(x)
                        os._exit(0)
                    os.waitpid(child, 0)
                if steps == 17:
                    {end}
        """
    ends = [
        run_script(tmp_path, body(script), env={"ALLRANKS_TRACE": trace}) for trace in ("", "off")
    ]
    assert ends[0].exits == ends[1].exits != [0]
    if "os." not in end:  # otherwise the last second may be lost
        assert ends[0].samples() == ends[1].samples() == [10] * 17
    assert ends[0].said("ValueError:") == ends[1].said("ValueError:")
