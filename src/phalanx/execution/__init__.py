"""Executors run microbatches on replicas, reduce gradients and step shards of the optimizer."""

from phalanx.execution.contract import (
    Executor,
    default_intra_op,
    repeated,
)
from phalanx.execution.failures import FailureLog, WorkerLost
from phalanx.execution.opening import ExecutorChoice, Processes, Ranks
from phalanx.execution.processes import ProcessExecutor
from phalanx.execution.rank_messages import RankMessage, add_statistics
from phalanx.execution.rank_reduction import RankReduction, places_of
from phalanx.execution.ranks import describe_rank
from phalanx.execution.run import (
    Gradients,
    MicrobatchContext,
    MicrobatchResult,
    PartialSum,
    RunResult,
    Span,
    Task,
)
from phalanx.execution.shards import Shards
from phalanx.execution.threads import ThreadExecutor

__all__ = [
    "Executor",
    "ExecutorChoice",
    "FailureLog",
    "Gradients",
    "MicrobatchContext",
    "MicrobatchResult",
    "PartialSum",
    "ProcessExecutor",
    "Processes",
    "RankMessage",
    "RankReduction",
    "Ranks",
    "RunResult",
    "Shards",
    "Span",
    "Task",
    "ThreadExecutor",
    "WorkerLost",
    "add_statistics",
    "default_intra_op",
    "describe_rank",
    "places_of",
    "repeated",
]
