"""The errors are the tree that the house style draws; each survives a trip between processes."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from phalanx import errors

# class -> its direct bases
TREE = {
    "PhalanxError": ("Exception",),
    "ConfigError": ("PhalanxError", "ValueError"),
    "StateError": ("PhalanxError", "RuntimeError"),
    "UnsupportedError": ("PhalanxError",),
    "PeerError": ("PhalanxError",),
    "PeerTimeout": ("PeerError", "TimeoutError"),
    "PeerLost": ("PeerError", "ConnectionError"),
    "GroupAborted": ("PeerError",),
    "OutOfSpace": ("PhalanxError", "OSError"),
    "CheckpointError": ("PhalanxError",),
    "InternalError": ("PhalanxError",),
}
ATTRIBUTES = {
    name: {"rank": 3} for name in ("PeerError", "PeerTimeout", "PeerLost", "GroupAborted")
}
ATTRIBUTES["OutOfSpace"] = {"needed_bytes": 4096, "available_bytes": 512}


def build(cls: type[BaseException], **attributes: object) -> BaseException:
    return cls("`n` must be 1, but is 2.", **attributes)


def losses(error: BaseException) -> list[str]:
    """List what an error loses when it is pickled and read back, or copied."""
    error.add_note("raised by replica 1 of 4")
    error.extra = (1, "two")
    lost = []
    copies = {"copy": lambda: copy.copy(error)}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copies[f"pickle {protocol}"] = lambda p=protocol: pickle.loads(pickle.dumps(error, p))
    for way, make in copies.items():
        try:
            twin = make()
        except Exception as exc:  # the finding itself
            lost.append(f"{way}: {exc!r}")
            continue
        if type(twin) is not type(error):
            lost.append(f"{way}: the type")
        if str(twin) != str(error):
            lost.append(f"{way}: the message")
        lost += [
            f"{way}: .{name}"
            for name, value in vars(error).items()
            if getattr(twin, name, None) != value
        ]
    return lost


def classes() -> dict[str, type]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }


def test_the_tree_is_the_one_in_the_house_style():
    assert {n: tuple(b.__name__ for b in c.__bases__) for n, c in classes().items()} == TREE
    assert sorted(errors.__all__) == sorted(TREE)


@pytest.mark.parametrize("name", TREE)
def test_an_error_survives_pickling_with_all_it_carries(name):
    error = build(getattr(errors, name), **ATTRIBUTES.get(name, {}))
    assert {k: getattr(error, k) for k in ATTRIBUTES.get(name, {})} == ATTRIBUTES.get(name, {})
    assert losses(error) == []


@pytest.mark.parametrize("name", TREE)
def test_an_error_says_its_sentence_and_nothing_else(name):
    assert (
        str(build(getattr(errors, name), **ATTRIBUTES.get(name, {}))) == "`n` must be 1, but is 2."
    )
