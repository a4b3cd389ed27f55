"""``make bench-gpu``: one training step on accelerators, Phalanx beside its peers.

The models, the batch and the optimizer are those of `bench-step`; where there are several devices,
the batch is as many times as large.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
from benchmarks.command import Out, begin, command_line, progress, read_names
from benchmarks.contestants import MODELS, Batch, build, check_model, loss_of, plain_step, sgd
from benchmarks.machine import Machine
from benchmarks.panels import Bar, Bars
from benchmarks.processes import Command, command_of
from benchmarks.report import Column, Report, Row, Sheet, number, publish
from benchmarks.turns import Outcome, Pace, Step, compete, serve
from phalanx.errors import ConfigError, UnsupportedError

_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}  # all others meet over gloo


@dataclass(frozen=True, kw_only=True)
class GpuJob:
    """One process of one contestant.

    Attributes:
        kind: Of device: cuda, xpu, …
        count: How many of them there are.
    """

    contestant: str
    model: str
    kind: str
    count: int
    rank: int = 0
    meeting_point: str = ""

    @property
    def devices(self) -> list[str]:
        """All devices, by name."""
        if self.kind == "cpu":
            return ["cpu"] * self.count
        return [f"{self.kind}:{index}" for index in range(self.count)]

    def run(self) -> None:
        """Be the process."""
        module, (inputs, targets) = build(self.model)
        whole = torch.cat([inputs] * self.count), torch.cat([targets] * self.count)
        serve(self._synchronized(CONTESTANTS[self.contestant].open(self, module, whole)))

    @contextmanager
    def _synchronized(self, contestant: AbstractContextManager[Step]) -> Iterator[Step]:
        """A step ends when all devices have done their work."""
        used = [self.devices[self.rank]] if self.is_a_rank else dict.fromkeys(self.devices)

        with contestant as step:

            def whole_step() -> None:
                step()
                if self.kind != "cpu":
                    for device in used:
                        torch.accelerator.synchronize(device)

            yield whole_step

    @property
    def is_a_rank(self) -> bool:
        """Whether the contestant has a process for each device."""
        return CONTESTANTS[self.contestant].process_per_device


@dataclass(frozen=True)
class GpuContestant:
    """One way to make a training step on ``count`` devices."""

    title: str
    open: Callable[[GpuJob, nn.Module, Batch], AbstractContextManager[Step]]
    of_phalanx: bool = False
    process_per_device: bool = False
    on_cpu: bool = True

    def runs_on(self, kind: str) -> bool:
        """Tell whether it knows this kind of device."""
        return kind != "cpu" or self.on_cpu


def _on(device: str, batch: Batch) -> Batch:
    inputs, targets = batch
    return inputs.to(device), targets.to(device)


@contextmanager
def _plain(job: GpuJob, module: nn.Module, batch: Batch) -> Iterator[Step]:
    """The whole batch on the first device."""
    first = job.devices[0]
    yield plain_step(module.to(first), _on(first, batch))


@contextmanager
def _torchs_data_parallel(job: GpuJob, module: nn.Module, batch: Batch) -> Iterator[Step]:
    first = job.devices[0]
    replicated = nn.DataParallel(module.to(first), list(range(job.count)))
    yield plain_step(replicated, _on(first, batch))


@contextmanager
def _ddp(job: GpuJob, module: nn.Module, batch: Batch) -> Iterator[Step]:
    device = job.devices[job.rank]
    if job.kind != "cpu":
        torch.accelerator.set_device_index(job.rank)
    dist.init_process_group(
        _BACKENDS.get(job.kind, "gloo"),
        init_method=f"file://{job.meeting_point}",
        rank=job.rank,
        world_size=job.count,
    )
    try:
        inputs, targets = (part.chunk(job.count)[job.rank] for part in batch)
        yield plain_step(DistributedDataParallel(module.to(device)), _on(device, (inputs, targets)))
    finally:
        dist.destroy_process_group()


@contextmanager
def _data_parallel(job: GpuJob, module: nn.Module, batch: Batch) -> Iterator[Step]:
    first = job.devices[0]
    with phalanx.DataParallel(module.to(first), devices=job.devices) as parallel:
        yield plain_step(parallel, _on(first, batch))


@contextmanager
def _two_on_one(job: GpuJob, module: nn.Module, batch: Batch) -> Iterator[Step]:
    first = job.devices[0]
    with phalanx.DataParallel(module.to(first), devices=[first, first]) as parallel:
        yield plain_step(parallel, _on(first, batch))


@contextmanager
def _trainer(job: GpuJob, module: nn.Module, batch: Batch) -> Iterator[Step]:
    first = job.devices[0]
    with phalanx.Trainer(
        module.to(first), loss_of, sgd, microbatches=None, replicas=job.devices
    ) as trainer:
        own = _on(first, batch)
        yield lambda: trainer.step(own)


CONTESTANTS = {
    "plain": GpuContestant("plain, 1 device", _plain),
    "nn-dataparallel": GpuContestant(
        "nn.DataParallel, {count} devices", _torchs_data_parallel, on_cpu=False
    ),
    "ddp": GpuContestant("DDP, {count} ranks", _ddp, process_per_device=True),
    "dataparallel": GpuContestant("DataParallel, {count} devices", _data_parallel, of_phalanx=True),
    "two-on-one": GpuContestant("DataParallel, 2 replicas on 1", _two_on_one, of_phalanx=True),
    "trainer": GpuContestant("Trainer, {count} devices", _trainer, of_phalanx=True),
}


def gpu(
    models: Annotated[str, typer.Option(help="Which models, separated by commas.")] = "mlp,cnn,gpt",
    steps: Annotated[
        int, typer.Option(min=1, help="Steps that count, at least, of each contestant.")
    ] = 30,
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
    """Time one training step on accelerators: DataParallel and Trainer beside nn.DataParallel, DDP.

    Contestants take turns in one run, each in processes of its own. One that failed is an error:
    exit code 1.
    """
    names = read_names("models", models, MODELS)
    for model in names:
        check_model(model, "--models")
    kind, there = _devices(device)
    count = there if count is None else count
    if count > there:
        raise ConfigError(
            f"`--count` must be at most {there}, the devices there are, but is {count}."
        )
    pace = Pace.for_steps(steps)
    console, machine = begin()
    outcomes: dict[str, Outcome] = {}
    known = [name for name, each in CONTESTANTS.items() if each.runs_on(kind)]
    for model in names:
        what = f"{model} on {count} × {_called(kind)}: {len(known)} contestants"
        num_turns = len(known) * (pace.rounds + 2)
        with progress(console, num_turns, what) as show, tempfile.TemporaryDirectory() as folder:

            def on_turn(name: str, doing: str, model: str = model) -> None:
                show(f"{model} · {doing} · {name}")

            commands = {name: _commands(name, model, kind, count, folder) for name in known}
            outcomes[model] = compete(commands, pace, on_turn)
    again = command_line("gpu", models=",".join(names), steps=steps, device=kind, count=count)
    publish(report_gpu(outcomes, machine, again, kind=kind, count=count), console, out)


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


def _commands(name: str, model: str, kind: str, count: int, folder: str) -> list[Command]:
    meet = str(Path(folder) / name)
    return [
        command_of(
            GpuJob(
                contestant=name, model=model, kind=kind, count=count, rank=rank, meeting_point=meet
            )
        )
        for rank in range(count if CONTESTANTS[name].process_per_device else 1)
    ]


def report_gpu(
    outcomes: dict[str, Outcome], machine: Machine, command: str, *, kind: str, count: int
) -> Report:
    """Return the medians of each model, beside the plain step's and DDP's."""
    sheets, panels = [], []
    columns = (Column("median", "ms"), Column("÷ plain"), Column("÷ DDP"))
    for model, outcome in outcomes.items():
        medians_ms = {
            name: 1e3 * statistics.median(step for turn in turns for step in turn)
            for name, turns in outcome.seconds.items()
        }
        rows, bars = [], []
        for name, median_ms in medians_ms.items():
            known = CONTESTANTS[name]
            label = known.title.format(count=count)
            bases = (medians_ms.get(base) for base in ("plain", "ddp"))
            ratios = tuple(median_ms / base if base else None for base in bases)
            rows.append(Row(label, (median_ms, *ratios), ours=known.of_phalanx))
            bars.append(
                Bar(label=label, parts=(median_ms,), text=number(median_ms), ours=known.of_phalanx)
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
        measured={
            "device": _called(kind),
            "count": count,
            "models": {model: asdict(outcome) for model, outcome in outcomes.items()},
        },
        failures={
            f"{name} on {model}": cause
            for model, outcome in outcomes.items()
            for name, cause in outcome.failures.items()
        },
    )
