"""The way of a worker to its run, and one worker as a member of it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TypedDict, Unpack

import torch

from phalanx.environment import Place, read_place
from phalanx.errors import ConfigError, PeerTimeout, PhalanxError, StateError, UnsupportedError
from phalanx.ipc import register_at_fork
from phalanx.native import require_library
from phalanx.plan import check_argument, read_count, say_numbers
from phalanx.tables.membership import BARRIERS, TICKS
from phalanx.tables.router import Cut, Router
from phalanx.tables.run_context import RunContext
from phalanx.tables.spec import TableSpec, Uniform, check_name, read_dtype
from phalanx.tables.table import KeyTable, Numbers, Table
from phalanx.tables.updaters import Updater, parse_updater
from phalanx.tables.values import read_init

_LONGEST_S = 1e6
_LEAVE_S = 5.0


def join(
    run: str | None = None,
    *,
    sync: bool = False,
    staleness: int | None = None,
    num_workers: int | None = None,
    timeout_s: float = 30.0,
    secret_file: str | None = None,
) -> TableGroup:
    """Become a worker: of a launcher's run, of run ``run``, or of this process alone.

    Args:
        run: A name that the processes of one run on this host agree on. None: the launcher's run
            (torchrun, mpirun, srun), or without a launcher this process and its threads alone.
        sync: True if tables are bulk-synchronous by default.
        staleness: k for bounded staleness of tables by default; 0 is bulk-synchronous.
        num_workers: The number of workers that will join. Barriers and rounds then also wait for
            workers that have not joined yet; without it only for those present.
        timeout_s: The longest wait of a call for other workers, in seconds.
        secret_file: For workers on several hosts: the file that `phalanx secret` made, the
            same on each. Default: the variable ``PHALANX_SECRET_FILE``.

    Raises:
        ConfigError: ``run`` is no name, other workers gave another ``num_workers``, or a variable
            of the launcher is missing.
        OutOfSpace: ``/dev/shm`` is full.
        UnsupportedError: The C library was not built when phalanx was installed.

    Example:
        >>> with join() as world:
        ...     world.worker_id, world.num_workers, world.is_master
        (0, 1, True)
    """
    require_library("Tables")
    given: object = timeout_s
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    fits = is_number and 0 <= timeout_s < _LONGEST_S
    check_argument(fits, "timeout_s", f"be seconds from 0 to {_LONGEST_S:g}", timeout_s)
    mode = read_mode(sync, staleness, None)
    place = _place_of(run, num_workers)
    if place is None:
        context = RunContext(run)
    elif place.is_spread:
        # Late: what is between hosts takes a tenth of a second, which runs on one host do without.
        from phalanx.tables.host_rendezvous import join_hosts

        context = join_hosts(place, secret_file, timeout_s)
    else:
        context = RunContext(place.job)
    try:
        rank, size = (None, num_workers) if place is None else (place.rank, place.size)
        return TableGroup(context, rank, size, mode, timeout_s)
    except BaseException:
        context.close(timeout_s)
        raise


def _place_of(run: str | None, num_workers: int | None) -> Place | None:
    """Return this process's place in the job whose ranks are the workers; None if it has no job.

    Raises:
        ConfigError: The name or the number of workers cannot be.
    """
    if run is not None:
        check_name("run", run)
        return None
    place = read_place()
    if place is not None and num_workers not in (None, place.size):
        raise ConfigError(
            f"`num_workers` must be the number of processes that were started ({place.size}), but "
            f"is {num_workers}."
        )
    return None if place is None or place.size == 1 else place


class TableOptions(TypedDict, total=False):
    """Options of every table; see :meth:`TableGroup.matrix`.

    Attributes:
        updater: A name, a mapping of name and options, or an updater. Default: ``"sum"``.
        name: Default: the next number, counted by each worker: then all open their tables in the
            same order.
        sync: True for bulk-synchronous; False for asynchronous. Default: the group's mode.
        staleness: k for bounded staleness; 0 is bulk-synchronous. Default: the group's mode.
    """

    updater: str | dict[str, object] | Updater
    name: str | None
    sync: bool | None
    staleness: int | None


class TableGroup:
    """One worker as a member of a run; made by :func:`phalanx.tables.join`.

    Attributes:
        worker_id: This worker's number, from 0.
        timeout_s: The longest wait of its calls for other workers, in seconds.
        staleness: The default mode of its tables.
        run: The run's name, or None for this process alone.
    """

    def __init__(
        self,
        context: RunContext,
        worker: int | None,
        num_expected: int | None,
        staleness: int | None,
        timeout_s: float,
    ) -> None:
        """Not for callers, who have :func:`phalanx.tables.join`."""
        self.worker_id, self.remotes = context.enter(worker, num_expected, timeout_s)
        self.timeout_s = timeout_s
        self.staleness = staleness
        self.run = context.run
        self.membership = context.membership
        self.closed = False
        self.why_closed = "is closed"
        self._context = context
        self._incarnation = self.membership.incarnation(self.worker_id)
        self._num_barriers = self.membership.clock(self.worker_id, BARRIERS)
        self._routers: dict[str, Router] = {}  # one of each table, since it numbers the adds
        self._num_tables = 0
        self._numbering = threading.Lock()
        self._closing = threading.RLock()
        register_at_fork(self._note_fork)

    # --- the workers -----------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """The number of workers that are waited for: present, or expected and not yet here."""
        return len(self.membership.awaited())

    @property
    def workers(self) -> list[int]:
        """The numbers of the workers that are here, without the dead."""
        self._check_open()
        self.membership.mark_dead(self.timeout_s)
        return self.membership.here()

    @property
    def is_master(self) -> bool:
        """True if this is the lowest worker that is waited for."""
        master = self.membership.master
        return not self.closed and master(self.worker_id, self.timeout_s) == self.worker_id

    def barrier(self) -> int:
        """Wait until every worker has come to the run's next barrier; return its number, from 1.

        Raises:
            PeerTimeout: A worker did not come; ``.rank`` is the first. The next call waits for the
                same barrier.

        Collective: All workers. Blocks: Until the last has come, left or died.
        """
        self._check_open()
        number = self._num_barriers + 1
        with self._told(BARRIERS, number):
            event = f"barrier {number}"
            self.membership.wait_for_clocks(BARRIERS, number, self.timeout_s, event)
        self._num_barriers = number
        return number

    def tick(self) -> int:
        """End this worker's round; return how many it has ended.

        Tables with bounded staleness count rounds: their gets wait for slower workers. In
        bulk-synchronous tables, gets are the rounds.
        """
        self._check_open()
        number = self.membership.clock(self.worker_id, TICKS) + 1
        with self._told(TICKS, number):
            return number

    @contextmanager
    def _told(self, clock: int, number: int) -> Iterator[None]:
        """Say on all hosts how far this worker has come; meanwhile others are waited for."""
        self.membership.advance_to(self.worker_id, clock, number)
        reached = [remote for remote in self.remotes if remote.is_reached]
        calls = [remote.begin_tell(self.timeout_s) for remote in reached]
        try:
            yield
            for call in calls:
                with suppress(PeerTimeout):  # the next connection says it
                    call.wait(again=False)
        finally:
            for call in calls:
                call.abandon()

    def thread_worker(self) -> TableGroup:
        """Join the same run as one more worker, for another thread of this process.

        Raises:
            UnsupportedError: The run is on several hosts.

        Example:
            >>> from phalanx.tables import join
            >>> with join(num_workers=2) as world, world.thread_worker() as other:
            ...     world.worker_id, other.worker_id, world.workers
            (0, 1, [0, 1])
        """
        self._check_open()
        return TableGroup(self._context, None, None, self.staleness, self.timeout_s)

    def close(self) -> None:
        """Leave the run: no call of others waits for this worker any more; free its memory.

        The last one out removes what the run has shared.
        A call that another thread is in ends as if the group were open.

        Blocks: Until the workers that were announced have come, else they would come to a run that
        is not there any more (a warning names those that have not); at most ``timeout_s``.
        """
        self._wait_for_expected()
        self._leave()

    def _leave(self) -> None:
        if self.closed:  # as in a forked child, which must not wait for the lock
            return
        with self._closing:  # of two threads one does it
            if self.closed:
                return
            try:
                self.membership.leave(self.worker_id, self._incarnation, self.timeout_s)
                for remote in self.remotes:
                    with suppress(PhalanxError):  # one that does not answer finds out by itself
                        remote.leave(min(self.timeout_s, _LEAVE_S))
            finally:
                self.closed = True
                for remote in self.remotes:
                    remote.close()
                self._routers.clear()  # the memory goes, though somebody keeps a table
                self._context.count_out(self.timeout_s)

    def _wait_for_expected(self) -> None:
        if self.closed or self.run is None:
            return

        def missing() -> list[int]:
            return sorted({*self.membership.awaited()} - {*self.membership.here()})

        if not self.membership.changes.wait_until(lambda: not missing(), self.timeout_s):
            warnings.warn(
                f"{say_numbers('Worker', missing())} of run {self.run!r} did not come within "
                f"{self.timeout_s:g} s, though {self.membership.num_expected} workers were "
                "announced as `num_workers`.",
                stacklevel=3,
            )

    def __enter__(self) -> TableGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._wait_for_expected()
        self._leave()

    # --- tables -----------------------------------------------------------------------------------

    def array(
        self,
        size: int,
        dtype: torch.dtype | str = torch.float32,
        *,
        init: Numbers | float | None = None,
        **options: Unpack[TableOptions],
    ) -> Table:
        """Open a table of one dimension; see :meth:`matrix`.

        Example:
            >>> from phalanx.tables import join
            >>> with join() as world:
            ...     table = world.array(3, init=[1, 2, 3])
            ...     table.add([10, 20, 30])
            ...     table.get().tolist()
            [11.0, 22.0, 33.0]
        """
        return self._open(size, 1, dtype, init, options, is_array=True)

    def matrix(
        self,
        rows: int,
        cols: int,
        dtype: torch.dtype | str = torch.float32,
        *,
        init: Numbers | float | None = None,
        **options: Unpack[TableOptions],
    ) -> Table:
        """Open a table of rows; all workers that give its name have the same one.

        The master's ``init`` fills it, past the updater; the others wait until it has.

        Args:
            rows: Number of rows, 0 or more.
            cols: Row width, at least 1.
            dtype: float32, float64, bfloat16, int32 or int64.
            init: The first values: one number for all, or all of them; 0 if None.
            options: See :class:`TableOptions`.

        Raises:
            ConfigError: An argument cannot work, or another worker gave other arguments.
            OutOfSpace: Memory is too small for its values and states, and a few MB.
            PeerTimeout: The master did not open it; ``.rank`` is its number.

        Collective: All workers, in bulk-synchronous tables. Blocks: Until the master has opened it.
        """
        return self._open(rows, cols, dtype, init, options)

    def keys(
        self,
        cols: int,
        dtype: torch.dtype | str = torch.float32,
        *,
        init: Uniform | Numbers | float | None = None,
        **options: Unpack[TableOptions],
    ) -> KeyTable:
        """Open a table whose rows are found by key and made as keys are added; see :meth:`matrix`.

        Args:
            cols: Row width, at least 1.
            dtype: As for :meth:`matrix`.
            init: The first value of every row, also read for a key without a row: a number,
                a row, of which the master's counts, or :class:`~phalanx.tables.Uniform`.
            options: See :class:`TableOptions`.

        Raises:
            ConfigError: An argument cannot work, or another worker gave other arguments.
            OutOfSpace: Memory is too small. For each key a table takes its values and
                states, and 8 bytes; each process 8 to 16 more.
            PeerTimeout: The master did not open it; ``.rank`` is its number.

        Example:
            >>> from phalanx.tables import join
            >>> with join() as world:
            ...     table = world.keys(3)
            ...     table.add([[1, 2, 3]], rows=[-(1 << 60)])
            ...     table
            KeyTable('table-0', keys x 3 float32, updater=Sum())
        """
        table = self._open(0, cols, dtype, init, options, has_keys=True)
        assert isinstance(table, KeyTable)
        return table

    def _open(
        self,
        rows: int,
        cols: int,
        dtype: torch.dtype | str,
        init: object,
        options: TableOptions,
        *,
        is_array: bool = False,
        has_keys: bool = False,
    ) -> Table:
        for unknown in options.keys() - TableOptions.__annotations__.keys():
            raise TypeError(f"Tables of a TableGroup have no option {unknown!r}.")
        name = options.get("name")
        self._check_open()
        rule = init if has_keys and isinstance(init, Uniform) else None
        with self._numbering if name is None else nullcontext():
            spec = TableSpec(
                name=f"table-{self._num_tables}" if name is None else name,
                rows=rows,
                cols=cols,
                is_array=is_array,
                dtype=read_dtype(dtype),
                updater=parse_updater(options.get("updater", "sum")),
                staleness=read_mode(options.get("sync"), options.get("staleness"), self.staleness),
                has_keys=has_keys,
                rule=rule,
            )
            first = read_init(None if rule else init, spec)
            self._router(spec).open(first, self.timeout_s)
            self._num_tables += name is None
        return (KeyTable if has_keys else Table)(spec, self)

    def _router(self, spec: TableSpec) -> Router:
        context = self._context
        if self.remotes and not type(spec.updater).__module__.startswith("phalanx."):
            raise UnsupportedError(
                "`updater` must be a built-in one for tables on several hosts, but is "
                f"{spec.updater!r}. Servers run no code of yours."
            )
        cut = Cut(spec, context.host, context.num_hosts)
        here = context.part(cut.part(cut.own), self.timeout_s)
        made = Router(spec, cut, here, self.worker_id, self.remotes)
        return self._routers.setdefault(spec.name, made)

    def _note_fork(self) -> None:
        """Close the group in a forked child, which is not this worker."""
        self.closed, self.why_closed = True, "was joined by the process that forked this one"

    def _check_open(self) -> None:
        if self.closed:
            raise StateError(
                f"The group must be joined by this worker, but {self.why_closed}. Call `join`."
            )

    def __repr__(self) -> str:
        if self.closed:
            return f"TableGroup(worker {self.worker_id}, closed)"
        where = "this process" if self.run is None else f"run {self.run!r}"
        return f"TableGroup(worker {self.worker_id} of {self.num_workers} in {where})"


def read_mode(sync: object, staleness: int | None, default: int | None) -> int | None:
    """Read the bound on staleness that a caller gave for a table; ``default`` if none."""
    check_argument(sync is None or isinstance(sync, bool), "sync", "be True or False", sync)
    if staleness is not None:
        fits = not sync or staleness == 0
        check_argument(fits, "staleness", "be absent where `sync` is True", staleness)
        return read_count("staleness", staleness, 0)
    if sync is None:
        return default
    return 0 if sync else None
