"""Compiles the files of C while the package is built or installed, where there is a C compiler.

Without one the package is the same, and does the same with torch in about twice the time (see
src/phalanx/memory/compiled.py).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/phalanx")
SOURCES = (
    "memory/rows.c",
    "memory/blocks.c",
    "distributed/native_all_reduce.c",
)
LIBRARY = FOLDER / "memory/_compiled.so"
FLAGS = ["-O3", "-ffp-contract=off", "-fPIC", "-shared"]  # torch adds without contraction, too


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """What hatchling calls before it collects the files of a wheel."""

    # Any: hatchling's own.
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile, and make the wheel one of this platform if that went well."""
        root = Path(self.root)
        (root / LIBRARY).unlink(missing_ok=True)
        if sys.platform != "linux":
            return
        try:
            compile_library(root)
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(f"C is not compiled, torch does its work: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{os.uname().machine}"
        build_data["artifacts"].append(str(LIBRARY))


def compile_library(root: Path) -> None:
    """Compile the library beside its sources."""
    unfinished = root / LIBRARY.with_suffix(".new")
    compiler = shlex.split(os.environ.get("CC", "cc"))
    sources = [str(root / FOLDER / name) for name in SOURCES]
    command = [*compiler, *FLAGS, "-o", str(unfinished), *sources, "-lpthread"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    unfinished.replace(root / LIBRARY)  # at once, for whoever has the old one loaded
