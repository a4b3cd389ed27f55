"""What replicas have on their devices: copies of parameters, and the rows of each microbatch.

A module may write to its inputs, and kernels may choose by alignment. So the rows of every
microbatch are copies in new memory, in every executor; the user's batch stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from phalanx.plan import flatten, unflatten
from phalanx.torch_internals import foreach_copy
from phalanx.types import Nested

__all__ = ["DeviceCopies", "copy_rows", "moved_at_once"]


class DeviceCopies:
    """Copies of a module's parameters, one for each other device.

    Args:
        originals: All parameters of the module, on any devices.

    Example:
        >>> weight = torch.ones(3)
        >>> copies = DeviceCopies([weight])
        >>> copies.on(torch.device("cpu")) == [weight]  # nothing to copy there
        True
    """

    def __init__(self, originals: Sequence[Tensor]) -> None:
        self._originals = originals
        self._copies: dict[torch.device, dict[int, Tensor]] = {}
        self._seen = [-1] * len(originals)  # versions of the originals at the last refresh

    def on(self, device: torch.device) -> list[Tensor]:
        """Return the parameters on ``device``: themselves, or copies that `refresh` fills."""
        elsewhere = [i for i, each in enumerate(self._originals) if not lies_on(each, device)]
        if not elsewhere:
            return list(self._originals)
        copies = self._copies.setdefault(device, {})
        with torch.inference_mode(False), torch.no_grad():
            for place in elsewhere:
                if place not in copies:
                    copies[place] = self._originals[place].detach().to(device, copy=True)
        return [copies.get(place, each) for place, each in enumerate(self._originals)]

    @property
    def are_there(self) -> bool:
        """Whether there are copies on other devices."""
        return any(self._copies.values())

    def refresh(self) -> None:
        """Copy all parameters again, on the current streams.

        Where an original's version was raised, those of its copies are raised too, so that a graph
        still to run backward notices, as in plain PyTorch.

        Moves: all parameters to each other device, those of one dtype in one copy.
        """
        versions = [0 if each.is_inference() else each._version for each in self._originals]
        with torch.inference_mode(False), torch.no_grad():
            for copies in self._copies.values():
                self._fill(copies)
                increment_version(
                    [own for place, own in copies.items() if versions[place] != self._seen[place]]
                )
        self._seen = versions

    def _fill(self, copies: dict[int, Tensor]) -> None:
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place in copies:
            original = self._originals[place]
            kinds.setdefault((original.device, original.dtype), []).append(place)
        for places in kinds.values():
            rows = [self._originals[place].detach().reshape(-1) for place in places]
            arrived = moved_at_once(rows, copies[places[0]].device)
            shapes = [self._originals[place].shape for place in places]
            foreach_copy(
                [copies[place].data for place in places],  # which raises no version
                [row.view(shape) for row, shape in zip(arrived, shapes, strict=True)],
            )


def moved_at_once(rows: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Return copies on ``device`` of 1-D tensors of one dtype, which lie together elsewhere.

    Moves: their bytes, in one copy. Between accelerators the host does not wait.
    """
    flat = torch.cat(list(rows)).to(device, non_blocking=device.type != "cpu")
    found: tuple[Tensor, ...] = flat.split([row.numel() for row in rows])
    return found


def lies_on(parameter: Tensor, device: torch.device) -> bool:
    """Tell whether replicas on ``device`` compute with the parameter itself."""
    return parameter.device == device


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
