"""Copies of a module's parameters on the devices of its replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from phalanx.torch_internals import foreach_copy

__all__ = ["DeviceCopies", "moved_at_once"]


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
        elsewhere = [i for i, each in enumerate(self._originals) if each.device != device]
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
