"""Executors run microbatches on replicas, reduce gradients and step shards of the optimizer."""

from phalanx.distributed import GroupChanged
from phalanx.execution.contract import (
    CachedPayload,
    Executor,
    GradientHook,
    MicrobatchContext,
    MicrobatchResult,
    RunResult,
    SourceVersion,
    Span,
    default_intra_op,
)
from phalanx.execution.elementwise import ELEMENTWISE, MOMENTS, STEP
from phalanx.execution.failures import FailureLog, WorkerFailure, WorkerLost
from phalanx.execution.opening import (
    EXECUTORS,
    ExecutorChoice,
    ExecutorMaker,
    PoolGroup,
    Processes,
    Ranks,
    nccl_serves,
    refuse_moved,
)
from phalanx.execution.partial_sums import Gradients, PartialSum
from phalanx.execution.processes import ProcessExecutor, check_shareable
from phalanx.execution.ranks import described
from phalanx.execution.sent_once import SentOnce
from phalanx.execution.sharded_optimizer import (
    Stepper,
    WholeStepper,
    norm_of_gradients,
)
from phalanx.execution.thread_pool import ThreadPool
from phalanx.execution.threads import ThreadExecutor

__all__ = [
    "ELEMENTWISE",
    "EXECUTORS",
    "MOMENTS",
    "STEP",
    "CachedPayload",
    "Executor",
    "ExecutorChoice",
    "ExecutorMaker",
    "FailureLog",
    "GradientHook",
    "Gradients",
    "GroupChanged",
    "MicrobatchContext",
    "MicrobatchResult",
    "PartialSum",
    "PoolGroup",
    "ProcessExecutor",
    "Processes",
    "Ranks",
    "RunResult",
    "SentOnce",
    "SourceVersion",
    "Span",
    "Stepper",
    "ThreadExecutor",
    "ThreadPool",
    "WholeStepper",
    "WorkerFailure",
    "WorkerLost",
    "check_shareable",
    "default_intra_op",
    "described",
    "nccl_serves",
    "norm_of_gradients",
    "refuse_moved",
]
