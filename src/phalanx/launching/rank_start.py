"""The start of a rank: our backend as the default, then the user's script or function.

Where it fails, the moment and the traceback go to the launcher, so that the first failure can be
told from those that it caused: into the file that the launcher has named, or back to Ray's driver.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.distributed import RunEnded
from phalanx.environment import error_file
from phalanx.files import written_whole
from phalanx.ipc import die_with_parent
from phalanx.launching.rank_failures import Note, failure_note, users_traceback

__all__ = ["call", "main", "record_failures"]


def _prepare() -> None:
    """Let ``init_process_group()`` without a backend mean ours, unless there is a CUDA device."""
    if not torch.cuda.is_available():
        dist.Backend.default_device_backend_map["cpu"] = "phalanx"


def record_failures(run: Callable[[], object]) -> None:
    """Call ``run``; if it fails, write down how and when, and raise the error again."""
    try:
        run()
    except RunEnded as exc:  # nothing is left to be done: no failure
        sys.stderr.write(f"{exc}\n")
    except BaseException as exc:
        if not isinstance(exc, SystemExit) or exc.code:
            _record(exc)
        raise


def _record(exc: BaseException) -> None:
    path = error_file()
    if path is not None:
        # Whole or not at all: the launcher may end this rank at any moment, and reads the file.
        with written_whole(path) as draft:
            draft.write_text(json.dumps(failure_note(exc)), encoding="utf-8")


def main() -> None:
    """Run the script that the command line names, and end with the launcher that it names."""
    _, launcher, *sys.argv = sys.argv
    die_with_parent(int(launcher))
    _prepare()
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    try:
        record_failures(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
    except (Exception, KeyboardInterrupt) as exc:
        exc.__traceback__ = users_traceback(exc)
        sys.excepthook(type(exc), exc, exc.__traceback__)
        sys.exit(1)


# Any: what functions return.
def call(function: Callable[..., Any], args: Sequence[object]) -> tuple[Any, Note | None]:
    """Call a function; return its result, and how it failed or None."""
    _prepare()
    try:
        return function(*args), None
    except BaseException as exc:
        is_failure = not isinstance(exc, SystemExit) or exc.code
        return None, failure_note(exc) if is_failure else None
