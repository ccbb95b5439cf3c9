"""The watch page's paths (page, files, events, logs, stop), and the gate that guards them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders, QueryParams
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from allranks.errors import AllranksError
from allranks.run.events import to_json
from allranks.show import PALETTE
from allranks.show.secrets import redact
from allranks.watch import logs
from allranks.watch.hub import Hub
from allranks.watch.page_data import METRICS, Wish
from allranks.watch.server import MOST_PAGES, NO_ROOM, PLOT_FILES, plot_file

FOLDER = Path(__file__).parent / "page"
SCRIPTS = (
    "page.js",
    "state.js",
    "words.js",
    "runs.js",
    "detail.js",
    "charts.js",
    "plot.js",
    "frames.js",
    "logs.js",
)
STATIC = (*SCRIPTS, "page.css", PALETTE.name, *PLOT_FILES)
MAX_BESIDE = 9
MOST_READERS = 4  # of logs at a time
MAX_QUERY = 200
MAX_BODY = 4096
BODY_SECONDS = 10.0
# With any port: ssh may forward a different one.
HOSTS = {b"127.0.0.1", b"localhost", b"[::1]"}
HEADERS = {
    # The icon is a data: image.
    "content-security-policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}

Stop = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class ServerHead:
    """Where the server runs, as shown at the top of the page."""

    user: str
    host: str
    folder: str


def make_app(hub: Hub, token: str, place: ServerHead, stop: Stop | None = None) -> ASGIApp:
    """Everything behind the gate. `stop` stops a run by its name and says what was done."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        hub.start()
        yield
        hub.close()

    answers = Answers(hub, place, stop)
    routes = [
        Route("/", answers.page),
        Route("/static/{name}", answers.static),
        Route("/events", answers.events),
        Route("/api/log", answers.log),
        Route("/api/stop", answers.stop, methods=["POST"]),
    ]
    # It leaves the stream of events as it is.
    packed = Middleware(GZipMiddleware, compresslevel=6)
    inside = Starlette(routes=routes, lifespan=lifespan, middleware=[packed])
    inside.router.redirect_slashes = False
    return Gate(inside, token)


class Answers:
    """One method for each path."""

    def __init__(self, hub: Hub, place: ServerHead, stop: Stop | None) -> None:
        self.hub = hub
        self._place = place
        self._stop = stop
        self._readers = asyncio.Semaphore(MOST_READERS)

    async def page(self, _: Request) -> Response:
        environment = Environment(
            loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined
        )
        text = environment.get_template("page.html.j2").render(
            version=static_version(),
            user=self._place.user,
            host=self._place.host,
            folder=self._place.folder,
            can_stop=self._stop is not None,
        )
        return Response(text, media_type="text/html")

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            return PlainTextResponse("No such file.\n", 404)
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(static_file(name), media_type=kind)

    async def events(self, request: Request) -> Response:
        if self.hub.num_pages >= MOST_PAGES:
            return PlainTextResponse(NO_ROOM, 503, {"retry-after": "10"})
        words = request.query_params
        metric = words.get("metric", METRICS[0])
        wish = Wish(
            words.get("run") or None,
            metric if metric in METRICS else METRICS[0],
            tuple(words.getlist("with")[:MAX_BESIDE]),
        )
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._lines(wish), 200, headers, "text/event-stream")

    async def _lines(self, wish: Wish) -> AsyncIterator[str]:
        yield "retry: 1000\n\n"
        async for kind, news in self.hub.follow(wish):
            text = to_json({"time": time.time(), **news}, separators=(",", ":"))
            yield f"event: {kind}\ndata: {text}\n\n"

    async def log(self, request: Request) -> Response:
        words = request.query_params
        run = self.hub.watcher.run_dir(words.get("run", ""))
        if run is None:
            return _problem(404, "there is no such run")
        path = (await run_in_threadpool(logs.log_files, run)).get(words.get("file", ""))
        if path is None:
            return _problem(404, "this run has no such log")
        after, line = (_count(words.get(key)) for key in ("after", "line"))
        query = words.get("query", "")[:MAX_QUERY]

        given_up = threading.Event()  # a long log takes a while to search

        async def read() -> dict[str, Any]:
            find = partial(logs.read_lines, path, query=query, given_up=given_up.is_set)
            async with self._readers:
                return await run_in_threadpool(find, after=after, line=line or 0)

        reading, leaving = asyncio.ensure_future(read()), asyncio.ensure_future(_leaves(request))
        try:
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(reading.result() if reading.done() else {})
        finally:
            given_up.set()
            leaving.cancel()
            reading.cancel()

    async def stop(self, request: Request) -> Response:
        """The only action on the page; the body must name the run twice."""
        if self._stop is None:
            return _problem(404, "runs cannot be stopped from this page")
        asked = await _body(request)
        name = asked.get("run")
        if not isinstance(name, str) or asked.get("confirm") != name:
            return _problem(400, 'to stop a run, send {"run": NAME, "confirm": NAME}')
        if self.hub.watcher.run_dir(name) is None:
            return _problem(404, "there is no such run")
        try:
            said = await run_in_threadpool(self._stop, name)
        except AllranksError as error:
            return _problem(409, f"{error.what}; {error.fix}")
        self.hub.hurry(name)
        return JSONResponse({"run": name, "said": redact(said)})


async def _leaves(request: Request) -> None:
    """Return when the client has gone, or has asked for something else."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> dict[str, Any]:
    """The body if it is a small JSON object, else an empty one."""
    # A form on another site cannot send this type without a preflight request.
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return {}
    raw = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > MAX_BODY:
                    return {}
        content = json.loads(raw)
    except (ValueError, RecursionError, TimeoutError):
        return {}
    return content if isinstance(content, dict) else {}


def _problem(status: int, what: str) -> Response:
    return JSONResponse({"error": {"what": redact(what)}}, status)


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 19 else None


@cache
def static_file(name: str) -> bytes:
    """A file by its bare name, which the caller has checked: never a path from outside."""
    path = plot_file(name) if name in PLOT_FILES else FOLDER / name
    path = PALETTE if name == PALETTE.name else path
    assert path is not None, "the server does not start without it"
    return path.read_bytes()


def static_version() -> str:
    """Changes with any file of the page, so that no browser uses an old one."""
    return hashlib.sha256(b"".join(static_file(name) for name in STATIC)).hexdigest()[:10]


class Gate:
    """Passes a request on to the app if it names this machine and has the token.

    The token comes in the address once; after that, in a cookie that no script can read and no
    other site can send. It does not stay in the address, which others may see on a screen.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self._token = token.encode()
        # Browsers share cookies between all ports of a host: each server has its own name.
        self.cookie = f"allranks-{hashlib.sha256(self._token).hexdigest()[:12]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # before accepting: a 403
        elif (status := self._refusal(scope)) is not None:
            refused = PlainTextResponse(status[1], status[0])
            await refused(scope, receive, self._with_headers(send, with_cookie=False))
        else:
            is_first = self._fits(_query_token(scope))
            await self.app(scope, receive, self._with_headers(send, with_cookie=is_first))

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        host = headers.get(b"host", b"")
        # Against DNS rebinding: an attacker's name that points to 127.0.0.1 is refused.
        if _without_port(host) not in HOSTS:
            return 403, "This server answers to 127.0.0.1 and localhost only.\n"
        tokens = (_query_token(scope), self._cookie_token(headers))
        if not any([self._fits(token) for token in tokens]):  # a list, so that all are compared
            return 401, "Open the address that `allranks watch --web` printed, token and all.\n"
        # To a browser, a page on another port is the same site, so it sends the cookie.
        origin = headers.get(b"origin")
        if scope["method"] not in ("GET", "HEAD") and origin not in (None, b"http://" + host):
            return 403, "This request comes from another page.\n"
        return None

    def _fits(self, token: bytes) -> bool:
        return secrets.compare_digest(token, self._token)

    def _cookie_token(self, headers: dict[bytes, bytes]) -> bytes:
        # By hand: the library's parser fails on cookies that other servers of this host may set.
        pairs = [pair.strip().partition(b"=") for pair in headers.get(b"cookie", b"").split(b";")]
        values = [value for name, _, value in pairs if name == self.cookie.encode()]
        return values[0] if values else b""

    def _with_headers(self, send: Send, *, with_cookie: bool) -> Send:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if with_cookie:
                    token = self._token.decode()
                    text = f"{self.cookie}={token}; Path=/; HttpOnly; SameSite=Strict"
                    headers.append("set-cookie", text)
            await send(message)

        return send_with_headers


def _without_port(host: bytes) -> bytes:
    name, colon, port = host.lower().rpartition(b":")
    return name if colon and port.isdigit() else host.lower()


def _query_token(scope: Scope) -> bytes:
    values = QueryParams(scope["query_string"]).getlist("token")
    return values[0].encode() if len(values) == 1 else b""
