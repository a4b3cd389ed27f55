"""Which processes train together, from epoch to epoch: agreed through a store that outlives them.

    epoch 1    0 1 2    all have come
    epoch 2    0   2    one died in the middle of a step: those left report, and one of them decides
    epoch 3    0 3 2    a new process has come, and was let in between two steps

    count       how many processes have come so far; each takes its number from it, from 1
    member/N    who process N is, and the epoch that it asks for
    beat/N      a number that it changes all the time
    epoch/E     its members; written once, by the first rank to decide

Any process may find that the group must change; all of it then ask for the next epoch. The one with
the lowest number that lives decides, when all that live have reported; after a deadline any that
is left does, on those that have. Two may decide: the store keeps the first word.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.distributed import Store

from phalanx.clock import now_s
from phalanx.distributed.job_store import this_host
from phalanx.errors import PeerLost, PeerTimeout, StateError
from phalanx.ipc import ProcessIdentity, wait_until

__all__ = ["Member", "RankMembership", "RunEnded", "decide"]

_BEAT_S = 0.5
_FINISHED, _LOST = "finished", "lost"


class RunEnded(StateError):
    """The run that a process wants to join has done all there was to do."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process, as it describes itself in the store.

    Attributes:
        rank: The place that its launcher gave it.
        host, process: Where it runs.
        asks: The epoch that it asks for.
        done: How many batches and checkpoints it has done; None while it has no state.
        admits: Whether it asks between two steps, where new processes may come in, or is new.
        left: "finished" or "lost" after its end; others of its host write the latter.
    """

    rank: int
    host: str = ""
    process: Sequence[int] = ()
    asks: int = 0
    done: int | None = None
    admits: bool = False
    left: str = ""


def decide(living: Collection[int], asking: Mapping[int, Member], size: int) -> list[int] | None:
    """Return the members of the next epoch by rank; None while it has to wait.

    Those that have the state come first, so that rank 0 can give it to the others.

    Args:
        living: The members of the epoch before that live.
        asking: Processes that live and ask for the next epoch: those, and others without a state.
        size: How many there are when a run begins.

    Example:
        >>> asking = {n: Member(rank=n - 1, done=7) for n in (1, 3)}
        >>> decide([1, 3], asking, 3)
        [1, 3]
    """
    if any(number not in asking for number in living):
        return None
    done = {each.done for each in asking.values()} - {None}
    if not done and len(asking) < size:
        return None
    all_admit = len(done) < 2 and all(each.admits for each in asking.values())
    members = [number for number, each in asking.items() if all_admit or each.done is not None]
    return sorted(members, key=lambda n: (asking[n].done is None, asking[n].rank, n))


class RankMembership:
    """This process's part in the group.

    Args:
        store: Where the processes meet; it outlives each of them.
        rank: The place that the launcher gave this one.
        size: How many there are when a run begins.
        timeout_s: How long a living process may take to come.
        lost_after_s: After how long without a sign of life a process of another host is lost.

    Attributes:
        number: Ours; no other process of the run ever has it.
        epoch: The number of the last epoch.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout_s: float, lost_after_s: float
    ) -> None:
        self.epoch = 0
        self._store = store
        self._size = size
        self._timeout_s = timeout_s
        self._lost_after_s = lost_after_s
        self._members: dict[int, Member] = {}
        self._gone: set[int] = set()
        self._wanting: frozenset[int] = frozenset()  # as the last beat has found
        self._beats: dict[int, tuple[int, float]] = {}
        self.number = store.add("count", 1)
        self._mine = Member(rank=rank, host=this_host(), process=ProcessIdentity.current())
        self._describe()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="phalanx beat", daemon=True)
        self._thread.start()

    def leave(self, *, finished: bool = False) -> None:
        """Tell the others that this process takes no part any more; idempotent.

        Args:
            finished: It has done all its work, so no new process shall take its place.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(_BEAT_S)
        with contextlib.suppress(RuntimeError):  # the store is gone, and everybody with it
            self._describe(left=_FINISHED if finished else _LOST)

    @property
    def newcomers_wait(self) -> bool:
        """True where a process that is not a member waits to come in, as the last beat found."""
        return not self._wanting <= {*self._members, *self._gone}

    def check_all_live(self) -> None:
        """Raise where a member of the epoch is gone.

        Raises:
            PeerLost: It is; ``.rank`` is its place.
        """
        for place, number in enumerate(self._members):
            member = self._read_member(number)
            if self._is_gone(number, member):
                raise PeerLost(f"Rank {member.rank} has died as the ranks formed a group.", place)

    def next_epoch(self, done: int | None, *, admits: bool) -> Mapping[int, Member]:
        """Return the members of the next epoch that this process is in, by rank, as they asked.

        It blocks until all that live have asked for it.

        Args:
            done, admits: As `Member` has them.

        Raises:
            PeerTimeout: Others did not come.
            PeerLost: The others have continued without this process, or the store is gone.
            StateError: The run has ended.
        """

        def is_in() -> bool:
            if self._read_epochs(done):
                return True
            if self._mine.asks <= self.epoch:
                self._describe(asks=self.epoch + 1, done=done, admits=admits)
            self._decide()
            return False

        try:
            if not wait_until(is_in, self._timeout_s):
                self._decide(late=True)
                self._read_epochs(done)
            return self._members
        except StateError:
            raise
        except RuntimeError as error:
            raise PeerLost(
                f"The store where ranks meet must outlive them, but is gone: {error}. Start the "
                "job again from its last checkpoint."
            ) from error

    def _read_epochs(self, done: int | None) -> bool:
        """Read the epochs that were decided since, up to one that this process is in."""
        while numbers := self._read(f"epoch/{self.epoch + 1}"):
            self.epoch += 1
            self._members = {number: self._read_member(number) for number in numbers}
            if self.number in numbers:
                return True
            if done is not None:
                raise PeerLost(
                    "This rank gave no sign of life in time, so the others have continued without "
                    "it. Start it again: it is given the state."
                )
        return False

    def _decide(self, *, late: bool = False) -> None:
        """Decide on the next epoch, where that is up to this process and all is known."""
        if late and self._mine.done is None:
            raise PeerTimeout(
                f"{self._size} ranks must come to begin, or let this one in between two steps, "
                f"but did not within {self._timeout_s:g} s. See that the others run.",
            )
        found = {n: each for n, each in self._read_members().items() if not self._is_gone(n, each)}
        living = [number for number in self._members if number in found]
        asking = {
            number: each
            for number, each in found.items()
            if (each.asks > self.epoch if number in living else each.asks and each.done is None)
        }
        if late:
            living = [number for number in living if number in asking]
        if not living:
            self._check_unfinished()
        if not late and min(living or asking, default=0) != self.number:
            return  # who is late decides, too: the one whose turn it is may live and not move
        members = decide(living, asking, self._size)
        if members is not None:
            self._store.compare_set(f"epoch/{self.epoch + 1}", "", json.dumps(members))

    def _check_unfinished(self) -> None:
        """Raise where the run that this process would join has ended."""
        finished = [
            each for each in map(self._read_member, self._members) if each.left == _FINISHED
        ]
        if any(each.rank == self._mine.rank for each in finished):
            raise StateError(
                "The run that this rank would join has ended, and its process before had finished "
                "it. What a script does afterwards is not repeated, and it trains with `Ranks()` "
                "in one `Trainer` only. Start the job again, or that part alone."
            )
        if finished:
            raise RunEnded(
                "The run that this rank would join has ended: nothing is left to be done here."
            )

    # --- what the store says ----------------------------------------------------------------------

    def _describe(self, **changes: Any) -> None:  # Any: attributes of `Member`
        """Write down what has changed about this process."""
        self._mine = replace(self._mine, **changes)
        self._store.set(f"member/{self.number}", json.dumps(asdict(self._mine)))

    def _read(self, key: str) -> Any:  # Any: JSON
        """Return a value, or None for an unknown key; no value is ever deleted."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _read_member(self, number: int) -> Member:
        return Member(**self._read(f"member/{number}"))

    def _read_members(self) -> dict[int, Member]:
        """Return the processes that have come and are not known to be gone."""
        numbers = {*range(1, self._store.add("count", 0) + 1)} - self._gone
        found = {number: self._read(f"member/{number}") for number in sorted(numbers)}
        return {number: Member(**each) for number, each in found.items() if each}

    def _is_gone(self, number: int, member: Member) -> bool:
        if number not in self._gone and (member.left or not self._shows_life(number, member)):
            self._gone.add(number)
            if member.host == self._mine.host and not member.left:  # others would wait for a beat
                lost = json.dumps(asdict(replace(member, left=_LOST)))
                self._store.set(f"member/{number}", lost)
        return number in self._gone

    def _shows_life(self, number: int, member: Member) -> bool:
        if member.host == self._mine.host:
            return ProcessIdentity(*member.process).alive()
        beat = self._store.add(f"beat/{number}", 0)
        last, since_s = self._beats.get(number, (-1, 0.0))
        if beat != last:
            since_s = now_s()
            self._beats[number] = beat, since_s
        return now_s() - since_s <= self._lost_after_s

    def _beat(self) -> None:
        """Give signs of life, and see who wants to come in, until this process leaves."""
        with contextlib.suppress(RuntimeError):  # the store is gone: who needs it next says so
            while not self._ended.wait(_BEAT_S):
                self._store.add(f"beat/{self.number}", 1)
                found = self._read_members().items()
                self._wanting = frozenset(n for n, each in found if each.asks and each.done is None)
