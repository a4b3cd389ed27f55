"""Compiles the test device, once for each state of its sources and each torch, and loads it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.utils.cpp_extension import include_paths, library_paths

__all__ = ["compiler", "load"]

_HERE = Path(__file__).resolve().parent
_KEPT = _HERE.parents[1] / "build" / "device"  # git ignores it
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-Wall", "-Wno-sign-compare"]
_LIBRARIES = ["-lc10", "-ltorch_cpu", "-ltorch"]
_COMPILING_S = 600


def compiler() -> list[str] | None:
    """Return the command of the C++ compiler, or None where there is none."""
    command = shlex.split(os.environ.get("CXX", "c++"))
    return command if command and shutil.which(command[0]) else None


def load() -> None:
    """Compile the extension where that is still to do, and let torch load it."""
    torch.ops.load_library(str(_compiled()))


def _compiled() -> Path:
    """Return the compiled library. Of several processes one compiles, and the others wait."""
    sources = sorted((_HERE / "native").iterdir())
    digest = hashlib.sha256(repr((torch.__version__, _FLAGS, compiler())).encode())
    for source in sources:
        digest.update(source.read_bytes())
    library = _KEPT / f"{digest.hexdigest()[:16]}.so"
    _KEPT.mkdir(parents=True, exist_ok=True)
    with open(_KEPT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile([source for source in sources if source.suffix == ".cpp"], library)
            for older in set(_KEPT.glob("*.so")) - {library}:
                older.unlink()
    return library


def _compile(sources: list[Path], library: Path) -> None:
    """Compile all sources as one: torch's headers take most of the time, and are read once."""
    command = compiler()
    if command is None:
        raise FileNotFoundError("The test device needs a C++ compiler. Name one in CXX.")
    included = [f"-isystem{path}" for path in include_paths()]
    linked = [f"-L{path}" for path in library_paths()] + _LIBRARIES
    with TemporaryDirectory(dir=_KEPT) as folder:
        whole, unfinished = Path(folder, "device.cpp"), Path(folder, library.name)
        whole.write_text("".join(f'#include "{source}"\n' for source in sources), encoding="utf-8")
        _call([*command, *_FLAGS, *included, "-shared", "-o", str(unfinished), str(whole), *linked])
        unfinished.replace(library)


def _call(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_COMPILING_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"The test device could not be compiled:\n{done.stderr[-4000:]}")
