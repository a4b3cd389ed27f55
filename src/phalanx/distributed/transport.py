"""The network between members of a group: bytes that go both ways at once, over gloo.

    member 0   head, data ──> 1      head, data ──> 2        all at once, then
               head, data <── 1      head, data <── 2        wait for everything

Before the first bytes of an operation goes a head that says which operation it is. So members in
different calls are told so, where gloo would write one tensor into another. A message of a user's
has no head: its tag tells it apart.

gloo blocks, and cannot be asked whether something has come. So a thread waits for each exchange,
without a limit, and wakes the engine afterwards. The engine keeps the time: it breaks the group,
which cuts the connection and so ends the thread.
"""

from __future__ import annotations

import datetime
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store, Work

from phalanx.clock import now_s
from phalanx.distributed.collective_buffers import RemoteNeed, Steps
from phalanx.distributed.error_store import ErrorStore
from phalanx.distributed.fingerprint import Desync
from phalanx.distributed.status_pages import Fingerprint
from phalanx.errors import PeerTimeout, StateError
from phalanx.ipc import fail_point, wait_until
from phalanx.torch_internals import gloo_options

__all__ = ["Gloo", "Transport", "gloo_between"]

_TAG = 1
_CUT_TAG = 2**31 - 1  # of a receive that no member answers
_HEAD_WORDS = 4
_JOIN_S = 1.0
_AT_ONCE = datetime.timedelta(milliseconds=1)
_NO_LIMIT = datetime.timedelta(days=1000)


Gloo = Any
"""A `ProcessGroupGloo`; torch's stubs do not know what can be called on one."""


def gloo_between(
    store: Store,
    member: int,
    size: int,
    timeout_s: float,
    interfaces: Sequence[str],
    *,
    lazy: bool,
) -> Gloo:
    """Connect ``size`` members.

    Args:
        store: Where they find each other's addresses; of these members alone.
        member: Our number among them.
        size: How many there are.
        timeout_s: How long a connection may take.
        interfaces: Of the network, by name; none for the one that has the host's name.
        lazy: Whether each pair connects when it is first used; else all do, and wait for all.

    Raises:
        PeerTimeout: They did not all come, or one left before all had connected.
    """
    options: Any = gloo_options(ProcessGroupGloo)
    options._timeout = datetime.timedelta(seconds=timeout_s)
    options._devices = [
        ProcessGroupGloo.create_device(interface=name, lazy_init=lazy) for name in interfaces
    ] or [ProcessGroupGloo.create_default_device(lazy_init=lazy)]
    begun_s = now_s()
    try:
        return ProcessGroupGloo(store, member, size, options)
    except RuntimeError as exc:
        raise PeerTimeout(
            f"{size} members did not connect over the network; gloo gave up after "
            f"{now_s() - begun_s:.1f} s of at most {timeout_s:g} s: {exc}. Either a member has "
            "ended or left the group, or the network is not the one that its host's name belongs "
            "to: name its interface in GLOO_SOCKET_IFNAME."
        ) from exc


class Transport:
    """A member's end.

    Args:
        connect: Makes the connection, when it is first used.
        member: Our number among the members.
        names: What each member is called in the group.
        timeout_s: How long a connection may take.
        error_store: Where the first error of the group stands.
        wake: Called, from a thread, when something is done.
        opened: Where members tell that they are connected, if each pair connects when first used.
            gloo would wait for a member that is not there for as long as a connection may take.

    Attributes:
        others: The other members.
        sends_wait: Whether a send waits for its receiver, which may ask for another tag first.
    """

    sends_wait = True

    def __init__(
        self,
        connect: Callable[[], Gloo],
        member: int,
        names: Sequence[int],
        timeout_s: float,
        error_store: ErrorStore,
        wake: Callable[[], None],
        opened: Store | None,
    ) -> None:
        self._connect = connect
        self._opened = opened
        self._connected: set[int] = set()  # members that this one has a connection to
        self._opening = threading.Lock()
        self._gloo: Gloo | None = None
        self._is_cut = False
        self._names = names
        self._member = member
        self._timeout_s = timeout_s
        self._error_store = error_store
        self._wake = wake
        self._threads: list[threading.Thread] = []
        self.others = [other for other in range(len(names)) if other != member]

    def swap(
        self,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
        fingerprint: Fingerprint | None,
    ) -> Steps:
        """Send tensors to members and receive others, all at once; both are flat.

        Args:
            sent: By receiver.
            received: By sender; they are filled.
            fingerprint: The operation, before its first bytes; None for further ones.

        Raises:
            PeerLost: A member is gone, or another rank because of which it has given up.
            Desync: Or in another operation.
            StateError: It sends more or less than is taken here.
        """
        return self._run(lambda need: self._swap(sent, received, fingerprint, need))

    def _swap(
        self,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
        fingerprint: Fingerprint | None,
        need: RemoteNeed,
    ) -> None:
        fail_point("exchange begun")
        if fingerprint is not None:
            own = {member: torch.tensor([*fingerprint, len(data)]) for member, data in sent.items()}
            heads = {member: torch.empty(_HEAD_WORDS, dtype=torch.int64) for member in received}
            self._exchange(own, heads, _TAG, need)
            for member, head in heads.items():
                self._check(fingerprint, member, head.tolist(), len(received[member]))
        self._exchange(_not_empty(sent), _not_empty(received), _TAG, need)

    def _exchange(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], tag: int, need: RemoteNeed
    ) -> None:
        """Send and receive, all at once, and wait."""
        works: list[tuple[int, Work]] = []
        for call, data_by_member in (("send", sent), ("recv", received)):
            for member, data in data_by_member.items():
                with self._awaiting(member, need):
                    works.append((member, self._post(call, data, member, tag)))
        for member, work in works:
            with self._awaiting(member, need):
                work.wait(_NO_LIMIT)

    def _check(self, ours: Fingerprint, member: int, head: list[int], length: int) -> None:
        *words, sent = head
        theirs = Fingerprint(*words)
        if theirs != ours:
            raise Desync(self._names[self._member], ours, self._names[member], theirs)
        if sent != length:
            raise StateError(
                f"`output_split_sizes` must fit what the others send, but rank "
                f"{self._names[member]} sends {sent} bytes to rank "
                f"{self._names[self._member]}, which takes {length}."
            )

    # --- messages of a user's ---------------------------------------------------------------------

    def send(self, data: Tensor, receiver: int, tag: int) -> Steps:
        """Send ``data``, which is flat; it ends when ``receiver`` takes it."""
        return self._run(lambda need: self._exchange({receiver: data}, {}, tag, need))

    def receive(self, into: Tensor, sender: int, tag: int) -> Steps:
        """Fill ``into``, which is flat, with the next message of ``tag`` from ``sender``."""
        return self._run(lambda need: self._exchange({}, {sender: into}, tag, need))

    def receive_any(self, into: Tensor, tag: int, found: list[int]) -> Steps:
        """Fill ``into`` with a message of ``tag`` from anybody; put the sender into ``found``."""

        def job(need: RemoteNeed) -> None:
            with self._awaiting(None, need):
                work = self.open().recv_anysource([into], tag)
                work.wait(_NO_LIMIT)
                found.append(work._source_rank())

        return self._run(job)

    # ----------------------------------------------------------------------------------------------

    def _run(self, job: Callable[[RemoteNeed], None]) -> Steps:
        """Have ``job`` done by a thread; the operation goes on when it is done."""
        need, ended = RemoteNeed(), Future[None]()

        def run() -> None:
            try:
                job(need)
            except BaseException as exc:
                ended.set_exception(exc)
            else:
                ended.set_result(None)
            self._wake()

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=run, name="phalanx gloo", daemon=True)
        self._threads.append(thread)
        thread.start()
        while not ended.done():
            yield need
        ended.result()

    @contextmanager
    def _awaiting(self, member: int | None, need: RemoteNeed) -> Iterator[None]:
        """Let ``need`` and errors name ``member``; None for any."""
        need.rank = None if member is None else self._names[member]
        with self._error_store.naming(need.rank, self._timeout_s):
            yield

    def _post(self, call: str, data: Tensor, member: int, tag: int) -> Work:
        """Begin to send to ``member`` or receive from it, when it has opened its end, too."""
        self.open()  # before: the other one may wait for us
        store = self._opened
        if store is not None and member not in self._connected:
            wait_until(lambda: self._is_cut or store.check([str(member)]), math.inf)
        work: Work = getattr(self.open(), call)([data], member, tag)
        self._connected.add(member)
        return work

    def open(self) -> Gloo:
        """Return the connection, made if there is none."""
        with self._opening:
            if self._is_cut:
                raise RuntimeError("the connection was cut")  # the caller says what that means
            if self._gloo is None:
                self._gloo = self._connect()
                if self._opened is not None:
                    self._opened.set(str(self._member), "")
            return self._gloo

    def cut(self, *, broken: bool = False) -> None:
        """End the connection: members that wait for this one learn so at once, as do our threads.

        gloo's own ``abort`` lets waits go on, and they keep the connection, as does a failed one
        that the traceback of its error keeps. But a wait that takes too long has gloo close all
        that it has. (A receive from any member goes on in its thread.) A wait for a member that is
        gone fails at once, and closes nothing; so each is waited for.

        Args:
            broken: An error ends it, and what was sent need not arrive.
        """
        self._is_cut = True
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            if broken or any(thread.is_alive() for thread in self._threads):
                for member in sorted(self._connected):
                    with suppress(RuntimeError):
                        gloo.recv([torch.empty(1)], member, _CUT_TAG).wait(_AT_ONCE)
            gloo.abort()

    def close(self) -> None:
        """End the connection and the threads."""
        self.cut()
        deadline_s = now_s() + _JOIN_S
        while self._threads:
            self._threads.pop().join(max(0.0, deadline_s - now_s()))


def _not_empty(data_by_member: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {member: data for member, data in data_by_member.items() if len(data)}
