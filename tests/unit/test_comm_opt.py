"""Ways of sending less side by side, from what their runs left behind."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from allranks.bench import comm_opt
from allranks.bench.comm_opt import as_json, check, override_of, read_batch_sizes, read_methods
from allranks.bench.precision import Trial
from allranks.errors import AllranksError
from allranks.job.job import COMPRESS, Compress, load_job
from allranks.timing.steps import Timing


def timing(step_seconds: float, comm: float) -> Timing:
    parts = {"compute": step_seconds - comm, "comm": comm, "straggler": 0.0, "data": 0.0}
    return Timing(
        first_step=3,
        last_step=12,
        ranks=2,
        steady=True,
        seconds=1.0,
        samples=160,
        step_seconds=step_seconds,
        step_deviation=0.0,
        parts=parts,
        slowest_rank=None,
        slowest_share=0.0,
        slowest_part=None,
    )


def trial(name: str, sent: float, loss: float, *, seconds: float, comm: float) -> Trial:
    return Trial(
        name,
        run=f"run-{name}",
        samples_per_second=8 / seconds,
        losses={10: 3.0, 20: loss},
        measured=timing(seconds, comm),
        sent_per_step=sent,
    )


TRIALS = [
    trial("plain", 8000, 2.0, seconds=0.4, comm=0.1),
    trial("powersgd", 500, 2.02, seconds=0.3, comm=0.05),
    trial("topk", 80, 2.5, seconds=0.2, comm=0.1),
    Trial("diloco", run="r", problem="it crashed"),
    trial("plain, batch 32", 8000, 2.0, seconds=0.8, comm=0.1),
]


def found(trials: list[Trial]) -> dict[str, Any]:
    methods = read_methods("powersgd,topk,diloco")
    return as_json(trials, methods, [8, 32], steps=20) | {"layout": "1x2"}


def test_methods_are_compared_with_plain() -> None:
    rows = {row["method"]: row for row in found(TRIALS)["rows"]}
    assert list(rows) == ["plain", "powersgd", "topk", "diloco"]
    assert rows["plain"]["communication_to_computation"] == pytest.approx(
        {"8": 0.1 / 0.3, "32": 0.1 / 0.7}
    )
    assert rows["powersgd"]["communication_to_computation"]["32"] is None
    assert (rows["plain"]["ratio"], rows["powersgd"]["ratio"], rows["topk"]["ratio"]) == (
        1,
        16,
        100,
    )
    assert rows["powersgd"]["relative_loss_difference"] == pytest.approx(0.01)
    assert rows["topk"]["largest_loss_difference"] == pytest.approx(0.5)
    assert rows["diloco"]["ratio"] is None and rows["diloco"]["problem"] == "it crashed"
    assert found(TRIALS)["verdict"] == (
        "powersgd sends 1/16.0 of plain's bytes, at 1.33x its speed here; "
        "after 20 steps its loss differs by +1.0%"
    )


def test_verdicts_without_a_choice() -> None:
    assert "every method's loss is more than 2%" in found([TRIALS[0], TRIALS[2]])["verdict"]
    assert "only plain could be measured" in found([TRIALS[0], TRIALS[3]])["verdict"]
    assert "nothing can be compared: it crashed" in found([TRIALS[3]])["verdict"]
    assert "no run was made" in found([])["verdict"]  # stopped by a Ctrl-C


def test_what_was_measured_is_shown() -> None:
    console = Console(file=io.StringIO(), width=120)
    comm_opt.show(console, found(TRIALS))
    text = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert "1/16.0" in text and "comm/comp 32" in text and "diloco: it crashed" in text


def test_a_method_replaces_what_the_job_has_for_another() -> None:
    job = load_job(None, ["compress={name: powersgd, rank: 9}"])
    for method in COMPRESS:
        override = override_of(method, job.compress)
        chosen = load_job(None, ["compress={name: powersgd, rank: 9}", override]).compress
        rank = {"rank": 9} if method == "powersgd" else {}
        assert chosen == Compress(name=method, **rank)  # type: ignore[arg-type]
    assert override_of("plain", job.compress) == "compress=null"


def test_what_is_typed() -> None:
    assert read_methods(None) == ["plain", *COMPRESS]
    assert read_methods("topk, bf16") == ["plain", "bf16", "topk"]
    assert read_batch_sizes("32, 8,8") == [8, 32] and read_batch_sizes(None) == []
    with pytest.raises(AllranksError, match="zip is not a method"):
        read_methods("bf16,zip")
    with pytest.raises(AllranksError, match="not a list of numbers"):
        read_batch_sizes("8,x")
    with pytest.raises(AllranksError, match="layout 1x1 has only one"):
        check(load_job(None))
    with pytest.raises(AllranksError, match="bench comm-opt is for tasks"):
        check(load_job(None, command=["python", "train.py"], layout="1x2"))
