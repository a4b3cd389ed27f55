"""Builds the C library while the package is built or installed.

By the C compiler that is there (or ``CC``); where there is none by ``ziglang``, which pip then
fetches for the build. ctypes calls it, so one build serves all versions of Python and torch.

With ``PHALANX_WHEEL=x86_64`` or ``aarch64`` the wheel is for any Linux of that machine with glibc
2.17 or newer, wherever it is built: ``make wheels``.
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
MACHINE = os.environ.get("PHALANX_WHEEL", "")  # "x86_64" or "aarch64": a wheel for all Linux
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
        return ["ziglang"] if sys.platform == "linux" and "ziglang" in compiler() else []

    # Any: hatchling's own.
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Build, and make the wheel one of this platform if that went well."""
        root = Path(self.root)
        if MACHINE:
            library = root / "build" / MACHINE / LIBRARY.name
            build_library(root, library)
            build_data["tag"] = f"py3-none-manylinux_2_17_{MACHINE}.manylinux2014_{MACHINE}"
            build_data["force_include"][str(library)] = "phalanx/native/_library.so"
        else:
            (root / LIBRARY).unlink(missing_ok=True)
            if sys.platform != "linux":
                return
            try:
                build_library(root, root / LIBRARY)
            except (OSError, subprocess.SubprocessError) as error:
                self.app.display_warning(
                    f"The C library is not built, so tables cannot run: {error}"
                )
                return
            build_data["tag"] = f"py3-none-linux_{os.uname().machine}"
            build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False


def compiler() -> list[str]:
    """Return the command of the compiler that builds the library."""
    command = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(command[0]) and not MACHINE:
        return command
    libc = "gnu.2.17" if MACHINE or platform.libc_ver()[0] == "glibc" else "musl"
    # A target has a plain processor, not just ours.
    target = f"{MACHINE or os.uname().machine}-linux-{libc}"
    return [sys.executable, "-m", "ziglang", "cc", "-target", target]


def build_library(root: Path, library: Path) -> None:
    """Compile the sources into ``library``."""
    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(".new")
    sources = [str(root / FOLDER / name) for name in SOURCES]
    command = [*compiler(), *FLAGS, "-o", str(unfinished), *sources, "-lpthread"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    unfinished.replace(library)  # at once: a process may have the old one loaded
