"""An embedding whose rows lie in a table: forward pulls them, backward pushes their gradients.

    indices   [7 2 7 5]
    unique    [2 5 7]           pulled: rows 2, 5, 7 of the table, each once
    inverse   [2 0 2 1]    →    torch's own embedding over the three rows, and its own backward,
                                which adds up what a row has got from several places
    pushed    [2 5 7]           one gradient each, which the table's updater takes, once for all
                                look-ups of a backward pass

Shapes:
    K: indices.  U: rows among them, each once.  D: row width.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.plan import check_argument, read_whole
from phalanx.tables.table import Table
from phalanx.tables.updaters import Sum
from phalanx.torch_internals import backward_id, call_after_backward

_Gradients = list[tuple[Tensor, Tensor]]  # rows, and a gradient for each

_pushed: weakref.WeakKeyDictionary[Table, dict[int, _Gradients]] = weakref.WeakKeyDictionary()
"""For each table and backward pass that runs: the gradients of its look-ups so far."""


class _Push(torch.autograd.Function):
    """The rows as they are; the table takes their gradients when the backward pass has ended."""

    @staticmethod
    def forward(
        ctx: Any,
        parameter: Tensor,  # noqa: ARG004 - as DDP looks for those without a part in the loss
        rows_UD: Tensor,
        unique_U: Tensor,
        padding_idx: int | None,
        table: Table,
    ) -> Tensor:
        ctx.unique_U, ctx.padding_idx, ctx.table = unique_U, padding_idx, table
        return rows_UD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None, None]:
        unique_U, gradient_UD = ctx.unique_U, gradients[0].cpu()
        if ctx.padding_idx is not None:
            kept_U = unique_U != ctx.padding_idx
            unique_U, gradient_UD = unique_U[kept_U], gradient_UD[kept_U]
        by_pass, number = _pushed.setdefault(ctx.table, {}), backward_id()
        if number not in by_pass:
            by_pass[number] = []
            call_after_backward(partial(_add, ctx.table, number))
        by_pass[number].append((unique_U, gradient_UD))
        return None, None, None, None, None


def _add(table: Table, number: int) -> None:
    """Give a table the gradients of a backward pass."""
    rows_K, gradient_KD = map(torch.cat, zip(*_pushed[table].pop(number), strict=True))
    table.add(gradient_KD, rows=rows_K)  # what it is given twice, it adds up


class TableEmbedding(nn.Module):
    """``nn.Embedding`` over the rows of a table that workers share.

    The backward pass *is* the update: it gives the table one gradient for each row, summed over its
    places in all look-ups of the table, and the table's updater takes it at once. No optimizer
    steps, and :meth:`state_dict` holds no rows: they are kept by ``table.snapshot``. Two backward
    passes push twice; without a backward pass, or under ``torch.no_grad``, nothing does.
    ``requires_grad_(False)``, also of a module that it stands in, freezes the rows for this worker.

    It trains in a loop of the worker's own: replicas, as of ``Trainer`` and ``DataParallel``, share
    no table.

    Args:
        table: From ``world.matrix`` or ``world.keys``, of floating point, with "sgd", "adagrad" or
            another updater that subtracts gradients.
        padding_idx: A row (of the table, 0-based) that gets no gradient; its value is the table's.

    Attributes:
        rows: An empty parameter that stands for the table's rows: what freezes it freezes them.

    Shapes:
        forward: indices int64 or int32, any shape ``(*)`` -> ``(*, D)``, of the table's dtype, on
        the device of the indices.

    Raises:
        ConfigError: The table is no matrix of floating point, or its updater is "sum", which would
            go up the gradient; the padding row, or in forward any row, is outside it.
        PeerTimeout: In forward and backward, as ``table.get`` and ``table.add``.

    Determinism: Values are bitwise those of ``nn.Embedding``. If each batch goes through it once a
    step, so are rows trained with "sgd" those of ``torch.optim.SGD`` where `lr` is a power of two;
    else they differ by a rounding a step, as torch may round ``w - lr * g`` once, tables twice.

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
        super().__init__()
        check_argument(isinstance(table, Table), "table", "be what `world.matrix` returned", table)
        spec = table._spec
        fits = not spec.is_array and spec.dtype.is_floating_point
        check_argument(fits, "table", "be a matrix of floating point", table)
        wanted = "have an updater that subtracts gradients, such as 'sgd'"
        check_argument(not isinstance(spec.updater, Sum), "table", wanted, table)
        if padding_idx is not None:
            fits = spec.has_keys or 0 <= read_whole("padding_idx", padding_idx) < spec.rows
            check_argument(fits, "padding_idx", f"be a row of table {table.name!r}", padding_idx)
        self.table = table
        self.padding_idx = padding_idx
        self.embedding_dim = spec.cols
        self._original = weakref.ref(self)  # a replica has it from the module, and so not its own
        with torch.inference_mode(False):  # else it could not be used outside of it
            self.rows = nn.Parameter(torch.empty(0, device="cpu"))

    def forward(self, indices: Tensor) -> Tensor:
        """Return the rows of ``indices``."""
        if self._original() is not self:  # each replica would make an update of its own
            raise self.table.copied()
        fits = indices.dtype in (torch.int64, torch.int32)
        check_argument(fits, "indices", "be int64 or int32", indices.dtype)
        unique_U, inverse = torch.unique(indices, return_inverse=True)
        unique_U = unique_U.cpu().long()
        rows_UD = self.table.get(unique_U).to(indices.device)
        if torch.is_grad_enabled() and self.rows.requires_grad:
            rows_UD = _Push.apply(  # type: ignore[no-untyped-call]
                self.rows, rows_UD, unique_U, self.padding_idx, self.table
            )
        return nn.functional.embedding(inverse, rows_UD)

    def extra_repr(self) -> str:
        """Say which table, and which row has no gradient."""
        return f"{self.table!r}, padding_idx={self.padding_idx}"
