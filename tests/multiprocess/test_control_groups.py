"""Memory in a control group with a limit, as a container has: refused, where it would be killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.multiprocess.ranks import START_S

LIMIT_BYTES = 512 << 20
ROOT = Path("/sys/fs/cgroup")
# The hierarchy's folder, and the files with the limit and with the processes.
HIERARCHIES = ((ROOT / "memory", "memory.limit_in_bytes"), (ROOT, "memory.max"))

SCRIPT = """
import sys
import torch
from phalanx import tables
from phalanx.errors import OutOfSpace
for run in (None, sys.argv[1]):
    with tables.join(run=run, num_workers=1) as world:
        small = world.matrix(1000, 4, name="small")
        try:
            world.matrix(2_000_000, 100, name="large")  # 1.6 GB, both sides taken at once
            print("made")
        except OutOfSpace as error:
            print("refused:", error)
        small.add(torch.ones(1000, 4))
        print(small.get().sum().item())
"""


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


@pytest.fixture
def in_group() -> Iterator[Callable[[], None]]:
    """Return what puts a child into a group that may take `LIMIT_BYTES` of memory."""
    for top, limit in HIERARCHIES:
        group = top / f"phalanx-test-{os.getpid()}"
        try:
            if not (top / "cgroup.procs").exists():
                continue
            group.mkdir()
        except OSError as error:
            pytest.skip(f"needs the right to make a control group: {error}")
        try:
            if not (group / limit).exists():
                continue
            (group / limit).write_text(str(LIMIT_BYTES))
            yield partial(_enter, group)
            return
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
    pytest.skip("there is no hierarchy of control groups with the memory controller")


def test_a_table_beyond_the_groups_limit_is_refused_and_the_others_stay(in_group):
    """In a run without a name, and in one that others could join."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, f"limited-{os.getpid()}"],
        capture_output=True,
        text=True,
        timeout=START_S,
        preexec_fn=in_group,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    lines = done.stdout.splitlines()
    assert lines[1::2] == ["4000.0"] * 2
    for refusal in lines[::2]:
        assert refusal.startswith("refused: Region 'table-large' needs ")
        assert "bytes in memory, but only " in refusal
