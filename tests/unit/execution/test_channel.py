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

from phalanx.execution.channel import Mailbox, Outbox, load, pack, set_timeouts
from phalanx.memory.shared_memory_pool import SharedMemoryPool

ROWS = 33  # of 64 floats: more than the 4096 bytes below which tensors travel with the message


@pytest.fixture
def pool() -> Any:
    pool = SharedMemoryPool()
    yield pool
    pool.close()


def received(pool: SharedMemoryPool, message: bytes) -> Any:
    return load(message, Outbox(pool).read)


def big(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(seed))


def test_a_mailbox_grows_and_what_it_had_is_read_from_the_old_room(pool: SharedMemoryPool) -> None:
    box = Mailbox(pool)
    values = [big(seed) for seed in range(20)]
    message = pack(values, box.put)
    assert len(message) < 20 * 400
    assert len(pool) > 1
    assert all(torch.equal(a, b) for a, b in zip(received(pool, message), values, strict=True))


def test_an_outbox_says_how_much_room_would_be_enough(pool: SharedMemoryPool) -> None:
    """The first answer travels whole, the next one through the room that was made for it."""
    answers = Mailbox(pool)
    values = [big(seed) for seed in range(3)]
    lengths = []
    for _ in range(2):
        outbox = Outbox(pool, answers.room)
        message = pack(values, outbox.put)
        lengths.append(len(message))
        assert outbox.needed_bytes >= 3 * values[0].nbytes
        assert all(torch.equal(a, b) for a, b in zip(received(pool, message), values, strict=True))
        answers.begin(outbox.needed_bytes)
    assert lengths[0] > 3 * values[0].nbytes
    assert lengths[1] < 3 * 400


def test_a_room_that_is_too_small_takes_what_fits(pool: SharedMemoryPool) -> None:
    outbox = Outbox(pool, pool.allocate(big().nbytes + 64))
    assert outbox.put(big()) is not None
    assert outbox.put(big()) is None
    assert outbox.needed_bytes == 2 * big().nbytes


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
        assert found.data_ptr() % 64 == value.data_ptr() % 64
        assert not found.is_inference()


def test_a_mailbox_that_was_used_in_inference_mode_is_used_outside(pool: SharedMemoryPool) -> None:
    numbers = torch.arange(1024)
    box = Mailbox(pool)
    for mode in (True, False, True, False):
        with torch.inference_mode(mode):
            box.begin()
            for value in (big(), numbers):
                message = pack(value, box.put)
        assert torch.equal(received(pool, message), numbers)


def test_nested_tensors_travel_as_torch_pickles_them(pool: SharedMemoryPool) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 900), torch.ones(3, 900)])
    found = received(pool, pack(nested, Mailbox(pool).put))
    assert all(torch.equal(a, b) for a, b in zip(found.unbind(), nested.unbind(), strict=True))


def test_a_tensor_that_comes_twice_is_one_over_there(pool: SharedMemoryPool) -> None:
    """As it is in a thread of the process that sends it."""
    for value in (big(), torch.ones(3)):
        first, second = received(pool, pack([value, value], Mailbox(pool).put))
        assert first is second


def test_small_tensors_and_those_with_a_graph_travel_with_the_message(
    pool: SharedMemoryPool,
) -> None:
    box = Mailbox(pool)
    assert box.put(torch.ones(3)) is None
    assert box.put(big().requires_grad_()) is None
    assert box.put(big().to_sparse()) is None
    assert box.put("text") is None
    assert len(pool) == 0


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


def test_what_comes_in_time_is_read(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    theirs.send_bytes(b"whole")
    assert ours.recv_bytes() == b"whole"


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
