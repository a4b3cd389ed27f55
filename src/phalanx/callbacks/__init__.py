"""What listens to a training: callbacks for `Trainer`, and the events that they get."""

from phalanx.callbacks.events import (
    AttachedTrainer,
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
from phalanx.callbacks.figure import draw_training
from phalanx.callbacks.history import EpochMeans, History, Totals
from phalanx.callbacks.meter import format_mean
from phalanx.callbacks.progress import Progress, progress_for
from phalanx.callbacks.records import NO_RECORD, Record, read_record, record_of, written_record

__all__ = [
    "NO_RECORD",
    "AttachedTrainer",
    "Callback",
    "EpochDone",
    "EpochMeans",
    "Event",
    "FitBegun",
    "FitEnded",
    "FormationChosen",
    "History",
    "Progress",
    "RanksChanged",
    "Record",
    "Span",
    "StepDone",
    "Totals",
    "WorkerLost",
    "draw_training",
    "format_mean",
    "progress_for",
    "read_record",
    "record_of",
    "written_record",
]
