"""Callbacks of a `Trainer`, and the events that they receive."""

from phalanx.callbacks.callback import Callback, EventHandler
from phalanx.callbacks.early_stopping import EarlyStopping
from phalanx.callbacks.ema import EMA
from phalanx.callbacks.event_records import (
    NO_RECORD,
    Record,
    read_record,
    record_of,
    written_record,
)
from phalanx.callbacks.events import (
    AttachedTrainer,
    EpochDone,
    Event,
    FitBegun,
    FitEnded,
    RanksChanged,
    Span,
    StepDone,
    WorkerLost,
)
from phalanx.callbacks.figure import draw_training
from phalanx.callbacks.history import EpochMeans, History
from phalanx.callbacks.log_files import CSV, JSONL, TensorBoard
from phalanx.callbacks.periodic_checkpoint import Checkpoint
from phalanx.callbacks.progress import Progress, format_mean, progress_for
from phalanx.callbacks.trace import Trace

__all__ = [
    "CSV",
    "EMA",
    "JSONL",
    "NO_RECORD",
    "AttachedTrainer",
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "EpochDone",
    "EpochMeans",
    "Event",
    "EventHandler",
    "FitBegun",
    "FitEnded",
    "History",
    "Progress",
    "RanksChanged",
    "Record",
    "Span",
    "StepDone",
    "TensorBoard",
    "Trace",
    "WorkerLost",
    "draw_training",
    "format_mean",
    "progress_for",
    "read_record",
    "record_of",
    "written_record",
]
