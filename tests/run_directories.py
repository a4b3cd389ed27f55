"""What a run leaves in /dev/shm once its members have gone: nothing, a moment later.

The last member out removes the run's directory, unless another process looks at that very moment
whether it is abandoned, as each does that joins a run of its own. Then that process removes it.
"""

from __future__ import annotations

import os

from phalanx.ipc import RunDirectory, wait_until

DEADLINE_S = 60.0


def wait_until_removed(name: str, *, sweep: bool = False) -> None:
    """Wait until nothing with ``name`` in its name is left, or fail.

    Args:
        name: Of a run, or what the names of several have in common.
        sweep: Whether to remove what killed members have left.
    """

    def is_removed() -> bool:
        if sweep:
            RunDirectory.sweep()
        return not left()

    def left() -> list[str]:
        return [entry for entry in os.listdir("/dev/shm") if name in entry]

    assert wait_until(is_removed, DEADLINE_S), f"{left()} outlive their run"
