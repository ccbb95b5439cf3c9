"""The page of `allranks watch --web` in a real browser: live, quiet, by keyboard, and closed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.browser.conftest import WAIT_MS
from tests.colours import contrast
from tests.page_runs import LiveRun, held

from allranks.show.numbers import count, number

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=window.broken=1></script><script>window.broken=2</script>"
SERVE = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from allranks.watch.live import Watcher
from allranks.watch.server import serve

found = [{"cause": "cuda-oom", "title": sys.argv[3], "rank": 1, "node": "node1",
  "confidence": "high", "fix": "micro_batch_size: 8",
  "evidence": [{"file": "attempts/0/rank-1.log", "line": 2, "text": sys.argv[3]}]}]

def stop(name):
    Path(sys.argv[2]).write_text(name)
    return "saves a checkpoint and stops"

serve(Watcher(Path(sys.argv[1])), port=0, stop=stop,
  announce=lambda served: print(json.dumps(asdict(served)), flush=True),
  diagnose=lambda run: found if run.name.startswith("broken") else [])
"""
TILES = """() => Object.fromEntries([...document.querySelectorAll('#tiles > div')].map(
    tile => [tile.children[0].textContent, tile.children[1].children[0].textContent]))"""
# How far each rank's row of the heat map is from grey, in the mean.
REDS = """() => {
    const {ctx, bbox, heat} = document.getElementById('heat').plot;
    const {left, top, width, height} = bbox;
    const {data} = ctx.getImageData(left, top, width, height);
    return heat.ranks.map((_, i) => {
        const from = Math.floor((i + 0.5) * height / heat.ranks.length) * width * 4;
        let sum = 0;
        for (let at = from; at < from + width * 4; at += 4) sum += data[at] - data[at + 2];
        return sum / width;
    });
}"""
IN_SIGHT = """() => {
    const [row, table] = ['tr.slowest td', '#table'].map(
        name => document.querySelector(name).getBoundingClientRect());
    return table.top <= row.top && row.bottom <= table.bottom + 1;
}"""
STEP = "step => document.querySelector('#tiles dd span').textContent === step"


@dataclass
class Site:
    """A server, the runs it shows, and what it was asked to stop."""

    url: str
    large: LiveRun
    broken: LiveRun
    short: LiveRun
    stopped: Path

    @property
    def home(self) -> str:
        return self.url.partition("?")[0]


@dataclass
class Seen:
    """A page that was opened, and everything it did besides showing itself."""

    page: Any
    complaints: list[str]
    requests: list[str]

    def step(self) -> str:
        return str(self.page.evaluate(TILES)["step"])

    def complain(self, text: str) -> None:
        # Where another test makes a network, the browser drops requests; the page asks again.
        if "ERR_NETWORK_CHANGED" not in text:
            self.complaints.append(text)

    def wait(self, condition: str, **options: Any) -> None:
        self.page.wait_for_function(condition, **options)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("watch")
    runs = folder / "runs"
    large = LiveRun(runs, ranks=64, number=30, steps=20_000, slow_rank=23)
    large.start(before=1500)
    short = LiveRun(runs, name="digits", number=20, ranks=2, steps=500, rate=3)
    short.start(before=500)
    short.end()
    broken = LiveRun(runs, name="broken", number=10, ranks=2, steps=500)
    broken.start(before=100)
    broken.log(1, HOSTILE)
    broken.end("failed", error={"what": f"out of memory {HOSTILE}", "fix": "use less"})
    for i in range(2000):
        large.log(0, f"line {i} of the training")
    stopped = folder / "stopped"
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(runs), str(stopped), f"out of memory {HOSTILE}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        with held(large):
            said = json.loads(process.stdout.readline())
            yield Site(said["url"], large, broken, short, stopped)
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


@contextmanager
def opened(browser: Any, url: str, *, width: int = 1280, scheme: str = "light") -> Iterator[Seen]:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    seen = Seen(page, [], [])
    page.on("console", lambda message: seen.complain(message.text))
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("request", lambda request: seen.requests.append(request.url))
    try:
        page.goto(url)
        try:
            page.wait_for_selector("#heat canvas")
        except Exception as error:
            raise AssertionError(f"no heat map: {seen.complaints}") from error
        yield seen
    finally:
        context.close()


@pytest.fixture(scope="module")
def seen(browser: Any, site: Site) -> Iterator[Seen]:
    """One page for all tests that do not need their own."""
    with opened(browser, site.url) as page:
        yield page


@pytest.fixture
def at_large(seen: Seen, site: Site) -> Seen:
    """The same, looking at the large run."""
    seen.page.click(f"[data-run='{site.large.run.name}']")
    seen.wait(
        "name => document.getElementById('name').textContent === name", arg=site.large.run.name
    )
    seen.wait("() => document.querySelectorAll('#ranks tbody tr').length === 64")
    return seen


def test_it_is_quiet_and_hides_its_token(seen: Seen, site: Site) -> None:
    assert seen.complaints == []
    assert all(url.startswith((site.home, "data:")) for url in seen.requests)
    assert "token" not in seen.page.url
    assert "token" not in seen.page.evaluate("() => document.cookie")
    assert (
        seen.page.evaluate("() => document.documentElement.outerHTML.includes('token=')") is False
    )
    seen.wait("() => document.getElementById('link').textContent === 'live'")


def test_the_page_spells_numbers_as_python_does(seen: Seen) -> None:
    values = [0, 84.2e-6, 0.0126, 0.4119, 3.417, 44.6, 59.99, 125, 3599, 4325, 86399, 100_000]
    script = """async values => {
        const words = await import(new URL("words.js", document.querySelector("script[src]").src));
        return ["number", "count"].map(name => values.map(value => words[name](value)));
    }"""
    spelled = [[form(value) for value in values] for form in (number, count)]
    assert seen.page.evaluate(script, values) == spelled


def test_every_event_comes_to_the_page(at_large: Seen, site: Site) -> None:
    """Within two seconds on an idle machine, as benchmarks/watch_page.py measures."""
    for _ in range(3):
        site.large.advance(1)
        at_large.wait(STEP, arg=f"{site.large.step:,}")


def test_curves_grow_as_drawn(at_large: Seen, site: Site) -> None:
    """By what uPlot has worked out, not by what it was given."""
    site.large.advance(200)
    for plot in ("loss", "pace"):
        axis = f"document.getElementById('{plot}').plot.scales.x"
        at_large.wait(f"last => {axis}.max >= last - 20", arg=site.large.step)


def test_what_limits_a_run_is_shown_while_it_lasts(at_large: Seen, site: Site) -> None:
    at_large.wait("() => document.querySelector('#verdict dd')")
    lines = at_large.page.text_content("#verdict")
    assert re.match(r"limited by(communication|straggler|compute): .+(not )?sure", lines), lines


def test_every_rank_is_shown_and_the_slowest_marked(at_large: Seen, site: Site) -> None:
    page = at_large.page
    at_large.wait("() => document.querySelector('tr.slowest')")
    slowest = page.text_content("tr.slowest td")
    assert slowest == str(site.large.slow_rank)
    at_large.wait(IN_SIGHT)  # though it is the 23rd of 64
    page.click("#ranks th:has-text('waiting') button")
    at_large.wait("() => document.querySelector('th[aria-sort=descending]')")
    last = "document.querySelector('#ranks tbody tr:last-child td')"
    # Who comes last waits least.
    at_large.wait(f"rank => {last}.textContent === rank", arg=str(site.large.slow_rank))
    page.click("#ranks th:first-child button")


def test_the_heat_map_shows_who_is_slow(at_large: Seen, site: Site) -> None:
    heat = "document.getElementById('heat').plot?.heat"
    at_large.wait(f"() => {heat}?.ranks.length === 64")
    at_large.wait(f"() => {heat}.columns.every(column => column.every(value => value !== null))")
    assert 100 <= at_large.page.evaluate(f"() => {heat}.columns.length") <= 256
    reddest = (
        f"rank => {{ const reds = ({REDS})(); return reds.indexOf(Math.max(...reds)) === rank; }}"
    )
    at_large.wait(reddest, arg=site.large.slow_rank)  # as it is on the screen
    at_large.page.click("#metric input[value=utilization] + span")
    at_large.wait(f"() => {heat}?.high === 100")
    at_large.page.click("#metric input[value=work] + span")
    at_large.wait(f"() => {heat}?.high !== 100")


def test_runs_are_chosen_and_compared_by_keyboard(at_large: Seen, site: Site) -> None:
    page = at_large.page
    page.keyboard.press("c")  # keep the large one
    page.keyboard.press("j")
    at_large.wait(
        "name => document.getElementById('name').textContent === name", arg=site.short.run.name
    )
    drawn = "document.getElementById('loss').plot?.series"
    at_large.wait(f"() => {drawn}?.length === 3")  # with the steps
    widths = page.evaluate(f"() => {drawn}.slice(1).map(one => one.width)")
    assert widths == [1.5, 2.2]  # the chosen one is drawn last, on top
    at_large.wait("name => document.activeElement.dataset.run === name", arg=site.short.run.name)
    legend = "names.every(name => document.getElementById('legend').textContent.includes(name))"
    at_large.wait(f"names => {legend}", arg=[site.large.run.name, site.short.run.name])
    page.keyboard.press("k")
    page.keyboard.press("c")
    at_large.wait(f"() => {drawn}?.length === 2")
    assert at_large.complaints == []


def test_everything_can_be_reached_with_tab(at_large: Seen) -> None:
    page = at_large.page
    page.evaluate("() => { document.activeElement.blur(); window.scrollTo(0, 0); }")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("() => document.activeElement.id || document.activeElement.name"))
    for one in ("filter", "stop", "axis", "metric", "table", "file", "query", "follow", "log"):
        assert one in reached, one


def test_logs_grow_and_are_searched(at_large: Seen, site: Site) -> None:
    page = at_large.page
    page.keyboard.press("/")
    assert page.evaluate("() => document.activeElement.id") == "query"
    page.keyboard.type("line 19")
    at_large.wait("() => document.getElementById('log-now').textContent === '111 found'")
    at_large.wait("() => document.querySelectorAll('#log mark').length === 111")
    marked = page.evaluate(
        "() => [...document.querySelectorAll('#log mark')].map(e => e.textContent)"
    )
    assert set(marked) == {"line 19"}
    site.large.log(0, "line 19999 has just come")
    at_large.wait(
        "() => document.getElementById('log').lastChild.textContent.includes('just come')"
    )
    page.keyboard.press("Escape")
    at_large.wait("() => !document.querySelector('#log mark')")


def test_a_newer_search_ends_the_one_before(at_large: Seen) -> None:
    page = at_large.page
    unanswered: list[Any] = []
    given_up: list[str] = []
    is_first = re.compile(r"query=li(&|$)")
    page.route(is_first, lambda route: unanswered.append(route))
    page.on("requestfailed", lambda request: given_up.append(request.url))
    page.keyboard.press("/")
    with page.expect_request(is_first):
        page.keyboard.type("li")
    at_large.wait("() => document.getElementById('log-now').textContent === 'searching …'")
    page.keyboard.type("ne 1")
    at_large.wait("() => document.getElementById('log-now').textContent.includes(' found')")
    page.unroute(is_first)
    page.keyboard.press("Escape")
    assert unanswered and any(is_first.search(url) for url in given_up)


def test_a_page_for_which_there_is_no_room_says_so(browser: Any, site: Site) -> None:
    with opened(browser, site.url) as seen:
        seen.page.route("**/events?*", lambda route: route.fulfill(status=503, body="full"))
        seen.page.click(f"[data-run='{site.short.run.name}']")  # connects again
        seen.wait("() => document.getElementById('link').textContent.includes('too many pages')")
        seen.page.unroute("**/events?*")
        seen.wait("() => document.getElementById('link').textContent === 'live'")


def test_findings_and_hostile_words_are_text(at_large: Seen, site: Site) -> None:
    page = at_large.page
    page.click(f"[data-run='{site.broken.run.name}']")
    at_large.wait("() => document.querySelector('.finding')")
    found = page.text_content(".finding")
    assert HOSTILE in found and "micro_batch_size: 8" in found and "high confidence" in found
    at_large.wait("text => document.getElementById('what').textContent.includes(text)", arg=HOSTILE)
    page.select_option("#file", "attempts/0/rank-1.log")
    at_large.wait("text => document.getElementById('log').textContent.includes(text)", arg=HOSTILE)
    assert page.evaluate("() => window.broken") is None
    assert page.query_selector_all("main img, main script") == []
    assert page.is_hidden("#stop")  # it has ended


def test_a_run_is_stopped_only_after_a_question_that_names_it(at_large: Seen, site: Site) -> None:
    page = at_large.page
    page.click("#stop")
    assert page.text_content("#confirm-name") == site.large.run.name
    assert page.evaluate("() => document.activeElement.id") == "keep"
    page.keyboard.press("Escape")
    page.wait_for_selector("#confirm", state="hidden")
    assert not site.stopped.exists()
    page.click("#stop")
    page.click("#really")
    at_large.wait("() => document.getElementById('confirm-answer').textContent.includes('saves')")
    assert site.stopped.read_text() == site.large.run.name
    at_large.wait("() => !document.getElementById('confirm').open")
    assert at_large.complaints == []


@contextmanager
def traced(browser: Any, page: Any) -> Iterator[list[float]]:
    """Milliseconds of CPU that the page's own threads took for each of their tasks, afterwards.

    Not by the clock: a busy machine gives the CPU to others in the midst of a task.
    """
    found: list[float] = []
    browser.start_tracing(
        page=page, categories=["toplevel", "disabled-by-default-devtools.timeline"]
    )
    try:
        yield found
    finally:
        events = json.loads(browser.stop_tracing())["traceEvents"]
    threads = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    found += [
        event["tdur"] / 1000
        for event in events
        if event["name"] == "RunTask"
        and (event["pid"], event["tid"]) in threads
        and "tdur" in event
    ]
    assert len(found) > 20, f"{len(events)} events, of {len(threads)} pages"


def test_frames_stay_short_while_it_is_live(browser: Any, at_large: Seen, site: Site) -> None:
    """benchmarks/watch_page.py measures; this is far from its numbers, on whatever machine."""
    page = at_large.page
    page.evaluate("() => window.scrollTo(0, 0)")
    page.wait_for_timeout(500)
    with traced(browser, page) as tasks:
        for metric in ("wait", "data", "work"):
            site.large.advance(5)
            page.click(f"#metric input[value={metric}] + span")
            page.mouse.move(700, 330)
            at_large.wait(STEP, arg=f"{site.large.step:,}")
            page.wait_for_timeout(500)
    assert max(tasks) < 200, sorted(tasks)[-10:]


def test_nothing_holds_the_page_up_while_it_opens(browser: Any, site: Site) -> None:
    """A plotting library of megabytes did for a second; measured in benchmarks/watch_page.py."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    with traced(browser, page) as tasks:
        page.goto(site.url)
        page.wait_for_selector("#heat canvas")
        page.wait_for_timeout(500)
    context.close()
    assert max(tasks) < 500, sorted(tasks)[-10:]


def test_a_new_run_appears_by_itself(seen: Seen, site: Site) -> None:
    new = LiveRun(site.large.run.path.parent, name="newcomer", number=40, ranks=1, steps=10)
    new.start(before=2)
    seen.wait("name => document.querySelector(`[data-run='${name}']`)", arg=new.run.name)


def test_a_line_that_was_cut_is_taken_up_again(browser: Any, site: Site) -> None:
    with opened(browser, site.url + "#" + site.large.run.name) as slept:
        slept.page.context.set_offline(True)
        slept.page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")
        slept.wait("() => document.getElementById('link').dataset.state !== 'live'")
        site.large.advance(11)
        slept.page.context.set_offline(False)
        slept.wait(STEP, arg=f"{site.large.step:,}")
        slept.wait("() => document.getElementById('link').textContent === 'live'")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (400, "light")])
def test_it_fits_and_can_be_read(browser: Any, site: Site, width: int, scheme: str) -> None:
    with opened(browser, site.url, width=width, scheme=scheme) as shown:
        page = shown.page
        shown.wait("width => document.documentElement.scrollWidth === width", arg=width)
        for selector in (
            "h1",
            "#what",
            "dt",
            "dd",
            ".now",
            "td",
            "#runs .small",
            ".pick span",
            "th",
        ):
            assert contrast(page, selector) >= 4.5, selector
        colour = "document.getElementById('loss').plot?.series[1].stroke()"
        before = page.evaluate(f"() => {colour}")
        page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
        page.wait_for_function(f"before => {colour} !== before", arg=before)
        page.reload()  # without the token, by its cookie
        shown.wait("() => document.getElementById('link').dataset.state === 'live'")
        assert shown.complaints == []
