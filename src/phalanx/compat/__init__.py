"""The names and call orders of earlier systems over the rooms below."""

from phalanx.compat import torch7

__all__ = ["torch7"]
