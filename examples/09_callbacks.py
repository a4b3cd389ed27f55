"""Train with callbacks: an average of the weights, the best checkpoint, early stopping, log files.

Run it with ``python examples/09_callbacks.py``; it leaves a folder ``callbacks-run``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics.classification import MulticlassAccuracy

import phalanx
from phalanx.callbacks import CSV, EMA, JSONL, Checkpoint, EarlyStopping, History

OUT = Path("callbacks-run")


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))


def make_batches(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return made-up samples of four kinds that overlap."""
    draw = torch.Generator().manual_seed(seed)
    middles = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    kinds = torch.randint(0, 4, (48 * count,), generator=draw)
    samples = middles[kinds] + 2.0 * torch.randn(48 * count, 16, generator=draw)
    return list(zip(samples.split(48), kinds.split(48), strict=True))


def make_trainer(replicas: int, callbacks: list[phalanx.callbacks.Callback]) -> phalanx.Trainer:
    return phalanx.Trainer(
        make_net(),
        nn.functional.cross_entropy,
        lambda params: torch.optim.AdamW(params, lr=3e-3),
        replicas=replicas,
        microbatches=6,
        scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.3, patience=1),
        metrics={"accuracy": MulticlassAccuracy(4, average="micro")},
        callbacks=callbacks,
    )


def main() -> None:
    train, validation = make_batches(12, seed=1), make_batches(4, seed=2)

    history, ema = History(), EMA(decay=0.95)
    best = Checkpoint(OUT / "best", monitor="validation.accuracy", mode="max", keep=2)
    stopping = EarlyStopping("validation.loss", patience=4)
    log = [JSONL(OUT / "metrics.jsonl"), CSV(OUT / "epochs.csv")]
    with make_trainer(2, [history, ema, best, stopping, *log]) as trainer:
        trainer.fit(train, epochs=40, validate=validation)
        print(f"stopped after {trainer.epochs} epochs: {trainer.stopped}")
        for name in ("trained", "averaged"):
            if name == "averaged":  # the training is over
                trainer.module.load_state_dict(ema.module.state_dict())
            found = trainer.evaluate(validation)
            print(f"{name}: loss {found['loss']:.3f}, accuracy {found['accuracy']:.1%}")
        right = trainer.predict(validation).argmax(1) == torch.cat([y for _, y in validation])
        print(f"predicted right: {int(right.sum())} of {len(right)}")
    print(f"loss: {history.losses[0]:.3f} at first, {history.losses[-1]:.3f} at last")

    # On from the best epoch, with other replicas: the same bits, those of the average included.
    runs = []
    for replicas in (1, 3):
        again = EMA(decay=0.95)
        with make_trainer(replicas, [again]) as trainer:
            trainer.resume(best.best)
            trainer.fit(train, steps=24)
        runs.append([*trainer.module.parameters(), *again.module.parameters()])
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(*runs, strict=True))
    print(f"from {best.best.name} on, the same bits: {same}")


if __name__ == "__main__":
    main()
