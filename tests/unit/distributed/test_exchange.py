"""What ranks exchange beside a user's own collectives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from phalanx.distributed import Exchange


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TwoAlike:
    """A group of two ranks that say the same, and the work of its latest call."""

    def _allgather_base(self, found: Tensor, own: Tensor) -> TwoAlike:
        found.view(2, -1).copy_(own.view(-1))
        return self

    def wait(self) -> None:
        pass


@pytest.mark.usefixtures("alone")
def test_the_latest_work_outlives_its_exchange() -> None:
    """A thread of gloo's that is the last to hold one, as Python ends, ends the process with it."""
    used = Exchange()
    used._group, used.size = TwoAlike(), 2
    work = weakref.ref(used._group)
    assert used.gather(b"1", "say one") == [b"1", b"1"]
    del used
    gc.collect()
    assert work() is not None
