"""What a room offers, by its ``__all__`` or else its imports: complete, and documented."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

from tests.meta.source import PACKAGE, SOURCE, importable, offered

ROOMS = [PACKAGE] + [
    f"{PACKAGE}.{path.parent.name}" for path in sorted(SOURCE.glob("*/__init__.py"))
]
ROOMS.append(f"{PACKAGE}.compat.torch7")  # a face of its own, within its room


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
    module = importlib.import_module(room)
    assert all(hasattr(module, name) for name in offered(module))
    assert set(importable(module)) <= set(offered(module))


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_object_is_documented(room):
    module = importlib.import_module(room)
    offences = [
        line
        for name in offered(module)
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


def test_importing_phalanx_imports_nothing_slow_that_few_need() -> None:
    """Every worker process and every rank imports it; torchmetrics takes half as long as torch."""
    script = (
        "import sys, phalanx\n"
        "slow = {'torchmetrics', 'matplotlib', 'torch._dynamo', 'typer'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
