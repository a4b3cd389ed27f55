"""Fit a line in workers that Ray places: they share a table of parameters, on however many nodes.

Run it with ``python examples/08_on_ray.py``, with phalanx[ray] installed: it uses the Ray cluster
that RAY_ADDRESS names or that runs on this machine, or starts one here.
"""

from __future__ import annotations

import argparse

import torch

from phalanx import on_ray, tables

SLOPE, OFFSET = 3.0, -1.0
ROUNDS = 200


def fit(num_samples: int) -> list[float]:
    """Fit slope and offset to samples of this worker's own, together with all others."""
    with tables.join() as world:
        generator = torch.Generator().manual_seed(world.worker_id)
        x = torch.rand(num_samples, generator=generator)
        y = SLOPE * x + OFFSET + 0.1 * torch.randn(num_samples, generator=generator)
        line = world.array(2, name="line", sync=True)  # a get waits for all workers' adds
        for _ in range(ROUNDS):
            slope, offset = line.get().tolist()
            error = slope * x + offset - y
            gradient = torch.stack([(error * x).mean(), error.mean()])
            line.add(-gradient / world.num_workers)
        print(f"{num_samples} samples here")
        return line.get().tolist()


def main() -> None:
    """Run it, and see that all workers have come to the same line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int)
    said = parser.parse_args()
    lines = on_ray(fit, said.workers, args=(500,))
    slope, offset = lines[0]
    print(f"{len(lines)} workers: y = {slope:.2f} x {offset:+.2f}")
    print(f"the same line in all: {all(line == lines[0] for line in lines)}")
    print(f"near {SLOPE:g} x {OFFSET:+g}: {abs(slope - SLOPE) + abs(offset - OFFSET) < 0.2}")


if __name__ == "__main__":
    main()
