"""Codecs that send one bit per element or only the largest elements, and their error feedback.

Shape legend: R rows (dim 0), C elements in each, N = R·C.

    bits      | 0 1 1 0 … | …              |  N, padded to 8·M
    planes    | plane 0: bits 0 … M−1      |
              | plane 1: bits M … 2M−1     |  eight runs of M = ⌈N/8⌉ bits
              | …                          |
    packed    byte m = Σ_i plane_i[m] · 2^i   (whole runs are shifted at once, not single bits)

gradient ──┬──▶ + ──▶ encode ──▶ payload, to the others
           error ▲        └──▶ decode ──▶ sent
                 └── total − sent ◀───────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.codecs.codec import Codec, Payload
from phalanx.errors import ConfigError
from phalanx.plan import check_argument


@dataclass(frozen=True)
class OneBit(Codec):
    """Send for each element which side of zero it is on, and for each row the means of both sides.

    Every element comes out as the mean of its row's elements on its side; a row of one positive and
    one negative value comes out exactly. Needs error feedback; the longer the rows, the more
    messages it takes until all has been sent. N/8 bytes and two means per row: for float32 rows of
    512, 28 times fewer bytes.

    A row with a NaN comes out as NaN; one with an infinity comes out as infinity on that side and
    as NaN on the other.

    Args:
        min_elements: Only tensors with more elements and at least two dims are taken; the others
            (biases, norms) pass unchanged.

    Shapes:
        gradient_RC -> (uint8 [⌈N/8⌉], mean of the positive [R], mean of the rest [R]), the means in
        the gradient's dtype; sums are taken in float32 at least.

    Example:
        >>> codec = OneBit(min_elements=0)
        >>> bits, above, below = codec.encode(torch.tensor([[3.0, 5.0, -1.0]]))
        >>> bits.tolist(), above.tolist(), below.tolist()
        ([3], [4.0], [-1.0])
        >>> codec.decode((bits, above, below), torch.Size([1, 3]), torch.float32)
        tensor([[ 4.,  4., -1.]])

    Source: fbcunn's ``OneBitQuantization``; Seide et al., Interspeech 2014. Unlike fbcunn, what is
    compressed and what is not are merged by the same rule, the sum.
    """

    min_elements: int = 20

    def __post_init__(self) -> None:
        if self.min_elements < 0:
            raise ConfigError(f"`min_elements` must be 0 or more, but is {self.min_elements}.")

    def takes(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Tell whether there are rows, and enough elements."""
        return super().takes(shape, dtype) and len(shape) > 1 and shape.numel() > self.min_elements

    def shrink(self, gradient: Tensor) -> Payload:
        """Take signs and means."""
        rows_RC = gradient.reshape(gradient.shape[0], -1)
        positive_RC = rows_RC > 0
        num_positive_R = positive_RC.sum(1)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        # clamp() keeps a NaN, so it reaches both means of its row.
        above_R = rows_RC.clamp(min=0).sum(1, dtype=wide) / num_positive_R.clamp(min=1)
        num_rest_R = (rows_RC.shape[1] - num_positive_R).clamp(min=1)
        below_R = rows_RC.clamp(max=0).sum(1, dtype=wide) / num_rest_R
        bits = _pack_bits(positive_RC.flatten())
        return bits, above_R.to(gradient.dtype), below_R.to(gradient.dtype)

    def restore(self, payload: Payload, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Put each element's mean in its place."""
        bits, above_R, below_R = payload
        positive_RC = _unpack_bits(bits, shape.numel()).view(shape[0], -1).to(dtype)
        # The products are exact, as one factor is 0 or 1; torch.where() takes five times as long.
        rows_RC = (1 - positive_RC).mul_(below_R[:, None].to(dtype))
        return rows_RC.addcmul_(positive_RC, above_R[:, None].to(dtype)).view(shape)


@dataclass(frozen=True)
class TopK(Codec):
    """Send the elements farthest from zero, exactly, and nothing of the rest.

    Needs error feedback: what is not sent grows until it is. NaNs and infinities count as the
    largest, so they are always sent.

    Args:
        fraction: How much of each tensor is sent, above 0 and at most 1; at least one element.
            SGD with momentum trains well with 0.01; Adam, whose second moments see what is sent
            only, wants 0.1 (an MLP on the digits lost 3 points of accuracy with 0.01).

    Shapes:
        gradient of N elements -> (values [k] of its dtype, places [k], int32 while N allows), with
        k = max(1, round(fraction · N)).

    Example:
        >>> codec = TopK(0.4)
        >>> gradient = torch.tensor([3.0, -7.0, 1.0, 0.0, 5.0])
        >>> codec.decode(codec.encode(gradient), gradient.shape, gradient.dtype)
        tensor([ 0., -7., 0., 0., 5.])

    Raises:
        ConfigError: ``fraction`` is out of its range.

    Source: Lin et al., *Deep Gradient Compression*, ICLR 2018, without its momentum correction.
    """

    fraction: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(
                f"`fraction` must be above 0 and at most 1, but is {self.fraction!r}. "
                "Give 0.1 to send one element in ten."
            )

    def shrink(self, gradient: Tensor) -> Payload:
        """Pick the largest elements."""
        flat = gradient.reshape(-1)
        count = max(1, round(self.fraction * flat.numel()))
        places = flat.abs().topk(count, sorted=False).indices
        narrow = flat.numel() <= torch.iinfo(torch.int32).max
        return flat[places], places.to(torch.int32 if narrow else torch.int64)

    def restore(self, payload: Payload, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Put them in their places, among zeros."""
        values, places = payload
        flat = values.new_zeros(shape.numel(), dtype=dtype)
        return flat.index_copy_(0, places.long(), values.to(dtype)).view(shape)


def _pack_bits(bits_N: Tensor) -> Tensor:
    """Pack a bool vector, 8 elements to the byte."""
    num_bytes = -(-bits_N.numel() // 8)
    padded = bits_N.new_zeros(8 * num_bytes, dtype=torch.uint8)
    padded[: bits_N.numel()] = bits_N
    planes = padded.view(8, num_bytes)
    packed = planes[0].clone()
    for place in range(1, 8):
        packed |= planes[place] << place
    return packed


def _unpack_bits(packed: Tensor, num_bits: int) -> Tensor:
    """Return the first ``num_bits`` that :func:`_pack_bits` has packed, as uint8 0 and 1."""
    planes = packed.new_empty(8, packed.numel())
    for place in range(8):
        torch.bitwise_and(packed >> place, 1, out=planes[place])
    return planes.flatten()[:num_bits]


class Feedback:
    """A codec with a memory of its errors, one for each parameter.

    The part that is not sent now is added to the next gradient of the same key. The sum of all
    parts sent differs from the sum of all gradients by the last error only.

    A gradient with a NaN or an infinity comes out with one (see :class:`Codec`) and leaves the
    error as it was: one bad step does not poison those after it. Errors are kept in float32 at
    least, on the gradient's device.

    Args:
        codec: A codec.

    Raises:
        ConfigError: It is none.

    Example:
        >>> feedback = Feedback(TopK(0.5))
        >>> for gradient in ([3.0, 1.0], [0.0, 1.0], [0.0, 0.0]):
        ...     values, places = feedback.encode("weight", torch.tensor(gradient))
        ...     print(values.tolist(), places.tolist())
        [3.0] [0]
        [2.0] [1]
        [0.0] [0]

    Source: Seide et al., Interspeech 2014; fbcunn's ``OneBitDataParallel``.
    """

    def __init__(self, codec: Codec) -> None:
        fits = isinstance(codec, Codec)
        check_argument(fits, "codec", "be a `Codec`", codec, "Give OneBit() or TopK(0.1), say.")
        self.codec = codec
        # Errors are never written in place, so what `state_dict` has handed out stays as it was.
        self._errors: dict[str, Tensor] = {}

    @torch.no_grad()
    def encode(self, key: str, gradient: Tensor) -> Payload:
        """Return the payload for ``gradient`` and the error of ``key``, and keep the new error.

        A gradient that the codec does not take is its own payload, not copied.
        """
        codec = self.codec
        if not codec.takes(gradient.shape, gradient.dtype):
            return codec.encode(gradient)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        zero = gradient.new_zeros((), dtype=wide).expand(gradient.shape)
        error = self._errors.get(key, zero).to(gradient.device, wide)
        if error.shape != gradient.shape:
            raise ConfigError(
                f"The error of `{key}` must have the shape of its gradient, "
                f"{tuple(gradient.shape)}, but has {tuple(error.shape)}."
            )
        total = gradient + error
        payload = codec.encode(total.to(gradient.dtype))
        unsent = total - codec.decode(payload, gradient.shape, gradient.dtype)
        # A tensor, not a bool: an accelerator is not waited for. amax() keeps a NaN.
        finite = unsent.abs().amax().isfinite()
        self._errors[key] = torch.where(finite, unsent, error)
        return payload

    def state_dict(self) -> dict[str, Tensor]:
        """Return the errors by key, contiguous, for a file."""
        return {key: error.contiguous() for key, error in self._errors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the errors of ``state`` for the current ones.

        Args:
            state: From :meth:`state_dict`, with the model's parameters in the same memory format.
        """
        self._errors = {key: error.detach().clone() for key, error in state.items()}

    def __repr__(self) -> str:
        return f"Feedback({self.codec!r}, {len(self._errors)} errors)"
