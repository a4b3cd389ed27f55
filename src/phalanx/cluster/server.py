"""The end of the network at which a host's server is: takes requests in, sends answers out.

    listener ──► a thread for each connection: TLS ──► head checked ──► tensors, up to a cap ──►
                 service: answer ──► sent, and the next head

A request that waits, for other workers or for a lock, holds up its own connection alone; so does a
client that reads nothing. Strangers get no further than TLS, which admits holders of the run's
certificate; at most `_HANDSHAKES` of them at a time cost a thread each, for `_HANDSHAKE_S`.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, Self

from torch import Tensor

from phalanx import errors
from phalanx.clock import now_s, pause
from phalanx.cluster.frames import (
    MAX_BYTES,
    BadFrame,
    Kind,
    Message,
    Stream,
    prepare,
    tag_of,
)
from phalanx.cluster.secret import Secret
from phalanx.errors import PeerError, PhalanxError

_log = logging.getLogger(__name__)

_LOOK_S = 0.1
_TAKEN_S = 5.0
_HANDSHAKES, _HANDSHAKE_S = 64, 10.0
_LONGEST_ERROR = 4000
_CONNECTIONS_PER_CLIENT = 2  # one of which has no calls


class Answer(NamedTuple):
    """An answer of a service: numbers, a text, and contiguous tensors."""

    args: tuple[int, ...] = ()
    text: str = ""
    tensors: Sequence[Tensor] = ()


class Service(Protocol):
    """Requests that a server answers; many threads call its methods."""

    def answer(self, asked: Message, stream: Stream) -> Answer:
        """Do what is asked, and return the answer; its tensors may have any length."""

    def ended(self, stream: Stream) -> None:
        """Note that a connection has ended."""


class Server:
    """A socket and its service.

    Args:
        service: What is served.
        address: Where, as ``address:port``; port 0 is any that is free.
        run: The run's name on this host.
        secret: What connections are encrypted with; None on the loopback interface alone.

    Attributes:
        address: Where it listens.
        num_dropped: Connections that were closed because of what came.

    Raises:
        StateError: The address is taken.
    """

    def __init__(self, service: Service, address: str, run: str, secret: Secret | None) -> None:
        self._service = service
        self._tag = tag_of(run)
        self._tls = None if secret is None else secret.tls(server=True)
        self._handshakes = threading.Semaphore(_HANDSHAKES)
        self._streams: set[Stream] = set()
        self._is_closed = False
        self.num_dropped = 0
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        taken_s = now_s()
        while True:
            try:
                self._listener = socket.create_server((host, int(port)), family=family, backlog=256)
                break
            except OSError as exc:
                # Threads of a server that was killed may hold its socket a little longer.
                if now_s() > taken_s + _TAKEN_S:
                    raise errors.StateError(
                        f"A server must have its address for itself, but {address} cannot be "
                        f"taken: {exc}."
                    ) from exc
                pause(0.01)
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"

    def __enter__(self) -> Self:
        """Begin to answer, in threads."""
        threading.Thread(target=self._accept, name="phalanx server", daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stop listening, and end all connections."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait for connections
        self._listener.close()
        for stream in list(self._streams):
            stream.shut()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                end, _ = self._listener.accept()
            except OSError:  # closed; or the client has gone again, or no descriptor is left
                pause(_LOOK_S)
                continue
            if not self._handshakes.acquire(blocking=False):
                end.close()  # a holder of the secret tries again
                continue
            try:
                threading.Thread(
                    target=self._admit, args=(end,), name="phalanx connection", daemon=True
                ).start()
            except RuntimeError:  # the system starts no thread
                self._handshakes.release()
                end.close()

    # --- a connection -----------------------------------------------------------------------------

    def _admit(self, end: socket.socket) -> None:
        try:
            prepare(end)
            end.settimeout(_HANDSHAKE_S)
            if self._tls is not None:
                end = self._tls.wrap_socket(end, server_side=True)
        except OSError:  # a stranger, or one that is gone
            self.num_dropped += 1
            end.close()
            return
        finally:
            self._handshakes.release()
        end.settimeout(None)  # the kernel ends connections to peers that are gone or read nothing
        stream = Stream(end, self._tag)
        self._streams.add(stream)
        if len(self._streams) > _CONNECTIONS_PER_CLIENT * len(os.sched_getaffinity(0)):
            _wait_for_turns()
        try:
            while True:
                self._answer_next(stream)
        except BadFrame:
            self.num_dropped += 1
        except (OSError, EOFError):
            pass
        finally:
            self._streams.discard(stream)
            self._service.ended(stream)
            stream.close()

    def _answer_next(self, stream: Stream) -> None:
        asked = stream.receive(MAX_BYTES)
        if asked.kind != Kind.REQUEST:
            raise BadFrame("no request")
        self._send(stream, self._ask(asked, stream))

    def _ask(self, asked: Message, stream: Stream) -> Message:
        try:
            answer, kind = self._service.answer(asked, stream), Kind.ANSWER
        except Exception as exc:
            answer, kind = Answer(text=error_text(exc)), Kind.ERROR
        return Message(kind, *asked[1:-3], *answer)

    def _send(self, stream: Stream, answer: Message) -> None:
        stream.send(answer)


def _wait_for_turns() -> None:
    """Let this thread interrupt no other that computes when a request wakes it.

    Where there are more clients than cores, each interruption costs two changes of process and what
    the caches held: a fifth of all small adds.
    """
    with suppress(OSError):  # the system has no such policy, or forbids it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def error_text(error: BaseException) -> str:
    """Write an error of ours down; of any other only that there was one: its trace is logged."""
    rank = error.rank if isinstance(error, PeerError) else None
    if isinstance(error, PhalanxError):
        kind, message = type(error).__name__, str(error)
    else:
        _log.error("A request failed by a fault of ours", exc_info=error)
        kind = "InternalError"
        message = f"The server met a {type(error).__name__}; its own output says where."
    return json.dumps({"error": kind, "message": message[:_LONGEST_ERROR], "rank": rank})
