"""Data- and model-parallel training for PyTorch, with the same numbers in every formation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.distributed import codec_hook, merge_hook
from phalanx.errors import (
    CheckpointError,
    ConfigError,
    GroupAborted,
    InternalError,
    OutOfSpace,
    PeerError,
    PeerLost,
    PeerTimeout,
    PhalanxError,
    StateError,
    UnsupportedError,
)
from phalanx.execution import Processes, Span, WorkerLost
from phalanx.executor_group import DataBatch, DataDesc, DataParallelExecutorGroup, Monitor
from phalanx.parallel import (
    AbstractParallel,
    DataParallel,
    ModelParallel,
    OnDevice,
    split_conv,
    split_linear,
    unsplit,
)
from phalanx.plan import Layout, Merge
from phalanx.replicas import preserve_rng
from phalanx.train import (
    EpochDone,
    ExactSampler,
    FormationChosen,
    StepDone,
    Stragglers,
    Trainer,
    Update,
    merge_updates,
    split_batch,
)

if TYPE_CHECKING:
    from phalanx.distributed import launch

__version__ = "0.1.0"

__all__ = [
    "AbstractParallel",
    "CheckpointError",
    "ConfigError",
    "DataBatch",
    "DataDesc",
    "DataParallel",
    "DataParallelExecutorGroup",
    "EpochDone",
    "ExactSampler",
    "FormationChosen",
    "GroupAborted",
    "InternalError",
    "Layout",
    "Merge",
    "ModelParallel",
    "Monitor",
    "OnDevice",
    "OutOfSpace",
    "PeerError",
    "PeerLost",
    "PeerTimeout",
    "PhalanxError",
    "Processes",
    "Span",
    "StateError",
    "StepDone",
    "Stragglers",
    "Trainer",
    "UnsupportedError",
    "Update",
    "WorkerLost",
    "__version__",
    "codec_hook",
    "launch",
    "merge_hook",
    "merge_updates",
    "preserve_rng",
    "split_batch",
    "split_conv",
    "split_linear",
    "unsplit",
]


def __getattr__(name: str) -> object:
    """Import the launcher when it is used; see `phalanx.distributed`."""
    if name != "launch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from phalanx.distributed import launch  # late: see there

    return launch
