"""Copies of a module's parameters on the devices of its replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version


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
        self._seen = [-1] * len(originals)  # versions of the originals at the last update

    def on(self, device: torch.device) -> list[Tensor]:
        """Return the parameters on ``device``: themselves, or copies that `update` fills."""
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

    def update(self) -> None:
        """Copy all parameters again, on the current streams.

        Where an original's version was raised, those of its copies are raised too, so that a graph
        still to run backward notices, as in plain PyTorch.

        Moves: all parameters to each other device. Between accelerators the host does not wait.
        """
        versions = [0 if each.is_inference() else each._version for each in self._originals]
        with torch.inference_mode(False), torch.no_grad():
            for device, copies in self._copies.items():
                for place, own in copies.items():  # `data`, which raises no version
                    own.data.copy_(self._originals[place], non_blocking=device.type != "cpu")
                increment_version(
                    [own for place, own in copies.items() if versions[place] != self._seen[place]]
                )
        self._seen = versions
