"""Data- and model-parallel training for PyTorch, with the same numbers in every formation."""

from phalanx.distributed import codec_hook, launch, merge_hook
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
