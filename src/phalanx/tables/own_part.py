"""The part of a table on this host, and the rounds in which it may be changed."""

from __future__ import annotations

from functools import partial
from typing import Any

from phalanx.errors import PeerTimeout
from phalanx.tables.keys import KeyPart
from phalanx.tables.membership import Membership
from phalanx.tables.part import TablePart
from phalanx.tables.rounds import Rounds
from phalanx.tables.run_regions import RunRegions
from phalanx.tables.spec import TableSpec
from phalanx.tables.table_memory import READY, TableMemory


class OwnPart:
    """This host's part of a table.

    Args:
        spec: The table that this host's rows are.
        regions: Where its memory comes from.
        membership: The workers of the run.

    Attributes:
        spec: As given.
        part: The rows.
        rounds: The table's, on this host.
        lock: Held to make a round's adds.
        memory: What processes share.
    """

    def __init__(self, spec: TableSpec, regions: RunRegions, membership: Membership) -> None:
        self.spec = spec
        self.memory = memory = TableMemory(spec, regions, membership.worker_of)
        self.membership = membership
        self.lock = memory.lock
        kind = KeyPart if spec.has_keys else TablePart
        self.part = kind(memory)
        self.rounds = Rounds(memory, membership, regions, self.part)

    def open(self, worker: int, init: Any, timeout_s: float) -> bool:  # Any: as `begin` takes it
        """Fill the part as the master, or wait until the master has; then begin as ``worker``.

        Returns:
            Whether it is open; False where ``worker`` must fill it and ``init`` is None.

        Raises:
            PeerTimeout: The master did not open the table; ``.rank`` is its number.
        """
        line, membership = self.memory.table, self.membership

        def ready() -> bool:
            if line[READY]:
                return True
            if min(membership.awaited(), default=worker) != worker:
                return False
            if init is not None:
                with self.lock.held(timeout_s):
                    if not line[READY]:
                        self.part.begin(init)
                        line[READY] = 1
                        membership.changes.tell()
            return True

        look = partial(membership.look_for_dead, timeout_s)
        if not membership.changes.wait_until(ready, timeout_s, look):
            master = min(membership.awaited())
            raise PeerTimeout(
                f"Worker {master}, the master, did not open table {self.spec.name!r} within "
                f"{timeout_s:g} s.",
                master,
            )
        if not line[READY]:
            return False
        if self.spec.staleness.is_bulk_synchronous:
            self.rounds.enter(worker, timeout_s)
        return True
