"""What the page is sent: the pictures of runs, what changed in them, and lines of logs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.page_runs import LiveRun, held

from allranks.run.folder import RunDir
from allranks.timing.verdict import Judgement, Verdict
from allranks.watch import logs, page_data
from allranks.watch.cells import DEFAULT_MARKS, rank_cells
from allranks.watch.live import Watcher
from allranks.watch.views import History, Parts, RankView, RunView

values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc~+=-"), inner, max_size=4)
    ),
    max_leaves=12,
)


def changed(before: Any, change: dict[str, Any]) -> Any:
    """What the page does with a change."""
    if "=" in change:
        return change["="]
    if "+" in change:
        start, items = change["+"]
        return [*before[:start], *items]
    kept = {key: value for key, value in before.items() if key not in change.get("-", [])}
    return kept | {key: changed(before.get(key), one) for key, one in change["~"].items()}


@given(values, values)
def test_a_change_makes_one_of_the_other(before: Any, after: Any) -> None:
    change = page_data.change(before, after)
    assert (change is None) == (before == after)
    if change is not None:
        assert changed(before, json.loads(json.dumps(change))) == after


def test_a_curve_that_grows_sends_its_end() -> None:
    before = {"x": [1, 2, 3], "y": [0.5, 0.4, 0.3]}
    after = {"x": [1, 2, 3, 4], "y": [0.5, 0.4, 0.31, 0.2]}
    expected = {"~": {"x": {"+": [3, [4]]}, "y": {"+": [2, [0.31, 0.2]]}}}
    assert page_data.change(before, after) == expected


def history(**rows: dict[int, tuple[float | None, ...]]) -> History:
    return History(width=10, samples_per_second=(None, 50.0, 60.0), ranks=rows)


def test_own_work_is_the_step_without_its_waits() -> None:
    past = history(
        seconds={0: (0.2, 0.2, 0.2), 1: (0.2, None)}, wait={0: (0.05, 0.08, None), 1: (0.01,)}
    )
    heat = page_data.heat(past, "work")
    assert heat is not None and heat["ranks"] == [0, 1] and heat["width"] == 10
    assert heat["columns"] == [[0.15, 0.19], [0.12, None], [0.2, None]]


def test_heat_maps_of_what_is_not_known_are_not_drawn() -> None:
    past = history(seconds={0: (0.2,)})
    assert page_data.heat(past, "data") is None and page_data.heat(None, "work") is None
    assert page_data.use(past) is None


def test_without_gpus_the_use_is_of_cpus() -> None:
    past = history(cpu={0: (1.0, 2.0), 1: (3.0,)})
    use = page_data.use(past)
    assert use is not None and use["unit"] == " CPUs"
    assert (use["mean"], use["low"], use["high"]) == ([2.0, 2.0], [1.0, 2.0], [3.0, 2.0])
    assert use["x"] == [5, 15]


def test_throughput_has_a_point_where_it_is_known() -> None:
    assert page_data.pace(history()) == {"x": [15, 25], "y": [50.0, 60.0]}


def test_a_run_in_words() -> None:
    view = RunView(
        **{"run": "a-1", "run_dir": "/a", "job": "a", "state": "running", "layout": "1x4"},  # type: ignore[arg-type]
        **{"step": 1200, "steps": 5000, "loss": 0.41234, "samples_per_second": 1234.5},  # type: ignore[arg-type]
        **{"seconds_left": 75.0, "epoch": 1, "epochs": 4, "metrics": {"val_loss": 0.5}},  # type: ignore[arg-type]
        **{"efficiency": 0.9, "baseline_layout": "1x1", "baseline": "a-0"},  # type: ignore[arg-type]
    )
    line = page_data.run_line(view, 0.0)
    assert (line["words"], line["share"]) == ("24.0% · 1,234/s · 1m15s left", 0.24)
    tiles = {name: (value, more, why) for name, value, more, why in page_data.tiles(view)}
    assert tiles["step"] == ("1,200", "of 5,000", "") and tiles["val loss"][0] == "0.50000"
    assert tiles["efficiency"] == ("90.0%", "", "compared with one rank: a-0")
    assert "step time" not in tiles and tiles["time left"][0] == "1m15s"
    failed = replace(view, state="failed", reason="rank 3: PASSWORD=hunter22", stalled=False)
    assert page_data.run_line(failed, 0.0)["words"] == "failed · 24.0% · 1m15s left"
    head = page_data.head(failed, "timed out", 0.0)
    assert head["facts"] == ["1x4"] and head["is_alarming"] and failed.culprit == 3
    assert head["warnings"] == ["rank 3: PASSWORD=[redacted]", "SLURM does not answer: timed out"]
    waits = replace(failed, state="queued", step=None)
    assert page_data.run_line(waits, 0.0)["words"] == "rank 3: PASSWORD=[redacted]"


def test_ranks_have_cells_with_marks_and_no_empty_columns() -> None:
    busy = RankView(
        rank=3,
        utilization=50.0,
        memory=60 << 30,
        memory_total=80 << 30,
        temperature=86,
        slowest=True,
    )
    idle = RankView(rank=4, step_seconds=0.1, data=0.02, heartbeat=7.25, sent=1e9)
    table = page_data.rank_table([busy, idle], DEFAULT_MARKS)
    assert table["columns"] == ["GPU", "memory", "°C", "network", "step time", "data"]
    first, second = table["ranks"]["3"], table["ranks"]["4"]
    assert first["cells"]["GPU"] == [50.0, "50%", "warn"] and first["slowest"]
    assert first["cells"]["memory"] == [60 << 30, "60 of 80 GiB", ""]
    assert first["cells"]["°C"][2] == "warn" and first["cells"]["data"] == [None, "-", ""]
    assert second["cells"]["data"] == [0.02, "20.0ms", "warn"] and second["heard"] == 7.2
    assert second["cells"]["network"][1] == "1 GB/s"
    divided = page_data.rank_table([replace(busy, place="stage 1, shard 0")], DEFAULT_MARKS)
    assert divided["ranks"]["3"]["cells"]["place"] == ["stage 1, shard 0"] * 2 + [""]


def test_memory_is_what_is_used_now_and_a_peak_is_called_one() -> None:
    rank = RankView(rank=0, host_memory=1300 << 20, host_memory_now=805 << 20)
    cells = page_data.rank_table([rank], DEFAULT_MARKS)["ranks"]["0"]["cells"]
    assert (cells["host memory"][1], cells["peak memory"][1]) == ("805 MiB", "1.27 GiB")
    assert rank_cells(rank, DEFAULT_MARKS, 0.0)["memory"].plain.strip() == "805Mi"
    of_old = RankView(rank=0, host_memory=1300 << 20)  # written before what is used now was
    assert rank_cells(of_old, DEFAULT_MARKS, 0.0)["memory"].plain == ""


def test_where_the_time_goes_in_words() -> None:
    seconds = {"compute": 0.09, "comm": 0.01, "straggler": 0.0, "data": 0.0, "other": 0.0}
    parts = Parts(seconds=seconds, steps=9, slowest_rank=2, slowest_share=0.5)
    run = RunView(run="a", run_dir="/a", job="a", state="running")
    line = page_data.parts_line(parts, run)
    assert line is not None and line["shares"]["comm"] == [0.1, "comm 10.0%"]
    assert line["slowest"] == "slowest: rank 2, last in 50% of the last 9 steps"
    divided = replace(parts, layout="1x4:pp=2", exchanges={"pipeline": 0.009, "reduce": 1e-5})
    line = page_data.parts_line(divided, run)
    assert line is not None and line["slowest"] == (
        "waits: pipeline 9.00ms; slowest: rank 2 (stage 0, replica 1), last in 50% of the last 9 "
        "steps"
    )
    # A trace shows that two thirds of what looks like computing are other code.
    shares = {"compute": 0.3, "host": 0.6, "communication": 0.1}
    verdict = Verdict(limit="host", why="", shares=shares)
    line = page_data.parts_line(parts, replace(run, judgement=Judgement(verdict=verdict)))
    assert line is not None and line["shares"]["host"] == [0.6, "host 60.0%"]
    assert line["shares"]["compute"] == [0.3, "compute 30.0%"]
    assert sum(share for share, _ in line["shares"].values()) == pytest.approx(1)


def test_sixty_four_ranks_of_a_long_run_fit_in_a_message(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, ranks=64, steps=3000)
    run.start(before=1500)
    with held(run):
        watcher = Watcher(tmp_path)
        watcher.poll(detail={run.run.name}, budget=math.inf)
        heat = page_data.heat(watcher.history(run.run.name), "work")
        watcher.close()
    assert heat is not None and len(heat["ranks"]) == 64
    assert 128 <= len(heat["columns"]) <= 256
    assert len(json.dumps(heat)) < 200_000
    slow, other = (sum(column[rank] for column in heat["columns"]) for rank in (run.slow_rank, 40))
    assert slow > other * 1.05


def test_a_long_past_is_read_piece_by_piece_with_its_use(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, ranks=2, steps=9000)
    run.start(before=6000)
    with held(run):
        watcher = Watcher(tmp_path)
        for _ in range(20):
            watcher.poll(detail={run.run.name}, budget=0.05)
        watcher.poll(detail={run.run.name}, budget=math.inf)  # what a slow machine has left
        past = watcher.history(run.run.name)
        watcher.close()
    assert past is not None
    of_other = past.ranks["utilization"][1]  # the first rank's file is read whole
    known = [i * past.width for i, value in enumerate(of_other) if value is not None]
    assert len(known) > 20
    assert known[0] < 600 and known[-1] > 5400
    assert max(b - a for a, b in pairwise(known)) < 1500


# ---------------------------------------------------------------- logs


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.log"


def texts(read: dict[str, Any]) -> list[str]:
    return [text for _, text in read["lines"]]


def test_a_long_log_begins_near_its_end_with_true_numbers(log: Path) -> None:
    log.write_text("".join(f"line {i} {'x' * 80}\n" for i in range(1, 20_001)))
    read = logs.read_lines(log)
    assert read["lines"][-1][0] == 20_000 and len(read["lines"]) == logs.MAX_LINES
    assert all(text.startswith(f"line {number} ") for number, text in read["lines"])
    assert (read["offset"], read["line"]) == (log.stat().st_size, 20_000)


def test_a_search_goes_through_all_of_it_and_keeps_the_last(log: Path) -> None:
    log.write_text("".join(f"step {i}{' NaN' if i % 10 == 0 else ''}\n" for i in range(1, 100_001)))
    read = logs.read_lines(log, query="nan")
    assert read["found"] == 10_000 and len(read["lines"]) == logs.MAX_LINES
    assert read["lines"][-1] == [100_000, "step 100000 NaN"]
    with log.open("a") as file:
        file.write("step 100001\nstep 100002 nan\n")
    more = logs.read_lines(log, query="nan", after=read["offset"], line=read["line"])
    assert more["lines"] == [[100_002, "step 100002 nan"]]


def test_a_search_that_is_given_up_reads_no_further(log: Path) -> None:
    line = b"y" * 99 + b"\n"
    log.write_bytes(line * 60_000)
    answers = iter([False, True])
    read = logs.read_lines(log, query="y", given_up=lambda: next(answers))
    assert read["found"] * len(line) == read["offset"] <= 2 * logs.CHUNK_BYTES
    assert logs.read_lines(log, given_up=lambda: True)["line"] < 60_000  # not even counted


def test_a_search_finds_letters_beyond_ascii(log: Path) -> None:
    log.write_text("eins\nÄRGER\nzwei\n")
    assert texts(logs.read_lines(log, query="ärger")) == ["ÄRGER"]


def test_a_line_without_its_end_is_shown_and_read_again(log: Path) -> None:
    log.write_bytes(b"first\nprogress 1%\rprogress 2%")
    read = logs.read_lines(log)
    assert texts(read) == ["first"] and read["rest"] == "progress 2%"
    with log.open("ab") as file:
        file.write(b"\rprogress 3%\nlast\n")
    more = logs.read_lines(log, after=read["offset"], line=read["line"])
    assert more["lines"] == [[2, "progress 3%"], [3, "last"]]


def test_a_log_that_was_begun_anew_is_read_from_its_beginning(log: Path) -> None:
    log.write_text("a long line of the first time\n")
    read = logs.read_lines(log)
    log.write_text("new\n")
    assert texts(logs.read_lines(log, after=read["offset"], line=1)) == ["new"]


def test_what_a_terminal_would_eat_is_not_shown(log: Path) -> None:
    log.write_bytes(
        b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07x\x00\x08\xff\n" + b"y" * 100_000 + b"\n"
    )
    red, long = texts(logs.read_lines(log))
    assert red == "red x\ufffd" and len(long) == logs.MAX_CHARACTERS


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert logs.read_lines(tmp_path / "gone.log")["lines"] == []


def test_logs_of_all_attempts_newest_first(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "digits-20261115-120000-0000")
    for attempt in (0, 1):
        run.attempt(attempt).mkdir(parents=True)
        for rank in (0, 2, 10):
            run.log(attempt, rank).write_text("")
    (run.path / "slurm-7.log").write_text("")
    names = list(logs.log_files(run))
    titles = [*logs.log_titles(names).values()]
    assert titles[1] == "rank 2, attempt 1" and titles[-1] == "slurm-7.log"
    assert logs.log_titles(names[:1]) == {names[0]: "rank 0"}
    assert logs.first_log(names, 10) == names[2] and logs.first_log(names, None) == names[0]
    assert logs.first_log([], 0) is None
    assert names[:3] == [f"attempts/1/rank-{rank}.log" for rank in (0, 2, 10)]
    assert names[-1] == "slurm-7.log" and len(names) == 7


def test_a_progress_bar_without_a_newline_is_not_read_again(log: Path) -> None:
    bar = b"".join(b"\r%7d/9999999 [00:01<00:02]" % number for number in range(100_000))
    log.write_bytes(b"first\n" + bar)
    read = logs.read_lines(log, after=0)
    assert read["rest"] == "  99999/9999999 [00:01<00:02]"
    assert log.stat().st_size - read["offset"] < 100
    with log.open("ab") as file:
        file.write(b"\r 100000/9999999\nlast\r\n")
    more = logs.read_lines(log, after=read["offset"], line=read["line"])
    assert more["lines"] == [[2, " 100000/9999999"], [3, "last"]]


def test_a_line_without_an_end_is_kept_in_bounds(log: Path) -> None:
    log.write_bytes(b"first\n" + b"x" * (3 * logs.CHUNK_BYTES))
    read = logs.read_lines(log, after=0)
    assert texts(read) == ["first"] and len(read["rest"]) == logs.MAX_CHARACTERS
    assert log.stat().st_size - read["offset"] == logs.MAX_REST_BYTES
    with log.open("ab") as file:
        file.write(b"\nlast\n")
    more = logs.read_lines(log, after=read["offset"], line=read["line"])
    assert [number for number, _ in more["lines"]] == [2, 3]


def test_a_private_key_is_shown_by_no_look_and_found_by_no_search(log: Path) -> None:
    body = "MIIEowIBAAKCAnan" * 4
    log.write_text(f"a\n-----BEGIN PRIVATE KEY-----\n{body}\n")
    read = logs.read_lines(log)
    assert texts(read) == ["a", "[redacted]", "[redacted]"]
    with log.open("a") as file:
        file.write(f"{body}\n-----END PRIVATE KEY-----\nstep\n")
    more = logs.read_lines(log, after=read["offset"], line=read["line"])
    assert body not in str(more) and texts(more)[-1] == "step"
    assert logs.read_lines(log, query="MIIE")["lines"] == []
