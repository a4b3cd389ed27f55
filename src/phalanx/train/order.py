"""Where the order of the data comes from, so that a resumed epoch goes on where it was left.

A loader's order, and what its collator draws, is decided by generators: its own, its parts', or the
process's. Their state at the start of an epoch is kept; to resume, it is put back, the loader is
iterated from its beginning, and the batches that were done already are passed over.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from phalanx.errors import CheckpointError
from phalanx.torch_internals import has_workers
from phalanx.train.sampler import ExactSampler
from phalanx.types import Nested

__all__ = ["EpochOrder", "Reader", "begin_epoch", "draw_base_seed"]

_NUMPY_WORDS = 624  # of the Mersenne twister


# Any, here and below: Python's and NumPy's own states, and JSON.
class ProcessStates(NamedTuple):
    """The states of the process's generators, from which users' data sets may draw, too."""

    torch: Tensor
    numpy: Any
    python: Any

    @staticmethod
    def capture() -> ProcessStates:
        """Read the generators; nothing is drawn."""
        return ProcessStates(torch.get_rng_state(), np.random.get_state(), random.getstate())

    def restore(self) -> None:
        """Put the generators back."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)

    def pack(self) -> tuple[Any, ...]:
        """Return them as plain values and tensors."""
        name, keys, *rest = self.numpy
        return self.torch, (str(name), torch.from_numpy(keys.astype(np.int64)), *rest), self.python

    @staticmethod
    def unpack(packed: Any) -> ProcessStates:
        """Undo :meth:`pack`, and check every state by putting it into a generator of our own."""
        own, (name, keys, position, has_gauss, cached), python = packed
        torch.Generator().set_state(own)
        # NumPy itself takes a position beyond its state, and then reads there.
        if not 0 <= position <= _NUMPY_WORDS or keys.shape != (_NUMPY_WORDS,):
            raise ValueError(f"numpy's position {position!r} of {tuple(keys.shape)} words")
        numpy = (name, keys.numpy().astype(np.uint32), position, has_gauss, cached)
        np.random.RandomState().set_state(numpy)
        random.Random().setstate(python)
        return ProcessStates(own, numpy, python)


@dataclass(frozen=True)
class EpochOrder:
    """The states of all generators that may decide an epoch's order.

    Attributes:
        start: The process's, as the epoch began.
        loader: The loader's own, then.
        now: Where the process's have come to since; None at the beginning of an epoch.
        had_workers: Whether the loader's persistent workers had been started by then: a
            `DataLoader` draws a number for them only when it starts them.
    """

    start: ProcessStates
    loader: Mapping[str, Tensor]
    now: ProcessStates | None = None
    had_workers: bool = False

    @staticmethod
    def capture(loader: object) -> EpochOrder:
        """Read the generators; nothing is drawn."""
        own = {name: each.get_state() for name, each in _generators_of(loader).items()}
        return EpochOrder(ProcessStates.capture(), own, had_workers=has_workers(loader))

    def restore(self, loader: object) -> None:
        """Put the generators back to where the epoch began.

        A collator may make its generator with its first batch. One that this loader has not made
        yet is made by reading a batch, and so are persistent workers; a generator that was not
        there when the epoch began starts anew.

        Raises:
            CheckpointError: The loader's generators are of another kind; nothing has changed then.
        """
        own = _generators_of(loader)
        lacks_some = len(own.keys() & self.loader.keys()) < len(self.loader)
        if isinstance(loader, DataLoader) and (
            lacks_some or (self.had_workers and not has_workers(loader))
        ):
            here = ProcessStates.capture()
            next(iter(loader), None)
            here.restore()
            own = _generators_of(loader)
        stored = self.loader
        for name in own.keys() & stored.keys():
            _check_fits(name, stored[name], own[name])
        self.start.restore()
        for name, generator in own.items():
            if name in stored:
                generator.set_state(stored[name])
            else:
                generator.manual_seed(generator.initial_seed())
        if isinstance(loader, DataLoader) and has_workers(loader) and not self.had_workers:
            draw_base_seed(loader)  # as it did when it started them, and does not again

    def pack(self) -> dict[str, Any]:
        """Return it as plain values and tensors."""
        return {
            "start": self.start.pack(),
            "loader": dict(self.loader),
            "now": None if self.now is None else self.now.pack(),
            "had_workers": self.had_workers,
        }

    @staticmethod
    def unpack(packed: Any) -> EpochOrder:
        """Undo :meth:`pack`.

        Raises:
            ValueError: These are no states of generators.
        """
        try:
            now = packed["now"]
            return EpochOrder(
                ProcessStates.unpack(packed["start"]),
                dict(packed["loader"]),
                None if now is None else ProcessStates.unpack(now),
                bool(packed["had_workers"]),
            )
        except Exception as error:  # generators raise many kinds
            raise ValueError(f"`order` holds no states of generators: {error!r}") from error


@dataclass
class _Taken:
    """The batch that was read last; it is trained on, unless its step fails.

    Attributes:
        done: How many batches of the epoch were done before it.
        states: Where the process's generators were before it was read.
        batch: None until it is there.
    """

    done: int
    states: ProcessStates
    batch: Any = None


@dataclass
class _Opened:
    """A loader that is being iterated.

    Attributes:
        begun: The epoch, if it was opened from its first batch on, and may be rewound.
        batches: None after it has raised: what is left is then to be read again.
    """

    order: EpochOrder
    begun: int | None
    batches: Iterator[Nested] | None
    taken: _Taken | None = None

    def states_after(self, done: int) -> ProcessStates:
        """Return where the process's generators were when ``done`` batches had been trained on.

        A batch whose step failed counts as not read yet.
        """
        if self.taken is not None and self.taken.done == done:
            return self.taken.states
        return ProcessStates.capture()


class Reader:
    """Read loaders so that an epoch can be left in the middle and continued, here or elsewhere.

    Here the open iterator continues. For another loader, and after a resume, the order is the one
    that the epoch began with, not the one there is now.
    """

    def __init__(self) -> None:
        self._loader: object = None
        self._opened: _Opened | None = None
        self._stored: EpochOrder | None = None  # from a checkpoint, to be put back

    def open(self, loader: Iterable[Nested], done: int, epoch: int) -> None:
        """Get ready to read what is left of ``epoch`` after ``done`` batches."""
        opened, is_same, self._loader = self._opened, loader is self._loader, loader
        now: ProcessStates | None = None
        skipped = done
        if self._stored is not None:
            order, now = self._stored, self._stored.now
            order.restore(loader)
        elif opened is not None and done > 0:
            if is_same and opened.batches is not None:
                return
            order = opened.order
            if is_same and isinstance(loader, Iterator):
                skipped = 0  # a generator has them behind it
            elif _may_draw(loader):
                now = opened.states_after(done)
                order.restore(loader)
        else:
            order = EpochOrder.capture(loader)
        self._opened = _Opened(order, epoch if done == 0 else None, None)
        begin_epoch(loader, epoch)
        self._opened.batches = iterator = iter(loader)
        for _ in range(skipped):
            next(iterator, None)
        self._stored = None
        if done > 0 and now is not None:
            now.restore()  # an optimizer or a callback may have drawn since the epoch began

    # Any: whatever stands for the end.
    def take(self, done: int, end: Any) -> Any:
        """Return the batch after ``done`` of the epoch, or ``end``; the same until it is done."""
        opened = self._opened
        assert opened is not None
        assert opened.batches is not None
        if opened.taken is None or opened.taken.done != done:
            opened.taken = _Taken(done, ProcessStates.capture())
            try:
                opened.taken.batch = next(opened.batches, end)
            except BaseException:
                opened.batches = None
                raise
        return opened.taken.batch

    def end_epoch(self) -> None:
        """Forget the iterator, which has come to its end."""
        self._opened = None

    def pause(self, done: int, epoch: int) -> None:
        """Keep no batch that was trained on; if none was, put back what the opening has drawn."""
        opened = self._opened
        if opened is None:
            return
        if opened.taken is not None and opened.taken.done < done:
            opened.taken = None
        if done == 0:
            if opened.begun == epoch and _may_draw(self._loader):
                opened.order.restore(self._loader)
            self._opened = None

    @property
    def is_open(self) -> bool:
        """Whether there is something to read from; not after :meth:`put_back`."""
        return self._opened is not None

    def order(self, done: int, epoch: int) -> EpochOrder | None:
        """Return what is needed to go on after ``done`` batches of ``epoch``; None for nothing."""
        if self._stored is not None:
            return self._stored
        if done == 0 and self._opened is not None and self._opened.begun == epoch:
            return self._opened.order  # its first batch is read, and not done
        if done == 0:  # what the next epoch will start from
            return None if self._loader is None else EpochOrder.capture(self._loader)
        if self._opened is None:
            return None
        return replace(self._opened.order, now=self._opened.states_after(done))

    def put_back(self, order: EpochOrder | None) -> None:
        """Continue from what a checkpoint holds."""
        self._opened, self._stored = None, order

    def close(self) -> None:
        """Let go of the loader and its workers."""
        self._loader = self._opened = None


def _may_draw(loader: object) -> bool:
    """Tell whether reading ``loader`` may move the process's generators, which others share."""
    return not isinstance(loader, (list, tuple))


def draw_base_seed(loader: DataLoader[Any]) -> None:
    """Draw what a `DataLoader` draws for its workers before it asks for the first sample."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def length_of(loader: Iterable[Nested]) -> int | None:
    """Return how many batches there are, where the loader knows it."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except Exception:  # it has none, or none yet: the iteration ends where it ends
        return None


def begin_epoch(loader: object, epoch: int) -> None:
    """Announce the epoch to the loader and to every part of it that has ``set_epoch``.

    Epochs count from 0 there, as in loops of plain PyTorch.
    """
    parts = {id(part): part for _, part in _parts_of(loader)}
    for part in parts.values():
        if isinstance(part, ExactSampler):
            part.load_state_dict({**part.state_after(0), "epoch": epoch})
        elif callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)


def _check_fits(name: str, state: Tensor, generator: torch.Generator) -> None:
    try:
        torch.Generator(generator.device).set_state(state)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"The checkpoint must hold a state of the {generator.device} generator `{name}`, but "
            f"does not: {error}. Give the loader that it was saved with."
        ) from error


def _generators_of(loader: object) -> dict[str, torch.Generator]:
    """Return the generators of a loader and of its parts, each once, by where they are found."""
    found: dict[str, torch.Generator] = {}
    for path, owner in _parts_of(loader):
        own = {"generator": getattr(owner, "generator", None), **getattr(owner, "__dict__", {})}
        for name, generator in own.items():
            if isinstance(generator, torch.Generator) and all(
                generator is not each for each in found.values()
            ):
                found[f"{path}.{name}"] = generator
    return found


def _parts_of(loader: object) -> Iterator[tuple[str, object]]:
    """Return what may decide the order or the content of batches, by its path from the loader."""
    yield "loader", loader
    for path in ("sampler", "batch_sampler", "batch_sampler.sampler", "collate_fn"):
        owner: object = loader
        for name in path.split("."):
            owner = getattr(owner, name, None)
        yield f"loader.{path}", owner
    # What holds other data sets, as `random_split`, `Subset` and `ConcatDataset` do.
    waiting = [("loader.dataset", getattr(loader, "dataset", None))]
    seen: set[int] = set()
    while waiting:
        path, owner = waiting.pop()
        if owner is None or id(owner) in seen:
            continue
        seen.add(id(owner))
        yield path, owner
        waiting.append((f"{path}.dataset", getattr(owner, "dataset", None)))
        inner = getattr(owner, "datasets", None)
        if isinstance(inner, (list, tuple)):
            waiting += [(f"{path}.datasets.{i}", each) for i, each in enumerate(inner)]
