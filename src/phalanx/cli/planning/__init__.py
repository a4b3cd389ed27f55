"""``phalanx plan``: what a step would take in formations of any size."""

from phalanx.cli.planning.command import plan

__all__ = ["plan"]
