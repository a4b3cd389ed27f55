"""PyTorch's own tests of distributed programs, over `phalanx`; see torch_distributed.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise("backend-carries-other-libraries")

# What may fail, and why. Everything else that gloo passes, `phalanx` passes.
_BY_NAME = "`torch.distributed.monitored_barrier` takes gloo alone, by its name"
_WORDS = "it looks for gloo's words in the error; ours says who did not come"
MAY_FAIL = {
    "test_monitored_barrier_gloo": _BY_NAME,
    "test_monitored_barrier_gloo_subgroup": _BY_NAME,
    "test_monitored_barrier_failure_order": _BY_NAME,
    "test_monitored_barrier_wait_all_ranks": _BY_NAME,
    "test_monitored_barrier_gloo_rank_0_timeout": _WORDS,
    "test_barrier_timeout_group": _WORDS,
    "test_barrier_timeout_full_group": _WORDS,
    "test_barrier_timeout_global": _WORDS,
    "test_ddp_logging_data_cpu": "DDP logs the network interfaces of gloo, by its name",
}
FEWEST_PASSED = 118  # of torch 2.13.0, with 4 or 8 ranks and no GPU


@pytest.mark.night
@pytest.mark.timeout(3600)
def test_what_passes_over_gloo_passes_over_phalanx(tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="torch's tests import it: pip install expecttest")
    folder = tmp_path / "run"
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.run(
            [sys.executable, "-m", "tests.conformance.torch_distributed", str(folder)],
            stdout=log,
            stderr=log,
            timeout=3500,
        )
    assert run.returncode == 0, (tmp_path / "log").read_text()[-4000:]
    found = json.loads((folder / "results.json").read_text())
    failed = {
        name: text
        for name, (outcome, text) in found.items()
        if outcome == "failed" and name not in MAY_FAIL
    }
    assert not failed, "\n\n".join(f"{name}\n{text[-3000:]}" for name, text in failed.items())
    assert sum(outcome == "passed" for outcome, _ in found.values()) >= FEWEST_PASSED
