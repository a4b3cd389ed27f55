"""`DistributedDataParallel` and ranks on one GPU: a rank over NCCL, and two over gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx
from phalanx import DistributedDataParallel
from tests.multiprocess.ranks import Ranks
from tests.multiprocess.test_ddp_same_bits import final_loss, hash_of, train_all
from tests.zoo import CASES, Case, cnn_norm, image_batch, sgd

pytestmark = [pytest.mark.gpu, pytest.mark.promise("loops-of-your-own-on-ranks")]

HOME = torch.device("cuda", 0)


def settle() -> None:
    """Leave torch no choice of kernels in this rank."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.allow_tf32 = False
    torch.cuda.set_device(HOME)


def train_here(rank: int) -> dict[str, str]:
    settle()
    return train_all(rank, HOME)


def loss_here(rank: int, case: Case, kind: str) -> float:
    settle()
    wrap = TorchDDP if kind == "torch" else DistributedDataParallel
    return final_loss(rank, case, wrap, HOME)


def step_in(rank: int, executor: str) -> str:
    """Train by the Trainer, whose gradients go the way of those of many ranks even on one."""
    settle()
    torch.manual_seed(0)
    module = cnn_norm().to(HOME)
    with phalanx.Trainer(
        module, CASES[1].loss, sgd, executor=executor, replicas=[HOME], microbatches=4
    ) as trainer:
        for step in range(4):
            trainer.step(image_batch(13, seed=step))
    return hash_of(module)


@pytest.fixture(scope="module")
def nccl() -> Iterator[Ranks]:
    if not torch.cuda.is_available():
        pytest.skip("NCCL needs an NVIDIA GPU")
    with Ranks(1, backend="nccl") as ranks:
        yield ranks


def test_two_ranks_on_a_card_train_the_bits_of_one_over_nccl(nccl: Ranks) -> None:
    one = nccl.run(train_here)
    assert nccl.run(train_here) == one
    with Ranks(2) as ranks:  # NCCL has no two ranks on one card
        assert ranks.run(train_here) == one * 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loss_is_that_of_torchs_class_over_nccl(nccl: Ranks, case: Case) -> None:
    ours, theirs = (nccl.run(loss_here, case, kind) for kind in ("ours", "torch"))
    assert ours == pytest.approx(theirs, abs=1e-6)


def test_a_trainers_rank_over_nccl_has_the_bits_of_one_process(nccl: Ranks) -> None:
    assert nccl.run(step_in, "ranks") == nccl.run(step_in, "inline")
