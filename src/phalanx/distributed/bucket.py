"""The buckets of gradients that DDP hands to its hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from phalanx.errors import UnsupportedError

if TYPE_CHECKING:  # torch.distributed does not tell type checkers that it exports it
    from torch._C._distributed_c10d import GradBucket
else:
    from torch.distributed import GradBucket

__all__ = ["GradBucket", "refuse_sparse"]


def refuse_sparse(bucket: GradBucket) -> None:
    """Raise an `UnsupportedError`, the same on all ranks, if ``bucket`` holds a sparse gradient."""
    if bucket.buffer().layout is not torch.strided:
        raise UnsupportedError(
            "Gradients must be dense to be merged by this hook, but are sparse. Make the "
            "embedding with `sparse=False`."
        )
