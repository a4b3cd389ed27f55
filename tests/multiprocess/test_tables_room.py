"""Tables where /dev/shm is full: a clear error, and every bit as it was."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial

import pytest
import torch

from phalanx import tables
from phalanx.errors import OutOfSpace
from tests.multiprocess.children import Children, Parent

_CLONE_NEWNS = 0x20000


def fill(table: tables.Table, add: Callable[[int], None]) -> int:
    """Add until there is no room, and see that the last one has changed nothing."""
    read = partial(table._storage.copy_all, 1.0)
    for i in range(10_000):
        before = read()
        try:
            add(i)
        except OutOfSpace:
            assert all(map(torch.equal, before, read()))
            with pytest.raises(OutOfSpace, match="bytes in '/dev/shm', but"):
                add(i)
            return i
    raise AssertionError("there is always room")


def use_10_mb(parent: Parent) -> None:
    torch.set_num_threads(1)
    commands = ["mount --make-rprivate /", "mount -t tmpfs -o size=10m tmpfs /dev/shm"]
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS) or any(map(os.system, commands)):
        parent.tell("no tmpfs can be mounted here")
        return
    some = torch.ones(240, 64)
    with tables.join("full", timeout_s=5.0) as world:
        by_key = world.keys(64, name="keys", updater="adam")
        bulk = world.matrix(50, 64, name="bulk", sync=True)
        came = fill(by_key, lambda i: by_key.add(some, rows=range(240 * i, 240 * i + 240)))
        assert len(by_key) == 240 * came > 0
        by_key.add(some, rows=range(240))  # what needs no room goes on
        assert len(by_key) == 240 * came
        with pytest.raises(OutOfSpace, match="-large' needs"):
            world.matrix(10**5, 64, name="large")
        with pytest.raises(OutOfSpace, match="large-too"):
            world.keys(4 * 10**6, name="large-too")
        put = fill(bulk, lambda i: bulk.add(torch.ones(50, 64)))
        assert bulk.get().unique().tolist() == [put]  # those that it took are in the round
    parent.tell("as it should be")


def test_where_shared_memory_is_full_nothing_is_changed() -> None:
    with Children() as children:
        if (told := children.start(use_10_mb).get()) != "as it should be":
            pytest.skip(told)
