"""The rows of a microbatch as a replica has them: fresh copies on its device.

A module may write to its inputs, and kernels may choose by alignment. So the rows of every
microbatch are copies in new memory, in every executor; the user's batch stays as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.plan import flatten, unflatten
from phalanx.types import Nested

__all__ = ["copy_rows"]


def copy_rows(rows: Nested, device: torch.device) -> Nested:
    """Return copies of all tensors, on ``device``, and of all arrays; without their graph.

    A tensor that is there twice is one tensor in the copy, too.

    Example:
        >>> x = torch.ones(3)
        >>> copy = copy_rows({"a": x, "b": x}, torch.device("cpu"))
        >>> copy["a"] is copy["b"], copy["a"] is x
        (True, False)
    """
    leaves, spec = flatten(rows)
    copies = {id(leaf): _copy_of(leaf, device) for leaf in leaves}
    return unflatten([copies[id(leaf)] for leaf in leaves], spec)


def _copy_of(leaf: Any, device: torch.device) -> Any:  # Any: whatever a batch holds
    if isinstance(leaf, Tensor):
        # The host reads at once what is on the CPU.
        return leaf.detach().to(device, copy=True, non_blocking=device.type != "cpu")
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
