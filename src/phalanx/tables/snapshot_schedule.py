"""Snapshots that are written every so many seconds, while the workers train on.

    worker 0   add get add get add get add get add         the master
    thread         │copy│ write ~~~ rename │ … every_s … │copy│ write ~~~
    worker 1   add add get get add get add add get
    thread         looks on: it writes once its worker is the master

Every worker that asked has such a thread. The master's writes: the lowest worker that lives, so the
next one goes on where it dies. Nothing is agreed upon, and nobody waits for the disk: the thread
writes a copy. A copy is taken as :meth:`Table.snapshot` takes it, each shard's of one moment.

# Note [Between two rounds]
A round of a bulk-synchronous table is in when all workers have come to their gets. So from the end
of a worker's get to the beginning of its next one every shard, on every host, holds the same
rounds. The thread copies there, and holds up a get that comes meanwhile; it would else find one
round on one host, and the next on another.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from phalanx.clock import now_s
from phalanx.errors import PeerTimeout
from phalanx.plan import check_argument
from phalanx.tables.snapshots import check_place, manifest_in, save_parts
from phalanx.tables.spec import TableSpec

__all__ = ["RoundGate", "SnapshotSchedule", "SnapshotSource", "read_interval"]

_log = logging.getLogger(__name__)

_LONGEST_S = 1e6
_UNSEEN_INTERVALS, _UNSEEN_S = 3, 60.0


def read_interval(every_s: object) -> float:
    """Return how often a user wants snapshots.

    Raises:
        ConfigError: It is no number of seconds.
    """
    fits = isinstance(every_s, int | float) and not isinstance(every_s, bool)
    fits = fits and 0 < every_s <= _LONGEST_S  # type: ignore[operator]
    check_argument(fits, "every_s", f"be seconds above 0, up to {_LONGEST_S:g}", every_s)
    return float(every_s)  # type: ignore[arg-type]


class Numbered(Protocol):
    """A worker that has come to a round."""

    @property
    def number(self) -> int: ...


A = TypeVar("A", bound=Numbered)


class RoundGate:
    """Keeps the rounds of a worker and the copies of its tables apart.

    See Note [Between two rounds].

    Attributes:
        whole: Held while all of a table is copied for a snapshot, or replaced by one.
    """

    def __init__(self) -> None:
        self.whole = threading.Lock()
        # Entered in place of the condition, whose `__enter__` is Python code: a Ctrl-C in it leaves
        # the lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._open: dict[str, float] = {}  # by table, the round whose get has begun and not ended
        self._wanted: frozenset[str] = frozenset()  # tables that are copied, or are to be
        self._copying = False

    def arrive(self, table: str, arrive: Callable[[], A]) -> A:
        """Begin a get of a bulk-synchronous table; wait first while it is copied.

        A copy that waits for its turn is not overtaken by the next get. But beside one that is
        open others may begin: else whoever begins them before it waits for the first never would.
        """
        with self._lock:
            # Without a deadline of its own: a copy has one.
            self._changed.wait_for(
                lambda: (
                    table not in self._wanted
                    or (not self._copying and self._wanted & self._open.keys())
                )
            )
            self._open[table] = math.inf  # some hosts may know of the round where this is cut off
            arrival = arrive()
            self._open[table] = arrival.number
            return arrival

    def finish(self, table: str, number: int) -> None:
        """Say that the get which ends a round has ended."""
        with self._lock:
            if self._open.get(table, math.inf) <= number:
                del self._open[table]
                self._changed.notify_all()

    @contextmanager
    def between_rounds(self, tables: Sequence[str], timeout_s: float) -> Iterator[None]:
        """Hold this worker between two rounds of these tables.

        Raises:
            PeerTimeout: It was in one all the time.
        """
        with self._lock:
            self._wanted = frozenset(tables)
            try:
                free = self._changed.wait_for(
                    lambda: not self._wanted & self._open.keys(), timeout_s
                )
                if not free:
                    raise PeerTimeout(
                        f"A get of table {min(self._wanted & self._open.keys())!r} was under way "
                        f"for {timeout_s:g} s, and a copy has to wait for its end. Call `wait()` "
                        "on each `async_get`."
                    )
                self._copying = True
            finally:
                if not self._copying:
                    self._release()
        try:
            with self.whole:
                yield
        finally:
            with self._lock:
                self._release()

    def _release(self) -> None:
        self._wanted, self._copying = frozenset(), False
        self._changed.notify_all()


class SnapshotWorker(Protocol):
    """A worker that was asked for snapshots."""

    worker_id: int
    timeout_s: float

    @property
    def is_master(self) -> bool: ...


class Copied(Protocol):
    """The memory of a table."""

    def copy_all(self, timeout_s: float) -> list[Tensor]: ...


class SnapshotSource(NamedTuple):
    """A table that is written down."""

    spec: TableSpec
    storage: Copied


@dataclass
class _Task:
    """What is written down together, where to, and when.

    Attributes:
        worker: The one that was asked.
        sources: The tables.
        directory: The folder.
        every_s: From one beginning to the next.
        due_s: When the next one begins.
        told: What was said of the last failure; empty after a success.
        seen: The newest snapshot, as a worker saw it that did not write it.
        seen_s: When it was new.
    """

    worker: SnapshotWorker
    sources: Sequence[SnapshotSource]
    directory: Path
    every_s: float
    due_s: float
    seen_s: float
    seen: tuple[int, int] | None = None
    told: str = ""

    @property
    def names(self) -> list[str]:
        return [source.spec.name for source in self.sources]

    @property
    def title(self) -> str:
        tables = ", ".join(repr(name) for name in self.names)
        return f"table{'s' * (len(self.names) > 1)} {tables}"


class SnapshotSchedule:
    """The snapshots that one worker was asked for, and the thread that writes them.

    Attributes:
        gate: Keeps rounds and copies apart.
        num_written: By table, the snapshots that this worker has written.
        num_failed: By table, those that it could not write.
    """

    def __init__(self) -> None:
        self.gate = RoundGate()
        self.num_written: dict[str, int] = {}
        self.num_failed: dict[str, int] = {}
        # Entered in place of the condition, whose `__enter__` is Python code: a Ctrl-C in it leaves
        # the lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._tasks: dict[tuple[str, ...], _Task] = {}
        self._ended = False
        self._thread: threading.Thread | None = None

    def repeat(
        self,
        worker: SnapshotWorker,
        sources: Sequence[SnapshotSource],
        directory: Path,
        every_s: float,
    ) -> None:
        """Write tables down together every ``every_s`` seconds, whatever was asked before.

        Raises:
            CheckpointError: The folder cannot be made, or holds other files of that name.
        """
        for source in sources:
            check_place(directory, source.spec.name)
        now = now_s()
        task = _Task(worker, sources, directory, every_s, now + every_s, now)
        with self._lock:
            self._tasks[(*task.names,)] = task
            if self._thread is None:
                name = f"phalanx snapshots of worker {worker.worker_id}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """End the thread; a snapshot that is being written is finished first, if it can be."""
        with self._lock:
            self._ended = True
            self._changed.notify_all()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._tasks.clear()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while (task := self._next()) is not None:
            self._attend_to(task)

    def _next(self) -> _Task | None:
        """Wait until a task is due, and return it; None at the end."""
        with self._lock:
            while not self._ended:
                task = min(self._tasks.values(), key=lambda each: each.due_s)
                now = now_s()
                if now >= task.due_s:
                    task.due_s = now + task.every_s
                    return task
                self._changed.wait(task.due_s - now)
        return None

    def _attend_to(self, task: _Task) -> None:
        try:
            if task.worker.is_master:
                self._write(task)
                task.told, task.seen_s = "", now_s()
                self._count(self.num_written, task)
            else:
                self._look_on(task)
        except Exception as exc:  # a full disk, a lost host: it ends no training
            if not self._ended:
                self._count(self.num_failed, task)
                self._tell(
                    task,
                    f"A snapshot of {task.title} could not be written: {exc} What was written "
                    f"before counts. It is tried again every {task.every_s:g} s.",
                )

    def _write(self, task: _Task) -> None:
        timeout_s = task.worker.timeout_s
        with self.gate.between_rounds(task.names, timeout_s):
            copies = [source.storage.copy_all(timeout_s) for source in task.sources]
        for source, parts in zip(task.sources, copies, strict=True):
            save_parts(source.spec, parts, task.directory)

    def _count(self, counts: dict[str, int], task: _Task) -> None:
        for name in task.names:
            counts[name] = counts.get(name, 0) + 1

    def _look_on(self, task: _Task) -> None:
        """Say it where nothing new comes: the folder is not shared, or the master was not asked."""
        try:
            found = manifest_in(task.directory, task.names[0]).stat()
            seen = (found.st_ino, found.st_mtime_ns)
        except FileNotFoundError:
            seen = None
        if seen != task.seen:
            task.seen, task.seen_s, task.told = seen, now_s(), ""
        elif now_s() > task.seen_s + max(_UNSEEN_INTERVALS * task.every_s, _UNSEEN_S):
            self._tell(
                task,
                f"Worker {task.worker.worker_id} sees no new snapshot of {task.title} in "
                f"{str(task.directory)!r}. All hosts must share that folder, and the master must "
                "ask for snapshots, too.",
            )

    def _tell(self, task: _Task, text: str) -> None:
        if text != task.told:  # once, however often it fails
            task.told = text
            _log.warning("%s", text)
