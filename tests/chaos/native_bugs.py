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


def broken_functions(file: str, changes: dict[str, str]) -> dict[str, library.Function]:
    """Return the library's functions, built of a file in which texts stand for others."""
    text = (_SOURCES / file).read_text(encoding="utf-8")
    for right, wrong in changes.items():
        assert right in text, f"{file} has changed: this bug can be planted no more"
        text = text.replace(right, wrong)
    with tempfile.TemporaryDirectory() as folder:
        broken, built = Path(folder) / "broken.c", Path(folder) / "broken.so"
        broken.write_text("#include <unistd.h>\n" + text, encoding="utf-8")
        others = set(_SOURCES.rglob("*.c")) - {_SOURCES / file}
        where = [f"-I{(_SOURCES / file).parent}", "-o", built]
        subprocess.run(["cc", "-w", "-fPIC", "-shared", *where, broken, *others], check=True)
        functions = library._functions(library._load(built))
    assert functions
    return functions


def plant_in_native(name: str) -> None:
    """Break this process's all-reduces."""
    right, wrong = NATIVE_BUGS[name]
    functions = broken_functions(_FILE, {right: wrong})
    library.FUNCTIONS.clear()
    library.FUNCTIONS.update(functions)
