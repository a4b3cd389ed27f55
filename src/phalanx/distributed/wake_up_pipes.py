"""How a rank sleeps until another wakes it: a pipe per rank, to which the others write a byte.

    sleeper   says on its page which rank it waits for, looks once more, sleeps on its pipe
    waker     posts its progress, sees on the sleeper's page that it waits for it, writes a byte

So no rank pays for a byte that no other needs, and a rank that waits burns no core: the kernel runs
it soon after the byte, because it has slept. A byte that falls between two looks costs some
milliseconds at most: every sleep ends by itself.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress

from phalanx.distributed.status_pages import StatusPages
from phalanx.errors import PeerLost
from phalanx.ipc import fence

__all__ = ["WakeUpPipe", "WakeUpPipes"]

_SOME_BYTES = 512


class WakeUpPipe:
    """The pipe of this rank."""

    def __init__(self) -> None:
        self._read, self.fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def sleep(self, timeout_s: float) -> None:
        """Sleep until a byte comes, or for ``timeout_s`` seconds."""
        if self._poll.poll(timeout_s * 1e3):
            with suppress(BlockingIOError):  # another thread of ours was faster
                os.read(self._read, _SOME_BYTES)

    def wake(self) -> None:
        """Wake this rank itself; another of its threads has something for it."""
        with suppress(BlockingIOError):
            os.write(self.fd, b"\0")

    def close(self) -> None:
        """Close both ends."""
        os.close(self._read)
        os.close(self.fd)


class WakeUpPipes:
    """This rank's pipe, and the others' as far as it may wake them.

    Args:
        pages: Where ranks say that they sleep.
        pipe: This rank's own.
    """

    def __init__(self, pages: StatusPages, pipe: WakeUpPipe) -> None:
        self._pages = pages
        self._pipe = pipe
        self._fd_by_rank: dict[int, int] = {}
        pages.wake = self.wake

    def connect(self, rank: int) -> None:
        """Open the pipe of another rank, which has offered it on its page.

        Raises:
            PeerLost: It has died.
        """
        identity = self._pages.identity_of(rank)
        assert identity is not None
        path = f"/proc/{identity.pid}/fd/{self._pages.pipe_of(rank)}"
        try:
            self._fd_by_rank[rank] = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError) as exc:
            name = self._pages.names[rank]
            raise PeerLost(
                f"Rank {name} of {self._pages.group_size} has died while the group is made. Make a "
                "new one.",
                name,
            ) from exc

    def wake_this_rank(self) -> None:
        """Wake this rank."""
        self._pipe.wake()

    def wake(self, rank: int) -> None:
        """Wake ``rank``."""
        with suppress(BlockingIOError, BrokenPipeError):  # the pipe is full; or its rank is gone
            os.write(self._fd_by_rank[rank], b"\0")

    def fall_asleep(self, rank: int, progress: int) -> None:
        """Say that this rank sleeps until ``rank`` reaches ``progress``; then look once more."""
        self._pages.wait_for(rank, progress)
        fence()

    def sleep(self, timeout_s: float) -> None:
        """Sleep until another rank wakes this one, or for ``timeout_s`` seconds."""
        self._pipe.sleep(timeout_s)
        self._pages.wait_for(None)

    def close(self) -> None:
        """Close all of them."""
        for fd in self._fd_by_rank.values():
            os.close(fd)
        self._fd_by_rank.clear()
        self._pipe.close()
