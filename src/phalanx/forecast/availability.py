"""A long run with failures, simulated from failure to failure: what share of its time is left."""

from __future__ import annotations

import numpy as np

from phalanx.forecast.simulation import Floats

__all__ = ["share_left_by_restarts", "share_left_by_substitutes"]


def share_left_by_restarts(gaps_s: Floats, *, restart_s: float, checkpoint_s: float) -> float:
    """Return the share of a run's time whose steps count, if a failure ends the job.

    It is started again, which may fail as well, and goes on from its last checkpoint: the steps
    since then are lost. Writing checkpoints takes no time here.

    Args:
        gaps_s: From each failure to the next, 1-D.
        restart_s: From a failure to the next step.
        checkpoint_s: Seconds between two checkpoints.

    Source: Daly, A higher order estimate of the optimum checkpoint interval, 2006. With
        exponential gaps of mean 1/λ it is λ·τ·exp(-λ·R) / (exp(λ·τ) - 1).
    """
    kept_s = np.floor(np.maximum(gaps_s - restart_s, 0.0) / checkpoint_s) * checkpoint_s
    return float(kept_s.sum() / gaps_s.sum())


def share_left_by_substitutes(
    gaps_s: Floats, *, recovery_s: float, restart_s: float, speed_without: float
) -> float:
    """Return the same if the others finish the step of a lost worker, which is then replaced.

    Args:
        gaps_s: From each failure to the next, 1-D.
        recovery_s: How much longer the step takes in which a worker is lost.
        restart_s: How long it is missing.
        speed_without: How fast the others go meanwhile, over how fast all do.

    Source: With exponential gaps of mean 1/λ a worker is missing for a share 1 - exp(-λ·R) of the
        time between failures, however many are missing at once.
    """
    missing_s = np.minimum(gaps_s, restart_s).sum()
    done_s = gaps_s.sum() - (1.0 - speed_without) * missing_s
    return float(done_s / (gaps_s.sum() + len(gaps_s) * recovery_s))
