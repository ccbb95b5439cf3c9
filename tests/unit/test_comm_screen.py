"""bench comm for people, and its command line before any rank runs."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.commandline import call_allranks

from allranks.bench import comm_counts as comm
from allranks.bench.comm import plot, show
from allranks.errors import AllranksError


def made_up(**changes: Any) -> dict[str, Any]:
    """What comm.json of a run on 2 nodes of 4 GPUs could hold."""
    peaks = {"node": 450.0, "nodes": None}
    groups: dict[comm.Scope, tuple[int, float]] = {"node": (4, 200e9), "nodes": (2, 20e9)}
    rows = []
    for scope, (ranks, rate) in groups.items():
        for name in comm.COLLECTIVES:
            for size in comm.sizes_between(1 << 10, 1 << 30):
                seconds = 12e-6 + size / rate
                row = comm.row(name, size, ranks, scope, median=seconds, p99=1.5 * seconds)
                peak = peaks[scope]
                rows.append({**row, "of_peak": row["busbw_GBps"] / peak if peak else None})
    return {
        "run": "comm-20261115-120000-abcd",
        "layout": "2x4",
        "library": "nccl",
        "nodes": 2,
        "played": False,
        "rows": rows,
        "fits": comm.fits(rows, peaks),
        "transport": {
            "node": {"words": "NVLink (P2P/CUMEM)"},
            "nodes": {"words": "InfiniBand (NET/IB over mlx5_0:1, GPUDirect RDMA)"},
        },
        "peak_GBps": peaks,
        "not_supported": [],
        "stopped": [],
        "seconds": 120.0,
        "timing": "median over calls of the slowest rank",
        "complete": True,
        **changes,
    }


def shown(found: dict[str, Any], width: int = 60) -> str:
    file = io.StringIO()
    show(Console(file=file, width=width, highlight=False), found)
    return file.getvalue()


def test_everything_fits_60_columns() -> None:
    text = shown(made_up())
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 60
    for name in comm.COLLECTIVES:
        assert text.count(name) >= 4  # a table and a fit in each scope


def test_the_numbers_shown_are_those_of_the_rows() -> None:
    lines = shown(made_up()).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("all_reduce "))
    assert lines[start].split() == [
        *("all_reduce", "median", "p99", "alg", "GB/s", "bus", "GB/s", "peak")
    ]
    # 12 µs + 1 GiB / 200 GB/s = 5.381 ms; 1.5 times as much on the bus of 4 ranks; of 450 GB/s.
    assert lines[start + 11].split() == [*("1", "GiB", "5.38ms", "8.07ms", "200", "299", "67%")]
    fit = [line for line in shown(made_up(), width=100).splitlines() if "1 KiB to 1 GiB" in line]
    assert fit[0].split() == [
        *("all_reduce", "1", "KiB", "to", "1", "GiB", "12.0µs", "299", "299", "0%", "67%")
    ]


def test_a_fit_shows_no_number_that_the_table_contradicts() -> None:
    """From 4 MiB on it is slower; the last size of all is on no line."""
    seconds = {size: 50e-6 + size / 2e9 for size in comm.sizes_between(1 << 10, 1 << 20)}
    seconds |= {size: 1e-3 + size / 1e9 for size in comm.sizes_between(1 << 22, 1 << 26)}
    seconds[1 << 28] = 1.0
    rows = [
        {**comm.row("broadcast", size, 2, "node", median=took, p99=took), "of_peak": None}
        for size, took in seconds.items()
    ]
    fitted = comm.fits(rows, {})
    text = shown(made_up(rows=rows, fits=fitted, peak_GBps={}), width=100)
    small, large = (line for line in text.splitlines() if " to " in line)
    assert " ".join(small.split()) == "broadcast 1 KiB to 1 MiB 50.0µs 1.83 0%"
    assert " ".join(large.split()) == "broadcast 4 MiB to 64 MiB - 0.985 0%"
    assert "bus GB/s  measured" not in text  # no line has a bandwidth that other sizes bear out
    assert "no line fits broadcast at 256 MiB" in text
    rows.pop()
    text = shown(made_up(rows=rows, fits=comm.fits(rows, {}), peak_GBps={}), width=100)
    assert "64 MiB        -     1.00*     0.985" in text
    assert "* extrapolated: higher than was measured" in text


def test_what_is_missing_is_said() -> None:
    text = shown(
        made_up(
            played=True,
            complete=False,
            not_supported=[{"collective": "reduce", "scope": "node", "why": "no such thing"}],
            stopped=[
                {"collective": "all_gather", "scope": "node", "after_bytes": 4096, "why": "time"},
                {"collective": "broadcast", "scope": "node", "after_bytes": 4096, "why": "time"},
                {"collective": "reduce", "scope": "nodes", "after_bytes": 1024, "why": "memory"},
            ],
        ),
        width=200,
    )
    assert "one machine played the 2 nodes" in text
    assert "reduce: not supported by nccl (no such thing)" in text
    assert "to end within 2m (--seconds): above 4 KiB, within a node: all_gather, broadcast" in text
    assert (
        "not measured, for lack of memory: above 1 KiB, across nodes, one rank each: reduce" in text
    )
    assert "incomplete: a rank ended" in text
    assert "peak within a node: 450 GB/s" in text


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(made_up(), tmp_path / "comm.png")
    assert (tmp_path / "comm.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_plot_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(AllranksError, match="matplotlib is not installed") as caught:
        plot(made_up(), tmp_path / "comm.png")
    assert "allranks[report]" in caught.value.fix
    assert not (tmp_path / "comm.png").exists()


# arguments, words of the error, words of the fix
WRONG = {
    "one rank": (["--layout", "1x1"], "nothing to communicate", "--layout 1x2"),
    "no layout": ([], "nothing to communicate", "--layout 1x2"),
    "unknown collective": (["--collectives", "all_reduc"], "all_reduc", "all_reduce"),
    "bad sizes": (["--layout", "1x2", "--sizes", "huge"], "huge", "1KiB-1GiB"),
    "sizes the wrong way": (["--layout", "1x2", "--sizes", "1MiB-1KiB"], "1MiB", "1KiB-1MiB"),
    "not a layout": (["--layout", "two"], "two", "2x4"),
    "unknown backend": (["--layout", "1x2", "--backend", "cloud"], "slurm", "--help"),
    "a key that there is not": (["--layout", "1x2", "slurm.partitio=a"], "partitio", "partition"),
    "a command": (["--layout", "1x2", "--", "python"], "no effect with", "--"),
    "no such run": (["--from", "nothing"], "nothing", "last"),
}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.replace(" ", "-"))
def test_wrong_usage_is_answered(tmp_path: Path, case: str) -> None:
    args, what, fix = WRONG[case]
    cut = args.index("--") if "--" in args else len(args)
    done = call_allranks("bench", "comm", *args[:cut], "--json", *args[cut:], cwd=tmp_path)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert what in error["what"]
    assert fix in error["fix"]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_that_has_measured_nothing_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "comm-20261115-120000-abcd"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"bench": {"kind": "comm"}}')
    done = call_allranks("bench", "comm", "--from", "comm", cwd=tmp_path)
    assert done.returncode == 2
    assert "has measured no collectives" in done.stderr


def test_an_earlier_run_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "comm-20261115-120000-abcd"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "comm.json").write_text(json.dumps(made_up()))
    done = call_allranks("bench", "comm", "--from", "comm", "--json", cwd=tmp_path)
    assert done.returncode == 0
    written = json.loads((folder / "comm.json").read_text())
    assert json.loads(done.stdout) == {**written, "run_dir": str(folder)}  # where it is now
    assert "off by up to" in done.stderr and "comm.json" in done.stderr
