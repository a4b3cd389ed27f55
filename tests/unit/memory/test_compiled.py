"""The library of compiled functions is used where it is there and fits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from phalanx.memory import compiled


def test_what_is_no_library_or_not_there_is_left_alone(tmp_path: Path):
    (tmp_path / "_compiled.so").write_bytes(b"\x7fELF, or so it says")
    assert compiled._load(tmp_path / "_compiled.so") is None
    assert compiled._load(tmp_path / "absent.so") is None


def test_a_library_of_another_version_is_left_alone(needs_compiled, monkeypatch):
    path = Path(compiled.__file__).with_name("_compiled.so")
    assert compiled._load(path) is not None
    monkeypatch.setattr(compiled, "_VERSION", compiled._VERSION + 1)
    assert compiled._load(path) is None


@pytest.mark.parametrize("here", [True, False], ids=["this processor", "one that is no x86"])
def test_the_sources_compile_without_a_warning(needs_compiled, tmp_path: Path, here):
    package = Path(compiled.__file__).parents[1]
    for source in (
        path for room in ("memory", "distributed") for path in (package / room).glob("*.[ch]")
    ):
        text = source.read_text()
        copy = tmp_path / source.relative_to(package)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(text if here else text.replace("defined(__x86_64__)", "0"))
    sources = sorted(map(str, tmp_path.glob("*/*.c")))
    command = ["cc", "-O3", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-shared", "-fPIC"]
    library = tmp_path / "new.so"
    subprocess.run([*command, "-o", str(library), *sources, "-lpthread"], check=True, timeout=60)
    assert compiled._load(library) is not None
