"""Exchange between ranks that may be lost and replaced: a group for each epoch of the membership.

# Note [Left behind]
A collective may have ended for one rank and fail for another, when a third one dies in it. The one
for which it ended may be a run ahead then, and waits for the others there. So after every change of
the group a rank that has done fewer runs than the others does its last one once more, alone: it
computes all microbatches itself, and the fixed tree makes the result the same, bit for bit.

# Note [In step]
Between two runs there are collectives, too: ranks compare their weights, or let one of them write.
After a change of the group some may be past these and some not. So nobody does them until a run is
done together.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from phalanx.distributed.backend import open_group
from phalanx.distributed.elastic_membership import GroupEpoch, RankMembership
from phalanx.distributed.exchange import Exchange, differing_names
from phalanx.distributed.open_store import open_store
from phalanx.environment import error_file, read_place
from phalanx.errors import (
    ConfigError,
    GroupAborted,
    PeerLost,
    PeerTimeout,
    StateError,
    UnsupportedError,
)

__all__ = ["ElasticExchange", "GroupChanged", "RanksChanged"]

_LOSSES = (PeerLost, PeerTimeout, GroupAborted)

About = Mapping[str, Any]
"""The description of a rank's model, in types of JSON."""


@dataclass(frozen=True, kw_only=True)
class RanksChanged:
    """Ranks of ``executor=Ranks()`` were lost or have joined; sent before the step's `StepDone`.

    Attributes:
        step: Number of the update in which it was noticed.
        rank: This process's place among the ranks that train now.
        ranks: The ``RANK`` of each of them, as its launcher set it.
        pids: Their process numbers.
        lost: The ``RANK`` of each lost rank.
        came: The ``RANK`` of each new rank.
    """

    step: int
    rank: int
    ranks: tuple[int, ...]
    pids: tuple[int, ...]
    lost: tuple[int, ...]
    came: tuple[int, ...]


class GroupChanged(PeerLost):
    """A rank was lost in a collective: call `ElasticExchange.settle`, and repeat it."""


class ElasticExchange(Exchange):
    """The ranks that train together now.

    Args:
        timeout_s: How long an operation may take, and a living rank to come.
        lost_after_s: After how long without a sign of life a rank of another host is lost.

    Attributes:
        about: What each rank trains, by rank.
        is_behind: Whether the others have done one more. See Note [Left behind].
        in_step: Whether all ranks are at the same place between two runs. See Note [In step].
        entered: Whether this process is one of them.
    """

    def __init__(self, *, timeout_s: float, lost_after_s: float) -> None:
        place = read_place()
        if place is not None and not place.keeps_survivors:
            raise UnsupportedError(
                "`executor=Ranks()` needs a launcher that keeps the survivors of a lost rank, but "
                "torchrun and Ray end them. Start "
                f"`phalanx launch -n {place.local_size or 2} script.py`, or take executor='ranks', "
                "whose ranks all restart from the last checkpoint."
            )
        self._launched = place
        self.entered = False
        self.about: list[About] = []
        self.is_behind = self.in_step = False
        self.rank, self.size = 0, 1
        self._device = torch.device("cpu")
        self._timeout_s = timeout_s
        self._lost_after_s = lost_after_s
        self._store: Store
        self._membership: RankMembership
        self._describe: Callable[[], About] = dict
        self._give: Callable[[], bytes] = bytes
        self._num_done: int | None = None  # runs of this rank, once it has the state
        self._is_lost = False
        self._told: list[int] = []  # the processes that `take_change` has told of

    def enter(self, describe: Callable[[], About], give: Callable[[], bytes]) -> bytes | None:
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
        place = self._launched
        if place is None:
            raise ConfigError(
                "`executor=Ranks()` must run in processes that a launcher has started, but `RANK` "
                "and `WORLD_SIZE` are not set. Start `phalanx launch -n 2 script.py`."
            )
        store = open_store(*place.find_store(), place.rank, place.size, self._timeout_s)
        # An agent may lend one store to all attempts.
        self._store = PrefixStore(f"elastic/{place.attempt}", store)
        self._membership = RankMembership(
            self._store, place.rank, place.size, self._timeout_s, self._lost_after_s
        )
        self.entered = True
        received = self._settle(admits=False)
        note = error_file()
        if note is not None:  # beside it: the launcher keeps this host's other ranks
            note.with_name("elastic").touch()
        return received

    def admit(self) -> None:
        """Let those in that wait; every rank calls it, between two steps."""
        if self.has_newcomers:
            self._settle(admits=True)

    @property
    def newcomers_wait(self) -> bool:
        """True if processes wait to join, as far as this rank knows."""
        return self._membership.newcomers_wait

    def settle(self) -> None:
        """Form another group where a rank was lost."""
        if self._is_lost:
            self._settle(admits=False)

    def mark_done(self) -> None:
        """Count a run that is done here."""
        assert self._num_done is not None
        self._num_done += 1
        if self.is_behind:
            self.is_behind = False
            self._take_place()
        else:
            self.in_step = True

    def take_change(self, step: int) -> RanksChanged | None:
        """Return how the ranks differ from those of the last time; None if they do not."""
        if not self.entered or self._told == self._epoch.members:
            return None
        before, now = self._told, self._epoch.members
        self._told = now
        process_of = self._membership.process_of
        processes = [process_of(number) for number in now]
        return RanksChanged(
            step=step,
            rank=self._place,
            ranks=tuple(rank for rank, _ in processes),
            pids=tuple(pid for _, pid in processes),
            lost=tuple(process_of(number)[0] for number in before if number not in now),
            came=tuple(process_of(number)[0] for number in now if number not in before),
        )

    def leave(self, *, finished: bool) -> None:
        """Take no part any more, unless this process enters again; idempotent."""
        if self.entered:
            self.entered = False
            self._num_done = None
            self._membership.leave(finished=finished)
            self._close_group()

    # --- from one group to the next ---------------------------------------------------------------

    def _settle(self, *, admits: bool) -> bytes | None:
        """Form the next group, and another as long as one is lost on the way.

        Where that fails, this process is none of the ranks any more, and may enter again.

        Returns:
            The state, if a peer has given it.
        """
        received: bytes | None = None
        try:
            while True:
                epoch = self._next_epoch(admits=admits)
                try:
                    self._open_group(epoch)
                    received = self._pass_state(epoch) or received
                except _LOSSES:
                    admits = False
                    continue
                self._take_place()
                return received
        except BaseException:
            self.leave(finished=False)
            raise

    def _next_epoch(self, *, admits: bool) -> GroupEpoch:
        """Leave the group, and read the ranks of the next one from the store."""
        self._close_group()
        self._is_lost = self.has_newcomers = False
        done = self._num_done
        self._epoch = epoch = self._membership.next_epoch(done, admits=admits)
        self._place = epoch.members.index(self._membership.number)
        self.is_behind = done is not None and done < epoch.done
        self.in_step = len(epoch.new) == len(epoch.members)
        return epoch

    def _open_group(self, epoch: GroupEpoch) -> None:
        self.rank, self.size = self._place, len(epoch.members)
        if self.size > 1:
            store = PrefixStore(f"group/{self._membership.epoch}/", self._store)
            timeout = datetime.timedelta(seconds=self._timeout_s)
            look = self._membership.check_all_live
            self._group = open_group(store, self.rank, self.size, timeout, look)

    def _close_group(self) -> None:
        """Leave the group; whoever still waits for this rank there gets an error."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _pass_state(self, epoch: GroupEpoch) -> bytes | None:
        """Compare what all train, and give the state to new ranks; return it to this one if new.

        Raises:
            StateError: This rank is new, and trains something else.
            PeerLost: Another one does.
        """
        source = epoch.source
        new = [place for place, number in enumerate(epoch.members) if number in epoch.new]
        late = [place for place in new if place != source]
        state = self._give() if late and self._place == source else b""
        document = json.dumps([self._describe(), len(state)])
        told = [json.loads(each) for each in self.gather(document.encode(), "form a group")]
        self._all = [about for about, _ in told]
        for place in new if source not in new else ():
            differing = differing_names(self._all[place], self._all[source])
            if differing and place == self._place:
                raise StateError(
                    "A rank that comes later must train what the others train, but differs in: "
                    f"{differing}. Build it from the same arguments in every process."
                )
            if differing:
                raise PeerLost(f"The new rank {place} differs in: {differing}.", place)
        length = told[source][1]
        if late and self._place == source:
            tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
            for place in late:
                self._send(tensor, place)
        elif self._place in late:
            tensor = torch.empty(length, dtype=torch.uint8)
            self._group.recv([tensor], source, 0).wait()
            state = tensor.numpy().tobytes()
        if self._place in new:
            self._num_done = epoch.done
        return state if self._place in late else None

    def _send(self, tensor: Tensor, place: int) -> None:
        self._group.send([tensor], place, 0).wait()

    def _take_place(self) -> None:
        """Be what the epoch says, or alone while the others are ahead."""
        if self.is_behind:
            self.rank, self.size, self.about = 0, 1, [self._describe()]
        else:
            self.rank, self.size, self.about = self._place, len(self._epoch.members), self._all

    def begin(self, about: About, tensors: Iterable[Tensor]) -> None:
        """Do nothing: :meth:`enter` has compared, and given the state."""

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Leave the group where a rank is lost; the next one is formed before the next run.

        Raises:
            GroupChanged: It was.
        """
        try:
            yield
        except _LOSSES as error:
            self._is_lost = True
            self._close_group()
            raise GroupChanged(f"The ranks have changed: {error}", error.rank) from error
