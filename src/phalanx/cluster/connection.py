"""The end of the network at which a worker is: asks the server of another host, and asks again.

A call has a connection for itself, taken from those that are idle; so threads of a worker do not
wait for each other, and a call that is given up leaves nothing behind: its connection is closed.
Where a connection breaks, as when the server is killed, the request is sent again over another one
until the call's deadline. So whatever changes something carries a number by which the other side
knows it (`Head.number`), or is an operation that may be done twice.
"""

from __future__ import annotations

import json
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx import errors
from phalanx.clock import now_s, pause
from phalanx.cluster.frames import (
    MAX_PAYLOAD_BYTES,
    BadFrame,
    Head,
    Kind,
    Stream,
    prepare,
    tag_of,
)
from phalanx.errors import (
    ConfigError,
    InternalError,
    PeerError,
    PeerTimeout,
    PhalanxError,
    StateError,
)

__all__ = ["Connection", "Endpoint", "PendingCall", "Reply", "WorkerSession"]

_CONNECT_S, _REOPEN_S = 1.0, 1.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1
_LARGEST_ANSWER = 1 << 40  # a snapshot may be long
_LATER_S = 0.5  # a server's own error, at the deadline, says more than ours


class Endpoint(NamedTuple):
    """Where a host's server is.

    Attributes:
        host: The host's number.
        name: What messages call it.
        address: Of its socket, as ``address:port``.
        run: The run, by the same name on all hosts.
        tls: What connections are encrypted with; None in a network that is trusted.
    """

    host: int
    name: str
    address: str
    run: str
    tls: ssl.SSLContext | None

    def connect(self, timeout_s: float) -> Stream:
        """Return a new connection.

        Raises:
            OSError: There is none within ``timeout_s``.
            ConfigError: The server has another secret.
        """
        host, _, port = self.address.rpartition(":")
        end = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        try:
            prepare(end)
            if self.tls is not None:
                end = self.tls.wrap_socket(end)
        except ssl.SSLCertVerificationError as exc:
            end.close()
            raise ConfigError(
                f"{self.name} (server at {self.address}) must have the secret of this run, but has "
                "another. Bring the same secret file to all hosts."
            ) from exc
        except BaseException:
            end.close()
            raise
        return Stream(end, tag_of(self.run, self.host))


class Reply(NamedTuple):
    """An answer; `payload` is empty where the caller had said where it goes."""

    args: tuple[int, int, int, int]
    text: str
    payload: memoryview


@dataclass
class PendingCall:
    """A request that is under way; see :meth:`Connection.wait`."""

    head: Head
    payload: Sequence[memoryview]
    out: Sequence[memoryview] | None
    title: str
    timeout_s: float
    stream: Stream | None = None
    answered: bool = False
    begun_s: float = field(default_factory=now_s)

    def remaining_s(self) -> float:
        """Return the seconds until the deadline."""
        return self.begun_s + self.timeout_s - now_s()


class Connection:
    """A worker's way to the server of another host, for all threads of its process.

    Args:
        endpoint: The server.
        worker: Who asks.

    Attributes:
        worker: Who asks.
        incarnation: Which of the workers that have had our number we are, there; 0 before that is
            known.
    """

    def __init__(self, endpoint: Endpoint, worker: int) -> None:
        self.endpoint = endpoint
        self.worker = worker
        self.incarnation = 0
        self.is_closed = False
        self._idle: list[Stream] = []

    def call(self, operation: int, title: str, timeout_s: float, **asked: Any) -> Reply:
        """Ask, and wait for the answer; see :meth:`begin`."""
        return self.wait(self.begin(operation, title, timeout_s, **asked))

    def begin(
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
    ) -> PendingCall:
        """Send a request; the caller has to :meth:`wait` for it, or to :meth:`abandon` it.

        Args:
            operation: What is asked for.
            title: What errors call it.
            timeout_s: When the answer must be there.
            args: Up to four numbers.
            number: As :class:`Head` has it.
            text: A name, or JSON.
            payload: Memory that follows; it must stay as it is until the answer is there.
            out: Where the answer's payload goes; its length must be right. None where it is not
                known: the answer brings it.

        Raises:
            ConfigError: The payload is longer than servers take, or the secret is another.
            StateError: The connection is closed.
        """
        parts = [part.cast("B") for part in payload if part.nbytes]
        total = sum(map(len, parts))
        if total > MAX_PAYLOAD_BYTES:
            raise ConfigError(
                f"What is sent to another host at once must be at most {MAX_PAYLOAD_BYTES} "
                f"bytes, but {title} has {total}. Make it in parts."
            )
        if self.is_closed:
            raise StateError(f"A worker must be of the run, but has closed: {title} was not asked.")
        padded = (*args, 0, 0, 0, 0)
        head = Head(
            Kind.REQUEST,
            operation,
            self.worker,
            self.incarnation,
            number,
            round(1e3 * timeout_s),
            (padded[0], padded[1], padded[2], padded[3]),
            total,
            text,
        )
        targets = None if out is None else [part.cast("B") for part in out if part.nbytes]
        pending = PendingCall(head, parts, targets, title, timeout_s)
        try:
            self._send(pending, _CONNECT_S)
        except (OSError, EOFError):  # `wait` tries again
            self.abandon(pending)
        except BaseException:
            self.abandon(pending)
            raise
        return pending

    def wait(self, pending: PendingCall) -> Reply:
        """Return the answer of a call, which is sent again where its connection breaks.

        Raises:
            PeerTimeout: It did not come in time; the error names the host.
            PhalanxError: What the server refused.
        """
        rest_s, last = _SHORTEST_PAUSE_S, ""
        try:
            while True:
                try:
                    if pending.stream is None:
                        self._send(pending, max(0.001, pending.remaining_s()))
                    return self._answer(pending)
                except PhalanxError:  # some of which are an OSError, too
                    raise
                except (OSError, EOFError) as exc:
                    self.abandon(pending)
                    last = str(exc) or last
                    if pending.remaining_s() <= 0:
                        break
                    pause(min(rest_s, max(0.0, pending.remaining_s())))
                    rest_s = min(2 * rest_s, _LONGEST_PAUSE_S)
        finally:
            self.abandon(pending)
        endpoint, waited_s = self.endpoint, round(pending.timeout_s, 1)
        raise PeerTimeout(
            f"{endpoint.name} (server at {endpoint.address}) did not answer {pending.title} within "
            f"{waited_s:g} s ({last}). See whether that host and the network are up; what was "
            "asked may still be done there."
        )

    def abandon(self, pending: PendingCall) -> None:
        """Take no answer in any more: the caller's memory is its own from here on."""
        stream, pending.stream = pending.stream, None
        if stream is None:
            return
        if pending.answered and not self.is_closed:
            self._idle.append(stream)
        else:
            stream.close()

    def _send(self, pending: PendingCall, connect_s: float) -> None:
        remaining_s = max(0.001, pending.remaining_s())
        if self._idle:
            pending.stream = self._idle.pop()
        else:
            pending.stream = self.endpoint.connect(min(connect_s, remaining_s))
        pending.stream.set_timeout(remaining_s)
        pending.stream.send(pending.head, pending.payload)

    def _answer(self, pending: PendingCall) -> Reply:
        stream = pending.stream
        assert stream is not None
        stream.set_timeout(max(0.0, pending.remaining_s()) + _LATER_S)
        try:
            head = stream.read_head(_LARGEST_ANSWER)
            if head.kind == Kind.ERROR:
                pending.answered = True
                raise _error_of(head.text)
            brought = memoryview(b"")
            if pending.out is None:
                brought = memoryview(bytearray(head.payload_bytes))
            targets = [brought] if pending.out is None else pending.out
            if head.kind != Kind.ANSWER or head.payload_bytes != sum(map(len, targets)):
                raise BadFrame("an answer of another length")
            for target in targets:
                stream.read_into(target)
        except BadFrame as exc:
            raise InternalError(
                f"{self.endpoint.name} sent what no server of this version sends: {exc}."
            ) from exc
        pending.answered = True
        return Reply(head.args, head.text, brought)

    def take_idle(self) -> Stream | None:
        """Return a connection that no call uses, for the caller to keep."""
        return self._idle.pop() if self._idle else None

    def close(self) -> None:
        """Let go of idle connections; those of calls that are under way end with the calls."""
        self.is_closed = True
        while self._idle:
            self._idle.pop().close()


class WorkerSession:
    """A connection that a server knows a worker by: when its process dies, the kernel closes it.

    It is opened again where it breaks, as when the server is killed. It carries no calls.

    Args:
        endpoint: The server.
        operation: What opens it, by the numbers that :meth:`open` is given and two of its own, by
            which the server knows it again.
    """

    def __init__(self, endpoint: Endpoint, operation: int) -> None:
        self._connection = Connection(endpoint, 0)
        self._operation = operation
        self._client = struct.unpack("<qq", secrets.token_bytes(16))
        self._asked: tuple[int, int] = (0, 0)
        self._thread: threading.Thread | None = None
        self._stream: Stream | None = None

    def open(self, timeout_s: float, asked: tuple[int, int]) -> tuple[int, int, int, int]:
        """Open it; return the worker's number, its incarnation and what else the server answers."""
        self._asked = asked
        answer = self._open(timeout_s)
        self._connection.worker, self._connection.incarnation, *_ = answer
        self._asked = answer[0], asked[1]
        self._thread = threading.Thread(target=self._keep, name="phalanx session", daemon=True)
        self._thread.start()
        return answer

    def _open(self, timeout_s: float) -> tuple[int, int, int, int]:
        first, last = self._asked
        args = (first, *self._client, last)
        pending = self._connection.begin(self._operation, "`join`", timeout_s, args=args)
        try:
            answer = self._connection.wait(pending).args
        finally:
            self._connection.abandon(pending)
        self._stream = self._connection.take_idle()
        return answer

    def _keep(self) -> None:
        while not self._connection.is_closed:
            try:
                if self._stream is None:
                    self._open(_REOPEN_S)
                else:
                    self._stream.wait_for_end()
                    self._stream.close()
                    self._stream = None
            except PeerTimeout:
                continue
            except PhalanxError:  # the worker was taken for lost: its next call says so
                return

    def close(self) -> None:
        """Let the server see the end."""
        self._connection.close()
        stream = self._stream
        if stream is not None:
            stream.shut()
        if self._thread is not None:
            self._thread.join(2 * _REOPEN_S)

    def forget(self) -> None:
        """Let go in a forked child, whose life is not the worker's."""
        if self._stream is not None:
            self._stream.close()


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
