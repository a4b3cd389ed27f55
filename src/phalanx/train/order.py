"""Where the order of the data comes from, so that a resumed epoch goes on where it was left.

A loader's order is decided by generators: its own or its sampler's, or the process's own ones.
Their state at the start of an epoch is kept; to go on, it is put back, the loader is iterated anew
and the batches that were done already are passed over.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.train.sampler import ExactSampler
from phalanx.types import Nested

__all__ = ["Order", "Reader", "begin_epoch"]

_NUMPY_WORDS = 624  # of the Mersenne twister


class Order:
    """The state of all generators that may decide a loader's order.

    Attributes:
        tensors: States of torch's and NumPy's generators, by name.
        values: The rest, as JSON can hold it.
    """

    def __init__(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self.tensors = tensors
        self.values = values

    @staticmethod
    def capture(loader: object) -> Order:
        """Read the generators; nothing is drawn."""
        tensors, values = _as_stored(_process_states())
        for place, generator in enumerate(_generators_of(loader)):
            tensors[f"loader.{place}"] = generator.get_state()
        return Order(tensors, values)

    def check(self) -> None:
        """Check that every state is one, by putting it into generators of our own.

        Raises:
            ValueError: One is not.
        """
        try:
            torch.Generator().set_state(self.tensors["torch"])
            name, position, has_gauss, cached = self.values["numpy"]
            keys = self.tensors["numpy"]
            # NumPy itself takes a position beyond its state, and then reads there.
            if not 0 <= position <= _NUMPY_WORDS or keys.shape != (_NUMPY_WORDS,):
                raise ValueError(f"numpy's position {position!r} of {tuple(keys.shape)} words")
            if keys.dtype != torch.int64 or not bool(((keys >= 0) & (keys < 1 << 32)).all()):
                raise ValueError("numpy's words are no numbers of 32 bits")
            legacy = (name, keys.numpy().astype(np.uint32), position, has_gauss, cached)
            np.random.RandomState().set_state(legacy)
            version, words, gauss = self.values["python"]
            random.Random().setstate((version, tuple(words), gauss))
            if gauss is not None and not isinstance(gauss, float):
                raise ValueError(f"python's next number {gauss!r:.80}")
            for name, state in self.tensors.items():
                if name in ("numpy", "now.numpy"):
                    continue
                if state.dtype != torch.uint8 or state.dim() != 1:
                    raise ValueError(f"`{name}` holds {state.dtype} of {state.dim()} dims")
                if state.shape == self.tensors["torch"].shape:
                    torch.Generator().set_state(state)  # others are of another device's
            if (now := self.now) is not None:
                now.check()
        except (
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
            RuntimeError,
        ) as error:
            raise ValueError(f"`order` holds no states of generators: {error!r}") from error

    def restore(self, loader: object) -> None:
        """Put the generators back.

        Raises:
            CheckpointError: The loader's generators are of another kind; nothing has changed then.
        """
        generators = {f"loader.{place}": each for place, each in enumerate(_generators_of(loader))}
        for name, generator in generators.items():
            if name in self.tensors:
                _check_fits(name, self.tensors[name], generator)
        torch.set_rng_state(self.tensors["torch"])
        name, position, has_gauss, cached = self.values["numpy"]
        keys = self.tensors["numpy"].numpy().astype(np.uint32)
        np.random.set_state((name, keys, position, has_gauss, cached))
        version, state, gauss = self.values["python"]
        random.setstate((version, tuple(state), gauss))
        for name, generator in generators.items():
            if name in self.tensors:
                generator.set_state(self.tensors[name])

    def at(self, now: ProcessStates) -> Order:
        """Return this order with where the process's generators have come to since."""
        tensors, values = _as_stored(now)
        return Order(
            {**self.tensors, **{f"now.{name}": value for name, value in tensors.items()}},
            {**self.values, "now": values},
        )

    @property
    def now(self) -> Order | None:
        """Where the process's generators had come to; None in checkpoints of older versions."""
        if "now" not in self.values:
            return None
        found = {name: self.tensors[f"now.{name}"] for name in ("torch", "numpy")}
        return Order(found, self.values["now"])


# Any: Python's and NumPy's own states.
ProcessStates = tuple[Tensor, Any, Any]


def _process_states() -> ProcessStates:
    """Return the states of the process's generators: torch's, NumPy's and Python's."""
    # What `np.random.shuffle` and its like in users' datasets draw from.
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _as_stored(states: ProcessStates) -> tuple[dict[str, Tensor], dict[str, Any]]:
    own, (name, keys, position, has_gauss, cached), (version, state, gauss) = states
    tensors = {"torch": own, "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    values = {
        "python": [version, list(state), gauss],
        "numpy": [str(name), int(position), int(has_gauss), float(cached)],
    }
    return tensors, values


class Reader:
    """Read loaders so that an epoch can be left in the middle and gone on with, here or elsewhere.

    For an epoch that was left, the order is the one it began with, not the one there is now.
    """

    def __init__(self) -> None:
        self._order: Order | None = None
        self._is_stored = False  # the order came from a checkpoint and is to be put back
        self._loader: object = None
        self._iterator: object = None  # the last one, to know a generator again
        self._begun: int | None = None  # the epoch that was last opened from its first batch on
        self._taken: tuple[int, ProcessStates] | None = None  # before the last batch was read

    def batches(self, loader: Iterable[Nested], first: int, epoch: int) -> Iterator[Nested]:
        """Iterate over what is left of ``epoch`` after ``first`` batches."""
        self._loader = loader
        self._begun = epoch if first == 0 else None
        if loader is self._iterator and first > 0:
            return iter(loader)  # a generator that was left in the middle goes on by itself
        now: Order | None = None
        if self._order is not None and (self._is_stored or first > 0):
            if self._is_stored or _may_draw(loader):
                now = self._order.now
                if not self._is_stored:
                    now = Order(*_as_stored(self._states_after(first)))
                self._order.restore(loader)
        else:
            self._order = Order.capture(loader)
        self._is_stored, self._taken = False, None
        batches = _batches_from(loader, first, epoch)
        if first > 0 and now is not None:
            now.restore(None)  # an optimizer or a callback may have drawn since the epoch began
        self._iterator = batches
        return batches

    # Any: whatever stands for the end.
    def take(self, batches: Iterator[Nested], done: int, end: Any) -> Any:
        """Return the next of ``batches`` after ``done`` of the epoch, or ``end``."""
        self._taken = done, _process_states()
        return next(batches, end)

    def _states_after(self, done: int) -> ProcessStates:
        """Return where the process's generators were when ``done`` batches had been trained on.

        A batch that was read, and whose step then failed, is read again.
        """
        if self._taken is not None and self._taken[0] == done:
            return self._taken[1]
        return _process_states()

    def rewind(self, epoch: int) -> None:
        """Put back what the opening of ``epoch`` has drawn; to be called if no batch was done."""
        if self._begun == epoch and self._order is not None and _may_draw(self._loader):
            self._order.restore(self._loader)
        self._begun = None

    def reads(self, batches: Iterator[Nested]) -> bool:
        """Tell whether ``batches`` were opened last, and nothing was put back since."""
        return batches is self._iterator

    def order(self, done: int) -> Order | None:
        """Return what a checkpoint needs after ``done`` batches of the epoch; None for nothing."""
        if done == 0 and self._loader is not None and not self._is_stored:
            self._order = Order.capture(self._loader)  # what the next epoch will start from
        if done == 0 or self._is_stored or self._order is None:
            return self._order
        return self._order.at(self._states_after(done))

    def put_back(self, order: Order | None) -> None:
        """Go on from what a checkpoint holds."""
        self._order, self._is_stored, self._iterator = order, order is not None, None
        self._begun = self._taken = None


def _may_draw(loader: object) -> bool:
    """Tell whether reading ``loader`` may move the process's generators, which others share."""
    return not isinstance(loader, (list, tuple))


def is_complete(loader: Iterable[Nested], batches: int) -> bool:
    """Tell whether ``batches`` are all, without asking for another, where the loader knows it."""
    try:
        length = len(loader)  # type: ignore[arg-type]
    except TypeError:  # a generator, or a DataLoader over an IterableDataset
        return False
    return 0 < length <= batches


def begin_epoch(loader: object, epoch: int) -> None:
    """Tell the loader's sampler which epoch begins, from its first sample on."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, ExactSampler):
        sampler.load_state_dict({**sampler.state_after(0), "epoch": epoch})
    elif sampler is not None and hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


def _batches_from(loader: Iterable[Nested], first: int, epoch: int) -> Iterator[Nested]:
    """Iterate over ``loader`` from batch ``first`` on."""
    begin_epoch(loader, epoch)
    iterator = iter(loader)
    for _ in range(first):
        next(iterator, None)
    return iterator


def _check_fits(name: str, state: Tensor, generator: torch.Generator) -> None:
    try:
        torch.Generator(generator.device).set_state(state)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"The checkpoint must hold a state of the {generator.device} generator `{name}`, but "
            f"does not: {error}. Give the loader that it was saved with."
        ) from error


def _generators_of(loader: object) -> list[torch.Generator]:
    """Return the generators of a loader and of its samplers, each once."""
    found: list[torch.Generator] = []
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not g for g in found):
            found.append(generator)
    return found
