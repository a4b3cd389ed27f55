"""Every row exactly once per epoch, across ranks, restarts and changes of their number."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from phalanx.distributed import num_default_ranks
from phalanx.errors import CheckpointError, ConfigError
from phalanx.plan import check_argument, equal_sizes, ranges_of, read_count
from phalanx.replicas import derive_seed


class ExactSampler(Sampler[list[int]]):
    """Deal out the batches of an epoch to ranks: each gets the rows of its microbatches.

    It is a batch sampler: ``DataLoader(data, batch_sampler=ExactSampler(data, 32, rank=rank,
    num_ranks=size))``. The order belongs to (seed, epoch) alone, so the batches of all ranks
    together are the same for any number of ranks, and `DistributedDataParallel` trains bitwise
    identical weights. No row is repeated or left out.

    Args:
        data: A data set, or anything else with a length, or the length.
        batch_size: Rows of all ranks together.
        microbatches: As for `DistributedDataParallel`.
        rank: This rank, from 0; ``num_ranks`` is the number of all. Give both where there is a
            process group of several ranks. Default: the only rank.
        shuffle: True draws an order for each epoch; otherwise rows come in the data's order.
        seed: Seed of the orders.
        drop_last: Leave out a last batch that is smaller. A rank whose microbatches have no rows
            gets an empty list otherwise, and the loader's ``collate_fn`` must take it.

    Attributes:
        epoch: The running epoch, or the next one.
        position: Rows of the epoch that all ranks together have received. A loader with workers
            asks for batches early: there, count the rows of the finished steps.

    Raises:
        ConfigError: There are no rows, no such rank, more ranks than microbatches, or several
            ranks and no ``rank``.

    Determinism: the order is the same on every machine with the same torch version.

    Example:
        >>> first, second = (ExactSampler(7, 4, shuffle=False, rank=r, num_ranks=2) for r in (0, 1))
        >>> list(first), list(second)
        ([[0, 1], [4, 5]], [[2, 3], [6]])
        >>> sampler = ExactSampler(7, 4, shuffle=False)
        >>> next(iter(sampler))
        [0, 1, 2, 3]
        >>> later = ExactSampler(7, 4, shuffle=False, rank=1, num_ranks=2)
        >>> later.load_state_dict(sampler.state_dict())
        >>> list(later)
        [[6]]
    """

    def __init__(
        self,
        data: Sized | int,
        batch_size: int,
        *,
        microbatches: int = 4,
        rank: int | None = None,
        num_ranks: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.num_rows = data if isinstance(data, int) else len(data)
        if self.num_rows < 1:
            raise ConfigError(f"`data` must hold at least 1 row, but holds {self.num_rows}.")
        self.batch_size = read_count("batch_size", batch_size, 1)
        self.microbatches = read_count("microbatches", microbatches, 1)
        if None in (rank, num_ranks) and num_default_ranks() > 1:
            raise ConfigError(
                "`rank` and `num_ranks` must be given in a process group of several ranks, but are "
                "not. For `DistributedDataParallel` they are `dist.get_rank()` and "
                "`dist.get_world_size()`; `Trainer` wants whole batches: 0 and 1."
            )
        rank, num_ranks = rank or 0, 1 if num_ranks is None else num_ranks
        wanted = f"be from 1 to the microbatches ({microbatches})"
        check_argument(0 < num_ranks <= microbatches, "num_ranks", wanted, num_ranks)
        check_argument(0 <= rank < num_ranks, "rank", f"be from 0 to {num_ranks - 1}", rank)
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0
        self._own = ranges_of(microbatches, num_ranks)[rank]

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, unless it is the one that is running."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def __len__(self) -> int:
        """Return how many batches a whole epoch has, wherever it is now."""
        return len(range(0, self._end(), self.batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield what is left of the epoch; the next one begins when all of it was taken.

        A `DataLoader` with workers takes batches before they are trained on: save
        :meth:`state_after` then.
        """
        epoch, order = self.epoch, self._order()
        for start in range(self.position, self._end(), self.batch_size):
            rows = order[start : start + self.batch_size]
            self.position = start + len(rows)
            sizes = equal_sizes(len(rows), self.microbatches)
            yield rows[sum(sizes[: self._own.start]) : sum(sizes[: self._own.stop])]
        if self.epoch == epoch:
            self.epoch, self.position = epoch + 1, 0

    def _end(self) -> int:
        left_out = self.num_rows % self.batch_size if self.drop_last else 0
        return self.num_rows - left_out

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_rows))
        draw = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        order: list[int] = torch.randperm(self.num_rows, generator=draw).tolist()
        return order

    def state_dict(self) -> dict[str, int]:
        """Return where the ranks are, for :meth:`load_state_dict` on any number of them."""
        return self.state_after(self.position)

    def state_after(self, position: int) -> dict[str, int]:
        """Return the state in which all ranks together were given ``position`` rows."""
        return {
            "epoch": self.epoch,
            "position": position,
            "num_rows": self.num_rows,
            "seed": self.seed,
        }

    # Any: it comes from a file.
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``.

        Raises:
            CheckpointError: It is of other data or another seed, or no sampler's; nothing changes
                then.
        """
        if state.keys() != self.state_dict().keys():
            raise CheckpointError(f"`state` must be of an ExactSampler, but has {[*state]}.")
        num_rows, seed = state["num_rows"], state["seed"]
        if (num_rows, seed) != (self.num_rows, self.seed):
            raise CheckpointError(
                f"`state` must be of {self.num_rows} rows and seed {self.seed}, but is of "
                f"{num_rows} and seed {seed}. Give the data and the seed that it was saved with."
            )
        self.epoch, self.position = state["epoch"], state["position"]
