"""The names and call orders of earlier systems over the rooms below.

Import the one that you need, as in `from phalanx.compat import torch7`: a group of MXNet's needs no
tables.
"""

__all__: list[str] = []
