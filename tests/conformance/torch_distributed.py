"""Runs `distributed_test.py`, as it ships with torch, over a backend; `make night` does it.

    python -m tests.conformance.torch_distributed FOLDER [NAME ...]

The file knows backends by name, so its text is taken with "phalanx" in the place of "gloo", and in
that of "mpi" where only MPI exchanges all with all. A test that wants more ranks gets them. Those
that ask for GPUs skip themselves.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import torch

import phalanx  # noqa: F401

RANKS = (4, 8)  # 8 for a test that finds 4 too few
SECONDS_PER_TEST = 120
BACKEND = "phalanx"


def prepare(folder: Path) -> None:
    """Set what the file reads from its environment when it is imported."""
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir(parents=True)
    os.environ.update(
        BACKEND=BACKEND,
        WORLD_SIZE=str(RANKS[0]),
        TEMP_DIR=str(folder),
        INIT_METHOD=f"file://{folder / 'init'}",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(SECONDS_PER_TEST),
    )


def patched_tests() -> types.ModuleType:
    """Return torch's file as a module, about our backend."""
    from torch.testing._internal import common_distributed

    for backends in common_distributed.DistTestCases.backend_feature.values():
        if "gloo" in backends:
            backends.add(BACKEND)
    common_distributed.DistTestCases.backend_feature["plugin"].add(BACKEND)
    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text().replace('"gloo"', f'"{BACKEND}"')
    text = text.replace('BACKEND != "mpi"', f'BACKEND != "{BACKEND}"')
    module = types.ModuleType("patched_distributed_test")
    sys.modules[module.__name__] = module
    # Without this file's own `annotations`, which would turn the types of torch's hooks into text.
    exec(compile(text, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def main(folder: Path, names: list[str]) -> None:
    """Run the tests of these names, or all, and leave what they came to in ``results.json``."""
    torch.set_num_threads(1)
    prepare(folder)
    tests: Any = patched_tests()

    class OverPhalanx(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    found: dict[str, tuple[str, str]] = {}
    for name in names or unittest.TestLoader().getTestCaseNames(OverPhalanx):
        for ranks in RANKS:
            os.environ["WORLD_SIZE"] = str(ranks)
            result = unittest.TestResult()
            OverPhalanx(name).run(result)
            if not any("world size" in reason for _, reason in result.skipped):
                break
        failed, skipped = result.failures + result.errors, result.skipped
        found[name] = (
            ("failed", failed[0][1])
            if failed
            else ("skipped", skipped[0][1])
            if skipped
            else ("passed", "")
        )
        print(name, found[name][0], flush=True)
    (folder / "results.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
