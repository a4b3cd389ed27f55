"""The buckets of gradients that DDP hands to its hooks."""

from __future__ import annotations

import torch
from torch.distributed import GradBucket

from phalanx.errors import UnsupportedError

__all__ = ["refuse_sparse"]


def refuse_sparse(bucket: GradBucket) -> None:
    """Raise an `UnsupportedError`, the same on all ranks, if ``bucket`` holds a sparse gradient."""
    if bucket.buffer().layout is not torch.strided:
        raise UnsupportedError(
            "Gradients must be dense to be merged by this hook, but are sparse. Make the "
            "embedding with `sparse=False`."
        )
