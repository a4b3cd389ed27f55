"""DDP over ranks with 1, 5 and 9 samples: whose gradient is that of the whole batch?

Run it with ``python examples/04_unequal_ranks_with_ddp.py``; it starts its three ranks itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from phalanx.distributed import merge_hook

SIZES = (1, 5, 9)


def make_net() -> nn.Module:
    """Return the same network on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole batch; each rank takes its slice of it."""
    torch.manual_seed(1)
    return torch.randn(sum(SIZES), 4), torch.randint(3, (sum(SIZES),))


def flat_gradient(net: nn.Module) -> torch.Tensor:
    """Return the gradient of all parameters as one vector."""
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def run_rank(rank: int, store: str) -> None:
    """Take one backward pass with plain DDP and one with the hook, and compare."""
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are on this host
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, len(SIZES)),
        rank=rank,
        world_size=len(SIZES),
    )
    inputs, targets = (whole.split(SIZES)[rank] for whole in make_batch())

    plain = DistributedDataParallel(make_net())
    cross_entropy(plain(inputs), targets).backward()

    merged = DistributedDataParallel(make_net())
    merged.register_comm_hook(None, merge_hook(lambda: len(targets)))
    cross_entropy(merged(inputs), targets, reduction="sum").backward()

    if rank == 0:
        whole = make_net()
        cross_entropy(whole(make_batch()[0]), make_batch()[1]).backward()
        expected = flat_gradient(whole)
        for name, net in (("plain DDP", plain), ("merge_hook", merged)):
            error = (flat_gradient(net) - expected).norm() / expected.norm()
            print(f"{name:>10}: error of the gradient {error:.1e}")
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and wait for them."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(str(Path(folder) / "store"),), nprocs=len(SIZES))


if __name__ == "__main__":
    main()
