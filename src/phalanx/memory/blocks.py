"""Memory in one piece, copied and looked at by native/blocks.c.

It moves memory that is in no cache faster than torch: it passes it in several places at once,
fetches ahead over the ends of pages, and stores past the caches what is larger than they are
(docs/decisions/0015). Copies are torch's where the C library was not built.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.native import DTYPES, FUNCTIONS

_PAST_CACHE_BYTES = 8 << 20  # memory larger than this is in no cache when it is read
_FEW_BYTES = 64 << 10  # in which torch's own copy is as fast
_FEW_THREADS = 2  # which together copy large memory no faster than one by blocks.c


def has_memory(tensor: Tensor) -> bool:
    """Tell whether the numbers of a tensor lie where it says; what is without any has them too.

    Not those of tensors that stand for others, as DTensors and fake ones do, of those that
    `torch.func` follows, and of those whose storage was let go.

    Example:
        >>> freed = torch.ones(3)
        >>> _ = freed.untyped_storage().resize_(0)
        >>> has_memory(freed), has_memory(torch.ones(3)), has_memory(torch.ones(0))
        (False, True, True)
    """
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except (RuntimeError, TypeError):  # as it is of a kind that refuses to tell
        return False


def is_expanded(tensor: Tensor) -> bool:
    """Tell whether several elements of a tensor are one in memory, and cannot be written to.

    Example:
        >>> is_expanded(torch.ones(1).expand(3)), is_expanded(torch.ones(3).expand(1, 3))
        (True, False)
    """
    return tensor.layout == torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def dense_strides(like: Tensor) -> tuple[int, ...]:
    """Return the strides of ``like`` in the order of its memory, without gaps."""
    return torch.empty_like(like, device="meta").stride()


def laid_out_as(like: Tensor, gradient: Tensor) -> Tensor:
    """Return ``gradient`` dense, in the order in which ``like`` lies in memory."""
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.stride() != like.stride() or gradient.dtype != like.dtype:
        gradient = torch.empty_like(like).copy_(gradient)
    return gradient


def copy_to(source: Tensor, target: Tensor) -> None:
    """Copy to a tensor of the same shape and dtype elsewhere in memory, or the same one.

    Both are contiguous, or at least dense and of the same strides. Past the caches what is larger
    than they are.

    Example:
        >>> target = torch.empty(3)
        >>> copy_to(torch.arange(3.0), target)
        >>> target.tolist()
        [0.0, 1.0, 2.0]
    """
    function = FUNCTIONS.get("copy")
    num_bytes = target.nbytes
    past = num_bytes >= _PAST_CACHE_BYTES
    by_threads = past and torch.get_num_threads() > _FEW_THREADS
    # Memory holds the very numbers: autograd's zeros may have none.
    lies_plain = has_memory(source) and not source.is_conj() and not source.is_neg()
    if function is None or num_bytes < _FEW_BYTES or by_threads or not lies_plain:
        target.copy_(source)
    else:
        function(source.data_ptr(), target.data_ptr(), num_bytes, past)


def all_within(rows: Tensor, num_rows: int, first_row: int = 0) -> bool:
    """Tell whether all of ``rows``, contiguous int64, are of the ``num_rows`` from the first.

    Example:
        >>> all_within(torch.tensor([0, 4]), 5), all_within(torch.tensor([0, 4]), 5, first_row=1)
        (True, False)
    """
    return bool(FUNCTIONS["within"](rows.data_ptr(), rows.numel(), first_row, num_rows))


def all_finite(numbers: Tensor) -> bool:
    """Tell whether neither NaN nor infinity is in ``numbers``, on the CPU and of a table's dtype.

    Example:
        >>> all_finite(torch.tensor([1.0, float("nan")])), all_finite(torch.ones(3))
        (False, True)
    """
    if not numbers.dtype.is_floating_point:
        return True
    numbers = numbers.contiguous()
    return bool(FUNCTIONS[f"finite_{DTYPES[numbers.dtype]}"](numbers.data_ptr(), numbers.numel()))


def refuse_overlap(parameters: Sequence[nn.Parameter]) -> None:
    """Refuse parameters that lie over each other in memory.

    Raises:
        ConfigError: Two of them do.
    """
    spans = []
    for index, parameter in enumerate(parameters):
        if parameter.numel():
            steps = zip(parameter.shape, parameter.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in steps)
            start = parameter.data_ptr()
            stop = start + (last + 1) * parameter.itemsize
            spans.append((str(parameter.device), start, stop, index))
    spans.sort()
    for (device, _, stop, index), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < stop:
            first, second = sorted((index, other))
            raise ConfigError(
                f"Parameters {first} and {second} must lie in separate memory, but share it. "
                "Tie them by assigning the same `nn.Parameter` object to both places."
            )
