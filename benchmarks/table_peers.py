"""What tables are set beside: a matrix that a process owns, and others reach over torch RPC or Ray.

Each gives a worker two functions: get rows, and add to them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.step import use_loopback
from benchmarks.table_tasks import COLS
from phalanx.clock import now_s, pause
from phalanx.errors import PeerTimeout

PATIENCE_S = 120.0
_RAY_MODE = "RAY_AUTH_MODE"


class Access(NamedTuple):
    """What a worker does with the matrix.

    Attributes:
        get: Of the rows, and of where they may go; returns them if they went elsewhere.
        add: Of the rows, and of the delta.
    """

    get: Callable[[Tensor, Tensor], object]
    add: Callable[[Tensor, Tensor], object]


def is_there(name: str) -> bool:
    """Tell whether a contestant can be imported."""
    return name != "ray" or importlib.util.find_spec("ray") is not None


# --- torch RPC ------------------------------------------------------------------------------------

_owned = torch.empty(0, COLS)  # the server's matrix


def _rpc_get(rows: Tensor) -> Tensor:
    return _owned.index_select(0, rows)


def _rpc_add(rows: Tensor, delta: Tensor) -> None:
    _owned.index_add_(0, rows, delta)


@contextmanager
def rpc_matrix(rank: int, num_workers: int, num_rows: int, folder: str) -> Iterator[Access]:
    """Be a worker, or the server, which has the rank behind theirs."""
    from torch.distributed import rpc  # slow, and nobody else's

    global _owned
    use_loopback("TP", "GLOO")
    if rank == num_workers:
        _owned = torch.zeros(num_rows, COLS)
    rpc.init_rpc(
        f"rank{rank}",
        rank=rank,
        world_size=num_workers + 1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{folder}/rpc", rpc_timeout=PATIENCE_S
        ),
    )
    server = f"rank{num_workers}"

    def get(ids: Tensor, _: Tensor) -> Tensor:
        received: Tensor = rpc.rpc_sync(server, _rpc_get, (ids,))
        return received

    def add(ids: Tensor, delta: Tensor) -> None:
        rpc.rpc_sync(server, _rpc_add, (ids, delta))

    try:
        yield Access(get, add)
    finally:
        rpc.shutdown(graceful=False)


# --- Ray ------------------------------------------------------------------------------------------


class _Owner:
    """The actor; numpy arrays travel without a copy on the side of who receives them."""

    def __init__(self, num_rows: int) -> None:
        self.matrix = torch.zeros(num_rows, COLS)

    def get(self, rows: Any) -> Any:  # Any: numpy arrays
        return self.matrix.index_select(0, torch.tensor(rows)).numpy()

    def add(self, rows: Any, delta: Any) -> None:  # Any: numpy arrays
        self.matrix.index_add_(0, torch.tensor(rows), torch.tensor(delta))


@contextmanager
def ray_matrix(rank: int, num_rows: int, folder: str) -> Iterator[Access]:
    """Be a worker; the first one starts Ray, and the actor."""
    meeting_point = Path(folder) / "ray"
    address = None
    if rank > 0:
        address, os.environ[_RAY_MODE] = json.loads(_read_when_there(meeting_point))
    ray: Any = importlib.import_module("ray")  # optional; reads the environment when imported
    quiet = {"log_to_driver": False, "namespace": "bench", "configure_logging": False}
    if rank > 0:
        ray.init(address=address, **quiet)
        owner = ray.get_actor("owner")
    else:
        # One of its own: without an address it takes a Ray that somebody else has started here.
        context = ray.init(address="local", num_cpus=2, include_dashboard=False, **quiet)
        owner = ray.remote(_Owner).options(name="owner").remote(num_rows)
        ray.get(owner.get.remote(torch.zeros(1, dtype=torch.int64).numpy()))
        draft = meeting_point.with_suffix(".tmp")
        mode = os.environ.get(_RAY_MODE, "disabled")  # set by Ray itself in who starts it
        draft.write_text(json.dumps([context.address_info["address"], mode]))
        draft.replace(meeting_point)

    def get(ids: Tensor, _: Tensor) -> Tensor:
        return torch.from_numpy(ray.get(owner.get.remote(ids.numpy())))

    def add(ids: Tensor, delta: Tensor) -> None:
        ray.get(owner.add.remote(ids.numpy(), delta.numpy()))

    try:
        yield Access(get, add)
    finally:
        ray.shutdown()


def _read_when_there(file: Path) -> str:
    until_s = now_s() + PATIENCE_S
    while not file.exists():
        if now_s() > until_s:
            raise PeerTimeout("Worker 0 must start Ray, but has not.", 0)
        pause(0.05)
    return file.read_text()
