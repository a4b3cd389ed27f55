"""Ranks on Ray that survive: a worker, an actor, or a node is lost in mid-step."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import phalanx
from phalanx.cluster import on_ray
from phalanx.ipc import wait_until
from tests.contracts.test_executors_same_bits import adamw, made, schedule

ray = pytest.importorskip("ray", reason="needs ray, of the extra `ray`")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = pytest.mark.promise("killed-ranks-cost-no-bit")

SIZE = 3
STEPS = 40
DIES_AT = 8
DEADLINE_S = 120.0


@pytest.fixture
def cluster() -> Iterator[cluster_utils.Cluster]:
    """A head with room for all, so that whoever loses a node goes there, and two nodes of one."""
    nodes = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        for _ in range(SIZE):
            nodes.add_node(num_cpus=1)
        yield nodes
    finally:
        nodes.shutdown()


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        (torch.randn(13, 3, 9, generator=draw), torch.randint(0, 5, (13,), generator=draw))
        for _ in range(STEPS // 2)
    ]


def train(executor: object, folder: str, lost: str) -> tuple[int, str, list[int]]:
    """Return the steps done, a digest of the weights, and which ranks came later."""
    torch.set_num_threads(1)
    rank, again = int(os.environ.get("RANK", 0)), os.environ.get("PHALANX_RANK_RESTARTS", "0")
    came: list[int] = []

    def note(event: object) -> None:
        if isinstance(event, phalanx.RanksChanged) and event.step > 1:
            came.extend(event.came)
        if not isinstance(event, phalanx.StepDone) or not lost:
            return
        if event.step == DIES_AT and rank == 1 and again == "0":
            Path(folder, "node").write_text(os.environ["PHALANX_HOST"])
            if lost == "worker":
                os.kill(os.getpid(), signal.SIGKILL)
            elif lost == "actor":
                os.kill(os.getppid(), signal.SIGKILL)
            else:  # the test removes it
                signal.pause()
        if event.step == DIES_AT + 2 and rank == 0:
            assert wait_until(lambda: trained._choice.elastic.newcomers_wait, DEADLINE_S)

    with phalanx.Trainer(
        made(),
        nn.functional.cross_entropy,
        adamw,
        executor=executor,  # type: ignore[arg-type]
        replicas=1,
        microbatches=7,
        seed=11,
        scheduler=schedule,
        scheduler_interval="step",
        callbacks=[note],
    ) as trained:
        trained.fit(data(), epochs=2)
        weights = [each.double().sum().item().hex() for each in trained.module.parameters()]
        return trained.steps, " ".join(weights), came


def train_on_ray(folder: str, lost: str) -> tuple[int, str, list[int]]:
    return train(phalanx.Ranks(lost_after_s=3.0), folder, lost)


def lose(lost: str, cluster: cluster_utils.Cluster, folder: Path) -> Callable[[], None]:
    def remove() -> None:
        assert wait_until((folder / "node").exists, DEADLINE_S)
        node = re.sub("ray-", "", (folder / "node").read_text())
        [found] = [each for each in cluster.list_all_nodes() if each.node_id == node]
        cluster.remove_node(found, allow_graceful=False)

    return remove if lost == "node" else bool


@pytest.mark.night
@pytest.mark.parametrize("lost", ["worker", "actor", "node"])
def test_those_left_finish_and_a_newcomer_too(
    lost: str, cluster: cluster_utils.Cluster, tmp_path: Path
) -> None:
    steps, weights, _ = train("threads", "", "")
    remover = threading.Thread(target=lose(lost, cluster, tmp_path))
    remover.start()
    runs = on_ray(
        train_on_ray, SIZE, args=(str(tmp_path), lost), address=cluster.address, rank_restarts=3
    )
    remover.join(DEADLINE_S)
    assert [run[:2] for run in runs] == [(steps, weights)] * SIZE
    assert runs[0][2] == [1]
