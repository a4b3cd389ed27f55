"""Executors run microbatches on replicas, reduce gradients and step shards of the optimizer."""

from phalanx.execution.contract import (
    Executor,
    GradientSums,
    MicrobatchContext,
    MicrobatchResult,
    RunResult,
    RunState,
    Span,
    blame,
    default_intra_op,
)
from phalanx.execution.elementwise import ELEMENTWISE, MOMENTS, STEP
from phalanx.execution.failures import FailureLog, WorkerFailure, WorkerLost, check_patience
from phalanx.execution.partial_sums import PartialSum, PartialSums, TreeSums
from phalanx.execution.processes import CachedPayload, ProcessExecutor, check_shareable
from phalanx.execution.ranks import open_ranks, write_once
from phalanx.execution.sent_once import SentOnce
from phalanx.execution.sharded_optimizer import (
    Stepper,
    WholeStepper,
    norm_of_gradients,
)
from phalanx.execution.shared_stepping import is_worth_sending
from phalanx.execution.source_sync import Changes
from phalanx.execution.thread_pool import ThreadPool
from phalanx.execution.threads import ThreadExecutor

__all__ = [
    "ELEMENTWISE",
    "MOMENTS",
    "STEP",
    "CachedPayload",
    "Changes",
    "Executor",
    "FailureLog",
    "GradientSums",
    "MicrobatchContext",
    "MicrobatchResult",
    "PartialSum",
    "PartialSums",
    "ProcessExecutor",
    "RunResult",
    "RunState",
    "SentOnce",
    "Span",
    "Stepper",
    "ThreadExecutor",
    "ThreadPool",
    "TreeSums",
    "WholeStepper",
    "WorkerFailure",
    "WorkerLost",
    "blame",
    "check_patience",
    "check_shareable",
    "default_intra_op",
    "is_worth_sending",
    "norm_of_gradients",
    "open_ranks",
    "write_once",
]
