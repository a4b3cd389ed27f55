"""The memory of a table, as one process uses it: a list of parts, on this host and on others.

    rows   0 1 2 3 │ 4 5 6 7 │ 8 9 10     of numbered rows each host has a range;
    host         0 │       1 │      2     of keys, those that hash to it

A call is cut over the parts. This host's are done where they lie; what is asked of other hosts is
under way meanwhile. Each host's part is a table of its own there, of which all workers of the run
are workers (host_service.py). So an add is whole or absent per host, and a round is in on a host
when all workers have arrived there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.errors import PhalanxError
from phalanx.ipc import Mutex, Waiting
from phalanx.memory import all_within
from phalanx.plan import equal_sizes
from phalanx.tables.own_part import OwnPart
from phalanx.tables.part import Entry
from phalanx.tables.spec import TableSpec, mix
from phalanx.tables.values import outside, refuse_nonfinite

if TYPE_CHECKING:  # else runs on one host would import what speaks to others
    from phalanx.cluster import RemoteCall
    from phalanx.tables.remote_host import RemoteHost


_KEYS_SEED = np.int64(0x5DEECE66D)


class Operation(IntEnum):
    """A request to another host. What each has in its message's numbers, its text and its tensors:

    text is the table's name; no rows are all rows; answers in brackets.
    """

    TELL = 1  # client, number expected, ticks, barriers  [incarnation]
    LEAVE = 2
    OPEN = 3  # text: spec  tensors: first values  [done, last round]
    GET = 4  # tensors: rows  [their values]
    ADD = 5  # round or 0  number: its own  tensors: rows, delta
    END_ROUND = 6  # round
    AWAIT_ROUND = 7  # round
    SNAPSHOT = 8  # [tensors: of a keys table the keys; values, states]
    RESTORE = 9  # tensors: as of SNAPSHOT
    KEYS = 10  # [tensor: keys]
    NUM_KEYS = 11  # [tensor: how many]


class Share(NamedTuple):
    """The share of one part in a list of rows, or in the whole table.

    Attributes:
        part: Its index.
        rows: Or keys, in the order of the list; None for all of the part.
        span: Where they are in the list sorted by part.
    """

    part: int
    rows: Tensor | None
    span: slice

    def of(self, values: Tensor) -> Tensor:
        """Return its share of the values of all rows."""
        return values if self.span is _WHOLE else values[self.span]


_ALL_HERE: tuple[None, list[Share]] = None, []
_WHOLE = slice(None)


class Cut:
    """The cut of one table, as one host sees it.

    Args:
        spec: The table, of all hosts.
        host: This host's number.
        num_hosts: How many there are.

    Attributes:
        num_parts: How many parts there are, one on each host.
        own: The index of this host's part.
    """

    def __init__(self, spec: TableSpec, host: int, num_hosts: int) -> None:
        self._spec = spec
        self.num_parts = num_hosts
        self.own = host
        sizes = equal_sizes(spec.rows, num_hosts)
        self._starts = list(accumulate(sizes, initial=0))
        self._bounds = np.array(self._starts[1:-1], dtype=np.int64)

    # --- ranges of rows ---------------------------------------------------------------------------

    def span(self, index: int) -> slice:
        """Return where a part's rows lie in a tensor of all rows."""
        return slice(self._starts[index], self._starts[index + 1])

    def part(self, index: int) -> TableSpec:
        """Return what a part is: a separate table on its host."""
        if self.num_parts == 1 or self._spec.has_keys:
            return self._spec
        first, stop = self._starts[index : index + 2]
        return replace(self._spec, rows=stop - first, first_row=first)

    # --- lists of rows ----------------------------------------------------------------------------

    def owners(self, rows: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Return the part of each row."""
        if not self._spec.has_keys:
            return np.searchsorted(self._bounds, rows, side="right").astype(np.uint16)
        mixed = mix(rows ^ _KEYS_SEED) >> np.uint64(32)
        return (mixed % np.uint64(self.num_parts)).astype(np.uint16)

    def shares(self, rows: Tensor | None) -> tuple[Tensor | None, list[Share]]:
        """Cut a list of rows, None for the whole table, by part; rows of one part stay in order.

        Returns:
            Where in the list the sorted rows stood, None where they are sorted already; and a share
            for each part that has any, or no share where this host's part has all.

        Raises:
            ConfigError: A row is outside the table.
        """
        if rows is None:
            return None, [Share(index, None, self.span(index)) for index in range(self.num_parts)]
        if not rows.numel():
            return None, []
        if not self._spec.has_keys:
            index = bisect_right(self._starts, rows.numpy().item(0), 1, self.num_parts) - 1
            start, stop = self._starts[index : index + 2]
            if all_within(rows, stop - start, start):
                return None, [] if index == self.own else [Share(index, rows, _WHOLE)]
            if not all_within(rows, self._spec.rows):
                raise outside(rows, self._spec)
        # In numpy: it needs half of torch's time for few rows, and sorts small numbers by counting.
        numbers = rows.numpy()
        owners = self.owners(numbers)
        order = np.argsort(owners, kind="stable")
        ends = np.bincount(owners, minlength=self.num_parts).cumsum().tolist()
        sorted_rows = torch.from_numpy(numbers.take(order))
        spans = map(slice, [0, *ends], ends)
        shares = [Share(i, sorted_rows[s], s) for i, s in enumerate(spans) if s.start < s.stop]
        return torch.from_numpy(order), shares


class Router:
    """All parts of a table, as one worker uses them.

    Args:
        spec: The table, of all hosts.
        cut: How it is cut over them.
        here: This host's part.
        worker: The worker's number.
        remotes: The other hosts, as the worker reaches them.
    """

    def __init__(
        self,
        spec: TableSpec,
        cut: Cut,
        here: OwnPart,
        worker: int,
        remotes: Sequence[RemoteHost] = (),
    ) -> None:
        self.spec = spec
        self.here = here
        self._part = here.part
        self._cut = cut
        self._worker = worker
        self._others = {each.endpoint.host: each for each in remotes}
        # Held while adds go to logs and other hosts: one that comes late there, by its number, is
        # taken for a repetition. Nor may the worker's round change meanwhile.
        self._turn = Mutex(memoryview(bytearray(Mutex.NBYTES)), f"adds to table {spec.name}")
        self._late_round: int | None = None  # of a get that failed, or that Ctrl-C ended
        self._num_adds = 0

    # --- the first value --------------------------------------------------------------------------

    def open(self, init: Tensor, timeout_s: float) -> None:
        """Fill all parts as the master, or wait until the master has; then begin.

        Raises:
            PeerTimeout: The master did not open the table; ``.rank`` is its number.
        """
        whole = init.dim() == 0 or self.spec.has_keys
        waiting, cut, clock = Waiting(timeout_s), self._cut, 0
        firsts = {index: init if whole else init[cut.span(index)] for index in self._others}
        for index, first in firsts.items():  # before a part is made
            self._others[index].refuse_long(f"a part of {self.spec.name!r}", [first])
        self.here.open(self._worker, init if whole else init[cut.span(cut.own)], timeout_s)
        for index, first in firsts.items():
            open_part, part = self._others[index].open_part, cut.part(index)
            clock = max(clock, open_part(part, first, waiting.remaining_s()))
        # A host may be a round ahead: what this worker added to that round would not be in.
        self.here.arrive(self._worker, clock)

    # --- reading ----------------------------------------------------------------------------------

    def refuse_outside(self, rows: Tensor | None) -> None:
        """Raise if a row is outside the table, as all methods that take rows do.

        Raises:
            ConfigError: One is.
        """
        if not (rows is None or self.spec.has_keys or all_within(rows, self.spec.rows)):
            raise outside(rows, self.spec)

    def read(self, rows: Tensor | None, out: Tensor, timeout_s: float) -> None:
        """Copy rows into ``out``."""
        order, shares = self._cut.shares(rows) if self._others else _ALL_HERE
        if not shares:
            self._part.read(rows, out, timeout_s)
            return
        found = out if order is None else torch.empty_like(out)
        asked = {share.part: (share.rows, share.of(found)) for share in shares}
        mine = asked.pop(self._cut.own, None)
        self._ask(
            Operation.GET,
            timeout_s,
            {
                part: {"tensors": [] if rows is None else [rows], "out": [target]}
                for part, (rows, target) in asked.items()
            },
            None if mine is None else partial(self._part.read, *mine, timeout_s),
        )
        if order is not None:
            # The inverse of `order`, because selecting rows is four times as fast as placing them.
            ascending = torch.arange(order.numel(), device="cpu")
            back = torch.empty_like(order).scatter_(0, order, ascending)
            torch.index_select(found, 0, back, out=out)

    # --- changing ---------------------------------------------------------------------------------

    def add(self, entry: Entry, timeout_s: float) -> None:
        """Take one add, whole or not at all on each host; one with a number, once."""
        order, shares = self._cut.shares(entry.rows) if self._others else _ALL_HERE
        if not shares:
            self._part.add(entry, timeout_s)
            return
        refuse_nonfinite(entry.delta, self.spec)
        with self._turn.held(timeout_s):
            self._add_parts(entry, order, shares, 0, self._part.add, timeout_s)

    def put(self, entry: Entry, timeout_s: float) -> None:
        """Log an add for its worker's round, on every host that has rows of it."""
        self.refuse_outside(entry.rows)
        refuse_nonfinite(entry.delta, self.spec)
        order, shares = self._cut.shares(entry.rows) if self._others else _ALL_HERE
        with self._turn.held(timeout_s):
            number = self.here.clock_of(entry.worker) + 1
            put_here = partial(self.here.put, number=number)
            if shares:
                self._add_parts(entry, order, shares, number, put_here, timeout_s)
            else:
                put_here(entry, timeout_s)

    def _add_parts(
        self,
        entry: Entry,
        order: Tensor | None,
        shares: list[Share],
        round_number: int,
        add_here: Callable[[Entry, float], None],
        timeout_s: float,
    ) -> None:
        delta = entry.delta if order is None else entry.delta[order]
        asked = {s.part: Entry(s.rows, s.of(delta), entry.worker) for s in shares}
        mine = asked.pop(self._cut.own, None)
        self._num_adds += 1
        how = {"args": (round_number,), "number": self._num_adds}
        self._ask(
            Operation.ADD,
            timeout_s,
            {
                part: {"tensors": [t for t in each[:2] if t is not None], **how}
                for part, each in asked.items()
            },
            None if mine is None else partial(add_here, mine, timeout_s),
        )

    # --- rounds -----------------------------------------------------------------------------------

    def arrive(self, timeout_s: float) -> int:
        """Say that the worker has put down all of its round, or of the late one, and return it."""
        with self._turn.held(timeout_s):  # no thread of the worker puts anything down meanwhile
            number = self._late_round or self.here.clock_of(self._worker) + 1
            self._late_round = None  # another thread's get is of the next one
            self.here.arrive(self._worker, number)
        try:
            self._ask_all(Operation.END_ROUND, timeout_s, args=(number,))
        except BaseException:
            self._late_round = number
            raise
        return number

    def finish(self, number: int, timeout_s: float) -> None:
        """Wait until the round is in on every host; see :meth:`OwnPart.finish`."""
        finish_here = partial(self.here.finish, number, timeout_s)
        try:
            self._ask_all(Operation.AWAIT_ROUND, timeout_s, finish_here, args=(number,))
        except BaseException:  # an interrupt, too
            self._late_round = number
            raise

    # --- all of it --------------------------------------------------------------------------------

    def copy_all(self, timeout_s: float) -> list[Tensor]:
        """Return copies of the values and of each state; of a keys table the keys before them.

        Each part's are of one moment; keys ascend.
        """
        copy_here = partial(self._part.copy_all, timeout_s)
        found = self._ask_all(Operation.SNAPSHOT, timeout_s, copy_here)
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
        cut = {i: [each[of_part(i)] for each in parts] for i in range(self._cut.num_parts)}
        restore_here = partial(self._part.replace_all, cut.pop(self._cut.own), timeout_s)
        asked = {index: {"tensors": each} for index, each in cut.items()}
        self._ask(Operation.RESTORE, timeout_s, asked, restore_here)

    def num_keys(self, timeout_s: float) -> int:
        """Return how many keys are there."""
        count_here = partial(self._part.num_keys, timeout_s)
        return sum(int(n) for (n,) in self._ask_all(Operation.NUM_KEYS, timeout_s, count_here))

    def keys(self, timeout_s: float) -> Tensor:
        """Return the keys that are there, in ascending order."""
        keys_here = partial(self._part.keys, timeout_s)
        found = self._ask_all(Operation.KEYS, timeout_s, keys_here)
        return torch.cat([each for (each,) in found]).sort().values

    # --- other hosts ------------------------------------------------------------------------------

    def _ask_all(
        self,
        operation: Operation,
        timeout_s: float,
        here: Callable[[], Any] | None = None,
        **asked: Any,
    ) -> list[Any]:
        """Ask all other parts for the same; return what each answers, and ``here``, in order."""
        answers = self._ask(operation, timeout_s, dict.fromkeys(self._others, asked), here)
        return [answers[index] for index in sorted(answers)]

    def _ask(
        self,
        operation: Operation,
        timeout_s: float,
        asked: Mapping[int, dict[str, Any]],  # Any: see `Connection.begin`
        here: Callable[[], Any] | None,
    ) -> dict[int, Any]:
        """Ask parts of other hosts, do this host's meanwhile, and wait for all that have begun.

        The error of a host that does not answer comes before all others, since others may have
        waited for it.
        """
        for part, each in asked.items():  # before a part is asked: none changes alone
            self._others[part].refuse_long(f"a part of {self.spec.name!r}", each.get("tensors", ()))
        waiting = Waiting(timeout_s)
        calls: dict[int, RemoteCall] = {}
        answers: dict[int, Any] = {}
        errors: list[tuple[bool, PhalanxError]] = []  # each after whether there was an answer
        try:
            try:
                for part, each in asked.items():
                    begin = self._others[part].begin_of
                    calls[part] = begin(self.spec, operation, waiting.remaining_s(), **each)
                if here is not None:
                    answers[self._cut.own] = here()
            except PhalanxError as exc:
                errors.append((True, exc))
            for part, call in calls.items():
                try:
                    answers[part] = call.wait().tensors
                except PhalanxError as exc:
                    errors.append((call.answered, exc))
        finally:
            for call in calls.values():  # an answer would come into memory that is the caller's
                call.abandon()
        if errors:
            raise min(errors, key=lambda each: each[0])[1]
        return answers
