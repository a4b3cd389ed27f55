"""One library of C, for what Python cannot do in shared memory, or not fast enough."""

from phalanx.native.library import (
    DTYPES,
    FUNCTIONS,
    IndexView,
    KeysView,
    PartView,
    address_of,
    is_compiled,
    require_library,
)

__all__ = [
    "DTYPES",
    "FUNCTIONS",
    "IndexView",
    "KeysView",
    "PartView",
    "address_of",
    "is_compiled",
    "require_library",
]
