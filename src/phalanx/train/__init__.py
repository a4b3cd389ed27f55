"""Training: the loop, the optimizer's step, metrics, checkpoints."""

from phalanx.callbacks import (
    Callback,
    EpochDone,
    Event,
    FitBegun,
    FitEnded,
    FormationChosen,
    RanksChanged,
    Span,
    StepDone,
    WorkerLost,
)
from phalanx.execution import EXECUTORS
from phalanx.train.formation import Formation
from phalanx.train.order import length_of
from phalanx.train.sampler import ExactSampler
from phalanx.train.trainer import Trainer
from phalanx.train.updates import Update, merge_updates, split_batch

__all__ = [
    "EXECUTORS",
    "Callback",
    "EpochDone",
    "Event",
    "ExactSampler",
    "FitBegun",
    "FitEnded",
    "Formation",
    "FormationChosen",
    "RanksChanged",
    "Span",
    "StepDone",
    "Trainer",
    "Update",
    "WorkerLost",
    "length_of",
    "merge_updates",
    "split_batch",
]
