"""Start the ranks of a job."""

from __future__ import annotations

from phalanx.launching.ray import on_ray

__all__ = ["on_ray"]
