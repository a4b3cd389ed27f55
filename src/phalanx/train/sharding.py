"""Let the replicas read the data: a batch is then a list of places in a data set.

Each sample is read with generators seeded by (seed, epoch, its place), so whatever a data set draws
(crops, flips, noise) is the same whoever reads it, in which batch, on which formation. They are
joined with generators seeded by the places of all, for what `collate_fn` draws (masking, mixup).
"""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, default_collate

from phalanx.errors import ConfigError
from phalanx.execution import SentOnce
from phalanx.replicas import MicrobatchRng, RngPlan, RngUse, derive_seed, numpy_swap
from phalanx.train.order import begin_epoch, draw_base_seed
from phalanx.types import Nested

__all__ = ["Loaders", "Shard"]

_generators = threading.Lock()  # the process's own generators serve one sample at a time
_NUMPY_SEEDS = 1 << 32
_JOINED = -1  # in the place of a sample's


@dataclass(frozen=True, eq=False)
class Source(SentOnce):
    """What samples are read from; worker processes get it once."""

    dataset: Any  # Any: the user's, anything with `__getitem__`
    collate: Callable[[list[Any]], Nested]


# What has been read from in this process without anything to refuse.
_watched: weakref.WeakSet[Source] = weakref.WeakSet()


@dataclass(frozen=True)
class Shard:
    """Rows that are yet to be read.

    Attributes:
        places: Which samples of the data set, in the order of the rows.
    """

    source: Source
    places: tuple[int, ...]
    seed: tuple[int, ...]

    def count(self) -> int:
        """Return the number of rows."""
        return len(self.places)

    def cut(self, sizes: Sequence[int]) -> list[Nested]:
        """Return consecutive parts of ``sizes`` rows."""
        stops = accumulate(sizes)
        return [
            replace(self, places=self.places[stop - size : stop])
            for stop, size in zip(stops, sizes, strict=True)
        ]

    def read(self) -> Nested:
        """Read all rows and join them.

        Raises:
            UnsupportedError: The data set draws what no formation can repeat.
        """
        watched = self.source not in _watched
        rows = []
        for place in self.places:
            with _seeded(derive_seed(*self.seed, place), watched):
                rows.append(self.source.dataset[place])
        with _seeded(derive_seed(*self.seed, _JOINED, *self.places), watched):
            joined = self.source.collate(rows)
        _watched.add(self.source)
        return joined


@contextlib.contextmanager
def _seeded(seed: int, watched: bool) -> Iterator[None]:
    """Seed what the body draws: torch's numbers in this thread, Python's and NumPy's in all."""
    with _generators, numpy_swap():
        before = random.getstate(), np.random.get_state()
        try:
            random.seed(seed)
            np.random.seed(seed % _NUMPY_SEEDS)
            with MicrobatchRng(seed, RngPlan(watched, throughout=True), RngUse(), reads=True):
                yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


class ShardedLoader:
    """A `DataLoader` whose batches are read by the replicas.

    It draws from the same generators in the same order as the loader itself would, so the order of
    the samples is the loader's. It keeps no loader: whoever iterates holds it.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._held = weakref.ref(loader)
        self._seed = seed
        self._epoch = 0
        self.generator = loader.generator
        self.batch_sampler: Any = loader.batch_sampler
        self._source = Source(loader.dataset, loader.collate_fn or default_collate)

    @property
    def sampler(self) -> ShardedLoader:
        """What `begin_epoch` tells the epoch: this object, by :meth:`set_epoch`."""
        return self

    @property
    def _loader(self) -> DataLoader[Any]:
        loader = self._held()
        assert loader is not None
        return loader

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch; passed on to samplers that want to know."""
        self._epoch = epoch
        begin_epoch(self._loader, epoch)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Shard]:
        draw_base_seed(self._loader)
        return self._shards()

    def _shards(self) -> Iterator[Shard]:
        batches: Iterable[Sequence[int]] = self.batch_sampler
        for places in batches:
            yield Shard(self._source, tuple(map(int, places)), (self._seed, self._epoch))


class Loaders:
    """What a trainer iterates over: loaders as they are, or made to yield `Shard` objects.

    Args:
        sharded: Whether the replicas read.
        seed: Where the samples' random numbers start.
    """

    def __init__(self, *, sharded: bool, seed: int) -> None:
        self._sharded = sharded
        self._seed = seed
        # Weak: many a loader lives for one call, and its data set with it.
        self._known: weakref.WeakKeyDictionary[object, ShardedLoader] = weakref.WeakKeyDictionary()

    def open(self, loader: Iterable[Nested]) -> Iterable[Nested]:
        """Return what is to be iterated over in the place of ``loader``.

        Raises:
            ConfigError: It must be sharded, and is no `DataLoader` over a data set with
                `__getitem__`.
        """
        if not self._sharded:
            return loader
        known = self._known.get(loader) if isinstance(loader, DataLoader) else None
        if known is None:
            known = self._known[loader] = _sharded(loader, self._seed)
        return known


def _sharded(loader: Iterable[Nested], seed: int) -> ShardedLoader:
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or loader.batch_sampler is None
    ):
        raise ConfigError(
            "`loader` must be a `torch.utils.data.DataLoader` with batches over a data set with "
            f"`__getitem__` for shard_loading=True, but is {type(loader).__name__!r}. Use "
            "shard_loading=False."
        )
    return ShardedLoader(loader, seed)
