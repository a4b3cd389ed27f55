"""Messages from one rank to another: a ring of bytes per direction, made when it is first used.

    sender   ──written──> │ ... head 64 │ payload, padded to 64 │ head │ ... │ ──read──> receiver

The sender puts a message into the ring as far as there is room, and needs nobody for a small one.
The receiver takes what comes in order. A message that nobody has asked for yet, because its tag is
another, is put aside in the receiver's own memory; so the order in which tags are sent and asked
for does not matter. Of messages with one tag the first sent is the first received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

import torch
from torch import Tensor

from phalanx.errors import ConfigError, PeerLost
from phalanx.memory import Region, Waiting, copy_to, fence
from phalanx.world.arena import Need, Steps
from phalanx.world.board import HERE, LEFT, Board

__all__ = ["Mail"]

_RING_BYTES = 1 << 20
_HEAD_BYTES = 64
_LARGEST_COPY_BYTES = 256 << 10
_WRITTEN, _READ, _DATA_BYTES = 0, 8, 128


class _Channel:
    """One ring, from either end."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.words = region.buffer[:_DATA_BYTES].cast("q")
        self.data = region.tensor(torch.uint8, _RING_BYTES, _DATA_BYTES)
        self.reading: object = None  # who is in the middle of a message
        self.aside: deque[tuple[int, Tensor]] = deque()  # tag and bytes of what nobody asked for
        self._ends: deque[int] = deque()  # of messages sent: at which byte ever written each ends

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

    def mark_end(self) -> None:
        """Note that a message ends with what was written last."""
        self.num_unread()  # so that those that were read are forgotten
        self._ends.append(self.words[_WRITTEN])

    def num_unread(self) -> int:
        """Return how many messages have not been taken out of the ring, or not all of them."""
        while self._ends and self._ends[0] <= self.words[_READ]:
            self._ends.popleft()
        return len(self._ends)

    def close(self) -> None:
        self.words.release()
        self.region.close()


class Mail:
    """The channels of one rank to and from all others."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._out: dict[int, _Channel] = {}
        self._in: dict[int, _Channel] = {}

    # --- sending ----------------------------------------------------------------------------------

    def send(self, data: Tensor, receiver: int, tag: int) -> Steps:
        """Put ``data``, flat bytes, on the way to ``receiver``."""
        channel = self._channel_to(receiver)
        head = torch.zeros(_HEAD_BYTES // 8, dtype=torch.int64)
        head[0], head[1] = tag, len(data)
        padding = torch.zeros(-len(data) % _HEAD_BYTES, dtype=torch.uint8)
        for source in (head.view(torch.uint8), data, padding):
            start = 0
            while start < len(source):
                moved = channel.write(source[start:])
                start += moved
                self._board.nudge(receiver)
                if not moved:
                    yield (receiver,), -channel.words[_WRITTEN]
        channel.mark_end()

    def _channel_to(self, receiver: int) -> _Channel:
        if receiver not in self._out:
            region = Region.create(_DATA_BYTES + _RING_BYTES, label=f"channel to rank {receiver}")
            self._out[receiver] = _Channel(region)
            self._board.offer_channel(receiver, region.fd)
        return self._out[receiver]

    # --- receiving --------------------------------------------------------------------------------

    def receive(self, into: Tensor, sender: int, tag: int) -> Steps:
        """Fill ``into``, flat bytes, with the next message of ``tag`` from ``sender``.

        Raises:
            ConfigError: The message is longer or shorter; it is lost.
        """
        claim = object()
        while not (yield from self._try(into, sender, tag, claim)):
            channel = self._in.get(sender)
            yield (sender,), -channel.words[_READ] if channel else 0

    def receive_any(self, into: Tensor, tag: int, found: list[int]) -> Steps:
        """Fill ``into`` with a message of ``tag`` from anybody; put the sender into ``found``."""
        if not self._board.others:
            raise ConfigError("`src` must be another rank, but the group has one rank only.")
        claim = object()
        while True:
            for sender in self._board.others:
                if (yield from self._try(into, sender, tag, claim)):
                    found.append(sender)
                    return
            # Who has left after its last message is waited for no longer, unless all have.
            here = [each for each in self._board.others if self._board.state_of(each)[0] != LEFT]
            yield tuple(here or self._board.others), 0

    def _try(
        self, into: Tensor, sender: int, tag: int, claim: object
    ) -> Generator[Need | None, None, bool]:
        """Take a message of ``tag`` if one is there; of others, put aside what is there."""
        channel = self._channel_from(sender)
        if channel is None:
            return False
        for place, (other_tag, data) in enumerate(channel.aside):
            if other_tag == tag:
                del channel.aside[place]
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
            self._board.nudge(sender)
            if not moved:
                yield (sender,), -channel.words[_READ]

    def _channel_from(self, sender: int) -> _Channel | None:
        if sender not in self._in:
            fd = self._board.channel_of(sender)
            identity = self._board.identity_of(sender)
            if fd is None or identity is None:
                return None
            try:
                region = Region.borrow(identity.pid, fd, label=f"channel from rank {sender}")
            except PeerLost:  # the channel went with its sender, of whom the wait will tell
                return None
            self._in[sender] = _Channel(region)
        return self._in[sender]

    def _check(self, into: Tensor, num_bytes: int, sender: int) -> None:
        if num_bytes != len(into):
            raise ConfigError(
                f"`tensor` must have the {num_bytes} bytes that rank {sender} has sent, but has "
                f"{len(into)}."
            )

    def linger(self, timeout_s: float) -> dict[int, int]:
        """Wait until the others have taken out of the channels what this rank has put in.

        Returns:
            How many messages each living receiver has left, by rank, where it has left any.
        """
        waiting = Waiting(timeout_s)
        left: dict[int, int] = {}
        for receiver, channel in self._out.items():
            while (unread := channel.num_unread()) and self._is_here(receiver):
                if waiting.over():
                    left[receiver] = unread
                    break
                waiting.rest()
        return left

    def _is_here(self, rank: int) -> bool:
        return self._board.state_of(rank)[0] == HERE and self._board.alive(rank)

    def close(self) -> None:
        """Let go of all channels; messages under way are lost."""
        for channel in (*self._out.values(), *self._in.values()):
            channel.close()
        self._out.clear()
        self._in.clear()
