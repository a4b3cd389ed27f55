"""From raw times to medians, ratios and targets. Nothing here runs or writes anything."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.report import Judged

__all__ = [
    "BASELINES",
    "IDEALS",
    "TARGETS",
    "TARGET_WORKERS",
    "Overhead",
    "Standing",
    "Target",
    "ideals",
    "overheads",
    "rank",
    "same_bits_costs",
]

# The contestants that others are measured against: the peer, plain PyTorch, our own fast mode.
BASELINES = ("ddp", "threads", "trainer")

# Those whose time, shared out among the workers, is the ideal: one core's, with nothing beside it.
IDEALS = ("single", "single-cl")

TARGET_WORKERS = 2  # the targets were set for as many


@dataclass(frozen=True, kw_only=True)
class Target:
    """On ``model``, the median of ``contestant`` is at most ``at_most`` times ``baseline``'s."""

    model: str
    contestant: str
    baseline: str
    at_most: float


def _targets(contestant: str, baseline: str, **at_most: float) -> tuple[Target, ...]:
    return tuple(
        Target(model=model, contestant=contestant, baseline=baseline, at_most=ratio)
        for model, ratio in at_most.items()
    )


TARGETS = (
    *_targets("trainer", "ddp", mlp=0.45, cnn=0.65, gpt=0.85),
    *_targets("trainer", "threads", mlp=1.0, cnn=1.05, gpt=1.0),
    *_targets("trainer-m4", "trainer", mlp=1.4, cnn=1.15, gpt=1.15),
    *_targets("processes", "ddp", mlp=0.45, cnn=0.65, gpt=0.85),
    *_targets("processes", "trainer", cnn=1.05, gpt=1.05),
    *_targets("ddp-phalanx", "ddp", mlp=0.65, cnn=0.85),
    *_targets("dataparallel", "ddp", mlp=0.55, cnn=0.7, gpt=0.9),
)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where one contestant stands.

    Args:
        ratio_by_baseline: Own median over the baseline's; without those that did not run.
        judged: Those ratios that have a target.
    """

    name: str
    num_steps: int
    median_s: float
    min_s: float
    ratio_by_baseline: Mapping[str, float]
    judged: Mapping[str, Judged] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What a contestant takes beyond an ideal."""

    ideal_s: float
    median_s: float

    @property
    def ratio(self) -> float:
        """How many times the ideal it takes."""
        return self.median_s / self.ideal_s

    @property
    def extra_s(self) -> float:
        """How much more than the ideal it takes; below 0 if it takes less."""
        return self.median_s - self.ideal_s


def rank(
    seconds: Mapping[str, Sequence[Sequence[float]]], targets: Sequence[Target] = ()
) -> list[Standing]:
    """Return a standing per contestant, in the order given.

    Args:
        seconds: Kept steps by contestant and round.
        targets: Those that count here, all for one model.

    Example:
        >>> rank({"ddp": [[0.2], [0.4, 0.3]], "trainer": [[0.1, 0.2]]})[1].ratio_by_baseline["ddp"]
        0.5
    """
    steps = {name: [step for turn in turns for step in turn] for name, turns in seconds.items()}
    medians = {name: statistics.median(times) for name, times in steps.items()}
    standings = []
    for name, times in steps.items():
        ratios = {base: medians[name] / medians[base] for base in BASELINES if base in medians}
        standings.append(
            Standing(
                name=name,
                num_steps=len(times),
                median_s=medians[name],
                min_s=min(times),
                ratio_by_baseline=ratios,
                judged={
                    target.baseline: Judged(ratios[target.baseline], target.at_most)
                    for target in targets
                    if target.contestant == name and target.baseline in ratios
                },
            )
        )
    return standings


def ideals(standings: Sequence[Standing], workers: int) -> dict[str, float]:
    """Return the seconds that ``workers`` would take if sharing the work cost nothing.

    By contestant of `IDEALS`: its median, divided by ``workers``. It is no bound: who lays out
    memory better may fall below it.

    Example:
        >>> ideals(rank({"single": [[0.6]], "ddp": [[0.5]]}), workers=3)
        {'single': 0.2}
    """
    return {
        standing.name: standing.median_s / workers
        for standing in standings
        if standing.name in IDEALS
    }


def overheads(standings: Sequence[Standing], workers: int) -> dict[str, dict[str, Overhead]]:
    """Return by ideal, and by contestant, what sharing the work costs.

    Example:
        >>> standings = rank({"single": [[1.0]], "dataparallel": [[0.75]]})
        >>> overheads(standings, workers=2)["single"]["dataparallel"].ratio
        1.5
    """
    return {
        ideal: {
            standing.name: Overhead(ideal_s=ideal_s, median_s=standing.median_s)
            for standing in standings
            if standing.name not in IDEALS
        }
        for ideal, ideal_s in ideals(standings, workers).items()
    }


def same_bits_costs(standings: Sequence[Standing]) -> dict[int, float]:
    """Return what the same bits cost: by number of microbatches, the median over the fast mode's.

    Example:
        >>> same_bits_costs(rank({"trainer": [[0.2]], "trainer-m4": [[0.25]]}))
        {4: 1.25}
    """
    return {
        int(standing.name.removeprefix("trainer-m")): standing.ratio_by_baseline["trainer"]
        for standing in standings
        if standing.name.startswith("trainer-m") and "trainer" in standing.ratio_by_baseline
    }
