"""The memory of a table, as one process uses it: a list of parts, on this host and on others.

A call is cut over the parts (cut.py). This host's are done where they lie; what is asked of other
hosts is under way meanwhile. Each host's part is a table of its own there, of which all workers of
the run are workers (host_service.py). So an add is whole or absent per host, and a round is in on a
host when all workers have arrived there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from phalanx.errors import PhalanxError
from phalanx.ipc import Waiting, fail_point, fail_points
from phalanx.memory import all_within
from phalanx.tables.own_part import OwnPart
from phalanx.tables.part import Entry
from phalanx.tables.spec import TableSpec
from phalanx.tables.values import outside, refuse_nonfinite

if TYPE_CHECKING:  # else runs on one host would import what speaks to others
    from phalanx.cluster import RemoteCall
    from phalanx.tables.remote_part import RemoteHost, RemotePart

READ_POINTS = ("before read", "reader's lock held", "rows read")
"""Fail points of a get, in order; it takes a lock only where adds overtake it."""

_CALL_S = 30.0  # where a caller gives no deadline

T = TypeVar("T")


class Router:
    """All parts of a table, as one worker uses them.

    Args:
        spec: The table, of all hosts.
        here: This host's part.
        worker: The worker's number.
        remotes: The other hosts, as the worker reaches them.
    """

    def __init__(
        self, spec: TableSpec, here: OwnPart, worker: int, remotes: Sequence[RemoteHost] = ()
    ) -> None:
        self.spec = spec
        self.here = here
        self._part = here.part
        self._cut = here.cut
        self._worker = worker
        num_hosts = here.cut.num_parts
        self._others = {each.endpoint.host: each.part(spec, num_hosts) for each in remotes}
        # Held while adds go to other hosts: they are numbered, and taken in the order of their
        # numbers, so that one that comes late is taken for a repetition. Nor may the worker's round
        # change meanwhile.
        self._turn = threading.Lock()
        in_order = spec.staleness.is_bulk_synchronous or spec.updater.remembers
        self._looks_itself = spec.has_keys or not (self._others or in_order)

    def _all_parts(self) -> list[Any]:
        # Any: a `KeyPart` has more methods than a `TablePart`.
        parts: list[Any] = list(self._others.values())
        parts.insert(self._cut.own, self._part)
        return parts

    # --- the first value --------------------------------------------------------------------------

    def open(self, init: Any, timeout_s: float) -> None:  # Any: as `OwnPart.open`
        """Fill all parts as the master, or wait until the master has; then begin.

        Raises:
            PeerTimeout: The master did not open the table; ``.rank`` is its number.
        """
        whole = not isinstance(init, Tensor) or init.dim() == 0 or self.spec.has_keys
        waiting, cut = Waiting(timeout_s), self._cut
        self.here.open(self._worker, init if whole else init[cut.span(cut.own)], timeout_s)
        for index, part in self._others.items():
            part.open(init if whole else init[cut.span(index)], waiting.remaining_s())

    # --- reading ----------------------------------------------------------------------------------

    def refuse_outside(self, rows: Tensor | None) -> None:
        """Raise if a row is outside the table, unless :meth:`read` and :meth:`add` look themselves.

        Raises:
            ConfigError: One is.
        """
        if not (self._looks_itself or rows is None or all_within(rows, self.spec.rows)):
            raise outside(rows, self.spec)

    def read(self, rows: Tensor | None, out: Tensor, timeout_s: float) -> None:
        """Copy rows, checked, into ``out``."""
        if fail_points.fault is not None:
            fail_point("before read")
        if not self._others or self._cut.is_own(rows):
            self._part.read(rows, out, timeout_s)
        else:
            self._read_parts(rows, out, timeout_s)
        if fail_points.fault is not None:
            fail_point("rows read")

    def _read_parts(self, rows: Tensor | None, out: Tensor, timeout_s: float) -> None:
        waiting, (order, shares) = Waiting(timeout_s), self._cut.shares(rows)
        found = out if order is None else torch.empty_like(out)
        self._ask(
            {share.part: (share.rows, found[share.span]) for share in shares},
            lambda part, wanted: part.begin_read(*wanted, waiting.remaining_s()),
            lambda wanted: self._part.read(*wanted, waiting.remaining_s()),
        )
        if order is not None:
            # The inverse of `order`, because selecting rows is four times as fast as placing them.
            ascending = torch.arange(order.numel(), device="cpu")
            back = torch.empty_like(order).scatter_(0, order, ascending)
            torch.index_select(found, 0, back, out=out)

    def _ask(
        self,
        asked: dict[int, T],
        begin: Callable[[RemotePart, T], RemoteCall],
        here: Callable[[T], object],
    ) -> None:
        """Ask parts, by index, each for its own; this host's does ``here`` meanwhile."""
        own = self._cut.own
        calls = [partial(begin, self._others[i], each) for i, each in asked.items() if i != own]
        ask(calls, partial(here, asked[own]) if own in asked else bool)

    # --- changing ---------------------------------------------------------------------------------

    def add(self, entry: Entry, timeout_s: float) -> None:
        """Take one add, whole or not at all on each host; one with a number, once."""
        if not self._others or self._cut.is_own(entry.rows):
            self._part.add(entry, timeout_s)
        else:
            refuse_nonfinite(entry.delta, self.spec, "delta")
            waiting = Waiting(timeout_s)
            with self._turn:
                self._ask(
                    self._cut_add(entry),
                    lambda part, each: part.begin_add(each, waiting.remaining_s()),
                    lambda each: self._part.add(each, timeout_s),
                )

    def _cut_add(self, entry: Entry) -> dict[int, Entry]:
        """Cut an add over the parts, by their index."""
        order, shares = self._cut.shares(entry.rows)
        delta = entry.delta if order is None else entry.delta[order]
        return {
            share.part: entry._replace(rows=share.rows, delta=delta[share.span]) for share in shares
        }

    # --- rounds -----------------------------------------------------------------------------------

    def put(self, entry: Entry, timeout_s: float) -> None:
        """Log an add for its worker's round, on every host that has rows of it."""
        refuse_nonfinite(entry.delta, self.spec, "delta")
        rounds = self.here.rounds
        if not self._others:
            rounds.put(entry, timeout_s)
            return
        with self._turn:
            number = rounds.clock_of(entry.worker) + 1
            self._ask(
                self._cut_add(entry),
                lambda part, each: part.begin_add(each, timeout_s, number),
                lambda each: rounds.put(each, timeout_s, number),
            )

    def arrive(self) -> int:
        """Say that the worker has put down all of its round, and return it."""
        with self._turn:  # no thread of the worker puts anything down meanwhile
            number = self.here.rounds.arrive(self._worker)
        ask(partial(part.begin_arrive, number, _CALL_S) for part in self._others.values())
        return number

    def finish(self, number: int, timeout_s: float) -> None:
        """Wait until the round is in on every host; see :meth:`Rounds.finish`."""
        ask(
            (partial(part.begin_finish, number, timeout_s) for part in self._others.values()),
            partial(self.here.rounds.finish, number, timeout_s),
        )

    # --- all of it --------------------------------------------------------------------------------

    def copy_all(self, timeout_s: float) -> list[Tensor]:
        """Return copies of the values and of each state; of a keys table the keys before them.

        Each part's are of one moment; keys ascend.
        """
        found = [part.copy_all(timeout_s) for part in self._all_parts()]
        copies = found[0] if len(found) == 1 else [torch.cat(p) for p in zip(*found, strict=True)]
        if not self.spec.has_keys:
            return copies
        order = copies[0].argsort()
        return [each[order] for each in copies]

    def replace_all(self, parts: list[Tensor], timeout_s: float) -> None:
        """Replace everything by what :meth:`copy_all` returned."""
        of_part: Callable[[int], Any] = self._cut.span  # Any: what a tensor may be indexed by
        if self.spec.has_keys:
            owners = torch.from_numpy(self._cut.owners(parts[0].numpy()).astype("int64"))
            of_part = owners.__eq__
        for index, part in enumerate(self._all_parts()):
            part.replace_all([each[of_part(index)] for each in parts], timeout_s)

    def num_keys(self) -> int:
        """Return how many keys are there."""
        return sum(part.num_keys(_CALL_S) for part in self._all_parts())

    def keys(self, timeout_s: float) -> Tensor:
        """Return the keys that are there, in ascending order."""
        return torch.cat([part.keys(timeout_s) for part in self._all_parts()]).sort().values

    def close(self) -> None:
        """Let go of the memory, also where somebody keeps a handle of the table."""
        for each in (self.here, self):  # the parts refer to `here`, and would keep each other
            vars(each).clear()


def ask(begin: Iterable[Callable[[], RemoteCall]], here: Callable[[], object] = bool) -> None:
    """Begin each call, do this host's part meanwhile, and wait for all that have begun.

    The error of a host that does not answer comes before all others, since others may have waited
    for it; notes on an error say which hosts have done their parts.
    """
    calls: list[RemoteCall] = []
    errors: list[tuple[bool, PhalanxError]] = []  # each after whether there was an answer
    done: list[str] = []
    try:
        try:
            for each in begin:
                calls.append(each())
            here()
        except PhalanxError as exc:
            errors.append((True, exc))
        for call in calls:
            try:
                call.wait()
                done.append(f"{call.host} has done its part of {call.title}.")
            except PhalanxError as exc:
                errors.append((call.answered, exc))
    finally:
        for call in calls:  # an answer would come into memory that is the caller's again
            call.abandon()
    if errors:
        error = min(errors, key=lambda each: each[0])[1]
        for note in done:
            error.add_note(note)
        raise error
