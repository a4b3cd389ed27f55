"""Bugs that are planted in course.c, to see that somebody notices.

Each is a text of the file and what stands in its place, by name in :data:`COURSE_BUGS`. A rank
that has one compiles the file anew and uses what comes of it; it is not needed for anything else.
Where a bug opens a window, the processor is lost in it, as it may be at any time.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import phalanx
from phalanx.memory import compiled

_SOURCES = Path(phalanx.__file__).parent
_GIVE = "exchange(course, (char *)piece, count, item, 1);"
_REDUCE = "reduce_##NAME(course, piece + start"

COURSE_BUGS: dict[str, tuple[str, str]] = {
    # Nobody waits for anybody: results are made of whatever lies in the slots.
    "course_marks_unread": ("if (mark <= 0 || have_reached(course, mark)) return 1;", "return 1;"),
    # A piece is said to be there before it is written.
    "course_mark_before_data": (
        _GIVE,
        f"post(course, PUBLISHED, PUBLISH); usleep(20000); {_GIVE}",
    ),
    # A result is said to be there before it is.
    "course_mark_before_result": (
        _REDUCE,
        f"post(course, REDUCED, REDUCE); usleep(20000); {_REDUCE}",
    ),
    # Ranks in different calls take each other's numbers.
    "course_signatures_not_compared": ("rank < course[SIZE] && !course[AGREED]", "rank < 0"),
    # Nobody looks who sleeps.
    "course_wake_ups_lost": (
        "return asleep || course[STOPS];",
        "return (asleep & 0) || course[STOPS];",
    ),
}


def can_be_planted() -> bool:
    """Tell whether there is what the bugs are compiled by, and what they break."""
    return compiled.is_compiled() and shutil.which("cc") is not None


def plant_in_course(name: str) -> None:
    """Break this process's all-reduces."""
    right, wrong = COURSE_BUGS[name]
    text = (_SOURCES / "distributed/course.c").read_text(encoding="utf-8")
    assert right in text, "course.c has changed: this bug can be planted no more"
    with tempfile.TemporaryDirectory() as folder:
        broken, library = Path(folder) / "course.c", Path(folder) / "broken.so"
        broken.write_text("#include <unistd.h>\n" + text.replace(right, wrong), encoding="utf-8")
        sources = [broken, *(each for each in _SOURCES.rglob("*.c") if each.name != "course.c")]
        subprocess.run(
            [
                "cc",
                "-w",
                "-fPIC",
                "-shared",
                f"-I{_SOURCES / 'distributed'}",
                "-o",
                library,
                *sources,
            ],
            check=True,
        )
        functions = compiled._functions(compiled._load(library))
    assert functions
    compiled.FUNCTIONS.clear()
    compiled.FUNCTIONS.update(functions)
