"""The end of the network at which a host's server is: takes requests in, sends answers out.

    socket ──► head checked ──► service: how long must the payload be? ──► payload, in pieces
                                service: answer ──► at once, or from a thread where it has to wait

One thread has the socket. A client and the client's own number identify a request, over any link: a
client whose link was cut repeats its requests over a new one. A repeated request replaces one whose
payload is incomplete, and waits for one that is being answered. The answer takes the link of the
last repetition; it is dropped if that link is gone.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import zmq
from zmq.auth.thread import ThreadAuthenticator

from phalanx import errors
from phalanx.clock import now_s
from phalanx.cluster.frames import (
    PIECE_BYTES,
    BadFrame,
    Caps,
    Head,
    Kind,
    has_message,
    pieces_of,
    receive_message,
    send_message,
)
from phalanx.cluster.secret import CurveKeys
from phalanx.errors import PeerError, PhalanxError

__all__ = ["Answer", "Request", "Server", "Service"]

_log = logging.getLogger(__name__)

_POLL_MS = 100
_NUM_WAITING = 512  # requests that wait for other workers
_LONGEST_ERROR = 4000
_REQUESTS_PER_TURN = 64


class Request(NamedTuple):
    """A request that has come whole."""

    head: Head
    payload: memoryview


class Answer(NamedTuple):
    """What goes back: numbers, and buffers that follow each other in the payload.

    Buffers are sent as they lie, later, so nobody changes them any more.
    """

    args: tuple[int, ...] = ()
    payload: Sequence[memoryview] = ()
    text: str = ""


class Service(Protocol):
    """What a server serves."""

    def hear(self, head: Head) -> None:
        """Note that a client lives: it asks, whether it is answered or not."""

    def payload_bytes(self, head: Head) -> int:
        """Return how long the payload of a request must be; raise if it is refused."""

    def waits(self, head: Head) -> bool:
        """Tell whether the answer may take a while, because other workers have to come."""

    def answer(self, request: Request) -> Answer:
        """Do what is asked, and return the answer."""


@dataclass
class _Assembly:
    """A request whose payload is coming over a link."""

    link: bytes
    head: Head
    payload: bytearray
    missing: int


class _Admitted:
    """Admits the run's clients, and nobody else."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - as pyzmq calls it
        return key == self._public


class Server:
    """A socket and its service.

    Args:
        service: What is served.
        address: Where, as `tcp://host:port`; port 0 or `*` is any that is free.
        keys: The server's own; None without encryption, in a network that is trusted.
        client_public: The public key of admitted clients.
        caps: How much a peer may announce.

    Attributes:
        address: Where it listens.
        num_dropped: Frames of no meaning.

    Raises:
        StateError: The address is taken.
    """

    def __init__(
        self,
        service: Service,
        address: str,
        *,
        keys: CurveKeys | None,
        client_public: bytes | None = None,
        caps: Caps = Caps(),  # noqa: B008 - a value
    ) -> None:
        self._service = service
        self._caps = caps
        self._assemblies: dict[tuple[bytes, int], _Assembly] = {}  # by client and call
        self._links: dict[tuple[bytes, int], bytes] = {}  # of requests that wait to be answered
        self._done: deque[tuple[Head, Answer | BaseException]] = deque()
        self._pool = ThreadPoolExecutor(_NUM_WAITING, thread_name_prefix="phalanx server")
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, PIECE_BYTES + 4096)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 4096)
        if keys is not None and client_public is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(
                "*", credentials_provider=_Admitted(client_public)
            )
            self._socket.curve_server = True
            self._socket.curve_secretkey = keys.private
            self._socket.curve_publickey = keys.public
        self.num_dropped = 0
        try:
            self._socket.bind(address)
        except zmq.ZMQError as exc:
            self.close()
            raise errors.StateError(
                f"A server must have its address for itself, but {address} cannot be taken: {exc}."
            ) from exc
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def serve(self, go_on: Callable[[], bool]) -> None:
        """Answer until ``go_on()`` is False, which is asked every 100 ms: it may be slow."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        ask_s = 0.0
        while True:
            if now_s() >= ask_s:
                if not go_on():
                    return
                ask_s = now_s() + 1e-3 * _POLL_MS
            ready = dict(poller.poll(_POLL_MS))
            if self._wake in ready:
                os.eventfd_read(self._wake)
                while self._done:
                    head, answer = self._done.popleft()
                    self._send(self._links.pop(_key(head)), head, answer)
            if self._socket in ready:
                for _ in range(_REQUESTS_PER_TURN):
                    self._take()
                    if not has_message(self._socket):
                        break

    def close(self) -> None:
        """Stop listening."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        os.close(self._wake)

    # --- in ---------------------------------------------------------------------------------------

    def _take(self) -> None:
        name, *frames = receive_message(self._socket)
        link = name.bytes
        try:
            if not frames:
                raise BadFrame("no head")
            head = Head.decode(frames[0].buffer, self._caps)
            if head.kind == Kind.PIECE:
                self._take_piece(link, head, frames[1:])
            elif head.kind == Kind.REQUEST:
                self._take_request(link, head, frames[1:])
            else:
                raise BadFrame("no request")
        except BadFrame:
            self.num_dropped += 1

    def _take_request(self, link: bytes, head: Head, frames: Sequence[zmq.Frame]) -> None:
        self._service.hear(head)
        if _key(head) in self._links:  # asked again while the answer is waited for
            self._links[_key(head)] = link
            return
        self._assemblies.pop(_key(head), None)  # asked again: from the beginning
        if len(frames) > 1:
            raise BadFrame("a payload of several frames")
        try:
            expected = self._service.payload_bytes(head)
            if expected != head.payload_bytes:
                raise errors.ConfigError(
                    f"The payload must have {expected} bytes, but {head.payload_bytes} are "
                    "announced."
                )
        except Exception as exc:
            self._send(link, head, exc)
            return
        if frames or expected == 0:
            payload = memoryview(bytearray(frames[0].buffer if frames else b""))
            if len(payload) != expected:
                raise BadFrame("a payload of another length")
            self._run(link, Request(head, payload))
            return
        in_flight = sum(len(a.payload) for a in self._assemblies.values() if a.link == link)
        if in_flight + expected > self._caps.in_flight_bytes:
            raise BadFrame("too much announced at once")
        self._assemblies[_key(head)] = _Assembly(link, head, bytearray(expected), expected)

    def _take_piece(self, link: bytes, head: Head, frames: Sequence[zmq.Frame]) -> None:
        assembly = self._assemblies.get(_key(head))
        if assembly is None or assembly.link != link or len(frames) != 1:
            raise BadFrame("a piece of nothing")
        data, start = frames[0].buffer, head.number
        total = len(assembly.payload)
        # Pieces of one link come in order, so what is missing says where the next one begins.
        if start != total - assembly.missing or not 0 < len(data) <= assembly.missing:
            raise BadFrame("a piece of another place")
        assembly.payload[start : start + len(data)] = data
        assembly.missing -= len(data)
        if assembly.missing == 0:
            del self._assemblies[_key(head)]
            self._run(link, Request(assembly.head, memoryview(assembly.payload)))

    # --- out --------------------------------------------------------------------------------------

    def _run(self, link: bytes, request: Request) -> None:
        head = request.head
        if not self._service.waits(head):
            self._send(link, head, self._answer(request))
            return
        self._links[_key(head)] = link

        def wait() -> None:
            answer = self._answer(request)
            self._done.append((head, answer))
            os.eventfd_write(self._wake, 1)

        self._pool.submit(wait)

    def _answer(self, request: Request) -> Answer | BaseException:
        try:
            return self._service.answer(request)
        except Exception as exc:
            return exc

    def _send(self, link: bytes, asked: Head, answer: Answer | BaseException) -> None:
        if isinstance(answer, BaseException):
            answer, kind = Answer(text=error_text(answer)), Kind.ERROR
        else:
            kind = Kind.ANSWER
        args = (*answer.args, 0, 0, 0, 0)
        total = sum(part.nbytes for part in answer.payload)
        head = asked._replace(
            kind=kind,
            number=0,
            args=(args[0], args[1], args[2], args[3]),
            payload_bytes=total,
            text=answer.text,
        )
        parts = [part.cast("B") for part in answer.payload if part.nbytes]
        if total == 0 or (total <= PIECE_BYTES and len(parts) == 1):
            send_message(self._socket, [link, head.encode(), *parts])
            return
        send_message(self._socket, [link, head.encode()])
        offset = 0
        for part in parts:
            for start, length in pieces_of(len(part)):
                piece = asked._replace(kind=Kind.PIECE, number=offset + start, text="")
                data = part[start : start + length]
                send_message(self._socket, [link, piece.encode(), data], copy=False)
            offset += len(part)


def _key(head: Head) -> tuple[bytes, int]:
    return head.client, head.call


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
