"""Measure Phalanx beside its peers: ``phalanx bench``."""

from phalanx.cli.bench.allreduce import allreduce as _allreduce
from phalanx.cli.bench.balance import balance as _balance
from phalanx.cli.bench.memory import memory as _memory
from phalanx.cli.bench.recovery import recovery as _recovery
from phalanx.cli.bench.step import bench_app
from phalanx.cli.bench.tables import tables as _tables

bench_app.command("allreduce")(_allreduce)
bench_app.command("balance")(_balance)
bench_app.command("memory")(_memory)
bench_app.command("recovery")(_recovery)
bench_app.command("tables")(_tables)

__all__ = ["bench_app"]
