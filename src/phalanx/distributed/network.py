"""The network between ranks of a group, over gloo.

    a user's messages    gloo's own calls, which wait in C++
    collectives          gloo's; the lane looks whether they have ended

gloo would write one tensor into another where ranks are in different calls, and end a process that
is sent another number of bytes than it takes. So the ranks compare what they are about to do first.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store, Work

from phalanx.distributed.fingerprint import Fingerprint, desync, misfit
from phalanx.distributed.status_pages import StatusPages
from phalanx.distributed.tensors import FlatTensor, as_bytes
from phalanx.distributed.work import SharedWork, Steps
from phalanx.errors import GroupAborted, PeerError, PeerLost, PeerTimeout
from phalanx.ipc import fail_point, wait_until
from phalanx.torch_internals import gloo_options

__all__ = ["LEFT", "ErrorStore", "Network", "gloo_error", "open_gloo"]

T = TypeVar("T")
_KINDS: dict[str, type[PeerError]] = {kind.__name__: kind for kind in (PeerLost, PeerTimeout)}
_TIMED_OUT = re.compile("time(d )?out", re.IGNORECASE)  # in errors of gloo

LEFT = 2**62
"""The number beyond all operations, which a rank has reached that leaves in good order."""

_CUT_TAG = 2**31 - 1  # of a receive that no member answers
# So many looks for deaths, 20 ms each, pass between two of whether the connections stand: a rank
# whose script has ended without destroying the group has closed its own, and is not to be missed.
_CHECK_EVERY = 250
_REPORT_S = 1.0  # the time that a rank of another host has to report a late rank there
_STORE_S = 1.0  # a store on a host that has vanished never answers
_AT_ONCE = datetime.timedelta(milliseconds=1)
_NO_LIMIT = datetime.timedelta(days=1000)

Gloo = Any
"""A `ProcessGroupGloo`; torch's stubs do not know what can be called on one."""


def open_gloo(store: Store, rank: int, size: int, timeout_s: float, *, on_one_host: bool) -> Gloo:
    """Return a gloo group whose ranks are all connected, in ``timeout_s`` at most.

    They find each other's addresses in ``store``. No other host reaches ranks on one host.
    """
    timeout: Any = datetime.timedelta(seconds=timeout_s)
    if on_one_host and "GLOO_SOCKET_IFNAME" not in os.environ:
        options: Any = gloo_options(ProcessGroupGloo)
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        gloo = ProcessGroupGloo(store, rank, size, options)
    else:  # by that variable, or the interface that has the host's name
        gloo = ProcessGroupGloo(store, rank, size, timeout)
    gloo._set_default_timeout(_NO_LIMIT)  # the lane keeps the time
    return gloo


class ErrorStore:
    """The place in ``store`` where the first error of a group of ``group_size`` ranks stands."""

    def __init__(self, store: Store, rank: int, group_size: int) -> None:
        self.group_size = group_size
        self._store = store
        self._rank = rank

    def write(self, error: BaseException) -> None:
        """Write ``error``, unless one stands there."""
        rank = getattr(error, "rank", None)
        told = json.dumps([type(error).__name__, self._rank if rank is None else rank, str(error)])
        _within(_STORE_S, lambda: self._store.compare_set("error", "", told))

    def cause(self) -> PeerError | None:
        """Return the error that was written first, but not that we are lost: an echo of our own."""
        told = _within(_STORE_S, lambda: self._get("error"))
        if told is None:
            return None
        kind, rank, text = json.loads(told)
        is_echo = kind == PeerLost.__name__ and rank == self._rank
        return None if is_echo else _KINDS.get(kind, GroupAborted)(text, rank)

    def say_reached(self, number: int) -> None:
        """Say that this rank waits for others in the operation ``number``; `LEFT` if in none."""
        _within(_STORE_S, lambda: self._store.set(f"reached/{self._rank}", str(number)))

    def reached_by(self, ranks: Sequence[int]) -> list[int] | None:
        """Return what each of ``ranks`` has said, or 0; None where the store does not answer."""
        return _within(_STORE_S, lambda: [int(self._get(f"reached/{rank}") or 0) for rank in ranks])

    def _get(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None


class Network:
    """A rank's end of a connection.

    Args:
        gloo: The connection.
        ranks: Whom it connects: their ranks in the group.
        pages: Where the ranks of this host say whether they take part.
        error_store: Where the first error of the group stands.

    Attributes:
        rank: Ours.
        fail: Called with an error, to break the group.
    """

    fail: Callable[[BaseException], object]

    def __init__(
        self,
        gloo: Gloo,
        ranks: Sequence[int],
        pages: StatusPages,
        error_store: ErrorStore,
    ) -> None:
        self._gloo: Gloo | None = gloo
        self.ranks = ranks
        self.rank = pages.group_rank
        self.others = [rank for rank in ranks if rank != self.rank]
        self.pages = pages
        self.error_store = error_store
        self._latest: Work | None = None
        self._left = False

    @property
    def gloo(self) -> Gloo:
        """The connection, unless it was cut."""
        if self._gloo is None:
            raise RuntimeError("the connection was cut")  # the caller says what that means
        return self._gloo

    # --- collectives ------------------------------------------------------------------------------

    def compare(self, ours: Fingerprint, given: Sequence[int], taken: Sequence[int]) -> Steps:
        """Check that all ranks are in one operation, and send each other as many bytes as taken."""
        own = torch.tensor([[*ours, length] for length in given])
        heads = torch.empty_like(own)
        yield self.collective(lambda gloo: gloo.alltoall_base(heads, own, [], []), ours.number)
        for rank, (*words, sent), length in zip(self.ranks, heads.tolist(), taken, strict=True):
            if Fingerprint(*words) != ours:
                raise desync(self.rank, ours, rank, Fingerprint(*words))
            if sent != length:
                raise misfit(self.rank, rank, length)

    def collective(self, begin: Callable[[Gloo], Work], number: int | None = None) -> _Collective:
        """Begin a collective of gloo's; ranks may be late for the operation of that number."""
        fail_point("exchange begun")
        with self.translating_errors():
            self._latest = begin(self.gloo)
            return _Collective(self._latest, self, number)

    @contextmanager
    def translating_errors(self, peer: int | None = None, timeout_s: float = inf) -> Iterator[None]:
        """Raise ours for gloo's errors, in what concerns ``peer`` or all ranks; end the group."""
        try:
            yield
        except RuntimeError as exc:
            error = self._error_of(exc, peer, timeout_s)
            self.fail(error)
            raise error from exc

    def _error_of(self, exc: RuntimeError, peer: int | None, timeout_s: float) -> PeerError:
        """Return what this host's ranks say of each other, else the group's first error.

        Each says more than a connection that has ended, or a wait that gloo gave up.
        """
        if self._left:
            return GroupAborted("The group is destroyed.")
        pages, store = self.pages, self.error_store
        here = [rank for rank in pages.others if peer in (None, pages.group_ranks[rank])]
        if peer is None:  # a rank that has left in good order has ended this operation before
            here = [rank for rank in here if not pages.has_left(rank)]
        known = pages.find_error(here) or store.cause()
        if known is None and peer is None:
            gone = self._end_waits()
            if len(gone) > 1:  # one of them has ended its connections because of another
                wait_until(lambda: store.cause() is not None, _STORE_S)
                known = store.cause()
            peer = gone[0] if gone else None
        return known or gloo_error(exc, peer, store.group_size, timeout_s)

    # --- a user's messages ------------------------------------------------------------------------

    def message(
        self, call: str, flat: FlatTensor, peer: int | None, tag: int, limit_s: float
    ) -> SharedWork:
        """Begin to ``send`` to a rank, or to ``recv`` from one; from any where ``peer`` is None."""
        data = as_bytes(flat.data)
        with self.translating_errors(peer):
            if peer is None:
                work = self.gloo.recv_anysource([data], tag)
            else:
                work = getattr(self.gloo, call)([data], peer, tag)

        def drive(message: SharedWork, timeout_s: float | None) -> None:
            timeout_s = timeout_s or limit_s
            with self.translating_errors(peer, timeout_s):
                work.wait(datetime.timedelta(seconds=timeout_s))
            message.advance(0.0)
            message.notify()

        message = SharedWork(call, iter(()), [flat], [flat.tensor], limit_s, drive)
        message._source_rank = work._source_rank  # type: ignore[method-assign]
        return message

    # ----------------------------------------------------------------------------------------------

    def cut(self, *, broken: bool = False) -> None:
        """End the connection; if it is ``broken``, what was sent need not arrive."""
        self._left = not broken
        if self._gloo is None:
            return
        if broken or not self._is_idle():
            self._end_waits()
        held, self._gloo = [self._gloo], None
        held[0].abort()
        if self._is_idle():
            held.clear()
        else:
            # gloo never ends a wait for bytes of which some have been sent or have come; and its
            # destructor joins the thread that waits.
            threading.Thread(target=held.clear, name="phalanx gloo", daemon=True).start()

    def check(self) -> None:
        """Raise where the connection to a rank has ended that has not left in good order.

        A wait of gloo's does not learn of it where some of its bytes have been sent or have come.
        """
        for rank in self.others:
            try:
                self.gloo.recv([torch.empty(1)], self.ranks.index(rank), _CUT_TAG)
            except RuntimeError:
                if self.error_store.reached_by([rank]) != [LEFT]:
                    with self.translating_errors():
                        raise

    def _is_idle(self) -> bool:
        return self._latest is None or bool(self._latest.is_completed())

    def _end_waits(self) -> list[int]:
        """End all waits for others, here and there; return the ranks that were gone before.

        gloo's own ``abort`` lets waits continue, and they keep the connection, as does a failed one
        that the traceback of its error keeps. But a wait that takes too long has gloo close all
        that it has. A wait for a rank that is gone fails at once, and closes nothing; so each is
        waited for.
        """
        gone: list[int] = []
        if self._gloo is None:
            return gone
        for rank in self.others:
            try:
                self._gloo.recv([torch.empty(1)], self.ranks.index(rank), _CUT_TAG).wait(_AT_ONCE)
            except RuntimeError as exc:
                if not _TIMED_OUT.search(str(exc)):
                    gone.append(rank)
        return gone


class _Collective:
    """A collective of gloo's under way."""

    grace_s = _REPORT_S

    def __init__(self, work: Work, network: Network, number: int | None) -> None:
        self._work = work
        self._network = network
        self._number = number
        self._num_looks = 0

    def advance(self, patience_s: float) -> bool:
        """Wait for so long; tell whether it has ended."""
        if patience_s and not self._work.is_completed():
            with suppress(RuntimeError):  # this wait's time is over, which ends nothing
                self._work.wait(datetime.timedelta(seconds=patience_s))
        if not self._work.is_completed():
            return False
        with self._network.translating_errors():
            self._work.wait()
        return True

    def find_error(self, title: str) -> PeerError | None:
        """Return why it cannot end well, if a rank of this host has died or given up."""
        self._num_looks += 1
        if self._number is not None and self._num_looks == 1:
            self._network.error_store.say_reached(self._number)
        if self._num_looks % _CHECK_EVERY == 0:
            try:
                self._network.check()
            except PeerError as exc:
                return exc
        pages = self._network.pages
        # A rank that has left in good order has ended this operation before.
        return pages.find_error([one for one in pages.others if not pages.has_left(one)], 0, title)

    def timeout_error(self, title: str, timeout_s: float) -> PeerError:
        """Return the error that names who does not wait here; gloo itself does not say."""
        store, ranks = self._network.error_store, self._network.others
        late = ranks[0] if len(ranks) == 1 else None
        if self._number is not None:
            reached = dict(zip(ranks, store.reached_by(ranks) or [], strict=False))
            late = next((rank for rank in reached if reached[rank] < self._number), None)
        who = "No rank" if late is None else f"Rank {late}"
        came = "came" if late is None else "did not come"
        text = f"{who} of {store.group_size} {came} to {title}, over the network, within"
        return PeerTimeout(f"{text} {timeout_s:g} s.", late)


def gloo_error(exc: RuntimeError, rank: int | None, group_size: int, timeout_s: float) -> PeerError:
    """Return our error for one of gloo's that concerns ``rank``, or some rank."""
    who = "some rank" if rank is None else f"rank {rank}"
    if _TIMED_OUT.search(str(exc)):
        return PeerTimeout(
            f"{who.capitalize()} of {group_size} did not answer over the network within "
            f"{timeout_s:g} s.",
            rank,
        )
    return PeerLost(
        f"The connection to {who} of {group_size} is lost. Destroy the group and make a new one.",
        rank,
    )


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """Return what ``call`` returns, or None where it fails or takes longer."""
    found: list[T] = []

    def try_it() -> None:
        with suppress(RuntimeError):
            found.append(call())

    thread = threading.Thread(target=try_it, name="phalanx error store", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
