"""One model many times: the threads, copies and sums behind every container."""

from phalanx.replicas.batch_norm import batch_norm_names
from phalanx.replicas.devices import (
    known_devices,
    num_devices,
    present_devices,
    resolve_device,
    resolve_devices,
)
from phalanx.replicas.draws import (
    Draws,
    derive_seed,
    preserve_rng,
    seed_of_process,
)
from phalanx.replicas.executor import Executor, Job, Report, Span, Turn, blame, default_intra_op
from phalanx.replicas.failures import FailureLog, WorkerFailure, WorkerLost, check_patience
from phalanx.replicas.inputs import Inputs, placed
from phalanx.replicas.intra_op import caller_intra_op, hold_caller_at_one_thread, num_cores
from phalanx.replicas.memory_format import (
    restore_memory_format,
    use_channels_last,
    wants_channels_last,
)
from phalanx.replicas.mirror import Changes
from phalanx.replicas.modes import CallerModes
from phalanx.replicas.process_executor import Portion, ProcessExecutor, check_shareable
from phalanx.replicas.replica import Replica, add_gradients, apart, refuse_lazy, refuse_scripts
from phalanx.replicas.rng import (
    MicrobatchRng,
    RngPlan,
    RngUse,
    advance_process_generator,
    run_backward,
)
from phalanx.replicas.rng_watch import RngWatch, numpy_swap
from phalanx.replicas.sent_once import SentOnce
from phalanx.replicas.shelf import Place, Shelf
from phalanx.replicas.statistics import (
    Statistic,
    check_statistics,
    merge_statistics,
    sum_statistics,
    write_statistics,
)
from phalanx.replicas.sums import Partial, PartialSums, TreeSums
from phalanx.replicas.team import Team
from phalanx.replicas.thread_executor import ThreadExecutor
from phalanx.replicas.uncompiled import uncompiled
from phalanx.replicas.worker import Worker

__all__ = [
    "CallerModes",
    "Changes",
    "Draws",
    "Executor",
    "FailureLog",
    "Inputs",
    "Job",
    "MicrobatchRng",
    "Partial",
    "PartialSums",
    "Place",
    "Portion",
    "ProcessExecutor",
    "Replica",
    "Report",
    "RngPlan",
    "RngUse",
    "RngWatch",
    "SentOnce",
    "Shelf",
    "Span",
    "Statistic",
    "Team",
    "ThreadExecutor",
    "TreeSums",
    "Turn",
    "Worker",
    "WorkerFailure",
    "WorkerLost",
    "add_gradients",
    "advance_process_generator",
    "apart",
    "batch_norm_names",
    "blame",
    "caller_intra_op",
    "check_patience",
    "check_shareable",
    "check_statistics",
    "default_intra_op",
    "derive_seed",
    "hold_caller_at_one_thread",
    "known_devices",
    "merge_statistics",
    "num_cores",
    "num_devices",
    "numpy_swap",
    "placed",
    "present_devices",
    "preserve_rng",
    "refuse_lazy",
    "refuse_scripts",
    "resolve_device",
    "resolve_devices",
    "restore_memory_format",
    "run_backward",
    "seed_of_process",
    "sum_statistics",
    "uncompiled",
    "use_channels_last",
    "wants_channels_last",
    "write_statistics",
]
