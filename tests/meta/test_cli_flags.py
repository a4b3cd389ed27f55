"""The flags of every command are frozen: scripts depend on them, so a change is made here too."""

from __future__ import annotations

import importlib
import inspect

import pytest
import typer

from tests.meta.commands import flags_by_command, root_command

FROZEN: dict[str, tuple[str, ...]] = {
    "": ("--version",),
    "doctor": ("--json",),
    "launch": (
        "--address",
        "--cpus-per-worker",
        "--endpoint",
        "--log-dir",
        "--max-restarts",
        "--nnodes",
        "--rank-restarts",
        "--ranks",
        "--ray",
        "--run-id",
        "--secret-file",
        "--timeout-s",
        "--trusted-network",
        "-n",
        "ARGS",
        "SCRIPT",
    ),
    "report": ("--out", "-o", "RUNS"),
    "secret": ("PATH",),
    "train": (
        "--batch-size",
        "--executor",
        "--data",
        "--epochs",
        "--forward",
        "--loss",
        "--lr",
        "--max-failures",
        "--memory-dir",
        "--microbatches",
        "--model",
        "--out",
        "--replicas",
        "--resume",
        "--seed",
        "--timeout-s",
        "--trace",
        "--workloads",
    ),
}

# Options of `phalanx train` that are parameters of `phalanx.Trainer`, under one name.
SHARED_WITH_TRAINER = (
    "executor",
    "forward",
    "loss",
    "microbatches",
    "replicas",
    "seed",
    "workloads",
)
# … and those that are options of `phalanx.Processes`.
SHARED_WITH_PROCESSES = ("max_failures", "memory_dir", "timeout_s")


def changes(found: dict[str, tuple[str, ...]], frozen: dict[str, tuple[str, ...]]) -> list[str]:
    """List what was added to the frozen commands and flags, and what is gone."""
    lines = []
    for command in sorted(found.keys() | frozen.keys()):
        words = f"phalanx {command}".rstrip()
        now, then = found.get(command), frozen.get(command)
        if now is None or then is None:
            lines.append(f"`{words}` is {'gone' if now is None else f'new: {now}'}")
            continue
        lines += [f"`{words}` has gained {flag}" for flag in sorted(set(now) - set(then))]
        lines += [f"`{words}` has lost {flag}" for flag in sorted(set(then) - set(now))]
    return lines


def test_commands_and_flags_are_the_frozen_ones():
    assert changes(flags_by_command(root_command()), FROZEN) == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [("Trainer", name) for name in SHARED_WITH_TRAINER]
    + [("Processes", name) for name in SHARED_WITH_PROCESSES],
)
def test_an_option_that_means_a_parameter_bears_its_name(kind, name):
    house = importlib.import_module("phalanx")
    assert name in inspect.signature(getattr(house, kind)).parameters
    assert "--" + name.replace("_", "-") in flags_by_command(root_command())["train"]


def planted_app() -> typer.Typer:
    app = typer.Typer()
    bench = typer.Typer()
    app.add_typer(bench, name="bench")

    @app.command()
    def train(data: str = "digits", fast: bool = False) -> None:
        pass

    @bench.command()
    def step(what: str, steps: int = 30) -> None:
        pass

    @bench.command()
    def reduce() -> None:
        pass

    return app


def test_flags_are_read_from_the_app():
    found = flags_by_command(root_command(planted_app()))
    assert {name: set(flags) for name, flags in found.items() if name} == {
        "train": {"--data", "--fast", "--no-fast"},
        "bench step": {"WHAT", "--steps"},
        "bench reduce": set(),
    }


def test_a_changed_flag_is_caught():
    found = {"train": ("--data", "--quick"), "report": ()}
    frozen = {"train": ("--data", "--lr"), "doctor": ()}
    assert changes(found, frozen) == [
        "`phalanx doctor` is gone",
        "`phalanx report` is new: ()",
        "`phalanx train` has gained --quick",
        "`phalanx train` has lost --lr",
    ]
