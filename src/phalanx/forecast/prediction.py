"""What a step takes in a formation of any size, on hosts of any number, with failures.

    step = compute + latency + bytes + network

compute   simulated: microbatches whose seconds vary, workers that share cores, and the slowest of
          all, for whom the others wait
latency   what a step costs that has nothing to compute and no bytes: by worker
bytes     the optimizer, gradients that are added, and what else hollow models were seen to take
network   bytes and messages between hosts, by what each formation sends
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.errors import ConfigError
from phalanx.forecast.availability import share_left_by_restarts, share_left_by_substitutes
from phalanx.forecast.costs import FORMATIONS, FormationCosts, FormationKind, StepCosts
from phalanx.forecast.simulation import makespan_s, work_of_workers_s
from phalanx.plan import equal_sizes

__all__ = ["Cluster", "Faults", "Prediction", "predict", "predict_all"]

_STEPS = 200  # simulated, unless they are too large
_LEAST_STEPS = 20
_DRAWN = 4_000_000  # microbatches of all steps
_FAILURES = 10_000
_PIECE_BYTES = 4 << 20  # that an all-reduce between hosts has under way at once
_MOST_WORKERS = 100_000


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The hosts, all alike, and the network between them.

    Attributes:
        cores: Of each host.
        workers_per_host: The most workers that a host is given, before the next gets some.
        bytes_per_s: What a host sends and receives, each.
        latency_s: Of a message between two hosts.
        message_s: How long a core is busy with one message.
    """

    cores: int
    workers_per_host: int
    bytes_per_s: float = 1.25e9
    latency_s: float = 50e-6
    message_s: float = 20e-6

    def __post_init__(self) -> None:
        for name in ("cores", "workers_per_host"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` must be 1 or more, but is {getattr(self, name)!r}.")
        if not 0 < self.bytes_per_s < math.inf:
            raise ConfigError(
                f"`bytes_per_s` must be above 0 bytes per second, but is {self.bytes_per_s!r}."
            )
        _refuse_negative(self, "latency_s", "message_s")


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong.

    Attributes:
        jitter: How much a microbatch's seconds vary, as in `StepCosts`; None: as measured.
        failures_per_hour: Of one process.
        checkpoint_s: Seconds between two checkpoints.
    """

    jitter: float | None = None
    failures_per_hour: float = 0.0
    checkpoint_s: float = 600.0

    def __post_init__(self) -> None:
        _refuse_negative(self, "failures_per_hour")
        if self.jitter is not None:
            _refuse_negative(self, "jitter")
        if not 0 < self.checkpoint_s < math.inf:
            raise ConfigError(
                f"`checkpoint_s` must be above 0 seconds, but is {self.checkpoint_s!r}."
            )


def _refuse_negative(owner: Cluster | Faults, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not 0 <= value < math.inf:
            raise ConfigError(f"`{name}` must be a number from 0 on, but is {value!r}.")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is expected of one formation.

    Attributes:
        formation: Its name.
        workers: How many.
        hosts: On how many hosts.
        step_s: Mean seconds of a step in which nothing fails.
        parts_s: The same by part: compute, latency, bytes, network.
        share_left: Of the time of a long run, what failures leave for steps that count.
        rows_per_s: With failures.
        efficiency: These over what as many workers would do that cost each other nothing.
    """

    formation: str
    workers: int
    hosts: int
    step_s: float
    parts_s: dict[str, float]
    share_left: float
    rows_per_s: float
    efficiency: float


def predict(
    costs: StepCosts,
    formation: str,
    workers: int,
    *,
    cluster: Cluster,
    faults: Faults | None = None,
    microbatches: int | None = None,
    seed: int = 0,
) -> Prediction | None:
    """Predict a step of ``formation`` with so many ``workers``, each with one thread.

    Args:
        costs: What was measured.
        formation: One that was.
        workers: How many.
        cluster: The hosts.
        faults: What goes wrong; None: microbatches vary as measured, and nothing fails.
        microbatches: Of each batch, whatever the workers; None: one for each worker, so that the
            batch grows with them.
        seed: Of the simulation.

    Returns:
        None where the formation cannot have so many workers, as they are on one host.

    Raises:
        ConfigError: The formation was not measured, or a number is out of its range.

    Determinism: The same numbers for the same arguments, whatever else was predicted before.
    """
    if formation not in costs.formations:
        raise ConfigError(
            f"`formation` must be one that was measured ({', '.join(costs.formations)}), but is "
            f"{formation!r}."
        )
    for name, count in (("workers", workers), ("microbatches", microbatches)):
        if count is not None and not 1 <= count <= _MOST_WORKERS:
            raise ConfigError(f"`{name}` must be from 1 to {_MOST_WORKERS}, but is {count!r}.")
    if FORMATIONS[formation].is_on_one_host and workers > cluster.workers_per_host:
        return None
    step = _SimulatedStep(
        costs, formation, workers, cluster, faults or Faults(), microbatches, seed
    )
    parts_s = step.parts_s()
    step_s = sum(parts_s.values())
    share_left = step.share_left(step_s)
    rows_per_s = step.microbatches * costs.rows / step_s * share_left
    return Prediction(
        formation=formation,
        workers=workers,
        hosts=step.hosts,
        step_s=step_s,
        parts_s=parts_s,
        share_left=share_left,
        rows_per_s=rows_per_s,
        efficiency=rows_per_s / (workers * costs.rows / costs.alone_s),
    )


def predict_all(
    costs: StepCosts,
    formations: Sequence[str],
    workers: Sequence[int],
    *,
    cluster: Cluster,
    faults: Faults | None = None,
    microbatches: int | None = None,
    seed: int = 0,
) -> list[Prediction]:
    """Return `predict` of each formation with each number of workers that it can have."""
    found = [
        predict(
            costs,
            name,
            count,
            cluster=cluster,
            faults=faults,
            microbatches=microbatches,
            seed=seed,
        )
        for name in formations
        for count in workers
    ]
    return [each for each in found if each is not None]


@dataclass(frozen=True)
class _SimulatedStep:
    """One step of one formation."""

    costs: StepCosts
    formation: str
    workers: int
    cluster: Cluster
    faults: Faults
    fixed_microbatches: int | None
    seed: int

    @property
    def microbatches(self) -> int:
        return self.fixed_microbatches or self.workers

    @property
    def kind(self) -> FormationKind:
        return FORMATIONS[self.formation]

    @property
    def own(self) -> FormationCosts:
        return self.costs.formations[self.formation]

    @property
    def hosts(self) -> int:
        return -(-self.workers // self.cluster.workers_per_host)

    @property
    def on_host(self) -> int:
        """Workers of the fullest host."""
        return min(self.workers, self.cluster.workers_per_host)

    @property
    def at_once(self) -> int:
        """Workers of that host that can compute at the same time."""
        return min(self.on_host, self.cluster.cores)

    @property
    def turns(self) -> float:
        """How many times as long a thing takes that each worker does, where cores are few."""
        return max(1.0, self.on_host / self.cluster.cores)

    def parts_s(self) -> dict[str, float]:
        return {
            "compute": self.compute_s(),
            "latency": self.latency_s(),
            "bytes": self.bytes_s(),
            "network": self.network_s() if self.hosts > 1 else 0.0,
        }

    # --- compute ----------------------------------------------------------------------------------

    def compute_s(self) -> float:
        """Return the mean of simulated steps."""
        shares = [share for share in equal_sizes(self.microbatches, self.workers) if share]
        drawn = np.random.default_rng([self.seed, self.workers, self.microbatches])
        jitter = self.costs.jitter if self.faults.jitter is None else self.faults.jitter
        steps = max(_LEAST_STEPS, min(_STEPS, _DRAWN // self.microbatches))
        varied_SM = np.exp(jitter * drawn.standard_normal((steps, self.microbatches)))
        alone_s = self._compute_alone_s() * self.slowdown(min(len(shares), self.at_once))
        queued = self.kind.has_queue and len(shares) <= self.cluster.cores
        work_SW = work_of_workers_s(alone_s * varied_SM, shares, has_queue=queued)
        # A worker adds up its own microbatches itself.
        work_SW = work_SW + self.costs.add_s * (np.asarray(shares) - 1)
        per_host = self.cluster.workers_per_host
        ends = [
            makespan_s(work_SW[:, first : first + per_host], self.cluster.cores)
            for first in range(0, len(shares), per_host)
        ]
        return float(np.max(ends, axis=0).mean())

    def _compute_alone_s(self) -> float:
        return max(0.0, self.own.whole_s[0] - self.own.hollow_s[0])

    def slowdown(self, at_once: int) -> float:
        """Return how many times as long a microbatch takes beside others: they share memory.

        Between two numbers of workers that were measured it lies on the line between them, and
        beyond the last it stays.
        """
        alone_s = self._compute_alone_s()
        counts, measured = [1], [1.0]
        for count, whole_s, hollow_s in zip(
            self.own.workers, self.own.whole_s, self.own.hollow_s, strict=True
        ):
            if 1 < count <= self.costs.cores and alone_s:
                # What is due to the slowest of them is simulated.
                beside_s = (whole_s - hollow_s) / _slowest_of(count, self.costs.jitter)
                counts.append(count)
                measured.append(max(1.0, beside_s / alone_s))
        return float(np.interp(at_once, counts, measured))

    # --- all else ---------------------------------------------------------------------------------

    def latency_s(self) -> float:
        """Return what a step costs whatever is computed.

        It lies on the lines between the numbers of workers that were measured, and beyond the last
        of them on the line through the last two.
        """
        met = self.workers if self.kind.meets_all else self.on_host
        if self.kind.has_queue:
            return self._extrapolated(self.own.empty_s, max(met, self.microbatches))
        # Whoever waits for others is woken as soon as a core is free.
        seen_s = [
            seconds / max(1.0, count / self.costs.cores)
            for count, seconds in zip(self.own.workers, self.own.empty_s, strict=True)
        ]
        return self._extrapolated(seen_s, met) * self.turns

    def _extrapolated(self, seconds: Sequence[float], at: int) -> float:
        counts = self.own.workers
        rise = max(0.0, seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
        beyond = max(0, at - counts[-1])
        return float(np.interp(at, counts, seconds)) + beyond * rise

    def bytes_s(self) -> float:
        """Return what a step costs as parameters have so many bytes."""
        alone_s = max(0.0, self.own.hollow_s[0] - self.own.empty_s[0])
        if self.workers == 1:
            return alone_s
        # Of the largest number of workers that did not share cores.
        place = max(
            place
            for place, count in enumerate(self.own.workers)
            if place == 1 or count <= self.costs.cores
        )
        count = self.own.workers[place]
        measured = replace(
            self,
            workers=count,
            fixed_microbatches=None,
            cluster=replace(self.cluster, cores=self.costs.cores, workers_per_host=count),
        )
        seen_s = max(0.0, self.own.hollow_s[place] - self.own.empty_s[place])
        rest_s = max(0.0, seen_s - measured.known_bytes_s(alone_s)) / measured.turns
        return self.known_bytes_s(alone_s) + rest_s * self.turns

    def known_bytes_s(self, alone_s: float) -> float:
        """Return the optimizer, each worker's gradients, and their sum along the tree."""
        optimizer_s = min(self.costs.optimizer_s, alone_s)
        known_s = (alone_s - optimizer_s) * self.turns
        if not self.kind.shards_optimizer:
            known_s += optimizer_s * self.turns
        else:
            known_s += optimizer_s * self.turns / self.workers
        if self.kind.adds_along_tree:
            known_s += self.tree_s()
        return known_s

    def tree_s(self) -> float:
        """Return how long gradients are added after the last of them has come.

        That one waits for an addition on each level but the last, which all workers make together.
        Where cores are few, the additions keep them all busy for longer.
        """
        leaves = min(self.workers, self.microbatches)
        if leaves < 2:
            return 0.0
        add_s = self.costs.add_s
        along_s = (math.ceil(math.log2(leaves)) - 1) * add_s
        return max(along_s, (leaves - 2) * add_s / self.cluster.cores) + add_s / self.at_once

    def network_s(self) -> float:
        """Return what goes between hosts: see `distributed.hierarchical` for who sends what.

        The ranks of a `Trainer` send each other rank a slice of their gradients, and the hosts'
        first ranks send each host the parameters that each rank has stepped. DDP's gradients are
        reduced on each host, and then between hosts in pieces, each to all hosts and back.
        """
        num_bytes, far = self.costs.gradient_bytes, self.workers - self.on_host
        if self.kind.meets_all:
            sent = num_bytes * (self.on_host * far / self.workers + far / self.workers)
            messages = far * self.turns + self.on_host * (self.hosts - 1)
            rounds = 2
        else:
            pieces = -(-num_bytes // _PIECE_BYTES)
            sent = 2 * num_bytes * (self.hosts - 1) / self.hosts
            messages = 2 * pieces * (self.hosts - 1)
            rounds = 2 * pieces
        return (
            sent / self.cluster.bytes_per_s
            + messages * self.cluster.message_s
            + rounds * self.cluster.latency_s
        )

    # --- failures ---------------------------------------------------------------------------------

    def share_left(self, step_s: float) -> float:
        """Return what failures leave of a long run."""
        processes = 1 if self.kind.is_one_process else self.workers
        rate_per_s = processes * self.faults.failures_per_hour / 3600
        if not rate_per_s:
            return 1.0
        drawn = np.random.default_rng([self.seed, self.workers, 1])
        gaps_s = drawn.exponential(1 / rate_per_s, _FAILURES)
        own = self.own
        if own.recovery_s is None:
            checkpoint_s = self.faults.checkpoint_s
            return share_left_by_restarts(
                gaps_s, restart_s=own.restart_s, checkpoint_s=checkpoint_s
            )
        speed = 0.0
        if self.workers > 1:  # the batch is cut as before
            fewer = replace(self, workers=self.workers - 1, fixed_microbatches=self.microbatches)
            speed = min(1.0, step_s / sum(fewer.parts_s().values()))
        return share_left_by_substitutes(
            gaps_s, recovery_s=own.recovery_s, restart_s=own.restart_s, speed_without=speed
        )


def _slowest_of(workers: int, jitter: float) -> float:
    """Return the mean of the slowest of so many microbatches, over their median."""
    drawn = np.random.default_rng(0).standard_normal((10 * _STEPS, workers))
    return float(np.exp(jitter * drawn).max(axis=1).mean())
