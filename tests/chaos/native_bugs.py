"""Bugs that are planted in native/collectives.c, to see that somebody notices.

Each is texts of the file and what stands in their place, by name in :data:`NATIVE_BUGS`. A rank
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
_FILE = "native/collectives.c"
_WRITE = "kinds[op->kind].write(op);"
_READ = "word outcome = kinds[op->kind].read(op);"
_LOOK_WHO_SLEEPS = "if (__atomic_load_n(page + AWAITED"
_LAST_LOOK = "if (__atomic_load_n(page_of(op, late) + PROGRESS, __ATOMIC_ACQUIRE) < progress) {"

NATIVE_BUGS: dict[str, dict[str, str]] = {
    # Nobody waits for the results of others.
    "results_not_awaited": {"if (!await_others(op, REDUCED, patience_ns)) return WAITS;": ""},
    # A piece is said to be there before it is written.
    "posted_before_data": {_WRITE: f"post(op, PUBLISHED, PUBLISH); usleep(20000); {_WRITE}"},
    # A result is said to be there before it is.
    "posted_before_result": {
        _READ: f"if (op->kind == ALL_REDUCE) post(op, REDUCED, READ), usleep(20000); {_READ}"
    },
    # A slot is written again while others read it.
    "one_slot_for_all_pieces": {"op->piece % NUM_SLOTS": "0"},
    # Ranks in different calls take each other's numbers.
    "fingerprints_not_compared": {"if (!all_agree(op)) return DIFFERS;": ""},
    # Nobody looks who sleeps.
    "wake_ups_lost": {_LOOK_WHO_SLEEPS: f"if (0 && {_LOOK_WHO_SLEEPS[4:]}"},
    # A rank looks for the last time before it says for whom it sleeps, and not after that.
    "said_too_late": {"uint32_t rung =": "usleep(20000); uint32_t rung =", _LAST_LOOK: "{"},
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
    """Break this process's collectives."""
    functions = broken_functions(_FILE, NATIVE_BUGS[name])
    library.FUNCTIONS.clear()
    library.FUNCTIONS.update(functions)
