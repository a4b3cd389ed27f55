"""The start of a rank: our backend as the default, then the user's script.

Where it fails, the moment and the error go into the file that the launcher has named, so that the
first failure can be told from those that it caused.
"""

from __future__ import annotations

import io
import json
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.distributed import RunEnded
from phalanx.environment import error_file
from phalanx.files import written_whole
from phalanx.ipc import die_with_parent
from phalanx.launching.rank_failures import FailureNote

__all__ = ["main", "prepare_rank", "record_failures"]

_INTERRUPTED = 130  # the exit status that a shell gives to a program that Ctrl-C ended


def prepare_rank() -> None:
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
        note = FailureNote.of(exc)
        if path is not None and note.exit_code:
            # Whole or not at all: the launcher may end this rank at any moment, and reads the file.
            with written_whole(path) as draft:
                draft.write_text(json.dumps(note._asdict()), encoding="utf-8")
        raise


def main() -> None:
    """Run the script that the command line names, and end with the launcher that it names."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _, launcher, *sys.argv = sys.argv
    script = sys.argv[0]
    die_with_parent(int(launcher))
    prepare_rank()
    # Whole lines: the launcher writes the rank before each piece that it reads.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        record_failures(lambda: runpy.run_path(script, run_name="__main__"))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends it without a traceback
        sys.exit(_INTERRUPTED)
    except Exception as exc:
        frame = exc.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename != script:
            frame = frame.tb_next  # it leads to the script
        exc.__traceback__ = frame
        sys.excepthook(type(exc), exc, frame)
        sys.exit(1)
