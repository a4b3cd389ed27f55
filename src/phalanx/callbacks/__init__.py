"""What listens to a training: callbacks for `Trainer`, and the events that they get."""

from phalanx.callbacks.best_checkpoint import BestCheckpoint
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
    Callback,
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
from phalanx.callbacks.history import EpochMeans, History, Totals
from phalanx.callbacks.log_files import CSV, JSONL, TensorBoard
from phalanx.callbacks.progress import Progress, format_mean, progress_for
from phalanx.callbacks.saved_checkpoints import Checkpoint
from phalanx.callbacks.trace import Trace

__all__ = [
    "CSV",
    "EMA",
    "JSONL",
    "NO_RECORD",
    "AttachedTrainer",
    "BestCheckpoint",
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "EpochDone",
    "EpochMeans",
    "Event",
    "FitBegun",
    "FitEnded",
    "History",
    "Progress",
    "RanksChanged",
    "Record",
    "Span",
    "StepDone",
    "TensorBoard",
    "Totals",
    "Trace",
    "WorkerLost",
    "draw_training",
    "format_mean",
    "progress_for",
    "read_record",
    "record_of",
    "written_record",
]
