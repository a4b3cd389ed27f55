"""The network between the ranks of a group, over gloo.

    a user's messages    gloo's own calls, which wait in C++
    sparse sums          gloo's collectives; the lane looks whether they have ended
    swap                 bytes between members, both ways at once:

        member 0   head, data ──> 1      head, data ──> 2        all at once, then
                   head, data <── 1      head, data <── 2        wait for everything

Before the first bytes of an operation goes a head that says which operation it is. So members in
different calls get an error, where gloo would write one tensor into another.

gloo blocks, and cannot be asked whether a message has come. So a thread waits for each swap,
without a limit. The lane keeps the time: it breaks the group, which cuts the connection and so ends
the thread.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store, Work

from phalanx.clock import now_s
from phalanx.distributed.error_store import ErrorStore
from phalanx.distributed.fingerprint import Desync
from phalanx.distributed.peer_errors import peer_error, remote_timeout_error
from phalanx.distributed.status_pages import LEFT, Fingerprint, StatusPages
from phalanx.distributed.tensors import FlatTensor, as_bytes
from phalanx.distributed.uncompiled_methods import uncompiled_methods
from phalanx.errors import PeerError, StateError
from phalanx.ipc import fail_point
from phalanx.torch_internals import gloo_options

__all__ = ["MessageWork", "Network", "open_gloo"]

_TAG = 2**31 - 2
_CUT_TAG = 2**31 - 1  # of a receive that no member answers
_HEAD_WORDS = 4
_JOIN_S = 1.0
_REPORT_S = 1.0  # the time that a rank of another host has to report a late rank there
_AT_ONCE = datetime.timedelta(milliseconds=1)
_NO_LIMIT = datetime.timedelta(days=1000)
_NO_TIME = datetime.timedelta(0)

Gloo = Any
"""A `ProcessGroupGloo`; torch's stubs do not know what can be called on one."""


def open_gloo(
    store: Store, rank: int, size: int, timeout_s: float, interfaces: Sequence[str]
) -> Gloo:
    """Return a gloo group whose ranks are all connected.

    Args:
        store: Where they find each other's addresses; of these ranks alone.
        rank: Ours.
        size: How many there are.
        timeout_s: How long the connections may take.
        interfaces: Of the network, by name; none for the one that has the host's name.
    """
    options: Any = gloo_options(ProcessGroupGloo)
    options._timeout = datetime.timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(interface=name) for name in interfaces] or [
        ProcessGroupGloo.create_default_device()
    ]
    return ProcessGroupGloo(store, rank, size, options)


class Network:
    """A rank's end.

    Args:
        gloo: The connection.
        rank: Ours.
        pages: Where the ranks of this host say whether they take part.
        error_store: Where the first error of the group stands.
        timeout_s: The limit of an operation whose call gives none.

    Attributes:
        fail: Called with the error of a message, to break the group.
    """

    fail: Callable[[BaseException], object]

    def __init__(
        self, gloo: Gloo, rank: int, pages: StatusPages, error_store: ErrorStore, timeout_s: float
    ) -> None:
        self._gloo: Gloo | None = gloo
        self._rank = rank
        self._pages = pages
        self._error_store = error_store
        self.timeout_s = timeout_s
        self._threads: list[threading.Thread] = []

    @property
    def gloo(self) -> Gloo:
        """The connection.

        Raises:
            RuntimeError: It was cut.
        """
        if self._gloo is None:
            raise RuntimeError("the connection was cut")  # the caller says what that means
        return self._gloo

    def swap(
        self,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
        fingerprint: Fingerprint | None,
    ) -> _Swap:
        """Begin to send flat tensors to ranks and to receive others, all at once.

        Args:
            sent: By receiver.
            received: By sender; they are filled.
            fingerprint: The operation, before its first bytes; None for further ones.
        """
        swap = _Swap(self._error_store.group_size)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(
            target=swap.run,
            args=(lambda: self._swap(sent, received, fingerprint, swap),),
            name="phalanx gloo",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()
        return swap

    def _swap(
        self,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
        fingerprint: Fingerprint | None,
        swap: _Swap,
    ) -> None:
        fail_point("exchange begun")
        if fingerprint is not None:
            own = {rank: torch.tensor([*fingerprint, len(data)]) for rank, data in sent.items()}
            heads = {rank: torch.empty(_HEAD_WORDS, dtype=torch.int64) for rank in received}
            self._exchange(own, heads, swap)
            for rank, head in heads.items():
                self._check(fingerprint, rank, head.tolist(), len(received[rank]))
        self._exchange(_not_empty(sent), _not_empty(received), swap)

    def _exchange(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], swap: _Swap
    ) -> None:
        works: list[tuple[int, Work]] = []
        for call, data_by_rank in (("send", sent), ("recv", received)):
            for rank, data in data_by_rank.items():
                with self._awaiting(rank, swap):
                    works.append((rank, getattr(self.gloo, call)([data], rank, _TAG)))
        for rank, work in works:
            with self._awaiting(rank, swap):
                work.wait(_NO_LIMIT)

    @contextmanager
    def _awaiting(self, rank: int, swap: _Swap) -> Iterator[None]:
        """Let errors name ``rank``."""
        swap.awaited = rank
        with self._error_store.naming(rank, self.timeout_s):
            yield

    def _check(self, ours: Fingerprint, rank: int, head: list[int], length: int) -> None:
        *words, sent = head
        theirs = Fingerprint(*words)
        if theirs != ours:
            raise Desync(self._rank, ours, rank, theirs)
        if sent != length:
            raise StateError(
                f"`output_split_sizes` must fit what the others send, but rank {rank} sends {sent} "
                f"bytes to rank {self._rank}, which takes {length}."
            )

    # --- gloo's own calls -------------------------------------------------------------------------

    def collective(self, begin: Callable[[Gloo], Work]) -> _Collective:
        """Begin a collective of gloo's."""
        with self._error_store.naming(None, self.timeout_s):
            return _Collective(begin(self.gloo), self._pages, self._error_store, self.timeout_s)

    def message(self, call: str, flat: FlatTensor, peer: int | None, tag: int) -> MessageWork:
        """Begin to ``send`` to a rank, or to ``recv`` from one; from any where ``peer`` is None."""
        data = as_bytes(flat.data)
        with self.explaining(peer):
            if peer is None:
                work = self.gloo.recv_anysource([data], tag)
            else:
                work = getattr(self.gloo, call)([data], peer, tag)
        return MessageWork(work, flat, peer, self)

    @contextmanager
    def explaining(self, peer: int | None, timeout_s: float | None = None) -> Iterator[None]:
        """Raise ours for gloo's errors in a message to or from ``peer``."""
        try:
            with self._error_store.naming(peer, timeout_s or self.timeout_s):
                yield
        except PeerError as exc:
            here = [index for index, name in enumerate(self._pages.names) if peer in (None, name)]
            known = peer_error(self._pages, [each for each in here if each != self._pages.rank], 0)
            self.fail(known or exc)
            if known is not None:
                raise known from exc
            raise

    # ----------------------------------------------------------------------------------------------

    def cut(self, *, broken: bool = False) -> None:
        """End the connection: ranks that wait for this one learn so at once, as do our threads.

        gloo's own ``abort`` lets waits go on, and they keep the connection, as does a failed one
        that the traceback of its error keeps. But a wait that takes too long has gloo close all
        that it has. A wait for a rank that is gone fails at once, and closes nothing; so each is
        waited for.

        Args:
            broken: An error ends it, and what was sent need not arrive.
        """
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            if broken or any(thread.is_alive() for thread in self._threads):
                for rank in set(range(self._error_store.group_size)) - {self._rank}:
                    with suppress(RuntimeError):
                        gloo.recv([torch.empty(1)], rank, _CUT_TAG).wait(_AT_ONCE)
            gloo.abort()

    def close(self) -> None:
        """End the connection and the threads."""
        self.cut()
        deadline_s = now_s() + _JOIN_S
        while self._threads:
            self._threads.pop().join(max(0.0, deadline_s - now_s()))


class _Swap:
    """A `Network.swap` under way.

    Attributes:
        awaited: The rank that it waits for now.
    """

    grace_s = _REPORT_S

    def __init__(self, group_size: int) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._group_size = group_size
        self.awaited: int | None = None

    def run(self, job: Callable[[], None]) -> None:
        """Do the job, in a thread."""
        try:
            job()
        except BaseException as exc:
            self._error = exc
        self._ended.set()

    def advance(self, patience_s: float) -> bool:
        """Wait for so long; tell whether it has ended."""
        if not self._ended.wait(patience_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def find_error(self, title: str) -> None:
        """Return nothing: an error comes from the thread."""

    def timeout_error(self, title: str, timeout_s: float) -> PeerError:
        """Return the error that names the rank that it waits for."""
        return remote_timeout_error(self.awaited, self._group_size, title, timeout_s)


class _Collective:
    """A collective of gloo's under way."""

    grace_s = _REPORT_S

    def __init__(
        self, work: Work, pages: StatusPages, error_store: ErrorStore, timeout_s: float
    ) -> None:
        self._work = work
        self._pages = pages
        self._error_store = error_store
        self._timeout_s = timeout_s

    def advance(self, patience_s: float) -> bool:
        """Wait for so long; tell whether it has ended."""
        if patience_s and not self._work.is_completed():
            with suppress(RuntimeError):  # this wait's time is over, which ends nothing
                self._work.wait(datetime.timedelta(seconds=patience_s))
        if not self._work.is_completed():
            return False
        with self._error_store.naming(None, self._timeout_s):
            self._work.wait()
        return True

    def find_error(self, title: str) -> PeerError | None:
        """Return why it cannot end well, if a rank of this host has died or given up."""
        pages = self._pages
        # A rank that has left in good order has ended this operation before.
        here = [rank for rank in pages.others if pages.state_of(rank)[0] != LEFT]
        return peer_error(pages, here, 0, title)

    def timeout_error(self, title: str, timeout_s: float) -> PeerError:
        """Return an error without a name: gloo does not say which rank is late."""
        return remote_timeout_error(None, self._error_store.group_size, title, timeout_s)


@uncompiled_methods
class MessageWork(dist.Work):
    """A message under way."""

    def __init__(self, work: Work, flat: FlatTensor, peer: int | None, network: Network) -> None:
        super().__init__()
        self._work, self._flat, self._peer, self._network = work, flat, peer, network
        self._ended = False

    def wait(self, timeout: datetime.timedelta = _NO_TIME) -> bool:
        """Block until the message has been taken, or has come; raise if it cannot."""
        if not self._ended:
            seconds = timeout.total_seconds() or self._network.timeout_s
            with self._network.explaining(self._peer, seconds):
                self._work.wait(datetime.timedelta(seconds=seconds))
            self._flat.write_back()
            self._ended = True
        return True

    def synchronize(self) -> None:
        """Do what :meth:`wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Tell whether :meth:`wait` has ended; gloo cannot be asked before."""
        return self._ended

    def result(self) -> list[Tensor]:
        """Return the tensor."""
        return [self._flat.tensor]

    def source_rank(self) -> int:
        """Return the sender of a received message."""
        return int(self._work._source_rank()) if self._peer is None else self._peer

    _source_rank = source_rank


def _not_empty(data_by_rank: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {rank: data for rank, data in data_by_rank.items() if len(data)}
