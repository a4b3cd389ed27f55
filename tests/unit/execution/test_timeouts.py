"""Reads and writes on a connection end, whatever the process at its other end does."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from phalanx.execution.timeouts import set_timeouts

pytestmark = pytest.mark.promise("every-wait-ends")

PATIENCE_S = 0.05


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = multiprocessing.Pipe(duplex=True)
    set_timeouts(ours, PATIENCE_S)
    with ours, theirs:
        yield ours, theirs


def test_a_message_that_nobody_reads_is_given_up(ends: tuple[Connection, Connection]) -> None:
    with pytest.raises(BlockingIOError):
        ends[0].send_bytes(bytes(1 << 24))


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
