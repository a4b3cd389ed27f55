"""Measure Phalanx beside its peers: ``phalanx bench``."""

from phalanx.cli.bench.balance import balance as _balance
from phalanx.cli.bench.step import bench_app

bench_app.command("balance")(_balance)

__all__ = ["bench_app"]
