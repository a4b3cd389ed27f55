"""Let ``init_process_group("phalanx")`` work without ``import phalanx``.

torch calls `register` at the end of its own import, through the entry point `torch.backends`. So
this file stands outside the package and imports nothing of it before a group is made: who only
wants torch pays for nothing else.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["register"]


def register() -> None:
    """Tell ``torch.distributed``, where there is one, the backend's name and its maker."""
    if dist.is_available():
        dist.Backend.register_backend("phalanx", _make_group, devices=["cpu"])


def _make_group(*args: Any) -> Any:  # Any: torch's, passed on as it comes
    # Late: the package takes far longer to import than this file may.
    from phalanx.distributed import make_group

    return make_group(*args)
