"""`allranks watch --web`: serves the page on this machine's loopback until Ctrl-C."""

from __future__ import annotations

import getpass
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from allranks.errors import AllranksError
from allranks.run.folder import RunDir
from allranks.watch.cells import DEFAULT_MARKS, Mark
from allranks.watch.live import Watcher
from allranks.watch.views import RunView

if TYPE_CHECKING:
    import asyncio

    from starlette.types import Receive, Scope, Send

ADDRESS = "127.0.0.1"
HEADER_SECONDS = 10  # within which a request must be there
MOST_CONNECTIONS = 64
MOST_PAGES = 32  # open at a time; the other connections are for files and logs
NO_ROOM = (
    "Too many pages or programs are connected to this `allranks watch --web`. "
    "Close some; waiting pages then connect by themselves.\n"
)
# uPlot's files, by the names that the page asks for. The package itself, a wrapper for notebooks,
# is not imported.
PLOT_FILES = {"uplot.js": "uPlot.iife.js", "uplot.css": "uPlot.min.css"}


@dataclass(frozen=True, slots=True)
class Served:
    """Where to find the page."""

    url: str
    ssh: str  # to type on a laptop before opening the same url there
    port: int

    def lines(self) -> list[str]:
        return [
            f"open  {self.url}",
            f"from another machine, first type there:  {self.ssh}",
            "Ctrl-C ends it. Anyone with the address can read these runs' logs and stop them.",
        ]


def serve(
    watcher: Watcher,
    *,
    port: int = 0,
    announce: Callable[[Served], None],
    marks: Mapping[str, Mark] = DEFAULT_MARKS,
    diagnose: Callable[[RunDir], list[dict[str, Any]]] | None = None,
    stop: Callable[[str], str] | None = None,
    notify: Callable[[list[RunView]], object] | None = None,
) -> None:
    """Serve until a signal; `port` 0 means any free one. Needs the packages of the extra `web`.

    `announce` gets the address as soon as the page can be opened. `stop` stops a run by its name
    and says what was done, `diagnose` finds what is wrong with a run, `notify` sees all runs.
    """
    uvicorn = _uvicorn()
    from allranks.watch.app import ServerHead, make_app
    from allranks.watch.hub import Hub

    listener = listen(port)
    number = int(listener.getsockname()[1])
    token = secrets.token_urlsafe(32)
    hub = Hub(watcher, marks=marks, diagnose=diagnose, notify=notify)
    place = ServerHead(getpass.getuser(), host_name(), str(watcher.folder.absolute()))
    config = uvicorn.Config(
        make_app(hub, token, place, stop),
        lifespan="on",
        log_level="critical",
        access_log=False,  # it would show the token
        server_header=False,
        proxy_headers=False,  # there is no proxy, so its headers are not trusted
        timeout_graceful_shutdown=1,
        timeout_keep_alive=HEADER_SECONDS,
        ws="none",
        http=impatient_protocol(HEADER_SECONDS, MOST_CONNECTIONS),
        loop="asyncio",
    )

    class Server(uvicorn.Server):  # type: ignore[misc, name-defined]  # imported late
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            announce(served(number, token, place.user, place.host))

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            super().handle_exit(sig, frame)
            self._captured_signals.clear()  # a signal is the normal way to end

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            hub.close()  # connections end now, not when their browsers close
            await super().shutdown(sockets)

    try:
        Server(config).run(sockets=[listener])
    finally:
        listener.close()
        hub.close()
        hub.join(1.0)


def served(port: int, token: str, user: str, host: str) -> Served:
    """The address, and the ssh command that forwards it to another machine."""
    return Served(
        url=f"http://{ADDRESS}:{port}/?token={token}",
        ssh=f"ssh -N -L {port}:{ADDRESS}:{port} {user}@{host}",
        port=port,
    )


def listen(port: int) -> socket.socket:
    """A listening socket on loopback only."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ADDRESS, port))
        listener.listen(64)  # now, so that nobody else can take the port
    except OSError as error:
        listener.close()
        raise AllranksError(
            f"cannot listen on {ADDRESS}:{port}: {error.strerror}",
            fix="leave out --port to use a free one",
        ) from None
    return listener


def host_name() -> str:
    """The name by which others reach this machine, as far as it knows."""
    name = socket.gethostname()
    if "." in name:
        return name
    whole = socket.getfqdn(name)
    return whole if "." in whole and not whole.startswith("localhost") else name


def _uvicorn() -> Any:
    missing = None
    try:
        import starlette
        import uvicorn

        assert starlette
    except ImportError as error:
        missing = error.name
    if missing is None and not all(plot_file(name) for name in PLOT_FILES):
        missing = "uplot-python"
    if missing is not None:
        raise AllranksError(
            f"the page needs the package {missing}, which is not installed",
            fix="pip install 'allranks[web]'; or leave out --web to watch in the terminal",
        )
    return uvicorn


def impatient_protocol(seconds: float, most: int) -> Any:
    """uvicorn's HTTP protocol, protected against clients that connect but hardly send or read.

    A connection without a request is closed after `seconds`, and one whose client does not read its
    answer after three times as long. If there are more than `most`, the one that has been without a
    request longest is closed; if all have one, the new one is answered that there is no room.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        waits_since = 0.0  # for a request
        stuck_since: float | None = None  # with an answer that its client does not read

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.waits_since = self.loop.time()
            if len(self.connections) > most:
                others = [one for one in self.connections if isinstance(one, Impatient)]
                waiting = [one for one in others if one.is_idle and one is not self]
                if waiting:
                    min(waiting, key=lambda one: one.waits_since).transport.abort()
                else:
                    self.app = no_room
            self.loop.call_later(seconds, self._look)

        @property
        def is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def on_response_complete(self) -> None:
            self.waits_since = self.loop.time()
            super().on_response_complete()

        def pause_writing(self) -> None:
            self.stuck_since = self.loop.time()
            super().pause_writing()

        def resume_writing(self) -> None:
            self.stuck_since = None
            super().resume_writing()

        def _look(self) -> None:
            if self.transport.is_closing():
                return
            now = self.loop.time()
            left = self.waits_since + seconds - now
            is_stuck = self.stuck_since is not None and now - self.stuck_since >= 3 * seconds
            if is_stuck or (self.is_idle and left <= 0):
                self.transport.abort()
            else:
                self.loop.call_later(left if left > 0 else seconds, self._look)

    return Impatient


async def no_room(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer instead of the page while there are too many connections."""
    from starlette.responses import PlainTextResponse

    headers = {"retry-after": "10", "connection": "close"}
    await PlainTextResponse(NO_ROOM, 503, headers)(scope, receive, send)


def plot_file(name: str) -> Path | None:
    """A file of uPlot by its name on the page; None if the package is not installed."""
    spec = find_spec("uplot")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("static") / PLOT_FILES[name]
    return path if path.is_file() else None  # another package may have the same name
