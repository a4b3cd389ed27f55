"""The command ``phalanx``: its subcommands, and how errors end it.

torch takes seconds to import, so a command imports what needs it when it runs: ``--help`` does not.
"""

from __future__ import annotations

import platform
import re
import sys
import traceback
from typing import Annotated

import typer
from rich.text import Text

from phalanx import __version__
from phalanx.cli.console import INTERRUPTED, make_console, prepare_stdout
from phalanx.cli.doctor import doctor
from phalanx.cli.launch import launch, secret
from phalanx.cli.report import report
from phalanx.cli.score import evaluate, predict
from phalanx.cli.train import resume, train
from phalanx.errors import InternalError, PhalanxError

_REFUSED = 2  # as for a command line that cannot be parsed
_LIBRARIES = re.compile(r"<|.*/(lib\w*/python3[^/]*|src/phalanx)/")  # Python, installed, ours
_OPTIONS_OF_TRAINER = ("clip_norm", "epochs", "executor", "microbatches", "replicas", "seed")

app = typer.Typer(
    name="phalanx",
    help="Train PyTorch models on replicas, with bitwise identical weights on any number of them.",
    no_args_is_help=True,
    add_completion=False,
    # Docstrings are wrapped for their source; help wraps them anew, for the terminal at hand.
    rich_markup_mode="markdown",
    # An unexpected error keeps Python's own traceback, which is what a bug report needs.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (train, resume, evaluate, predict, secret, report):
    app.command(no_args_is_help=True)(command)
# What follows the script is the script's, options as well.
app.command(no_args_is_help=True, context_settings={"allow_interspersed_args": False})(launch)
app.command()(doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        import torch  # late: takes seconds

        make_console().print(
            f"phalanx {__version__} (torch {torch.__version__}, Python {platform.python_version()})"
        )
        raise typer.Exit


@app.callback()
def phalanx(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Train PyTorch models on replicas, with bitwise identical weights on any number of them."""


def main(command: typer.Typer = app, prog_name: str = "phalanx") -> None:
    """Run a command line; what the user can act on is one message, all else a traceback."""
    prepare_stdout()
    try:
        command(prog_name=prog_name)
    except InternalError:
        raise
    except PhalanxError as exc:
        notes = [f"\n  {note}" for note in getattr(exc, "__notes__", ())]
        described = Text.assemble(("Error: ", "bold red"), name_options(str(exc)), *notes)
        make_console(stderr=True).print(described)
        sys.exit(_REFUSED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as exc:
        frames = exc.__traceback__
        while frames and _LIBRARIES.match(frames.tb_frame.f_code.co_filename):
            frames = frames.tb_next
        if frames or isinstance(exc, SyntaxError):  # from the user's file on; else all frames
            sys.excepthook = lambda kind, error, _: traceback.print_exception(kind, error, frames)
        raise


def name_options(message: str) -> str:
    """Write arguments of `Trainer` in a message as the options of ``phalanx train``.

    Example:
        >>> name_options("`clip_norm` must be above 0. Give microbatches=4, or executor='inline'.")
        '`--clip-norm` must be above 0. Give --microbatches 4, or --executor inline.'
    """
    names = "|".join(_OPTIONS_OF_TRAINER)
    message = re.sub(rf"`({names})`", lambda found: f"`{_option(found[1])}`", message)
    assigned = rf"\b({names})=(['\"]?)([^\s'\",.;)]+)\2"
    return re.sub(assigned, lambda found: f"{_option(found[1])} {found[3]}", message)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
