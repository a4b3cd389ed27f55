"""``python -m benchmarks step``: a training step, Phalanx beside DDP and plain PyTorch.

All contestants train the same model from the same weights, on the same batch of random data, with
the same optimizer. Each sets its own number of threads, or has torch's. With ``--device cuda`` it
is the same on all GPUs of the machine, with larger models.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
from benchmarks.contest import Outcome, Step, Turn, commands_of, seconds_of, serve, time_steps
from benchmarks.models import MODELS, Batch, Model, loss_of
from benchmarks.report import OUT, Out, Rounds, Row, Run, Sheet, ratio, read_names
from phalanx.clock import now_s, pause
from phalanx.errors import ConfigError

KEPT = 3  # steps of a turn on the CPU that count
WARMUP = 4
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """One process of a contestant.

    Args:
        workers: Replicas, ranks or threads; on accelerators one for each device.
        device: The kind of device: cpu, cuda, xpu, …
        rank: Of this process.
        slow: How many times as slow as the others one worker is.
    """

    workers: int
    contestant: str = ""
    model: str = ""
    device: str = "cpu"
    rank: int = 0
    slow: float = 1.0

    def run(self) -> None:
        """Be the process."""
        serve(self.open_turn)

    def open_turn(self, stack: ExitStack) -> Turn:
        """Set up, and return what answers questions: so many steps."""
        step = self.open(stack)
        if self.device == "cpu":
            return lambda number: time_steps(step, number)
        return lambda number: _turn_of_accelerator(self.device, step, number)

    def open(self, stack: ExitStack) -> Step:
        """Set up, and return a step."""
        if self.device != "cpu":
            torch.accelerator.set_device_index(self.rank)
        module, batch = self.what.make(self.devices[self.rank])
        if self.slow > 1:
            module = SlowInOneWorker(module, self.slow)
        return CONTESTANTS[self.contestant].open(self, module, batch, stack)

    @property
    def what(self) -> Model:
        """The model."""
        return MODELS[self.model]

    @property
    def devices(self) -> list[str]:
        """The device of each worker."""
        cpus = self.device == "cpu"
        return [self.device if cpus else f"{self.device}:{i}" for i in range(self.workers)]

    def precision(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass."""
        low = self.what.low_precision
        return torch.autocast(self.device, torch.bfloat16) if low else contextlib.nullcontext()


def _turn_of_accelerator(kind: str, step: Step, number: int) -> list[float]:
    """Return a step's seconds, and the peak of memory in MiB."""
    step()  # allocates again what the last turn gave back
    memory = torch.get_device_module(kind)
    memory.synchronize()
    memory.reset_peak_memory_stats()

    def several() -> None:
        for _ in range(number):
            step()
        memory.synchronize()

    seconds = seconds_of(several) / number
    peak = memory.max_memory_allocated() / 2**20
    memory.empty_cache()  # for the others
    return [seconds, peak]


class SlowInOneWorker(nn.Module):
    """A module whose steps take longer in one worker: that which calls it first.

    Args:
        module: The module.
        times: How many times as long.
    """

    def __init__(self, module: nn.Module, times: float) -> None:
        super().__init__()
        self.module = module
        self.times = times

    def forward(self, inputs: Tensor) -> Tensor:
        since_s = now_s()
        outputs: Tensor = self.module(inputs)
        me = f"{os.getpid()} {threading.get_ident()}"
        claim = Path("slow")  # in the contestant's folder
        with contextlib.suppress(FileExistsError), claim.open("x") as file:
            file.write(me)
        if claim.read_text() == me:  # a backward pass takes about twice the time
            pause(3 * (self.times - 1) * (now_s() - since_s))
        return outputs


# -- contestants -------------------------------------------------------------------------------

Opener = Callable[..., Step]
"""Sets up a step of a job, a module and a batch; an `ExitStack` closes what it opens."""


@dataclass(frozen=True)
class Contestant:
    """A way to make a training step.

    Attributes:
        title: What tables call it.
        open: Sets it up.
        ranks: Whether each worker is a process of its own.
    """

    title: str
    open: Opener
    ranks: bool = False


def plain_step(job: StepJob, module: nn.Module, batch: Batch, *, pieces: int = 1) -> Step:
    """Return the usual loop; it may add the gradients of several pieces of the batch."""
    optimizer = job.what.optimizer(module.parameters())
    parts = list(zip(*(whole.chunk(pieces) for whole in batch), strict=True))
    summed_later: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    if isinstance(module, DistributedDataParallel):
        summed_later = module.no_sync

    def step() -> None:
        optimizer.zero_grad()
        for place, (inputs, targets) in enumerate(parts, 1):
            with summed_later() if place < pieces else contextlib.nullcontext():
                with job.precision():
                    loss = loss_of(module(inputs), targets) / pieces
                loss.backward()
        optimizer.step()

    return step


def _plain(
    job: StepJob, module: nn.Module, batch: Batch, _: ExitStack, threads: int = 0, pieces: int = 1
) -> Step:
    torch.set_num_threads(threads or job.workers)
    return plain_step(job, module, batch, pieces=pieces)


def join_ranks(stack: ExitStack, backend: str, rank: int, size: int) -> None:
    """Be a rank, with one thread, until the stack ends; ranks meet in the contestant's folder."""
    torch.set_num_threads(1)
    use_loopback("GLOO")
    store = f"file://{Path('store').absolute()}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size)
    stack.callback(dist.destroy_process_group)


def use_loopback(*libraries: str) -> None:
    """Let these meet on the loopback interface, where there is one."""
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.update({f"{library}_SOCKET_IFNAME": "lo" for library in libraries})


def _ddp(
    job: StepJob,
    module: nn.Module,
    batch: Batch,
    stack: ExitStack,
    backend: str = "",
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
    pieces: int = 1,
) -> Step:
    """Be a rank; of all ranks' batch, the loop cuts so many pieces."""
    backend = backend or _BACKENDS.get(job.device, "gloo")
    join_ranks(stack, backend, job.rank, job.workers)
    inputs, targets = (whole.chunk(job.workers)[job.rank].contiguous() for whole in batch)
    own = max(1, pieces // job.workers)
    return plain_step(job, wrap(module), (inputs, targets), pieces=own)


def _our_ddp(
    job: StepJob,
    module: nn.Module,
    batch: Batch,
    stack: ExitStack,
    backend: str = "",
    microbatches: int = 0,
) -> Step:
    wrap = partial(phalanx.DistributedDataParallel, microbatches=microbatches or job.workers)
    return _ddp(job, module, batch, stack, backend, wrap)


def _trainer(
    job: StepJob,
    module: nn.Module,
    batch: Batch,
    stack: ExitStack,
    microbatches: int | None = None,
    executor: str = "threads",
) -> Step:
    trainer = phalanx.Trainer(
        module,
        loss_of,
        job.what.optimizer,
        replicas=job.devices if job.device != "cpu" else job.workers,
        microbatches=microbatches and max(microbatches, job.workers),
        executor=executor,
    )
    stack.enter_context(trainer)

    def step() -> None:
        with job.precision():
            trainer.step(batch)

    return step


def _data_parallel(job: StepJob, module: nn.Module, batch: Batch, stack: ExitStack) -> Step:
    parallel = phalanx.DataParallel(module, devices=job.devices)
    return plain_step(job, stack.enter_context(parallel), batch)


def _torch_data_parallel(job: StepJob, module: nn.Module, batch: Batch, _: ExitStack) -> Step:
    return plain_step(job, nn.DataParallel(module, list(range(job.workers))), batch)


CONTESTANTS: dict[str, Contestant] = {
    "single": Contestant("plain, 1 thread", partial(_plain, threads=1)),
    "single-m4": Contestant("plain, 1 thread, 4 pieces", partial(_plain, threads=1, pieces=4)),
    "threads": Contestant("plain, {workers} threads", _plain),
    "nn-dataparallel": Contestant("nn.DataParallel", _torch_data_parallel),
    "dataparallel": Contestant("DataParallel, {workers} replicas", _data_parallel),
    "trainer": Contestant("Trainer, {workers} replicas", _trainer),
    "trainer-m1": Contestant("Trainer, fewest microbatches", partial(_trainer, microbatches=1)),
    "trainer-m4": Contestant("Trainer, 4 microbatches", partial(_trainer, microbatches=4)),
    "processes": Contestant(
        "Trainer, {workers} processes", partial(_trainer, executor="processes")
    ),
}
for _suffix, _backend, _over in (("", "", ""), ("-phalanx", "phalanx", " over phalanx")):
    for _end, _count, _cut in (("", 0, "{workers}"), ("-m4", 4, "4")):
        CONTESTANTS |= {
            f"ddp{_suffix}{_end}": Contestant(
                f"DDP{_over}, {_cut} pieces",
                partial(_ddp, backend=_backend, pieces=_count),
                ranks=True,
            ),
            f"our-ddp{_suffix}{_end}": Contestant(
                f"ours{_over}, {_cut} microbatches",
                partial(_our_ddp, backend=_backend, microbatches=_count),
                ranks=True,
            ),
        }
ON_CPU = "single,threads,ddp,ddp-phalanx,dataparallel,trainer,trainer-m4,processes"
ON_ACCELERATORS = (
    "single,single-m4,nn-dataparallel,ddp,our-ddp,dataparallel,trainer,trainer-m1,trainer-m4"
)
# The models and the contestants by default.
BY_DEFAULT = {
    "cpu": ("mlp,cnn,gpt", ON_CPU),
    "accelerator": ("mlp,resnet50,resnet50-256,gpt2,gpt2-dropout", ON_ACCELERATORS),
}

# -- the contest -------------------------------------------------------------------------------


def step(
    models: Annotated[
        str, typer.Option(help=f"Which models, separated by commas: {', '.join(MODELS)}.")
    ] = "",
    contestants: Annotated[
        str, typer.Option(help=f"Which contestants: {', '.join(CONTESTANTS)}.")
    ] = "",
    rounds: Rounds = 10,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Replicas, ranks, or threads.", show_default="2, or all accelerators"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="The kind of device: cpu, cuda, xpu, …")] = "cpu",
    slow: Annotated[
        float, typer.Option(min=1, help="How many times as slow as the others one worker is.")
    ] = 1.0,
    out: Out = OUT,
) -> None:
    """Time one training step: Trainer and DataParallel beside DDP and plain PyTorch."""
    there = 2 if device == "cpu" else torch.get_device_module(device).device_count()
    if not there:
        raise ConfigError(
            f"`--device` must be of a kind that torch sees here, but is {device!r}. `phalanx "
            "doctor` may say why."
        )
    all_models, all_contestants = BY_DEFAULT["cpu" if device == "cpu" else "accelerator"]
    names = read_names("contestants", contestants or all_contestants, CONTESTANTS)
    run = Run("step" if device == "cpu" else f"step-{device}", out)
    if device == "cuda":
        run.machine["accelerator"] = torch.cuda.get_device_name(0)
    for model in read_names("models", models or all_models, MODELS):
        job = StepJob(workers=workers or there, device=device, slow=slow, model=model)
        run.sheets.append(_sheet(job, compete_at(run, job, names, rounds)))
    run.publish()


def compete_at(run: Run, job: StepJob, names: Sequence[str], rounds: int) -> Outcome[str]:
    """Let contestants take turns at the job's model."""
    on_cpu = job.device == "cpu"
    commands = {
        name: commands_of(
            replace(job, contestant=name), job.workers if CONTESTANTS[name].ranks else 1
        )
        for name in names
    }
    questions = {"step": KEPT if on_cpu else job.what.steps}
    return run.compete(job.model, commands, questions, rounds, settle=WARMUP if on_cpu else 0)


def _sheet(job: StepJob, outcome: Outcome[str]) -> Sheet:
    on_cpu = job.device == "cpu"
    found: dict[str, Sequence[Sequence[float]]] = {}
    for name in outcome.answers:
        turns = outcome.answers[name]["step"]
        found[name] = [[step_s] for turn in turns for step_s in turn] if on_cpu else turns
    medians = {name: statistics.median(each[0] for each in found[name]) for name in found}
    plain = medians.get("threads", medians.get("single"))
    rows: list[Row] = []
    for name, median_s in medians.items():
        title = CONTESTANTS[name].title.format(workers=job.workers)
        cells: list[float | None] = [1e3 * median_s, 1e3 * min(each[0] for each in found[name])]
        cells += [ratio(median_s, plain), ratio(median_s, medians.get("ddp"))]
        if not on_cpu:
            peak = statistics.median(each[1] for each in found[name])
            cells += [job.what.rows * job.what.tokens / median_s, peak]
        rows.append((title, *cells))
    columns = ["median\nms", "min\nms", "÷ plain", "÷ DDP"]
    columns += [] if on_cpu else ["rows/s or\ntokens/s", "peak\nMiB"]
    slow = f", one worker {job.slow:g} times as slow" if job.slow > 1 else ""
    return Sheet(f"{job.model} on {job.workers} × {job.device}{slow}", columns, rows)
