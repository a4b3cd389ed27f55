"""What each contestant of ``make bench-step`` runs.

All train the same model from the same weights on the same synthetic batch with plain SGD. What
differs is where the work is done, and nothing is tuned on one side only: the convolutional net and
its images are channels_last for all of them. DDP whose ranks only meet does other work: what is
left of its step when nothing is reduced. It runs when named.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
from benchmarks.old_models import bench_cnn, bench_gpt, bench_mlp
from benchmarks.processes import Command, command_of
from benchmarks.turns import Step, serve
from phalanx.errors import ConfigError

if TYPE_CHECKING:  # torch.distributed does not tell type checkers that it exports it
    from torch._C._distributed_c10d import GradBucket


_LEARNING_RATE = 0.01

_TINY = "tiny"  # not shown to anybody

Batch = tuple[Tensor, Tensor]


def _tiny() -> tuple[nn.Module, Batch]:
    """A model for tests: every contestant gets through it in no time."""
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return module, (torch.randn(16, 5), torch.randint(0, 3, (16,)))


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "mlp": bench_mlp,
    "cnn": bench_cnn,
    "gpt": bench_gpt,
    _TINY: _tiny,
}


def check_model(model: str, option: str = "--model") -> None:
    """Refuse a model that is not known."""
    if model not in MODELS:
        shown = ", ".join(name for name in MODELS if name != _TINY)
        raise ConfigError(f"`{option}` must be of {shown}, but has {model!r}.")


def build(model: str) -> tuple[nn.Module, Batch]:
    """Return the model and its batch, the same for every caller."""
    torch.manual_seed(0)
    return MODELS[model]()


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """One process of one contestant: what it trains, and where it stands among its peers."""

    contestant: str
    model: str
    workers: int
    rank: int = 0
    meeting_point: str = ""

    def run(self) -> None:
        """Be the process."""
        module, batch = build(self.model)
        serve(CONTESTANTS[self.contestant].open(self, module, batch))


Opener = Callable[[StepJob, nn.Module, Batch], AbstractContextManager[Step]]


@dataclass(frozen=True)
class Contestant:
    """One way to make a training step.

    Args:
        title: What the reader sees; ``{workers}`` is filled in.
        open: Sets up and yields the step.
        of_phalanx: Ours, or a peer.
        process_per_worker: One process per worker instead of one in all.
        models: The models it is for; None: all.
        if_named: It runs only where the user names it.
    """

    title: str
    open: Opener
    of_phalanx: bool = False
    process_per_worker: bool = False
    models: frozenset[str] | None = None
    if_named: bool = False


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all rows, or over all tokens of all rows."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of all contestants."""
    return torch.optim.SGD(parameters, lr=_LEARNING_RATE)


def plain_step(
    module: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = loss_of,
) -> Step:
    """Return the loop that everybody writes."""
    inputs, targets = batch
    stepped = sgd(module.parameters()) if optimizer is None else optimizer

    def step() -> None:
        stepped.zero_grad()
        loss(module(inputs), targets).backward()
        stepped.step()

    return step


def _one_process(*, num_threads: int | None) -> Opener:
    @contextmanager
    def open_step(job: StepJob, module: nn.Module, batch: Batch) -> Iterator[Step]:
        torch.set_num_threads(num_threads or job.workers)
        yield plain_step(module, batch)

    return open_step


def use_loopback(*libraries: str) -> None:
    """Let these meet on the loopback interface, where there is one."""
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.update({f"{library}_SOCKET_IFNAME": "lo" for library in libraries})


@contextmanager
def process_group(backend: str, *, rank: int, size: int, meeting_point: str) -> Iterator[None]:
    """Be a rank, with one thread."""
    torch.set_num_threads(1)
    use_loopback("GLOO")
    dist.init_process_group(
        backend, init_method=f"file://{meeting_point}", rank=rank, world_size=size
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _meet_only(bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Instead of a bucket of gradients reduce one number, so that the ranks wait for each other."""
    dist.all_reduce(torch.zeros(1))
    met: torch.futures.Future[Tensor] = torch.futures.Future()
    met.set_result(bucket.buffer())
    return met


def _ddp(*, backend: str = "gloo", reduces: bool = True, microbatches: int | None = None) -> Opener:
    """Be a rank of torch's class, or of ours if there are microbatches."""

    @contextmanager
    def open_step(job: StepJob, module: nn.Module, batch: Batch) -> Iterator[Step]:
        rank, size = job.rank, job.workers
        with process_group(backend, rank=rank, size=size, meeting_point=job.meeting_point):
            inputs, targets = (whole.chunk(size)[rank] for whole in batch)
            batch = (inputs.contiguous(), targets.contiguous())
            wrapped: nn.Module
            if microbatches is not None:
                wrapped = phalanx.DistributedDataParallel(module, microbatches)
            else:
                wrapped = DistributedDataParallel(module)
            if not reduces:
                wrapped.register_comm_hook(None, lambda _, bucket: _meet_only(bucket))
            yield plain_step(wrapped, batch)

    return open_step


def _trainer(microbatches: int | None = None, executor: str = "threads") -> Opener:
    @contextmanager
    def open_step(job: StepJob, module: nn.Module, batch: Batch) -> Iterator[Step]:
        with phalanx.Trainer(
            module,
            loss_of,
            sgd,
            replicas=job.workers,
            microbatches=microbatches,
            executor=executor,
        ) as trainer:
            yield lambda: trainer.step(batch)

    return open_step


@contextmanager
def _data_parallel(job: StepJob, module: nn.Module, batch: Batch) -> Iterator[Step]:
    with phalanx.DataParallel(module, devices=["cpu"] * job.workers) as parallel:
        yield plain_step(parallel, batch)


@contextmanager
def _model_parallel(job: StepJob, module: nn.Module, batch: Batch) -> Iterator[Step]:
    """Put columns in the place of every linear layer but the last, too narrow to be cut."""
    layers = {n: child for n, child in module.named_children() if isinstance(child, nn.Linear)}
    layers.popitem()
    with ExitStack() as stack:
        for name, layer in layers.items():
            columns = stack.enter_context(phalanx.ModelParallel(dim=-1))
            weights, biases = layer.weight.chunk(job.workers), layer.bias.chunk(job.workers)
            for weight, bias in zip(weights, biases, strict=True):
                column = nn.Linear(layer.in_features, len(bias))
                column.load_state_dict({"weight": weight, "bias": bias})
                columns.add(column, "cpu")
            module.register_module(name, columns)
        yield plain_step(module, batch)


_LINEAR = frozenset({"mlp", _TINY})

CONTESTANTS: dict[str, Contestant] = {
    "single": Contestant("1 process, 1 thread", _one_process(num_threads=1)),
    "threads": Contestant("1 process, {workers} threads", _one_process(num_threads=None)),
    "ddp": Contestant("DDP over gloo, {workers} ranks", _ddp(), process_per_worker=True),
    "ddp-phalanx": Contestant(
        "DDP over phalanx, {workers} ranks",
        _ddp(backend="phalanx"),
        of_phalanx=True,
        process_per_worker=True,
    ),
    "ddp-meet": Contestant(
        "DDP, {workers} ranks only meet",
        _ddp(backend="phalanx", reduces=False),
        process_per_worker=True,
        if_named=True,
    ),
    **{
        f"same-bits-{backend}-m{count}": Contestant(
            f"DistributedDataParallel over {backend}, {count} microbatches",
            _ddp(backend=backend, microbatches=count),
            of_phalanx=True,
            process_per_worker=True,
            if_named=True,
        )
        for backend in ("gloo", "phalanx")
        for count in (2, 4)
    },
    "dataparallel": Contestant("DataParallel, {workers} replicas", _data_parallel, of_phalanx=True),
    "modelparallel": Contestant(
        "ModelParallel, {workers} columns", _model_parallel, of_phalanx=True, models=_LINEAR
    ),
    "trainer": Contestant("Trainer, {workers} replicas", _trainer(), of_phalanx=True),
    "processes": Contestant(
        "Trainer, {workers} processes", _trainer(executor="processes"), of_phalanx=True
    ),
    **{
        f"trainer-m{count}": Contestant(
            f"Trainer, {count} microbatches", _trainer(count), of_phalanx=True
        )
        for count in (2, 4, 8, 16)
    },
}


def by_default() -> list[str]:
    """Return the contestants that run where the user names none."""
    return [name for name, known in CONTESTANTS.items() if not known.if_named]


def select(names: list[str], model: str) -> list[str]:
    """Return those of ``names`` that compete on ``model``, in the order of `CONTESTANTS`.

    Raises:
        ConfigError: The model is not known, or nobody competes.
    """
    check_model(model, "--models")
    chosen = [
        name
        for name, known in CONTESTANTS.items()
        if name in names and (known.models is None or model in known.models)
    ]
    if not chosen:
        raise ConfigError(
            f"`--contestants` must name at least one that competes on {model!r}, but is {names!r}."
        )
    return chosen


def commands_of(name: str, model: str, *, workers: int, folder: str) -> list[Command]:
    """Return the command lines that make contestant ``name`` run ``model``.

    Args:
        folder: Where the processes of one contestant find each other.
    """
    meet = os.path.join(folder, f"{model}-{name}")
    ranks = range(workers if CONTESTANTS[name].process_per_worker else 1)
    return [
        command_of(
            StepJob(contestant=name, model=model, workers=workers, rank=rank, meeting_point=meet)
        )
        for rank in ranks
    ]
