"""Predictions: from steps that were measured in small formations to those of any size."""

from phalanx.forecast.availability import share_left_by_restarts, share_left_by_substitutes
from phalanx.forecast.costs import FORMATIONS, FormationCosts, StepCosts, read_costs
from phalanx.forecast.prediction import Cluster, Faults, Prediction, predict, predict_all
from phalanx.forecast.simulation import makespan_s, work_of_workers_s

__all__ = [
    "FORMATIONS",
    "Cluster",
    "Faults",
    "FormationCosts",
    "Prediction",
    "StepCosts",
    "makespan_s",
    "predict",
    "predict_all",
    "read_costs",
    "share_left_by_restarts",
    "share_left_by_substitutes",
    "work_of_workers_s",
]
