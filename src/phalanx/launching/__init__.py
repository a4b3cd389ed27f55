"""Start the ranks of a job."""

from __future__ import annotations

from phalanx.launching.launcher import launch, launch_script
from phalanx.launching.rank_failures import RankFailed
from phalanx.launching.ray import on_ray

__all__ = ["RankFailed", "launch", "launch_script", "on_ray"]
