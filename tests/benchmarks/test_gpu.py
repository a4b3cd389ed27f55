"""`make bench-gpu` tries itself on the CPU; how fast anything is decides nothing here."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from phalanx.errors import ConfigError, UnsupportedError


@pytest.mark.night
def test_all_contestants_train_and_the_report_has_them(tmp_path):
    words = ["gpu", "--device=cpu", "--models=tiny", "--steps=1", f"--out={tmp_path}"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert set(report["measured"]["models"]["tiny"]["seconds"]) == {
        *("plain", "ddp", "dataparallel", "two-on-one", "trainer")
    }
    assert (tmp_path / "gpu.png").exists()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")
def test_without_an_accelerator_it_says_so(tmp_path):
    result = CliRunner().invoke(app, ["gpu", f"--out={tmp_path / 'out'}"])
    assert isinstance(result.exception, UnsupportedError)
    assert "needs an accelerator, but torch sees none" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_more_devices_than_there_are_are_refused(tmp_path):
    result = CliRunner().invoke(app, ["gpu", "--device=cpu", "--count=3", f"--out={tmp_path}"])
    assert isinstance(result.exception, ConfigError)
    assert "`--count` must be at most 2" in str(result.exception)
