"""The trainer's gradient, loss and metrics are those of the whole batch, however it was cut.

Also: what optimizers, parameter groups, schedulers and clipping do in it is what they do in plain
PyTorch. Comparisons in float64 where the order of sums may differ, so that a wrong weight (an error
of per cents) cannot hide in the tolerance.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

import phalanx
from phalanx.callbacks import EpochDone, StepDone
from tests.zoo import (
    CLASSES,
    CNN_NORM,
    GPT,
    MLP,
    Loader,
    adamw,
    assert_close,
    assert_same_bits,
    batches_of,
    cnn_norm,
    gpt,
    mlp,
    plain_sgd,
    plain_steps,
    sgd,
    state_of,
    token_batch,
    token_loss,
    twin_of,
    vector_batch,
)

pytestmark = pytest.mark.promise("whole-batch-gradients")

F64 = torch.float64
BY_NIGHT = pytest.param(2, marks=pytest.mark.night)  # replicas: between the two that tell most


def gradient_by_trainer(net: nn.Module, loss: Any, batch: Any, **options: Any) -> dict[str, Tensor]:
    """Return what one step of gradient descent at rate 1 takes away: the gradient."""
    with phalanx.Trainer(
        twin_of(net), loss, plain_sgd, **{"microbatches": None, **options}
    ) as trainer:
        before = state_of(trainer.module)
        trainer.step(batch)
        after = state_of(trainer.module)
    return {name: before[name] - after[name] for name, _ in net.named_parameters()}


def gradient_by_torch(net: nn.Module, loss: Any, batch: tuple[Any, Any]) -> dict[str, Tensor]:
    twin = twin_of(net)
    loss(twin(batch[0]), batch[1]).backward()
    return {name: p.grad for name, p in twin.named_parameters()}


# --- the gradient of the whole batch --------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "microbatches"), [(7, 4), (7, 3), (9, 8), (15, 4), (64, 7), (3, 3), (2, 3)]
)
@pytest.mark.parametrize("replicas", [1, BY_NIGHT, 3])
def test_microbatches_of_unequal_size_count_by_their_rows(
    rows: int, microbatches: int, replicas: int
) -> None:
    batch = vector_batch(rows, F64)
    net = mlp(F64)
    ours = gradient_by_trainer(net, MLP.loss, batch, replicas=replicas, microbatches=microbatches)
    assert_close(ours, gradient_by_torch(net, MLP.loss, batch), F64)


@pytest.mark.parametrize("workloads", sorted(set(itertools.permutations([3.0, 1.0, 0.0]))))
@pytest.mark.parametrize("microbatches", [None, 5])
def test_the_order_of_workloads_does_not_matter(
    workloads: tuple[float, ...], microbatches: int
) -> None:
    batch = vector_batch(15, F64)
    net = mlp(F64)
    ours = gradient_by_trainer(
        net, MLP.loss, batch, replicas=3, workloads=workloads, microbatches=microbatches
    )
    assert_close(ours, gradient_by_torch(net, MLP.loss, batch), F64)


@pytest.mark.parametrize("workloads", [None, [1, 1, 1], [5, 1, 1], [0, 0, 1]])
@pytest.mark.parametrize("rows", [1, 2])
def test_replicas_without_rows_add_nothing(rows: int, workloads: list[float] | None) -> None:
    batch = vector_batch(rows, F64)
    net = mlp(F64)
    with phalanx.Trainer(
        twin_of(net), MLP.loss, plain_sgd, microbatches=None, replicas=3, workloads=workloads
    ) as trainer:
        before = state_of(trainer.module)
        event = trainer.step(batch)
        ours = {name: before[name] - value for name, value in state_of(trainer.module).items()}
    assert_close(ours, gradient_by_torch(net, MLP.loss, batch), F64)
    assert sum(event.shares) == event.samples == rows
    assert event.loss == pytest.approx(MLP.loss(net(batch[0]), batch[1]).item(), rel=1e-12)


def masked_tokens(rows: int) -> tuple[Tensor, Tensor]:
    """Return a batch whose rows count 0 to 5 tokens each; the first third count none at all."""
    tokens, targets = token_batch(rows)
    targets = targets.clone()
    for row in range(rows):
        kept = 0 if row < rows // 3 else 1 + row % targets.shape[1]
        targets[row, kept:] = -100
    return tokens, targets


def count_tokens(microbatch: tuple[Tensor, Tensor]) -> int:
    return int((microbatch[1] != -100).sum())


@pytest.mark.parametrize("microbatches", [None, 3, 4, 9])
@pytest.mark.parametrize("replicas", [1, BY_NIGHT, 3])
def test_masked_tokens_count_by_what_the_loss_counts(
    microbatches: int | None, replicas: int
) -> None:
    """A microbatch without a token that counts has a loss of nan; it stands for nothing."""
    batch = masked_tokens(9)
    net = gpt(F64)
    with phalanx.Trainer(
        twin_of(net),
        token_loss,
        plain_sgd,
        replicas=replicas,
        microbatches=microbatches,
        weight=count_tokens,
    ) as trainer:
        before = state_of(trainer.module)
        event = trainer.step(batch)
        after = state_of(trainer.module)
    ours = {name: before[name] - after[name] for name in before}
    assert_close(ours, gradient_by_torch(net, token_loss, batch), F64)
    assert event.loss == pytest.approx(token_loss(net(batch[0]), batch[1]).item(), rel=1e-12)
    assert event.samples == 9


def test_without_the_weight_masked_tokens_would_come_out_wrong() -> None:
    """The control of the test above: rows and tokens do differ here."""
    tokens, targets = masked_tokens(9)
    batch = tokens[3:], targets[3:]
    net = gpt(F64)
    ours = gradient_by_trainer(net, token_loss, batch, replicas=2, microbatches=3)
    theirs = gradient_by_torch(net, token_loss, batch)
    assert (ours["head.weight"] - theirs["head.weight"]).abs().max() > 1e-4


def test_weights_may_be_fractions() -> None:
    """Weighted samples: the loss is a mean weighted by what the target says."""

    def loss(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        each = F.cross_entropy(outputs, targets["classes"], reduction="none")
        return (each * targets["weights"]).sum() / targets["weights"].sum()

    x, classes = vector_batch(9, F64)
    batch = (x, {"classes": classes, "weights": torch.linspace(0.01, 3.7, 9, dtype=F64)})
    net = mlp(F64)
    ours = gradient_by_trainer(
        net,
        loss,
        batch,
        replicas=2,
        microbatches=4,
        weight=lambda part: part[1]["weights"].sum().item(),
    )
    assert_close(ours, gradient_by_torch(net, loss, batch), F64)


# --- epochs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_an_epoch_with_a_ragged_last_batch_equals_the_plain_loop(replicas: int) -> None:
    batches = [vector_batch(rows, F64, seed=rows) for rows in (8, 8, 7, 1)]
    net = mlp(F64)
    twin = twin_of(net)
    losses = plain_steps(twin, MLP.loss, adamw, batches * 3)
    seen: list[Any] = []
    with phalanx.Trainer(
        net, MLP.loss, adamw, microbatches=None, replicas=replicas, callbacks=[seen.append]
    ) as trainer:
        epochs = trainer.fit(Loader(batches), epochs=3)
        assert_close(state_of(trainer.module), state_of(twin), F64)
        assert (trainer.steps, trainer.epochs) == (12, 3)
    steps = [event for event in seen if isinstance(event, StepDone)]
    assert [event.step for event in steps] == list(range(1, 13))
    assert [(event.epoch, event.batch) for event in steps] == list(
        itertools.product(range(1, 4), range(1, 5))
    )
    assert [event.samples for event in steps] == [8, 8, 7, 1] * 3
    assert [event.loss for event in steps] == pytest.approx(losses, rel=1e-10)
    assert [event for event in seen if isinstance(event, EpochDone)] == epochs
    assert [(done.epoch, done.steps, done.samples) for done in epochs] == [
        (1, 4, 24),
        (2, 8, 24),
        (3, 12, 24),
    ]
    # The epoch's loss is the mean over samples, not over batches.
    expected = [
        sum(loss * rows for loss, rows in zip(losses[i : i + 4], (8, 8, 7, 1), strict=True)) / 24
        for i in (0, 4, 8)
    ]
    assert [done.train["loss"] for done in epochs] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_last_batch_may_have_fewer_rows_than_there_are_microbatches(replicas: int) -> None:
    batches = [vector_batch(rows, F64, seed=rows) for rows in (8, 7, 3, 1)]
    net = mlp(F64)
    twin = twin_of(net)
    plain_steps(twin, MLP.loss, sgd, batches)
    with phalanx.Trainer(net, MLP.loss, sgd, replicas=replicas, microbatches=4) as trainer:
        trainer.fit(Loader(batches))
        assert_close(state_of(trainer.module), state_of(twin), F64)


def test_a_step_by_hand_takes_fewer_rows_than_there_are_microbatches() -> None:
    batches = [vector_batch(rows, F64, seed=rows) for rows in (3, 1)]
    net = mlp(F64)
    twin = twin_of(net)
    plain_steps(twin, MLP.loss, sgd, batches)
    with phalanx.Trainer(net, MLP.loss, sgd, replicas=2, microbatches=4) as trainer:
        for batch in batches:
            trainer.step(batch)
        assert_close(state_of(trainer.module), state_of(twin), F64)


def test_steps_by_hand_take_nothing_from_a_loader() -> None:
    """A fit goes on behind the last batch of its own epoch; a step by hand was none of them."""
    batches = batches_of(MLP, 8, F64, 3)
    net = mlp(F64)
    twin = twin_of(net)
    plain_steps(twin, MLP.loss, sgd, [batches[2], *batches])
    with phalanx.Trainer(net, MLP.loss, sgd, microbatches=None, replicas=2) as trainer:
        trainer.step(batches[2])
        (done,) = trainer.fit(Loader(batches))
        assert (trainer.steps, done.samples) == (4, 24)
        assert_close(state_of(trainer.module), state_of(twin), F64)


def test_fit_by_steps_ends_in_the_middle_of_an_epoch() -> None:
    batches = batches_of(MLP, 8, F64, 4)
    net = mlp(F64)
    twin = twin_of(net)
    plain_steps(twin, MLP.loss, sgd, [*batches, *batches[:2]])
    with phalanx.Trainer(net, MLP.loss, sgd, microbatches=None, replicas=2) as trainer:
        trainer.fit(Loader(batches), steps=6)
        assert trainer.steps == 6
        assert_close(state_of(trainer.module), state_of(twin), F64)


# --- forward= -------------------------------------------------------------------------------------


class TestForward:
    def test_it_may_return_the_loss_alone(self) -> None:
        def forward(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return MLP.loss(module(batch["x"]), batch["y"])

        x, y = vector_batch(9, F64)
        net = mlp(F64)
        ours = gradient_by_trainer(
            net, None, {"x": x, "y": y}, forward=forward, replicas=2, microbatches=4
        )
        assert_close(ours, gradient_by_torch(net, MLP.loss, (x, y)), F64)

    def test_it_may_return_loss_and_outputs(self) -> None:
        def forward(module: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            outputs = module(batch[0])
            return MLP.loss(outputs, batch[1]), outputs

        batch = vector_batch(9, F64)
        net = mlp(F64)
        ours = gradient_by_trainer(net, None, batch, forward=forward, replicas=3)
        assert_close(ours, gradient_by_torch(net, MLP.loss, batch), F64)

    def test_its_outputs_reach_the_metrics(self) -> None:
        def forward(module: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            outputs = module(batch[0])
            return MLP.loss(outputs, batch[1]), outputs

        batches = [vector_batch(rows, F64, seed=rows) for rows in (9, 7, 2)]
        net = mlp(F64)
        with phalanx.Trainer(
            net, None, sgd, forward=forward, microbatches=None, replicas=2, metrics=exact_metrics()
        ) as trainer:
            found = trainer.evaluate(Loader(batches))
        assert found == pytest.approx(plain_evaluation(net, batches), rel=1e-6)

    def test_it_is_counted_by_the_given_weight(self) -> None:
        def forward(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return token_loss(module(batch[0]), batch[1])

        batch = masked_tokens(9)
        net = gpt(F64)
        ours = gradient_by_trainer(
            net, None, batch, forward=forward, weight=count_tokens, replicas=2, microbatches=5
        )
        assert_close(ours, gradient_by_torch(net, token_loss, batch), F64)


# --- evaluation -----------------------------------------------------------------------------------


def exact_metrics() -> dict[str, Any]:
    return {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "f1": MulticlassF1Score(CLASSES, average="macro"),
    }


def plain_evaluation(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Evaluate all rows at once, by plain PyTorch and torchmetrics."""
    twin = twin_of(net).eval()
    inputs = torch.cat([batch[0] for batch in batches])
    targets = torch.cat([batch[1] for batch in batches])
    with torch.no_grad():
        outputs = twin(inputs)
        found = {"loss": F.cross_entropy(outputs, targets).item()}
    for name, metric in exact_metrics().items():
        found[name] = metric(outputs, targets).item()
    return found


@pytest.mark.parametrize("replicas", [1, BY_NIGHT, 3])
@pytest.mark.parametrize("options", [{}, {"workloads": "unequal"}, {"microbatches": 3}], ids=str)
def test_evaluation_equals_plain_pytorch_over_unequal_slices(
    replicas: int, options: dict[str, Any]
) -> None:
    """A mean over batches, or macro F1 per replica, would be off by per cents here."""
    options = {k: list(range(1, replicas + 1)) if v == "unequal" else v for k, v in options.items()}
    batches = [vector_batch(rows, F64, seed=rows) for rows in (15, 7, 2)]
    net = mlp(F64)
    expected = plain_evaluation(net, batches)
    with phalanx.Trainer(
        net,
        MLP.loss,
        sgd,
        replicas=replicas,
        metrics=exact_metrics(),
        **{"microbatches": None, **options},
    ) as trainer:
        for _ in range(2):  # the second evaluation starts from nothing again
            found = trainer.evaluate(Loader(batches))
            assert found == pytest.approx(expected, rel=1e-6)  # torchmetrics counts in float32


def test_evaluation_changes_nothing() -> None:
    batches = [CNN_NORM.batch(rows, F64, seed=rows) for rows in (9, 4)]
    net = cnn_norm(F64)
    with phalanx.Trainer(
        net, CNN_NORM.loss, sgd, microbatches=None, replicas=2, metrics=exact_metrics()
    ) as trainer:
        trainer.step(batches[0])
        before = state_of(trainer.module)
        found = trainer.evaluate(Loader(batches))
        assert found["loss"] == pytest.approx(
            plain_evaluation(trainer.module, batches)["loss"], rel=1e-9
        )
        assert_same_bits(state_of(trainer.module), before)
        assert trainer.steps == 1
        assert trainer.module.training


def test_evaluation_of_masked_tokens_counts_tokens() -> None:
    batches = [masked_tokens(rows) for rows in (9, 6, 1)]
    net = gpt(F64)
    inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
    expected = token_loss(net(inputs), targets).item()
    with phalanx.Trainer(
        net, token_loss, sgd, microbatches=None, replicas=2, weight=count_tokens
    ) as trainer:
        assert trainer.evaluate(Loader(batches))["loss"] == pytest.approx(expected, rel=1e-10)


def test_fit_reports_training_and_validation_metrics() -> None:
    batches = [vector_batch(rows, F64, seed=rows) for rows in (9, 7)]
    held_out = [vector_batch(rows, F64, seed=50 + rows) for rows in (15, 2)]
    net = mlp(F64)
    with phalanx.Trainer(
        net, MLP.loss, sgd, microbatches=None, replicas=2, metrics=exact_metrics()
    ) as trainer:
        (done,) = trainer.fit(Loader(batches), epochs=1, validate=Loader(held_out))
        expected = plain_evaluation(trainer.module, held_out)
    assert set(done.train) == set(done.validation or {}) == {"loss", "accuracy", "f1"}
    assert dict(done.validation or {}) == pytest.approx(expected, rel=1e-6)


# --- optimizers -----------------------------------------------------------------------------------

Factory = Callable[[Iterable[Any]], torch.optim.Optimizer]


def grouped(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Matrices decay; vectors do not, and learn faster."""
    listed = list(params)
    return torch.optim.AdamW(
        [
            {"params": [p for p in listed if p.dim() > 1], "weight_decay": 0.2},
            {"params": [p for p in listed if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-3},
        ],
        lr=1e-3,
    )


def interleaved(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Groups whose parameters do not lie side by side, in another order than the module's."""
    listed = list(params)
    return torch.optim.SGD(
        [
            {"params": listed[::-2], "momentum": 0.9},
            {"params": listed[-2::-2], "momentum": 0.5, "nesterov": True, "lr": 0.02},
        ],
        lr=0.05,
    )


OPTIM = torch.optim
FACTORIES: dict[str, Factory] = {  # more of them, to the bit, in test_optimizers.py
    "sgd-dampening": lambda params: OPTIM.SGD(params, lr=0.05, momentum=0.9, dampening=0.3),
    "sgd-maximize": lambda params: OPTIM.SGD(params, lr=0.01, maximize=True),
    "groups": grouped,
    "groups-interleaved": interleaved,
    "nadam": lambda params: OPTIM.NAdam(params, lr=1e-3),
    "adafactor": lambda params: OPTIM.Adafactor(params, lr=0.01),
}
EVERY_FACTORY = pytest.mark.parametrize("factory", list(FACTORIES.values()), ids=list(FACTORIES))
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: OPTIM.lr_scheduler.StepLR(optimizer, 3, 0.5),
    "cosine": lambda optimizer: OPTIM.lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "one-cycle": lambda optimizer: OPTIM.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=12),
    "lambda": lambda optimizer: OPTIM.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}
STEPS = 10


@EVERY_FACTORY
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.night), 3])
def test_ten_steps_of_any_optimizer_equal_plain_torchs(factory: Factory, replicas: int) -> None:
    net = gpt(F64)
    twin = twin_of(net)
    batches = batches_of(GPT, 7, F64, STEPS)
    plain_steps(twin, GPT.loss, factory, batches)
    with phalanx.Trainer(net, GPT.loss, factory, microbatches=None, replicas=replicas) as trainer:
        for batch in batches:
            trainer.step(batch)
        # Ratios of small numbers (Adam, Rprop's signs) cost digits; a wrong rule would show at
        # 1e-4.
        assert_close(state_of(trainer.module), state_of(twin), F64, times=100)


@pytest.mark.parametrize("scheduler", list(SCHEDULERS.values()), ids=list(SCHEDULERS))
@pytest.mark.parametrize(
    "factory", [sgd, grouped, FACTORIES["nadam"]], ids=["sgd", "groups", "nadam"]
)
def test_schedulers_step_once_per_optimizer_step(factory: Factory, scheduler: Any) -> None:
    net = mlp(F64)
    twin = twin_of(net)
    batches = batches_of(MLP, 9, F64, STEPS)
    plain_steps(twin, MLP.loss, factory, batches, scheduler=scheduler)
    with phalanx.Trainer(
        net,
        MLP.loss,
        factory,
        microbatches=None,
        replicas=2,
        scheduler=scheduler,
        scheduler_interval="step",
    ) as trainer:
        for batch in batches:
            trainer.step(batch)
        assert_close(state_of(trainer.module), state_of(twin), F64, times=10)
        reference = factory(mlp(F64).parameters())
        schedule = scheduler(reference)
        for _ in batches:
            reference.step()
            schedule.step()
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        assert rates == pytest.approx([group["lr"] for group in reference.param_groups], rel=1e-12)


@pytest.mark.parametrize("clip_norm", [0.01, pytest.param(0.5, marks=pytest.mark.night), 1e6])
@pytest.mark.parametrize(
    "factory",
    [plain_sgd, adamw, grouped, FACTORIES["adafactor"]],
    ids=["sgd", "adamw", "groups", "adafactor"],
)
@pytest.mark.parametrize("microbatches", [None, 4])
def test_clipping_by_global_norm_equals_clip_grad_norm(
    factory: Factory, clip_norm: float, microbatches: int | None
) -> None:
    net = mlp(F64)
    twin = twin_of(net)
    batches = batches_of(MLP, 9, F64, 3)
    plain_steps(twin, MLP.loss, factory, batches, clip_norm=clip_norm)
    with phalanx.Trainer(
        net, MLP.loss, factory, replicas=2, microbatches=microbatches, clip_norm=clip_norm
    ) as trainer:
        for batch in batches:
            trainer.step(batch)
        assert_close(state_of(trainer.module), state_of(twin), F64, times=10)


@pytest.mark.parametrize(("replicas", "microbatches"), [(1, None), (2, None), (2, 4)])
def test_a_step_tells_the_gradients_norm_before_clipping(
    replicas: int, microbatches: int | None
) -> None:
    net, (batch,) = mlp(F64), batches_of(MLP, 9, F64, 1)
    twin = twin_of(net)
    MLP.loss(twin(batch[0]), batch[1]).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters() if p.grad is not None])
    formation: dict[str, Any] = {"replicas": replicas, "microbatches": microbatches}
    with phalanx.Trainer(
        net, MLP.loss, plain_sgd, clip_norm=1e-3, **{"microbatches": None, **formation}
    ) as trainer:
        assert trainer.step(batch).grad_norm == pytest.approx(norm.item(), rel=1e-12)
    with phalanx.Trainer(
        net, MLP.loss, plain_sgd, **{"microbatches": None, **formation}
    ) as trainer:
        assert trainer.step(batch).grad_norm is None


def rate_in_a_tensor(params: Iterable[Any]) -> torch.optim.Optimizer:
    return OPTIM.SGD(params, lr=torch.tensor(0.125))


@pytest.mark.parametrize("executor", ["inline", "threads", "processes"])
@pytest.mark.parametrize(
    "factory", [grouped, FACTORIES["nadam"], rate_in_a_tensor], ids=["groups", "nadam", "tensor"]
)
def test_a_step_tells_the_learning_rates_it_was_made_with(executor: str, factory: Factory) -> None:
    batches = batches_of(MLP, 9, F64, STEPS)
    reference = factory(mlp(F64).parameters())
    schedule = SCHEDULERS["step"](reference)
    expected = []
    for _ in batches:
        expected.append(tuple(float(group["lr"]) for group in reference.param_groups))
        reference.step()
        schedule.step()
    assert len({*expected}) > 2
    replicas = 1 if executor == "inline" else 2
    with phalanx.Trainer(
        mlp(F64),
        MLP.loss,
        factory,
        microbatches=None,
        replicas=replicas,
        executor=executor,
        scheduler=SCHEDULERS["step"],
        scheduler_interval="step",
    ) as trainer:
        assert [trainer.step(batch).learning_rates for batch in batches] == expected


@EVERY_FACTORY
def test_plain_torch_reads_the_optimizers_state_and_goes_on_identically(factory: Factory) -> None:
    batches = batches_of(GPT, 9, torch.float32, 4)
    with phalanx.Trainer(gpt(), GPT.loss, factory, microbatches=None, replicas=2) as trainer:
        for batch in batches[:2]:
            trainer.step(batch)
        twin = gpt(seed=3)
        twin.load_state_dict(trainer.module.state_dict())
        optimizer = factory(twin.parameters())
        # A copy, as a file would be: torch's optimizers take tensors over as they are.
        optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
        for batch in batches[2:]:
            trainer.step(batch)
            optimizer.zero_grad()
            GPT.loss(twin(batch[0]), batch[1]).backward()
            optimizer.step()
        torch.testing.assert_close(state_of(trainer.module), state_of(twin), rtol=1e-6, atol=1e-6)


def test_the_module_outlives_the_trainer() -> None:
    net = mlp(F64)
    with phalanx.Trainer(net, MLP.loss, sgd, microbatches=None, replicas=2) as trainer:
        trainer.step(vector_batch(9, F64))
        kept = state_of(trainer.module)
    assert_same_bits(state_of(trainer.module), kept)
    MLP.loss(trainer.module(vector_batch(9, F64)[0]), vector_batch(9, F64)[1]).backward()
    plain_steps(trainer.module, MLP.loss, sgd, [vector_batch(9, F64)])


def test_weights_written_between_steps_are_what_the_next_step_starts_from() -> None:
    batch = vector_batch(9, F64)
    net = mlp(F64)
    twin = mlp(F64, seed=6)
    with phalanx.Trainer(net, MLP.loss, plain_sgd, microbatches=None, replicas=2) as trainer:
        trainer.step(batch)
        trainer.module.load_state_dict(twin.state_dict())
        trainer.step(batch)
        plain_steps(twin, MLP.loss, plain_sgd, [batch])
        assert_close(state_of(trainer.module), state_of(twin), F64)
