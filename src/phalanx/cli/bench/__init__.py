"""Measure Phalanx beside its peers: ``phalanx bench``."""

from phalanx.cli.bench.balance import balance as _balance
from phalanx.cli.bench.memory import memory as _memory
from phalanx.cli.bench.recovery import recovery as _recovery
from phalanx.cli.bench.step import bench_app

bench_app.command("balance")(_balance)
bench_app.command("memory")(_memory)
bench_app.command("recovery")(_recovery)

__all__ = ["bench_app"]
