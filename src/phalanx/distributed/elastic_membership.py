"""Which processes train together, from epoch to epoch: agreed through a store that outlives them.

    epoch 1    0 1 2    all have come
    epoch 2    0   2    one died in the middle of a step: those left report, and one of them decides
    epoch 3    0 3 2    a new process has come, and was let in between two steps

    count            how many processes have come so far; each takes its number from it, from 1
    card/N           who process N is
    beat/N           a number that process N changes all the time
    left/N           process N has finished, or was found dead by another of its host
    asks/N           the epoch that process N asks for, and its report; empty once it has the state
    epoch/E          who is in it; written once, by whoever is first

Any process may find that the group must change; all of it then ask for the next epoch. The one with
the lowest number that lives decides, when all that live have reported; after a deadline whoever is
left does, on those that have. Two may decide: the store keeps the first word.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch.distributed import Store

from phalanx.clock import now_s, pause
from phalanx.distributed.exchange import differing_names
from phalanx.distributed.hosts import this_host
from phalanx.errors import PeerLost, PeerTimeout, StateError
from phalanx.ipc import ProcessIdentity

__all__ = ["GroupEpoch", "RankMembership", "Report", "RunEnded", "decide"]

_BEAT_S = 0.5
_FINISHED, _LOST = "finished", "lost"
_FIRST_PAUSE_S = 1e-3
_LONGEST_PAUSE_S = 20e-3

About = Mapping[str, Any]
"""What a process trains, as JSON has it."""


class RunEnded(StateError):
    """The run that a process wants to join has done all there was to do."""


class _Member(NamedTuple):
    rank: int
    host: str
    pid: int
    start_ticks: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a process knows as it asks for another epoch.

    Attributes:
        done: How many runs it has done; None for a process that has no state yet.
        admits: Whether it asks between two steps, where new processes may come in.
        about: What it trains.
    """

    done: int | None
    admits: bool
    about: About


@dataclass(frozen=True, kw_only=True)
class GroupEpoch:
    """A group, from one change to the next.

    Attributes:
        members: Processes by rank.
        new: Those of them that need the state.
        done: How many runs are done; a member that has done fewer does the last one alone.
        about: What each member trains, by rank.
        refused: What is wrong with processes that wanted to come in, by number.
    """

    members: list[int]
    new: list[int]
    done: int
    about: list[About]
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def source(self) -> int:
        """The rank that gives the state to those that need it."""
        return next((rank for rank, n in enumerate(self.members) if n not in self.new), 0)


def decide(
    members: Collection[int],
    reports: Mapping[int, Report],
    waiting: Mapping[int, About],
    ranks: Mapping[int, int],
    size: int,
) -> GroupEpoch | None:
    """Return the next epoch; None while it has to wait.

    Args:
        members: Those of the epoch before that live.
        reports: What they have said so far.
        waiting: Processes that live and want to come in.
        ranks: Every process's place, by number: that which its launcher gave it.
        size: How many there are when a run begins.

    Example:
        >>> lost = Report(done=7, admits=False, about={})
        >>> decide([1, 3], {1: lost, 3: lost}, {}, {1: 0, 3: 2}, 3).members
        [1, 3]
    """
    if any(number not in reports for number in members):
        return None
    about = {n: reports[n].about for n in members if reports[n].done is not None}
    if about:
        done = {number: reports[number].done or 0 for number in about}
        admits = len({*done.values()}) == 1 and all(reports[n].admits for n in about)
        first = about[min(about, key=lambda n: (ranks[n], n))]
        others = {n: each for n, each in waiting.items() if n not in about} if admits else {}
        new = {n: each for n, each in others.items() if not differing_names(each, first)}
        refused = {
            str(n): differing_names(each, first) for n, each in others.items() if n not in new
        }
        return _epoch({**about, **new}, new, max(done.values()), ranks, refused)
    if len(waiting) < size:
        return None
    return _epoch(waiting, waiting, 0, ranks, {})


def _epoch(
    about: Mapping[int, About],
    new: Collection[int],
    done: int,
    ranks: Mapping[int, int],
    refused: dict[str, str],
) -> GroupEpoch:
    members = sorted(about, key=lambda number: (ranks[number], number))
    return GroupEpoch(
        members=members,
        new=[number for number in members if number in new],
        done=done,
        about=[about[number] for number in members],
        refused=refused,
    )


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
        self, store: Store, rank: int, size: int, *, timeout_s: float, lost_after_s: float
    ) -> None:
        self.epoch = 0
        self._store = store
        self._size = size
        self._timeout_s = timeout_s
        self._lost_after_s = lost_after_s
        self._members: Sequence[int] = ()
        self._cards: dict[int, _Member] = {}
        self._gone: set[int] = set()
        self._wanting: frozenset[int] = frozenset()  # as the last beat has found
        self._beats: dict[int, tuple[str, float]] = {}
        self.number = store.add("count", 1)
        self._mine = _Member(rank, this_host(), *ProcessIdentity.current())
        store.set(f"card/{self.number}", json.dumps(self._mine))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="phalanx beat", daemon=True)
        self._thread.start()

    def leave(self, *, finished: bool = False) -> None:
        """Tell the others that this process takes no part any more; idempotent.

        Args:
            finished: It has done what there was to do, so that nobody shall come in its place.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(_BEAT_S)
        with contextlib.suppress(RuntimeError):  # the store is gone, and everybody with it
            self._store.set(f"left/{self.number}", _FINISHED if finished else _LOST)
            self.wait_no_longer()

    @property
    def newcomers_wait(self) -> bool:
        """Whether a process that is not a member waits to come in, as the last beat found."""
        return not self._wanting <= {*self._members, *self._gone}

    def process_of(self, number: int) -> tuple[int, int]:
        """Return the place that the launcher gave a process, and its process number."""
        card = self._card(number)
        return card.rank, card.pid

    def next_epoch(self, report: Report) -> GroupEpoch:
        """Return the next epoch that this process is in; blocks until all that live have asked.

        Raises:
            PeerTimeout: Others did not come.
            PeerLost: The others have continued without this process, or the store is gone.
            StateError: The run has ended, or trains something else.
        """
        try:
            return self._next_epoch(report)
        except StateError:
            raise
        except RuntimeError as error:
            raise PeerLost(
                f"The store where ranks meet must outlive them, but is gone: {error}. Start the "
                "job again from its last checkpoint."
            ) from error

    def _next_epoch(self, report: Report) -> GroupEpoch:
        asked = -1
        begin_s, pause_s, late = now_s(), _FIRST_PAUSE_S, False
        while True:
            found = self._read_epochs(report)
            if found is not None:
                return found
            if late and (report.done is None or self.number not in self._members):
                raise PeerTimeout(
                    f"{self._size} ranks must come to begin, or let this one in between two steps, "
                    f"but did not within {self._timeout_s:g} s. See that the others run.",
                )
            if self.epoch != asked:
                asked = self.epoch
                ask = json.dumps([asked + 1, asdict(report)])
                self._store.set(f"asks/{self.number}", ask)
            late = now_s() - begin_s > self._timeout_s
            self._decide(late=late)
            pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _read_epochs(self, report: Report) -> GroupEpoch | None:
        """Read the epochs that were decided since; return the one that this process is in."""
        while found := self._read(f"epoch/{self.epoch + 1}"):
            epoch = GroupEpoch(**json.loads(found))
            self.epoch += 1
            self._members = epoch.members
            if self.number in epoch.members:
                return epoch
            if report.done is not None:
                raise PeerLost(
                    "This rank gave no sign of life in time, so the others have continued without "
                    "it. Start it again: it is given the state."
                )
            refused = epoch.refused.get(str(self.number))
            if refused is not None:
                raise StateError(
                    "A rank that comes later must train what the others train, but differs in: "
                    f"{refused}. Build it from the same arguments in every process."
                )
        return None

    def check_all_live(self) -> None:
        """Raise where a member of the epoch is gone.

        Raises:
            PeerLost: It is; ``.rank`` is its place.
        """
        for place, number in enumerate(self._members):
            if self._is_gone(number):
                raise PeerLost(
                    f"Rank {self._card(number).rank} has died as the ranks formed a group.", place
                )

    def wait_no_longer(self) -> None:
        """Tell the others that this process has the state, or does not want it any more."""
        self._store.set(f"asks/{self.number}", "")

    # --- deciding ---------------------------------------------------------------------------------

    def _decide(self, *, late: bool) -> None:
        """Decide on the next epoch, where that is up to this process and all is known."""
        living = [number for number in self._members if not self._is_gone(number)]
        asks = {n: each for n, each in self._asks().items() if not self._is_gone(n)}
        reports = {n: asks[n][1] for n in living if n in asks and asks[n][0] == self.epoch + 1}
        waiting = {n: report.about for n, (_, report) in asks.items() if report.done is None}
        if late and self.number in self._members:  # a new process knows nothing of their step
            living = list(reports)
        if not living and any(self._left(number) == _FINISHED for number in self._members):
            raise self._end_of_run()
        if not late and min(living or waiting, default=0) != self.number:
            return  # who is late decides, too: the one whose turn it is may live and not move
        places = {n: self._card(n).rank for n in (*living, *waiting)}
        epoch = decide(living, reports, waiting, places, self._size)
        if epoch is not None:
            self._store.compare_set(f"epoch/{self.epoch + 1}", "", json.dumps(asdict(epoch)))

    def _end_of_run(self) -> StateError:
        """Return why this process cannot join a run that has ended."""
        ended = "The run that this rank would join has ended, and"
        for card, left in ((self._card(number), self._left(number)) for number in self._members):
            if card.rank == self._mine.rank and left == _FINISHED:
                return StateError(
                    f"{ended} this rank's process {card.pid} had finished it. What a script does "
                    "afterwards is not repeated, and it trains with `Ranks()` in one `Trainer` "
                    "only. Start the job again, or that part alone."
                )
        return RunEnded(f"{ended} all its ranks have left: nothing is left to be done here.")

    def _asks(self) -> dict[int, tuple[int, Report]]:
        """Return which epoch each process asks for, and its report."""
        found = {}
        for number in range(1, self._store.add("count", 0) + 1):
            ask = "" if number in self._gone else self._read(f"asks/{number}")
            if ask:
                epoch, report = json.loads(ask)
                found[number] = epoch, Report(**report)
        return found

    def _left(self, number: int) -> str:
        return self._read(f"left/{number}")

    def _read(self, key: str) -> str:
        """Return a value, none of which is ever deleted; empty where there is none."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _is_gone(self, number: int) -> bool:
        if number in (self.number, *self._gone):
            return number != self.number
        if self._left(number) or not self._shows_life(number):
            self._gone.add(number)
            if self._card(number).host == self._mine.host:  # others would wait for a beat
                self._store.set(f"left/{number}", self._left(number) or _LOST)
        return number in self._gone

    def _shows_life(self, number: int) -> bool:
        card = self._card(number)
        if card.host == self._mine.host:
            return ProcessIdentity(card.pid, card.start_ticks).alive()
        beat, now = self._read(f"beat/{number}"), now_s()
        last, since_s = self._beats.setdefault(number, ("", now))
        if beat != last:
            self._beats[number] = beat, now
            return True
        return now - since_s <= self._lost_after_s

    def _card(self, number: int) -> _Member:
        if number not in self._cards:
            self._cards[number] = _Member(*json.loads(self._store.get(f"card/{number}")))
        return self._cards[number]

    # --- beside the training ----------------------------------------------------------------------

    def _beat(self) -> None:
        """Give signs of life, and see who wants to come in, until this process leaves."""
        with contextlib.suppress(RuntimeError):  # the store is gone: who needs it next says so
            for beat in itertools.count(1):
                self._store.set(f"beat/{self.number}", str(beat))
                asks = self._asks().items()
                self._wanting = frozenset(n for n, (_, report) in asks if report.done is None)
                if self._ended.wait(_BEAT_S):
                    return
