"""Embeddings whose rows lie in a table: forward pulls them, backward pushes their gradients.

    indices   [7 2 7 5]
    unique    [2 5 7]           pulled: rows 2, 5, 7 of the table, each once
    inverse   [2 0 2 1]    →    torch's own embedding over the three rows, and its own backward,
                                which adds up what a row has got from several places
    pushed    [2 5 7]           one gradient each, which the table's updater takes

Shapes:
    K: indices.  U: rows among them, each once.  D: row width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.plan import check_argument, check_choice, read_whole
from phalanx.tables.table import PendingGet, Table
from phalanx.tables.updaters import Sum

__all__ = ["TableEmbedding", "TableEmbeddingBag"]

_MOST_PREFETCHED = 16
_MODES = ("sum", "mean", "max")


class _Push(torch.autograd.Function):
    """The rows as they are; their gradients go to the table."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, rows_UD: Tensor, unique_U: Tensor, pulled: _Rows
    ) -> Tensor:
        ctx.unique_U, ctx.pulled = unique_U, pulled
        return rows_UD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        ctx.pulled.push(gradients[0], ctx.unique_U)
        return None, None, None, None


class _Sorted(NamedTuple):
    """The rows of some indices, on their way.

    Attributes:
        indices: As they were asked for.
        unique_U: Each row once, in ascending order.
        inverse: Of the shape of the indices: where in ``unique_U`` each is.
        pending: The get.
    """

    indices: Tensor
    unique_U: Tensor
    inverse: Tensor
    pending: PendingGet


class _Rows(nn.Module):
    """What both embeddings are: a table, a row without gradient, and rows that are on their way."""

    def __init__(self, table: Table, padding_idx: int | None) -> None:
        super().__init__()
        check_argument(isinstance(table, Table), "table", "be what `world.matrix` returned", table)
        if len(table.shape) != 2 or not table.dtype.is_floating_point:
            raise ConfigError(
                f"`table` must be a matrix of floating point, but is {table!r}. Open it with "
                "`world.matrix(rows, cols)`."
            )
        if isinstance(table._spec.updater, Sum):
            raise ConfigError(
                f"Updater of table {table.name!r} must go down the gradient, but is 'sum', which "
                'goes up. Open it with `updater="sgd"`, "adagrad" or another.'
            )
        self.table = table
        self.padding_idx = _read_padding(padding_idx, table)
        self._prefetched: list[_Sorted] = []

    @property
    def embedding_dim(self) -> int:
        """D, the width of a row."""
        return self.table.shape[1]

    def prefetch(self, indices: Tensor) -> None:
        """Begin to pull the rows of the next batch, which a forward pass with it then takes.

        Rows are as of that forward pass, which on one host is spared the sorting and the checking.
        In a bulk-synchronous table this ends the worker's round, and the forward pass does not end
        another. At most 16 batches are kept; a forward pass drops those older than its own.

        Args:
            indices: As the forward pass will have them, int64 or int32.

        Raises:
            ConfigError: They are no indices of the table.
        """
        _refuse_other_than_indices(indices)
        self._prefetched.append(self._begin(indices.clone()))
        del self._prefetched[:-_MOST_PREFETCHED]

    def push(self, gradient_UD: Tensor, unique_U: Tensor) -> None:
        """Give the table the gradients of rows, but for that of ``padding_idx``; for backward."""
        if self.padding_idx is not None:
            kept = unique_U != self.padding_idx
            if not bool(kept.all()):
                unique_U, gradient_UD = unique_U[kept], gradient_UD[kept.to(gradient_UD.device)]
        self.table.add(gradient_UD, rows=unique_U)

    def _begin(self, indices: Tensor) -> _Sorted:
        unique_U, inverse = torch.unique(indices, return_inverse=True)
        unique_U = unique_U.cpu().long()
        return _Sorted(indices, unique_U, inverse, self.table.async_get(unique_U))

    def _take(self, indices: Tensor) -> _Sorted:
        for index, found in enumerate(self._prefetched):
            if found.indices.shape == indices.shape and torch.equal(found.indices, indices):
                del self._prefetched[: index + 1]
                return found
        return self._begin(indices)

    def _pull(self, indices: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Return the rows (U, D), where each index is in them, and where ``padding_idx`` is."""
        _refuse_other_than_indices(indices)
        _, unique_U, inverse, pending = self._take(indices)
        rows_UD = pending.wait().to(indices.device)
        if torch.is_grad_enabled():
            # so that there is something to go back to
            anchor = torch.empty(0, device="cpu", requires_grad=True)
            rows_UD = _Push.apply(anchor, rows_UD, unique_U, self)  # type: ignore[no-untyped-call]
        padding = None
        if self.padding_idx is not None:
            found = (unique_U == self.padding_idx).nonzero()
            padding = int(found[0]) if len(found) else None
        return rows_UD, inverse, padding

    def extra_repr(self) -> str:
        """Say which table, and which row has no gradient."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table!r}{padding}"


def _read_padding(padding_idx: int | None, table: Table) -> int | None:
    if padding_idx is None:
        return None
    row = read_whole("padding_idx", padding_idx)
    if not table._spec.has_keys and not 0 <= row < table.shape[0]:
        raise ConfigError(
            f"`padding_idx` must be a row of table {table.name!r}, 0 to {table.shape[0] - 1}, but "
            f"is {row}."
        )
    return row


def _refuse_other_than_indices(indices: Tensor) -> None:
    check_argument(isinstance(indices, Tensor), "indices", "be a tensor", indices)
    if indices.dtype not in (torch.int64, torch.int32):
        raise ConfigError(
            f"`indices` must be int64 or int32, but are {indices.dtype}. Give `indices.long()`."
        )


class TableEmbedding(_Rows):
    """``nn.Embedding`` over the rows of a table that workers share.

    The backward pass *is* the update: it gives the table one gradient for each row of the batch,
    summed over its places, and the table's updater takes it at once. No optimizer steps, and
    :meth:`state_dict` is empty: rows are kept by ``table.snapshot``. Two backward passes through
    one forward pass push twice; without a backward pass, or under ``torch.no_grad``, nothing does.

    Args:
        table: From ``world.matrix`` or ``world.keys``, of floating point, with "sgd", "adagrad" or
            another updater that goes down the gradient.
        padding_idx: A row (of the table, 0-based) that gets no gradient; its value is the table's.

    Shapes:
        forward: indices int64 or int32, any shape (*) -> (*, D), of the table's dtype, on the
        device of the indices.

    Raises:
        ConfigError: The table is no matrix of floating point, or its updater is "sum", which would
            go up the gradient; the padding row, or in forward any row, is outside it.
        PeerTimeout: In forward and backward, as ``table.get`` and ``table.add``.

    Determinism: Values, and with updater "sgd" the trained rows, are those of ``nn.Embedding`` with
    ``torch.optim.SGD``, to the bit, if every batch goes through it once per step.

    Example:
        >>> from phalanx import tables
        >>> with tables.join() as world:
        ...     table = world.matrix(5, 2, init=1.0, updater={"name": "sgd", "lr": 0.5})
        ...     embedding = TableEmbedding(table)
        ...     embedding(torch.tensor([[3, 1], [3, 3]])).sum().backward()
        ...     table.get([1, 3]).tolist()
        [[0.5, 0.5], [-0.5, -0.5]]

    Source: ``torch.nn.Embedding(sparse=True)``; it has no ``max_norm`` and ``scale_grad_by_freq``.
    """

    def __init__(self, table: Table, padding_idx: int | None = None) -> None:
        super().__init__(table, padding_idx)

    def forward(self, indices: Tensor) -> Tensor:
        """Return the rows of ``indices``."""
        rows_UD, inverse, padding = self._pull(indices)
        return nn.functional.embedding(inverse, rows_UD, padding)


class TableEmbeddingBag(_Rows):
    """``nn.EmbeddingBag`` over the rows of a table; see :class:`TableEmbedding`.

    Args:
        table: From ``world.matrix`` or ``world.keys``, of floating point.
        mode: How the rows of a bag become one: "sum", "mean" or "max".
        padding_idx: A row that counts for nothing in any bag, and gets no gradient.
        include_last_offset: Whether the last offset is the end of the last bag.

    Shapes:
        forward: indices (B, N), or (K,) with offsets (B,) -> (B, D); ``per_sample_weights``, with
        "sum" only, like the indices and of the table's dtype. Empty bags are zeros.

    Raises:
        ConfigError: As :class:`TableEmbedding`; in forward, the arguments do not fit each other.

    Example:
        >>> from phalanx import tables
        >>> with tables.join() as world:
        ...     table = world.matrix(5, 2, init=1.0, updater="sgd")
        ...     bags = TableEmbeddingBag(table, mode="sum")
        ...     bags(torch.tensor([3, 1, 3]), offsets=torch.tensor([0, 1])).tolist()
        [[1.0, 1.0], [2.0, 2.0]]
    """

    def __init__(
        self,
        table: Table,
        mode: str = "mean",
        padding_idx: int | None = None,
        *,
        include_last_offset: bool = False,
    ) -> None:
        super().__init__(table, padding_idx)
        check_argument(mode in _MODES, "mode", "be 'sum', 'mean' or 'max'", mode)
        check_choice("include_last_offset", include_last_offset)
        self.mode = mode
        self.include_last_offset = bool(include_last_offset)

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return one row for each bag of ``indices``."""
        self._refuse_misfits(indices, offsets, per_sample_weights)
        rows_UD, inverse, padding = self._pull(indices)
        if inverse.dim() == 2 and inverse.numel() == 0:  # which torch refuses, without a reason
            offsets, inverse = inverse.new_zeros(len(inverse)), inverse.view(-1)
        return nn.functional.embedding_bag(
            inverse,
            rows_UD,
            None if offsets is None else offsets.to(inverse.dtype),
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def _refuse_misfits(
        self, indices: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> None:
        check_argument(isinstance(indices, Tensor), "indices", "be a tensor", indices)
        if indices.dim() not in (1, 2) or (indices.dim() == 1) != (offsets is not None):
            shown = "without" if offsets is None else "with"
            raise ConfigError(
                "`indices` must have shape (B, N), or (K,) with `offsets`, but have "
                f"{tuple(indices.shape)} {shown} offsets."
            )
        if offsets is not None:
            self._refuse_offsets(offsets, len(indices))
        if weights is None:
            return
        if self.mode != "sum":
            raise ConfigError(
                f"`per_sample_weights` must be absent for mode {self.mode!r}, but are given. "
                "Make the bag with `mode='sum'`."
            )
        check_argument(isinstance(weights, Tensor), "per_sample_weights", "be a tensor", weights)
        if weights.shape != indices.shape or weights.dtype != self.table.dtype:
            raise ConfigError(
                f"`per_sample_weights` must be {self.table.dtype}, {tuple(indices.shape)} like the "
                f"indices, but are {weights.dtype}, {tuple(weights.shape)}."
            )

    def _refuse_offsets(self, offsets: Tensor, num_indices: int) -> None:
        check_argument(isinstance(offsets, Tensor), "offsets", "be a tensor", offsets)
        ends = offsets.tolist() if offsets.dim() == 1 else []
        rising = offsets.dtype in (torch.int64, torch.int32) and ends == sorted(ends)
        starts_well = offsets.dim() == 1 and ends[:1] in ([], [0])
        if not (rising and starts_well and ends[-1:] <= [num_indices]):
            raise ConfigError(
                "`offsets` must be a row of integers that rise from 0 to at most the number of "
                f"indices ({num_indices}), but are {offsets!r:.80}."
            )
        if self.include_last_offset and ends[-1:] != [num_indices]:
            raise ConfigError(
                f"The last of `offsets` must be the number of indices ({num_indices}), but the "
                f"offsets are {offsets!r:.80}."
            )

    def extra_repr(self) -> str:
        """Say which table, which row counts for nothing, and how bags are made."""
        return f"{super().extra_repr()}, mode={self.mode!r}"
