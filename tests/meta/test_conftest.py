"""The fixtures that every test gets do what they say, seen from another test session."""

from __future__ import annotations

import pytest

from tests.meta.source import ROOT

pytest_plugins = ["pytester"]

INNER_TESTS = """
import threading

import pytest
import torch

seen = []


def start(name):
    stop = threading.Event()
    threading.Thread(target=stop.wait, name=name, daemon=True).start()
    return stop


def look():
    return torch.get_num_threads(), torch.get_default_dtype(), torch.rand(3).tolist()


def test_leaves_a_thread():
    start("phalanx replica 1")


def test_inherits_that_thread():
    pass


def test_ends_its_thread():
    start("phalanx replica 2").set()


def test_leaves_somebody_elses_thread():
    start("other")


def test_changes_every_setting():
    seen.append(look())
    torch.set_num_threads(torch.get_num_threads() + 2)
    torch.set_default_dtype(torch.float64)


def test_sees_nothing_of_it():
    assert look() == seen[0]


@pytest.mark.gpu
def test_needs_a_gpu(gpu):
    assert torch.ones(1, device=gpu).device == gpu
"""


def conftest() -> str:
    text = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    assert "JOIN_S = 20.0" in text
    return text.replace("JOIN_S = 20.0", "JOIN_S = 0.1")


@pytest.mark.night  # it is about the tests
def test_every_test_gets_a_clean_start_and_leaves_one_and_gpu_tests_are_skipped(
    pytester, monkeypatch
):
    pytester.makeconftest(
        conftest()
        + "\ntorch.accelerator.current_accelerator = lambda check_available=False: None\n"
    )
    pytester.makeini("[pytest]\nmarkers = gpu: needs an accelerator")
    pytester.makepyfile(INNER_TESTS)
    # Another process: torch cannot be imported a second time in this one.
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=120)
    assert result.parseoutcomes() == {"passed": 6, "skipped": 1, "errors": 1}
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_leaves_a_thread*"])
    result.stdout.fnmatch_lines(["*threads left behind: phalanx replica 1.*"])


@pytest.mark.night
def test_a_test_that_ends_its_process_ends_the_run_and_is_named(pytester):
    """By itself xdist 3.8 waits for ever where files go whole to one process."""
    pytester.makeconftest(conftest())
    pytester.makepyfile(
        test_one="def test_a(): pass\ndef test_b(): __import__('os')._exit(1)\ndef test_c(): pass",
        test_two="def test_a(): pass\ndef test_b(): pass",
    )
    words = ("-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    result = pytester.runpytest_subprocess(*words, timeout=120)
    assert result.ret != 0
    text = " ".join([*result.outlines, *result.errlines])
    assert "A process of the run has ended" in text
    assert "test_one.py::test_b" in text


def test_no_fixture_lasts_to_the_end_of_the_run_in_the_name_of_a_package():
    """Folders of tests have no `__init__.py`, and pytest ends such a fixture with the session."""
    files = (ROOT / "tests").rglob("*.py")
    scoped = [path for path in files if 'scope="' + 'package"' in path.read_text(encoding="utf-8")]
    assert scoped == []
