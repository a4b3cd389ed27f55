"""What goes over the network between a worker and the server of another host.

    message   head text │ payload                  where the payload fits into one piece
              head text     then   piece │ bytes   for each piece of a longer one

A head has 96 bytes of fixed meaning, and a text behind them. Its sizes and counts are checked
against `Caps` before anything is allocated. No message holds code, and nothing in it is unpickled:
numbers, names, and the bytes of tensors whose shape both sides know.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import zmq

__all__ = [
    "MAX_TEXT_BYTES",
    "PIECE_BYTES",
    "BadFrame",
    "Caps",
    "Head",
    "Kind",
    "has_message",
    "pieces_of",
    "receive_message",
    "send_message",
]

MAX_TEXT_BYTES = 16 << 10
PIECE_BYTES = 1 << 20
NUM_ARGS = 4

_MAGIC = b"PHLX"
_VERSION = 3
_HEAD = struct.Struct("<4sHHIIQ16sQQ4qQ")
_MORE, _POLLIN = int(zmq.SNDMORE), int(zmq.POLLIN)  # as numbers: `&` of an enum is slow


class Kind(IntEnum):
    """What a message is."""

    REQUEST = 0
    PIECE = 1  # of a request's or an answer's payload
    ANSWER = 2
    ERROR = 3


class BadFrame(Exception):
    """A frame that no peer of this version sends; it is dropped."""


class Caps(NamedTuple):
    """How much a peer may announce.

    Attributes:
        payload_bytes: Of one message.
        in_flight_bytes: Of all messages of one peer that have not come whole.
    """

    payload_bytes: int = 1 << 30
    in_flight_bytes: int = 1 << 31


class Head(NamedTuple):
    """The fixed part of a message.

    Attributes:
        kind: What it is.
        operation: What is asked for; of an error, which.
        worker: The worker that asks.
        incarnation: Which of the workers that had its number.
        client: 16 random bytes of the asking process.
        call: The number by which the answer is found.
        number: Of a change: its number among this worker's, from 1; else 0. Of a piece: where in
            the payload it begins.
        args: Numbers that the operation reads.
        payload_bytes: Of the payload, which the operation's own sizes must make.
        text: A name, or JSON.
    """

    kind: int
    operation: int
    worker: int
    incarnation: int
    client: bytes
    call: int
    number: int
    args: tuple[int, int, int, int]
    payload_bytes: int
    text: str = ""

    def encode(self) -> bytes:
        """Return the frame: 96 bytes, and the text, whose length they hold."""
        text = self.text.encode()
        fixed = _HEAD.pack(
            _MAGIC,
            _VERSION,
            self.kind,
            self.operation,
            len(text),
            self.worker | self.incarnation << 32,
            self.client,
            self.call,
            self.number,
            *self.args,
            self.payload_bytes,
        )
        return fixed + text

    @classmethod
    def decode(cls, frame: bytes | memoryview, caps: Caps) -> Head:
        """Read a head.

        Raises:
            BadFrame: It is none, or announces more than ``caps`` allow.

        Example:
            >>> head = Head(Kind.REQUEST, 3, 7, 1, bytes(16), 5, 0, (1, 2, 3, -4), 0, "name")
            >>> Head.decode(head.encode(), Caps()) == head
            True
        """
        if len(frame) < _HEAD.size:
            raise BadFrame("too short for a head")
        magic, version, kind, operation, text_bytes, who, client, call, number, *rest = (
            _HEAD.unpack_from(frame)
        )
        *args, payload_bytes = rest
        if magic != _MAGIC:
            raise BadFrame("no head")
        if version != _VERSION:
            raise BadFrame(f"version {version}, and not {_VERSION}")
        if text_bytes > MAX_TEXT_BYTES or payload_bytes > caps.payload_bytes:
            raise BadFrame("more bytes announced than are allowed")
        if len(frame) != _HEAD.size + text_bytes:
            raise BadFrame("a text of another length")
        try:
            text = str(frame[_HEAD.size :], "utf-8")
        except UnicodeDecodeError as exc:
            raise BadFrame("a text that is none") from exc
        return cls(
            kind,
            operation,
            who & 0xFFFFFFFF,
            who >> 32,
            client,
            call,
            number,
            (args[0], args[1], args[2], args[3]),
            payload_bytes,
            text,
        )


def pieces_of(num_bytes: int) -> list[tuple[int, int]]:
    """Cut a payload into pieces: where each begins, and its length.

    Example:
        >>> pieces_of(0), pieces_of(5), pieces_of((1 << 20) + 3)
        ([], [(0, 5)], [(0, 1048576), (1048576, 3)])
    """
    return [
        (start, min(PIECE_BYTES, num_bytes - start)) for start in range(0, num_bytes, PIECE_BYTES)
    ]


def send_message(
    socket: zmq.Socket[bytes],
    frames: Sequence[Any],  # Any: bytes, or memory
    *,
    copy: bool = True,
) -> None:
    """Send frames as one message: `send_multipart` without its checks, which cost as much again.

    Args:
        socket: Where to.
        frames: At least one.
        copy: Whether they may be changed as soon as this returns; else never.
    """
    for frame in frames[:-1]:
        socket.send(frame, _MORE, copy)
    socket.send(frames[-1], 0, copy)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Tell whether a message has come."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def receive_message(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """Return the frames of the next message, where zmq has put them."""
    frames = [socket.recv(copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(copy=False))
    return frames
