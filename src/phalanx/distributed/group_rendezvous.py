"""How the ranks of a new group find each other's memory: through torch.distributed's store.

    common namespace   each rank says hello; rank 0 calls those that it has heard, and names a
                       namespace for this group alone
    group's namespace  each that was called comes; rank 0 opens it when all have, and clears the
                       common one; gloo connects all; on each host, the first makes the region; the
                       others map /proc/<pid>/fd/<fd>

The region has no name, so nothing is left behind by whatever crash.

A store may outlive a group, and another group may be made under the same name, also after a
rendezvous that failed halfway. So every hello holds a word that nobody has said before: a rank that
reads its own word was heard in this rendezvous, and the group's namespace is named by rank 0's.
Once that is open, nothing of this rendezvous is in the common namespace, and when all have left,
nothing is in the group's.

A hello of a process that is gone may be of a rendezvous before, so it counts as none; but a process
that was alive in this one and is gone has died in it. A death before rank 0 has heard that rank is
noticed at the deadline only, unless the caller knows the processes and looks itself.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, Store

from phalanx.clock import now_s, pause
from phalanx.distributed.error_store import ErrorStore
from phalanx.distributed.hosts import Hosts, hosts_of, this_host
from phalanx.distributed.network import Gloo, open_gloo
from phalanx.distributed.shared_memory import SharedMemory
from phalanx.distributed.status_pages import StatusPages
from phalanx.errors import GroupAborted, PeerError, PeerLost
from phalanx.ipc import ProcessIdentity, Region, fence, late_peers

__all__ = ["GroupRendezvous"]

_FIRST_PAUSE_S = 1e-4
_LONGEST_PAUSE_S = 10e-3
_SHOWN_BYTES = 60
_GLOO, _GLOO_KEYS = "gloo", "gloo/0"  # where gloo's ranks write their addresses


class _Hello(NamedTuple):
    word: str
    host: str
    pid: int
    start_ticks: int

    @classmethod
    def of_this_process(cls) -> _Hello:
        return cls(secrets.token_hex(8), this_host(), *ProcessIdentity.current())


# What the store holds is a claim: anybody can write there. So its shape is looked at,
# and a region is used only where it turns out to be one.


def _read(key: str, text: bytes, is_right: Callable[[object], bool]) -> Any:  # Any: JSON
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not is_right(found):
        raise _not_ours(key, repr(text[:_SHOWN_BYTES]))
    return found


def _not_ours(key: str, text: str) -> PeerError:
    return PeerError(
        f"The store where the ranks meet holds {text} as `{key}`, which no rank of the group has "
        "written. Use a store that nothing else writes to, and one version of Phalanx."
    )


def _is_number(found: object) -> bool:
    return type(found) is int and found >= 0


def _is_word(found: object) -> bool:
    return isinstance(found, str) and re.fullmatch("[0-9a-f]{16}", found) is not None


def _is_hello(found: object) -> bool:
    hello = found if isinstance(found, list) and len(found) == len(_Hello._fields) else [None] * 4
    word, host, pid, ticks = hello
    return _is_word(word) and isinstance(host, str) and _is_number(pid) and _is_number(ticks)


class GroupRendezvous:
    """The making of one group of ``size`` ranks; all ranks do the same in the same order.

    Args:
        store: Where they meet.
        rank: Ours.
        size: How many come.
        timeout_s: How long all of it may take.
        look: Called while another is waited for; raises a `PeerError` where that is in vain.

    Attributes:
        store: The group's namespace in the store, which no other uses; known with the hosts.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._look = look
        self._common = PrefixStore("phalanx/", store)
        self.store: Store = self._common
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._deadline_s = now_s() + timeout_s
        self._pause_s = _FIRST_PAUSE_S
        self._me = _Hello.of_this_process()
        self._heard: list[_Hello | None] = [None] * size
        self._met: set[str] = set()  # words of the ranks seen alive in this rendezvous
        self._error_store: ErrorStore | None = None

    def find_hosts(self) -> Hosts:
        """Return the ranks of each host.

        Raises:
            PeerTimeout: A rank did not come.
            PeerLost: A rank on this host came and died, or the store is gone.

        Blocks: Until all have come.
        """
        with self._told():
            self._common.set(f"hello/{self.rank}", json.dumps(self._me))
            if self.rank == 0:
                self._receive()
            else:
                self._come()
        hellos = [hello for hello in self._heard if hello]
        self._met.update(hello.word for hello in hellos)
        return hosts_of([hello.host for hello in hellos])

    def connect(self, interfaces: Sequence[str]) -> Gloo:
        """Return gloo's connection to all ranks.

        gloo waits for a rank that has died until its time is over. So a thread waits for gloo.

        Args:
            interfaces: Of the network, by name; none for the one that has the host's name.

        Raises:
            PeerTimeout: A rank did not come.
            PeerLost: A rank on this host died, or the store is gone.

        Blocks: Until all are connected.
        """
        found: Future[Gloo] = Future()
        store = PrefixStore(_GLOO, self.store)
        left_s = max(self._deadline_s - now_s(), 1e-3)

        def run() -> None:
            try:
                found.set_result(open_gloo(store, self.rank, self.size, left_s, interfaces))
            except BaseException as exc:
                found.set_exception(exc)

        assert self._error_store is not None
        with self._told(), self._error_store.naming(None, self._timeout_s):
            threading.Thread(target=run, name="phalanx gloo", daemon=True).start()
            self._pause_s = _FIRST_PAUSE_S
            while not found.done():
                self._look_for_deaths()
                self._pause()
            return found.result()

    def share_memory(self, ranks: Sequence[int]) -> SharedMemory:
        """Return the memory that ``ranks``, which are on this host, share.

        Raises:
            PeerTimeout: One of them did not come.
            PeerLost: One of them died, or the store is gone.

        Blocks: Until all of them have come.
        """
        with self._told():
            return self._map(ranks)

    # --- the common namespace ---------------------------------------------------------------------

    def _receive(self) -> None:
        """As rank 0: call ranks that said hello, again after a new hello, until all are here."""
        self._enter(self._me.word)
        absent = list(range(self.size))
        while absent:
            heard = [self._hello(r) if r in absent else self._heard[r] for r in range(self.size)]
            if heard != self._heard:
                self._heard, self._pause_s = heard, _FIRST_PAUSE_S
                self.store.set("heard", json.dumps(heard))
                self._common.set("called", json.dumps([hello and hello.word for hello in heard]))
            absent = [r for r in absent if r and not self.store.check([f"here/{r}"])]
            if absent:
                self._rest([r for r in absent if self._heard[r] is None] or absent)
        for rank in range(self.size):
            self._common.delete_key(f"hello/{rank}")
        self._common.delete_key("called")
        self.store.set("open", "1")

    def _come(self) -> None:
        """As another rank: come when rank 0 has heard us, and wait until all have."""
        while (name := self._called_to()) is None:
            self._heard[0] = self._hello(0)
            self._rest([0])
        self._enter(name)
        self._met.add(name)  # rank 0's word: it has lived to call us
        self.store.set(f"here/{self.rank}", "1")
        while not self.store.check(["open"]):
            self._read_heard()
            self._rest([r for r, hello in enumerate(self._heard) if hello is None] or [0])
        self._read_heard()

    def _enter(self, name: str) -> None:
        self.store = PrefixStore(f"{name}/", self._common)
        self._error_store = ErrorStore(self.store, self.rank, self.size)
        self._pause_s = _FIRST_PAUSE_S

    def _hello(self, rank: int) -> _Hello | None:
        key = f"hello/{rank}"
        if not self._common.check([key]):
            return None
        hello = _Hello(*_read(key, self._common.get(key), _is_hello))
        is_old = self._is_dead(hello) and hello.word not in self._met
        return None if is_old else hello

    def _called_to(self) -> str | None:
        """Return whose namespace we were called to; a call from before does not have our word."""
        if not self._common.check(["called"]):
            return None
        words: list[str] = _read("called", self._common.get("called"), self._each(_is_word))
        return words[0] if words[self.rank] == self._me.word else None

    def _read_heard(self) -> None:
        heard = _read("heard", self.store.get("heard"), self._each(_is_hello))
        self._heard = [hello and _Hello(*hello) for hello in heard]

    def _each(self, is_right: Callable[[object], bool]) -> Callable[[object], bool]:
        """Return a check that there is a list, with an entry or None for each rank."""
        return lambda found: (
            isinstance(found, list)
            and len(found) == self.size
            and all(one is None or is_right(one) for one in found)
        )

    # --- the group's namespace --------------------------------------------------------------------

    def _map(self, ranks: Sequence[int]) -> SharedMemory:
        first = ranks[0]
        needed_bytes = SharedMemory.needed_bytes(len(ranks))
        if self.rank == first:
            region = Region.create(needed_bytes, label="group")
        else:
            region = self._borrow(first, len(ranks), needed_bytes)
        pages = StatusPages(region, ranks.index(self.rank), ranks, self.size)
        fence()
        # Of the cards only the first's says anything; the others' pages are in the region then.
        self.store.set(f"card/{self.rank}", str(region.fd))
        for rank in ranks:
            self._wait_for(f"card/{rank}", rank)
        memory = SharedMemory(region, pages)
        # All have mapped the region, so that the first may go as soon as it likes.
        self.store.set(f"mapped/{self.rank}", "1")
        for rank in ranks:
            self._wait_for(f"mapped/{rank}", rank)
        self._tidy()
        return memory

    def _borrow(self, first: int, size: int, needed_bytes: int) -> Region:
        """Map the region of rank ``first``, if it is what the store says that it is."""
        hello = self._heard[first]
        assert hello is not None
        fd = _read(f"card/{first}", self._wait_for(f"card/{first}", first), _is_number)
        try:
            region = Region.borrow(hello.pid, fd, label="group")
        except PeerLost:
            self._rest([first])  # its maker gave up: because a rank died, as a rule
            raise
        maker = ProcessIdentity(hello.pid, hello.start_ticks)
        if region.nbytes < needed_bytes or not StatusPages.is_in(region, 0, size, maker):
            region.close()
            raise _not_ours(f"card/{first}", str(fd))
        return region

    def _wait_for(self, key: str, rank: int) -> bytes:
        self._pause_s = _FIRST_PAUSE_S
        while not self.store.check([key]):
            self._rest([rank])
        return bytes(self.store.get(key))

    def _tidy(self) -> None:
        """Delete the keys that all have read, so that the store does not grow with each group."""
        if self.store.add("left", 1) == self.size:
            for rank in range(self.size):
                for what in ("here", "card", "mapped", _GLOO_KEYS):
                    self.store.delete_key(f"{what}/{rank}")
            for key in ("heard", "open", "left"):
                self.store.delete_key(key)

    # --- waiting ----------------------------------------------------------------------------------

    def _rest(self, awaited: Sequence[int]) -> None:
        """Wait a moment for the first of ``awaited``, unless it is in vain."""
        self._look_for_deaths()
        if now_s() >= self._deadline_s:
            raise late_peers("Rank", awaited[:1], self.size, "make the group", self._timeout_s)
        self._pause()

    def _pause(self) -> None:
        pause(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _look_for_deaths(self) -> None:
        self._look()
        for rank, hello in enumerate(self._heard):
            if hello and self._is_dead(hello) and hello.word in self._met:
                raise PeerLost(
                    f"Rank {rank} of {self.size} has died while the group is made. Make a new one.",
                    rank,
                )
        if self._error_store and self.store.check(["error"]):
            raise self._error_store.read() or GroupAborted(f"Some rank of {self.size} gave up.")

    def _is_dead(self, hello: _Hello) -> bool:
        """Tell whether the process of a hello is gone; of another host nobody here can know."""
        if hello.host != self._me.host:
            return False
        if ProcessIdentity(hello.pid, hello.start_ticks).alive():
            self._met.add(hello.word)
            return False
        return True

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Let the others know why we fail, in good time."""
        try:
            yield
        except PeerError as exc:
            if self._error_store:
                self._error_store.write(exc)
            raise
        except RuntimeError as exc:
            raise PeerLost(
                f"The store where the ranks meet does not answer ({exc}). Most likely the process "
                "that keeps it has ended.",
            ) from exc
