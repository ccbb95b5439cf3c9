"""The server of the watch page: who is let in, what can be asked, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.metadata
import io
import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
from starlette.testclient import TestClient
from tests.page_runs import LiveRun, held
from tests.watch_runs import GrowingRun

from allranks.doctor.diagnose import diagnosis_of
from allranks.errors import AllranksError
from allranks.run import files
from allranks.run.folder import RunDir
from allranks.show import PALETTE
from allranks.watch import app, server
from allranks.watch.app import FOLDER, ServerHead, make_app
from allranks.watch.hub import Hub
from allranks.watch.live import Watcher
from allranks.watch.modes import patient_doctor
from allranks.watch.page_data import Wish
from allranks.watch.server import PLOT_FILES, impatient_protocol, plot_file
from allranks.watch.views import RunView

TOKEN = "a-token-that-nobody-knows"
HOME = "http://127.0.0.1:8888"
PATHS = [
    *("/", "/events", "/api/log", "/api/stop", "/static/page.js", "/static/uplot.js", "/nothing"),
    *("/static/../../etc/passwd", "/static/%2e%2e/app.py", "//", "/?token=", "/?token=wrong"),
]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    run = LiveRun(tmp_path / "runs", ranks=2, steps=1000)
    run.start(before=100)
    with held(run):
        yield run


@pytest.fixture
def hub(live: LiveRun) -> Iterator[Hub]:
    watcher = Watcher(live.run.path.parent)
    watcher.poll(budget=math.inf)
    made = Hub(watcher)
    yield made
    made.close()
    made.join(60)
    watcher.close()


def client(hub: Hub, stop: Callable[[str], str] | None = None, **options: Any) -> TestClient:
    place = ServerHead("me", "login1.example", "/home/me/runs")
    return TestClient(make_app(hub, TOKEN, place, stop), base_url=HOME, **options)


@pytest.fixture
def let_in(hub: Hub) -> Iterator[TestClient]:
    with client(hub, cookies={make_gate(hub).cookie: TOKEN}) as inside:
        yield inside


# ---------------------------------------------------------------- the gate


def test_without_the_token_no_path_answers(hub: Hub) -> None:
    methods = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE")
    with client(hub) as outside:
        for method, path in itertools.product(methods, PATHS):
            answer = outside.request(method, path)
            assert answer.status_code == 401, (method, path)
            assert "set-cookie" not in answer.headers
            assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_wrong_token_is_none(hub: Hub) -> None:
    with client(hub) as outside:
        name = make_gate(hub).cookie
        for wrong in ("", "wrong", TOKEN[:-1], TOKEN + "x", "\xe9"):
            assert outside.get("/", params={"token": wrong}).status_code == 401
            cookie = {b"cookie": f"{name}={wrong}".encode()}
            assert outside.get("/", headers=cookie).status_code == 401
        assert outside.get(f"/?token={TOKEN}&token={TOKEN}").status_code == 401


def make_gate(hub: Hub) -> Any:
    return make_app(hub, TOKEN, ServerHead("me", "here", "runs"))


def test_the_address_lets_a_browser_in_once_and_for_all(hub: Hub) -> None:
    with client(hub) as browser:
        first = browser.get("/", params={"token": TOKEN})
        assert first.status_code == 200
        assert TOKEN not in first.text  # it is not left in the page
        cookie = first.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/" in cookie
        assert browser.get("/").status_code == 200
        assert browser.get("/static/page.js").status_code == 200
        assert browser.get("/nothing").status_code == 404


def test_cookies_of_other_servers_do_not_disturb(hub: Hub) -> None:
    name = make_gate(hub).cookie
    with client(hub) as browser:
        jar = f'_xsrf=2|a"b{{"x": 1}}; =; {name}={TOKEN}; other'
        assert browser.get("/", headers={"cookie": jar}).status_code == 200


def test_only_names_of_this_machine_are_answered_to(let_in: TestClient) -> None:
    """A name that somebody else points here brings his page's scripts with it."""
    ours = ("127.0.0.1:8888", "localhost:9000", "[::1]:8888", "LOCALHOST", "127.0.0.1")
    others = ["evil.example", "", "127.0.0.1.evil.example:8888", "evil.example:80@127.0.0.1"]
    others += ["localhost.evil.example", "127.0.0.1:8888:9"]
    for host in (*ours, *others):
        status = let_in.get("/", headers={"host": host}).status_code
        assert status == (200 if host in ours else 403), host


def test_every_answer_is_closed_to_others(let_in: TestClient) -> None:
    for path in ("/", "/static/page.css", "/api/log", "/nothing"):
        headers = let_in.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert "script-src" not in headers["content-security-policy"]  # so: 'self' alone
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers


# ---------------------------------------------------------------- the page and its files


def test_every_file_of_the_page_is_served_and_nothing_else(let_in: TestClient) -> None:
    names = {path.name for path in FOLDER.iterdir()} - {"page.html.j2"}
    assert let_in.get("/static/palette.css").content == PALETTE.read_bytes()
    assert names == {*app.SCRIPTS, "page.css"}
    for name in names:
        answer = let_in.get(f"/static/{name}")
        assert answer.content == (FOLDER / name).read_bytes()
    for name in ("page.html.j2", "../app.py", "%2e%2e%2fapp.py", "..%2f..%2fcli.py", "page.js/"):
        assert let_in.get(f"/static/{name}").status_code in (404, 405), name


def test_uplot_is_the_packages_own(let_in: TestClient) -> None:
    for name, file in PLOT_FILES.items():
        own = importlib.metadata.distribution("uplot-python").locate_file(f"uplot/static/{file}")
        plain = let_in.get(f"/static/{name}", headers={"accept-encoding": "identity"})
        packed = let_in.get(f"/static/{name}", headers={"accept-encoding": "gzip"})
        assert plain.content == Path(str(own)).read_bytes()
        assert packed.headers["content-encoding"] == "gzip" and packed.content == plain.content


def test_another_package_of_uplots_name_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uplot").mkdir()
    (tmp_path / "uplot" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert plot_file("uplot.js") is None


def test_scripts_import_only_what_there_is() -> None:
    for name in app.SCRIPTS:
        imported = re.findall(r'from "\./([^"]+)"', (FOLDER / name).read_text())
        assert set(imported) <= set(app.SCRIPTS)


def test_names_in_the_page_are_text(hub: Hub) -> None:
    place = ServerHead("me", "<script>alert(1)</script>", '"><img src=x>')
    with TestClient(make_app(hub, TOKEN, place), base_url=HOME) as browser:
        text = browser.get("/", params={"token": TOKEN}).text
    assert "<script>alert" not in text and "<img" not in text


# ---------------------------------------------------------------- logs


def test_a_log_and_what_comes_after(let_in: TestClient, live: LiveRun) -> None:
    live.log(1, "first\nsecond")
    asked = {"run": live.run.name, "file": "attempts/0/rank-1.log"}
    said = let_in.get("/api/log", params=asked).json()
    assert said["lines"] == [[1, "rank 1 begins"], [2, "first"], [3, "second"]]
    live.log(1, "third")
    asked |= {"after": str(said["offset"]), "line": str(said["line"])}
    assert let_in.get("/api/log", params=asked).json()["lines"] == [[4, "third"]]


def test_secrets_in_a_log_stay_here(let_in: TestClient, live: LiveRun) -> None:
    secret = "hf_" + "aB3" * 12
    live.log(0, f"HF_TOKEN={secret}\nloaded")
    asked = {"run": live.run.name, "file": "attempts/0/rank-0.log"}
    assert secret not in let_in.get("/api/log", params=asked).text
    # Nor can it be guessed by searching for its parts.
    assert let_in.get("/api/log", params=asked | {"query": secret[:8]}).json()["found"] == 0


def test_no_other_file_or_folder_is_read(let_in: TestClient, live: LiveRun) -> None:
    (live.run.path / "slurm-1.log").symlink_to("/etc/passwd")
    files = ["", "run.json", "../../run.json", "attempts/0/rank-0.jsonl", "/etc/passwd"]
    files += ["attempts/0/../0/rank-0.log", "attempts/0/rank-9.log", "slurm-1.log"]
    asked = [(live.run.name, file) for file in (*files, "attempts/0/rank-0.log\x00")]
    runs = ("", "..", ".", "/", "../runs", "other", "%2e%2e")
    for run, file in [*asked, *((run, "attempts/0/rank-0.log") for run in runs)]:
        answer = let_in.get("/api/log", params={"run": run, "file": file})
        assert answer.status_code == 404 and "root:" not in answer.text, (run, file)


# ---------------------------------------------------------------- stop


def test_stop_is_asked_for_by_name_twice(hub: Hub, live: LiveRun) -> None:
    stopped: list[str] = []

    def stop(name: str) -> str:
        stopped.append(name)
        return "saves a checkpoint and stops"

    name = live.run.name
    good = {"run": name, "confirm": name}
    with client(hub, stop) as browser:
        browser.get("/", params={"token": TOKEN})
        wrongs: list[Any] = [
            {"run": name},
            {"run": name, "confirm": "yes"},
            [],
            {"confirm": name},
            7,
        ]
        for wrong in wrongs:
            assert browser.post("/api/stop", json=wrong).status_code == 400
        gone = {"run": "gone", "confirm": "gone"}
        assert browser.post("/api/stop", json=gone).status_code == 404
        assert browser.get("/api/stop", params=good).status_code == 405
        # A form of another page sends no JSON, and a script of another origin says where it is.
        form = {"content-type": "text/plain"}
        said = browser.post("/api/stop", content=json.dumps(good), headers=form)
        assert said.status_code == 400
        for origin in ("http://evil.example", "http://127.0.0.1:9999", "null"):
            said = browser.post("/api/stop", json=good, headers={"origin": origin})
            assert said.status_code == 403
        large = {**good, "more": "x" * 5000}
        assert browser.post("/api/stop", json=large).status_code == 400
        assert stopped == []
        said = browser.post("/api/stop", json=good, headers={"origin": HOME})
    assert said.json() == {"run": name, "said": "saves a checkpoint and stops"}
    assert stopped == [name]


def test_a_stop_that_fails_says_why(hub: Hub, live: LiveRun) -> None:
    def stop(name: str) -> str:
        raise AllranksError(f"run {name} is on node7", fix="type the same on node7")

    with client(hub, stop, cookies={make_gate(hub).cookie: TOKEN}) as browser:
        both = {"run": live.run.name, "confirm": live.run.name}
        answer = browser.post("/api/stop", json=both)
    assert answer.status_code == 409
    assert "type the same on node7" in answer.json()["error"]["what"]


def test_without_a_way_to_stop_there_is_no_button(let_in: TestClient, live: LiveRun) -> None:
    both = {"run": live.run.name, "confirm": live.run.name}
    assert let_in.post("/api/stop", json=both).status_code == 404
    assert 'id="stop"' not in let_in.get("/").text


# ---------------------------------------------------------------- news


def follow(hub: Hub, wish: Wish, until: Callable[[str, dict[str, Any]], bool]) -> list[Any]:
    """What a browser would be told, up to what it waits for."""

    async def go() -> list[Any]:
        hub.start()
        told = []
        async with asyncio.timeout(60):
            async for kind, news in hub.follow(wish):
                told.append((kind, news))
                if until(kind, news):
                    break
        return told

    # In a thread: tests of pages may have left a loop in this one.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, go()).result()


def test_everything_first_then_what_changed(hub: Hub, live: LiveRun) -> None:
    live.advance(1100)  # the curves are long by now

    def until(kind: str, news: dict[str, Any]) -> bool:
        if live.step == 1200 and '"width"' in json.dumps(news):  # all ranks are read
            live.advance(3)
        return '"step": {"=": 1203}' in json.dumps(news)

    told = follow(hub, Wish(), until)
    assert told[0][0] == "all" and {kind for kind, _ in told[1:]} - {"beat"} == {"change"}
    state = told[0][1]["state"]
    assert state["order"] == [live.run.name] == list(state["curves"])
    sizes = [len(json.dumps(news)) for _, news in told]
    assert sizes[-1] < max(sizes) / 3


def test_findings_come_beside_the_rest(live: LiveRun) -> None:
    found = {"cause": "oom", "title": "PASSWORD=hunter22 ran out", "rank": 1, "evidence": []}
    asked: list[str] = []

    def diagnose(run: RunDir) -> list[dict[str, Any]]:
        asked.append(run.name)
        return [found]

    hub = Hub(Watcher(live.run.path.parent), diagnose=diagnose)
    told = follow(hub, Wish(), lambda _, news: "ran out" in json.dumps(news))
    hub.close()
    hub.join(60)
    assert asked == [live.run.name]
    assert "hunter22" not in json.dumps(told)


@pytest.mark.parametrize("is_watched", [True, False])
def test_others_are_told_with_or_without_a_browser(
    live: LiveRun, monkeypatch: pytest.MonkeyPatch, is_watched: bool
) -> None:
    monkeypatch.setattr("allranks.watch.hub.LONE_SECONDS", 0.05)
    told = threading.Event()
    seen: list[str] = []

    def notify(runs: list[RunView]) -> None:
        seen.extend(view.state for view in runs)
        told.set()

    hub = Hub(Watcher(live.run.path.parent), notify=notify)

    async def go() -> None:
        hub.start()
        if is_watched:
            await anext(hub.follow(Wish()))
        await asyncio.to_thread(told.wait, 60)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, go()).result()
    hub.close()
    hub.join(60)
    assert "running" in seen


def test_a_page_left_open_reads_each_log_once(
    live: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor is asked again and again about a run that goes on."""
    monkeypatch.setattr("allranks.watch.hub.DIAGNOSE_SECONDS", 0.0)
    monkeypatch.setattr("allranks.watch.questions.TIMES_ITS_ANSWER", 0)
    monkeypatch.setattr("allranks.timing.limits.ranks.LOG_BYTES", 64)
    num_read = dict.fromkeys(range(live.ranks), 0)

    class Counted(io.BufferedReader):
        def read(self, *args: Any) -> bytes:
            found = super().read(*args)
            num_read[int(str(self.name).rpartition("-")[2].removesuffix(".log"))] += len(found)
            return found

    def open_counted(path: Path) -> Any:
        return Counted(io.FileIO(path)) if path.suffix == ".log" else opened(path)

    opened = files.open_file
    monkeypatch.setattr(files, "open_file", open_counted)
    for rank in range(live.ranks):
        live.log(rank, "a line\n" * 50_000)
    doctor, asked = patient_doctor(), 0

    def diagnose(run: RunDir) -> list[dict[str, Any]]:
        nonlocal asked
        asked += 1
        for rank in range(live.ranks):
            live.log(rank, "loss: nan" if asked == 3 else "more")
        return doctor(run)

    hub = Hub(Watcher(live.run.path.parent, stalled=1e9), diagnose=diagnose)
    told = follow(hub, Wish(), lambda *_: asked >= 5)
    hub.close()
    hub.join(60)
    assert "nan-loss" in json.dumps(told)
    for rank, read in num_read.items():
        assert read < live.run.log(0, rank).stat().st_size + 5 * 4096


def test_a_page_sends_no_signals_to_ranks_that_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def take(able: dict[int, int]) -> dict[int, Any]:
        asked.append(able)
        return {}

    monkeypatch.setattr("allranks.run.stacks.processes_of", lambda *_: {0: os.getpid()})
    monkeypatch.setattr("allranks.run.stacks.take", take)
    run = GrowingRun(tmp_path, "1x1", begin=time.time() - 4000)
    run.begin()
    run.steps(30)
    with run.live():
        found = patient_doctor()(run.run)
        assert [one["cause"] for one in found][:1] == ["no-progress"] and not asked
        diagnosis_of(run.run)  # as `allranks doctor` does
    assert asked == [{0: os.getpid()}]


def test_a_doctor_that_fails_is_told_of(live: LiveRun) -> None:
    def diagnose(run: RunDir) -> list[dict[str, Any]]:
        raise ZeroDivisionError("no rules")

    hub = Hub(Watcher(live.run.path.parent), diagnose=diagnose)
    told = follow(hub, Wish(), lambda _, news: "no rules" in json.dumps(news))
    hub.close()
    hub.join(60)
    assert "ZeroDivisionError: no rules" in json.dumps(told[-1])


def test_a_folder_that_cannot_be_read_does_not_end_the_news(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = hub.watcher.poll
    is_told = threading.Event()

    def poll(*args: Any, **options: Any) -> bool:
        if not is_told.is_set():
            raise OSError("the disk is gone")
        return right(*args, **options)

    def until(kind: str, news: dict[str, Any]) -> bool:
        if "the disk is gone" in json.dumps(news):
            is_told.set()
        return '"problem": {"=": null}' in json.dumps(news)

    monkeypatch.setattr(hub.watcher, "poll", poll)
    told = follow(hub, Wish(), until)
    assert "the disk is gone" in told[0][1]["state"]["problem"]


# ---------------------------------------------------------------- the process


def test_it_listens_on_loopback_alone() -> None:
    listener = server.listen(0)
    try:
        address, port = listener.getsockname()
        assert address == "127.0.0.1"
        with pytest.raises(AllranksError, match=f"{port}.*in use"):
            server.listen(port)
    finally:
        listener.close()


def test_the_lines_that_are_printed() -> None:
    served = server.served(8888, "tok", "me", "login1.example")
    assert served.url == "http://127.0.0.1:8888/?token=tok"
    assert served.ssh == "ssh -N -L 8888:127.0.0.1:8888 me@login1.example"
    assert served.url in served.lines()[0] and served.ssh in served.lines()[1]


def test_ctrl_c_ends_it_at_once_with_browsers_on_the_line(live: LiveRun) -> None:
    command = [sys.executable, "-m", "allranks", "watch", "--web", "--json"]
    command += ["--runs", str(live.run.path.parent)]
    env = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(command, env=env, stdout=-1, stderr=-1, text=True)
    lines: list[http.client.HTTPConnection] = []
    try:
        assert process.stdout is not None and process.stderr is not None
        said = json.loads(process.stdout.readline())
        address = urlsplit(said["url"])
        assert said["ssh"].endswith(f"@{server.host_name()}") and address.port == said["port"]
        assert not is_reachable_from_elsewhere(said["port"])
        for _ in range(3):  # several browsers
            lines.append(http.client.HTTPConnection("127.0.0.1", said["port"], timeout=60))
            lines[-1].request("GET", f"/events?{address.query}&{urlencode({'metric': 'wait'})}")
        answers = [line.getresponse() for line in lines]
        for answer in answers:
            assert answer.status == 200
            wait_for_line(answer, b'"step":100')
        live.advance(7)
        for answer in answers:
            wait_for_line(answer, b"107")
        process.send_signal(signal.SIGINT)
        for answer in answers:
            answer.read()  # to its proper end, or it raises
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)  # though the browsers would stay for ever
        process.send_signal(signal.SIGABRT)  # where it is, if it still is
        assert (process.wait(), process.stderr.read(), process.stdout.read()) == (0, "", "")
    finally:
        for line in lines:
            line.close()
        process.kill()
        process.communicate()


def wait_for_line(answer: http.client.HTTPResponse, text: bytes) -> None:
    for line in answer:
        if text in line:
            return
    raise AssertionError(f"the line ended before {text!r}")


def is_reachable_from_elsewhere(port: int) -> bool:
    """By any address of this machine that is not its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return False
        address = probe.getsockname()[0]
    with socket.socket() as trial:
        trial.settimeout(1)
        return not address.startswith("127.") and trial.connect_ex((address, port)) == 0


def test_without_its_packages_it_says_what_to_install(
    live: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)  # as if it were not there
    with pytest.raises(AllranksError, match="starlette") as caught:
        server.serve(Watcher(live.run.path.parent), announce=print)
    assert "pip install 'allranks[web]'" in caught.value.fix


def test_no_thread_is_left(hub: Hub) -> None:
    follow(hub, Wish(), lambda kind, _: kind == "all")
    hub.close()
    hub.join(60)
    assert not [thread for thread in threading.enumerate() if thread.name == "watch"]


@contextlib.contextmanager
def serving(app_: Any, *, seconds: float, most: int) -> Iterator[int]:
    """The port of a server with these limits."""
    uvicorn = pytest.importorskip("uvicorn")
    protocol = impatient_protocol(seconds, most)
    listener = server.listen(0)
    config = uvicorn.Config(app_, http=protocol, ws="none", log_level="critical", loop="asyncio")
    config.timeout_graceful_shutdown = 1
    here = uvicorn.Server(config)
    thread = threading.Thread(target=here.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        here.should_exit = True
        thread.join(60)
        listener.close()


@contextlib.contextmanager
def asked(port: int, path: str) -> Iterator[http.client.HTTPResponse]:
    """The answer, on a connection that is closed in the end."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(line):
        line.request("GET", f"{path}?token={TOKEN}")
        with line.getresponse() as answer:
            yield answer


def status_of(port: int, path: str) -> int:
    with asked(port, path) as answer:
        return answer.status


def test_strangers_who_send_no_request_are_shown_the_door(hub: Hub) -> None:
    strangers = []
    with serving(make_gate(hub), seconds=1.0, most=8) as port:
        try:
            strangers = [socket.create_connection(("127.0.0.1", port), 60) for _ in range(20)]
            for one in strangers[:10]:
                with contextlib.suppress(OSError):
                    one.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n")  # and no more
            # There is room for who asks for something.
            with asked(port, "/static/page.js") as answer:
                assert answer.status == 200
            for one in strangers:
                with contextlib.suppress(ConnectionResetError):
                    assert one.recv(10) == b""
        finally:
            for one in strangers:
                one.close()


def test_when_all_connections_are_taken_the_next_is_told_so(hub: Hub) -> None:
    with serving(make_gate(hub), seconds=60.0, most=4) as port, contextlib.ExitStack() as open_:
        pages = [open_.enter_context(asked(port, "/events")) for _ in range(3)]
        with asked(port, "/events") as fourth:
            assert [page.status for page in (*pages, fourth)] == [200] * 4
            with asked(port, "/") as refused:
                assert refused.status == 503 and refused.getheader("retry-after") == "10"
                assert refused.read().decode() == server.NO_ROOM
        until(lambda: status_of(port, "/") == 200)
        for page in pages:
            wait_for_line(page, b"event: ")  # they are served as before


def test_pages_leave_room_for_files_and_logs(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MOST_PAGES", 1)
    with serving(make_gate(hub), seconds=60.0, most=64) as port:
        with asked(port, "/events") as page:
            wait_for_line(page, b"event: ")
            with asked(port, "/events") as refused:
                assert (refused.status, refused.read().decode()) == (503, server.NO_ROOM)
            assert status_of(port, "/") == 200
        until(lambda: status_of(port, "/events") == 200)


def test_a_search_ends_when_nobody_waits_for_it(
    hub: Hub, live: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def search(path: Path, *, given_up: Callable[[], bool], **_: Any) -> dict[str, Any]:
        begun.set()
        until(given_up)
        ended.set()
        return {}

    monkeypatch.setattr("allranks.watch.logs.read_lines", search)
    hub.watcher.poll()
    words = urlencode({"run": live.run.name, "file": "attempts/0/rank-0.log", "token": TOKEN})
    with serving(make_gate(hub), seconds=60.0, most=64) as port:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        line.request("GET", f"/api/log?{words}")
        assert begun.wait(60) and not ended.wait(0.1)
        line.close()
        assert ended.wait(60)


def test_who_does_not_read_its_answer_is_cut_off() -> None:
    is_over = threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        leaving = asyncio.ensure_future(receive_until_gone(receive))
        while not leaving.done():
            more = {"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True}
            await send(more)
        is_over.set()

    async def receive_until_gone(receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    with serving(endless, seconds=0.1, most=64) as port, asked(port, "/"):
        assert is_over.wait(60)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
