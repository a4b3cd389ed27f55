"""What ranks exchange beside a user's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from phalanx.distributed import Exchange, exchange


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_an_exchange_ends_after_the_backend_has_let_go_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread of gloo's that lets go later, as Python ends, takes the whole process with it."""
    kept: list[object] = []
    seen: list[bool] = []
    real, really_wait = dist.all_gather, exchange.wait_until

    def lets_go_late(found: list[Tensor], own: Tensor, group: dist.ProcessGroup | None) -> None:
        real(found, own, group=group)
        kept.extend([*found, own])

    def wait_until(ready: Callable[[], bool], timeout_s: float) -> None:
        seen.append(ready())
        kept.clear()  # gloo's own thread may still have them for a moment
        seen.append(really_wait(ready, timeout_s))

    monkeypatch.setattr(dist, "all_gather", lets_go_late)
    monkeypatch.setattr(exchange, "wait_until", wait_until)
    used = Exchange()
    assert used.gather(b"1", "say one") == [b"1"]
    del used
    assert seen == [False, True]
