"""Run the fast tests with other versions of Python and torch: ``make matrix``.

Each cell, such as ``3.12:2.8.0``, has a virtual environment of its own in a temporary folder, which
is removed afterwards: torch and what it brings take 5 GB. All other packages are those of
constraints.txt.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED_BYTES = 12 << 30  # what pip unpacks, and what it has downloaded
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "expecttest")
# torch decides on its own version and on those of what it needs.
TORCHS = re.compile(r"^(torch|triton|nvidia-|cuda-|sympy|setuptools)\b", re.IGNORECASE)


def find_python(version: str) -> str:
    """Return an interpreter of a version such as ``3.12``, in PATH or of pyenv."""
    of_pyenv = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    found = shutil.which(f"python{version}") if not (known := sorted(of_pyenv)) else str(known[-1])
    if found is None:
        raise SystemExit(f"`make matrix` needs Python {version}, which is not found. Install it.")
    return found


def try_cell(python: str, torch: str, arguments: Sequence[str]) -> bool:
    """Install and run one cell; return whether its tests pass."""
    with tempfile.TemporaryDirectory(prefix=f"phalanx-{python}-{torch}-") as folder:
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < NEEDED_BYTES:
            raise SystemExit(
                f"`make matrix` needs {NEEDED_BYTES >> 30} GiB in {tempfile.gettempdir()}, but "
                f"{free_bytes >> 30} are free. Make room, or set TMPDIR."
            )
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("\n".join(line for line in lines if not TORCHS.match(line)))
        subprocess.run([find_python(python), "-m", "venv", f"{folder}/venv"], check=True)
        own = f"{folder}/venv/bin/python"
        install = [own, "-m", "pip", "install", "--quiet", "--no-compile", "-c", str(constraints)]
        # Editable: processes that tests start import the tree's code, as the tests do.
        subprocess.run([*install, f"torch=={torch}", "-e", ".", *TOOLS], cwd=ROOT, check=True)
        command = [own, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", *arguments]
        # Without compiled files every process would compile all that it imports.
        kept = {
            name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
        }
        return subprocess.run(command, cwd=ROOT, env=kept, check=False).returncode == 0


def main(cells: Sequence[str], arguments: Sequence[str]) -> int:
    failed = []
    for cell in cells:
        python, _, torch = cell.partition(":")
        print(f"Python {python} with torch {torch}", flush=True)
        if not try_cell(python, torch, arguments):
            failed.append(cell)
    print(f"Failed: {', '.join(failed)}" if failed else f"{len(cells)} cells pass.")
    return 1 if failed else 0


if __name__ == "__main__":
    split = sys.argv.index("--")
    sys.exit(main(sys.argv[1:split], sys.argv[split + 1 :]))
