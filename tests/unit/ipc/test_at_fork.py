"""What a forked child lets go of, and what the end of an interpreter does not say."""

from __future__ import annotations

import subprocess
import sys


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
