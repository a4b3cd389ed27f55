"""Refuse a forward pass that changes parameters, or buffers of the user's own module.

Replicas share the parameters' memory. A forward pass that writes there (a momentum encoder, weights
that are clamped or normalised, values that the first batch sets) would do it once for every
microbatch, in a race. Buffers may be written: every microbatch has its own copy. Those of the
module itself are reached past the replica, by a function that holds `self`.

Writes raise the tensor's version, and an assignment to `.data` moves it; both are looked for in
every microbatch. Writes through `.data` do neither, so an executor's first run is compared with a
copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from phalanx.errors import UnsupportedError

__all__ = ["SameParameters", "same_afterwards"]


class SameParameters:
    """The parameters of one replica.

    Args:
        source: The module that the user trains.
        own: The replica's parameters, in the order of the source's.
        homes: In whose memory they lie: the source's parameters, or copies on another device.
        only_one: Whether there is no other replica of this source: what is written to memory that
            it shares with the source is then written once.
    """

    def __init__(
        self, source: nn.Module, own: Sequence[Tensor], homes: Sequence[Tensor], *, only_one: bool
    ) -> None:
        self._named = list(source.named_parameters())
        self._own = own
        self._homes = homes
        self._versioned = [
            place
            for place, parameter in enumerate(own)
            if not (parameter.is_inference() or (only_one and self._is_shared(place)))
        ]

    def note(self) -> tuple[list[int], list[int]]:
        """Return what changes where parameters are assigned, and where they are written."""
        own = self._own
        return [p.data_ptr() for p in own], [own[place]._version for place in self._versioned]

    def check(self, before: tuple[list[int], list[int]]) -> None:
        """Compare with what :meth:`note` returned.

        Raises:
            UnsupportedError: A parameter was written or assigned; it is called by its name.
        """
        after = self.note()
        if after == before:
            return
        moved = [
            place for place, (a, b) in enumerate(zip(before[0], after[0], strict=True)) if a != b
        ]
        versions = zip(self._versioned, before[1], after[1], strict=True)
        for place in moved:
            self._own[place].data = self._homes[place].data
        changed = min([*moved, *(place for place, a, b in versions if a != b)])
        raise _refusal(self._named[changed][0])

    def _is_shared(self, place: int) -> bool:
        return self._homes[place] is self._named[place][1]


def _refusal(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"Parameter `{name}` must stay as it is during a forward pass in a replica, but was "
        "changed: replicas share it, and would change it once for every microbatch. Change it once "
        "a step, in a callback that is told of `StepDone` or after `optimizer.step()`; what the "
        "first batch initialises is set by one forward pass of the plain module before."
    )


@contextlib.contextmanager
def same_afterwards(module: nn.Module) -> Iterator[None]:
    """Compare parameters with a copy when the body is done, and put back what has changed.

    Raises:
        UnsupportedError: A parameter has another value, or the body has raised it; parameters and
            buffers are put back then.
    """
    copies = [
        (name, tensor, tensor.detach().clone(), isinstance(tensor, nn.Parameter))
        for named in (module.named_parameters(), module.named_buffers())
        for name, tensor in named
        if tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_shared() or tensor.is_inference())
    ]
    try:
        yield
        changed = _first_changed(copies)
        if changed is not None:
            raise _refusal(changed)
    except UnsupportedError:
        _put_back(copies)
        raise
    finally:
        copies.clear()


def _first_changed(copies: Sequence[tuple[str, Tensor, Tensor, bool]]) -> str | None:
    for name, tensor, copy, is_parameter in copies:
        if is_parameter and not _same(tensor, copy):
            return name
    return None


def _put_back(copies: Sequence[tuple[str, Tensor, Tensor, bool]]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for _, tensor, copy, _ in copies:
            if not _same(tensor, copy):
                tensor.copy_(copy)


def _same(tensor: Tensor, copy: Tensor) -> bool:
    if torch.equal(tensor, copy):
        return True
    return bool(((tensor == copy) | (tensor.isnan() & copy.isnan())).all())
