"""The command as a whole: its doors, and what each says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def said_by(*start: str, arguments: tuple[str, ...], **changed: str) -> tuple[int, str, str]:
    words, environment = [sys.executable, *start, *arguments], {**os.environ, **changed}
    ran = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    return ran.returncode, ran.stdout, ran.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--help"),
        *(pytest.param(each, marks=pytest.mark.night) for each in [(), ("fly",)]),
    ],
)
def test_python_m_phalanx_is_the_command(arguments):
    code = "from phalanx.cli.app import main; main()"
    assert said_by("-m", "phalanx", arguments=arguments) == said_by("-c", code, arguments=arguments)


def test_what_an_encoding_lacks_is_replaced():
    prints = "from phalanx.cli import console; console.prepare_stdout(); print('1 replica × 2')"
    _, out, err = said_by("-c", prints, arguments=(), PYTHONIOENCODING="ascii", LC_ALL="C")
    assert "1 replica ? " in out
    assert "UnicodeEncodeError" not in err
