"""Merge the gradients of DDP's ranks right, however many samples each of them has.

Shape legend: W ranks; g_r the gradient of rank r, w_r its weight.

    bucket 0 ready ──▶ all-reduce [0, …, w_r, …, 0]_W ─────┐
                  ├──▶ all-reduce g_r of bucket 0 ─────────┼──▶ Σ g / Σ w
    bucket 1 ready ──▶ all-reduce g_r of bucket 1 ─────────┘──▶ Σ g / Σ w
"""

# DDP compares a hook's annotations with the objects themselves, so they cannot be strings here:
# no `from __future__ import annotations`.

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future

from phalanx.errors import ConfigError, UnsupportedError

__all__ = ["Hook", "merge_hook", "refuse_sparse"]

Hook = Callable[[object, GradBucket], Future[Tensor]]


def merge_hook(
    weight_fn: Callable[[], float],
    *,
    reduction: str = "sum",
    process_group: dist.ProcessGroup | None = None,
) -> Hook:
    """Make a hook with which DDP's gradient is that of the whole batch, over all ranks and steps.

    Plain DDP takes the mean over ranks, which is the gradient of the whole batch only where all
    ranks have the same number of samples or tokens. With this hook a rank counts for as much as it
    has, and for nothing if it has nothing. Give each model a hook of its own, before its first
    backward pass, and clear gradients after each step (``zero_grad()``): what is merged already
    must not be merged again.

    * ``reduction="sum"``: the loss is a **sum** over samples, as criteria give with a
      ``reduction="sum"`` of their own. Passes under ``no_sync()`` add up. Gradient: Σ g / Σ w.
    * ``reduction="mean"``: the loss is the **mean** over ``weight_fn()`` samples, and there is one
      backward pass per step. Gradient: Σ w·g / Σ w.

    A rank without samples still runs forward and backward (of an empty batch, say), or joins under
    ``torch.distributed.algorithms.Join``; its weight is 0, and its gradient is not looked at. If no
    rank has any, the gradient is zero.

    Args:
        weight_fn: Called once per merge on every rank, at its start and in the thread of the
            backward pass. Returns how many samples or tokens the gradients stand for that this
            rank merges now: of all passes since the last merge. It may reset its count.
        reduction: ``"sum"`` or ``"mean"``, see above.
        process_group: The one that DDP was given, by default all ranks.

    Returns:
        The hook, for ``ddp.register_comm_hook(None, hook)``.

    Raises:
        ConfigError: ``reduction`` is another word; or, in ``backward()``, a weight is no finite
            number ≥ 0.

    Example:
        >>> counts = []
        >>> def weight():
        ...     total = sum(counts)
        ...     counts.clear()
        ...     return total
        >>> hook = merge_hook(weight)
        >>> # ddp.register_comm_hook(None, hook)
        >>> # for x, y in batches:
        >>> #     counts.append(len(y))
        >>> #     cross_entropy(ddp(x), y, reduction="sum").backward()

    Determinism: sums are those of the group's all-reduce; gradients narrower than float32 travel
    and are added in float32, because a sum over samples soon leaves the range of float16.
    Collective: Yes, every rank's backward pass. Blocks: as DDP does, until all ranks have come.
    Moves: what DDP moves (twice that for 16-bit gradients), and 8 bytes per rank.
    """
    if reduction not in ("sum", "mean"):
        raise ConfigError(f"`reduction` must be 'sum' or 'mean', but is {reduction!r}.")
    return _Merge(weight_fn, reduction == "mean", process_group).merge


def refuse_sparse(bucket: GradBucket) -> None:
    """Raise an `UnsupportedError`, the same on all ranks, if ``bucket`` holds a sparse gradient."""
    if bucket.buffer().layout is not torch.strided:
        raise UnsupportedError(
            "Gradients must be dense to be merged by this hook, but are sparse. Make the "
            "embedding with `sparse=False`."
        )


class _Merge:
    """The hook and what it knows of the backward pass that is under way."""

    def __init__(
        self, weight_fn: Callable[[], float], is_mean: bool, group: dist.ProcessGroup | None
    ) -> None:
        self._weight_fn = weight_fn
        self._is_mean = is_mean
        self._group = group
        self._weight = 0.0
        self._weights_W = torch.empty(0)
        self._arrival: Future[Tensor] = Future()

    def merge(self, _state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        """Start to merge ``bucket``."""
        refuse_sparse(bucket)
        buffer: Tensor = bucket.buffer()
        if bucket.index() == 0:  # DDP hands them over in order
            self._start(buffer.device)
        wide = buffer if buffer.itemsize >= 4 else buffer.float()
        if self._weight == 0:
            wide.zero_()  # not a product: a mean over no samples may well be NaN
        elif self._is_mean:
            wide.mul_(self._weight)
        weights_W = self._weights_W
        future = dist.all_reduce(wide, group=self._group, async_op=True).get_future()

        def divide(arrived: Future[list[Future[Tensor]]]) -> Tensor:
            for each in arrived.value():
                each.value()  # raises what went wrong
            total = weights_W.sum()
            wide.div_(torch.where(total == 0, 1, total))
            if wide is not buffer:
                buffer.copy_(wide)
            return buffer

        merged: Future[Tensor] = torch.futures.collect_all([self._arrival, future]).then(divide)
        return merged

    def _start(self, device: torch.device) -> None:
        """Ask for this rank's weight and send it to the others."""
        self._weight = float(self._weight_fn())
        if not (math.isfinite(self._weight) and self._weight >= 0):
            raise ConfigError(
                "`weight_fn` must return a finite number of samples or tokens ≥ 0, but returned "
                f"{self._weight!r}."
            )
        dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        ranks = dist.get_world_size(self._group)
        self._weights_W = torch.zeros(ranks, dtype=dtype, device=device)
        self._weights_W[dist.get_rank(self._group)] = self._weight
        work = dist.all_reduce(self._weights_W, group=self._group, async_op=True)
        self._arrival = work.get_future()
