"""Replicas of a module: shells, buffers, devices, modes and random numbers of each."""

from phalanx.replicas.attribute_fingerprint import AttributeFingerprint, PlainChanges
from phalanx.replicas.buffers import (
    Statistic,
    Statistics,
    check_statistics,
    merge_statistics,
    sum_statistics,
    write_statistics,
)
from phalanx.replicas.compiling import CompileOnce, has_compiled
from phalanx.replicas.devices import (
    known_devices,
    num_devices,
    resolve_device,
    resolve_devices,
)
from phalanx.replicas.modes import (
    CallerModes,
    autocast_off,
    caller_intra_op,
    callers_streams,
    current_streams,
    entered_modes,
    hold_caller_at_one_thread,
    num_cores,
    set_intra_op,
)
from phalanx.replicas.replica import Replica, check_replicable
from phalanx.replicas.rng import (
    MicrobatchRng,
    ProcessRng,
    RngPlan,
    advance_process_generator,
    derive_seed,
    generator_states,
    has_fused_evaluation,
    preserve_rng,
    seed_of_process,
    set_generators,
)
from phalanx.replicas.shell import OwnInShell, placed_on, warn_of_assigned
from phalanx.replicas.source import Source
from phalanx.replicas.source_gradients import SourceGradients, current_replica
