"""What a codec did not send, kept until it can be (error feedback).

gradient ──┬──▶ + ──▶ encode ──▶ payload, to the others
           error ▲        └──▶ decode ──▶ sent
                 └── total − sent ◀───────┘      pending until the step is committed
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.codecs.codec import Codec, Payload
from phalanx.codecs.naming import resolve_codec
from phalanx.errors import CheckpointError

__all__ = ["Feedback"]


class Feedback:
    """A codec with a memory of its errors, one for each sender and parameter.

    What is not sent now is added to the next gradient of the same key, so the sum of all that was
    sent differs from the sum of all gradients by the last error only. New errors are *pending*
    until :meth:`commit`; :meth:`rollback` forgets them, so that a failed step changes nothing.
    Several gradients of one key between two commits build on each other.

    A gradient with a NaN or an infinity comes out with one (see :class:`Codec`) and leaves the
    error as it was, as if it had not been sent: one bad step does not poison those after it.
    Errors are kept in float32 at least, on the gradient's device.

    Args:
        codec: A codec or its name. One without error (``fp16``, ``bf16``) keeps nothing here.

    Example:
        >>> feedback = Feedback("top_k(0.5)")
        >>> for gradient in ([3.0, 1.0], [0.0, 1.0], [0.0, 0.0]):
        ...     sent = feedback.round_trip("weight", torch.tensor(gradient))
        ...     feedback.commit()
        ...     print(sent.tolist())
        [3.0, 0.0]
        [0.0, 2.0]
        [0.0, 0.0]

    Source: Seide et al., Interspeech 2014; fbcunn's ``OneBitDataParallel``.
    """

    def __init__(self, codec: Codec | str) -> None:
        self.codec = resolve_codec(codec)
        # Errors are never written in place, so what `state_dict` has handed out stays as it was.
        self._errors: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}

    def encode(self, key: str, gradient: Tensor) -> Payload:
        """Return the payload for ``gradient`` and the error of ``key``; the new error is pending.

        Raises:
            CheckpointError: The error of ``key`` was loaded from a state of another model.
        """
        return self._send(key, gradient)[0]

    def round_trip(self, key: str, gradient: Tensor) -> Tensor:
        """Return what a receiver of :meth:`encode`'s payload makes of it, in ``gradient``'s shape.

        A gradient that the codec does not take is returned itself.
        """
        payload, sent = self._send(key, gradient)
        return self._decode(payload, gradient) if sent is None else sent

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
            CheckpointError: ``state`` holds what this codec has no use for. Nothing is changed.
        """
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"The codec's state must map keys to errors, but is {type(state).__name__!r}. Give "
                "what `state_dict()` returned."
            )
        for key, error in state.items():
            self._check(key, error)
        self._errors = {key: error.detach().clone() for key, error in state.items()}
        self._pending = {}

    def __repr__(self) -> str:
        return f"Feedback({self.codec!r}, {len(self._errors)} errors)"

    @torch.no_grad()
    def _send(self, key: str, gradient: Tensor) -> tuple[Payload, Tensor | None]:
        """Return the payload and, where it had to be decoded anyway, what it stands for."""
        codec = self.codec
        if not (codec.has_error and codec.takes(gradient.shape, gradient.dtype)):
            return codec.encode(gradient), None
        error = self._error(key, gradient)
        total = gradient + error
        payload = codec.encode(total.to(gradient.dtype))
        sent = self._decode(payload, gradient)
        unsent = total - sent
        # A tensor, not a bool: an accelerator is not waited for. amax() keeps a NaN.
        finite = unsent.abs().amax().isfinite()
        self._pending[key] = torch.where(finite, unsent, error)
        return payload, sent

    def _error(self, key: str, gradient: Tensor) -> Tensor:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        error = self._pending.get(key, self._errors.get(key))
        if error is None:
            return gradient.new_zeros((), dtype=wide).expand(gradient.shape)
        if error.shape != gradient.shape:
            raise CheckpointError(
                f"Error `{key}` of the codec must have its gradient's shape "
                f"{tuple(gradient.shape)}, but has {tuple(error.shape)}. Load a state that was "
                "saved with this model."
            )
        return error.to(gradient.device, wide)

    def _decode(self, payload: Payload, gradient: Tensor) -> Tensor:
        return self.codec.decode(payload, gradient.shape, gradient.dtype)

    def _check(self, key: str, error: object) -> None:
        if not isinstance(error, Tensor):
            raise CheckpointError(
                f"Error `{key}` of the codec must be a tensor, but is {type(error).__name__}."
            )
        if not self.codec.has_error:
            raise CheckpointError(
                f"The codec's state must be empty for {self.codec!r}, which keeps no errors, but "
                f"holds `{key}`. Load it with the codec that it was saved with."
            )
