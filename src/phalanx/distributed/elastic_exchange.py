"""Exchange between ranks that may be lost and replaced: a group for each epoch of the membership.

# Note [Left behind]
A collective may have ended for one rank and fail for another, when a third one dies in it. The one
for which it ended may be a run ahead then, and waits for the others there. So after every change of
the group a rank that has done fewer runs than the others does its last one once more, alone: it
computes all microbatches itself, and the fixed tree makes the result bitwise identical. A run
is one batch, or one checkpoint; such a rank leaves a checkpoint out: the others have written it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from phalanx.distributed.elastic_membership import Member, RankMembership
from phalanx.distributed.exchange import Exchange, differing_names
from phalanx.distributed.group_rendezvous import make_group
from phalanx.distributed.job_store import open_store
from phalanx.environment import error_file, read_place
from phalanx.errors import PeerError, PeerLost, PeerTimeout, StateError, UnsupportedError

__all__ = ["ElasticExchange", "GroupChanged"]


class GroupChanged(PeerLost):
    """A rank was lost in a collective: call `ElasticExchange.regroup`, then repeat the step."""


class ElasticExchange(Exchange):
    """The ranks that train together now.

    Args:
        timeout_s: How long an operation may take, and a living rank to come.
        lost_after_s: After how long without a sign of life a rank of another host is lost.

    Attributes:
        about: What each rank trains, by rank.
        is_behind: Whether the others have done one run more. See Note [Left behind].
        is_late: Whether it was given the state of a run that had begun, and has done none since.
        entered: Whether this process is one of them.
        members: Their processes, by place.
        ranks: What their launchers call them, by place.
    """

    def __init__(self, *, timeout_s: float, lost_after_s: float) -> None:
        place = read_place()
        if place is None or not place.keeps_survivors:
            ranks = place.local_size if place is not None else None
            raise UnsupportedError(
                "`executor=Ranks()` needs a launcher that keeps the survivors of a lost rank, "
                "which plain Python, torchrun and Ray do not. Start "
                f"`phalanx launch -n {ranks or 2} script.py`, or take executor='ranks', "
                "whose ranks all restart from the last checkpoint."
            )
        self._place = place
        self.entered = False
        self.about: list[Mapping[str, Any]] = []  # Any: JSON
        self.rank, self.size, self.ranks = 0, 1, [place.rank]
        self.device = torch.device("cpu")
        self._timeout_s = timeout_s
        self._lost_after_s = lost_after_s
        self._store: Store
        self._membership: RankMembership
        self._describe: Callable[[], Mapping[str, Any]] = dict
        self._give: Callable[[], bytes] = bytes
        self._num_done: int | None = None  # runs of this rank, once it has the state
        self._is_lost = False
        self._were_late: list[int] = []  # members of a run that timed out, until one is done
        self.members: Mapping[int, Member] = {}

    def enter(
        self, describe: Callable[[], Mapping[str, Any]], give: Callable[[], bytes]
    ) -> bytes | None:
        """Become one of the ranks, and return the state that a peer has given; None from the first.

        Args:
            describe: Returns what this rank trains; all but "replicas" must be alike.
            give: Returns the state that others begin with.

        Raises:
            PeerTimeout: The others did not come.
            StateError: They train something else, or have finished.

        Blocks: Until all are here, or let this one in between two steps.
        """
        self._describe, self._give = describe, give
        place = self._place
        store = open_store(place, self._timeout_s)
        # An agent may lend one store to all attempts.
        self._store = PrefixStore(f"elastic/{place.attempt}", store)
        self._membership = RankMembership(
            self._store, place.rank, place.size, self._timeout_s, self._lost_after_s
        )
        self.entered = True
        received = self._regroup(admits=True)
        note = error_file()
        if note is not None:  # beside it: the launcher keeps this host's other ranks
            note.with_name("elastic").touch()
        return received

    @property
    def newcomers_wait(self) -> bool:  # type: ignore[override]
        """True if processes wait to join, as far as this rank knows."""
        return self._membership.newcomers_wait

    def regroup(self, *, admits: bool = False) -> None:
        """Form another group where a rank was lost, or where others may join and wait for it.

        Args:
            admits: Whether they may join; every rank says it, between two steps.
        """
        if self._is_lost or (admits and self.newcomers_agreed):
            self._regroup(admits=admits)

    def mark_done(self) -> None:
        """Count a run that is done here."""
        assert self._num_done is not None
        self._num_done += 1
        self.is_behind = self.is_late = False
        self._were_late = []

    def leave(self, *, finished: bool) -> None:
        """Take no part any more, unless this process enters again; idempotent."""
        if self.entered:
            self.entered = False
            self._num_done = None
            self._membership.leave(finished=finished)
            self._close_group()

    # --- from one group to the next ---------------------------------------------------------------

    def _regroup(self, *, admits: bool) -> bytes | None:
        """Form the next group, and another as long as one is lost on the way.

        Where that fails, this process is none of the ranks any more, and may enter again.

        Returns:
            The state, if a peer has given it.

        Raises:
            PeerLost: Twice the same ranks, all of which live, could not form a group.
        """
        apart: list[int] = []  # who could not
        try:
            while True:
                self._close_group()
                self._is_lost = self.newcomers_agreed = False
                self.members = self._membership.next_epoch(self._num_done, admits=admits)
                try:
                    self._open_group()
                    return self._compare()
                except PeerError as error:
                    if [*self.members] == apart:
                        text = f"All ranks live, but twice they could not form a group: {error}"
                        raise PeerLost(text, error.rank) from error
                    apart = [*self.members]
        except BaseException:
            self.leave(finished=False)
            raise

    def _open_group(self) -> None:
        self.ranks = [each.rank for each in self.members.values()]
        self.size = len(self.ranks)
        self.rank = list(self.members).index(self._membership.number)
        store = PrefixStore(f"group/{self._membership.epoch}/", self._store)
        timeout = datetime.timedelta(seconds=self._timeout_s)
        look = self._membership.check_all_live
        self._group = make_group(store, self.rank, self.size, timeout, look)

    def _close_group(self) -> None:
        """Leave the group; ranks that still wait for this one there get an error."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _compare(self) -> bytes | None:
        """Compare how far all are and what they train; return the state to this rank if it is new.

        Raises:
            StateError: This rank has come later, and trains something else.
        """
        own = json.dumps(self._describe()).encode()
        self.about = [json.loads(each) for each in self.gather(own, "form a group")]
        dones = [each.done for each in self.members.values()]
        last = max((done for done in dones if done is not None), default=0)
        is_new = self._num_done is None
        self.is_behind = not is_new and self._num_done != last
        if is_new:
            self.is_late = dones[0] is not None
            differing = differing_names(self.about[self.rank], self.about[0])
            if self.is_late and differing:
                raise StateError(
                    "A rank that comes later must train what the others train, but differs in: "
                    f"{differing}. Build it from the same arguments in every process."
                )
        state = self._pass_state() if None in dones[1:] else None
        if is_new:
            self._num_done = last
        return state if is_new and self.rank > 0 else None

    def _pass_state(self) -> bytes:
        """Return the state of rank 0, to all ranks."""
        state = self._give() if self.rank == 0 else b""
        sizes = self.gather(b"%d" % len(state), "pass the state")
        passed = torch.frombuffer(bytearray(state.ljust(int(sizes[0]))), dtype=torch.uint8)
        self.broadcast([passed])
        return passed.numpy().tobytes()

    def match_ranks(self, about: Mapping[str, Any], tensors: Iterable[Tensor]) -> None:
        """Do nothing: :meth:`enter` has compared, and given the state."""

    @contextlib.contextmanager
    def _translating_errors(self) -> Iterator[None]:
        """Leave the group where a rank is lost; the next one is formed before the next run.

        Raises:
            GroupChanged: It was.
            PeerTimeout: A rank that lives was late in this run again.
        """
        try:
            yield
        except PeerError as error:
            if isinstance(error, PeerTimeout):
                if [*self.members] == self._were_late:
                    raise
                self._were_late = [*self.members]
            self._is_lost = True
            self._close_group()
            raise GroupChanged(f"The ranks have changed: {error}") from error
