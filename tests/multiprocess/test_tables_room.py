"""Tables where /dev/shm is full: a clear error, and every bit as it was."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

SCRIPT = '''
import torch
from phalanx import tables
from phalanx.errors import OutOfSpace

torch.set_num_threads(1)


def fill(table, add, read):
    """Add until there is no room, and see that the last one has changed nothing."""
    for i in range(10_000):
        before = read()
        try:
            add(i)
        except OutOfSpace as exc:
            assert "bytes in '/dev/shm', but" in str(exc), exc
            for was, part in zip(before, read(), strict=True):
                assert torch.equal(was, part)
            return i
    raise AssertionError("there is always room")


with tables.join("full", timeout_s=5.0) as world:
    by_key = world.keys(64, name="keys", updater="adam", capacity=1)
    bulk = world.matrix(50, 64, name="bulk", sync=True)
    some = torch.ones(48, 64)
    came = fill(
        by_key,
        lambda i: by_key.add(some, rows=range(48 * i, 48 * i + 48)),
        lambda: by_key._storage.copy_all(0, 1.0),
    )
    assert len(by_key) == 48 * came > 0
    by_key.add(some, rows=range(48))  # what needs no room goes on
    assert len(by_key) == 48 * came

    try:
        world.matrix(10**5, 64, name="large")
        raise AssertionError("there is no room for it")
    except OutOfSpace as exc:
        assert "-large' needs" in str(exc), exc
    try:
        world.keys(64, name="large-too", capacity=10**5)
        raise AssertionError("there is no room for it")
    except OutOfSpace as exc:
        assert "large-too" in str(exc), exc

    put = fill(bulk, lambda i: bulk.add(torch.ones(50, 64)), lambda: bulk._storage.copy_all(0, 1.0))
    assert bulk.get().unique().tolist() == [put]  # those that it took are in the round
print("as it should be")
'''


def test_where_shared_memory_is_full_nothing_is_changed() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting a tmpfs needs root")
    command = 'mount -t tmpfs -o size=10m tmpfs /dev/shm && exec "$0" -c "$1"'
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, sys.executable, SCRIPT],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if "mount:" in ended.stderr or "unshare:" in ended.stderr:
        pytest.skip(f"no tmpfs can be mounted here: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "as it should be\n"
