"""What is not sent now is sent later."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from phalanx.codecs import Codec, Feedback, OneBit, TopK
from phalanx.errors import ConfigError

CODECS = [OneBit(), TopK()]


def sent(feedback: Feedback, gradient: Tensor, key: str = "weight") -> Tensor:
    payload = feedback.encode(key, gradient)
    return feedback.codec.decode(payload, gradient.shape, gradient.dtype)


@pytest.mark.parametrize("shape", [(100, 20), (99, 21), (31, 3, 1, 7)], ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_two_messages_drain(codec: Codec, shape: tuple[int, ...]) -> None:
    """The seed's own bound: after A, B and a hundred zeros, within 5e-4 of A + B."""
    feedback = Feedback(codec)
    first, second = torch.randn(shape), torch.randn(shape)
    received = sent(feedback, first) + sent(feedback, second)
    assert (received - first - second).abs().max() > 0.1  # something was kept back
    for _ in range(100):
        received += sent(feedback, torch.zeros(shape))
    assert (received - first - second).abs().max() < 5e-4


def test_finite_values_whose_sum_is_not_leave_the_error_as_it_was() -> None:
    feedback = Feedback(TopK(0.5))
    sent(feedback, torch.tensor([3.3e38, 3.2e38]))
    assert sent(feedback, torch.tensor([0.0, 3.2e38])).tolist() == [0.0, math.inf]
    assert feedback.state_dict()["weight"].tolist() == torch.tensor([0.0, 3.2e38]).tolist()


def test_an_error_of_another_shape_is_refused() -> None:
    feedback = Feedback(TopK())
    feedback.load_state_dict({"weight": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"`weight` must have .* \(4,\), but has \(3,\)"):
        feedback.encode("weight", torch.ones(4))
