"""Callbacks of a `Trainer`, and the events that they receive."""

from phalanx.callbacks.callback import Callback, EventHandler
from phalanx.callbacks.ema import EMA
from phalanx.callbacks.events import (
    EpochDone,
    Event,
    FitBegun,
    FitEnded,
    RanksChanged,
    Span,
    StepDone,
    WorkerLost,
)
from phalanx.callbacks.history import History
from phalanx.callbacks.log_files import CSV, JSONL, Record, TensorBoard, read_record
from phalanx.callbacks.monitors import EarlyStopping
from phalanx.callbacks.periodic_checkpoint import Checkpoint
from phalanx.callbacks.progress import Progress, format_mean, progress_for
from phalanx.callbacks.trace import Trace
