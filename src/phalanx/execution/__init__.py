"""Executors run microbatches on replicas, reduce gradients and step shards of the optimizer."""

from phalanx.execution.contract import (
    Executor,
    MicrobatchContext,
    MicrobatchResult,
    RunResult,
    Span,
    Task,
    default_intra_op,
)
from phalanx.execution.elastic_ranks import repeated
from phalanx.execution.elementwise import ELEMENTWISE, MOMENTS, STEP
from phalanx.execution.failures import FailureLog, WorkerFailure, WorkerLost
from phalanx.execution.opening import (
    EXECUTORS,
    ExecutorChoice,
    ExecutorMaker,
    Processes,
    Ranks,
    Threads,
    check_reduce,
    nccl_serves,
    refuse_without_nccl,
)
from phalanx.execution.partial_sums import Gradients, PartialSum
from phalanx.execution.processes import ProcessExecutor
from phalanx.execution.ranks import described
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
    "Executor",
    "ExecutorChoice",
    "ExecutorMaker",
    "FailureLog",
    "Gradients",
    "MicrobatchContext",
    "MicrobatchResult",
    "PartialSum",
    "ProcessExecutor",
    "Processes",
    "Ranks",
    "RunResult",
    "Span",
    "Stepper",
    "Task",
    "ThreadExecutor",
    "ThreadPool",
    "Threads",
    "WholeStepper",
    "WorkerFailure",
    "WorkerLost",
    "check_reduce",
    "default_intra_op",
    "described",
    "nccl_serves",
    "norm_of_gradients",
    "refuse_without_nccl",
    "repeated",
]
