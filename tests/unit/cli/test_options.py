"""Words of the command line become checked values, or one sentence that says what is wrong."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from phalanx.cli.options import (
    complete,
    continue_with,
    parse_replicas,
    parse_workloads,
    read_options,
)
from phalanx.cli.recipes import defaults_for
from phalanx.errors import CheckpointError, ConfigError

STORED = complete({"replicas": "2", "workloads": "2,1", "microbatches": 4, "seed": 7})


@pytest.mark.parametrize(
    ("text", "replicas"),
    [
        ("auto", "auto"),
        ("1", 1),
        ("12", 12),
        ("cpu", ("cpu",)),
        ("cpu,cpu", ("cpu", "cpu")),
        ("cpu, cuda:0", ("cpu", "cuda:0")),
    ],
)
def test_replicas_are_read(text, replicas):
    assert parse_replicas(text) == replicas


@pytest.mark.parametrize(
    ("text", "workloads"),
    [
        (None, None),
        ("2,1", (2.0, 1.0)),
        ("0, .5", (0.0, 0.5)),
        ("1", (1.0,)),
    ],
)
def test_workloads_are_read(text, workloads):
    assert parse_workloads(text) == workloads


@pytest.mark.parametrize("data", ["digits", "text:book.txt", "my:data"])
def test_what_is_not_said_comes_from_the_recipe(data):
    options = complete({"data": data})
    recipe = defaults_for(data, options.model)
    assert (options.epochs, options.batch_size, options.lr) == (
        recipe.epochs,
        recipe.batch_size,
        recipe.lr,
    )
    assert (options.replicas, options.workloads, options.microbatches) == ("auto", None, 4)
    assert options.seed == 0


def test_what_is_said_is_taken():
    said = {
        "data": "digits",
        "model": "mlp",
        "replicas": "cpu,cpu",
        "workloads": "1,2",
        "microbatches": 3,
        "epochs": 1,
        "batch_size": 5,
        "lr": 0.5,
        "seed": 9,
        "loss": "mse",
        "executor": "processes",
    }
    assert asdict(complete(said)) == {**said, "forward": None}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"epochs": 0}, "`--epochs` must be 1 or more, but is 0"),
        ({"batch_size": -1}, "`--batch-size` must be 1 or more, but is -1"),
        ({"microbatches": -1}, "`--microbatches` must be 0 or more, but is -1"),
        ({"replicas": "5"}, r"`--replicas` must be at most .* microbatches \(4\), but are 5"),
        ({"replicas": "auto", "microbatches": 0}, "must be a number or devices with --micro"),
        ({"lr": 0.0}, "`--lr` must be a number above 0 that float32 holds, but is 0.0"),
        ({"lr": float("nan")}, "`--lr` must be a number above 0 that float32 holds, but is nan"),
        ({"lr": 1e300}, "`--lr` must be a number above 0 that float32 holds, but is 1e\\+300"),
        ({"lr": float("inf")}, "`--lr` must be a number above 0 that float32 holds, but is inf"),
        ({"loss": "hinge"}, "`--loss` must be cross_entropy, mse, l1, bce or module:attribute"),
        ({"forward": "mine"}, "`--forward` must be module:attribute, but is 'mine'"),
        ({"forward": "a:b", "loss": "l1"}, "`--loss` must be left out with `--forward`"),
        ({"seed": -1}, "`--seed` must be from 0 to"),
        ({"seed": 2**63}, "`--seed` must be from 0 to"),
        ({"workloads": "1,2"}, "must come with a fixed number of replicas.* Give --replicas 2"),
        (
            {"workloads": "1,2", "replicas": "3"},
            r"must hold one share per replica \(3\), but holds 2. Give 1,1,1",
        ),
        ({"workloads": "1", "replicas": "cpu,cpu"}, r"per replica \(2\), but holds 1"),
    ],
)
def test_values_out_of_range_are_refused(said, message):
    with pytest.raises(ConfigError, match=message):
        complete(said)


def test_without_microbatches_there_is_one_replica_unless_it_is_said() -> None:
    assert complete({"microbatches": 0}).replicas == "1"
    assert complete({"microbatches": 0, "replicas": "9"}).replicas == "9"


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ({}, {}),
        ({"seed": 7, "data": "digits"}, {}),
        ({"epochs": 99}, {"epochs": 99}),
        ({"workloads": "1,1"}, {"workloads": "1,1"}),
        ({"replicas": "3"}, {"replicas": "3", "workloads": None}),
        ({"replicas": "3", "workloads": "1,2,3"}, {"replicas": "3", "workloads": "1,2,3"}),
        ({"lr": 0.25}, {"lr": 0.25}),
    ],
)
def test_a_run_goes_on_with_its_options_and_what_may_change(said, changes):
    assert continue_with(STORED, said, run="r") == replace(STORED, **changes)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"data": "text:a"}, r"`--data` .* r began with \(digits\), but is text:a"),
        ({"model": "mlp"}, r"`--model` .*\(cnn\), but is mlp"),
        ({"seed": 8}, r"`--seed` .*\(7\), but is 8"),
        ({"batch_size": 3}, r"`--batch-size` .*\(64\), but is 3"),
        ({"microbatches": 8}, r"`--microbatches` .*\(4\), but is 8"),
    ],
)
def test_what_decides_the_numbers_cannot_change_in_a_run(said, message):
    with pytest.raises(ConfigError, match=message):
        continue_with(STORED, said, run="r")


OWN = replace(STORED, data="own:rows", model="own:Net", loss="own:loss", executor="processes")
SAID = {"data": "own:rows", "model": "own:Net", "loss": "own:loss"}


@pytest.mark.parametrize("name", SAID)
def test_what_names_code_is_not_taken_from_a_run(name):
    said = {other: value for other, value in SAID.items() if other != name}
    flag = "--" + name.replace("_", "-")
    wanted = f"`{flag}` must be given again .*but is left out.* r names, add {flag} {SAID[name]}$"
    with pytest.raises(ConfigError, match=wanted):
        continue_with(OWN, said, run="r")


def test_what_names_code_is_given_again():
    assert continue_with(OWN, SAID, run="r") == OWN
    own = replace(STORED, forward="own:step")
    assert continue_with(own, {"forward": "own:step"}, run="r") == own
    with pytest.raises(ConfigError, match=r"add --forward own:step$"):
        continue_with(own, {}, run="r")


@pytest.mark.parametrize(
    "changes",
    [
        {"data": "text:a", "model": "mlp", "loss": "mse"},
        {"data": "text:a:b", "model": "gpt"},
    ],
)
def test_what_names_no_code_is_taken_from_a_run(changes):
    stored = replace(STORED, **changes)
    assert continue_with(stored, {}, run="r") == stored


def test_options_come_back_from_a_file():
    assert read_options(asdict(STORED), source="config.json") == STORED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": "7"}, "`options` in c.json must be those of a run: .*'str'"),
        ({"speed": 3}, "`options` in c.json must be those of a run: .*'speed'"),
    ],
)
def test_a_file_that_was_edited_wrongly_is_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        read_options({**asdict(STORED), **changes}, source="c.json")
