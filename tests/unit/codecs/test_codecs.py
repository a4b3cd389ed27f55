"""Codecs: what is sent, how many bytes, and what comes out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from phalanx.codecs import Codec, OneBit, Payload, TopK

ALL = [OneBit(), TopK(), TopK(0.3)]
ODD_SHAPES = [(), (1,), (7,), (3, 7), (1, 23), (23, 1), (5, 3, 3, 1), (0, 4), (4, 0)]


def through(codec: Codec, gradient: Tensor) -> Tensor:
    return codec.decode(codec.encode(gradient), gradient.shape, gradient.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
@pytest.mark.parametrize("codec", ALL, ids=str)
def test_every_shape_and_dtype_comes_back(
    codec: Codec, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    gradient = torch.randn(shape).to(dtype)
    before = gradient.clone()
    received = through(codec, gradient)
    assert (received.shape, received.dtype) == (gradient.shape, dtype)
    assert received.isfinite().all()
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", ALL, ids=str)
def test_what_is_not_finite_stays_visible(codec: Codec, bad: float) -> None:
    gradient = torch.randn(9, 11)
    gradient[4, 7] = bad
    assert not through(codec, gradient).isfinite().all()


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_integers_and_complex_numbers_pass_unchanged(codec: Codec) -> None:
    for gradient in (torch.arange(99).view(9, 11), torch.randn(9, 11, dtype=torch.complex64)):
        assert through(codec, gradient) is gradient


# One bit


def test_one_bit_is_the_mean_of_each_side_of_each_row() -> None:
    gradient = torch.randn(5, 7)
    expected = torch.empty_like(gradient)
    for row, out in zip(gradient, expected, strict=True):
        out[row > 0] = row[row > 0].mean()
        out[row <= 0] = row[row <= 0].mean()
    torch.testing.assert_close(through(OneBit(), gradient), expected)


def test_the_error_is_smaller_than_the_gradient() -> None:
    for codec in (OneBit(), TopK()):
        for _ in range(50):
            gradient = torch.randn(100, 20)
            error = gradient - through(codec, gradient)
            assert error.norm() < gradient.norm()


@pytest.mark.parametrize(
    ("shape", "taken"),
    [((20,), False), ((4, 5), False), ((3, 7), True), ((21,), False), ((3, 7, 1), True)],
    ids=str,
)
def test_one_bit_takes_rows_of_more_than_20_elements(shape: tuple[int, ...], taken: bool) -> None:
    gradient = torch.randn(shape)
    assert (OneBit().encode(gradient)[0] is gradient) is not taken


@pytest.mark.parametrize("num_bits", [*range(1, 18), 63, 64, 65])
def test_bits_are_packed_eight_to_the_byte(num_bits: int) -> None:
    gradient = torch.randn(num_bits, 1).sign()
    codec = OneBit(min_elements=0)
    payload = codec.encode(gradient)
    assert payload[0].shape == (math.ceil(num_bits / 8),)
    assert torch.equal(codec.decode(payload, gradient.shape, gradient.dtype), gradient)


# Top k


def test_top_k_sends_the_largest_exactly() -> None:
    gradient = torch.randn(13, 17)
    received = through(TopK(0.1), gradient)
    sent = received != 0
    assert sent.sum() == 22
    assert torch.equal(received[sent], gradient[sent])
    assert gradient[sent].abs().min() > gradient[~sent].abs().max()


# A codec of your own


class Halved(Codec):
    """What a user may write."""

    def shrink(self, gradient: Tensor) -> Payload:
        return (gradient.flatten()[::2].clone(),)

    def restore(self, payload: Payload, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        out = torch.zeros(shape.numel(), dtype=dtype)
        out[::2] = payload[0]
        return out.view(shape)


def test_a_codec_of_ones_own() -> None:
    assert through(Halved(), torch.tensor([1.0, 2.0, 3.0])).tolist() == [1.0, 0.0, 3.0]
