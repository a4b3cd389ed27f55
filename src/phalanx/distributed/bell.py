"""How a rank sleeps until another wakes it: a pipe per rank, on which the others ring.

    sleeper   says on its page for whom it waits, looks once more, sleeps on its pipe
    waker     posts its mark, sees on the sleeper's page that it waits for that, writes a byte

So nobody pays for a wake that nobody needs, and a rank that waits burns no core: the kernel runs it
soon after the ring, because it has slept. A ring that falls between two looks is no loss but of
some milliseconds: every sleep ends by itself.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress

from phalanx.distributed.board import Board
from phalanx.errors import PeerLost
from phalanx.ipc import fence

__all__ = ["Bell", "Bells"]

_SOME_BYTES = 512


class Bell:
    """The pipe of this rank."""

    def __init__(self) -> None:
        self._read, self.fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def listen(self, timeout_s: float) -> None:
        """Sleep until somebody rings, or for ``timeout_s`` seconds."""
        if self._poll.poll(timeout_s * 1e3):
            with suppress(BlockingIOError):  # another thread of ours was faster
                os.read(self._read, _SOME_BYTES)

    def ring(self) -> None:
        """Wake this rank itself; another of its threads has something for it."""
        with suppress(BlockingIOError):
            os.write(self.fd, b"\0")

    def close(self) -> None:
        """Close both ends."""
        os.close(self._read)
        os.close(self.fd)


class Bells:
    """This rank's bell, and the others' as far as it may ring them.

    Args:
        board: Where ranks say that they sleep.
        bell: This rank's own.
    """

    def __init__(self, board: Board, bell: Bell) -> None:
        self._board = board
        self._bell = bell
        self._fd_by_rank: dict[int, int] = {}
        board.wake = self.ring

    def reach(self, rank: int) -> None:
        """Open the bell of another rank, which has offered it on its page.

        Raises:
            PeerLost: It is gone.
        """
        identity = self._board.identity_of(rank)
        assert identity is not None
        path = f"/proc/{identity.pid}/fd/{self._board.bell_of(rank)}"
        try:
            self._fd_by_rank[rank] = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError) as exc:
            name = self._board.names[rank]
            raise PeerLost(
                f"Rank {name} of {self._board.group_size} has died while the group is made. Make a "
                "new one.",
                name,
            ) from exc

    def ring_here(self) -> None:
        """Wake this rank."""
        self._bell.ring()

    def ring(self, rank: int) -> None:
        """Wake ``rank``."""
        with suppress(BlockingIOError, BrokenPipeError):  # rung often enough; or gone
            os.write(self._fd_by_rank[rank], b"\0")

    def fall_asleep(self, rank: int, mark: int) -> None:
        """Say that this rank waits for ``rank`` to reach ``mark``; look once more afterwards."""
        self._board.wait_for(rank, mark)
        fence()

    def sleep(self, timeout_s: float) -> None:
        """Sleep until somebody rings, or for so long."""
        self._bell.listen(timeout_s)
        self._board.wait_for(None)

    def close(self) -> None:
        """Close all of them."""
        for fd in self._fd_by_rank.values():
            os.close(fd)
        self._fd_by_rank.clear()
        self._bell.close()
