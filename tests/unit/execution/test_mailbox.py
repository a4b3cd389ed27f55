"""Messages to and from worker processes: tensors and arrays in memory that both see."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.errors import OutOfSpace
from phalanx.execution.mailbox import Mailbox
from phalanx.memory import SharedMemoryPool

ROWS = 33


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox(SharedMemoryPool())


def passed(mailbox: Mailbox, value: Any) -> Any:
    mailbox.write(value)
    return mailbox.read(copies=True)


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
        lambda x: x[0, 0],
        lambda x: x.bool(),
    ],
)
def test_tensors_come_out_as_they_lay(mailbox: Mailbox, lay_out: Any) -> None:
    with torch.inference_mode():
        made_in_inference_mode = lay_out(big())
    for value in (lay_out(big()), made_in_inference_mode):
        mailbox.write(value)
        for copies in (False, True):
            found = mailbox.read(copies=copies)
            assert torch.equal(found, value)
            assert (found.dtype, found.stride()) == (value.dtype, value.stride())
            assert found.data_ptr() % 64 == 0
            assert not found.is_inference()


def test_a_copy_stays_when_the_next_message_is_written(mailbox: Mailbox) -> None:
    tensor, array, empty = passed(mailbox, [big(0), big(0).numpy(), torch.empty(0, 3)])
    passed(mailbox, [big(1), big(1).numpy()])
    assert torch.equal(tensor, big(0))
    assert np.array_equal(array, big(0).numpy())
    assert empty.shape == (0, 3)


def test_a_tensor_that_comes_twice_is_one_over_there(mailbox: Mailbox) -> None:
    """As it is in a thread of the process that sends it."""
    first, second = passed(mailbox, [big(), value := torch.ones(3), value])[1:]
    assert first is second


def test_another_process_reads_what_was_written_after_it_was_forked(mailbox: Mailbox) -> None:
    pool = mailbox._pool
    answers = Mailbox(pool)
    ours, theirs = multiprocessing.Pipe()

    def answer() -> None:
        theirs.recv_bytes()
        answers.write(mailbox.read(copies=False) * 2)
        theirs.send_bytes(b"")

    process = multiprocessing.get_context("fork").Process(target=answer)
    process.start()
    value = torch.ones(1 << 14)  # few enough for one thread
    mailbox.write(value)
    ours.send_bytes(b"")
    ours.recv_bytes()
    assert torch.equal(answers.read(copies=True), value * 2)
    process.join()


def test_a_message_without_end_is_refused(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.execution.mailbox._ROOM_BYTES", 1 << 12)
    with pytest.raises(OutOfSpace, match="at most 4096 bytes"):
        mailbox.write(torch.ones(1 << 20))
    assert passed(mailbox, "another") == "another"
