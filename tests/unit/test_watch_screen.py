"""The screens of watch, as text, in terminals of any size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.text import Text

from allranks.errors import AllranksError
from allranks.show.text import clean, shortened
from allranks.watch.cells import (
    DEFAULT_MARKS,
    judged,
    mark_in_words,
    parse_marks,
    rank_cells,
    sparkline,
)
from allranks.watch.draw import Scene, help_screen, log_screen, parts_lines, screen, window
from allranks.watch.logs import KEPT_BYTES, MAX_REST_BYTES, LogPage
from allranks.watch.run_screen import OpenLog
from allranks.watch.views import Parts, RankView, RunView

NOW = 1_794_750_000.0


def run(name: str = "digits-20261115-142301-3f9a", **fields: object) -> RunView:
    known: dict[str, object] = {
        **{"run": name, "run_dir": f"/runs/{name}", "job": "digits", "state": "running"},
        **{"layout": "1x4", "device": "NVIDIA H100 80GB HBM3", "world_size": 4, "attempts": 1},
        **{"epoch": 2, "epochs": 20, "step": 120, "steps": 2000, "loss": 0.412},
        **{"losses": tuple(2.0 / n for n in range(1, 40)), "samples_per_second": 12_345.0},
        **{"efficiency": 0.94, "baseline": "digits-20261115-100000-aaaa"},
        **{"seconds_left": 4320.0, "rank_hours": 1.25, "checkpoint": 100, "attempt": 0},
    }
    return RunView(**known | fields)  # type: ignore[arg-type]


def rank(number: int, **fields: object) -> RankView:
    known: dict[str, object] = {
        **{"rank": number, "node": f"node{number // 4 + 1}", "step": 120, "step_seconds": 0.106},
        **{"data": 0.002, "wait": 0.012, "utilization": 97, "memory": 68 << 30},
        **{"memory_total": 80 << 30, "power": 640.0, "power_limit": 700.0, "temperature": 66},
        **{"cpu": 1.02, "heartbeat": NOW - 1.4},
    }
    return RankView(**known | fields)  # type: ignore[arg-type]


WAITING = run(
    "language-20261115-142500-77aa",
    state="queued",
    layout="2x8",
    reason="waits for its turn: other jobs have a higher priority",
    expected_start="2026-11-15T16:40:00",
    **dict.fromkeys(["step", "epoch", "loss", "samples_per_second", "efficiency", "seconds_left"]),
    losses=(),
    rank_hours=0.0,
)
FAILED = run(
    "digits-20261115-110000-bbbb", state="failed", reason="rank 3: CUDA out of memory", step=77
)
PARTS = Parts(
    seconds={"compute": 0.08, "comm": 0.012, "straggler": 0.008, "data": 0.004, "other": 0.002},
    steps=16,
    slowest_rank=3,
    slowest_share=0.94,
    slowest_part="backward",
)


def scene(**fields: object) -> Scene:
    known: dict[str, object] = {
        "runs": [run(), WAITING, FAILED],
        "selected": "digits-20261115-142301-3f9a",
        "ranks": [rank(n, slowest=n == 3, utilization=75 if n == 1 else 97) for n in range(4)],
        "parts": PARTS,
        "now": NOW,
        "marks": DEFAULT_MARKS,
    }
    return Scene(**known | fields)  # type: ignore[arg-type]


def plain(lines: Sequence[Text]) -> list[str]:
    return [line.plain.rstrip() for line in lines]


def test_the_screen_at_80_columns() -> None:
    lines = plain(screen(scene(), 80, 18))
    assert re.fullmatch(r"allranks watch  1 running, 1 queued, 1 failed +\d\d:\d\d:\d\d", lines[0])
    assert lines[1:] == [
        "  run                 state    layout      step  left    loss curve    samples/s",
        "> digits-20…2301-3f9a running  1x4    120/2,000 1h12m 0.41200 █▂▁▁▁▁▁▁     12.3k",
        "  language-…2500-77aa queued   2x8              waits for its turn: other jobs …",
        "  digits-20…0000-bbbb failed   1x4     77/2,000 rank 3: CUDA out of memory",
        "── digits-20261115-142301-3f9a " + 49 * "─",
        "running  94.0% efficiency  1x4  NVIDIA H100 80GB HBM3  checkpoint 100  1.25 GPU…",
        "step 106ms: compute 75%  comm 11%  waiting 8%  data 4%  other 2%",
        "slowest: rank 3, last in 94% of the last 16 steps, slower in backward",
        "   rank node    gpu%  memory power  °C   took   data   wait  cpu  seen",
        "      0 node1    97+   68Gi+ 640W+  66  106ms 2.00ms 12.0ms  1.0    1s",
        "      1 node1    75!   68Gi+ 640W+  66  106ms 2.00ms 12.0ms  1.0    1s",
        "      2 node1    97+   68Gi+ 640W+  66  106ms 2.00ms 12.0ms  1.0    1s",
        "      3 node1    97+   68Gi+ 640W+  66  106ms 2.00ms 12.0ms  1.0    1s < slowest",
        *[""] * 3,
        "↑↓ move  tab ranks  enter logs  s stop  q quit  ? help",
    ]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 132, 160, 250])
@pytest.mark.parametrize("height", [4, 10, 24, 50])
def test_every_size_is_filled_and_never_exceeded(width: int, height: int) -> None:
    many = [rank(n, slowest=n == 37) for n in range(64)]
    for one in (
        scene(),
        scene(ranks=many),
        scene(ranks=many, selected_rank=50),
        scene(runs=[run(f"digits-20261115-1423{n:02}-3f9a") for n in range(60)], selected=None),
        scene(runs=[], selected=None, ranks=[]),
        scene(message="a message " * 40),
    ):
        lines = screen(one, width, height)
        assert len(lines) == height
        assert max(line.cell_len for line in lines) <= width
    for lines in (
        help_screen(DEFAULT_MARKS, width, height),
        log_screen("a run", ["x" * 500] * 100, width, height, "following"),
    ):
        assert len(lines) == height
        assert max(line.cell_len for line in lines) <= width


def test_a_wide_screen_has_every_column() -> None:
    lines = plain(screen(scene(), 160, 24))
    header = lines[1].split()
    assert header == [
        *("run", "state", "layout", "epoch", "step", "left", "loss", "curve"),
        *("samples/s", "eff", "hours"),
    ]
    assert "digits-20261115-142301-3f9a" in lines[2] and "94.0%" in lines[2]
    assert "expected to start" in lines[3] and "16:40" in lines[3]
    titles = next(line for line in lines if line.strip().startswith("rank node")).split()
    expected = "rank node gpu% memory power °C step took data wait cpu seen"
    assert titles == expected.split()


def test_marks_have_signs_and_the_slowest_a_word() -> None:
    lines = plain(screen(scene(), 160, 24))
    rows = [line for line in lines if "node1" in line]
    assert "97+" in rows[0] and "75!" in rows[1]
    assert [line.endswith("< slowest") for line in rows] == [False, False, False, True]
    told = next(line for line in lines if line.startswith("step 106ms"))
    assert "compute 75%" in told
    assert "slowest: rank 3, last in 94% of the last 16 steps, slower in backward" in told


def test_the_slowest_of_many_ranks_is_always_in_sight() -> None:
    many = [rank(n, slowest=n == 37) for n in range(64)]
    lines = plain(screen(scene(ranks=many), 80, 24))
    assert any(line.startswith("     37") and line.endswith("slowest") for line in lines)
    assert any("more ranks" in line for line in lines)
    lines = plain(screen(scene(ranks=many, selected_rank=60), 80, 24))
    assert any(line.startswith(">    60") for line in lines)
    assert any(line.startswith("     37") for line in lines)


def test_a_loss_that_is_not_a_number_stands_out() -> None:
    lines = plain(screen(scene(runs=[run(loss=None, losses=(1.0, 0.5, None))]), 80, 24))
    assert "! nan" in lines[2] and "!" in lines[2].split("! nan")[1]


def test_a_stalled_run_is_told_from_one_that_runs() -> None:
    stalled = run(stalled=True, reason="stalled: no step for 5m00s")
    lines = plain(screen(scene(runs=[stalled]), 80, 24))
    assert "1 stalled" in lines[0] and "no step for 5m00s" in lines[2]


def test_nothing_in_a_file_is_obeyed_by_the_terminal() -> None:
    evil = "a\x1b[2Jb\x1b]0;title\x07c\x07\rd\x9b31me\tf"
    assert clean(evil).replace(" ", "") == "abcdef"
    failed = run(state="failed", reason=f"rank 0: {evil}")
    lines = screen(scene(runs=[failed], ranks=[rank(0, node=evil)]), 120, 24)
    assert not any(ord(sign) < 32 or sign == "\x9b" for line in lines for sign in line.plain)
    page = log_screen("t", [evil], 80, 24, "")
    assert "\x1b" not in "".join(line.plain for line in page)


def test_the_question_before_a_stop_is_at_the_bottom() -> None:
    asked = scene(message="stop digits? y: yes n: no", asks=True)
    assert plain(screen(asked, 80, 24))[-1] == "stop digits? y: yes n: no"


@pytest.mark.parametrize(
    ("length", "at", "rows", "first"), [(10, 0, 4, 0), (10, 5, 4, 3), (10, 9, 4, 6), (3, 2, 5, 0)]
)
def test_a_window_has_the_selected_row(length: int, at: int, rows: int, first: int) -> None:
    seen = window(length, at, rows)
    assert seen.start == first and seen.start <= at < seen.stop


def test_marks_are_set_by_name() -> None:
    marks = parse_marks(["gpu_util=50,60", "network=70"])
    busy = RankView(rank=0, utilization=55, sent=8.0, link=10.0, workers_cpu=1.9, num_workers=2)
    assert judged(busy, marks)["gpu_util"] == ""
    assert judged(busy, marks)["network"] == "warn"
    assert judged(busy, DEFAULT_MARKS)["gpu_util"] == "warn"
    assert judged(busy, DEFAULT_MARKS)["workers"] == "warn"
    assert judged(RankView(rank=0), marks) == dict.fromkeys(marks, "")
    assert mark_in_words("gpu_util", marks["gpu_util"])[0] == "gpu_util=50,60"


@pytest.mark.parametrize(
    ("memory", "verdict"), [(70, ""), (80, "good"), (90, "good"), (91, "warn")]
)
def test_memory_is_good_when_nearly_full(memory: int, verdict: str) -> None:
    used = RankView(rank=0, memory=memory, memory_total=100)
    assert judged(used, DEFAULT_MARKS)["memory"] == verdict


@pytest.mark.parametrize("text", ["gpu=80,90", "gpu_util=80", "gpu_util=a,b", "gpu_util"])
def test_a_wrong_mark_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(AllranksError) as caught:
        parse_marks([text])
    assert "gpu_util" in caught.value.fix


def test_a_curve_in_one_line() -> None:
    assert sparkline([1.0, 2.0, 3.0], 8) == "▁▅█"
    assert len(sparkline([float(n) for n in range(1000)], 8)) == 8
    assert sparkline([], 8) == "" and sparkline([5.0], 8) == "▁"
    assert shortened("digits-20261115-142301-3f9a", 16) == "digits-…301-3f9a"


def test_a_log_is_followed_scrolled_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    page = LogPage(path)
    page.look()
    assert page.page(5) == []
    path.write_text("".join(f"line {n}\n" for n in range(100)) + "10%\r50%\rhalf a li")
    page.look()
    assert page.page(3) == ["line 98", "line 99", "half a li"]
    page.scroll(-10, 3)
    assert page.page(3) == ["line 87", "line 88", "line 89"]
    with path.open("a") as file:
        file.write("ne\nmore\n")
    page.look()
    assert page.page(3) == ["line 87", "line 88", "line 89"], "it stays where it was scrolled to"
    page.scroll(1 << 60, 3)
    assert page.page(2) == ["half a line", "more"] and page.state() == "following"
    page.scroll(-(1 << 60), 3)
    assert page.page(3) == ["line 0", "line 1", "line 2"]
    with path.open("a") as file:
        file.write("x" * 99 + "\n")
        file.write(("y" * 99 + "\n") * (3 * KEPT_BYTES // 100))
    page.look()
    assert sum(map(len, page.lines)) <= KEPT_BYTES and page.page(1) == ["y" * 99]


def test_a_log_in_the_terminal_has_no_secrets_and_no_endless_lines(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    body = "MIIEowIBAAKCAQEA" * 4
    path.write_text(f"--password hunter2\n-----BEGIN PRIVATE KEY-----\n{body}\n{body}")
    page = LogPage(path)
    page.look()
    expected = ["--password [redacted]", *["[redacted]"] * 3]
    assert page.page(9) == expected and page.page(9) == expected
    with path.open("a") as file:
        file.write("\n-----END PRIVATE KEY-----\nkept\n")
        file.write("\r 10%| bar" * 100_000)
    for _ in range(3):
        page.look()
    assert page.page(2) == ["kept", " 10%| bar"]
    assert len(page.rest) < 100
    with path.open("a") as file:
        file.write("x" * 300_000)
    page.look()
    assert len(page.rest) <= MAX_REST_BYTES


def test_ranks_that_take_turns_have_no_slowest_among_them() -> None:
    seconds = {"compute": 0.08, "comm": 0.0, "straggler": 0.02, "data": 0.0, "other": 0.0}
    shares, turns = parts_lines(Parts(seconds=seconds, steps=32), run())
    assert shares.plain == "step 100ms: compute 80%  waiting 20%"
    assert turns.plain == "no rank is slower than the others in the last 32 steps: they take turns"
    divided = rank_cells(rank(2, place="stage 1, shard 0"), DEFAULT_MARKS, NOW)
    assert divided["place"].plain == "stage 1, shard 0"
    calm = parts_lines(Parts(seconds=seconds | {"straggler": 0.002}, steps=32), run())
    assert calm[1].plain == ""


def test_a_log_is_searched_up_and_down(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    secret = "hf_" + "aB3" * 12
    words = ["Error one", *["filler"] * 50, "an ERROR two", *["filler"] * 50, f"TOKEN={secret}"]
    path.write_text("\n".join(words) + "\n")
    page = LogPage(path)
    page.look()
    assert page.find("error", 10, up=True) and "an ERROR two" in page.page(10)
    assert page.find("error", 10, up=True) and "Error one" in page.page(10)
    assert not page.find("error", 10, up=True) and "Error one" in page.page(10)
    assert page.find("error", 10, up=False) and "an ERROR two" in page.page(10)
    page.found = None
    assert not page.find(secret[:8], 10, up=True)  # what is not shown is not found


def test_keys_in_a_log_are_letters_while_a_word_is_typed(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text("hello\njkl\n")
    log = OpenLog("a run", "rank-0.log", "rank 0", LogPage(path))
    log.page.look()
    log.is_typed = True
    for key in ("j", "k", "x", "backspace", "l"):
        log.type(key, 10)
    assert log.draw(80, 5)[-1].plain.startswith("search: jkl_")
    log.type("enter", 10)
    assert log.is_found and any(span.style == "reverse" for span in log.draw(80, 5)[2].spans)
    assert "n: next above" in log.draw(80, 5)[-1].plain
    log.wanted, log.is_typed = "nowhere", True
    log.type("enter", 10)
    assert log.draw(80, 5)[-1].plain.startswith("'nowhere' is not in this log")


def test_gpus_by_what_a_rank_writes_of_them() -> None:
    """Utilisation, memory, power beside its limit and heat, each with its mark."""
    full = RankView(rank=0, utilization=95, memory=85 << 30, memory_total=100 << 30)
    hot = replace(full, utilization=79, memory=91 << 30, power=690.0, power_limit=700.0)
    idle = replace(full, utilization=85, memory=10 << 30, power=100.0, power_limit=700.0)
    keys = ("gpu", "memory", "power", "temperature")

    def said(one: RankView) -> list[str]:
        cells = rank_cells(one, DEFAULT_MARKS, 0.0)
        return [cells[key].plain.strip() for key in keys]

    assert said(full) == ["95+", "85Gi+", "", ""]
    assert said(replace(hot, temperature=83)) == ["79!", "91Gi!", "690W+", "83"]
    assert said(idle) == ["85", "10Gi", "100W", ""]


def test_a_log_just_longer_than_what_is_kept_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text("a line\n" * (KEPT_BYTES // 7 + 10))
    page = LogPage(path)
    page.look()
    assert page.page(2) == ["a line", "a line"]
