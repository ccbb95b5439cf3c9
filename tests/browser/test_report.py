"""report.html in a real browser: it asks nobody for anything, and shows what the JSON holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.browser.conftest import WAIT_MS
from tests.colours import contrast
from tests.commandline import run_allranks
from tests.report_runs import make_run, scaling_study

from allranks.report.files import page_data

pytestmark = pytest.mark.browser

HOSTILE = "a\"><img src=x onerror=window.broken=1>'`&</script><script>window.broken=2</script>"
LINES = 'text => text.split("\\n").filter(Boolean).join("\\n")'
TABLES = f"""() => [...document.querySelectorAll('article')].map(
    article => [...article.querySelectorAll('table')].map(
        table => [...table.rows].map(
            row => [...row.cells].map(cell => ({LINES})(cell.innerText)))))"""
PLOTS = """() => [...document.querySelectorAll('.plot')].map(plot => ({id: plot.id,
    traces: plot.data.map(t => ({name: t.name, x: t.x, y: t.y,
        above: t.error_y && t.error_y.array, below: t.error_y && t.error_y.arrayminus}))}))"""


class Page:
    """A page that was opened, and everything it did besides showing itself."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))


@contextmanager
def opened(browser: Any, file: Path, *, width: int = 1280, scheme: str = "light") -> Iterator[Page]:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(WAIT_MS)
    try:
        seen = Page(page)
        page.goto(file.as_uri())
        page.wait_for_function("() => document.querySelector('footer')")
        yield seen
    finally:
        page.close()


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Three jobs: one on GPUs in all sizes, one with names that bite, one that never stepped."""
    folder = tmp_path_factory.mktemp("study")
    runs = folder / "runs"
    made = scaling_study(runs)
    bites = {"name": "bites", "gpu": None, "job": {"name": HOSTILE}}
    made.append(make_run(runs, "1x2", step_seconds=0.1, number=20, **bites))  # type: ignore[arg-type]
    made.append(make_run(runs, "1x4", step_seconds=0.06, number=21, state=None, **bites))  # type: ignore[arg-type]
    made.append(make_run(runs, "1x1", step_seconds=0.1, number=22, name="short", steps=1))
    with made[-2].events(0, 0).open("a") as file:
        event = {"v": 1, "t": 1, "event": "metric", "step": 9, "name": HOSTILE, "value": 0.25}
        file.write(json.dumps(event) + "\n")
    done = run_allranks(
        "report", *(run.path for run in made), "--json", "--out", folder, cwd=folder, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return folder / "report.html", json.loads(done.stdout)


@pytest.fixture(scope="module")
def seen(browser: Any, study: tuple[Path, dict[str, Any]]) -> Iterator[Page]:
    """The page, opened once for all tests that only look at it."""
    with opened(browser, study[0]) as page:
        yield page


def test_the_page_is_quiet_and_asks_for_nothing(seen: Page, study: tuple[Path, Any]) -> None:
    file, _ = study
    seen.page.wait_for_timeout(300)
    assert seen.complaints == []
    assert seen.requests == [file.as_uri()]


def test_the_data_is_the_json(seen: Page, study: tuple[Path, Any]) -> None:
    _, report = study
    text = seen.page.evaluate("() => document.getElementById('data').textContent")
    assert json.loads(text) == json.loads(json.dumps(page_data(report)))


def test_every_cell_and_word_is_on_the_page(seen: Page, study: tuple[Path, Any]) -> None:
    data = page_data(study[1])
    drawn = seen.page.evaluate(TABLES)
    for section, tables in zip(data["sections"], drawn, strict=True):
        for table, (head, *rows) in zip(section["tables"], tables, strict=True):
            assert head == table["columns"]
            cells = [
                ["\n".join(c) if isinstance(c, list) else c for c in row] for row in table["rows"]
            ]
            assert rows == cells
    text = seen.page.evaluate("() => document.getElementById('report').textContent")
    words = [one for section in data["sections"] for choice in section["choices"] for one in choice]
    notes = [note for section in data["sections"] for note in section["notes"]]
    assert all(word in text for word in (*words, *notes, *data["footer"]))


def test_charts_draw_the_json(seen: Page, study: tuple[Path, Any]) -> None:
    _, report = study
    index = next(i for i, s in enumerate(report["sections"]) if s["job"] == "language")
    section = report["sections"][index]
    plots = {plot["id"]: plot["traces"] for plot in seen.page.evaluate(PLOTS)}
    ideal, measured = plots[f"plot-{index}-scaling"]
    assert ideal["y"] == measured["x"] == [1, 2, 4, 8]
    assert measured["y"] == [row["speedup"] for row in section["rows"]]
    for row, below, above in zip(
        section["rows"], measured["below"], measured["above"], strict=True
    ):
        low, high = row["speedup_ci95"] or (row["speedup"], row["speedup"])
        assert (row["speedup"] - low, high - row["speedup"]) == pytest.approx((below, above))
    parts = plots[f"plot-{index}-parts"]
    for i, row in enumerate(section["rows"]):
        shares = [trace["x"][i] for trace in parts]
        assert sum(shares) == pytest.approx(100, abs=2)
        assert shares[0] == pytest.approx(row["divided"]["compute"] / row["step_seconds"] * 100)
    for name in ("loss", "utilization"):
        for trace, curve in zip(
            plots[f"plot-{index}-{name}"], section["curves"][name], strict=True
        ):
            assert (trace["x"], trace["y"]) == (curve["x"], curve["y"])


def test_names_from_runs_are_text(seen: Page) -> None:
    headings = [heading.text_content() for heading in seen.page.query_selector_all("h1")]
    broken = seen.page.evaluate("() => window.broken")
    images = seen.page.query_selector_all("main img, main script")
    assert HOSTILE in headings and broken is None and images == []


def test_without_charts_there_is_a_reason(seen: Page) -> None:
    empty = [element.text_content() for element in seen.page.query_selector_all(".empty")]
    assert "These runs recorded no loss." in empty


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (400, "light")])
def test_it_fits_and_can_be_read(
    browser: Any, study: tuple[Path, Any], tmp_path: Path, width: int, scheme: str
) -> None:
    file, _ = study
    with opened(browser, file, width=width, scheme=scheme) as seen:
        page = seen.page
        assert page.evaluate("() => document.documentElement.scrollWidth") == width
        for selector in ("h1", ".choice .why", "td", ".caption"):
            assert contrast(page, selector) >= 4.5, selector
        picture = page.screenshot(full_page=True)
        assert len(picture) > 20_000
        (tmp_path / f"{scheme}-{width}.png").write_bytes(picture)
        assert seen.complaints == []


def test_it_redraws_when_the_colours_change(browser: Any, study: tuple[Path, Any]) -> None:
    file, _ = study
    colour = "() => document.querySelector('.plot').layout.font.color"
    with opened(browser, file) as seen:
        light = seen.page.evaluate(colour)
        seen.page.emulate_media(color_scheme="dark")
        seen.page.wait_for_function(f"before => ({colour})() !== before", arg=light)
        assert seen.complaints == []
