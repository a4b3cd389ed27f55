"""The C library is used where it is there and fits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from phalanx import tables
from phalanx.errors import UnsupportedError
from phalanx.native import FUNCTIONS, is_compiled, library

needs_library = pytest.mark.skipif(not is_compiled(), reason="the C library was not built")


def test_what_is_no_library_or_not_there_is_left_alone(tmp_path: Path):
    (tmp_path / "_library.so").write_bytes(b"\x7fELF, or so it says")
    assert library._load(tmp_path / "_library.so") is None
    assert library._load(tmp_path / "absent.so") is None


@needs_library
def test_a_library_of_another_version_is_left_alone(monkeypatch):
    path = Path(library.__file__).with_name("_library.so")
    assert library._load(path) is not None
    monkeypatch.setattr(library, "_VERSION", library._VERSION + 1)
    assert library._load(path) is None


def test_tables_say_what_is_missing_where_it_was_not_built(monkeypatch):
    for name in list(FUNCTIONS):
        monkeypatch.delitem(FUNCTIONS, name)
    with pytest.raises(UnsupportedError, match=r"Tables need the C library .* apt install gcc"):
        tables.join()


@needs_library
@pytest.mark.parametrize("is_x86", [True, pytest.param(False, marks=pytest.mark.night)])
def test_the_sources_compile_without_a_warning(tmp_path: Path, is_x86):
    for source in Path(library.__file__).parent.glob("*.[ch]"):
        text = source.read_text()
        text = text if is_x86 else text.replace("defined(__x86_64__)", "0")
        (tmp_path / source.name).write_text(text)
    sources = sorted(map(str, tmp_path.glob("*.c")))
    command = ["cc", "-O3", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-shared", "-fPIC"]
    built = tmp_path / "new.so"
    subprocess.run([*command, "-o", str(built), *sources, "-lpthread"], check=True, timeout=300)
    assert library._load(built) is not None
