"""Who may ask the watch page's server anything: whoever has the token, from this machine."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

if TYPE_CHECKING:
    import asyncio

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# By any port: ssh may forward another one of the laptop's.
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
}


class Gate:
    """Lets a request pass to the app if it names this machine and brings the token.

    The token comes in the address once; from then on a cookie brings it that no script can read
    and no other site can send. It is not left in the address, which people show on screens.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self._token = token.encode()
        # Browsers keep one jar for all ports of a host: each server has a cookie of its own name.
        self.cookie = f"allranks-{hashlib.sha256(self._token).hexdigest()[:12]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # before accepting: a 403
        elif (status := self._refusal(scope)) is not None:
            await _refuse(send, *status)
        else:
            is_first = self._fits(_query_token(scope))
            await self.app(scope, receive, self._dressed(send, with_cookie=is_first))

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        host = headers.get(b"host", b"")
        # A name that an attacker points at 127.0.0.1 arrives here as that name.
        if _without_port(host) not in HOSTS:
            return 403, "This server answers to 127.0.0.1 and localhost only.\n"
        tokens = (_query_token(scope), self._cookie_token(headers), _bearer_token(headers))
        if not any([self._fits(token) for token in tokens]):  # a list: all are compared
            return 401, "Open the address that `allranks watch --web` printed, token and all.\n"
        # A page of another port is the same site to a browser, so that it sends the cookie.
        origin = headers.get(b"origin")
        if scope["method"] not in ("GET", "HEAD") and origin not in (None, b"http://" + host):
            return 403, "This request comes from another page.\n"
        return None

    def _fits(self, token: bytes) -> bool:
        return secrets.compare_digest(token, self._token)

    def _cookie_token(self, headers: dict[bytes, bytes]) -> bytes:
        # By hand: the parser of the library gives up at what other servers of a host put there.
        pairs = [pair.strip().partition(b"=") for pair in headers.get(b"cookie", b"").split(b";")]
        values = [value for name, _, value in pairs if name == self.cookie.encode()]
        return values[0] if values else b""

    def _dressed(self, send: Send, *, with_cookie: bool) -> Send:
        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", []))
                headers += [(name.encode(), text.encode()) for name, text in HEADERS.items()]
                if not any(name == b"cache-control" for name, _ in headers):
                    headers.append((b"cache-control", b"no-store"))
                if with_cookie:
                    token = self._token.decode()
                    text = f"{self.cookie}={token}; Path=/; HttpOnly; SameSite=Strict"
                    headers.append((b"set-cookie", text.encode()))
                message = {**message, "headers": headers}
            await send(message)

        return dressed


def prompt_protocol(seconds: float, most: int) -> Any:
    """uvicorn's HTTP, but for strangers who send nothing, or a letter now and then.

    A connection without a request is closed after so many seconds; of more than `most`, the one
    that has waited longest without any makes room.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Prompt(H11Protocol):
        waits_since = 0.0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.waits_since = self.loop.time()
            waiting = [one for one in self.connections if isinstance(one, Prompt) and one.is_idle]
            if len(self.connections) > most:
                min(waiting, key=lambda one: one.waits_since).transport.abort()
            self.loop.call_later(seconds, self._look)

        @property
        def is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def on_response_complete(self) -> None:
            self.waits_since = self.loop.time()
            super().on_response_complete()

        def _look(self) -> None:
            if self.transport.is_closing():
                return
            left = self.waits_since + seconds - self.loop.time()
            if self.is_idle and left <= 0:
                self.transport.abort()
            else:
                self.loop.call_later(left if left > 0 else seconds, self._look)

    return Prompt


def _without_port(host: bytes) -> bytes:
    name, colon, port = host.lower().rpartition(b":")
    return name if colon and port.isdigit() else host.lower()


def _query_token(scope: Scope) -> bytes:
    values = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
    return values[0].encode() if len(values) == 1 else b""


def _bearer_token(headers: dict[bytes, bytes]) -> bytes:
    kind, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if kind.lower() == b"bearer" else b""


async def _refuse(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store")]
    headers += [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
