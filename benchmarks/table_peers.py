"""What tables are compared with: a matrix that one process owns, reached over torch RPC or Ray."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.step import use_loopback
from phalanx.clock import now_s, pause
from phalanx.errors import PeerTimeout

COLS = 64
PATIENCE_S = 120.0
_RAY_MODE = "RAY_AUTH_MODE"


class Access(NamedTuple):
    """What a worker does with rows.

    Attributes:
        get: Takes the rows, and the tensor that they may go to.
        add: Takes the rows, and the delta; None where nothing can be added.
    """

    get: Callable[[Tensor, Tensor], object]
    add: Callable[[Tensor, Tensor], object] | None = None


_owned = torch.empty(0, COLS)  # the server's matrix


def _rpc_get(rows: Tensor) -> Tensor:
    return _owned.index_select(0, rows)


def _rpc_add(rows: Tensor, delta: Tensor) -> None:
    _owned.index_add_(0, rows, delta)


def rpc_matrix(stack: ExitStack, rank: int, num_workers: int, num_rows: int) -> Access:
    """Be a worker, or the server, whose rank is the last, until the stack ends."""
    from torch.distributed import rpc  # slow, and nobody else needs it

    global _owned
    use_loopback("TP", "GLOO")
    if rank == num_workers:
        _owned = torch.zeros(num_rows, COLS)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{Path('rpc').absolute()}", rpc_timeout=PATIENCE_S
    )
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=num_workers + 1, rpc_backend_options=options)
    server = f"rank{num_workers}"
    stack.callback(rpc.shutdown, graceful=False)
    return Access(
        get=lambda rows, _: rpc.rpc_sync(server, _rpc_get, (rows,)),
        add=lambda rows, delta: rpc.rpc_sync(server, _rpc_add, (rows, delta)),
    )


class _Owner:
    """The actor. Any: numpy arrays, which their receiver reads without a copy."""

    def __init__(self, num_rows: int) -> None:
        self.matrix = torch.zeros(num_rows, COLS)

    def get(self, rows: Any) -> Any:
        return self.matrix.index_select(0, torch.tensor(rows)).numpy()

    def add(self, rows: Any, delta: Any) -> None:
        self.matrix.index_add_(0, torch.tensor(rows), torch.tensor(delta))


def has_ray() -> bool:
    """Tell whether Ray is installed."""
    return importlib.util.find_spec("ray") is not None


def ray_matrix(stack: ExitStack, rank: int, num_rows: int) -> Access:
    """Be a worker until the stack ends; the first one starts Ray, and the actor."""
    place = Path("ray")
    until_s = now_s() + PATIENCE_S
    while rank > 0 and not place.exists():
        if now_s() > until_s:
            raise PeerTimeout("Worker 0 must start Ray, but has not.", 0)
        pause(0.05)
    address = "local"  # a Ray of its own: without an address it takes one that is there
    if rank > 0:
        address, os.environ[_RAY_MODE] = json.loads(place.read_text())
    ray: Any = importlib.import_module("ray")  # reads the environment when it is imported
    options = {"num_cpus": 2, "include_dashboard": False} if rank == 0 else {}
    quiet = {"log_to_driver": False, "namespace": "bench", "configure_logging": False}
    context = ray.init(address=address, **options, **quiet)
    if rank > 0:
        owner = ray.get_actor("owner")
    else:
        owner = ray.remote(_Owner).options(name="owner").remote(num_rows)
        ray.get(owner.get.remote(torch.zeros(1, dtype=torch.int64).numpy()))
        mode = os.environ.get(_RAY_MODE, "disabled")  # Ray sets it
        place.with_suffix(".tmp").write_text(json.dumps([context.address_info["address"], mode]))
        place.with_suffix(".tmp").replace(place)
    stack.callback(ray.shutdown)
    return Access(
        get=lambda rows, _: torch.from_numpy(ray.get(owner.get.remote(rows.numpy()))),
        add=lambda rows, delta: ray.get(owner.add.remote(rows.numpy(), delta.numpy())),
    )
