"""What a room offers is what its ``__all__`` says: sorted, complete, and documented."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import types

import pytest

from tests.meta.source import PACKAGE, SOURCE

ROOMS = [PACKAGE] + [
    f"{PACKAGE}.{path.parent.name}" for path in sorted(SOURCE.glob("*/__init__.py"))
]
ROOMS.append(f"{PACKAGE}.compat.torch7")  # a face of its own, within its room


def sort_key(name: str) -> tuple[int, list[object]]:
    """Order names as ruff's RUF022 does: CONSTANTS, Classes, functions; numbers by value."""
    kind = 0 if len(name) > 1 and name.isupper() else 1 if name[:1].isupper() else 2
    return kind, [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", name) if p]


def export_offences(module: types.ModuleType) -> list[str]:
    """List differences between a module's ``__all__`` and what can be imported from it."""
    where = module.__name__
    listed = getattr(module, "__all__", None)
    if listed is None:
        return [f"{where} has no `__all__`"]
    offences = []
    if list(listed) != sorted(listed, key=sort_key):
        offences.append(f"{where}.__all__ is not sorted: write {sorted(listed, key=sort_key)}")
    if len(set(listed)) != len(listed):
        offences.append(f"{where}.__all__ names something twice")
    offences += [
        f"{where}.{name} is listed but not there" for name in listed if not hasattr(module, name)
    ]
    offences += [
        f"{where}.{name} is there but not listed"
        for name, value in sorted(vars(module).items())
        if not name.startswith("_")
        and name not in listed
        and not isinstance(value, types.ModuleType)
        and name not in ("annotations", "TYPE_CHECKING")  # those of a room that imports late
    ]
    return offences


def underlying(member: object) -> object:
    """Return the function behind a method, class method or property."""
    return getattr(member, "__func__", getattr(member, "fget", member))


def docstring_offences(name: str, value: object) -> list[str]:
    """List what about a public object has no docstring: itself, or a method of it.

    A method that replaces a documented one keeps that one's docstring.
    """
    if inspect.isclass(value):
        own = vars(value).get("__doc__")
        # A dataclass without a docstring is given its signature, and a NamedTuple likewise.
        machine_made = own is not None and own.startswith((f"{value.__name__}(", "An enumeration."))
        offences = [] if own and not machine_made else [f"{name} has no docstring"]
        for attribute, member in sorted(vars(value).items()):
            if not attribute.startswith("_") and inspect.isfunction(underlying(member)):
                versions = (vars(base).get(attribute) for base in value.__mro__)
                if not any(underlying(version).__doc__ for version in versions if version):
                    offences.append(f"{name}.{attribute} has no docstring")
        return offences
    if inspect.isfunction(value) and not inspect.getdoc(value):
        return [f"{name} has no docstring"]
    return []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_offers_what_it_lists(room):
    assert export_offences(importlib.import_module(room)) == []


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_object_is_documented(room):
    module = importlib.import_module(room)
    offences = [
        line
        for name in getattr(module, "__all__", ())
        for line in docstring_offences(f"{room}.{name}", getattr(module, name))
    ]
    assert not offences, "\n" + "\n".join(offences)


def test_the_front_door_leads_to_the_promised_names():
    module = importlib.import_module(PACKAGE)
    assert {"DataParallel", "Trainer"} <= set(module.__all__)


def test_the_front_door_imports_nothing_before_it_is_asked():
    code = "import sys, phalanx; print({'torch', 'numpy', 'rich'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def test_help_of_the_command_line_does_not_import_torch():
    code = (
        "import sys\nfrom phalanx.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    for command in ([], ["train"], ["launch"]):
        arguments = [sys.executable, "-c", code, *command, "--help"]
        ran = subprocess.run(arguments, capture_output=True, text=True, check=True)
        assert ran.stdout.splitlines()[-1] == "False", command


def planted(**names: object) -> types.ModuleType:
    module = types.ModuleType("planted")
    vars(module).update(names)
    return module


@pytest.mark.parametrize(
    "module",
    [
        planted(f=1),
        planted(f=1, __all__=[]),
        planted(__all__=["f"]),
        planted(f=1, g=1, __all__=["g", "f"]),
        planted(f=1, __all__=["f", "f"]),
        planted(f=1, F=1, F_MAX=1, __all__=["F", "F_MAX", "f"]),
    ],
)
def test_a_false_list_is_caught(module):
    assert len(export_offences(module)) == 1


def test_a_true_list_passes():
    module = planted(f2=1, f10=1, Eff=1, MAX=1, _own=1, re=re, __all__=["MAX", "Eff", "f2", "f10"])
    assert export_offences(module) == []


def test_a_missing_docstring_is_caught():
    class Base:
        """Documented."""

        def run(self):
            """Run."""

    class Silent(Base):
        def run(self):  # keeps its parent's docstring
            pass

        def walk(self):
            pass

        @property
        def pace(self):
            pass

        @classmethod
        def build(cls):
            pass

    def silent():
        pass

    assert docstring_offences("Base", Base) == []
    assert docstring_offences("silent", silent) == ["silent has no docstring"]
    assert docstring_offences("Silent", Silent) == [
        "Silent has no docstring",
        "Silent.build has no docstring",
        "Silent.pace has no docstring",
        "Silent.walk has no docstring",
    ]


def test_importing_phalanx_imports_nothing_slow_that_few_need() -> None:
    """Every worker process and every rank imports it; torchmetrics takes half as long as torch."""
    script = (
        "import sys, phalanx\n"
        "slow = {'torchmetrics', 'matplotlib', 'torch._dynamo', 'typer'} & set(sys.modules)\n"
        "assert not slow, slow\n"
        "phalanx.executor_group.Collected\n"
        "assert 'torchmetrics' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
