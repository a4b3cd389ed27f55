"""``python -m benchmarks gpu``: `step` on all accelerators of the machine, with larger models."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from benchmarks.models import MODELS
from benchmarks.report import OUT, Out, Run, read_names
from benchmarks.step import CONTESTANTS, StepJob, measure_steps
from phalanx.errors import UnsupportedError


def gpu(
    models: Annotated[
        str, typer.Option(help="Which models, separated by commas.")
    ] = "mlp,resnet50,resnet50-256,gpt2,gpt2-dropout",
    contestants: Annotated[
        str, typer.Option(help="Which contestants, separated by commas.")
    ] = "single,single-m4,nn-dataparallel,ddp,our-ddp,dataparallel,trainer,trainer-m1,trainer-m4",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contestant.")] = 4,
    device: Annotated[
        str | None,
        typer.Option(
            help="The kind of device; with cpu the benchmark itself can be tried.",
            show_default="the machine's accelerator",
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="How many devices.", show_default="all there are")
    ] = None,
    out: Out = OUT,
) -> None:
    """Time one training step on accelerators, beside plain torch, nn.DataParallel and DDP."""
    if device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            raise UnsupportedError(
                "This needs an accelerator, but torch sees none; `phalanx doctor` may say why. "
                "Give `--device cpu` to try the benchmark itself."
            )
        device = found.type
    there = 2 if device == "cpu" else torch.accelerator.device_count()
    run = Run("gpu", out)
    if device == "cuda":
        run.machine["accelerator"] = torch.cuda.get_device_name(0)
    measure_steps(
        run,
        StepJob(contestant="", model="", workers=count or there, device=device),
        read_names("models", models, MODELS),
        read_names("contestants", contestants, CONTESTANTS),
        rounds=rounds,
    )
