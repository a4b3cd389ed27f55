"""Data- and model-parallel training for PyTorch, with the same numbers in every formation."""

from phalanx.errors import (
    CheckpointError,
    ConfigError,
    GroupAborted,
    InternalError,
    PeerError,
    PeerLost,
    PeerTimeout,
    PhalanxError,
    StateError,
    UnsupportedError,
)
from phalanx.parallel import DataParallel
from phalanx.plan import Layout
from phalanx.train import EpochDone, FormationChosen, Span, StepDone, Trainer

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataParallel",
    "EpochDone",
    "FormationChosen",
    "GroupAborted",
    "InternalError",
    "Layout",
    "PeerError",
    "PeerLost",
    "PeerTimeout",
    "PhalanxError",
    "Span",
    "StateError",
    "StepDone",
    "Trainer",
    "UnsupportedError",
    "__version__",
]
