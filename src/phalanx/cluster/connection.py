"""The end of the network at which a worker is: asks the server of another host, and asks again.

A call has a connection for itself, taken from those that are idle; so threads of a worker do not
wait for each other, and a call that is given up leaves nothing behind: its connection is closed.
Where a connection breaks, as when the server is killed, the request is sent again over another one
until the call's deadline. So whatever changes something carries a number by which the other side
knows it (`Message.number`), or is an operation that may be done twice.
"""

from __future__ import annotations

import json
import math
import socket
import ssl
from collections.abc import Sequence
from typing import Any, NamedTuple

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
from phalanx.errors import (
    ConfigError,
    InternalError,
    PeerError,
    PeerTimeout,
    PhalanxError,
    StateError,
)

_CONNECT_S = 1.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1
_LARGEST_ANSWER = 1 << 40  # a snapshot may be long
_LATER_S = 0.5  # a server's own error, at the deadline, says more than ours


class Endpoint(NamedTuple):
    """The address of a host's server.

    Attributes:
        host: The host's number.
        name: What messages call it.
        address: Of its socket, as ``address:port``.
        run: The run's name there.
        tls: What connections are encrypted with; None on the loopback interface alone.
    """

    host: int
    name: str
    address: str
    run: str
    tls: ssl.SSLContext | None

    def connect(self, timeout_s: float) -> Stream:
        """Return a new connection.

        Raises:
            OSError: No server answers within ``timeout_s``.
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
        return Stream(end, tag_of(self.run))


class RemoteCall:
    """A request that is under way; made by :meth:`Connection.begin`.

    Attributes:
        title: What errors call it.
        host: What they call the host that is asked.
        answered: Whether an answer has come.
    """

    def __init__(
        self,
        connection: Connection,
        message: Message,
        title: str,
        timeout_s: float,
        out: Sequence[Tensor] | None,
    ) -> None:
        self.title = title
        self.host = connection.endpoint.name
        self.answered = False
        self._connection = connection
        self._message = message
        self._timeout_s = timeout_s
        self._until_s = now_s() + timeout_s
        self._out = out
        self._stream: Stream | None = None

    def send(self, connect_s: float = math.inf) -> None:
        """Send the request, over an idle connection or a new one."""
        remaining_s = max(0.001, self._remaining_s())
        self._stream = self._connection.take_idle()
        if self._stream is None:
            self._stream = self._connection.endpoint.connect(min(connect_s, remaining_s))
        self._stream.set_timeout(remaining_s)
        self._stream.send(self._message)

    def wait(self, *, again: bool = True) -> Message:
        """Return the answer.

        Args:
            again: Whether to send the request again where its connection breaks.

        Raises:
            PeerTimeout: It did not come in time; the error names the host.
            PhalanxError: What the server refused.
        """
        rest_s, last = _SHORTEST_PAUSE_S, ""
        try:
            while True:
                try:
                    if self._stream is None and again:
                        self.send()
                    return self._answer()
                except PhalanxError:  # some of which are an OSError, too
                    raise
                except (OSError, EOFError) as exc:
                    self.abandon()
                    last = str(exc) or last
                    if not again or self._remaining_s() <= 0:
                        break
                    pause(min(rest_s, self._remaining_s()))
                    rest_s = min(2 * rest_s, _LONGEST_PAUSE_S)
        finally:
            self.abandon()
        raise PeerTimeout(
            f"{self.host} (server at {self._connection.endpoint.address}) did not answer "
            f"{self.title} within {round(self._timeout_s, 1):g} s ({last}). See whether that host "
            "and the network are up; what was asked may still be done there."
        )

    def _remaining_s(self) -> float:
        return max(0.0, self._until_s - now_s())

    def _answer(self) -> Message:
        if self._stream is None:
            raise ConnectionError("the request was not sent")
        self._stream.set_timeout(self._remaining_s() + _LATER_S)
        try:
            answer = self._stream.receive(_LARGEST_ANSWER, self._out)
            self.answered = True
            if answer.kind == Kind.ERROR:
                raise _error_of(answer.text)
            if answer.kind != Kind.ANSWER:
                raise BadFrame("no answer")
        except BadFrame as exc:
            self.answered = False  # the connection is of no more use
            raise InternalError(
                f"{self.host} sent what no server of this version sends: {exc}."
            ) from exc
        return answer

    def abandon(self) -> None:
        """Take no answer in any more: the caller's memory is its own from here on."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self._connection.give_back(stream, is_idle=self.answered)


class Connection:
    """A worker's way to the server of another host, for all threads of its process.

    Args:
        endpoint: The server.

    Attributes:
        worker: Who asks.
        incarnation: Which of the workers that have had our number we are, there; 0 before that is
            known.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.worker = 0
        self.incarnation = 0
        self.is_closed = False
        self._idle: list[Stream] = []

    def call(self, operation: int, title: str, timeout_s: float, **asked: Any) -> Message:
        """Ask, and wait for the answer; see :meth:`begin`."""
        return self.begin(operation, title, timeout_s, **asked).wait()

    def begin(
        self,
        operation: int,
        title: str,
        timeout_s: float,
        *,
        tensors: Sequence[Tensor] = (),
        out: Sequence[Tensor] | None = None,
        **asked: Any,
    ) -> RemoteCall:
        """Send a request; the caller has to wait for it, or to abandon it.

        Args:
            operation: What is asked for.
            title: What errors call it.
            timeout_s: When the answer must be there.
            tensors: They must stay as they are until the answer is there.
            out: Where the answer's tensors go; None where the answer brings them.
            asked: ``args``, ``number`` and ``text``, as :class:`Message` has them.

        Raises:
            ConfigError: The tensors are longer than servers take, or the secret is another.
            StateError: The connection is closed.
        """
        self.refuse_long(title, tensors)
        if self.is_closed:
            raise StateError(f"A worker must be of the run, but has closed: {title} was not asked.")
        message = Message(
            Kind.REQUEST,
            operation,
            self.worker,
            self.incarnation,
            timeout_ms=round(1e3 * timeout_s),
            tensors=tensors,
            **asked,
        )
        call = RemoteCall(self, message, title, timeout_s, out)
        try:
            call.send(_CONNECT_S)
        except (OSError, EOFError):  # `wait` tries again
            call.abandon()
        except BaseException:
            call.abandon()
            raise
        return call

    @staticmethod
    def refuse_long(title: str, tensors: Sequence[Tensor]) -> None:
        """Raise if tensors are longer than servers take.

        Raises:
            ConfigError: They are.
        """
        nbytes = sum(each.nbytes for each in tensors)
        if nbytes > MAX_BYTES:
            raise ConfigError(
                f"What is sent to another host at once must be at most {MAX_BYTES} bytes, "
                f"but {title} has {nbytes}. Make it in parts."
            )

    def take_idle(self) -> Stream | None:
        """Return a connection that no call uses, for the caller to keep."""
        return self._idle.pop() if self._idle else None

    def give_back(self, stream: Stream, *, is_idle: bool) -> None:
        """Keep a connection for the next call, unless an answer may still come over it."""
        if is_idle and not self.is_closed:
            self._idle.append(stream)
        else:
            stream.close()

    def close(self) -> None:
        """Let go of idle connections; those of calls that are under way end with the calls."""
        self.is_closed = True
        while self._idle:
            self._idle.pop().close()


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
