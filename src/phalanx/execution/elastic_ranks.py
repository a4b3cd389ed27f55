"""Ranks of which some may be lost and others come: see `elastic_exchange`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from phalanx.distributed import ElasticExchange, Exchange, GroupChanged
from phalanx.execution.partial_sums import RunResult
from phalanx.execution.rank_sums import RankShards
from phalanx.execution.ranks import (
    RankExecutor,
    device_types_of,
    refuse_unserved,
    write_once,
)
from phalanx.execution.task import Task
from phalanx.types import Nested

__all__ = ["ElasticRankExecutor", "write_once_elastic"]


class ElasticRankExecutor(RankExecutor):
    """This rank's replicas, whose peers may be others from run to run.

    A run, and what follows it, raises `GroupChanged` where they are: nothing has changed here then,
    and the batch is to be cut and run again. Every rank holds all of the optimizer's state, so that
    none is lost with a rank.
    """

    exchange: ElasticExchange

    def join(self, exchange: Exchange | None = None) -> None:
        """Take part in ``exchange``, whose ranks have one state already.

        Raises:
            ConfigError: The module is on a device whose tensors they cannot exchange.
        """
        assert isinstance(exchange, ElasticExchange)
        self._module = self.sources[0]
        refuse_unserved(device_types_of(self._module), exchange)
        self.exchange = exchange
        self._newcomers_wait = False
        self._follow_ranks()

    def _follow_ranks(self) -> None:
        """Take note of who the ranks are now."""
        shares = self._all_workloads if self.exchange.is_behind else None
        self._followed = self.exchange.generation
        self._newcomers_wait = False
        self._take_shares([each["workloads"] for each in self.exchange.about])
        if shares is not None:  # the batch is cut as those have cut it that are ahead
            self._all_workloads = shares

    @property
    def generation(self) -> int:  # type: ignore[override]
        """How often the ranks have changed."""
        return self.exchange.generation

    def all_workloads(self) -> Sequence[float]:
        """Return the relative shares of all ranks' replicas, rank after rank."""
        self.exchange.settle()
        if self._followed != self.exchange.generation:
            self._follow_ranks()
        return super().all_workloads()

    def open_shards(self, optimizer: Optimizer) -> RankShards:
        """Return the optimizer in shards, all of which every rank steps."""
        return RankShards(optimizer, self.parameters, self._sums, keeps_all=True)

    def run(
        self,
        task: Task,
        pieces: Sequence[Nested],
        *,
        owners: Sequence[int] | None = None,
        **options: Any,
    ) -> RunResult:
        """Run this rank's microbatches, or all of them where the others are ahead.

        Raises:
            Exception: As for `RankExecutor.run`.
            GroupChanged: The ranks are others now.
        """
        if self.exchange.is_behind:
            owners = None
        return super().run(task, pieces, owners=owners, **options)

    def _tells(self) -> Mapping[str, Any]:
        return {"newcomers_wait": self.exchange.newcomers_wait}

    def _hears(self, first: Mapping[str, Any]) -> None:
        self._newcomers_wait = first["newcomers_wait"]

    def admit(self) -> None:
        """Let new ranks in, where rank 0 has said in the last run that some wait."""
        if self._newcomers_wait and self._followed == self.exchange.generation:
            self.exchange.admit()

    def mark_done(self) -> None:
        """Count a run whose outcome is kept here."""
        self.exchange.mark_done()

    def agree_to_open_again(self) -> None:
        """Tell all ranks that the trained parameters were changed here; all must tell the same."""
        with _unrepeated(self.exchange) as goes:
            if goes:
                super().agree_to_open_again()

    def check_alike(self) -> None:
        """Compare the parameters of all ranks by a checksum."""
        with _unrepeated(self.exchange) as goes:
            if goes:
                super().check_alike()


@contextlib.contextmanager
def _unrepeated(exchange: ElasticExchange) -> Iterator[bool]:
    """Say whether a collective between two runs can be done; nobody repeats one that has failed.

    See Note [In step] in `elastic_exchange.py`: some may have passed it.
    """
    exchange.settle()
    with contextlib.suppress(GroupChanged):
        yield exchange.in_step
    exchange.settle()


def write_once_elastic(write: Callable[[], None], exchange: ElasticExchange) -> None:
    """Let rank 0 write for all; where that is lost meanwhile, its successor writes.

    Where ranks have changed since the last run, nobody waits for the one that writes.

    Raises:
        Exception: What ``write`` raised, at rank 0.
        PeerError: It raised something there; at the others.
    """
    written = False

    def note() -> None:
        nonlocal written
        write()
        written = True

    with _unrepeated(exchange) as goes:
        if goes:
            write_once(note, exchange)
            return
    if exchange.rank == 0 and not written:
        write()
