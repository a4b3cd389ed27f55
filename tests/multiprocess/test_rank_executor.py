"""A trainer in every rank of a job: the bits of one process, and failures that all hear of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

import phalanx
from phalanx.callbacks import EMA, JSONL, BestCheckpoint, EarlyStopping
from phalanx.errors import ConfigError, PeerError, StateError
from tests.conformance.test_executors_same_bits import (
    Run,
    assert_same_bits,
    made,
    result,
    trainer,
)
from tests.multiprocess.ranks import Ranks
from tests.multiprocess.two_epochs import EPOCHS, batches, train_in_one_process

pytestmark = [
    pytest.mark.filterwarnings("ignore:`replicas` should be at most"),
    pytest.mark.promise("replicas-change-no-bit", "launchers-change-no-bit"),
]


@pytest.fixture(scope="module")
def expected() -> Run:
    return train_in_one_process()


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3, backend="phalanx") as ranks:
        yield ranks


def trained_everything(rank: int, replicas: int, folder: Path, stop: int) -> Run:
    torch.manual_seed(100 + rank)  # what rank 0 has is what counts
    losses: list[float] = []
    net = made() if rank == 0 else type(made())()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        trainer("ranks", replicas, losses, net) as trained,
    ):
        trained.fit(batches(), epochs=EPOCHS, steps=stop)
        trained.save(folder)
        return result(trained, losses)


def test_a_stopped_job_is_resumed_by_one_process(
    three: Ranks, expected: Run, tmp_path: Path
) -> None:
    runs = three.run(trained_everything, 1, tmp_path / "checkpoint", 4)
    losses = list(runs[0].losses)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        trainer("threads", 2, losses, made()) as trained,
    ):
        trained.resume(tmp_path / "checkpoint")
        trained.fit(batches(), epochs=EPOCHS)
        assert_same_bits(result(trained, losses), expected)


def resumed(rank: int, folder: Path) -> Run:
    losses: list[float] = []
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        trainer("ranks", 1, losses, made()) as trained,
    ):
        trained.resume(folder)
        trained.fit(batches(), epochs=EPOCHS)
        trained.save(folder.with_name(f"end of {len(losses)}"))
        return result(trained, losses)


def test_a_stopped_process_is_resumed_by_a_job(two: Ranks, expected: Run, tmp_path: Path) -> None:
    losses: list[float] = []
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        trainer("threads", 3, losses, made()) as trained,
    ):
        trained.fit(batches(), epochs=EPOCHS, steps=8)
        trained.save(tmp_path / "checkpoint")
    for run in two.run(resumed, tmp_path / "checkpoint"):
        run.losses[:0] = losses
        assert_same_bits(run, expected)


# -- one slice per replica, metrics, other optimizers --------------------


class Partly(nn.Module):
    """A part of it is used for some batches only, so its parameters get no gradient in others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.side = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x) + (self.side(x) if float(x[0, 0]) > 0 else 0.0)
        return scores


def rows(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [
        (torch.randn(n, 5, generator=draw), torch.randint(0, 4, (n,), generator=draw))
        for n in sizes
    ]


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
}


def small_run(
    rank: int, executor: str, optimizer: str, microbatches: int | None, folder: Path
) -> tuple[dict[str, Tensor], list[object], dict[str, float]]:
    torch.manual_seed(1)
    told: list[object] = []
    with phalanx.Trainer(
        nn.Linear(5, 4) if microbatches is None else Partly(),
        nn.functional.cross_entropy,
        OPTIMIZERS[optimizer],
        replicas=1,
        microbatches=microbatches,
        executor=executor,
        metrics={"accuracy": MulticlassAccuracy(4)},
    ) as trained:
        for done in trained.fit(rows([7, 3, 9, 4, 1]), epochs=3):
            told.append(done.train)
        trained.save(folder)
        values = {name: p.clone() for name, p in trained.module.state_dict().items()}
        for index, entries in trained.optimizer.state_dict()["state"].items():
            values |= {f"{index}.{key}": value.clone() for key, value in entries.items()}
        return values, told, trained.evaluate(rows([5, 2]))


@pytest.mark.filterwarnings("ignore:.*microbatches")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_and_metrics_are_those_of_one_process(
    three: Ranks, optimizer: str, tmp_path: Path
) -> None:
    expected = small_run(0, "threads", optimizer, 1, tmp_path / "one")
    assert expected[0].keys() > {"body.weight"}
    # With one microbatch the first rank has all, and the others only their parameters.
    for ranks_own in three.run(small_run, "ranks", optimizer, 1, tmp_path / "many"):
        for name, value in ranks_own[0].items():
            assert torch.equal(value, expected[0][name]), name
        assert ranks_own[1:] == expected[1:]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def mixed() -> list[tuple[Tensor, Tensor]]:
    """Logits behind probabilities."""
    return [
        (torch.cat([x[: len(x) // 2].softmax(1), x[len(x) // 2 :]]), y) for x, y in rows([9, 4, 7])
    ]


def last_wrong(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).nonzero().max()


def counted_run(rank: int) -> tuple[dict[str, float], ...]:
    with phalanx.Trainer(
        Scaled(),
        nn.functional.cross_entropy,
        lambda params: torch.optim.SGD(params, lr=0.0),
        replicas=1,
        microbatches=4,
        executor="ranks",
        metrics={"auroc": MulticlassAUROC(5), "last": last_wrong, "sum": SumMetric()},
    ) as trained:
        return dict(trained.fit(mixed())[0].train), trained.evaluate(mixed())


def test_every_rank_counts_whole_batches_in_order(three: Ranks) -> None:
    """Microbatches within [0, 1] would be taken as probabilities, which their batch is not."""
    auroc = MulticlassAUROC(5)
    for x, y in mixed():
        auroc.update(x, y)
    x, y = (torch.cat(each) for each in zip(*mixed(), strict=True))
    expected = {
        "auroc": pytest.approx(auroc.compute().item()),
        "last": float(last_wrong(x, y)),
        "sum": pytest.approx(x.sum().item(), rel=1e-5),
    }
    for told in three.run(counted_run):
        for found in told:
            assert {name: found[name] for name in expected} == expected


def watched_run(rank: int, executor: str, folder: Path) -> tuple[Any, ...]:
    torch.manual_seed(100 + rank)  # what rank 0 has is what counts
    ema, log = EMA(0.5), JSONL(folder / "log.jsonl")
    best = BestCheckpoint(folder / "best", keep=2)
    with phalanx.Trainer(
        nn.Linear(5, 4),
        nn.functional.cross_entropy,
        OPTIMIZERS["amsgrad"],
        replicas=1,
        microbatches=4,
        executor=executor,
        scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=1.0),
        callbacks=[best, ema, log, EarlyStopping(patience=2, min_delta=9.0)],
    ) as trained:
        trained.evaluate(rows([5]), module=ema)  # before they have rank 0's weights
        trained.fit(rows([7, 8]), epochs=9, validate=rows([6, 5]))
        averaged = [each.detach().clone() for each in ema.module.parameters()]
        found = trained.evaluate(rows([5]), module=ema), trained.evaluate(rows([5]))
        told = trained.steps, trained.optimizer.param_groups[0]["lr"], [*best.kept.items()]
        return averaged, trained.predict(rows([5, 2]), module=ema), found, told


def test_callbacks_and_predictions_are_as_in_one_process(three: Ranks, tmp_path: Path) -> None:
    averaged, predicted, *expected = watched_run(0, "threads", tmp_path / "one")
    for run in three.run(watched_run, "ranks", tmp_path / "many"):
        assert all(map(torch.equal, run[0], averaged))
        assert torch.equal(run[1], predicted)
        assert run[2] == expected[0]
        steps, rate, kept = run[3]
        assert (steps, rate) == expected[1][:2] == (6, pytest.approx(1e-5))
        assert [path.name for path, _ in kept] == [path.name for path, _ in expected[1][2]]
        assert [value for _, value in kept] == [value for _, value in expected[1][2]]
    for name in ("one", "many"):
        assert len((tmp_path / name / "log.jsonl").read_text().splitlines()) == 9
        assert len([*(tmp_path / name / "best").iterdir()]) == 2


def test_one_slice_per_replica_is_the_whole_batch_too(two: Ranks, tmp_path: Path) -> None:
    expected = small_run(0, "threads", "sgd", None, tmp_path / "one")
    for values, told, evaluated in two.run(small_run, "ranks", "sgd", None, tmp_path / "many"):
        for name, value in values.items():
            torch.testing.assert_close(value, expected[0][name], rtol=1e-5, atol=1e-6)
        assert [each.keys() for each in told] == [each.keys() for each in expected[1]]  # type: ignore[attr-defined]
        assert evaluated == pytest.approx(expected[2], rel=1e-5)


# -- what goes wrong -----------------------------------------------------


def refused(rank: int, kind: str) -> tuple[str, str, bool]:
    """Do one thing wrong at rank 1, and see that both hear of it and can go on."""
    torch.manual_seed(0)
    net = nn.Linear(5 if not (kind == "model" and rank == 1) else 6, 4)
    good = rows([8])[0]
    batch = good
    if rank == 1 and kind == "raises":
        batch = (good[0], good[1] + 4)  # targets that are no classes
    if rank == 1 and kind == "sharded":
        batch = (good[0] + 1, good[1])
    kept = [p.clone() for p in net.parameters()]
    with phalanx.Trainer(
        net, nn.functional.cross_entropy, OPTIMIZERS["sgd"], executor="ranks", microbatches=4
    ) as trained:
        try:
            trained.step(batch)
        except Exception as error:
            same = all(map(torch.equal, kept, net.parameters())) or kind == "model"
            if kind != "model":
                trained.step(good)
            return type(error).__name__, str(error), same
    return "", "", False


def test_what_one_rank_raises_all_ranks_hear(two: Ranks) -> None:
    (first, told, same), (second, own, own_same) = two.run(refused, "raises")
    assert (first, second) == (PeerError.__name__, "IndexError")
    assert "rank 1 raised IndexError" in told
    assert "Target" in own
    assert same
    assert own_same


@pytest.mark.parametrize(
    ("kind", "sentence"), [("sharded", "same batches"), ("model", "same model")]
)
def test_ranks_that_differ_are_refused_everywhere(two: Ranks, kind: str, sentence: str) -> None:
    for name, told, same in two.run(refused, kind):
        assert name == ConfigError.__name__
        assert sentence in told
        assert same


def options_apart(rank: int, option: str) -> tuple[str, str, int]:
    """Set one option of group 1 on rank 1 only, after two steps; then in the other rank, too."""
    torch.manual_seed(0)
    net = Partly()

    def make(_: object) -> torch.optim.Optimizer:
        groups = [{"params": net.body.parameters()}, {"params": net.side.parameters()}]
        if option == "number of groups" and rank == 1:
            groups = [{"params": net.parameters()}]
        if option == "params" and rank == 1:
            groups = [{"params": net.body.weight}, {"params": [net.body.bias, net.side.weight]}]
        return torch.optim.AdamW(groups, lr=0.01)

    def put(value: object) -> None:
        if option in ("lr", "betas", "weight_decay"):
            trained.optimizer.param_groups[1][option] = value

    with phalanx.Trainer(
        net, nn.functional.cross_entropy, make, executor="ranks", microbatches=4
    ) as trained:
        try:
            values = {
                "lr": torch.tensor(0.02),
                "betas": (0.8, 0.9),
                "weight_decay": np.float32(0.5),
            }
            for batch in rows([8, 8]) if option in values else ():
                trained.step(batch)
            if rank == 1:
                put(values.get(option))
            trained.step(rows([8])[0])
        except ConfigError as error:
            kept = trained.steps
            if option in values:
                put(values[option])
                trained.step(rows([8])[0])
            return type(error).__name__, str(error), kept
    return "", "", trained.steps


@pytest.mark.parametrize(
    ("option", "steps", "sentence"),
    [
        ("lr", 2, "`lr` of group 1 is 0.0199"),
        ("betas", 2, "`betas` of group 1 is [0.8, 0.9] on rank 1 and [0.9, 0.999] on rank 0"),
        ("weight_decay", 2, "`weight_decay` of group 1 is 0.5 on rank 1 and 0"),
        ("params", 0, "`params` of group 0 is 1 on rank 1 and 2 on rank 0"),
        ("number of groups", 0, "rank 1 has 1 of them and rank 0 has 2"),
    ],
)
def test_ranks_with_other_options_of_the_optimizer_are_refused_everywhere(
    two: Ranks, option: str, steps: int, sentence: str
) -> None:
    for name, told, done in two.run(options_apart, option):
        assert name == ConfigError.__name__
        assert sentence in told
        assert done == steps


# -- ranks that drift apart ---------------------------------------------------


class Noisy(torch.optim.SGD):
    """Adds noise to the weights, as Langevin dynamics does."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


def drifting(rank: int, how: str, folder: Path) -> tuple[str, str, int]:
    """Train three epochs of three batches, and save; on rank 1 only something else is done."""
    torch.manual_seed(0)
    net = Partly()
    net.register_parameter("odd", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    net.odd.requires_grad_(False)
    kind = Noisy if "noise" in how else torch.optim.SGD
    net.body.weight.requires_grad_(not (how == "frozen" and rank == 1))
    torch.manual_seed(0 if how == "equal noise" else rank)

    def act(event: object) -> None:
        if not isinstance(event, phalanx.StepDone) or event.step != 5:
            return
        if rank != 1 and "everywhere" not in how:
            return
        with torch.no_grad():
            if "frozen later" in how:
                net.body.bias.requires_grad_(False)
            elif how == "frozen weight":
                net.odd[1] += 1e-7
            elif how == "state everywhere":
                trained.optimizer.state[net.body.bias]["momentum_buffer"] = torch.ones(4)
            elif how == "callback":
                net.side.bias[2].add_(1e-6)
            elif how == "hooked":
                trained.optimizer.register_step_post_hook(lambda *_: None)

    with phalanx.Trainer(
        net,
        nn.functional.cross_entropy,
        lambda parameters: kind(parameters, lr=0.1, momentum=0.5),
        executor="ranks",
        microbatches=4,
        callbacks=[act],
    ) as trained:
        try:
            trained.fit(rows([8, 8, 8]), epochs=2 if how == "callback" else 1, steps=5)
            trained.save(folder)
            trained.fit(rows([8, 8, 8]), epochs=3)
        except Exception as error:
            return type(error).__name__, str(error), trained.steps
    return "", "", trained.steps


@pytest.mark.parametrize(
    ("how", "steps", "names", "sentence"),
    [
        ("noise", 1, {"PeerError"}, "rank 1's differ from rank 0's, first in `odd`"),
        ("callback", 5, {"PeerError"}, "rank 1's differ from rank 0's, first in `side.bias`"),
        ("frozen weight", 6, {"PeerError"}, "rank 1's differ from rank 0's, first in `odd`"),
        ("frozen", 0, {"ConfigError"}, "`body.weight` is frozen on rank 1 and not on rank 0"),
        ("frozen later", 5, {"ConfigError", "PeerError"}, "not on "),
        ("hooked", 5, {"ConfigError"}, "All ranks must step the optimizer in the same way"),
        ("nothing", 9, {""}, ""),
        ("frozen later everywhere", 9, {""}, ""),
        ("state everywhere", 9, {""}, ""),
        ("equal noise", 9, {""}, ""),
    ],
)
def test_ranks_that_drift_apart_are_told(
    two: Ranks, how: str, steps: int, names: set[str], sentence: str, tmp_path: Path
) -> None:
    told = two.run(drifting, how, tmp_path / "c")
    assert {name for name, _, _ in told} == names
    assert [done for _, _, done in told] == [steps, steps]
    for _, error, _ in told:
        assert sentence in error


def stepped(rank: int, dies: bool) -> None:
    net = nn.Linear(5, 4)
    with phalanx.Trainer(
        net, nn.functional.cross_entropy, OPTIMIZERS["sgd"], executor="ranks", microbatches=4
    ) as trained:
        trained.step(rows([8])[0])
        if rank == 1 and dies:
            os._exit(3)
        trained.step(rows([8])[0])


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_rank_that_dies_is_told_to_the_others(backend: str) -> None:
    with Ranks(2, backend=backend) as ranks:
        ranks.run(stepped, False)
        with pytest.raises(AssertionError, match="PeerLost"):
            ranks.run(stepped, True)


def test_without_a_group_it_is_refused() -> None:
    net = nn.Linear(5, 4)
    with (
        phalanx.Trainer(
            net, nn.functional.cross_entropy, OPTIMIZERS["sgd"], executor="ranks"
        ) as trained,
        pytest.raises(StateError, match="process group"),
    ):
        trained.step(rows([8])[0])
