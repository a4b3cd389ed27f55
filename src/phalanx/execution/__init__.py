"""Executors run microbatches on replicas; their threads also step the optimizer in shards."""

from phalanx.execution.executor import Executor, default_intra_op
from phalanx.execution.executor_choice import ExecutorChoice, Processes, Ranks
from phalanx.execution.failures import FailureLog, WorkerLost
from phalanx.execution.processes import ProcessExecutor
from phalanx.execution.rank_messages import RankMessage, add_statistics
from phalanx.execution.rank_reduction import RankReduction, RankSums
from phalanx.execution.ranks import describe_rank, repeat_on_new_ranks
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
from phalanx.execution.thread_pool import signals_held
from phalanx.execution.threads import ThreadExecutor
