"""Train copies of a net that meet only every 20 steps, beside copies that meet at each step.

Two worker processes, each with half of the digits, train a copy of the net with AdamW. Synchronous:
after every step the copies are averaged. DiLoCo: after 20 steps what has become of them, on
average, goes through an outer step with Nesterov momentum.

Run it with ``python examples/07_diloco.py``, without a launcher: it starts its workers itself. It
takes a quarter of a minute, and prints the same figures every time on one machine.

Source of the method: arXiv 2311.08105.
"""

from __future__ import annotations

import multiprocessing
import os

import torch
from torch import Tensor, nn

from phalanx import tables
from phalanx.cli.data import open_data

WORKERS, STEPS, BATCH, PACE = 2, 600, 32, 20
OUTER = tables.Nesterov(lr=0.7, momentum=0.6)  # 0.9 wants more than 30 outer steps


def make_net() -> nn.Module:
    """Return a small convolutional net."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def read_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the training and the test set as (images, labels)."""
    data = open_data("digits")
    return data.train.tensors, data.validation.tensors


def train(run: str, worker: int, every: int, outer: tables.Nesterov | None) -> tuple[float, int]:
    """Train one copy; return how many of the test digits it then knows, and how often it synced."""
    (images, labels), (test_images, test_labels) = read_digits()
    images, labels = images[worker::WORKERS], labels[worker::WORKERS]
    torch.manual_seed(0)  # all begin with the master's net, and that is whoever comes first
    net = make_net()
    torch.manual_seed(1 + worker)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with tables.join(run, sync=True, num_workers=WORKERS) as world:
        shared = tables.SharedModule(net, world, every=every, outer=outer)
        for _ in range(STEPS):
            batch = torch.randint(len(labels), (BATCH,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimizer.step()
            shared.step()
    with torch.no_grad():
        right = net.eval()(test_images).argmax(1) == test_labels
    return right.double().mean().item(), shared.num_syncs


def work(run: str, worker: int, answers: multiprocessing.SimpleQueue) -> None:
    """Train both ways, one after the other; worker 0 tells what came out."""
    torch.set_num_threads(1)
    results = [train(f"{run}-synchronous", worker, 1, None)]
    results.append(train(f"{run}-diloco", worker, PACE, OUTER))
    if worker == 0:  # at the end all copies are the same
        answers.put(results)


def main() -> None:
    """Start the workers, and compare."""
    print(f"{WORKERS} workers, {STEPS} steps each")
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    run = f"example-{os.getpid()}"
    workers = [context.Process(target=work, args=(run, w, answers)) for w in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a worker failed")
    (accuracy, num_syncs), (diloco, num_outer) = answers.get()
    print(f"  synchronous: {100 * accuracy:.1f} % of the test digits, {num_syncs} syncs")
    print(f"  DiLoCo:      {100 * diloco:.1f} % of the test digits, {num_outer} syncs")
    print(f"{num_syncs // num_outer}x fewer syncs, within 1 %: {diloco >= accuracy - 0.01}")


if __name__ == "__main__":  # worker processes import this file; without it they would start more
    main()
