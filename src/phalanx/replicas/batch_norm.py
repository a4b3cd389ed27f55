"""Batch norm over the rows of all replicas, as the unsplit module would compute it.

Shapes:
    C: channels.  N: values per channel on one replica.  T: values per channel on all of them.
    Inputs are [B, C] or [B, C, …]; statistics are [C], in float32 for inputs of half precision.

Forward, each replica, then all:

    mean_i = Σ x / N_i          M2_i = Σ (x − mean_i)²
    mean, M2 = those of all rows, by Chan's formula in the replicas' order;  var = M2 / T

Backward, with x̂ = (x − mean) / √(var + eps) and both sums taken over all replicas:

    dx = weight / √(var + eps) · (dy − Σ dy / T − x̂ · Σ dy·x̂ / T)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import new_class
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

from phalanx.errors import ConfigError, StateError, UnsupportedError
from phalanx.replicas.rendezvous import ReplicaRendezvous
from phalanx.torch_internals import BatchNorm

__all__ = ["batch_norm_names", "synchronise_batch_norm"]

_HALVES = (torch.float16, torch.bfloat16)
_IN_ORDER = ("cpu", "mps")  # kinds of device where there is one stream, or none


def batch_norm_names(module: nn.Module) -> list[str]:
    """Return the names of the batch norms in ``module`` that can be computed over all replicas.

    torch's own `SyncBatchNorm` is not among them: it has its own partners.
    """
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, BatchNorm) and not isinstance(child, nn.SyncBatchNorm)
    ]


def synchronise_batch_norm(
    modules: Sequence[nn.Module], names: Collection[str], rendezvous: ReplicaRendezvous
) -> None:
    """Make the batch norms ``names`` in every replica normalise over the rows of all of them.

    In training (and wherever a batch norm has no running statistics) outputs, gradients and running
    statistics are those of one module that sees the whole batch; each replica updates its own
    copy of the running statistics to the same values. In evaluation nothing changes. Hooks and a
    forward of the user's own stay: what is replaced is `functional.batch_norm` inside of it.
    A forward that normalises by other means is left as it is.

    Args:
        modules: The replicas' own copies, in the order of the rendezvous's members from 0 on; they
            are changed in place.
        names: Which batch norms, as in `named_modules()`.
        rendezvous: Open, with the replicas in use as its members, whenever these run forward or
            backward. With one member everything is as in plain torch.

    Raises:
        ConfigError: A batch norm is still lazy.
        UnsupportedError: A batch norm's forward was replaced on the object.

    Determinism: within float rounding of the unsplit module, because sums are taken per replica
    first; the same bits from run to run, and on all replicas on the same kind of device.

    Collective: forward and backward meet once per batch norm. Blocks: until all replicas came.
    Moves: 2·C values from each replica to each other, both ways.

    Source: Chan, Golub and LeVeque, 1979, for the sum of variances; unlike torch's SyncBatchNorm it
    needs no process group and no GPU.
    """
    swapped: dict[type[nn.Module], type[nn.Module]] = {}
    for name in names:
        _check(name, modules[0].get_submodule(name))
    for member, module in enumerate(modules):
        for name in names:
            norm = module.get_submodule(name)
            kind = type(norm)
            if kind not in swapped:
                swapped[kind] = new_class(kind.__name__, (_Synchronised, kind))
            norm._phalanx_participant = _Participant(name, member, rendezvous)  # type: ignore[assignment]
            norm.__class__ = swapped[kind]


def _check(name: str, norm: nn.Module) -> None:
    if isinstance(norm, LazyModuleMixin):
        raise ConfigError(
            f"Batch norm `{name}` must know its channels to be synchronised, but is lazy. Run the "
            "module once on a sample batch first."
        )
    if "forward" in vars(norm):
        raise UnsupportedError(
            f"Batch norm `{name}` must have its class's own `forward` to be synchronised, but the "
            'object has another. Define it in a subclass, or use buffers="mean".'
        )


@dataclass(frozen=True)
class _Participant:
    """One batch norm of one replica: who it is when it meets the others."""

    name: str
    member: int
    rendezvous: ReplicaRendezvous

    def meet(self, share: _Share, place: str) -> list[_Share]:
        """Return what all replicas have brought, in their order."""
        shares: list[_Share] = self.rendezvous.exchange(self.member, share, place)
        return shares


class _Synchronised(nn.Module):
    """Comes before a batch norm's own class, and lends its forward another `batch_norm`."""

    _phalanx_participant: _Participant  # beside the attributes of the user's own class

    # Any: the signature of the user's own subclass.
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Intercept(self._phalanx_participant):
            return super().forward(*args, **kwargs)


class _Intercept(TorchFunctionMode):
    """Answer `functional.batch_norm` over all replicas; it is off again inside of the answer."""

    def __init__(self, participant: _Participant) -> None:
        super().__init__()
        self._participant = participant

    # Any: torch's own signature for modes.
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return _batch_norm(self._participant, *args, **kwargs)
        return func(*args, **kwargs)


def _batch_norm(
    participant: _Participant,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Do what `functional.batch_norm` does, over the rows of all replicas."""
    plain = (input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not training or len(participant.rendezvous.members) == 1:
        return F.batch_norm(*plain)
    with torch.no_grad():
        shares = participant.meet(_local_moments(input), f"batch norm `{participant.name}`")
        moments = _pool(shares, input.device)
    if moments is None:  # no rows anywhere
        return F.batch_norm(*plain)
    if moments.count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {input.size()}"
        )
    _move(running_mean, moments.mean, momentum)
    _move(running_var, moments.m2 / (moments.count - 1), momentum)
    call = _Call(
        participant,
        participant.rendezvous.members,
        participant.rendezvous.rounds,
        moments.count,
        eps,
    )
    normalised: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        input, weight, bias, moments.mean, moments.m2 / moments.count, call
    )
    return normalised


@dataclass(frozen=True)
class _Share:
    """What one replica brings: [2, C] values over ``count`` values per channel.

    On an accelerator they may not be computed yet, and the taker's stream has to wait for them.
    """

    values: Tensor
    count: int
    ready: torch.Event | None

    @staticmethod
    def of(values: Tensor, count: int) -> _Share:
        ready = None
        if values.device.type not in _IN_ORDER:
            ready = torch.Event(values.device)
            ready.record(torch.accelerator.current_stream(values.device))
        return _Share(values, count, ready)

    def on(self, device: torch.device) -> Tensor:
        """Return the values on ``device``, ordered after what makes them."""
        if self.ready is not None:
            stream = torch.accelerator.current_stream(self.values.device)
            stream.wait_event(self.ready)
            self.values.record_stream(stream)  # their memory must not go to others meanwhile
        return self.values.to(device)


@dataclass(frozen=True)
class _Moments:
    """Count, mean and sum of squared deviations, per channel."""

    count: int
    mean: Tensor
    m2: Tensor


@dataclass(frozen=True)
class _Call:
    """One forward pass of a batch norm, which its backward pass has to find again."""

    participant: _Participant
    members: tuple[int, ...]
    round: int
    count: int
    eps: float


def _local_moments(input: Tensor) -> _Share:
    count = math.prod(input.shape[:1] + input.shape[2:])
    values = _accurate(input.detach())
    dims = _all_but_channels(input)
    mean = values.mean(dims)
    m2 = (values - _along_channels(mean, input)).square_().sum(dims)
    return _Share.of(torch.stack([mean, m2]), count)


def _pool(shares: Sequence[_Share], device: torch.device) -> _Moments | None:
    """Combine the replicas' moments by Chan's formula, in their order; None without any value."""
    pooled: _Moments | None = None
    for share in shares:
        if share.count == 0:  # its moments are not numbers
            continue
        mean, m2 = share.on(device).unbind()
        if pooled is None:
            pooled = _Moments(share.count, mean, m2)
            continue
        count = pooled.count + share.count
        delta = mean - pooled.mean
        pooled = _Moments(
            count,
            pooled.mean + delta * (share.count / count),
            pooled.m2 + m2 + delta.square() * (pooled.count * share.count / count),
        )
    return pooled


def _move(running: Tensor | None, towards: Tensor, momentum: float) -> None:
    if running is not None:
        running.copy_(torch.lerp(running.to(towards), towards, momentum))


class _Normalise(torch.autograd.Function):
    """Normalise by given moments that, for the derivative, come from all replicas' inputs."""

    # Any: torch's own signature for the context.
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        call: _Call,
    ) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(var + call.eps))
        if input.dtype in _HALVES:  # torch's kernels take float statistics with float parameters
            weight = None if weight is None else weight.float()
            bias = None if bias is None else bias.float()
        return F.batch_norm(input, mean, var, weight, bias, False, 0.0, call.eps)

    # Any: torch's own signature for the context.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse = ctx.saved_tensors
        wants_input, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        call: _Call = ctx.call
        dims, dy = _all_but_channels(input), _accurate(grad)
        centred = _accurate(input) - _along_channels(mean, input)
        sums = torch.stack([dy.sum(dims), (dy * centred).sum(dims) * inverse])
        # All meet whatever each of them needs, so that none waits for one that needs less.
        # What others may still read is not what is handed on: gradients are added in place.
        total_dy, total_dy_x = _total(call, sums.clone())
        grad_input = None
        if wants_input:
            slope = total_dy_x * inverse / -call.count
            scale = inverse if weight is None else inverse * weight
            centred.mul_(_along_channels(slope, input)).add_(dy)
            centred.sub_(_along_channels(total_dy / call.count, input))
            grad_input = centred.mul_(_along_channels(scale, input))
        return (  # autograd brings them to the dtypes of what they belong to
            grad_input,
            sums[1] if wants_weight else None,
            sums[0] if wants_bias else None,
            None,
            None,
            None,
        )


def _total(call: _Call, sums: Tensor) -> Tensor:
    """Return the sum over all replicas, added in their order."""
    participant = call.participant
    if participant.rendezvous.members != call.members:
        raise StateError(
            f"Batch norm `{participant.name}` must run backward on the replicas that ran it "
            f"forward {call.members}, but these are {participant.rendezvous.members}."
        )
    place = f"the backward pass of batch norm `{participant.name}` (exchange {call.round})"
    first, *others = participant.meet(_Share.of(sums, call.count), place)
    total = first.on(sums.device)
    for share in others:
        total = total + share.on(sums.device)
    return total


def _accurate(values: Tensor) -> Tensor:
    return values.float() if values.dtype in _HALVES else values


def _all_but_channels(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _along_channels(per_channel: Tensor, input: Tensor) -> Tensor:
    return per_channel.view(-1, *[1] * (input.dim() - 2))
