"""Send DDP's gradients through a codec.

Shape legend: W ranks.

    gradients of a bucket ──▶ + errors ──▶ encode ──▶ one packet ──▶ all-gather, W packets
                                                                         │
    bucket ◀── divide by W ◀── add in the order of ranks ◀── decode each ┘
"""

# DDP compares a hook's annotations with the objects themselves, so they cannot be strings here:
# no `from __future__ import annotations`.

import itertools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from phalanx.codecs import Codec, Feedback

__all__ = ["codec_hook"]

_WIDE = torch.float32  # at least, for sums


def codec_hook(codec: Codec, ddp: DistributedDataParallel) -> Feedback:
    """Let the gradients of ``ddp`` travel encoded, by a communication hook that this registers.

    The gradient is the mean over ranks, as DDP takes it, of what comes out of the codec. A gradient
    that is not finite arrives as not finite. To send 16 bits take torch's ``fp16_compress_hook`` or
    ``bf16_compress_hook``. Gradients must be dense.

    Args:
        codec: `OneBit`, `TopK` or another `Codec`.
        ddp: The model of torch's class, before its first backward pass.

    Returns:
        The errors of this rank, by parameter name. Each rank saves and loads its own
        ``state_dict()``. With a ``GradScaler``, errors are in the scale of the step that made them;
        keep its scale constant (``growth_interval`` beyond the last step) or use bfloat16.

    Raises:
        ConfigError: ``codec`` is no codec.

    Example:
        >>> import tempfile
        >>> from phalanx.codecs import OneBit
        >>> init = f"file://{tempfile.mkdtemp()}/store"
        >>> dist.init_process_group("gloo", init_method=init, rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(torch.nn.Linear(9, 3))
        >>> errors = codec_hook(OneBit(), ddp)
        >>> ddp(torch.ones(2, 9)).sum().backward()
        >>> list(errors.state_dict())
        ['weight']
        >>> dist.destroy_process_group()

    Determinism: bitwise identical on all ranks, and for any buckets of DDP.
    Collective: Yes, every rank's backward pass. Blocks: as DDP does, until all ranks have come.
    Moves: W − 1 payloads into each rank, where DDP moves 2·(W − 1)/W gradients; so `OneBit`
    pays for dozens of ranks, not for thousands.
    """
    feedback, group = Feedback(codec), ddp.process_group
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}
    ranks = dist.get_world_size(group)

    def merge(_state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer, gradients = bucket.buffer(), bucket.gradients()
        payloads = [
            feedback.encode(names[parameter], gradient)
            for parameter, gradient in zip(bucket.parameters(), gradients, strict=True)
        ]
        sent = [tensor for payload in payloads for tensor in payload]
        packet = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in sent])
        packets = list(packet.new_empty(ranks, packet.numel()).unbind())
        future = dist.all_gather(packets, packet, group=group, async_op=True).get_future()

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

    ddp.register_comm_hook(None, merge)
    return feedback


def _unpack(packet: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return the tensors whose bytes are in ``packet``, with the shapes and dtypes of ``like``."""
    pieces = packet.split([each.numel() * each.itemsize for each in like])
    return [
        piece.clone().view(each.dtype).view(each.shape)  # a clone is aligned for any dtype
        for piece, each in zip(pieces, like, strict=True)
    ]
