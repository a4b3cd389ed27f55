"""A loader over two tensors that lie in memory whole.

Legend: N rows in all, B rows in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.errors import ConfigError

Batch = tuple[Tensor, Tensor]


class TensorLoader:
    """Yield batches ``(inputs, targets)`` of the same rows of two tensors.

    A batch is gathered by one ``index_select`` per tensor: there is no Python work per sample, and
    a batch never shares memory with the data. Nothing is dropped: the last batch may be smaller.

    The order of an epoch is drawn when it begins (by ``iter(loader)``), so the state of
    ``loader.generator`` at that moment decides it: put the state back and the epoch comes again.

    Determinism: The order is the same on every machine with the same torch version; the rows are
    copied bit for bit, then handed to ``prepare``.

    Args:
        inputs: N rows of any shape and dtype, compact ones such as uint8 included.
        targets: N rows of any shape and dtype.
        batch_size: Rows per batch, 1 or more. Larger than N gives one batch of N rows.
        shuffle: Draw a new order for each epoch; otherwise rows come as they lie.
        generator: Where the order is drawn from; needed if ``shuffle``. It belongs to the loader.
        prepare: Turns the compact rows of one batch into what the model takes.

    Raises:
        ConfigError: There are no rows, the two tensors differ in rows, ``batch_size`` is less than
            1, or ``generator`` is missing.

    Example:
        >>> loader = TensorLoader(
        ...     torch.arange(5), torch.arange(5), batch_size=2, shuffle=False, generator=None
        ... )
        >>> [inputs.tolist() for inputs, targets in loader]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        batch_size: int,
        shuffle: bool,
        generator: torch.Generator | None,
        prepare: Callable[[Tensor, Tensor], Batch] | None = None,
    ) -> None:
        check_batch_size(batch_size)
        if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) == 0:
            raise ConfigError(
                f"`inputs` and `targets` must hold at least one row, but are of shape "
                f"{tuple(inputs.shape)} and {tuple(targets.shape)}."
            )
        if len(targets) != len(inputs):
            raise ConfigError(
                f"`targets` must hold one row per row of `inputs` ({len(inputs)}), "
                f"but holds {len(targets)}."
            )
        if shuffle and generator is None:
            raise ConfigError(
                "`generator` must be a torch.Generator if `shuffle` is True, but is None. "
                "Give torch.Generator().manual_seed(seed)."
            )
        self.inputs = inputs
        self.targets = targets
        self.batch_size = batch_size
        self.shuffle = shuffle
        # `Trainer.fit` seeds `.generator` for each epoch; it is None where nothing is drawn.
        self.generator = generator if shuffle else None
        self.prepare = prepare

    @property
    def num_rows(self) -> int:
        """How many rows an epoch yields."""
        return len(self.inputs)

    def __len__(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        # Drawn here and not in the generator function below, which would run only at the first
        # `next()`: a caller who records `generator` and then calls `iter()` must know the order.
        if self.shuffle:
            order = torch.randperm(self.num_rows, generator=self.generator)
        else:
            order = torch.arange(self.num_rows)
        return self._batches(order)

    def _batches(self, order: Tensor) -> Iterator[Batch]:
        for rows in torch.split(order, self.batch_size):
            inputs = self.inputs.index_select(0, rows)
            targets = self.targets.index_select(0, rows)
            yield (inputs, targets) if self.prepare is None else self.prepare(inputs, targets)

    def __repr__(self) -> str:
        order = "shuffled" if self.shuffle else "in order"
        return f"TensorLoader({self.num_rows} rows, batches of {self.batch_size}, {order})"


def check_batch_size(batch_size: int) -> None:
    """Refuse a batch size below 1."""
    if batch_size < 1:
        raise ConfigError(f"`batch_size` must be 1 or more, but is {batch_size!r}.")


@dataclass(frozen=True, kw_only=True)
class ScalePixels:
    """Turn uint8 pixels into float32 about zero: ``pixel / highest - mean``, a range of one.

    Determinism: Two float32 operations, each rounded once, so the same bits on every machine.
    """

    highest: int
    mean: float

    @classmethod
    def fitted_to(cls, pixels: Tensor, *, highest: int) -> ScalePixels:
        """Take the mean from uint8 ``pixels``, exactly: from counts of whole numbers."""
        counts = torch.bincount(pixels.flatten(), minlength=highest + 1).tolist()
        total = sum(value * count for value, count in enumerate(counts))
        return cls(highest=highest, mean=total / (highest * pixels.numel()))

    def __call__(self, inputs: Tensor, targets: Tensor) -> Batch:
        return inputs.float().div_(self.highest).sub_(self.mean), targets.long()


def widen_tokens(inputs: Tensor, targets: Tensor) -> Batch:
    """Turn bytes into the int64 indices that an embedding and a loss take."""
    return inputs.long(), targets.long()
