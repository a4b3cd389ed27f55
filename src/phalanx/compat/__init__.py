"""The names and call orders of earlier systems over the rooms below."""

from phalanx.compat import multiverso, mxnet, oxirs, torch7

__all__ = ["multiverso", "mxnet", "oxirs", "torch7"]
