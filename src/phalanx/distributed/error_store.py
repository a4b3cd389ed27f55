"""The first error of a group, told across hosts through the store that the group was made with."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from torch.distributed import Store

from phalanx.errors import GroupAborted, PeerError, PeerLost, PeerTimeout
from phalanx.ipc import wait_until

__all__ = ["TIMED_OUT", "ErrorStore"]

_STORE_S = 1.0
TIMED_OUT = re.compile("time(d )?out", re.IGNORECASE)
"""The words in errors of gloo and of stores by which a timeout is recognized."""
T = TypeVar("T")
_KINDS: dict[str, type[PeerError]] = {kind.__name__: kind for kind in (PeerLost, PeerTimeout)}


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

    def read(self) -> PeerError | None:
        """Return the error that was written first, if any."""
        told = _within(_STORE_S, lambda: self._get("error"))
        if told is None:
            return None
        kind, rank, text = json.loads(told)
        return _KINDS.get(kind, GroupAborted)(text, rank)

    def _cause(self) -> PeerError | None:
        """Return the error that was written first, but not that we are lost: an echo of our own."""
        said = self.read()
        return None if isinstance(said, PeerLost) and said.rank == self._rank else said

    def say_waiting(self, number: int) -> None:
        """Say that this rank waits for others in the operation ``number``."""
        _within(_STORE_S, lambda: self._store.set(f"waits/{self._rank}", str(number)))

    def find_late(self, ranks: Sequence[int], number: int) -> int | None:
        """Return the first of ``ranks`` that has not said that it waits in ``number``."""

        def look() -> int | None:
            waits = (int(self._get(f"waits/{rank}") or 0) >= number for rank in ranks)
            return next((rank for rank, comes in zip(ranks, waits, strict=True) if not comes), None)

        return _within(_STORE_S, look)

    def say_left(self) -> None:
        """Say that this rank leaves, and no operation waits for it."""
        _within(_STORE_S, lambda: self._store.set(f"left/{self._rank}", ""))

    def has_left(self, rank: int) -> bool:
        """Tell whether ``rank`` has said so."""
        return bool(_within(_STORE_S, lambda: self._store.check([f"left/{rank}"])))

    def _get(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None

    @contextmanager
    def naming(
        self, rank: int | None, timeout_s: float, find: Callable[[], list[int]] = list
    ) -> Iterator[None]:
        """Raise ours for gloo's errors: the group's first, or one that names the rank they concern.

        Where they concern all (None), ``find`` finds out which ranks are gone.
        """
        try:
            yield
        except RuntimeError as exc:
            cause = self._cause()
            if cause is None and rank is None:
                gone = find()
                if len(gone) > 1:  # one of them has ended its connections because of another
                    wait_until(lambda: self._cause() is not None, _STORE_S)
                    cause = self._cause()
                rank = gone[0] if gone else None
            if cause is not None:
                raise cause from exc
            who = "some rank" if rank is None else f"rank {rank}"
            if TIMED_OUT.search(str(exc)):
                raise PeerTimeout(
                    f"{who.capitalize()} of {self.group_size} did not answer over the network "
                    f"within {timeout_s:g} s.",
                    rank,
                ) from exc
            raise PeerLost(
                f"The connection to {who} of {self.group_size} is lost. Destroy the group and make "
                "a new one.",
                rank,
            ) from exc


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """Call for as long as that: a store on a host that has vanished never answers."""
    found: list[T] = []

    def try_it() -> None:
        with suppress(RuntimeError):
            found.append(call())

    thread = threading.Thread(target=try_it, name="phalanx error store", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
