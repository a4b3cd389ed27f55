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


class LetsGoLate:
    """A group of two ranks that say the same; it keeps what it was lent."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def _allgather_base(self, found: Tensor, own: Tensor) -> LetsGoLate:
        found.view(2, -1).copy_(own.view(-1))
        self.kept += [found, own]
        return self

    def wait(self) -> None:
        pass


@pytest.mark.usefixtures("alone")
def test_an_exchange_ends_after_the_backend_has_let_go_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread of gloo's that lets go later, as Python ends, takes the whole process with it."""
    group = LetsGoLate()
    seen: list[bool] = []
    really_wait = exchange.wait_until

    def wait_until(ready: Callable[[], bool], timeout_s: float) -> None:
        seen.append(ready())
        group.kept.clear()  # gloo's own thread may still have them for a moment
        seen.append(really_wait(ready, timeout_s))

    monkeypatch.setattr(exchange, "wait_until", wait_until)
    used = Exchange()
    used._group, used.size = group, 2
    assert used.gather(b"1", "say one") == [b"1", b"1"]
    del used
    assert seen == [False, True]
