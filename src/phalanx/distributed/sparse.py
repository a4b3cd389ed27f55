"""All-reduce of sparse tensors: every rank gets the others' entries, and adds them up.

    rank 0  {1: a, 2: b}          all  {0: c, 1: a + d, 2: b}
    rank 1  {0: c, 1: d}

So each moves the entries of all, and sums of one entry are made in rank order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.distributed.collective_buffers import Steps
from phalanx.distributed.hierarchical import Hierarchical
from phalanx.distributed.intra_host import IntraHost
from phalanx.distributed.ops import ReduceOperation
from phalanx.errors import ConfigError, UnsupportedError

__all__ = ["all_reduce_sparse", "is_sparse"]

_NOT_ADDED = (torch.float16, torch.bool)


def is_sparse(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` lists its entries (COO) and is on the CPU."""
    return tensor.layout is torch.sparse_coo and tensor.is_cpu


def all_reduce_sparse(
    collectives: IntraHost | Hierarchical, tensor: Tensor, reduction: ReduceOperation
) -> Steps:
    """Sum ``tensor`` over the ranks, in place; it is coalesced afterwards.

    Raises:
        UnsupportedError: The operation is another than SUM, or torch cannot add this dtype.
        ConfigError: The tensor is a leaf that requires grad; or the ranks' tensors differ in shape,
            and all ranks raise.
    """
    if tensor.is_leaf and tensor.requires_grad and torch.is_grad_enabled():
        raise ConfigError(
            "`tensor` must be no leaf that requires grad where it is sparse, but is one. Give "
            "`.detach()`."
        )
    if not reduction.is_plain_sum or reduction.factor is not None:
        raise UnsupportedError(
            f"`op` must be SUM for sparse tensors, but is {reduction.name}. Give `.to_dense()`."
        )
    if tensor.dtype in _NOT_ADDED:
        raise UnsupportedError(
            f"`tensor` must be of a dtype that torch adds up where it is sparse, but is of "
            f"{tensor.dtype}. Give `.to_dense()` or another dtype."
        )
    return _steps(collectives, tensor)


def _steps(collectives: IntraHost | Hierarchical, tensor: Tensor) -> Steps:
    with torch.no_grad():
        given = tensor.coalesce()
        indices, values = given.indices(), given.values()
    own = torch.tensor([values.shape[0], tensor.sparse_dim(), *tensor.shape])
    facts = [torch.empty_like(own) for _ in range(collectives.size)]
    yield from collectives.all_gather(facts, own)
    counts = [int(one[0]) for one in facts]
    if any(one[1:].tolist() != own[1:].tolist() for one in facts):
        raise ConfigError(
            "`tensor` must have one shape on all ranks, but they have "
            f"{[(*one[2:].tolist(),) for one in facts]}."
        )
    all_indices = [indices.new_empty((indices.shape[0], count)) for count in counts]
    yield from collectives.all_gather([one.view(-1) for one in all_indices], _line(indices))
    all_values = [values.new_empty((count, *values.shape[1:])) for count in counts]
    yield from collectives.all_gather([one.view(-1) for one in all_values], _line(values))
    with torch.no_grad():
        total = torch.zeros_like(given)
        for at, numbers in zip(all_indices, all_values, strict=True):
            total += torch.sparse_coo_tensor(at, numbers, tensor.shape, is_coalesced=True)
        tensor.copy_(total.coalesce())


def _line(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1)
