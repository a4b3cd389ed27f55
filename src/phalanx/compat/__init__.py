"""The names and call orders of earlier systems over the rooms below."""

from phalanx.compat import mxnet, oxirs, torch7

__all__ = ["mxnet", "oxirs", "torch7"]
