"""The end of the network at which a worker is: asks the server of another host, and asks again.

A request is sent again when the link to the server is cut, as it is when the server is killed, and
where nothing of the answer has come for a second, then for two, for four: on a slow link it may
still be on its way. So whatever changes something carries a number by which the other side knows
it (`Head.number`, or an operation that may be done twice). Several requests may be under way:
`begin` sends, `wait` takes answers in until its own is there.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from phalanx import errors
from phalanx.clock import now_s, pause
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
from phalanx.errors import (
    ConfigError,
    InternalError,
    PeerError,
    PeerTimeout,
    PhalanxError,
    StateError,
)

__all__ = ["Connection", "Endpoint", "PendingCall", "Reply"]

_RETRY_S, _LONGEST_RETRY_S = 1.0, 8.0
_CLOSE_MS = 0
_LOOK_S = 1e-3  # between looks for calls that are still under way
_UP, _CUT = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


class Endpoint(NamedTuple):
    """Where a host's server is.

    Attributes:
        host: The host's number.
        name: What messages call it.
        address: Of its socket.
        public: The server's public key; None without encryption.
    """

    host: int
    name: str
    address: str
    public: bytes | None


class Reply(NamedTuple):
    """An answer; `payload` is empty where the caller had said where it goes."""

    args: tuple[int, int, int, int]
    text: str
    payload: memoryview


@dataclass
class PendingCall:
    """A request that is under way; see :meth:`Connection.wait`."""

    messages: list[list[Any]]  # Any: frames of zmq: bytes, or memory that is sent as it lies
    out: Sequence[memoryview] | None
    head: Head
    title: str
    begun_s: float = field(default_factory=now_s)
    heard_s: float = 0.0  # when it was sent, or a part of the answer came
    retry_s: float = 0.0  # how much later it is sent again
    answer: Head | None = None
    taken: int = 0
    brought: memoryview = field(default_factory=lambda: memoryview(b""))
    error: PhalanxError | None = None

    @property
    def done(self) -> bool:
        """Whether the answer is there, whole."""
        if self.error is not None:
            return True
        return self.answer is not None and self.taken == self.answer.payload_bytes


@dataclass
class _Link:
    """A thread's socket, and what is under way over it.

    Attributes:
        socket: Connects again by itself.
        events: Tells when it has done so, and when it was cut off.
        is_up: Whether the server has admitted us since it was.
        calls: By the number that their answers carry.
    """

    socket: zmq.Socket[bytes]
    events: zmq.Socket[bytes]
    poller: zmq.Poller
    is_up: bool = False
    calls: dict[int, PendingCall] = field(default_factory=dict)


class Connection:
    """A worker's way to the server of another host; threads have sockets of their own.

    Args:
        context: The process's sockets.
        endpoint: The server.
        keys: Those that servers admit; None without encryption.
        worker: Who asks.
        caps: How much an answer may announce.

    Attributes:
        worker: Who asks.
        incarnation: Which of the workers that have had our number we are, there; 0 before that is
            known.
        num_retries: Requests that were sent again.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        keys: CurveKeys | None,
        worker: int,
        caps: Caps = Caps(1 << 40, 1 << 40),  # noqa: B008 - a value; a snapshot may be long
    ) -> None:
        self.endpoint = endpoint
        self.incarnation = 0
        self.num_retries = 0
        self._context = context
        self._keys = keys
        self.worker = worker
        self._caps = caps
        self._client = secrets.token_bytes(16)
        self._mutex = threading.Lock()
        self._num_calls = 0
        self._local = threading.local()
        self._links: list[_Link] = []
        self._is_closed = False

    def call(
        self,
        operation: int,
        title: str,
        timeout_s: float,
        *,
        args: Sequence[int] = (),
        number: int = 0,
        text: str = "",
        payload: Sequence[memoryview] = (),
        out: Sequence[memoryview] | None = (),
    ) -> Reply:
        """Ask, and wait for the answer; see :meth:`begin`."""
        pending = self.begin(
            operation, title, args=args, number=number, text=text, payload=payload, out=out
        )
        return self.wait(pending, timeout_s)

    def begin(
        self,
        operation: int,
        title: str,
        *,
        args: Sequence[int] = (),
        number: int = 0,
        text: str = "",
        payload: Sequence[memoryview] = (),
        out: Sequence[memoryview] | None = (),
    ) -> PendingCall:
        """Send a request. The same thread has to :meth:`wait` for it, or to :meth:`abandon` it.

        Args:
            operation: What is asked for.
            title: What errors call it.
            args: Up to four numbers.
            number: As :class:`Head` has it.
            text: A name, or JSON.
            payload: Memory that follows; it must stay as it is until the answer is there.
            out: Where the answer's payload goes; its length must be right. None where it is not
                known: the answer brings it.

        Raises:
            ConfigError: The payload is longer than servers take.
            StateError: The connection is closed.
        """
        total = sum(part.nbytes for part in payload)
        if total > Caps().payload_bytes:
            raise ConfigError(
                f"What is sent to another host at once must be at most {Caps().payload_bytes} "
                f"bytes, but {title} has {total}. Make it in parts."
            )
        with self._mutex:
            self._refuse_closed(title)
            self._num_calls += 1
            call = self._num_calls
        padded = (*args, 0, 0, 0, 0)
        head = Head(
            Kind.REQUEST,
            operation,
            self.worker,
            self.incarnation,
            self._client,
            call,
            number,
            (padded[0], padded[1], padded[2], padded[3]),
            total,
            text,
        )
        parts = [part.cast("B") for part in payload if part.nbytes]
        if total <= PIECE_BYTES:
            whole = [parts[0] if len(parts) == 1 else b"".join(parts)] if parts else []
            messages: list[list[Any]] = [[head.encode(), *whole]]
        else:
            messages = [[head.encode()]]
            offset = 0
            for part in parts:
                for start, length in pieces_of(len(part)):
                    piece = head._replace(kind=Kind.PIECE, number=offset + start, text="")
                    messages.append([piece.encode(), part[start : start + length]])
                offset += len(part)
        pending = PendingCall(
            messages, None if out is None else [part.cast("B") for part in out], head, title
        )
        link = self._link()
        try:
            with self._mutex:
                self._refuse_closed(title)
                link.calls[call] = pending  # from here on the sockets stay until it has ended
            self._notice_cuts(link)
            self._send(link, pending, _RETRY_S)
        except BaseException:  # a Ctrl-C
            self.abandon(pending)
            raise
        return pending

    def wait(self, pending: PendingCall, timeout_s: float) -> Reply:
        """Take answers in until that of ``pending`` is there.

        Raises:
            PeerTimeout: It did not come in time; the error names the host.
            PhalanxError: What the server refused.
        """
        try:
            if not self.poll(pending, timeout_s):
                waited_s = round(now_s() - pending.begun_s, 1)
                raise PeerTimeout(
                    f"{self.endpoint.name} (server at {self.endpoint.address}) did not answer "
                    f"{pending.title} within {waited_s:g} s. See whether that host and the network "
                    "are up; what was asked may still be done there."
                )
        finally:
            self.abandon(pending)
        if pending.error is not None:
            raise pending.error
        assert pending.answer is not None
        return Reply(pending.answer.args, pending.answer.text, pending.brought)

    def abandon(self, pending: PendingCall) -> None:
        """Neither ask again nor take an answer in: the caller's memory is its own from here on."""
        self._link().calls.pop(pending.head.call, None)

    def poll(self, pending: PendingCall, timeout_s: float) -> bool:
        """Take answers in until that of ``pending`` is there; tell whether it is.

        It stays under way: :meth:`wait` returns the answer.
        """
        deadline_s, link = now_s() + timeout_s, self._link()
        while not pending.done:
            now = now_s()
            again_s = pending.heard_s + pending.retry_s
            if now >= again_s:
                self._send_again(link, pending)
                continue
            until_s = min(deadline_s, again_s)
            ready = dict(link.poller.poll(max(0, 1 + int(1e3 * (until_s - now)))))
            if link.events in ready:
                self._notice_cuts(link)
            if link.socket in ready:
                self._take(link)
            elif now >= deadline_s:
                return False
        return True

    def close(self, timeout_s: float = 0.0) -> None:
        """Let go of the sockets, of all threads, when no call is under way any more.

        Args:
            timeout_s: How long to wait for calls of other threads. A socket that is still in use
                then is left to them.
        """
        with self._mutex:
            self._is_closed = True
            links, self._links = self._links, []
        until_s = now_s() + timeout_s
        while any(link.calls for link in links) and now_s() < until_s:
            pause(_LOOK_S)
        for link in links:
            if link.calls:
                continue
            link.socket.disable_monitor()
            link.events.close(_CLOSE_MS)
            link.socket.close(_CLOSE_MS)

    def _refuse_closed(self, title: str) -> None:
        if self._is_closed:
            raise StateError(f"A worker must be of the run, but has closed: {title} was not asked.")

    # --- sockets ----------------------------------------------------------------------------------

    def _link(self) -> _Link:
        """Return this thread's link, made where it has none."""
        link: _Link | None = getattr(self._local, "link", None)
        if link is None:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, _CLOSE_MS)
            socket.setsockopt(zmq.MAXMSGSIZE, PIECE_BYTES + 4096)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.RECONNECT_IVL, 10)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
            if self.endpoint.public is not None and self._keys is not None:
                socket.curve_serverkey = self.endpoint.public
                socket.curve_publickey = self._keys.public
                socket.curve_secretkey = self._keys.private
            events = socket.get_monitor_socket(_UP | _CUT)
            socket.connect(self.endpoint.address)
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(events, zmq.POLLIN)
            link = self._local.link = _Link(socket, events, poller)
            with self._mutex:
                self._links.append(link)
        return link

    def _send(self, link: _Link, pending: PendingCall, retry_s: float) -> None:
        for message in pending.messages:
            send_message(link.socket, message)
        pending.heard_s, pending.retry_s = now_s(), retry_s

    def _send_again(self, link: _Link, pending: PendingCall) -> None:
        self.num_retries += 1
        self._send(link, pending, min(2 * pending.retry_s, _LONGEST_RETRY_S))

    def _notice_cuts(self, link: _Link) -> None:
        """Send again what was under way when the link was cut; it goes out when there is one."""
        while has_message(link.events):
            event = recv_monitor_message(link.events)["event"]
            if event == _CUT and link.is_up:  # else it was cut before anything could be sent
                for pending in link.calls.values():
                    if pending.heard_s and not pending.done:  # 0: it goes out only now
                        self._send_again(link, pending)
            link.is_up = event == _UP

    def _take(self, link: _Link) -> None:
        frames = receive_message(link.socket)
        try:
            head = Head.decode(frames[0].buffer, self._caps)
            pending = link.calls.get(head.call)
            if pending is not None:  # else it was answered twice, or given up
                pending.heard_s = now_s()
                self._take_answer(pending, head, [frame.buffer for frame in frames[1:]])
        except BadFrame as exc:
            raise InternalError(
                f"{self.endpoint.name} sent what no server of this version sends: {exc}."
            ) from exc

    def _take_answer(self, pending: PendingCall, head: Head, rest: list[memoryview]) -> None:
        if head.kind == Kind.PIECE:
            if pending.answer is not None and len(rest) == 1 and head.number == pending.taken:
                self._place(pending, rest[0])
            return
        if head.kind == Kind.ERROR:
            pending.error = _error_of(head.text)
            return
        if head.kind != Kind.ANSWER:
            raise BadFrame("no answer")
        if pending.out is None:
            pending.brought = memoryview(bytearray(head.payload_bytes))
        elif head.payload_bytes != sum(len(part) for part in pending.out):
            raise BadFrame("an answer of another length")
        pending.answer, pending.taken = head, 0
        for data in rest:
            self._place(pending, data)

    def _place(self, pending: PendingCall, data: memoryview) -> None:
        """Copy bytes to where they belong."""
        at = pending.taken
        for part in [pending.brought] if pending.out is None else pending.out:
            if at < len(part):
                taken = min(len(part) - at, len(data))
                part[at : at + taken] = data[:taken]
                pending.taken += taken
                data, at = data[taken:], 0
                if not data:
                    return
            else:
                at -= len(part)
        if len(data):
            raise BadFrame("more than was announced")


def _error_of(text: str) -> PhalanxError:
    """Return the error that a server wrote down; only our own kinds are made."""
    try:
        found = json.loads(text)
        name, message, rank = found["error"], str(found["message"]), found.get("rank")
        if rank is not None and type(rank) is not int:
            raise ValueError("a rank that is no number")
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise BadFrame("an error that is none") from exc
    kind = getattr(errors, name, None) if name in errors.__all__ else None
    if kind is None:
        raise BadFrame("an error of no kind")
    error: PhalanxError = kind(message, rank) if issubclass(kind, PeerError) else kind(message)
    return error
