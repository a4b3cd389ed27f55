"""A barrier on shared memory: everybody waits until everybody has come.

    region    | 7 ........ | 7 ........ | 6 ........ |     one line of 64 bytes per member, each
    member    0            1            2                  written by that member alone

A member comes by writing the number of its round into its own line, and waits until no line holds
less. Nobody reads and then writes a word that another writes, so nothing has to be atomic beyond
one aligned store of eight bytes, and Python has that. A negative number says that the member gave
the round up: then the barrier is broken, for all and for good. (Who gives up in the very moment in
which the last one comes may break a round that others have passed; they learn it at their next.)
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from phalanx.errors import ConfigError, GroupAborted, PeerLost
from phalanx.ipc.liveness import late_peers, wait_until
from phalanx.ipc.region import ALIGN_BYTES, Region
from phalanx.plan import say_numbers

__all__ = ["KEEPS_ORDER", "SharedBarrier", "fence"]

_STEP = ALIGN_BYTES // 8

# Note [Memory order]
# What a member wrote before it came must be seen by whoever has seen it come. x86 keeps the order
# of stores and the order of loads, so there is nothing to do. Elsewhere a lock is taken twice: its
# release keeps what is before it before, its next acquisition keeps what follows after, and the two
# are not exchanged. Not tried on such a machine.
KEEPS_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")
_fence_lock = threading.Lock()


def fence() -> None:
    """Keep what this thread wrote before from being seen after what it writes next."""
    if not KEEPS_ORDER:
        with _fence_lock:
            pass
        with _fence_lock:
            pass


class SharedBarrier:
    """A barrier of ``num_members`` processes or threads over one region.

    Every process makes its own object over the same place of the region, which holds zeros at
    first; threads may share an object. A member is in at most one :meth:`wait` at a time.

    Args:
        region: Where the lines lie; it is kept open by the barrier.
        num_members: How many take part, at least 1.
        offset_bytes: Where the lines begin, a multiple of 64.
        name: What it is called in messages.
        alive: Tells of a member whether it can still come; asked about every 20 ms of a wait, of
            those who have not. Without it, only the deadline ends the wait for the dead.

    Raises:
        ConfigError: There is no room for the lines.

    Example:
        >>> region = Region.create(SharedBarrier.needed_bytes(1))
        >>> barrier = SharedBarrier(region, 1, name="epoch")
        >>> barrier.wait(0), barrier.wait(0)
        (1, 2)
        >>> barrier
        SharedBarrier('epoch', 1 member)
    """

    def __init__(
        self,
        region: Region,
        num_members: int,
        *,
        offset_bytes: int = 0,
        name: str = "barrier",
        alive: Callable[[int], bool] | None = None,
    ) -> None:
        if num_members < 1:
            raise ConfigError(f"`num_members` must be at least 1, but is {num_members!r}.")
        if offset_bytes % ALIGN_BYTES or offset_bytes < 0:
            raise ConfigError(
                f"`offset_bytes` must be a multiple of {ALIGN_BYTES}, but is {offset_bytes!r}."
            )
        stop = offset_bytes + self.needed_bytes(num_members)
        if stop > region.nbytes:
            raise ConfigError(
                f"`region` must have {stop} bytes for barrier {name!r} of {num_members} members, "
                f"but has {region.nbytes}."
            )
        self.num_members = num_members
        self.name = name
        self._alive = alive
        self._rounds = region.buffer[offset_bytes:stop].cast("q")

    @staticmethod
    def needed_bytes(num_members: int) -> int:
        """Return how many bytes of a region a barrier of ``num_members`` takes."""
        return num_members * ALIGN_BYTES

    def wait(self, member: int, *, timeout_s: float = 30.0) -> int:
        """Come as ``member``, wait for all others, and return the number of the round, from 1.

        Everything that a member wrote before is seen by every member afterwards.

        Raises:
            PeerTimeout: Somebody did not come in ``timeout_s`` seconds; ``.rank`` names the first.
            PeerLost: Somebody who has not come is dead; ``.rank`` names it.
            GroupAborted: Another member gave up before, for one of these reasons.

        Collective: All members. Blocks: Until the last of them has come.
        """
        if not 0 <= member < self.num_members:
            raise ConfigError(
                f"`member` must be at least 0 and below {self.num_members}, but is {member!r}."
            )
        rounds = self._rounds
        mine = rounds[member * _STEP]
        if mine < 0:
            self._abort(member, -mine)
        mine += 1
        fence()
        rounds[member * _STEP] = mine
        try:
            self._wait_for_all(mine, timeout_s)
        except BaseException:
            rounds[member * _STEP] = -mine
            raise
        fence()
        return mine

    def _wait_for_all(self, number: int, timeout_s: float) -> None:
        def ready() -> bool:
            lowest = min(self._rounds[::_STEP].tolist())
            if lowest < 0:
                self._look_for_broken(number)
            return bool(lowest >= number)

        if not wait_until(ready, timeout_s, lambda: self._look_for_dead(number)):
            missing = self._missing(number)
            if missing:  # else the last has come just now
                raise late_peers(
                    "Member",
                    missing,
                    self.num_members,
                    self._at(number),
                    timeout_s,
                    came=self._came(missing),
                )

    def _look_for_broken(self, number: int) -> None:
        rounds = self._rounds[::_STEP].tolist()
        if min(rounds) < 0:
            self._look_for_dead(number)  # the cause, where this is its echo
            self._abort(next(member for member, at in enumerate(rounds) if at < 0), number)

    def _missing(self, number: int) -> list[int]:
        return [m for m, at in enumerate(self._rounds[::_STEP].tolist()) if at < number]

    def _look_for_dead(self, number: int) -> None:
        alive = self._alive
        if alive is None:
            return
        dead = [member for member in self._missing(number) if not alive(member)]
        missing = self._missing(number)  # again: somebody may have come and then died
        dead = [member for member in dead if member in missing]
        if dead:
            raise PeerLost(
                f"{say_numbers('Member', dead)} of {self.num_members} did not come to "
                f"{self._at(number)} and {'is' if len(dead) == 1 else 'are'} dead; "
                f"{say_numbers('Member', self._came(missing)).lower()} did.",
                dead[0],
            )

    def _abort(self, member: int, number: int) -> NoReturn:
        raise GroupAborted(
            f"Member {member} of {self.num_members} gave up {self._at(number)}. See what it says, "
            "and make a new barrier.",
            member,
        )

    def _at(self, number: int) -> str:
        return f"barrier {self.name!r} (round {number})"

    def _came(self, missing: Sequence[int]) -> list[int]:
        return [member for member in range(self.num_members) if member not in missing]

    def __repr__(self) -> str:
        plural = "" if self.num_members == 1 else "s"
        return f"SharedBarrier({self.name!r}, {self.num_members} member{plural})"
