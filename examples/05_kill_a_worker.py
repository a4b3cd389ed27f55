"""Train on two worker processes, kill one and later the other, and get the same bits all the same.

Run it with ``python examples/05_kill_a_worker.py``; ``--steps 60`` is a shorter one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import threading

import torch
from torch import nn

import phalanx


def make_net() -> nn.Module:
    """Return a net with dropout and batch norm, which both keep more than weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 512),
        nn.BatchNorm1d(512),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return made-up samples of ten kinds, each scattered around a middle of its own."""
    generator = torch.Generator().manual_seed(0)
    middles = torch.randn(10, 64, generator=generator)
    kinds = torch.randint(0, 10, (2880,), generator=generator)
    samples = middles[kinds] + 1.5 * torch.randn(2880, 64, generator=generator)
    return list(zip(samples.split(192), kinds.split(192), strict=True))


def hash_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash over every bit of weights, buffers and optimizer state."""
    tensors = list(net.state_dict().values())
    for state in optimizer.state_dict()["state"].values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def tell(lost: phalanx.WorkerLost) -> None:
    """Say what became of a worker."""
    held = "nothing" if lost.microbatch is None else f"microbatch {lost.microbatch}"
    print(
        f"  step {lost.step}: worker {lost.worker} (process {lost.pid}) {lost.reason}; it held "
        f"{held}; step done {1e3 * lost.seconds:.0f} ms after that was noticed"
    )


def is_due(done: phalanx.StepDone, kills_left: int, steps: int) -> bool:
    """Kill once after 20 steps, and again when the replacement is at work, but not too late."""
    if kills_left == 2:
        return done.step == 20
    return (done.step >= 40 and all(done.shares)) or done.step == steps - 20


def train(steps: int, *, kill: bool) -> str:
    """Train, kill workers on the way or not, and return the hash of what came out."""
    net = make_net()

    victims = [1, 0] if kill else []

    def after_each(event: object) -> None:
        if isinstance(event, phalanx.WorkerLost):
            tell(event)
        elif isinstance(event, phalanx.StepDone) and victims and is_due(event, len(victims), steps):
            pid = trainer.worker_pids[victims.pop()]
            # A moment later, when the next step is on its way.
            threading.Timer(0.01, os.kill, (pid, signal.SIGKILL)).start()

    trainer = phalanx.Trainer(
        net,
        nn.functional.cross_entropy,
        lambda params: torch.optim.AdamW(params, lr=1e-3),
        executor="processes",
        replicas=2,
        microbatches=6,
        callbacks=[after_each],
    )
    with trainer:
        trainer.fit(make_batches(), steps=steps)
    return hash_of(net, trainer.optimizer)


def main() -> None:
    """Train twice, undisturbed and disturbed, and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    steps = parser.parse_args().steps
    print("undisturbed")
    undisturbed = train(steps, kill=False)
    print(f"  hash {undisturbed}")
    print("with two workers killed")
    disturbed = train(steps, kill=True)
    print(f"  hash {disturbed}")
    print(f"the same bits: {undisturbed == disturbed}")


if __name__ == "__main__":
    main()
