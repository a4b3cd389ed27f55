"""Messages of a connection between a worker and the server of another host.

    message   head │ text │ dtype and shape of each tensor │ tensors

Everything that a message announces is checked before anything is allocated. No message holds code,
and nothing in it is unpickled: numbers, names, and tensors.
"""

from __future__ import annotations

import hashlib
import math
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.clock import now_s

MAX_TEXT_BYTES = 16 << 10
MAX_BYTES = 1 << 30  # of all tensors of a message
_MAX_TENSORS = 16
_HEAD = struct.Struct("<8sHHHHIIqq4q")
_SHAPE = struct.Struct("<HHqq")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)
_EMPTY = [torch.empty(0, dtype=dtype, device="cpu") for dtype in _DTYPES]
_MAGIC = b"PHX5"
_BUFFER_BYTES = 64 << 10
_NUM_SILENT_PROBES, _PROBE_EVERY_S = 4, 2
_LOST_MS = 10_000
_NEARLY = 31 / 32  # of a wait: it may end so much later


class Kind(IntEnum):
    """The kinds of a message."""

    REQUEST = 0
    ANSWER = 1
    ERROR = 2


class BadFrame(Exception):
    """Bytes that no peer of this version and run sends; the connection is closed."""


class Message(NamedTuple):
    """A message of one end to the other.

    Attributes:
        kind: The kind of message.
        operation: The operation that is asked for.
        worker: The worker that asks.
        incarnation: Which of the workers that had its number.
        number: Of an add: its number among this worker's, from 1; else 0.
        timeout_ms: How long the server may wait for other workers.
        args: Up to four numbers that the operation reads; four where they have arrived.
        text: A name, or JSON.
        tensors: What the operation takes or returns: contiguous, on the CPU, of at most two
            dimensions.
    """

    kind: int
    operation: int
    worker: int = 0
    incarnation: int = 0
    number: int = 0
    timeout_ms: int = 0
    args: tuple[int, ...] = ()
    text: str = ""
    tensors: Sequence[Tensor] = ()

    @property
    def timeout_s(self) -> float:
        """Seconds that the server may wait."""
        return self.timeout_ms * 1e-3

    def encode(self, tag: bytes) -> bytes:
        """Return all of it but the tensors' own bytes."""
        text = self.text.encode()
        head = _HEAD.pack(
            tag,
            self.kind,
            self.operation,
            len(text),
            len(self.tensors),
            self.worker,
            self.timeout_ms,
            self.incarnation,
            self.number,
            *(*self.args, 0, 0, 0, 0)[:4],
        )
        return b"".join((head, text, *map(described, self.tensors)))

    @classmethod
    def decode(cls, head: bytes, tag: bytes) -> tuple[Message, int, int]:
        """Read a head; return it, the length of the text, and the number of tensors.

        Raises:
            BadFrame: It is none, or announces more than is allowed.

        Example:
            >>> tag = tag_of("run")
            >>> asked = Message(Kind.REQUEST, 3, worker=7, args=(1, 2, 3, -4))
            >>> Message.decode(asked.encode(tag), tag) == (asked, 0, 0)
            True
        """
        if len(head) != _HEAD.size:
            raise BadFrame("a head of another length")
        found, kind, operation, text_bytes, num_tensors, worker, timeout_ms, *rest = _HEAD.unpack(
            head
        )
        if found != tag:
            raise BadFrame("no head of this run")
        if text_bytes > MAX_TEXT_BYTES or num_tensors > _MAX_TENSORS:
            raise BadFrame("more announced than is allowed")
        incarnation, number, *args = rest
        message = cls(kind, operation, worker, incarnation, number, timeout_ms, tuple(args))
        return message, text_bytes, num_tensors


def described(tensor: Tensor) -> bytes:
    """Return what a message says of a tensor."""
    sizes = (*tensor.shape, 1, 1)
    return _SHAPE.pack(_DTYPES.index(tensor.dtype), tensor.dim(), sizes[0], sizes[1])


def empty_tensors(descriptions: bytes, most_bytes: int) -> list[Tensor]:
    """Return tensors as they were described, for their bytes.

    Raises:
        BadFrame: There is no such tensor, or together they are too large.
    """
    kinds, nbytes, longest = [], 0, 0
    for code, num_dims, *sizes in _SHAPE.iter_unpack(descriptions):
        if code >= len(_DTYPES) or num_dims > 2 or min(sizes) < 0:
            raise BadFrame("a tensor that is none")
        kind = _EMPTY[code]
        nbytes += kind.itemsize * sizes[0] * sizes[1]
        longest = max(longest, *sizes)
        kinds.append((kind, sizes[:num_dims]))
    if max(nbytes, longest) > most_bytes:
        raise BadFrame("more bytes announced than are allowed")
    return [kind.new_empty(shape) for kind, shape in kinds]  # faster than `torch.empty`


def _bytes_of(tensors: Sequence[Tensor]) -> list[memoryview]:
    # numpy has no bfloat16.
    known = (each.view(torch.int16) if each.dtype is torch.bfloat16 else each for each in tensors)
    return [each.numpy().data.cast("B") for each in known if each.numel()]


def tag_of(run: str) -> bytes:
    """Return what each head to or from the server of a run on a host begins with."""
    return _MAGIC + hashlib.sha256(run.encode()).digest()[:4]


class Stream:
    """One end of a connection, which messages are read from and written to.

    Args:
        end: The socket, connected.
        tag: What heads begin with.

    Attributes:
        session: What a service keeps of the connection.
    """

    def __init__(self, end: socket.socket, tag: bytes) -> None:
        self.session: Any = None  # Any: the service's
        self._socket = end
        self._tag = tag
        self._until_s = math.inf
        self._timeout_s: float | None = None  # the socket's
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0  # what was received and not read

    def set_timeout(self, seconds: float | None) -> None:
        """Have a send, or all that is received after this, raise TimeoutError after so long."""
        self._until_s = math.inf if seconds is None else now_s() + seconds
        self._limit(seconds)

    def _limit(self, seconds: float | None) -> None:
        """Set the socket's timeout, unless it is nearly that: the system is asked each time."""
        now = self._timeout_s
        if seconds is None or now is None or not _NEARLY * now <= seconds <= now:
            self._timeout_s = seconds
            self._socket.settimeout(seconds)

    def send(self, message: Message) -> None:
        """Send a message whole."""
        pieces: list[bytes | memoryview] = [message.encode(self._tag)]
        pieces += _bytes_of(message.tensors)
        if sum(map(len, pieces)) <= _BUFFER_BYTES:
            pieces = [b"".join(pieces)]
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                self._mind_deadline()
                rest = rest[self._socket.send(rest) :]

    def receive(self, most_bytes: int, out: Sequence[Tensor] | None = None) -> Message:
        """Wait for a message.

        Args:
            most_bytes: That its tensors may have together.
            out: Where the tensors of an answer go; None where they are made. Those of an error
                are made.

        Raises:
            BadFrame: It is no message of ours, or its tensors are not like those of ``out``.
            EOFError: The other side has closed the connection.
        """
        message, text_bytes, num_tensors = Message.decode(self._read(_HEAD.size), self._tag)
        rest = self._read(text_bytes + _SHAPE.size * num_tensors)
        text, descriptions = rest[:text_bytes], rest[text_bytes:]
        if out is None or message.kind != Kind.ANSWER:
            tensors: Sequence[Tensor] = empty_tensors(descriptions, most_bytes)
        elif descriptions != b"".join(map(described, out)):
            raise BadFrame("an answer of another shape")
        else:
            tensors = out
        for target in _bytes_of(tensors):
            self._read_into(target)
        try:
            return Message(*message[:-2], text.decode(), tensors)
        except UnicodeDecodeError as exc:
            raise BadFrame("a text that is none") from exc

    def _read(self, count: int) -> bytes:
        while self._end - self._start < count:
            if self._start:
                left = self._buffer[self._start : self._end].tobytes()
                self._buffer[: len(left)] = left
                self._start, self._end = 0, len(left)
            self._end += self._receive(self._buffer[self._end :])
        start, self._start = self._start, self._start + count
        return self._buffer[start : self._start].tobytes()

    def _read_into(self, target: memoryview) -> None:
        there = min(self._end - self._start, len(target))
        target[:there] = self._buffer[self._start : self._start + there]
        self._start += there
        while there < len(target):
            there += self._receive(target[there:])

    def _mind_deadline(self) -> None:
        """Limit the next piece: many small ones may each be in time."""
        if self._until_s < math.inf:
            remaining_s = self._until_s - now_s()
            if remaining_s <= 0:
                raise TimeoutError("timed out")
            self._limit(remaining_s)

    def _receive(self, target: memoryview) -> int:
        self._mind_deadline()
        count = self._socket.recv_into(target)
        if not count:
            raise EOFError("the connection was closed")
        return count

    def wait_for_end(self) -> None:
        """Return when the other side has closed the connection, or is gone, or says anything."""
        with suppress(OSError):
            self._limit(None)
            self._socket.recv(1)

    def shut(self) -> None:
        """Let both ends see the end; a thread that reads here ends."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()


def prepare(end: socket.socket) -> None:
    """Send small messages at once, and have the kernel notice within 10 s that a host is gone."""
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_EVERY_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_SILENT_PROBES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_MS),
    ):
        end.setsockopt(level, option, value)
