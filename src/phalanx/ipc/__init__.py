"""Memory and locks that processes of one host share, and their waits for each other."""

from phalanx.ipc.fail_points import fail_point, inject
from phalanx.ipc.forks import flush_output, fork, fork_apart, let_go, register_at_fork, take_signals
from phalanx.ipc.limits import available_memory_bytes, cores_allowed
from phalanx.ipc.liveness import Waiting, late_peers, wait_until
from phalanx.ipc.mutex import Changes, Mutex
from phalanx.ipc.process import ProcessIdentity, die_with_parent, signal_main_thread
from phalanx.ipc.region import Region, aligned
from phalanx.ipc.run_directory import OwnRegions, Regions, RunDirectory, try_lock

__all__ = [
    "Changes",
    "Mutex",
    "OwnRegions",
    "ProcessIdentity",
    "Region",
    "Regions",
    "RunDirectory",
    "Waiting",
    "aligned",
    "available_memory_bytes",
    "cores_allowed",
    "die_with_parent",
    "fail_point",
    "flush_output",
    "fork",
    "fork_apart",
    "inject",
    "late_peers",
    "let_go",
    "register_at_fork",
    "signal_main_thread",
    "take_signals",
    "try_lock",
    "wait_until",
]
