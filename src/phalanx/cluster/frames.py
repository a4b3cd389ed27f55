"""Frames of a connection between a worker and the server of another host.

    message   head │ text │ payload

A head has 80 bytes of fixed meaning. Its sizes are checked before anything is allocated. No message
holds code, and nothing in it is unpickled: numbers, names, and the bytes of tensors whose shape
both sides know.
"""

from __future__ import annotations

import hashlib
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

__all__ = [
    "MAX_PAYLOAD_BYTES",
    "MAX_TEXT_BYTES",
    "BadFrame",
    "Head",
    "Kind",
    "Stream",
    "prepare",
    "tag_of",
]

MAX_TEXT_BYTES = 16 << 10
MAX_PAYLOAD_BYTES = 1 << 30
_HEAD = struct.Struct("<8sHHIIIqq4qQ")
_MAGIC = b"PHX4"
_BUFFER_BYTES = 64 << 10
_NUM_SILENT_PROBES, _PROBE_EVERY_S = 4, 2
_LOST_MS = 10_000


class Kind(IntEnum):
    """What a message is."""

    REQUEST = 0
    ANSWER = 1
    ERROR = 2


class BadFrame(Exception):
    """Bytes that no peer of this version and run sends; the connection is closed."""


class Head(NamedTuple):
    """The fixed part of a message, and its text.

    Attributes:
        kind: What it is.
        operation: What is asked for.
        worker: The worker that asks.
        incarnation: Which of the workers that had its number.
        number: Of an add: its number among this worker's, from 1; else 0.
        timeout_ms: How long the server may wait for other workers.
        args: Numbers that the operation reads.
        payload_bytes: Of the payload, which the operation's own sizes must make.
        text: A name, or JSON.
    """

    kind: int
    operation: int
    worker: int
    incarnation: int
    number: int
    timeout_ms: int
    args: tuple[int, int, int, int]
    payload_bytes: int
    text: str = ""

    def encode(self, tag: bytes) -> bytes:
        """Return the head, and the text, whose length it holds."""
        text = self.text.encode()
        fixed = _HEAD.pack(
            tag,
            self.kind,
            self.operation,
            len(text),
            self.worker,
            self.incarnation,
            self.number,
            self.timeout_ms,
            *self.args,
            self.payload_bytes,
        )
        return fixed + text

    @classmethod
    def decode(cls, fixed: bytes, tag: bytes, most_bytes: int) -> tuple[Head, int]:
        """Read a head without its text; return it, and how long the text is.

        Raises:
            BadFrame: It is none, or announces more than is allowed.

        Example:
            >>> tag = tag_of("run", 1)
            >>> head = Head(Kind.REQUEST, 3, 7, 1, 0, 500, (1, 2, 3, -4), 0)
            >>> Head.decode(head.encode(tag), tag, 0) == (head, 0)
            True
        """
        if len(fixed) != _HEAD.size:
            raise BadFrame("a head of another length")
        found, kind, operation, text_bytes, worker, incarnation, number, timeout_ms, *rest = (
            _HEAD.unpack(fixed)
        )
        if found != tag:
            raise BadFrame("no head of this run")
        *args, payload_bytes = rest
        if text_bytes > MAX_TEXT_BYTES or payload_bytes > most_bytes:
            raise BadFrame("more bytes announced than are allowed")
        four = (args[0], args[1], args[2], args[3])
        head = cls(kind, operation, worker, incarnation, number, timeout_ms, four, payload_bytes)
        return head, text_bytes


def tag_of(run: str, host: int) -> bytes:
    """Return what each head to or from a host's server of a run begins with."""
    return _MAGIC + hashlib.sha256(f"{host} {run}".encode()).digest()[:4]


class Stream:
    """One end of a connection, which messages are read from and written to.

    Args:
        end: The socket, connected.
        tag: What heads begin with.
    """

    def __init__(self, end: socket.socket, tag: bytes) -> None:
        self._socket = end
        self._tag = tag
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0  # what was received and not read

    def set_timeout(self, seconds: float | None) -> None:
        """Have each send and receive that takes longer raise TimeoutError."""
        self._socket.settimeout(seconds)

    def send(self, head: Head, payload: Sequence[memoryview]) -> None:
        """Send a message whole."""
        first = head.encode(self._tag)
        if head.payload_bytes <= _BUFFER_BYTES:
            self._socket.sendall(b"".join((first, *payload)))
            return
        self._socket.sendall(first)
        for part in payload:
            self._socket.sendall(part)

    def read_head(self, most_bytes: int) -> Head:
        """Wait for a message, and return its head.

        Raises:
            BadFrame: It is no message of ours.
            EOFError: The other side has closed the connection.
        """
        head, text_bytes = Head.decode(self._read(_HEAD.size), self._tag, most_bytes)
        if not text_bytes:
            return head
        try:
            return head._replace(text=str(self._read(text_bytes), "utf-8"))
        except UnicodeDecodeError as exc:
            raise BadFrame("a text that is none") from exc

    def _read(self, count: int) -> bytes:
        while self.num_received < count:
            if self._start:
                left = self._buffer[self._start : self._end].tobytes()
                self._buffer[: len(left)] = left
                self._start, self._end = 0, len(left)
            self._end += self._receive(self._buffer[self._end :])
        start, self._start = self._start, self._start + count
        return self._buffer[start : self._start].tobytes()

    def read_into(self, target: memoryview) -> None:
        """Receive bytes until ``target`` is full."""
        there = min(self.num_received, len(target))
        target[:there] = self._buffer[self._start : self._start + there]
        self._start += there
        while there < len(target):
            there += self._receive(target[there:])

    @property
    def num_received(self) -> int:
        """Number of bytes that were received and not read."""
        return self._end - self._start

    def _receive(self, target: memoryview) -> int:
        count = self._socket.recv_into(target)
        if not count:
            raise EOFError("the connection was closed")
        return count

    def wait_for_end(self) -> None:
        """Return when the other side has closed the connection, or is gone, or says anything."""
        with suppress(OSError):
            self._socket.settimeout(None)
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
