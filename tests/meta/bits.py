"""Train three small models in every configuration and print a hash of their weights.

`make bits` runs it. The hashes of one model must be equal to each other, and to those of another
commit on the same machine; kernels of other processors may round differently.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx

STEPS = 5
ROWS = 23  # odd, so that microbatches are unequal
VOCABULARY = 31
CONFIGURATIONS = [
    ("inline", 1),
    *(("threads", count) for count in (1, 2, 3)),
    *(("processes", count) for count in (1, 2, 3)),
]


class GPT(nn.Module):
    """Two layers of a transformer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, (B, V, T), for tokens, (B, T)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: Tensor = self.head(self.blocks(self.tokens(tokens), mask, is_causal=True))
        return logits.transpose(1, 2)


def open_model(name: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Return the model ``name`` and its batches."""
    torch.manual_seed(7)
    labels = [torch.randint(10, (ROWS,)) for _ in range(STEPS)]
    if name == "mlp":
        model: nn.Module = nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 10))
        return model, [(torch.randn(ROWS, 20), each) for each in labels]
    if name == "cnn":
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 10)
        )
        return model, [(torch.randn(ROWS, 1, 12, 12), each) for each in labels]
    tokens = [torch.randint(VOCABULARY, (ROWS, 9)) for _ in range(STEPS)]
    return GPT(), [(each[:, :-1], each[:, 1:]) for each in tokens]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of all runs."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(name: str, executor: str, replicas: int, **options: Any) -> str:
    """Return a hash of the weights and buffers after some steps."""
    model, batches = open_model(name)
    with phalanx.Trainer(
        model,
        F.cross_entropy,
        adamw,
        executor=executor,
        replicas=replicas,
        microbatches=4,
        clip_norm=1.0,
        **options,
    ) as trainer:
        for batch in batches:
            trainer.step(batch)
    return hash_of(model)


def hash_of(model: nn.Module) -> str:
    """Return a hash of the weights and buffers."""
    digest = hashlib.sha256()
    for key, value in model.state_dict().items():
        digest.update(key.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def train_as_rank(rank: int, name: str, folder: str) -> None:
    """Train as one of two ranks; the first one leaves the hash."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2
    )
    found = train(name, "ranks", 2)
    if rank == 0:
        Path(folder, "hash").write_text(found)
    dist.destroy_process_group()


def spawned(function: Any, ranks: int, *args: object) -> str:  # Any: a function for `mp.spawn`
    """Return the hash that a function's first rank leaves."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(function, (*args, folder), nprocs=ranks)
        return Path(folder, "hash").read_text()


def main() -> None:
    """Print a line for each model and configuration."""
    for name in ("mlp", "cnn", "gpt"):
        for executor, replicas in CONFIGURATIONS:
            print(f"{name:5} {executor:9}  {replicas}  {train(name, executor, replicas)}")
        print(f"{name:5} ranks      2  {spawned(train_as_rank, 2, name)}", flush=True)


if __name__ == "__main__":
    main()
