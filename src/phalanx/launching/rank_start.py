"""The start of a rank: our backend as the default, then the user's script or function.

Where it fails, the moment and the error go to the launcher, so that the first failure can be told
from those that it caused: into the file that the launcher has named, or back to Ray's driver.
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.distributed import RunEnded
from phalanx.environment import error_file
from phalanx.files import written_whole
from phalanx.ipc import die_with_parent
from phalanx.launching.rank_failures import RankFailure, users_traceback

__all__ = ["call", "main", "record_failures"]


def _prepare() -> None:
    """Let ``init_process_group()`` without a backend mean ours, unless there is a CUDA device."""
    if not torch.cuda.is_available():
        dist.Backend.default_device_backend_map["cpu"] = "phalanx"


def record_failures(run: Callable[[], object]) -> None:
    """Call ``run``; if it fails, write down how and when, and raise the error again."""
    path = error_file()
    if path is not None:
        path.unlink(missing_ok=True)  # of this rank's process before
    try:
        run()
    except RunEnded as exc:  # nothing is left to be done: no failure
        sys.stderr.write(f"{exc}\n")
    except BaseException as exc:
        if path is not None and _is_failure(exc):
            # Whole or not at all: the launcher may end this rank at any moment, and reads the file.
            failure = RankFailure.of(exc, "".join(traceback.format_exception_only(exc)))
            with written_whole(path) as draft:
                draft.write_text(json.dumps(failure._asdict()), encoding="utf-8")
        raise


def _is_failure(exc: BaseException) -> bool:
    return not isinstance(exc, SystemExit) or bool(exc.code)


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
def call(function: Callable[..., Any], args: Sequence[object]) -> tuple[Any, RankFailure | None]:
    """Call a function; return its result, and how it failed or None."""
    _prepare()
    try:
        return function(*args), None
    except BaseException as exc:
        lines = traceback.format_exception(type(exc), exc, users_traceback(exc))
        return None, RankFailure.of(exc, "".join(lines)) if _is_failure(exc) else None
