"""Traces of scripts: what they show, and that they change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.scripts import run

pytestmark = pytest.mark.ranks

LOOP = """
    dist.init_process_group("gloo")
    model = DDP(model)
    for epoch in range(4):
        for x, y in DataLoader(data, batch_size=4, shuffle=True):
            time.sleep(0.003)
            loss = train(x, y)
    print("loss", loss.item().hex())
    dist.destroy_process_group()
    """


def test_all_ranks_trace_the_same_steps_and_name_the_line_that_holds_them_up(
    tmp_path: Path,
) -> None:
    found = run(tmp_path, LOOP, 2)
    bare = run(tmp_path, LOOP, 2, ALLRANKS_TRACE="off")
    traced = []
    for rank in range(2):
        (event,) = found.events("trace", rank)
        assert event["device"] == "cpu" and "problem" not in event, event
        assert event["host"] >= 0.003 and event["busy"] > 0 and event["cost"] >= 0
        line, seconds = event["lines"][0]
        assert line.startswith("train.py:") and seconds >= 0.003, event
        text = (tmp_path / found.run.path / "train.py").read_text().splitlines()
        assert "sleep" in text[int(line.split(":")[1]) - 1]
        traced.append([step["step"] for step in found.steps(rank) if step.get("traced")])
        assert {event["first"], event["last"]} <= set(traced[-1])
        assert found.said("loss", rank) == bare.said("loss", rank) != []
        assert found.log(rank) == bare.log(rank)
    assert traced[0] == traced[1] and traced[0][0] == 12 and traced[0][-1] < 30
    assert not bare.events("trace") and not any("traced" in step for step in bare.steps())
