"""``make bench-gpu``: one training step on accelerators, Phalanx beside its peers.

A process for each device holds all contestants at once, each with a copy of the model, and they
take turns: what one has freed, the next one uses. Contestants that are one process for all devices
run in the first; the others wait for it in the next collective.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import phalanx
from benchmarks.command import Out, begin, command_line, read_names
from benchmarks.contestants import Batch, loss_of, plain_step
from benchmarks.gpu_models import gpt2, resnet50, small_mlp
from benchmarks.machine import Machine
from benchmarks.panels import Bar, Bars
from benchmarks.report import Column, Report, Row, Sheet, number, publish
from benchmarks.turns import Step
from phalanx.cli.console import make_console
from phalanx.errors import ConfigError, UnsupportedError

_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}  # all others meet over gloo
_ROUNDS = 4
_WARMUP = 4
_PIECES = 4
_MIB = 1 << 20


def _sgd(parameters: Any) -> Optimizer:  # Any, here and below: parameters, as torch takes them
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that is measured.

    Attributes:
        build: Return it, with a batch of so many rows.
        rows: Rows for each device.
        steps: Steps of a turn.
        tokens: Tokens of a row.
        low_precision: Whether it computes in bfloat16, by autocast.
    """

    build: Callable[[int], tuple[nn.Module, Batch]]
    rows: int
    steps: int
    optimizer: Callable[[Any], Optimizer] = _sgd
    tokens: int = 1
    low_precision: bool = True

    def make(self, device: torch.device) -> tuple[nn.Module, Batch]:
        """Return it on ``device``, with the batch of one device."""
        with device:
            torch.manual_seed(0)
            return self.build(self.rows)


def _gpt2(dropout: float) -> Model:
    build = partial(gpt2, dropout=dropout)
    return Model(build=build, rows=8, steps=6, optimizer=_adamw, tokens=1024)


MODELS = {
    "mlp": Model(build=small_mlp, rows=128, steps=100, low_precision=False),
    "resnet50": Model(build=resnet50, rows=64, steps=10),
    "resnet50-256": Model(build=resnet50, rows=256, steps=4),
    "gpt2": _gpt2(dropout=0.0),
    "gpt2-dropout": _gpt2(dropout=0.1),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """One process of the benchmark.

    Attributes:
        kind: Of device: cuda, xpu, …
        count: How many devices there are.
    """

    kind: str
    count: int
    rank: int

    @property
    def devices(self) -> list[torch.device]:
        """All devices."""
        if self.kind == "cpu":
            return [torch.device("cpu")] * self.count
        return [torch.device(self.kind, index) for index in range(self.count)]

    def synchronize(self) -> None:
        """Wait for all devices."""
        if self.kind != "cpu":
            for device in self.devices:
                torch.accelerator.synchronize(device)

    def allocated(self, *, peak: bool = False) -> int:
        """Return the bytes that tensors hold on the first device, now or at most."""
        if self.kind == "cpu":
            return 0
        memory = torch.get_device_module(self.kind)
        return int(memory.max_memory_allocated(0) if peak else memory.memory_allocated(0))

    def forget_peak(self) -> None:
        """Begin a new peak of memory."""
        if self.kind != "cpu":
            torch.get_device_module(self.kind).reset_peak_memory_stats(0)


Opener = Callable[[Place, Model], AbstractContextManager[Step]]


@dataclass(frozen=True)
class GpuContestant:
    """One way to make a training step on ``count`` devices."""

    title: str
    open: Opener
    of_phalanx: bool = False
    process_per_device: bool = False
    on_cpu: bool = True


def _whole(place: Place, model: Model) -> tuple[nn.Module, Batch]:
    """Return the model, and the batch of all devices on the first."""
    module, (inputs, targets) = model.make(place.devices[0])
    return module, (torch.cat([inputs] * place.count), torch.cat([targets] * place.count))


def _loop_of(wrap: Callable[[Place, nn.Module], nn.Module], *, ranks: bool = False) -> Opener:
    """Return the loop that everybody writes, over a wrapped module."""

    @contextmanager
    def open_step(place: Place, model: Model) -> Iterator[Step]:
        if ranks:
            module, batch = model.make(place.devices[place.rank])
        else:
            module, batch = _whole(place, model)
        wrapped = wrap(place, module)
        step = plain_step(wrapped, batch, model.optimizer(module.parameters()))
        with wrapped if isinstance(wrapped, phalanx.DataParallel) else contextlib.nullcontext():
            yield step

    return open_step


@contextmanager
def _accumulating(place: Place, model: Model) -> Iterator[Step]:
    """The loop that everybody writes to add the gradients of four pieces of a batch."""
    module, (inputs, targets) = _whole(place, model)
    optimizer = model.optimizer(module.parameters())
    pieces = list(zip(inputs.chunk(_PIECES), targets.chunk(_PIECES), strict=True))

    def step() -> None:
        optimizer.zero_grad()
        for inputs, targets in pieces:
            (loss_of(module(inputs), targets) / _PIECES).backward()
        optimizer.step()

    yield step


def _trainer(per_device: int | None) -> Opener:
    @contextmanager
    def open_step(place: Place, model: Model) -> Iterator[Step]:
        module, batch = _whole(place, model)
        microbatches = per_device and per_device * place.count
        with phalanx.Trainer(
            module, loss_of, model.optimizer, microbatches=microbatches, replicas=place.devices
        ) as trainer:
            yield lambda: trainer.step(batch)

    return open_step


def _torchs_data_parallel(place: Place, module: nn.Module) -> nn.Module:
    return nn.DataParallel(module, list(range(place.count)))


def _data_parallel(place: Place, module: nn.Module) -> nn.Module:
    return phalanx.DataParallel(module, devices=place.devices)


def _our_ddp(place: Place, module: nn.Module) -> nn.Module:
    return phalanx.DistributedDataParallel(module, place.count)


CONTESTANTS = {
    "plain": GpuContestant("plain, 1 device", _loop_of(lambda _, module: module)),
    "plain-m4": GpuContestant("plain, 4 pieces on 1 device", _accumulating),
    "nn-dataparallel": GpuContestant(
        "nn.DataParallel", _loop_of(_torchs_data_parallel), on_cpu=False
    ),
    "ddp": GpuContestant(
        "DDP",
        _loop_of(lambda _, module: DistributedDataParallel(module), ranks=True),
        process_per_device=True,
    ),
    "our-ddp": GpuContestant(
        "DistributedDataParallel",
        _loop_of(_our_ddp, ranks=True),
        of_phalanx=True,
        process_per_device=True,
    ),
    "dataparallel": GpuContestant("DataParallel", _loop_of(_data_parallel), of_phalanx=True),
    "trainer": GpuContestant("Trainer, no microbatches", _trainer(None), of_phalanx=True),
    "trainer-m1": GpuContestant("Trainer, 1 microbatch a device", _trainer(1), of_phalanx=True),
    "trainer-m4": GpuContestant(
        "Trainer, 4 microbatches a device", _trainer(_PIECES), of_phalanx=True
    ),
}


@dataclass(kw_only=True)
class Taken:
    """What was measured of one contestant on one model.

    Attributes:
        seconds: A step's, as the mean of each turn.
        host_s: From the call of a step on an idle device until it returns.
        peak_bytes: Of its tensors on the first device, what others hold left out.
    """

    seconds: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def gpu(
    models: Annotated[str, typer.Option(help="Which models, separated by commas.")] = ",".join(
        MODELS
    ),
    contestants: Annotated[
        str, typer.Option(help="Which contestants, separated by commas.")
    ] = ",".join(CONTESTANTS),
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contestant.")] = _ROUNDS,
    device: Annotated[
        str | None,
        typer.Option(
            help="The kind of device: cuda, xpu, …; with cpu the benchmark itself can be tried.",
            show_default="the machine's accelerator",
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="How many devices.", show_default="all there are")
    ] = None,
    out: Out = Path("out/bench-gpu"),
) -> None:
    """Time one training step on accelerators: Phalanx beside plain torch, nn.DataParallel, DDP.

    A contestant that failed is an error: exit code 1.
    """
    chosen = read_names("models", models, MODELS)
    kind, there = _devices(device)
    count = there if count is None else count
    if count > there:
        raise ConfigError(
            f"`--count` must be at most {there}, the devices there are, but is {count}."
        )
    named = read_names("contestants", contestants, CONTESTANTS)
    names = [name for name in named if kind != "cpu" or CONTESTANTS[name].on_cpu]
    console, machine = begin()
    with tempfile.TemporaryDirectory() as folder:
        job = (kind, count, chosen, names, rounds, folder)
        mp.spawn(_be_a_process, job, count)  # type: ignore[attr-defined, no-untyped-call]
        measured = json.loads((Path(folder) / "measured.json").read_text())
    again = command_line("gpu", models=",".join(chosen), rounds=rounds, device=kind, count=count)
    publish(report_gpu(measured, machine, again, kind=kind, count=count), console, out)


def _devices(kind: str | None) -> tuple[str, int]:
    """Return the kind of device, and how many there are."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if kind == "cpu":
        return kind, 2
    if found is None:
        raise UnsupportedError(
            "This needs an accelerator, but torch sees none; `phalanx doctor` may say why. Give "
            "`--device cpu` to try the benchmark itself."
        )
    if kind not in (None, found.type):
        raise ConfigError(
            f"`--device` must be a kind of device that is here ({found.type}), but is {kind!r}."
        )
    return found.type, torch.accelerator.device_count()


def _called(kind: str) -> str:
    return torch.cuda.get_device_name(0) if kind == "cuda" else kind


# -- the processes ---------------------------------------------------


def _be_a_process(
    rank: int,
    kind: str,
    count: int,
    models: Sequence[str],
    names: Sequence[str],
    rounds: int,
    folder: str,
) -> None:
    """Measure everything; the first process writes it down."""
    place = Place(kind=kind, count=count, rank=rank)
    if kind != "cpu":
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        _BACKENDS.get(kind, "gloo"),
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
    )
    try:
        own = [each for each in names if rank == 0 or CONTESTANTS[each].process_per_device]
        measured = {}
        for model in models:
            if rank == 0:
                make_console().print(f"{model} on {count} × {_called(kind)}")
            measured[model] = _measure(place, MODELS[model], own, rounds)
        if rank == 0:
            (Path(folder) / "measured.json").write_text(json.dumps(measured))
    finally:
        dist.destroy_process_group()


def _measure(place: Place, model: Model, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Let all contestants take turns at one model; return what was taken, and who failed."""
    taken = {name: Taken() for name in names}
    steps: dict[str, Step] = {}
    held: dict[str, int] = {}
    failures: dict[str, str] = {}
    with ExitStack() as stack:

        def attempt(name: str, do: Callable[[], None]) -> None:
            try:
                with _precision(place, model):
                    do()
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"
                steps.pop(name, None)

        def set_up(name: str) -> None:
            before = place.allocated()
            step = stack.enter_context(CONTESTANTS[name].open(place, model))
            for _ in range(_WARMUP):
                step()
            place.synchronize()
            steps[name], held[name] = step, place.allocated() - before

        def take_turn(name: str) -> None:
            _take_turn(place, steps[name], model.steps, taken[name], held[name])

        for name in names:
            attempt(name, lambda name=name: set_up(name))  # type: ignore[misc]
        for _ in range(rounds):
            for name in list(steps):
                attempt(name, lambda name=name: take_turn(name))  # type: ignore[misc]
    return {
        "taken": {name: vars(taken[name]) for name in names if name not in failures},
        "failures": failures,
    }


def _precision(place: Place, model: Model) -> AbstractContextManager[object]:
    if not model.low_precision:
        return contextlib.nullcontext()
    return torch.autocast(place.kind, torch.bfloat16)


def _take_turn(place: Place, step: Step, steps: int, taken: Taken, held: int) -> None:
    """Take so many steps behind each other, and a few on an idle device."""
    step()  # what the last one left in the caches goes
    place.synchronize()
    others = place.allocated() - held
    place.forget_peak()
    begin_s = time.perf_counter()
    for _ in range(steps):
        step()
    place.synchronize()
    taken.seconds.append((time.perf_counter() - begin_s) / steps)
    taken.peak_bytes = max(taken.peak_bytes, place.allocated(peak=True) - others)
    for _ in range(min(steps, 4)):
        begin_s = time.perf_counter()
        step()
        taken.host_s.append(time.perf_counter() - begin_s)
        place.synchronize()


# -- the report ------------------------------------------------------


def report_gpu(
    measured: dict[str, Any], machine: Machine, command: str, *, kind: str, count: int
) -> Report:
    """Return the medians of each model, beside the plain step's and DDP's."""
    columns = (
        Column("step", "ms"),
        Column("÷ plain"),
        Column("÷ DDP"),
        Column("rows or tokens", "1/s"),
        Column("call", "ms"),
        Column("memory", "MiB"),
    )
    sheets, panels = [], []
    for model, result in measured.items():
        medians = {name: statistics.median(t["seconds"]) for name, t in result["taken"].items()}
        rows, bars = [], []
        for name, median_s in medians.items():
            known, taken = CONTESTANTS[name], result["taken"][name]
            bases = (medians.get(base) for base in ("plain", "ddp"))
            cells = (
                1e3 * median_s,
                *(median_s / base if base else None for base in bases),
                count * MODELS[model].rows * MODELS[model].tokens / median_s,
                1e3 * statistics.median(taken["host_s"]),
                taken["peak_bytes"] / _MIB,
            )
            rows.append(Row(known.title, cells, ours=known.of_phalanx))
            bars.append(
                Bar(
                    label=known.title,
                    parts=(1e3 * median_s,),
                    text=number(1e3 * median_s),
                    ours=known.of_phalanx,
                )
            )
        sheets.append(Sheet(f"{model}: one training step", columns, tuple(rows)))
        panels.append(Bars(title=model, note="median ms", bars=tuple(bars), guides={}))
    return Report(
        name="gpu",
        title=f"One training step on {count} × {_called(kind)}",
        command=command,
        machine=machine,
        sheets=tuple(sheets),
        panels=tuple(panels),
        measured={"device": _called(kind), "count": count, "models": measured},
        failures={
            f"{name} on {model}": cause
            for model, result in measured.items()
            for name, cause in result["failures"].items()
        },
    )
