"""A relay for TCP that keeps what passes, and cuts what is connected."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit

_PIECE_BYTES = 1 << 16


class Proxy:
    """Relays connections to a server.

    Args:
        address: Of the server, as `host:port`.

    Attributes:
        address: Its own.
        sessions: What each connection has sent to the server, in their order.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(f"//{address}")
        self._server = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.sessions: list[bytearray] = []
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="proxy")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                session = bytearray()
                self.sessions.append(session)
                self._start(self._relay, client, server, session)
                self._start(self._relay, server, client, None)

    def _relay(self, source: socket.socket, target: socket.socket, kept: bytearray | None) -> None:
        with suppress(OSError):  # cut
            while data := source.recv(_PIECE_BYTES):
                if kept is not None:
                    kept += data
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End all connections; new ones are taken."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(10.0)
            assert not thread.is_alive()
        self._listener.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def replay(address: str, session: bytes, timeout_s: float) -> bytes:
    """Send a recorded session to a server; return what it answers before it hangs up."""
    parts = urlsplit(f"//{address}")
    answer = bytearray()
    target = parts.hostname, parts.port
    with socket.create_connection(target, timeout_s) as again, suppress(OSError):
        again.sendall(session)
        while data := again.recv(_PIECE_BYTES):
            answer += data
    return bytes(answer)
