"""Codecs by name, and their memory of what they did not send (error feedback).

gradient ──┬──▶ + ──▶ encode ──▶ payload, to the others
           error ▲        └──▶ decode ──▶ sent
                 └── total − sent ◀───────┘      pending until the step is committed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from phalanx.codecs.codec import Cast, Codec, Payload
from phalanx.codecs.lossy import OneBit, TopK
from phalanx.errors import CheckpointError, ConfigError

_CODEC_BY_NAME: dict[str, Callable[[], Codec]] = {
    "fp16": lambda: Cast(torch.float16),
    "bf16": lambda: Cast(torch.bfloat16),
    "one_bit": OneBit,
    "top_k": TopK,
}


def resolve_codec(codec: Codec | str) -> Codec:
    """Return ``codec``, made from its name where it is one.

    Example:
        >>> resolve_codec("top_k")
        TopK(fraction=0.1)
        >>> resolve_codec(OneBit(min_elements=100))
        OneBit(min_elements=100)

    Raises:
        ConfigError: There is no codec of that name.
    """
    if isinstance(codec, Codec):
        return codec
    if codec not in _CODEC_BY_NAME:
        raise ConfigError(
            f"`codec` must be 'fp16', 'bf16', 'one_bit', 'top_k' or a `Codec`, but is {codec!r}. "
            "Give TopK(0.05) for another fraction."
        )
    return _CODEC_BY_NAME[codec]()


class Feedback:
    """A codec with a memory of its errors, one for each parameter.

    What is not sent now is added to the next gradient of the same key, so the sum of all that was
    sent differs from the sum of all gradients by the last error only. New errors are *pending*
    until :meth:`commit`; :meth:`rollback` forgets them, so that a failed step changes nothing.

    A gradient with a NaN or an infinity comes out with one (see :class:`Codec`) and leaves the
    error as it was: one bad step does not poison those after it. Errors are kept in float32 at
    least, on the gradient's device.

    Args:
        codec: A codec or its name. One without error (``fp16``, ``bf16``) keeps nothing here.

    Example:
        >>> feedback = Feedback(TopK(0.5))
        >>> for gradient in ([3.0, 1.0], [0.0, 1.0], [0.0, 0.0]):
        ...     values, places = feedback.encode("weight", torch.tensor(gradient))
        ...     feedback.commit()
        ...     print(values.tolist(), places.tolist())
        [3.0] [0]
        [2.0] [1]
        [0.0] [0]

    Source: Seide et al., Interspeech 2014; fbcunn's ``OneBitDataParallel``.
    """

    def __init__(self, codec: Codec | str) -> None:
        self.codec = resolve_codec(codec)
        # Errors are never written in place, so what `state_dict` has handed out stays as it was.
        self._errors: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}

    @torch.no_grad()
    def encode(self, key: str, gradient: Tensor) -> Payload:
        """Return the payload for ``gradient`` and the error of ``key``; the new error is pending.

        A gradient that the codec does not take is its own payload, not copied.
        """
        codec = self.codec
        if not (codec.has_error and codec.takes(gradient.shape, gradient.dtype)):
            return codec.encode(gradient)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        zero = gradient.new_zeros((), dtype=wide).expand(gradient.shape)
        error = self._pending.get(key, self._errors.get(key, zero)).to(gradient.device, wide)
        total = gradient + error
        payload = codec.encode(total.to(gradient.dtype))
        unsent = total - codec.decode(payload, gradient.shape, gradient.dtype)
        # A tensor, not a bool: an accelerator is not waited for. amax() keeps a NaN.
        finite = unsent.abs().amax().isfinite()
        self._pending[key] = torch.where(finite, unsent, error)
        return payload

    def commit(self) -> None:
        """Make all pending errors the current ones."""
        self._errors.update(self._pending)
        self._pending = {}

    def rollback(self) -> None:
        """Forget all pending errors."""
        self._pending = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the current errors by key, contiguous, for a file; pending ones are not in it."""
        return {key: error.contiguous() for key, error in self._errors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the errors of ``state`` for the current ones, and forget the pending.

        Args:
            state: From :meth:`state_dict`, with the model's parameters in the same memory format.

        Raises:
            CheckpointError: This codec keeps no errors, but ``state`` holds some. Nothing is
                changed.
        """
        if state and not self.codec.has_error:
            raise CheckpointError(
                f"The codec's state must be empty for {self.codec!r}, which keeps no errors, but "
                f"holds `{next(iter(state))}`. Load it with the codec that it was saved with."
            )
        self._errors = {key: error.detach().clone() for key, error in state.items()}
        self._pending = {}

    def __repr__(self) -> str:
        return f"Feedback({self.codec!r}, {len(self._errors)} errors)"
