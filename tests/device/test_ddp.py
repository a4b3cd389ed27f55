"""`DistributedDataParallel` trains the same bits on one test device and on several."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.device import collectives
from tests.multiprocess.ranks import Ranks
from tests.multiprocess.test_ddp_same_bits import train_all

pytestmark = pytest.mark.promise("loops-of-your-own-on-ranks")


def train_on_devices(rank: int, backend: str = collectives.NAME) -> dict[str, str]:
    collectives.register()
    home = torch.device("dev", rank % torch.dev.device_count())
    torch.accelerator.set_device_index(home.index)
    found = train_all(rank, home, dist.new_group(backend=backend))
    torch.accelerator.synchronize()
    assert not torch.dev.races()
    return found


@pytest.fixture(scope="module")
def one_device() -> dict[str, str]:
    with Ranks(1) as ranks:
        (found,) = ranks.run(train_on_devices)
    return found


@pytest.mark.parametrize(
    ("size", "backend"),
    [
        pytest.param(2, collectives.NAME, marks=pytest.mark.night),
        (3, collectives.NAME),
        (2, "phalanx"),
    ],
)
def test_any_number_of_devices_trains_the_same_bits(
    one_device: dict[str, str], size: int, backend: str
) -> None:
    with Ranks(size) as ranks:
        for found in ranks.run(train_on_devices, backend):
            assert found == {name: one_device[name] for name in found}
