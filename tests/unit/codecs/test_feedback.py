"""What is not sent now is sent later, and failed steps leave no trace."""

from __future__ import annotations

import math

import pytest
import safetensors.torch
import torch
from torch import Tensor

from phalanx.codecs import Feedback

WITH_ERROR = ["one_bit", "top_k"]


def sent(feedback: Feedback, gradient: Tensor, key: str = "weight") -> Tensor:
    payload = feedback.encode(key, gradient)
    return feedback.codec.decode(payload, gradient.shape, gradient.dtype)


def committed(feedback: Feedback, gradient: Tensor, key: str = "weight") -> Tensor:
    received = sent(feedback, gradient, key)
    feedback.commit()
    return received


@pytest.mark.parametrize("shape", [(100, 20), (99, 21), (31, 3, 1, 7)], ids=str)
@pytest.mark.parametrize("name", WITH_ERROR)
def test_two_messages_drain(name: str, shape: tuple[int, ...]) -> None:
    """The seed's own bound: after A, B and a hundred zeros, within 5e-4 of A + B."""
    feedback = Feedback(name)
    first, second = torch.randn(shape), torch.randn(shape)
    received = committed(feedback, first) + committed(feedback, second)
    assert (received - first - second).abs().max() > 0.1  # something was kept back
    for _ in range(100):
        received += committed(feedback, torch.zeros(shape))
    assert (received - first - second).abs().max() < 5e-4


@pytest.mark.parametrize("name", WITH_ERROR)
def test_the_last_error_is_all_that_is_missing(name: str) -> None:
    feedback = Feedback(name)
    gradients = [torch.randn(7, 5, dtype=torch.float64) for _ in range(9)]
    received = sum(committed(feedback, gradient) for gradient in gradients)
    missing = feedback.state_dict()["weight"]
    torch.testing.assert_close(received + missing, sum(gradients))


def test_narrow_gradients_have_wide_errors() -> None:
    """In bfloat16 the error would be lost in rounding."""
    feedback = Feedback("top_k(0.5)")
    gradients = [torch.tensor([256.0, 1.0]).bfloat16(), torch.tensor([0.0, 256.0]).bfloat16()]
    received = [committed(feedback, gradient).tolist() for gradient in gradients]
    assert received == [[256.0, 0.0], [0.0, 256.0]]  # 257 is rounded in bfloat16
    assert feedback.state_dict()["weight"].tolist() == [0.0, 1.0]


def test_pending_errors_count_at_once_but_are_kept_by_commit_only() -> None:
    feedback = Feedback("top_k(0.5)")
    gradient = torch.tensor([3.0, 2.0])
    zero = torch.zeros(2)
    assert sent(feedback, gradient).tolist() == [3.0, 0.0]
    assert sent(feedback, zero).tolist() == [0.0, 2.0]
    feedback.rollback()
    assert feedback.state_dict() == {}
    assert sent(feedback, zero).tolist() == [0.0, 0.0]
    assert sent(feedback, gradient).tolist() == [3.0, 0.0]
    feedback.commit()
    feedback.rollback()
    assert feedback.state_dict()["weight"].tolist() == [0.0, 2.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", WITH_ERROR)
def test_what_is_not_finite_is_sent_and_leaves_the_error_as_it_was(name: str, bad: float) -> None:
    feedback = Feedback(name)
    broken = torch.randn(9, 5)
    broken[3, 2] = bad
    assert not committed(feedback, broken, "fresh").isfinite().all()
    assert feedback.state_dict()["fresh"].count_nonzero() == 0
    committed(feedback, torch.randn(9, 5))
    before = feedback.state_dict()["weight"]
    assert before.count_nonzero() > 0
    assert not committed(feedback, broken).isfinite().all()
    assert torch.equal(feedback.state_dict()["weight"], before)
    assert committed(feedback, torch.zeros(9, 5)).isfinite().all()


def test_finite_values_whose_sum_is_not_leave_the_error_as_it_was() -> None:
    feedback = Feedback("top_k(0.5)")
    committed(feedback, torch.tensor([3.3e38, 3.2e38]))
    assert committed(feedback, torch.tensor([0.0, 3.2e38])).tolist() == [0.0, math.inf]
    assert feedback.state_dict()["weight"].tolist() == torch.tensor([0.0, 3.2e38]).tolist()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_codecs_without_error_keep_nothing(name: str) -> None:
    feedback = Feedback(name)
    gradient = torch.randn(7, 5)
    assert torch.equal(
        committed(feedback, gradient),
        feedback.codec.decode(feedback.codec.encode(gradient), gradient.shape, gradient.dtype),
    )
    assert feedback.state_dict() == {}


@pytest.mark.parametrize("name", WITH_ERROR)
def test_a_state_through_a_file_goes_on_with_the_same_bits(name: str) -> None:
    gradients = [torch.randn(9, 5) for _ in range(6)]
    whole, before, after = Feedback(name), Feedback(name), Feedback(name)
    expected = [committed(whole, gradient) for gradient in gradients]
    for gradient in gradients[:3]:
        committed(before, gradient)
    sent(before, gradients[3])  # pending: not part of the state
    after.load_state_dict(safetensors.torch.load(safetensors.torch.save(before.state_dict())))
    for gradient, received in zip(gradients[3:], expected[3:], strict=True):
        assert torch.equal(committed(after, gradient), received)


def test_what_was_handed_out_and_taken_in_stays_apart() -> None:
    feedback = Feedback("top_k(0.5)")
    committed(feedback, torch.tensor([3.0, 2.0]))
    state = feedback.state_dict()
    other = Feedback("top_k(0.5)")
    other.load_state_dict(state)
    committed(feedback, torch.tensor([0.0, 5.0]))
    assert state["weight"].tolist() == [0.0, 2.0]
    state["weight"].zero_()
    assert other.state_dict()["weight"].tolist() == [0.0, 2.0]


def test_loading_forgets_what_is_pending() -> None:
    feedback = Feedback("top_k(0.5)")
    sent(feedback, torch.tensor([3.0, 2.0]))
    feedback.load_state_dict({})
    assert committed(feedback, torch.zeros(2)).tolist() == [0.0, 0.0]


def test_a_state_of_channels_last_gradients_can_be_written() -> None:
    feedback = Feedback("one_bit")
    for _ in range(2):
        committed(feedback, torch.randn(6, 5, 3, 3).to(memory_format=torch.channels_last))
    assert safetensors.torch.save(feedback.state_dict())
