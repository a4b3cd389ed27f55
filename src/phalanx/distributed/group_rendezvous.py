"""The making of a group of the backend ``phalanx``, which this registers with torch.

The ranks of a new group find their shared memory through the store, and connect gloo:

    arrivals       counts the ranks that have come; each ``size`` of them are one generation, and
                   all other keys are the generation's own
    card/<rank>    every rank: its host and its process
    memory/<rank>  the first rank of each host: the region that it made, which the others map from
                   /proc/<pid>/fd/<fd>
    gloo/...       gloo's addresses; a rank that is connected to another knows that it has mapped

The region has no name, so no crash leaves anything behind. A rendezvous that failed leaves its
generation incomplete: the next group needs a separate store or prefix, as it gets from
`torch.distributed.new_group`.
"""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from math import inf

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from phalanx.clock import now_s
from phalanx.distributed.job_store import ranks_by_host, this_host
from phalanx.distributed.network import ErrorStore, Gloo, Network, gloo_error, open_gloo
from phalanx.distributed.process_group import NAME, SharedGroup
from phalanx.distributed.several_hosts import SeveralHosts
from phalanx.distributed.shared_memory import SharedMemory
from phalanx.distributed.status_pages import StatusPages
from phalanx.environment import read_attempt
from phalanx.errors import GroupAborted, PeerError, PeerLost
from phalanx.ipc import ProcessIdentity, Region, late_peers, wait_until
from phalanx.native import require_library

__all__ = ["NAME", "GroupRendezvous", "SharedGroup", "make_group"]


def make_group(
    store: Store,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
    look: Callable[[], None] = lambda: None,
) -> SharedGroup:
    """Make the group of these ranks, which alone meet in ``store``; ``torch.distributed`` calls it.

    Args:
        store: Where they meet.
        rank: Ours.
        size: How many come.
        timeout: How long all of it may take, and each operation later on.
        look: Called while another is waited for; raises a `PeerError` where that is in vain.
    """
    require_library("Process groups of phalanx")
    timeout_s = timeout.total_seconds()
    rendezvous = GroupRendezvous(store, rank, size, timeout_s, look)
    memory = rendezvous.share_memory()
    # Not the rendezvous' own: a rank that still connects is not to read an error of an operation.
    error_store = ErrorStore(PrefixStore("made/", rendezvous.store), rank, size)

    def connect(name: str, ranks: Sequence[int]) -> Network:
        return Network(rendezvous.connect(name, ranks), ranks, memory.pages, error_store)

    network = connect("all", range(size))
    networks = [network]
    collectives: SharedMemory | SeveralHosts = memory
    if len(rendezvous.hosts) > 1:
        firsts = [ranks[0] for ranks in rendezvous.hosts]
        leaders = connect("leaders", firsts) if rank in firsts else None
        networks += [leaders] if leaders else []
        collectives = SeveralHosts(memory, network, leaders, rendezvous.hosts)
    return SharedGroup(memory, collectives, networks, timeout_s)


class GroupRendezvous:
    """The making of one group of ``size`` ranks; all ranks do the same in the same order.

    It blocks until all have come. It and each method raise `PeerTimeout` where a rank does not
    come, and `PeerLost` where one on this host came and died, or the store is gone.

    Args:
        store, rank, size, timeout_s, look: As :func:`make_group` takes them.

    Attributes:
        store: The generation's namespace in the store.
        hosts: The ranks of each host.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout_s: float, look: Callable[[], None]
    ) -> None:
        self._look = look
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._deadline_s = now_s() + timeout_s
        here = this_host()
        self._processes: dict[int, ProcessIdentity] = {}  # by rank, of this host
        store = PrefixStore(f"phalanx/{read_attempt()}", store)  # one may serve all attempts
        try:
            generation = (store.add("arrivals", 1) - 1) // size
        except RuntimeError as exc:
            raise _store_lost(exc) from exc
        self.store = PrefixStore(f"{generation}", store)
        self._error_store = ErrorStore(self.store, rank, size)
        card, host_ids = [here, *ProcessIdentity.current()], []
        with self._reporting():
            self.store.set(f"card/{rank}", json.dumps(card))
            for other in range(size):
                host_id, *process = json.loads(self._wait_for("card", other))
                host_ids.append(host_id)
                if host_id == here:
                    self._processes[other] = ProcessIdentity(*process)
        self.hosts = ranks_by_host(host_ids)

    def share_memory(self) -> SharedMemory:
        """Return the memory that the ranks of this host share."""
        ranks = [*self._processes]
        first = ranks[0]
        with self._reporting():
            if self._rank == first:
                region = Region.create(SharedMemory.needed_bytes(len(ranks)), label="group")
                self.store.set(f"memory/{first}", str(region.fd))
            else:
                fd = int(self._wait_for("memory", first))
                try:
                    region = Region.borrow(self._processes[first].pid, fd, label="group")
                except PeerLost as exc:  # it may have left because of another rank
                    raise self._error_store.cause() or PeerLost(str(exc), first) from exc
            pages = StatusPages(region, ranks.index(self._rank), ranks, self._size)
            return SharedMemory(region, pages)

    def connect(self, name: str, ranks: Sequence[int]) -> Gloo:
        """Return gloo's connection between ``ranks``; blocks until all of them are connected.

        gloo waits for a rank that has died until its time is over. So a thread waits for gloo.

        Args:
            name: Of the connection; the group may have several.
            ranks: This one among them.
        """
        found: Future[Gloo] = Future()
        store = _PolledStore(PrefixStore(f"gloo/{name}", self.store))
        left_s = max(self._deadline_s - now_s(), 1e-3)
        on_one_host = len(self.hosts) == 1

        def run() -> None:
            try:
                place = ranks.index(self._rank)
                gloo = open_gloo(store, place, len(ranks), left_s, on_one_host=on_one_host)
                found.set_result(gloo)
            except BaseException as exc:
                found.set_exception(exc)

        with self._reporting():
            threading.Thread(target=run, name="phalanx gloo", daemon=True).start()
            wait_until(found.done, inf, self._look_for_deaths)  # gloo keeps the time
            error = found.exception()
            if isinstance(error, RuntimeError):
                self._look_for_deaths()  # gloo does not say whom it has lost
                raise gloo_error(error, None, self._size, self._timeout_s) from error
            return found.result()

    # --- waiting ----------------------------------------------------------------------------------

    def _wait_for(self, what: str, rank: int) -> bytes:
        key, left_s = f"{what}/{rank}", max(self._deadline_s - now_s(), 0.0)
        if not wait_until(lambda: self.store.check([key]), left_s, self._look_for_deaths):
            raise late_peers("Rank", [rank], self._size, "make the group", self._timeout_s)
        return bytes(self.store.get(key))

    def _look_for_deaths(self) -> None:
        self._look()
        for rank, process in self._processes.items():
            if not process.alive():
                text = f"Rank {rank} of {self._size} has died while the group was made."
                raise self._error_store.cause() or PeerLost(text, rank)  # it may be an echo
        if self.store.check(["error"]):
            raise self._error_store.cause() or GroupAborted(f"Some rank of {self._size} gave up.")

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Let the others know why we fail, in good time."""
        try:
            yield
        except PeerError as exc:
            self._error_store.write(exc)
            raise
        except RuntimeError as exc:
            raise self._error_store.cause() or _store_lost(exc) from exc


class _PolledStore(Store):
    """A store for gloo, which waits before each get; it asks ``store`` again and again.

    A client of torch's that waits for a key answers no other call meanwhile, and a second client
    would look up the name of its address, which may take seconds.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:  # type: ignore[override]
        if not wait_until(lambda: self._store.check(keys), timeout.total_seconds()):
            raise dist.DistStoreError(f"timed out waiting for {keys}")


def _store_lost(why: RuntimeError) -> PeerLost:
    return PeerLost(f"The store where the ranks meet must answer, but is gone: {why}")


# Here, and not in a function that somebody would have to call: importing the room is enough.
dist.Backend.register_backend(NAME, make_group, devices=["cpu"])
