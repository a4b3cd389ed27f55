"""The files of a run folder that somebody has changed: our error, or none."""

from __future__ import annotations

import copy
import json
import os
import random
from typing import Any

import pytest

from phalanx.callbacks import History, record_of
from phalanx.cli.data.idx import read_idx
from phalanx.cli.options import complete
from phalanx.cli.run_folder import RunFolder
from phalanx.cli.session import read_config
from phalanx.errors import CheckpointError, ConfigError, PhalanxError
from tests.unit.callbacks.events import events_of_run

ROUNDS = 400
HOSTILE: list[Any] = [
    None, True, 0, -1, 3, 2**31, 10**400, 1e300, float("nan"), float("inf"), "", "x", "cpu", "auto",
    "\ud800", [], {}, [[]], [None], ["x"], {"x": 1}, {"kind": "step"},
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    folder.append_metrics([record_of(event) for event in events_of_run(6, per_epoch=2)])
    options = vars(complete({}))
    formation = {"devices": ["cpu", "cpu"], "intra_op": 1}
    folder.write_config({"format": 1, "options": options, "formation": formation})
    return folder


def read_all(folder: RunFolder) -> None:
    read_config(folder.read_config(), source="config.json")
    records = folder.rewind_metrics(steps=6, epochs=3)
    history = History()
    history.restore(records)


def changed(text: str, draw: random.Random) -> str:
    """Change one value of a JSON document, or a character."""
    if draw.random() < 0.2:
        at = draw.randrange(len(text))
        return text[:at] + draw.choice(["", "\0", "[", '"', "9" * 5000]) + text[at + 1 :]
    document = json.loads(text)
    places = [(document, key) for key in document]
    places += [(inner, key) for inner in document.values() if isinstance(inner, dict)
               for key in inner]  # fmt: skip
    container, key = draw.choice(places)
    if draw.random() < 0.2:
        del container[key]
    else:
        container[key] = copy.deepcopy(draw.choice(HOSTILE))
    return json.dumps(document)


def test_changed_files_of_a_run_are_refused_with_our_error(folder):
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    read_all(folder)
    config, metrics = folder.config_path.read_text(), folder.metrics_path.read_text()
    refused = 0
    for turn in range(ROUNDS):
        lines = metrics.splitlines()
        if draw.random() < 0.5:
            folder.config_path.write_text(changed(config, draw))
        else:
            number = draw.randrange(len(lines))
            lines[number] = changed(lines[number], draw)
            folder.metrics_path.write_text("\n".join(lines) + "\n")
        try:
            read_all(folder)
        except PhalanxError:
            refused += 1
        except Exception as error:
            found = folder.config_path.read_text(), folder.metrics_path.read_text()
            raise AssertionError(f"turn {turn}: {error!r} of {found}") from error
        folder.config_path.write_text(config)
        folder.metrics_path.write_text(metrics)
    assert refused > ROUNDS / 4


def test_files_nested_without_end_are_told(folder):
    folder.metrics_path.write_text("[" * 100_000 + "\n{}\n")
    with pytest.raises(CheckpointError, match="Line 1 of"):
        folder.rewind_metrics(steps=0, epochs=0)
    folder.config_path.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="must be readable JSON"):
        folder.read_config()


@pytest.mark.timeout(60)
def test_pipes_and_devices_among_the_files_of_a_run_are_not_waited_for(folder):
    readers = {
        folder.metrics_path: lambda: folder.rewind_metrics(steps=6, epochs=3),
        folder.config_path: folder.read_config,
    }
    for path, read in readers.items():
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(CheckpointError, match="it is a pipe"):
            read()
        path.unlink()
        path.symlink_to("/dev/zero")
        with pytest.raises(CheckpointError, match="it is a device"):
            read()


@pytest.mark.timeout(60)
def test_a_pipe_with_the_name_of_a_data_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "train-labels-idx1-ubyte")
    with pytest.raises(ConfigError, match="it is a pipe"):
        read_idx(tmp_path / "train-labels-idx1-ubyte", num_dims=1)
