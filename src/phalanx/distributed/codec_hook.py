"""Send DDP's gradients through a codec.

Shape legend: W ranks.

    gradients of a bucket ──▶ + errors ──▶ encode ──▶ one packet ──▶ all-gather, W packets
                                                                         │
    bucket ◀── divide by W ◀── add in the order of ranks ◀── decode each ┘
"""

# DDP compares a hook's annotations with the objects themselves, so they cannot be strings here:
# no `from __future__ import annotations`.

import itertools
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from phalanx.codecs import Codec, Feedback
from phalanx.errors import CheckpointError, ConfigError, UnsupportedError

__all__ = ["CodecHook", "codec_hook"]

_WIDE = torch.float32  # at least, for sums


def codec_hook(
    codec: Codec, module: nn.Module, *, process_group: dist.ProcessGroup | None = None
) -> "CodecHook":
    """Make a hook with which DDP's gradients travel encoded.

    The gradient is the mean over ranks, as DDP takes it, of what comes out of the codec. Each rank
    remembers its errors by parameter name, and saves and loads its own ``hook.state_dict()``. Give
    one hook to each model, before its first backward pass. To send 16 bits take torch's
    ``fp16_compress_hook`` or ``bf16_compress_hook``.

    Args:
        codec: `OneBit`, `TopK` or another `Codec`.
        module: What DDP wraps, or the DDP module itself; errors are stored under its names.
        process_group: The one that DDP was given, by default all ranks.

    Raises:
        ConfigError: ``codec`` is no codec.

    Example:
        >>> from phalanx.codecs import OneBit
        >>> hook = codec_hook(OneBit(), nn.Linear(5, 3))
        >>> # ddp.register_comm_hook(None, hook.merge)
        >>> hook
        CodecHook(OneBit(min_elements=20), 2 parameters)

    Determinism: bitwise identical on all ranks, and for any buckets of DDP.
    Collective: Yes, every rank's backward pass. Blocks: as DDP does, until all ranks have come.
    Moves: W − 1 payloads into each rank, where DDP moves 2·(W − 1)/W gradients; so `OneBit`
    pays for dozens of ranks, not for thousands.
    """
    return CodecHook(codec, module, process_group)


class CodecHook(Feedback):
    """The hook, made by :func:`codec_hook`, and the errors of this rank.

    What is not finite arrives as not finite. With a ``GradScaler``, errors are in the scale of the
    step that made them; keep its scale constant (``growth_interval`` beyond the last step) or use
    bfloat16.
    """

    def __init__(
        self, codec: Codec, module: nn.Module, process_group: dist.ProcessGroup | None
    ) -> None:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        super().__init__(codec)
        self._parameters = dict(module.named_parameters())  # keeps them, so that ids stay theirs
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._group = process_group

    def merge(self, _state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        """Start to merge ``bucket``; give this to ``ddp.register_comm_hook(None, hook.merge)``.

        Each gradient is sent encoded, and what arrives is added in the order of ranks.
        """
        codec, ranks = self.codec, dist.get_world_size(self._group)
        buffer, gradients = bucket.buffer(), bucket.gradients()
        if buffer.layout is not torch.strided:
            raise UnsupportedError(
                "Gradients must be dense to go through a codec, but are sparse. Make the embedding "
                "with `sparse=False`."
            )
        payloads = [
            self.encode(self._name(parameter), gradient)
            for parameter, gradient in zip(bucket.parameters(), gradients, strict=True)
        ]
        sent = [tensor for payload in payloads for tensor in payload]
        packet = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in sent])
        packets = list(packet.new_empty(ranks, packet.numel()).unbind())
        future = dist.all_gather(packets, packet, group=self._group, async_op=True).get_future()

        def add(arrived: Future[object]) -> Tensor:
            arrived.value()  # raises what went wrong
            of_ranks = [iter(_unpack(packet, sent)) for packet in packets]
            for gradient, payload in zip(gradients, payloads, strict=True):
                total = gradient.new_zeros((), dtype=torch.promote_types(gradient.dtype, _WIDE))
                for tensors in of_ranks:
                    part = tuple(itertools.islice(tensors, len(payload)))
                    total = total + codec.decode(part, gradient.shape, gradient.dtype)
                gradient.copy_(total / ranks)
            return buffer

        merged: Future[Tensor] = future.then(add)
        return merged

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up the errors of a state that the same rank has saved.

        Raises:
            CheckpointError: It is of another model. Nothing is changed.
        """
        for name, error in state.items():
            parameter = self._parameters.get(name)
            if parameter is None or parameter.shape != error.shape:
                raise CheckpointError(
                    f"Error `{name}` of the codec must belong to a parameter of shape "
                    f"{tuple(error.shape)}, but the module has none. Load a state that was saved "
                    "with this model."
                )
        super().load_state_dict(state)

    def __repr__(self) -> str:
        return f"CodecHook({self.codec!r}, {len(self._parameters)} parameters)"

    def _name(self, parameter: Tensor) -> str:
        name = self._names.get(id(parameter))
        if name is None:
            raise ConfigError(
                "`module` must be the one that DDP wraps, but has no parameter of shape "
                f"{tuple(parameter.shape)} that DDP merges. Make the hook with the same module."
            )
        return name


def _unpack(packet: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return the tensors whose bytes are in ``packet``, with the shapes and dtypes of ``like``."""
    pieces = packet.split([each.numel() * each.itemsize for each in like])
    return [
        piece.clone().view(each.dtype).view(each.shape)  # a clone is aligned for any dtype
        for piece, each in zip(pieces, like, strict=True)
    ]
