"""Ranks on Ray, whose actors and nodes are lost at random moments: a part of ``make chaos``.

Three ranks train on nodes of one CPU. Whenever all three have been at work for a while, the actor
of one is killed, or its node is taken away and another given. The others finish the step, and a
rank that Ray starts anew is given the state. At the end all have the weights of a run in this
process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

import phalanx
from phalanx.clock import now_s, pause
from phalanx.cluster import on_ray
from phalanx.ipc import wait_until
from tests.contracts.test_executors_same_bits import adamw, made

RANKS = 3
SETTLED_STEPS = 5  # with all ranks, before one is lost
REST_STEPS = 40  # after the last loss, so that the last one that comes finds the others
DEADLINE_S = 180.0


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(13, 3, 9, generator=draw), torch.randint(0, 5, (13,), generator=draw)


def train(executor: object, folder: Path, last: Callable[[], int]) -> tuple[int, str]:
    """Train until ``last()``; return the steps done, and a digest of the weights."""
    torch.set_num_threads(1)
    changes: list[phalanx.RanksChanged] = []

    def note(event: object) -> None:
        if isinstance(event, phalanx.RanksChanged):
            changes.append(event)
        if isinstance(event, phalanx.StepDone) and changes:
            now = changes[-1]
            me = {"node": os.environ.get("PHALANX_HOST", ""), "actor": os.getppid()}
            write(folder / f"rank-{now.ranks[now.rank]}", me)
            if now.rank == 0:
                whole = len(now.ranks) == RANKS
                write(folder / "steps", {"step": event.step, "since": now.step, "whole": whole})
                if now.lost and now.step == event.step:
                    write(folder / f"lost-{event.step}", {"seconds": event.seconds})

    with phalanx.Trainer(
        made(),
        nn.functional.cross_entropy,
        adamw,
        executor=executor,  # type: ignore[arg-type]
        replicas=1,
        microbatches=7,
        seed=11,
        callbacks=[note],
    ) as trained:
        trained.join()
        while trained.steps < last():
            trained.step(batch_of(trained.steps))
        weights = [each.double().sum().item().hex() for each in trained.module.parameters()]
        return trained.steps, " ".join(weights)


def train_on_ray(folder: str) -> tuple[int, str]:
    def last() -> int:
        found = read(Path(folder, "last"))
        return sys.maxsize if found is None else int(found["step"])

    return train(phalanx.Ranks(lost_after_s=5.0), Path(folder), last)


def write(path: Path, told: dict[str, object]) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    draft.write_text(json.dumps(told))
    draft.replace(path)


def read(path: Path) -> dict[str, object] | None:
    return json.loads(path.read_text()) if path.exists() else None


@contextmanager
def nodes() -> Iterator[object]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        for _ in range(RANKS):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


def lose(cluster: object, folder: Path, rank: int, what: str) -> None:
    """Kill a rank's actor, or take its node away and give another."""
    found = read(folder / f"rank-{rank}")
    assert found is not None
    if what == "actor":
        os.kill(int(str(found["actor"])), signal.SIGKILL)
        return
    node = str(found["node"]).removeprefix("ray-")
    [gone] = [each for each in cluster.list_all_nodes() if each.node_id == node]  # type: ignore[attr-defined]
    cluster.remove_node(gone, allow_graceful=False)  # type: ignore[attr-defined]
    cluster.add_node(num_cpus=1)  # type: ignore[attr-defined]


def disturb(cluster: object, folder: Path, losses: list[str], chance: random.Random) -> None:
    """Lose one rank after the other, each when all have been at work for a while."""

    def settled() -> bool:
        now = read(folder / "steps")
        return bool(
            now and now["whole"] and int(str(now["step"])) >= int(str(now["since"])) + SETTLED_STEPS
        )

    for number, what in enumerate(losses, 1):
        assert wait_until(settled, DEADLINE_S), f"not all ranks came back before loss {number}"
        pause(chance.uniform(0.0, 0.1))
        lose(cluster, folder, chance.randrange(RANKS), what)
        before = read(folder / "steps")
        assert wait_until(lambda before=before: changed(folder, before), DEADLINE_S)  # type: ignore[misc]
    assert wait_until(settled, DEADLINE_S), "not all ranks came back at the end"
    now = read(folder / "steps")
    assert now is not None
    write(folder / "last", {"step": int(str(now["step"])) + REST_STEPS})


def changed(folder: Path, before: dict[str, object] | None) -> bool:
    now = read(folder / "steps")
    return now is not None and before is not None and now["since"] != before["since"]


def run(losses: list[str], seed: int) -> list[float]:
    """Return the seconds of each step in which a loss was noticed.

    Raises:
        AssertionError: Somebody has other weights, or did not come back.
    """
    with (
        nodes() as cluster,
        tempfile.TemporaryDirectory() as name,
        ThreadPoolExecutor(1) as pool,
    ):
        folder = Path(name)
        training = pool.submit(
            on_ray,
            train_on_ray,
            RANKS,
            args=(name,),
            address=cluster.address,  # type: ignore[attr-defined]
            rank_restarts=2 * len(losses),
        )
        try:
            disturb(cluster, folder, losses, random.Random(seed))  # Ray adds nodes in main threads
        except BaseException:
            write(folder / "last", {"step": 0})
            raise
        runs = training.result()
        steps = runs[0][0]
        expected = train("inline", folder, lambda: steps)
        assert runs == [expected] * RANKS, "other weights than those of an undisturbed run"
        return [json.loads(path.read_text())["seconds"] for path in folder.glob("lost-*")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--kills", type=int, default=20, help="of actors, and of nodes")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for what in ("actor", "node"):
        begin_s = now_s()
        seconds = run([what] * given.kills, given.seed)
        print(
            f"{given.kills} × a rank's {what} lost: the bits of an undisturbed run; the step that "
            f"noticed took p50 {1e3 * statistics.median(seconds):.0f} ms, longest "
            f"{1e3 * max(seconds):.0f} ms; {now_s() - begin_s:.0f} s in all"
        )


if __name__ == "__main__":
    main()
