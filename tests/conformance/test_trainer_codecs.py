"""A trainer whose gradients pass through a codec: accuracy, bits, checkpoints, failed steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

import phalanx
from phalanx.cli.data import open_data
from phalanx.cli.models import build_model

CODECS = ["fp16", "bf16", "one_bit", "top_k(0.1)"]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 33), nn.ReLU(), nn.Linear(33, 3))


def batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(9, 5), torch.randint(3, (9,))) for _ in range(count)]


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def trainer(net: nn.Module, codec: str | None, **options: object) -> phalanx.Trainer:
    return phalanx.Trainer(
        net, nn.functional.cross_entropy, sgd, codec=codec, **{"replicas": 2, **options}
    )


def weights(net: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("codec", CODECS)
def test_the_bits_do_not_depend_on_the_number_of_replicas(codec: str) -> None:
    found = []
    for replicas in (1, 2, 3):
        net = mlp()
        with trainer(net, codec, replicas=replicas, microbatches=3) as run:
            run.fit(batches())
        found.append(weights(net))
    assert same(found[0], found[1])
    assert same(found[0], found[2])


@pytest.mark.parametrize("codec", CODECS)
def test_a_codec_changes_the_bits(codec: str) -> None:
    """The control of everything here: without a codec the weights are others."""
    found = []
    for each in (codec, None):
        net = mlp()
        with trainer(net, each, microbatches=3) as run:
            run.fit(batches())
        found.append(weights(net))
    assert not same(found[0], found[1])


@pytest.mark.parametrize("codec", ["one_bit", "top_k(0.1)", "fp16"])
def test_a_resumed_run_goes_on_with_the_errors_it_had(codec: str, tmp_path: Path) -> None:
    whole = mlp()
    with trainer(whole, codec, microbatches=3) as run:
        run.fit(batches())
    halves = mlp()
    with trainer(halves, codec, microbatches=3) as run:
        run.fit(batches(), steps=2)
        run.save(tmp_path / "half")
    halves = mlp()
    with trainer(halves, codec, microbatches=3, replicas=3) as run:
        run.resume(tmp_path / "half")
        run.fit(batches())
    assert same(weights(whole), weights(halves))


def test_errors_that_are_not_taken_over_change_the_run(tmp_path: Path) -> None:
    """The control: a resume that forgets the errors does not end at the same weights."""
    found = []
    for forget in (False, True):
        net = mlp()
        with trainer(net, "one_bit", microbatches=3) as run:
            run.fit(batches(), steps=2)
            if forget:
                run._spec.feedback.load_state_dict({})
            run.fit(batches())
        found.append(weights(net))
    assert not same(found[0], found[1])


def test_a_checkpoint_of_another_codec_is_refused(tmp_path: Path) -> None:
    with trainer(mlp(), "one_bit") as run:
        run.fit(batches(), steps=1)
        run.save(tmp_path / "run")
    net = mlp()
    before = weights(net)
    with (
        trainer(net, None) as run,
        pytest.raises(phalanx.CheckpointError, match=r"codec None like this trainer's.*OneBit"),
    ):
        run.resume(tmp_path / "run")
    assert same(before, weights(net))


def test_a_failed_step_leaves_the_errors_as_they_were() -> None:
    net = mlp()
    with trainer(net, "one_bit", microbatches=3) as run:
        run.fit(batches(), steps=2)
        before = {key: value.clone() for key, value in run._spec.feedback.state_dict().items()}
        inputs, targets = batches()[0]
        with pytest.raises(phalanx.ConfigError):
            run.step((inputs * float("nan"), targets))
        assert before
        after = run._spec.feedback.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(phalanx.ConfigError, match=r"`codec` must be 'fp16'.*but is 'zip'"):
        trainer(mlp(), "zip")


@pytest.fixture(scope="module")
def accuracy_without() -> float:
    return digits_accuracy(None)


def digits_accuracy(codec: str | None) -> float:
    """Return the test accuracy of the command's mlp on its digits, after its twenty epochs."""
    data = open_data("digits", batch_size=64, seed=0)
    net = build_model("mlp", data, seed=0)
    metrics = {"accuracy": MulticlassAccuracy(num_classes=10, average="micro")}

    def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-3)

    with phalanx.Trainer(
        net, nn.functional.cross_entropy, adamw, replicas=2, codec=codec, metrics=metrics
    ) as run:
        run.fit(data.train, epochs=20)
        return run.evaluate(data.test)["accuracy"]


@pytest.mark.parametrize(
    "codec",
    [pytest.param(each, marks=pytest.mark.night) for each in ("fp16", "bf16", "top_k")]
    + ["one_bit"],
)
def test_digits_are_learned_as_well_through_a_codec(codec: str, accuracy_without: float) -> None:
    assert digits_accuracy(codec) >= accuracy_without - 0.01
