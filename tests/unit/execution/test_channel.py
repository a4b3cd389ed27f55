"""Messages to and from worker processes: tensors in shared memory, and waits that end."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.execution.channel import Mailbox, load, pack, set_timeouts
from phalanx.memory.shared_memory_pool import SharedMemoryPool

ROWS = 33  # of 64 floats: more than the 4096 bytes below which tensors travel with the message


@pytest.fixture
def pool() -> Any:
    pool = SharedMemoryPool()
    yield pool
    pool.close()


def received(pool: SharedMemoryPool, message: bytes) -> Any:
    return load(message, Mailbox(pool).read)


def big(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "lay_out",
    [
        Tensor.t,
        lambda x: x[:, ::2].repeat(2, 1)[::2],
        lambda x: x[:1].expand(ROWS, 64),
        lambda x: x.to(torch.bfloat16).repeat(2, 1),
        lambda x: x.view(torch.complex64),
        lambda x: x.flatten()[3:],  # begins where no cache's line does
        lambda x: x.flatten()[16:],
    ],
)
def test_tensors_come_out_as_they_lay(pool: SharedMemoryPool, lay_out: Any) -> None:
    with torch.inference_mode():
        made_in_inference_mode = lay_out(big())
    for value in (lay_out(big()), made_in_inference_mode):
        found = received(pool, pack(value, Mailbox(pool).put))
        assert torch.equal(found, value)
        assert (found.dtype, found.stride()) == (value.dtype, value.stride())
        assert found.data_ptr() % 64 == 0
        assert not found.is_inference()


def test_a_tensor_that_comes_twice_is_one_over_there(pool: SharedMemoryPool) -> None:
    """As it is in a thread of the process that sends it."""
    for value in (big(), torch.ones(3)):
        first, second = received(pool, pack([value, value], Mailbox(pool).put))
        assert first is second


def test_what_did_not_fit_into_the_room_fits_the_next_time(pool: SharedMemoryPool) -> None:
    reader = Mailbox(pool)
    lengths = []
    for _ in range(2):
        message = pack([big(0), big(1)], Mailbox(pool, reader.room, grows=False).put)
        first, second = load(message, reader.read)
        reader.begin()
        assert torch.equal(first, big(0))
        assert torch.equal(second, big(1))
        lengths.append(len(message))
    assert lengths[1] < ROWS * 64 < lengths[0]


# -- timeouts --------------------------------------------------------

PATIENCE_S = 0.05


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = multiprocessing.Pipe(duplex=True)
    set_timeouts(ours, PATIENCE_S)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.promise("every-wait-ends")
def test_a_message_that_nobody_reads_is_given_up(ends: tuple[Connection, Connection]) -> None:
    with pytest.raises(BlockingIOError):
        ends[0].send_bytes(bytes(1 << 24))


@pytest.mark.promise("every-wait-ends")
def test_half_a_message_is_given_up(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    os.write(theirs.fileno(), (100).to_bytes(4, "big") + b"half")
    assert ours.poll(1.0)
    with pytest.raises(BlockingIOError):
        ours.recv_bytes()


def test_a_default_time_limit_of_sockets_leaves_the_connection_as_it_is(
    ends: tuple[Connection, Connection],
) -> None:
    ours, _ = ends
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(1.0)
    try:
        set_timeouts(ours, PATIENCE_S)
    finally:
        socket.setdefaulttimeout(before)
    assert os.get_blocking(ours.fileno())
