"""A port of this machine that others may knock at. No torch."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class OpenPort:
    """Listens on every address, IPv4 and IPv6; `take` is given each connection, in one thread.

    Port 0 is any free one. Raises OSError where the port is taken. Nobody is heard before `begin`.
    """

    def __init__(self, take: Callable[[socket.socket], None], port: int = 0) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", port), family=family, dualstack_ipv6=both)
        self._take = take
        self.port = int(self._socket.getsockname()[1])

    def begin(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):  # wakes the thread that accepts
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                self._take(self._socket.accept()[0])
