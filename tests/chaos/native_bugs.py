"""Bugs that are planted in native_all_reduce.c, to see that somebody notices.

Each is a text of the file and what stands in its place, by name in :data:`NATIVE_BUGS`. A rank
that has one compiles the file anew and uses what comes of it; it is not needed for anything else.
Where a bug opens a window, the processor is lost in it, as it may be at any time.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import phalanx
from phalanx.native import library

_SOURCES = Path(phalanx.__file__).parent
_FILE = "distributed/native_all_reduce.c"
_GIVE = "exchange(state, (char *)piece, count, item, 1);"
_REDUCE = "reduce_##NAME(state, piece + start"

NATIVE_BUGS: dict[str, tuple[str, str]] = {
    # Nobody waits for anybody: results are made of whatever lies in the slots.
    "native_progress_unread": (
        "if (progress <= 0 || have_reached(state, progress)) return 1;",
        "return 1;",
    ),
    # A piece is said to be there before it is written.
    "native_posted_before_data": (
        _GIVE,
        f"post(state, PUBLISHED, PUBLISH); usleep(20000); {_GIVE}",
    ),
    # A result is said to be there before it is.
    "native_posted_before_result": (
        _REDUCE,
        f"post(state, REDUCED, REDUCE); usleep(20000); {_REDUCE}",
    ),
    # Ranks in different calls take each other's numbers.
    "native_fingerprints_not_compared": ("rank < state[SIZE] && !state[AGREED]", "rank < 0"),
    # Nobody looks who sleeps.
    "native_wake_ups_lost": (
        "return asleep || state[FAIL_POINTS];",
        "return (asleep & 0) || state[FAIL_POINTS];",
    ),
}


def can_be_planted() -> bool:
    """Tell whether there is what the bugs are compiled by, and what they break."""
    return library.is_compiled() and shutil.which("cc") is not None


def plant_in_native(name: str) -> None:
    """Break this process's all-reduces."""
    right, wrong = NATIVE_BUGS[name]
    text = (_SOURCES / _FILE).read_text(encoding="utf-8")
    assert right in text, f"{_FILE} has changed: this bug can be planted no more"
    with tempfile.TemporaryDirectory() as folder:
        broken, built = Path(folder) / "broken.c", Path(folder) / "broken.so"
        broken.write_text("#include <unistd.h>\n" + text.replace(right, wrong), encoding="utf-8")
        others = set(_SOURCES.rglob("*.c")) - {_SOURCES / _FILE}
        subprocess.run(
            [
                "cc",
                "-w",
                "-fPIC",
                "-shared",
                f"-I{_SOURCES / 'distributed'}",
                "-o",
                built,
                broken,
                *others,
            ],
            check=True,
        )
        functions = library._functions(library._load(built))
    assert functions
    library.FUNCTIONS.clear()
    library.FUNCTIONS.update(functions)
