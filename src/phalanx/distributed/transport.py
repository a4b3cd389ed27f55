"""The network between members of a group: bytes that go both ways at once, over gloo.

    member 0   head, data ──> 1      head, data ──> 2        all at once, then
               head, data <── 1      head, data <── 2        wait for everything

Before the first bytes of an operation goes a head that says which operation it is. So members in
different calls are told so, where gloo would write one tensor into another.

gloo blocks, so a thread does what a transport is given, in order, and wakes the engine afterwards.
"""

from __future__ import annotations

import datetime
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store, Work

from phalanx.clock import now_s
from phalanx.distributed.collective_buffers import Steps
from phalanx.distributed.error_store import ErrorStore
from phalanx.distributed.fingerprint import Desync
from phalanx.distributed.status_pages import Fingerprint
from phalanx.errors import PeerTimeout, StateError
from phalanx.ipc import fail_point, wait_until
from phalanx.torch_internals import gloo_options

__all__ = ["Gloo", "Limit", "Transport", "gloo_between"]

_TAG = 1
_HEAD_WORDS = 4
_JOIN_S = 1.0


Gloo = Any
"""A `ProcessGroupGloo`; torch's stubs do not know what can be called on one."""

_Job = tuple[Callable[[], None], Future[None]]


class Limit:
    """How long an operation may take, from when it was called."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._deadline_s = now_s() + timeout_s

    def left_s(self) -> float:
        """Return what is left of it; a millisecond where nothing is, for what is there already."""
        return max(0.001, self._deadline_s - now_s())


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
        PeerTimeout: They did not all come.
    """
    options: Any = gloo_options(ProcessGroupGloo)
    options._timeout = datetime.timedelta(seconds=timeout_s)
    options._devices = [
        ProcessGroupGloo.create_device(interface=name, lazy_init=lazy) for name in interfaces
    ] or [ProcessGroupGloo.create_default_device(lazy_init=lazy)]
    try:
        return ProcessGroupGloo(store, member, size, options)
    except RuntimeError as exc:
        raise PeerTimeout(
            f"{size} members did not connect over the network within {timeout_s:g} s: "
            f"{exc}. Name the interface of the network in GLOO_SOCKET_IFNAME."
        ) from exc


class Transport:
    """A member's end.

    Args:
        connect: Makes the connection, when it is first used.
        member: Our number among the members.
        names: What each member is called in the group.
        error_store: Where the first error of the group stands.
        wake: Called, from the thread, when something is done.
        opened: Where members tell that they are connected, if each pair connects when first used.
            gloo would wait for a member that is not there for as long as a connection may take.

    Attributes:
        others: The other members.
        limit: How long the operation under way may take.
    """

    limit: Limit

    def __init__(
        self,
        connect: Callable[[], Gloo],
        member: int,
        names: Sequence[int],
        error_store: ErrorStore,
        wake: Callable[[], None],
        opened: Store | None,
    ) -> None:
        self._connect = connect
        self._opened = opened
        self._met: set[int] = set()  # members that are known to be connected
        self._gloo: Gloo | None = None
        self._is_cut = False
        self._names = names
        self._member = member
        self._error_store = error_store
        self._wake = wake
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # None ends the thread
        self._thread: threading.Thread | None = None
        self.others = [other for other in range(len(names)) if other != member]

    def run(self, job: Callable[[], None]) -> Steps:
        """Have ``job`` done by the thread; the operation goes on when it is done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="phalanx gloo", daemon=True)
            self._thread.start()
        ended: Future[None] = Future()
        self._jobs.put((job, ended))
        while not ended.done():
            yield None
        ended.result()

    def _serve(self) -> None:
        while (found := self._jobs.get()) is not None:
            job, ended = found
            try:
                ended.set_result(job())
            except BaseException as exc:
                ended.set_exception(exc)
            self._wake()

    def swap(
        self,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
        fingerprint: Fingerprint | None,
    ) -> None:
        """Send tensors to members and receive others, all at once; both are flat.

        Args:
            sent: By receiver.
            received: By sender; they are filled.
            fingerprint: The operation, before its first bytes; None for further ones.

        Raises:
            PeerLost: A member is gone, or another rank because of which it has given up.
            PeerTimeout: Or one is late.
            Desync: Or in another operation.
            StateError: It sends more or less than is taken here.
        """
        fail_point("exchange begun")
        works: list[tuple[int, Work]] = []
        kept: list[Tensor] = []  # what is under way must live as long

        def send(member: int, data: Tensor) -> None:
            with self._naming(member):
                if len(data):
                    self._meet(member)
                    kept.append(data)
                    works.append((member, self.open().send([data], member, _TAG)))

        def receive(member: int, data: Tensor) -> None:
            with self._naming(member):
                if len(data):
                    self._meet(member)
                    works.append((member, self.open().recv([data], member, _TAG)))

        def wait() -> None:
            for member, work in works:
                with self._naming(member):
                    work.wait(datetime.timedelta(seconds=self.limit.left_s()))
            works.clear()

        heads = {member: torch.empty(_HEAD_WORDS, dtype=torch.int64) for member in received}
        if fingerprint is not None:
            for member, data in sent.items():
                send(member, torch.tensor([*fingerprint, len(data)]))
            for member, head in heads.items():
                receive(member, head)
            wait()
            for member, head in heads.items():
                self._check(fingerprint, member, head.tolist(), len(received[member]))
        for member, data in sent.items():
            send(member, data)
        for member, data in received.items():
            receive(member, data)
        wait()

    def open(self) -> Gloo:
        """Return the connection, made if there is none."""
        if self._is_cut:
            raise RuntimeError("the connection was cut")  # the caller says what that means
        if self._gloo is None:
            self._gloo = self._connect()
            if self._opened is not None:
                self._opened.set(str(self._member), "")
        return self._gloo

    def _meet(self, member: int) -> None:
        store = self._opened
        if store is None or member in self._met:
            return
        self.open()  # the other one may wait for us

        def is_open() -> bool:
            return self._is_cut or store.check([str(member)])

        if not wait_until(is_open, self.limit.left_s()):
            raise RuntimeError("timed out")  # the caller says what that means
        self._met.add(member)

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

    def _naming(self, member: int) -> AbstractContextManager[None]:
        return self._error_store.naming(self._names[member], self.limit.timeout_s)

    def cut(self) -> None:
        """End the connection: members that wait for this one learn so at once."""
        self._is_cut = True
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            gloo.abort()

    def close(self) -> None:
        """End the connection and the thread."""
        self.cut()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(_JOIN_S)
