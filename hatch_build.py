"""Builds the C library while the package is built or installed.

By the C compiler that is there (or ``CC``); where there is none by ``ziglang``, which pip then
fetches for the build. ctypes calls it, so one build serves all versions of Python and torch.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/phalanx")
SOURCES = (
    "native/lock.c",
    "native/rows.c",
    "native/blocks.c",
    "native/part.c",
    "native/keys.c",
    "native/collectives.c",
)
LIBRARY = FOLDER / "native/_library.so"
FLAGS = [
    "-O3",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-s",
]  # torch adds without contraction, too


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """What hatchling calls before it collects the files of a wheel."""

    def dependencies(self) -> list[str]:
        """Return what pip fetches for the build."""
        if sys.platform != "linux" or shutil.which(system_compiler()[0]):
            return []
        return ["ziglang"]

    # Any: hatchling's own.
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Build, and make the wheel one of this platform if that went well."""
        root = Path(self.root)
        (root / LIBRARY).unlink(missing_ok=True)
        if sys.platform != "linux":
            return
        try:
            build_library(root)
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(f"The C library is not built, so tables cannot run: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{os.uname().machine}"
        build_data["artifacts"].append(str(LIBRARY))


def system_compiler() -> list[str]:
    """Return the command of the system's compiler, which may not be there."""
    return shlex.split(os.environ.get("CC", "cc"))


def compiler() -> list[str]:
    """Return the command of the compiler that builds the library."""
    command = system_compiler()
    if shutil.which(command[0]):
        return command
    libc = "gnu.2.28" if platform.libc_ver()[0] == "glibc" else "musl"
    target = f"{os.uname().machine}-linux-{libc}"  # a target has a plain processor, not just ours
    return [sys.executable, "-m", "ziglang", "cc", "-target", target]


def build_library(root: Path) -> None:
    """Build the library beside its sources."""
    unfinished = root / LIBRARY.with_suffix(".new")
    sources = [str(root / FOLDER / name) for name in SOURCES]
    command = [*compiler(), *FLAGS, "-o", str(unfinished), *sources, "-lpthread"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    unfinished.replace(root / LIBRARY)  # at once, for whoever has the old one loaded
