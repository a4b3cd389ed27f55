"""What a forked child lets go of, and what the end of an interpreter does not say."""

from __future__ import annotations

import os
import subprocess
import sys

from phalanx.ipc import register_at_fork


class Counted:
    """Counts the forks between the process that made it and this one."""

    def __init__(self) -> None:
        self.forks = 0
        register_at_fork(self.count)

    def count(self) -> None:
        self.forks += 1
        register_at_fork(self.count)


def test_a_hook_that_registers_anew_is_called_in_a_childs_child_too():
    counted = Counted()
    pid = os.fork()
    if pid == 0:
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(counted.forks)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert counted.forks == 0


def test_an_interpreter_that_ends_with_hooks_says_nothing():
    script = "\n".join(
        [
            "from phalanx import tables",
            "world = tables.join()",
            "table = world.matrix(3, 2)",
            "calls = {'get': lambda: table.get()}",
            "for call in calls.values(): call()",
        ]
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert ended.stderr == ""
