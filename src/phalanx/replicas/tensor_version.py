"""Whether a tensor is still the one that was copied, with nothing written to it since."""

from __future__ import annotations

from torch import Tensor

__all__ = ["TensorVersion"]


class TensorVersion:
    """A tensor as it was at a moment; nothing is still as it was when there was none.

    It is held and not only numbered: the address of a tensor that is gone, and its version too,
    come back with the next one.
    """

    def __init__(self, tensor: Tensor | None = None) -> None:
        self._tensor = tensor
        self._version = None if tensor is None else _version_of(tensor)

    def is_still(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` is that one, unchanged; False where torch cannot tell."""
        version = _version_of(tensor)
        return tensor is self._tensor and version is not None and version == self._version


def _version_of(tensor: Tensor) -> int | None:
    """Return its version; one that was made in inference mode has none."""
    return None if tensor.is_inference() else tensor._version
