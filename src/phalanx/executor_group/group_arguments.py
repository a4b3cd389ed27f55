"""Arguments of a group that are no tensors, beside those of `plan`: of the kind they must be.

Whatever is wrong is said before anything is done, so that a refused call changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

import numpy as np

from phalanx.plan import check_argument

__all__ = [
    "check_buffer_rules",
    "check_devices",
    "check_mapping",
    "read_flag",
    "read_names",
]


# Any, here and below: whatever the user wrote.
def read_flag(name: str, given: Any) -> bool:
    """Read True or False, or a 0 or 1 that stands for it; a text is neither."""
    fits = isinstance(given, (bool, np.bool_)) or (isinstance(given, Integral) and given in (0, 1))
    check_argument(fits, name, "be True or False", given)
    return bool(given)


def read_names(name: str, given: Any) -> list[str]:
    """Read a sequence of names, or one."""
    if isinstance(given, str):
        return [given]
    names = list(given) if isinstance(given, Iterable) else [given]
    fits = not isinstance(given, Mapping) and all(isinstance(each, str) for each in names)
    check_argument(fits, name, "hold names", given)
    return names


def check_mapping(name: str, given: Any, of: str) -> None:
    """Refuse what maps no names, to whatever ``of`` says."""
    fits = isinstance(given, Mapping) and all(isinstance(key, str) for key in given)
    check_argument(fits, name, f"map names to {of}", given)


def check_devices(given: Any) -> None:
    """Refuse what is neither a number of devices nor names them; what they are is found later."""
    number = isinstance(given, int) and not isinstance(given, bool)
    several = isinstance(given, Iterable) and not isinstance(given, (str, Mapping))
    fits = given is None or number or several
    wanted = "be a number of replicas or hold a device for each"
    check_argument(fits, "contexts", wanted, given, "Give 2, or ['cpu', 'cpu'].")


def check_buffer_rules(given: Any) -> None:
    """Refuse rules by something else than names; the rules themselves are read later."""
    if isinstance(given, Mapping):
        check_mapping("buffers", given, "rules")
