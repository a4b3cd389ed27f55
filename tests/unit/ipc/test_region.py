"""Shared regions in one process: what they hold, what they refuse, and who frees them."""

from __future__ import annotations

import gc
import multiprocessing
import os

import pytest
import torch

from phalanx.errors import OutOfSpace, PeerLost
from phalanx.ipc import Region


def open_files() -> set[str]:
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def test_a_region_holds_zeros_and_every_view_shows_the_same_bytes():
    region = Region.create(1000, label="weights")
    assert region.nbytes == len(region.buffer) == 1000
    assert not any(region.buffer)
    first = region.tensor(torch.float32, 5, 64)
    first.copy_(torch.arange(5.0))
    again = region.tensor(torch.int32, 5, 64)
    assert again.tolist() == torch.arange(5.0).view(torch.int32).tolist()
    assert region.buffer[64 + 6] == 0x80  # 1.0 is 00 00 80 3f
    assert repr(region) == "Region('weights', 1000 bytes)"
    region.close()
    assert repr(region) == "Region('weights', 1000 bytes, closed)"


def test_tensors_and_buffers_outlive_close():
    region = Region.create(4096)
    tensor, buffer = region.tensor(torch.int64, 512), region.buffer
    region.close()
    region.close()
    del region
    gc.collect()
    tensor.fill_(7)
    assert buffer[0] == 7
    assert tensor.sum().item() == 7 * 512


def test_no_descriptor_is_left_behind():
    before = open_files()
    region = Region.create(4096)
    Region.attach(os.dup(region.fd)).close()
    tensor = region.tensor(torch.int8, 1)
    del region  # without close
    assert tensor.item() == 0
    del tensor
    assert open_files() == before


@pytest.mark.parametrize("nbytes", [0, 10, 1 << 20])
def test_nobody_can_pull_the_memory_away(nbytes):
    region = Region.create(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, nbytes)


# --- lack of room ---------------------------------------------------------------------------------


def test_more_memory_than_there_is_is_refused_before_it_is_taken():
    with pytest.raises(OutOfSpace, match=r"'huge' needs .* in memory, but") as e:
        Region.create(1 << 50, label="huge")
    assert e.value.needed_bytes == 1 << 50
    assert 0 < e.value.available_bytes < 1 << 50
    assert isinstance(e.value, OSError)


# --- on the way to another process ----------------------------------------------------------------


@pytest.fixture
def ends():
    ours, theirs = multiprocessing.Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_region_travels_over_a_pipe_between_other_messages(ends):
    ours, theirs = ends
    before = open_files()
    region = Region.create(100, label="a")
    other = Region.create(200)
    ours.send("first")
    region.send(ours)
    other.send(ours)
    ours.send("last")
    assert theirs.recv() == "first"
    twins = [Region.receive(theirs, label="b"), Region.receive(theirs)]
    assert theirs.recv() == "last"
    assert [twin.nbytes for twin in twins] == [100, 200]
    assert not os.get_inheritable(twins[0].fd)
    twins[0].buffer[0] = 5
    assert region.buffer[0] == 5
    assert repr(twins[0]) == "Region('b', 100 bytes)"
    del region, other, twins
    assert open_files() == before


# --- what another process says that it holds ------------------------------------------------------


def test_a_region_of_another_process_is_borrowed():
    with Region.create(4096) as region:
        region.buffer[7] = 3
        with Region.borrow(os.getpid(), region.fd) as twin:
            assert twin.buffer[7] == 3


@pytest.mark.parametrize("kind", ["closed", "file", "pipe"])
def test_what_is_no_region_is_not_borrowed(kind):
    before = open_files()
    ends = os.pipe() if kind == "pipe" else [os.open(__file__, os.O_RDONLY)]
    if kind == "closed":
        os.close(ends[0])
    with pytest.raises(PeerLost, match="Region 'x' of process"):
        Region.borrow(os.getpid(), ends[0], label="x")
    for fd in ends if kind != "closed" else ():
        os.close(fd)
    assert open_files() == before
