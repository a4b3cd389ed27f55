"""Messages from one rank to another: a ring of bytes per direction, in the receiver's inbox.

    sender   ──written──> │ ... head 64 │ payload, padded to 64 │ head │ ... │ ──read──> receiver

The sender puts a message into the ring as far as there is room: a small one without its receiver.
The inbox is the receiver's own, so that a message which was sent whole is there even when its
sender is not. It has a ring per sender, whose memory is reserved when the sender first writes.
The receiver takes what comes in order. A message that nobody has asked for yet, because its tag is
another, is put aside in the receiver's own memory; so the order in which tags are sent and asked
for does not matter. Of messages with one tag the first sent is the first received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

import torch
from torch import Tensor

from phalanx.distributed.collective_buffers import Need, RemoteNeed, Steps
from phalanx.distributed.status_pages import LEFT, StatusPages
from phalanx.errors import ConfigError, PeerLost
from phalanx.ipc import Region, fence
from phalanx.memory import copy_to

__all__ = ["PointToPoint"]

_RING_BYTES = 1 << 20
_HEAD_BYTES = 64
_LARGEST_COPY_BYTES = 256 << 10
_WRITTEN, _READ, _DATA_BYTES = 0, 8, 128
_CHANNEL_BYTES = _DATA_BYTES + _RING_BYTES


class _Channel:
    """One ring, from either end."""

    def __init__(self, region: Region, sender: int) -> None:
        start = sender * _CHANNEL_BYTES
        self.words = region.buffer[start : start + _DATA_BYTES].cast("q")
        self.data = region.tensor(torch.uint8, _RING_BYTES, start + _DATA_BYTES)
        self.reading: object = None  # the claim of a receive in the middle of a message
        self.aside: deque[tuple[int, Tensor]] = (
            deque()
        )  # tag and bytes of messages not asked for yet

    @property
    def filled(self) -> int:
        """How many bytes wait in the ring."""
        return self.words[_WRITTEN] - self.words[_READ]

    def write(self, source: Tensor) -> int:
        """Put bytes into the ring as far as they fit at once; return how many."""
        written = self.words[_WRITTEN]
        at = written % _RING_BYTES
        room = min(_RING_BYTES - self.filled, _RING_BYTES - at, len(source), _LARGEST_COPY_BYTES)
        if room:
            copy_to(source[:room], self.data[at : at + room])
            fence()
            self.words[_WRITTEN] = written + room
        return room

    def read(self, into: Tensor) -> int:
        """Take bytes out of the ring as far as they are there at once; return how many."""
        read = self.words[_READ]
        at = read % _RING_BYTES
        there = min(self.filled, _RING_BYTES - at, len(into), _LARGEST_COPY_BYTES)
        if there:
            fence()
            copy_to(self.data[at : at + there], into[:there])
            fence()
            self.words[_READ] = read + there
        return there

    def close(self) -> None:
        self.words.release()


class PointToPoint:
    """The channels of one rank to and from all others.

    Attributes:
        sends_wait: Whether a send waits for its receiver, which may ask for another tag first.
    """

    sends_wait = False

    def __init__(self, pages: StatusPages) -> None:
        self._pages = pages
        self._inbox = Region.create(pages.size * _CHANNEL_BYTES, label="inbox", reserved=0)
        self._borrowed: list[Region] = []
        self._out: dict[int, _Channel] = {}
        self._in: dict[int, _Channel] = {}
        pages.offer_inbox(self._inbox.fd)

    # --- sending ----------------------------------------------------------------------------------

    def send(self, data: Tensor, receiver: int, tag: int) -> Steps:
        """Put ``data``, flat bytes, on the way to ``receiver``."""
        while (channel := self._channel_to(receiver)) is None:
            yield (receiver,), 0
        head = torch.zeros(_HEAD_BYTES // 8, dtype=torch.int64)
        head[0], head[1] = tag, len(data)
        padding = torch.zeros(-len(data) % _HEAD_BYTES, dtype=torch.uint8)
        for source in (head.view(torch.uint8), data, padding):
            start = 0
            while start < len(source):
                moved = channel.write(source[start:])
                start += moved
                self._pages.nudge(receiver)
                if not moved:
                    yield (receiver,), -channel.words[_WRITTEN]

    def _channel_to(self, receiver: int) -> _Channel | None:
        if receiver not in self._out:
            fd = self._pages.inbox_of(receiver)
            identity = self._pages.identity_of(receiver)
            if fd is None or identity is None:
                return None
            try:
                region = Region.borrow(identity.pid, fd, label=f"inbox of rank {receiver}")
            except PeerLost:  # the inbox went with its owner, whose death the wait reports
                return None
            self._borrowed.append(region)
            region.reserve_part(self._pages.rank * _CHANNEL_BYTES, _CHANNEL_BYTES)
            self._out[receiver] = _Channel(region, self._pages.rank)
        return self._out[receiver]

    # --- receiving --------------------------------------------------------------------------------

    def receive(self, into: Tensor, sender: int, tag: int) -> Steps:
        """Fill ``into``, flat bytes, with the next message of ``tag`` from ``sender``.

        Raises:
            ConfigError: The message is longer or shorter; it is lost.
        """
        claim = object()
        while not (yield from self._try(into, sender, tag, claim)):
            yield (sender,), -self._channel_from(sender).words[_READ]

    def receive_any(self, into: Tensor, tag: int, found: list[int]) -> Steps:
        """Fill ``into`` with a message of ``tag`` from anybody; put the sender into ``found``."""
        if not self._pages.others:
            raise ConfigError("`src` must be another rank, but the group has one rank only.")
        claim = object()
        while True:
            for sender in self._pages.others:
                if (yield from self._try(into, sender, tag, claim)):
                    found.append(sender)
                    return
            # A rank that has left is awaited no longer, unless all have.
            here = [each for each in self._pages.others if self._pages.state_of(each)[0] != LEFT]
            yield tuple(here or self._pages.others), 0

    def _try(
        self, into: Tensor, sender: int, tag: int, claim: object
    ) -> Generator[Need | RemoteNeed, None, bool]:
        """Take a message of ``tag`` if one is there; of others, put aside what is there."""
        channel = self._channel_from(sender)
        for index, (other_tag, data) in enumerate(channel.aside):
            if other_tag == tag:
                del channel.aside[index]
                self._check(into, len(data), sender)
                into.copy_(data)
                return True
        if channel.reading is not None or not channel.filled:
            return False
        channel.reading = claim
        head = torch.empty(_HEAD_BYTES // 8, dtype=torch.int64)
        yield from self._fill(channel, head.view(torch.uint8), sender)
        sent_tag, num_bytes = head[:2].tolist()
        ours = sent_tag == tag and num_bytes == len(into)
        data = into if ours else torch.empty(num_bytes, dtype=torch.uint8)
        yield from self._fill(channel, data, sender)
        padding = torch.empty(-num_bytes % _HEAD_BYTES, dtype=torch.uint8)
        yield from self._fill(channel, padding, sender)
        channel.reading = None
        if sent_tag != tag:
            channel.aside.append((sent_tag, data))
            return False
        self._check(into, num_bytes, sender)
        return True

    def _fill(self, channel: _Channel, into: Tensor, sender: int) -> Steps:
        start = 0
        while start < len(into):
            moved = channel.read(into[start:])
            start += moved
            self._pages.nudge(sender)
            if not moved:
                yield (sender,), -channel.words[_READ]

    def _channel_from(self, sender: int) -> _Channel:
        if sender not in self._in:
            self._in[sender] = _Channel(self._inbox, sender)
        return self._in[sender]

    def _check(self, into: Tensor, num_bytes: int, sender: int) -> None:
        if num_bytes != len(into):
            raise ConfigError(
                f"`tensor` must have the {num_bytes} bytes that rank {sender} has sent, but has "
                f"{len(into)}."
            )

    def close(self) -> None:
        """Let go of all channels; messages under way are lost."""
        for channel in (*self._out.values(), *self._in.values()):
            channel.close()
        for region in (self._inbox, *self._borrowed):
            region.close()
        self._borrowed.clear()
        self._out.clear()
        self._in.clear()
