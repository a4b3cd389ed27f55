"""Shared regions in one process: what they hold, what they refuse, and who frees them."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import re
import resource
import stat
from pathlib import Path

import pytest
import torch

from phalanx.errors import ConfigError, OutOfSpace, PeerLost, PeerTimeout, StateError
from phalanx.ipc import Region


def open_files() -> set[str]:
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(params=["anonymous", "file"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "file" else None


def test_a_region_holds_zeros_and_every_view_shows_the_same_bytes(directory):
    region = Region.create(1000, label="weights", memory_dir=directory)
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


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.complex128])
def test_a_tensor_may_fill_the_region_to_its_last_byte(dtype):
    region = Region.create(64 + 3 * dtype.itemsize)
    tensor = region.tensor(dtype, 3, 64)
    tensor.fill_(1)
    assert tensor.dtype == dtype
    assert tensor.tolist() == [1, 1, 1]
    assert not any(region.buffer[:64])


@pytest.mark.parametrize("offset_bytes", [0, 64, 128])
def test_a_tensor_without_elements_may_begin_anywhere_even_at_the_end(offset_bytes):
    tensor = Region.create(128).tensor(torch.float64, 0, offset_bytes)
    assert tensor.shape == (0,)
    assert tensor.dtype == torch.float64


@pytest.mark.parametrize(
    ("num_elements", "offset_bytes", "message"),
    [
        (33, 0, "must fit into the 128 bytes of region 'region', but 33 elements of torch.float32"),
        (17, 64, "from byte 64 on end at byte 132"),
        (-1, 0, "`num_elements` must fit"),
        (1, 128, "end at byte 132"),
        (1, 4, "`offset_bytes` must be a multiple of 64, but is 4."),
        (1, -64, "`offset_bytes` must be a multiple of 64, but is -64."),
        (0, 192, "end at byte 192"),
    ],
)
def test_a_tensor_outside_the_region_is_refused(num_elements, offset_bytes, message):
    region = Region.create(128)
    with pytest.raises(ConfigError, match=re.escape(message)):
        region.tensor(torch.float32, num_elements, offset_bytes)


@pytest.mark.parametrize("nbytes", [0, -1, 1.0, True, None, "1"])
def test_a_size_that_is_none_is_refused(nbytes):
    with pytest.raises(
        ConfigError, match=f"`nbytes` must be a positive integer, but is {nbytes!r}"
    ):
        Region.create(nbytes)


def test_tensors_and_buffers_outlive_close(directory):
    region = Region.create(4096, memory_dir=directory)
    tensor, buffer = region.tensor(torch.int64, 512), region.buffer
    region.close()
    region.close()
    del region
    gc.collect()
    tensor.fill_(7)
    assert buffer[0] == 7
    assert tensor.sum().item() == 7 * 512


def test_a_closed_region_refuses_everything_but_another_close():
    region = Region.create(64)
    region.close()
    assert region.closed
    for use in (lambda: region.fd, lambda: region.buffer, lambda: region.tensor(torch.int8, 0)):
        with pytest.raises(StateError, match=r"Region 'region' must be open, but is closed\."):
            use()


def test_no_descriptor_is_left_behind(directory):
    before = open_files()
    region = Region.create(4096, memory_dir=directory)
    Region.attach(os.dup(region.fd)).close()
    tensor = region.tensor(torch.int8, 1)
    del region  # without close
    assert tensor.item() == 0
    del tensor
    assert open_files() == before


def test_a_child_program_does_not_inherit_it(directory):
    region = Region.create(64, memory_dir=directory)
    assert not os.get_inheritable(region.fd)
    fd = os.dup(region.fd)
    os.set_inheritable(fd, True)
    assert not os.get_inheritable(Region.attach(fd).fd)


def test_a_file_has_no_name(tmp_path):
    with Region.create(4096, memory_dir=tmp_path) as region:
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(region.fd).st_nlink == 0
        assert os.fstat(region.fd).st_blocks * 512 >= 4096  # reserved


@pytest.mark.parametrize("nbytes", [0, 10, 1 << 20])
def test_nobody_can_pull_the_memory_away(nbytes):
    region = Region.create(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, nbytes)


# --- attach ---------------------------------------------------------------------------------------


def test_attach_maps_the_same_bytes_and_takes_the_descriptor_over():
    region = Region.create(100)
    fd = os.dup(region.fd)
    with Region.attach(fd, 100, label="twin") as twin:
        twin.buffer[99] = 3
        assert twin.fd == fd
        assert twin.label == "twin"
    assert region.buffer[99] == 3
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("nbytes", [0, -1, 101])
def test_attach_refuses_a_size_that_the_file_has_not_and_closes_it(nbytes):
    region = Region.create(100)
    fd = os.dup(region.fd)
    with pytest.raises(ConfigError, match=f"which has 100 bytes, but is {nbytes}."):
        Region.attach(fd, nbytes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_attach_refuses_what_is_no_file_of_ours(tmp_path):
    reader, writer = os.pipe()
    os.close(writer)
    for fd in (reader, os.open(tmp_path, os.O_RDONLY)):
        with pytest.raises(ConfigError, match="`fd` must be a file of this user"):
            Region.attach(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        Region.attach(reader)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_attach_refuses_another_users_file(tmp_path):
    path = tmp_path / "planted"
    path.write_bytes(b"x" * 64)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="`fd` must be a file of this user"):
        Region.attach(os.open(path, os.O_RDWR))


# --- lack of room ---------------------------------------------------------------------------------


def test_more_memory_than_there_is_is_refused_before_it_is_taken():
    with pytest.raises(OutOfSpace, match=r"'huge' needs .* in memory, .*as `memory_dir`") as e:
        Region.create(1 << 50, label="huge")
    assert e.value.needed_bytes == 1 << 50
    assert 0 < e.value.available_bytes < 1 << 50
    assert isinstance(e.value, OSError)


@pytest.mark.parametrize("left", [0, 1])
def test_too_few_descriptors_are_told(directory, left):
    """The mapping needs one of its own until Python 3.13."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_files()
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    gaps = [os.open(os.devnull, os.O_RDONLY) for _ in range(highest - lowest + 1)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(gaps) + 1 + left, limits[1]))
        told = r"file descriptors are left for region 'weights'.*`ulimit -n`"
        with pytest.raises(OutOfSpace, match=told):
            [Region.create(1 << 12, label="weights", memory_dir=directory) for _ in range(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in gaps:
            os.close(fd)
    assert open_files() == before


def test_the_limit_of_a_files_size_is_told():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = open_files()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OutOfSpace, match=r"file of 4096 bytes.*at most 1000.*`ulimit -f`"):
            Region.create(4096)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert open_files() == before


def test_a_folder_that_is_none_is_refused(tmp_path):
    before = open_files()
    with pytest.raises(ConfigError, match=r"`memory_dir` must be a folder .*No such file"):
        Region.create(64, memory_dir=tmp_path / "absent")
    assert open_files() == before


# --- on the way to another process ----------------------------------------------------------------


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_region_is_not_pickled_when_no_process_starts(way):
    with pytest.raises(StateError, match=re.escape("pass it on with `region.send(connection)`")):
        way(Region.create(64))


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


def test_receive_ends_at_its_deadline(ends):
    with pytest.raises(PeerTimeout, match=r"did not send region 'rows' within 0\.01 s"):
        Region.receive(ends[1], timeout_s=0.01, label="rows")


def test_receive_leaves_other_messages_alone(ends):
    ours, theirs = ends
    ours.send({"a": 1})
    with pytest.raises(StateError, match="sent something else than region 'region'"):
        Region.receive(theirs)
    assert theirs.recv() == {"a": 1}


def test_a_region_that_is_received_as_a_message_is_an_error_and_no_hang(ends):
    ours, theirs = ends
    Region.create(64).send(ours)
    with pytest.raises((EOFError, OSError)):
        theirs.recv()


def test_a_closed_end_is_named(ends):
    ours, theirs = ends
    theirs.close()
    with pytest.raises(PeerLost, match="is closed and could not be given region 'region'"):
        Region.create(64).send(ours)
    with pytest.raises(PeerLost, match="is closed and did not send"):
        Region.receive(ours)


def test_a_pipe_of_one_direction_is_refused():
    reader, writer = multiprocessing.Pipe(duplex=False)
    with reader, writer, pytest.raises(ConfigError, match=r"one end of `multiprocessing.Pipe\(dup"):
        Region.create(64).send(writer)


def test_a_sender_that_lies_about_the_size_is_caught(ends):
    ours, theirs = ends
    region = Region.create(64)
    region.nbytes = 1 << 20
    region.send(ours)
    with pytest.raises(ConfigError, match="which has 64 bytes, but is 1048576"):
        Region.receive(theirs)


def test_files_are_ours_alone(tmp_path):
    with Region.create(64, memory_dir=tmp_path) as region:
        assert stat.S_IMODE(os.fstat(region.fd).st_mode) == 0o600


# --- what another process says that it holds ------------------------------------------------------


def test_a_region_of_another_process_is_borrowed():
    with Region.create(4096) as region:
        region.buffer[7] = 3
        with Region.borrow(os.getpid(), region.fd, 4096) as twin:
            assert twin.buffer[7] == 3


@pytest.mark.parametrize(("pid", "fd"), [("self", 0), (1, "../cwd/x"), (-1, 0), (1, -1), (True, 0)])
def test_what_is_no_number_is_no_way_to_a_region(pid, fd):
    with pytest.raises(ConfigError, match=r"must be a number, 0 or more, for region 'region'"):
        Region.borrow(pid, fd)


def test_a_file_or_a_pipe_is_not_borrowed(tmp_path):
    path = tmp_path / "precious"
    path.write_bytes(b"A" * 4096)
    reader, writer = os.pipe()
    others = os.memfd_create("phalanx")  # of the name, but without our seals
    os.ftruncate(others, 4096)
    with path.open("r+b") as file:
        for fd in (file.fileno(), reader, writer, others):
            with pytest.raises(PeerLost, match="that is something else"):
                Region.borrow(os.getpid(), fd, 4096)
    for fd in (reader, writer, others):
        os.close(fd)
