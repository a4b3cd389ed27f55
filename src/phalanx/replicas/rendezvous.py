"""Where the threads of one run exchange values, and what they hear when one of them stays away."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.clock import now_s
from phalanx.errors import GroupAborted, PeerTimeout, StateError, UnsupportedError
from phalanx.ipc import late_peers

__all__ = ["ReplicaRendezvous"]

_SAME_ORDER = "Let every replica use the same layers in the same order, whatever its rows hold."


class ReplicaRendezvous:
    """A rendezvous of the replicas that take part in a run, as often as they like.

        caller      open ─────────────────────────────────────────────── close
        replica 0        ── exchange ──────── exchange ── leave
        replica 1        ─────── exchange ─── exchange ─────── leave
                               both go on here

    Nobody waits in vain: a member that is done or has failed leaves, and whoever waits for it then,
    or comes later, gets an error that names it. After a run that failed the next one starts anew.

    Args:
        timeout_s: How long one exchange may wait for the last member, in seconds.

    Example:
        >>> from phalanx.execution import ThreadPool
        >>> pool, rendezvous = ThreadPool(2, intra_op=1), ReplicaRendezvous()
        >>> def work(index: int) -> int:
        ...     with rendezvous.attending(index):
        ...         return sum(rendezvous.exchange(index, index + 1, "the sum"))
        >>> with rendezvous.open([0, 1]):
        ...     pool.each(work)
        [3, 3]
        >>> pool.close()
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        self.timeout_s = timeout_s
        self._turn = threading.Lock()  # two threads may call one container
        self._changed = threading.Condition()
        self._run: _Run | None = None
        self._rounds = 0

    @property
    def members(self) -> tuple[int, ...]:
        """Who takes part in the present run; nobody between runs."""
        run = self._run
        return () if run is None else run.members

    def waited_s(self, member: int) -> float:
        """Return the seconds that ``member`` has waited for others in the present run."""
        run = self._run
        return 0.0 if run is None else run.waited_s.get(member, 0.0)

    @property
    def rounds(self) -> int:
        """How many exchanges were completed so far, in all runs.

        A number for the exchange that a member has just returned from, the same for all of them:
        the next one cannot be completed without it.
        """
        return self._rounds

    @contextlib.contextmanager
    def open(self, members: Sequence[int]) -> Iterator[None]:
        """Let ``members`` meet while the body, in the caller's thread, runs theirs.

        Their order is that of their numbers, in whichever order they are given.

        Blocks: while another thread's run is on.
        """
        with self._turn:
            run = _Run(tuple(sorted(members)))
            with self._changed:
                self._run = run
            try:
                yield
            finally:
                with self._changed:  # only a thread left behind can still be waiting
                    self._run = None
                    self._end(run, _Departure(None, "the run was given up"))

    @contextlib.contextmanager
    def attending(self, member: int) -> Iterator[None]:
        """Leave after the body, with what it raised; to be entered by every replica's thread."""
        try:
            yield
        except BaseException as error:
            self.leave(member, error)
            raise
        self.leave(member)

    def leave(self, member: int, error: BaseException | None = None) -> None:
        """Tell the others that ``member`` will not come again in this run, and why if it failed.

        Leaving twice, or without being a member, does nothing.
        """
        with self._changed:
            run = self._run
            if run is not None and member in run.members:
                # As text: the error itself would keep its frames, and the tensors in them, alive.
                reason = None if error is None else f"{type(error).__name__}: {error}"
                self._end(run, _Departure(member, reason))

    # Any: whatever the callers exchange.
    def exchange(self, member: int, value: Any, place: str) -> list[Any]:
        """Bring ``value`` and return what all members have brought, in the order of their numbers.

        Args:
            member: Who brings it.
            place: Where the members meet, for errors; it must be the same for all.

        Raises:
            UnsupportedError: A member ended without coming here, or came from another place.
            GroupAborted: A member failed; ``.rank`` names it.
            PeerTimeout: A member did not come in time; ``.rank`` names it.
            StateError: ``member`` is not expected here.

        Collective: every member of the run. Blocks: until all came, at most `timeout_s`.
        """
        with self._changed:
            run = self._expect(member)
            if run.departure is not None:
                raise run.departure.seen_by(member, place)
            current = run.round
            current.brought[member] = (place, value)
            if len(current.brought) == len(run.members):
                current.complete, run.round = True, _Round()
                self._rounds += 1
                self._changed.notify_all()
            else:
                self._wait(run, current, member, place)
        _check_places(run.members, current)
        return [current.brought[each][1] for each in run.members]

    def _expect(self, member: int) -> _Run:
        run = self._run
        if run is None or member not in run.members:
            expected = "nobody" if run is None else _named(run.members)
            raise StateError(
                f"`exchange()` needs an open rendezvous that expects replica {member}, but this "
                f"one expects {expected}. Run the replicas inside `open()`."
            )
        if member in run.round.brought:
            raise StateError(
                f"Replica {member} must meet the others from one thread, but came from two at "
                "once. Run each replica's layers one after the other."
            )
        return run

    def _wait(self, run: _Run, current: _Round, member: int, place: str) -> None:
        begin_s = now_s()
        deadline_s = begin_s + self.timeout_s
        while not current.complete:
            if run.departure is not None:
                raise run.departure.seen_by(member, place)
            left_s = deadline_s - now_s()
            if left_s <= 0:
                raise _timeout(run.members, current, place, self.timeout_s)
            self._changed.wait(left_s)
        run.waited_s[member] = run.waited_s.get(member, 0.0) + now_s() - begin_s

    def _end(self, run: _Run, departure: _Departure) -> None:
        """Keep the first departure, which is the cause of all that follow."""
        if run.departure is None:
            run.departure = departure
            self._changed.notify_all()


@dataclass
class _Round:
    """One exchange; whoever waits holds it, so the next one cannot take it away."""

    brought: dict[int, tuple[str, Any]] = field(default_factory=dict)  # Any: as in `exchange`
    complete: bool = False


@dataclass
class _Run:
    """What belongs to one run; a thread left behind by an earlier one keeps its own."""

    members: tuple[int, ...]
    round: _Round = field(default_factory=_Round)
    waited_s: dict[int, float] = field(default_factory=dict)
    departure: _Departure | None = None


@dataclass(frozen=True)
class _Departure:
    """Who was the first to leave, and what it raised; None stands for a normal end."""

    member: int | None
    reason: str | None

    def seen_by(self, member: int, place: str) -> Exception:
        """Return the error for ``member``, which waits or has come afterwards."""
        if self.reason is None:
            return UnsupportedError(
                f"Replica {self.member} must come to {place} like replica {member}, but ended its "
                f"pass without it. {_SAME_ORDER}"
            )
        who = "the others" if self.member is None else f"replica {self.member}"
        return GroupAborted(
            f"Replica {member} must meet {who} at {place}, but cannot: {self.reason}",
            rank=self.member,
        )


def _check_places(members: Sequence[int], current: _Round) -> None:
    first, *others = members
    expected, _ = current.brought[first]
    for other in others:
        place, _ = current.brought[other]
        if place != expected:
            raise UnsupportedError(
                f"Replicas must meet at the same places in the same order, but replica {first} "
                f"came to {expected} and replica {other} to {place}. {_SAME_ORDER}"
            )


def _timeout(members: Sequence[int], current: _Round, place: str, timeout_s: float) -> PeerTimeout:
    missing = [member for member in members if member not in current.brought]
    there = [member for member in members if member in current.brought]
    return late_peers("Replica", missing, len(members), place, timeout_s, came=there)


def _named(members: Sequence[int]) -> str:
    return f"replica{'s' if len(members) > 1 else ''} {', '.join(map(str, members))}"
