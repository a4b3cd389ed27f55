"""Bitwise-reproducible, elastic data-parallel training for PyTorch.

A name is imported when it is first used: `import phalanx` and the command line's `--help` cost
neither torch nor what a program does not ask for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.callbacks import (
        EpochDone,
        FitBegun,
        FitEnded,
        RanksChanged,
        StepDone,
    )
    from phalanx.compat.mxnet import DataBatch, DataDesc, DataParallelExecutorGroup, Monitor
    from phalanx.distributed.codec_hook import codec_hook
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
    from phalanx.execution import Processes, Ranks, Span, WorkerLost
    from phalanx.launching import on_ray
    from phalanx.parallel import (
        AbstractParallel,
        DataParallel,
        DistributedDataParallel,
        ModelParallel,
        OnDevice,
    )
    from phalanx.plan import Layout
    from phalanx.replicas import preserve_rng
    from phalanx.train import ExactSampler, Trainer

__version__ = "0.1.0"

__all__ = [
    "AbstractParallel",
    "CheckpointError",
    "ConfigError",
    "DataBatch",
    "DataDesc",
    "DataParallel",
    "DataParallelExecutorGroup",
    "DistributedDataParallel",
    "EpochDone",
    "ExactSampler",
    "FitBegun",
    "FitEnded",
    "GroupAborted",
    "InternalError",
    "Layout",
    "ModelParallel",
    "Monitor",
    "OnDevice",
    "OutOfSpace",
    "PeerError",
    "PeerLost",
    "PeerTimeout",
    "PhalanxError",
    "Processes",
    "Ranks",
    "RanksChanged",
    "Span",
    "StateError",
    "StepDone",
    "Trainer",
    "UnsupportedError",
    "WorkerLost",
    "__version__",
    "codec_hook",
    "on_ray",
    "preserve_rng",
]

_NAMES_BY_ROOM = {
    "phalanx.callbacks": "EpochDone FitBegun FitEnded RanksChanged StepDone",
    "phalanx.distributed": "codec_hook",
    "phalanx.errors": (
        "CheckpointError ConfigError GroupAborted InternalError OutOfSpace PeerError "
        "PeerLost PeerTimeout PhalanxError StateError UnsupportedError"
    ),
    "phalanx.execution": "Processes Ranks Span WorkerLost",
    "phalanx.compat.mxnet": "DataBatch DataDesc DataParallelExecutorGroup Monitor",
    "phalanx.launching": "on_ray",
    "phalanx.parallel": (
        "AbstractParallel DataParallel DistributedDataParallel ModelParallel OnDevice"
    ),
    "phalanx.plan": "Layout",
    "phalanx.replicas": "preserve_rng",
    "phalanx.train": "ExactSampler Trainer",
}
_ROOM_BY_NAME = {name: room for room, names in _NAMES_BY_ROOM.items() for name in names.split()}
_ROOMS = {"cluster", "codecs", "compat", "metrics", "tables"} | {
    room.removeprefix("phalanx.") for room in _NAMES_BY_ROOM
}


def __getattr__(name: str) -> object:
    """Import what a public name stands for, or a room, when it is first used."""
    if name in _ROOMS:
        return importlib.import_module(f"phalanx.{name}")
    if name not in _ROOM_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_ROOM_BY_NAME[name]), name)
    globals()[name] = value  # not asked for again
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
