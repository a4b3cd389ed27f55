"""Scripts and commands in forks of a process that has imported torch, which run as users run them.

What they start is what users' start, but for ranks by `torch.multiprocessing.spawn`, which are
forks, too.
"""

from __future__ import annotations

import os
import runpy
import sys
from functools import partial
from pathlib import Path

import torch.distributed.run
import torch.multiprocessing

from phalanx.cli import app
from tests.multiprocess.fork_server import context

__all__ = ["run_forked"]

COMMANDS = {"phalanx": app.main, "torchrun": torch.distributed.run.main}


def run_forked(*words: str, folder: Path, deadline_s: float) -> tuple[int | None, str]:
    """Run ``python script …`` or one of `COMMANDS` in a folder.

    Returns:
        Its exit code, None if it was ended at the deadline, and all that it printed.
    """
    output = folder / "output"
    output.write_bytes(b"")
    process = context.Process(target=_be, args=(list(words), str(folder), str(output)))
    process.start()
    process.join(deadline_s)
    code = process.exitcode
    process.kill()  # in vain if all is well
    process.join()
    return code, output.read_text()


def _be(words: list[str], folder: str, output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    torch.multiprocessing.spawn = partial(
        torch.multiprocessing.start_processes, start_method="fork"
    )
    if words[0] in COMMANDS:
        sys.argv = words
        COMMANDS[words[0]]()
    else:
        _, *sys.argv = words
        runpy.run_path(sys.argv[0], run_name="__main__")
