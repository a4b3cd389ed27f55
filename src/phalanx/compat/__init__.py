"""The names and call orders of earlier systems over the rooms below."""

from phalanx.compat import mxnet, torch7

__all__ = ["mxnet", "torch7"]
