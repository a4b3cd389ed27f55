"""Measure Phalanx beside its peers: ``phalanx bench``."""

from phalanx.cli.bench.step import bench_app

__all__ = ["bench_app"]
