"""The parameters of a module on devices where it is not itself, as the replicas there share them.

    the module's device                          another device
    parameters ──► sent, one buffer per dtype ──► its copy ◄── parameters of all replicas there

One buffer per dtype travels to each device, and only where a parameter has changed: where its
version was raised, or where its bytes are not those that were sent last. Fused optimizers, and
writes through `.data` or into a flat tensor, raise no version. To compare bytes takes one pass over
the parameters on their own device, and waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from phalanx.replicas.flat_layout import FlatLayout
from phalanx.replicas.tensor_version import TensorVersion
from phalanx.torch_internals import foreach_copy

__all__ = ["ParameterCopies"]


class ParameterCopies:
    """Copies of a module's parameters, one on each device that was asked for.

    Args:
        originals: All parameters of the module, on any devices.

    Example:
        >>> weight = torch.ones(3)
        >>> copies = ParameterCopies([weight])
        >>> copies.values_on(torch.device("cpu")) == [weight]  # nothing to copy there
        True
    """

    def __init__(self, originals: Sequence[Tensor]) -> None:
        self._originals = originals
        self._bundles: dict[tuple[torch.device, torch.dtype], _Bundle] = {}
        self._values: dict[torch.device, list[Tensor]] = {}

    def values_on(self, device: torch.device) -> list[Tensor]:
        """Return where each parameter's value lies for replicas on ``device``.

        That is the parameter itself where it is there, and else a copy that :meth:`refresh` fills.
        """
        values = [original if lies_on(original, device) else None for original in self._originals]
        if any(value is None for value in values) and device not in self._values:
            self._values[device] = self._open(device, values)
        return self._values.get(device, list(self._originals))

    def refresh(self) -> None:
        """Bring all copies up to date, on the current streams of all devices.

        Where a parameter's version was raised, that of its copies is raised too, so that a graph
        still to run backward notices, as in plain PyTorch.
        """
        with torch.inference_mode(False), torch.no_grad():
            for bundle in self._bundles.values():
                bundle.refresh()

    def _open(self, device: torch.device, values: Sequence[Tensor | None]) -> list[Tensor]:
        places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, value in enumerate(values):
            if value is None:
                original = self._originals[place]
                places.setdefault((original.device, original.dtype), []).append(place)
        found = list(self._originals)
        with torch.inference_mode(False), torch.no_grad():
            for key, members in places.items():
                if key not in self._bundles:
                    self._bundles[key] = _Bundle([self._originals[place] for place in members])
                for place, value in zip(members, self._bundles[key].open(device), strict=True):
                    found[place] = value
        return found


class _Bundle:
    """Parameters of one dtype on one device, which travel in one buffer."""

    def __init__(self, originals: Sequence[Tensor]) -> None:
        self._originals = originals
        self._seen = [TensorVersion()] * len(originals)
        self._layout = FlatLayout(originals)
        self._sent = self._layout.zeros(originals[0].device)
        self._spare: Tensor | None = None
        self._copies: list[tuple[Tensor, list[Tensor]]] = []

    def open(self, device: torch.device) -> list[Tensor]:
        """Return the parameters' places in a new copy on ``device``."""
        flat = self._layout.zeros(device)
        values = self._layout.places_in(flat)
        self._copies.append((flat, values))
        self._seen = [TensorVersion()] * len(self._originals)
        return values

    def refresh(self) -> None:
        """Send the buffer to all copies, if a parameter has changed."""
        pairs = zip(self._seen, self._originals, strict=True)
        raised = [place for place, (seen, each) in enumerate(pairs) if not seen.is_still(each)]
        if raised:
            foreach_copy(self._layout.places_in(self._sent), list(self._originals))
        elif not self._differs():
            return
        for flat, values in self._copies:
            flat.copy_(self._sent, non_blocking=flat.device.type != "cpu")
            increment_version([values[place] for place in raised])
        for place in raised:
            self._seen[place] = TensorVersion(self._originals[place])

    def _differs(self) -> bool:
        """Gather the parameters anew, and tell whether they are others than those sent."""
        now = self._layout.zeros(self._sent.device) if self._spare is None else self._spare
        foreach_copy(self._layout.places_in(now), list(self._originals))
        self._sent, self._spare = now, self._sent
        return not torch.equal(self._sent.view(torch.uint8), self._spare.view(torch.uint8))


def lies_on(parameter: Tensor, device: torch.device) -> bool:
    """Tell whether replicas on ``device`` compute with the parameter itself."""
    return parameter.device == device
