"""The store of ranks that survive: in a folder, where a killed process leaves nothing half."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import PrefixStore

from phalanx.distributed.folder_store import FolderStore
from phalanx.ipc import wait_until
from tests.multiprocess.children import DEADLINE_S, Children, Parent


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as started:
        yield started


def write_on(parent: Parent, folder: Path) -> None:
    store = FolderStore(folder)
    while True:
        store.set("value", "x" * 1000)
        store.compare_set("first", "", "y" * 1000)
        store.add("sum", 1)  # last: who sees it grow knows that the two are there


def test_who_is_killed_in_the_store_leaves_it_whole(children: Children, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = FolderStore(folder)
    for _ in range(20):
        child = children.start(write_on, folder)
        before = store.add("sum", 0)
        assert wait_until(partial(lambda at: store.add("sum", 0) > at, before), DEADLINE_S)
        child.kill()
        assert store.get("value") == b"x" * 1000
        assert store.get("first") == b"y" * 1000
    assert store.add("sum", 1) == int(store.get("sum"))


def test_a_store_in_a_folder_does_what_torch_stores_do(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    store.set_timeout(timedelta(milliseconds=20))
    part = PrefixStore("a/", PrefixStore("b/", store))
    part.set("key", "1")
    assert part.get("key") == b"1"
    assert not store.check(["key"])
    assert [part.add("sum", 3), part.add("sum", 2), part.get("sum")] == [3, 5, b"5"]
    assert [part.delete_key("key"), part.delete_key("key")] == [True, False]
    assert [part.compare_set("one", "", each) for each in ("first", "second")] == [b"first"] * 2
    with pytest.raises(RuntimeError, match=r"key did not come within 0\.02 s"):
        part.get("key")
    shutil.rmtree(tmp_path / "store")
    for change in (store.set, store.add):
        with pytest.raises(RuntimeError, match="the folder of the job cannot be written"):
            change("key", 1 if change == store.add else "1")
