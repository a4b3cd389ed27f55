"""Every sample exactly once per epoch, across ranks, restarts and changes of their number."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from phalanx.errors import CheckpointError, ConfigError
from phalanx.replicas import derive_seed

__all__ = ["ExactSampler"]


class ExactSampler(Sampler[int]):
    """A sampler that knows where it is, and neither repeats nor leaves out.

    The order belongs to (seed, epoch) alone. Ranks take turns, so all of them together have done
    the first ``position`` samples of the order at any common moment, and any other number of ranks
    can go on from there. Nothing is padded: at the end of an epoch some ranks have one sample less
    (see `phalanx.distributed.merge_hook` for how plain DDP bears that).

    Args:
        data: A data set, or anything else with a length, or the length.
        shuffle: Draw an order for each epoch; otherwise samples come as they lie.
        seed: Decides the orders.
        rank: Which of ``num_ranks`` this is.

    Attributes:
        epoch: The epoch that is running, or comes next.
        position: Samples of the epoch that all ranks together have done.

    Raises:
        ConfigError: There are no samples, or no such rank.

    Determinism: the order is the same on every machine with the same torch version.

    Example:
        >>> first, second = (ExactSampler(5, shuffle=False, rank=r, num_ranks=2) for r in (0, 1))
        >>> list(first), list(second)
        ([0, 2, 4], [1, 3])
        >>> sampler = ExactSampler(5, shuffle=False)
        >>> places = iter(sampler)
        >>> next(places), next(places)
        (0, 1)
        >>> later = ExactSampler(5, shuffle=False, rank=1, num_ranks=2)
        >>> later.load_state_dict(sampler.state_dict())
        >>> list(later)
        [3]
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.num_samples = data if isinstance(data, int) else len(data)
        if self.num_samples < 1:
            raise ConfigError(f"`data` must hold at least 1 sample, but holds {self.num_samples}.")
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"`rank` must be from 0 to {num_ranks - 1}, but is {rank!r}.")
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.num_ranks = num_ranks
        self.epoch = 0
        self.position = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, unless it is the one that is running."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def __len__(self) -> int:
        """Return how many samples a whole epoch has for this rank, wherever it is now."""
        return len(range(self.rank, self.num_samples, self.num_ranks))

    def __iter__(self) -> Iterator[int]:
        """Yield what is left of the epoch; the next one begins when all of it was taken.

        A `DataLoader` with workers takes samples before they are trained on: save
        :meth:`state_after` then.
        """
        epoch, order = self.epoch, self._order()
        for place in self._own():
            self.position = min(place - self.rank + self.num_ranks, self.num_samples)
            yield order[place]
        if self.epoch == epoch:
            self.epoch, self.position = epoch + 1, 0

    def _own(self) -> range:
        return range(self.position + self.rank, self.num_samples, self.num_ranks)

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_samples))
        draw = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        order: list[int] = torch.randperm(self.num_samples, generator=draw).tolist()
        return order

    def state_dict(self) -> dict[str, int]:
        """Return where the ranks are, for :meth:`load_state_dict` on any number of them."""
        return self.state_after(self.position)

    def state_after(self, position: int) -> dict[str, int]:
        """Return the state in which all ranks together have done ``position`` samples."""
        return {
            "epoch": self.epoch,
            "position": position,
            "num_samples": self.num_samples,
            "seed": self.seed,
        }

    # Any: it comes from a file.
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``.

        Raises:
            CheckpointError: It is of other data or another seed; nothing changes then.
        """
        num_samples, seed = state["num_samples"], state["seed"]
        if (num_samples, seed) != (self.num_samples, self.seed):
            raise CheckpointError(
                f"`state` must be of {self.num_samples} samples and seed {self.seed}, but is of "
                f"{num_samples} and seed {seed}. Give the data and the seed that it was saved with."
            )
        self.epoch, self.position = state["epoch"], state["position"]
