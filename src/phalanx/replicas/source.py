"""A module that the user trains, as all its replicas read it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from phalanx.replicas.attribute_fingerprint import AttributeFingerprint


class Source:
    """A module that the user trains, with copies of its parameters on its replicas' devices.

    Args:
        module: The module; its parameters may lie on any devices.
        prefix: Comes before the names of its buffers.
        averages: Whether floating-point buffers that replicas write are averaged.

    Attributes:
        parameters: All parameters of the module.
        copies: Of parameters that lie elsewhere, by device and index.
        fingerprint: Of the module as replicas see it.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> source = Source(net)
        >>> source.on(torch.device("cpu"))[0] is net.weight  # nothing to copy there
        True
    """

    def __init__(self, module: nn.Module, *, prefix: str = "", averages: bool = True) -> None:
        self.module = module
        self.prefix = prefix
        self.averages = averages
        self.parameters = list(module.parameters())
        self.copies: dict[torch.device, dict[int, Tensor]] = {}
        self._seen = [-1] * len(self.parameters)  # their versions at the last update
        self.fingerprint = AttributeFingerprint(module)

    def outdate_shells(self) -> None:
        """Let replicas make new shells when they run next, of what the module holds by then."""
        self.fingerprint = AttributeFingerprint(self.module)

    def on(self, device: torch.device) -> list[Tensor]:
        """Return the parameters on ``device``: themselves, or copies that `update_copies` fills."""
        elsewhere = [i for i, each in enumerate(self.parameters) if each.device != device]
        if not elsewhere:
            return list(self.parameters)
        copies = self.copies.setdefault(device, {})
        with torch.inference_mode(False), torch.no_grad():
            for place in elsewhere:
                if place not in copies:
                    copies[place] = self.parameters[place].detach().to(device, copy=True)
        return [copies.get(place, each) for place, each in enumerate(self.parameters)]

    def update_copies(self) -> None:
        """Copy all parameters again, on the current streams.

        Where an original's version was raised, those of its copies are raised too, so that a graph
        still to run backward notices, as in plain PyTorch.

        Moves: all parameters to each other device. Between accelerators the host does not wait.
        """
        versions = [0 if each.is_inference() else each._version for each in self.parameters]
        with torch.inference_mode(False), torch.no_grad():
            for device, copies in self.copies.items():
                for place, own in copies.items():  # `data`, which raises no version
                    own.data.copy_(self.parameters[place], non_blocking=device.type != "cpu")
                increment_version(
                    [own for place, own in copies.items() if versions[place] != self._seen[place]]
                )
        self._seen = versions
