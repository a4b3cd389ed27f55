"""Start the ranks of a job."""

from __future__ import annotations

from phalanx.launching.launcher import launch_script
from phalanx.launching.rank_failures import RankFailed
from phalanx.launching.ray import on_ray

__all__ = ["RankFailed", "launch_script", "on_ray"]
