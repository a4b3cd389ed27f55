"""The library of compiled C functions, called through ctypes; hatch_build.py builds it.

Tables, worker processes and the backend cannot do without it. Training in threads can: what it
calls here has its like in torch (memory/blocks.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from phalanx.errors import UnsupportedError

_VERSION = 27  # as in native.h: a library of another one is left alone
DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bfloat16: "bfloat16",
}
"""What functions for numbers of a dtype end with, in the order of their numbers in part.c."""

_TAKES = {
    "within": "pnnn",
    "copy": "ppnn",
    "finite_float32": "pn",
    "finite_float64": "pn",
    "finite_bfloat16": "pn",
    "lock_make": "p",
    "lock_take": "pn",
    "lock_release": "p",
    "lock_owner": "p",
    "changes": "p",
    "changes_tell": "p",
    "changes_wait": "pnn",
    "collective": "pn",
    "part_add": "ppnpnnn",
    "part_change": "ppnnp",
    "part_get": "ppnp",
    "index_insert": "pn",
    "index_find": "ppnnp",
    "keys_get": "pppnpp",
    "keys_add": "pppnpnnn",
    "die_after": "n",
}
"""What each function takes: pointers and numbers of 64 bits. Those that answer return a number."""

# Any: what ctypes makes of a C function.
Function = Callable[..., Any]


def _load(path: Path) -> ctypes.CDLL | None:
    """Return the library, or None where it is missing or of another version."""
    try:
        library = ctypes.CDLL(str(path))
        return library if library.phalanx_version() == _VERSION else None
    except (OSError, AttributeError):
        return None


def _functions(library: ctypes.CDLL | None) -> dict[str, Function]:
    """Return the functions by name, with the types of what they take."""
    if library is None:
        return {}
    kinds = {"p": ctypes.c_void_p, "n": ctypes.c_int64}
    found: dict[str, Function] = {}
    for name, letters in _TAKES.items():
        function = getattr(library, f"phalanx_{name}")
        function.argtypes = [kinds[letter] for letter in letters]
        function.restype = ctypes.c_int64
        found[name] = function
    return found


FUNCTIONS = _functions(_load(Path(__file__).with_name("_library.so")))
"""By name, without ``phalanx_``; nothing where nothing was compiled."""


def is_compiled() -> bool:
    """Tell whether the library was built when phalanx was installed.

    Example:
        >>> is_compiled() in (True, False)
        True
    """
    return bool(FUNCTIONS)


def require_library(what: str) -> None:
    """Raise if the library is not there.

    Args:
        what: What needs it; the error's first words.

    Raises:
        UnsupportedError: It was not built, or from other sources.
    """
    if not FUNCTIONS:
        raise UnsupportedError(
            f"{what} need the C library of phalanx, but this version's was not built. Install "
            "a C compiler (on Debian and Ubuntu: apt install gcc), then phalanx again; in a "
            "checkout, `make venv` builds it."
        )


def _fields(addresses: str, words: str = "") -> list[tuple[str, type]]:
    numbers = [(name, ctypes.c_int64) for name in words.split()]
    return [*((name, ctypes.c_void_p) for name in addresses.split()), *numbers]


class _View(ctypes.Structure):
    """Memory as C sees it. The maker of one keeps the memory."""

    @property
    def address(self) -> int:
        """The address of its first byte."""
        return ctypes.addressof(self)


class PartView(_View):
    """A part of a table, as in native/part.h."""

    _fields_ = (
        *_fields(
            "header done lock values record record_rows",
            "num_rows num_cols first_row block_rows dtype",
        ),
        ("scale", ctypes.c_double),
    )


class IndexView(_View):
    """An index of keys, as in native/keys.c."""

    _fields_ = _fields("entries keys", "mask seed generation stop")


class KeysView(_View):
    """A part whose rows are found by key, as in native/keys.c."""

    _fields_ = _fields("rows counts first_row")


def address_of(memory: memoryview) -> int:
    """Return where writable memory begins; the user of the address keeps the memory.

    Example:
        >>> buffer = memoryview(bytearray(8))
        >>> address_of(buffer[4:]) - address_of(buffer)
        4
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
