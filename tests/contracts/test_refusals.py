"""A refused call changes nothing: one table of calls that cannot work, for everything public.

Each row says of which subject, what is called, and the words of the error. The test compares all
state of the subject before and after, and then uses the subject once more.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx import DataParallel, Layout, ModelParallel, Trainer, tables
from phalanx.errors import CheckpointError, ConfigError, PhalanxError, StateError, UnsupportedError
from tests.contracts import groups
from tests.zoo import MLP, adamw, assert_same_bits, gradients_of, mlp, sgd, state_of, vector_batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.promise("refused-calls-change-nothing", "limits-say-so", "losses-are-means"),
]

NAN = float("nan")
X = torch.linspace(-1, 1, 56).reshape(8, 7)
LINEAR = nn.Linear(7, 3)  # made here: making one draws


@dataclass(frozen=True)
class Subject:
    """Something to be called: how it is opened, its whole state, and a call that works."""

    name: str
    open: Callable[..., contextlib.AbstractContextManager[Any]]
    state: Callable[[Any], Any]
    use: Callable[[Any], object]


@dataclass(frozen=True)
class Row:
    subject: Subject
    call: Callable[[Any], object]
    match: str
    error: type[PhalanxError] = ConfigError
    options: dict[str, Any] = field(default_factory=dict)


def draws() -> list[Any]:
    """Return the states of the process's generators."""
    return [torch.get_rng_state(), repr(random.getstate()), repr(np.random.get_state())]


def threads() -> set[str]:
    """Return the names of the threads, but for those that a first call starts for good."""
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if not name.startswith("phalanx-replica-")}


def copied(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, tree)


# --- subjects -------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_trainer(**options: Any) -> Iterator[Trainer]:
    known: dict[str, Any] = {"loss": MLP.loss, "replicas": 2, "microbatches": 4}
    if "forward" in options:
        known["loss"] = None
    net = nn.Sequential(nn.BatchNorm1d(7), mlp())  # whose statistics are written first
    with Trainer(net, optimizer=adamw, **{**known, **options}) as trainer:
        if not options:
            trainer.step(vector_batch(8))
        yield trainer


def state_of_trainer(trainer: Trainer) -> Any:
    return {
        "module": state_of(trainer.module),
        "optimizer": copied(trainer.optimizer.state_dict()),
        "progress": (trainer.steps, trainer.epochs),
        "training": [each.training for each in trainer.module.modules()],
    }


TRAINER = Subject(
    "trainer",
    open_trainer,
    state_of_trainer,
    lambda trainer: trainer.step(vector_batch(9)) if trainer.steps else None,
)


class Sides(nn.Module):
    """Counts its calls in a buffer, and returns what ``kind`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(7, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, mask: Tensor | None = None, kind: str = "rows") -> Any:
        self.seen += 1
        y = self.left(x)
        odd = {"y": y} if len(x) == 3 else [y]
        lost = {"y": y[0]}
        words = {"y": "word"}
        table = {"y": y, "loss": y.sum()}
        kinds = {"rows": y, "odd": odd, "lost": lost, "words": words, "table": table}
        return kinds[kind]


@contextlib.contextmanager
def open_container(**options: Any) -> Iterator[DataParallel]:
    with DataParallel(Sides(), devices=["cpu"] * 3, **options) as model:
        model.forward_parts([X, None, None])
        yield model


CONTAINER = Subject(
    "container",
    open_container,
    lambda model: [state_of(model), gradients_of(model)],
    lambda model: model.forward_parts([X, None, None]),
)


class Copies(phalanx.AbstractParallel):
    """Gives ``num_parts`` columns the whole input."""

    num_parts = 2

    def distribute(self, inputs: Any) -> list[Any]:
        return [inputs] * self.num_parts


@contextlib.contextmanager
def open_columns(second: nn.Module | None = None) -> Iterator[Copies]:
    model = Copies()
    model.add(nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 4)), "cpu")
    model.add(second or nn.Linear(7, 4), "cpu")
    model.merge = list
    with model:
        model(X)
        del model.merge
        yield model


def use_columns(model: Copies) -> None:
    model.num_parts, model.merge = 2, list
    assert len(model(X)) == 2


COLUMNS = Subject(
    "columns", open_columns, lambda model: [state_of(model), gradients_of(model)], use_columns
)


FIVE, LABELS = torch.ones(7, 5, dtype=torch.float64), torch.ones(7, dtype=torch.int64)
NET, DATA = groups.Net(), [groups.desc("data", 7, 5)]


@contextlib.contextmanager
def open_group() -> Iterator[Any]:
    data, label = groups.desc("data", 7, 5), groups.labels_desc(7)
    with groups.group_of(groups.Loss(), data, label_shapes=[label]) as group:
        group.forward(phalanx.DataBatch(FIVE, LABELS))
        group.backward()
        yield group


GROUP = Subject(
    "group",
    open_group,
    lambda group: [state_of(group.module), gradients_of(group.module), group.slices],
    lambda group: group.forward(phalanx.DataBatch(FIVE, LABELS)),
)


@contextlib.contextmanager
def open_table(kind: str = "matrix") -> Iterator[Any]:
    with tables.join() as world:
        if kind == "keys":
            table: Any = world.keys(3, name="embed", updater="adam")
            table.add(torch.ones(1, 3), rows=[2])
        else:
            table = world.matrix(5, 3, name="embed", init=torch.ones(5, 3), updater="adam")
        table.world = world
        yield table


TABLE = Subject(
    "table",
    open_table,
    lambda table: [table.get([2, 4])],
    lambda table: table.add(torch.ones(1, 3), rows=[1]),
)


@contextlib.contextmanager
def open_module() -> Iterator[nn.Module]:
    yield mlp()


MODULE = Subject(
    "module",
    open_module,
    lambda net: [state_of(net), [p.data_ptr() for p in net.parameters()]],
    lambda net: net(X),
)


@contextlib.contextmanager
def open_nothing() -> Iterator[None]:
    yield


NOTHING = Subject("nothing", open_nothing, lambda _: None, lambda _: None)


# --- rows -----------------------------------------------------------------------------------------


def making_trainer(match: str, **options: Any) -> Row:
    """Return the row of a construction that is refused."""
    known = {"loss": MLP.loss, "optimizer": sgd, "replicas": 2}
    return Row(MODULE, lambda net: Trainer(**{"module": net, **known, **options}), match)


def making_container(match: str, **options: Any) -> Row:
    known = {"module": Sides(), "devices": 3}
    return Row(NOTHING, lambda _: DataParallel(**{**known, **options}), match)


def summed(outputs: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    return F.cross_entropy(outputs, targets, reduction=reduction)


def unreduced(outputs: Tensor, targets: Tensor, *, reduction: str = "none") -> Tensor:
    return F.cross_entropy(outputs, targets, reduction=reduction)


def loss_of(value: float) -> Callable[..., Tensor]:
    """Return a loss that becomes ``value`` where a target is negative."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        mean = MLP.loss(outputs, targets.clamp(min=0))
        return mean * value if bool((targets < 0).any()) else mean

    return loss


def with_target(place: int) -> tuple[Tensor, Tensor]:
    x, y = vector_batch(8)
    y[place] = -1
    return x, y


def stepping(batch: Any, match: str, **options: Any) -> Row:
    return Row(TRAINER, lambda trainer: trainer.step(batch), match, options=options)


def train_hooked(net: nn.Module) -> None:
    handle = next(net.parameters()).register_hook(lambda gradient: gradient * 0)
    try:
        Trainer(net, MLP.loss, sgd)
    finally:
        handle.remove()


def compiled_in_place() -> nn.Module:
    module = nn.Sequential(nn.Tanh(), copy.deepcopy(LINEAR))
    module[1].compile(backend="eager")
    return module


NOT_ORDINARY: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: torch.jit.script(LINEAR), "`module` must be an ordinary module .* TorchScript"),
    (lambda: torch.jit.trace(LINEAR, X), "`module` must be an ordinary module .* TorchScript"),
    (lambda: nn.Sequential(torch.jit.script(LINEAR)), "Module `0` must be an ordinary module"),
    (compiled_in_place, "Module `1` must be compiled by `torch.comp"),
]


def training(make: Callable[[], nn.Module], executor: str) -> Callable[[Any], object]:
    def call(_: None) -> None:
        with Trainer(make(), F.mse_loss, sgd, executor=executor, replicas=1) as trainer:
            trainer.step((X, torch.zeros(8, 3)))

    return call


def calling(make: Callable[[], nn.Module]) -> Callable[[Any], object]:
    def call(_: None) -> None:
        with DataParallel(make(), devices=2) as model:
            model(X)

    return call


def join_unequal(_: None) -> None:
    with Trainer(nn.PReLU(), MLP.loss, sgd, replicas=1, microbatches=1) as trainer:
        trainer.predict([torch.ones(4, length) for length in (3, 5)])


class Output:
    """An output with its loss inside, as models of Hugging Face return it."""

    loss = torch.ones(())


ROWS: list[Row] = [
    making_trainer("`loss` must be a function, but is 3", loss=3),
    making_trainer("`loss`", loss=None),
    making_trainer("`loss` must be an object, but is a class", loss=nn.MSELoss),
    making_trainer("`weight` must be a function, but is 2.0", weight=2.0),
    making_trainer("`metrics` must have other names than 'loss'", metrics={"loss": len}),
    making_trainer("`weight` must hold numbers, but is not init", module=nn.LazyLinear(3)),
    making_trainer("`forward` must be a function, but is 3", loss=None, forward=3),
    making_trainer("`optimizer`", optimizer=nn.CrossEntropyLoss()),
    making_trainer("`optimizer` must .* but is or returned None", optimizer=None),
    making_trainer("`module` must have at least one parameter", module=nn.Tanh()),
    making_trainer("`microbatches` must be a whole number, but is '2'", microbatches="2"),
    making_trainer("`microbatches` must be a whole number, but is True", microbatches=True),
    making_trainer("`microbatches` must be at least 1.*, but is 0", microbatches=0),
    making_trainer("`clip_norm` must be a number, but is '1'", clip_norm="1"),
    making_trainer(r"`clip_norm` must .*, but is -1\.0", clip_norm=-1.0),
    making_trainer("`callbacks` must be a list", callbacks=print),
    making_trainer("`seed` must be a whole number, but is 'a'", seed="a"),
    making_trainer("`replicas` must be at least 1, but is 0", replicas=0),
    making_trainer("for microbatches=None.*'auto'", microbatches=None, replicas="auto"),
    making_trainer(r"`replicas` must .*but is \[\]", replicas=[]),
    making_trainer(r"`replicas` must be at most .* microbatches \(4\), but are 5", replicas=5),
    making_trainer("`replicas` must .*'gpu'", replicas=["gpu"]),
    making_trainer("`replicas` must be a number of replicas.*'cpu,cpu'", replicas="cpu,cpu"),
    making_trainer("`replicas` must be a number of replicas, or a list", replicas=2.5),
    making_trainer("`executor` must be one of .*, but is 'gremlins'", executor="gremlins"),
    making_trainer("`layout` must be a `Layout`, but is 3", layout=3),
    making_trainer(r"`metrics` must map names to .*Give each a name", metrics=[len]),
    making_trainer(r"`callbacks\[1\]` must be a function, but is 3", callbacks=[len, 3]),
    making_container(r"`devices` must .*gpu-of-my-dreams", devices=["cpu", "gpu-of-my-dreams"]),
    making_container(r"`devices` must .*meta:3x", devices=["meta:3x"]),
    making_container(r"`devices` must .*but is \[\]", devices=[]),
    making_container(r"Give 2, or \['cpu', 'cpu'\]", devices="cpu,cpu"),
    making_container("`devices` must be a number of replicas, or a list", devices={"cpu"}),
    making_container("`workloads` must .*, but ", workloads=[0, 0, 0]),
    making_container("`workloads` must be left out", workloads=[1, 2, 3], microbatches=4),
    making_container("`output` must hold rules .*, but holds 'median'", output="median"),
    making_container("`output` must hold rules .*, but holds", output={"y": "cat(x)"}),
    making_container("`buffers` must be 'mean' or 'first', but is 'sum'", buffers="sum"),
    making_container("`layout` must be a `Layout`", layout={"mask": None}),
    making_container("`module` must be", module=3),
    # batches
    stepping((X, torch.zeros(7, dtype=torch.long)), r"must have 8 rows along dim 0 .*, but has 7"),
    stepping(vector_batch(0), "must .*, but "),
    stepping(X, "[Bb]atch`? must .*, but "),
    stepping((X,), "[Bb]atch`? must .*, but "),
    stepping(None, "[Bb]atch`? must .*, but "),
    stepping((X.clone().requires_grad_() * 2, vector_batch(8)[1]), "requires a gradient"),
    # losses
    *(
        making_trainer(f"`loss` must have reduction='mean', but has '{told}'", loss=loss)
        for told in ("sum", "none")
        for loss in (
            nn.CrossEntropyLoss(reduction=told),
            functools.partial(F.cross_entropy, reduction=told),
            functools.partial(nn.MSELoss(reduction=told)),
            nn.CrossEntropyLoss(reduction=told).forward,
            {"sum": summed, "none": unreduced}[told],
        )
    ),
    stepping(vector_batch(8), r"`loss` must .*\(2,\)", loss=lambda out, _: out.sum(1)),
    stepping(vector_batch(8), "nan", loss=lambda out, _: out.mean() * NAN),
    stepping(with_target(0), "(?i)loss.*microbatch 0", loss=loss_of(NAN)),
    stepping(with_target(4), "(?i)loss.*microbatch 2", loss=loss_of(float("inf"))),
    stepping(with_target(7), "(?i)loss.*microbatch 3", loss=loss_of(float("-inf"))),
    stepping(
        (vector_batch(8)[0], torch.tensor([0, 1, 2, 3] + [-100] * 4)),  # cross-entropy ignores them
        r"is nan in microbatch [23]; .*no targets.*weight it by 0",
    ),
    *(
        stepping(vector_batch(8), r"`forward` must return a loss of one element", forward=forward)
        for forward in (
            lambda net, pair: Output(),
            lambda net, pair: (None, net(pair[0])),
            lambda net, pair: net(pair[0]),
        )
    ),
    *(
        stepping(vector_batch(8), "`weight` must ", weight=lambda part, told=told: told)
        for told in (-1.0, NAN, float("inf"), None, "many", torch.ones(2))
    ),
    # what is not supported
    Row(MODULE, lambda net: Trainer(net, MLP.loss, torch.optim.LBFGS), "LBFGS", UnsupportedError),
    *(
        Row(NOTHING, training(make, executor), match, UnsupportedError)
        for make, match in NOT_ORDINARY
        for executor in ("inline", "threads", "processes")
    ),
    *(Row(NOTHING, calling(make), match, UnsupportedError) for make, match in NOT_ORDINARY),
    Row(MODULE, train_hooked, "must have no gradient hooks", UnsupportedError),
    # calls of a trainer
    Row(TRAINER, lambda t: t.fit(None), "`loader` must yield batches, but is None"),
    Row(TRAINER, lambda t: t.fit([]), "`loader` must .*, but "),
    Row(TRAINER, lambda t: t.evaluate([]), "`loader` must .*, but "),
    Row(TRAINER, lambda t: t.evaluate(3), "`loader` must yield batches, but is 3"),
    Row(TRAINER, lambda t: t.fit([vector_batch(8)], validate=3), "`validate` must yield batches"),
    Row(TRAINER, lambda t: t.fit(TensorDataset(X, X)), r"Give DataLoader\(…, batch_size=64\) of"),
    Row(TRAINER, lambda t: t.fit([vector_batch(8)], epochs=1.5), "`epochs` must be a whole"),
    Row(TRAINER, lambda t: t.fit([vector_batch(8)], steps=0), "`steps` must "),
    Row(TRAINER, lambda t: t.resume("/nowhere"), "nowhere", CheckpointError),
    Row(NOTHING, join_unequal, "Output .* cannot be merged: .* size 3 but got size 5"),
    # calls of containers
    Row(CONTAINER, lambda m: m(X, mask=X[:7]), "`mask` must have 8 rows .* like `(0|x)`"),
    Row(CONTAINER, lambda m: m(3), "at least one tensor"),
    Row(CONTAINER, lambda m: m(X, mask=[1.0] * 8), "`mask` has an item for each of the 8 rows"),
    Row(
        NOTHING,
        lambda _: DataParallel(nn.Tanh(), 2, layout=Layout(split=list, collate=torch.stack)),
        "`layout` must not have `split`",
        UnsupportedError,
    ),
    Row(CONTAINER, lambda m: m.forward_parts([X, X]), "`parts` must hold one input per replica"),
    Row(CONTAINER, lambda m: m.forward_parts(X[:3]), "`parts` must hold one input per replica"),
    Row(CONTAINER, lambda m: m.forward_parts([None] * 3), "`parts` must hold .*, not all None"),
    Row(CONTAINER, lambda m: m(X, kind="odd"), "one structure .* replica 2"),
    Row(CONTAINER, lambda m: m(X, kind="lost"), "Output `y` .* 3 rows"),
    Row(
        CONTAINER,
        lambda m: m(X),
        "`module` cannot be merged by 'stack'",
        options={"output": "stack"},
    ),
    Row(
        CONTAINER,
        lambda m: m(X, kind="words"),
        "`y` .* by 'mean': 'str' object",
        options={"output": "mean"},
    ),
    # columns
    Row(NOTHING, lambda _: ModelParallel(dim=1)(X), r"Call `add\(\)`", StateError),
    Row(NOTHING, lambda _: ModelParallel(dim="1"), "`dim` must be a whole number"),
    Row(COLUMNS, lambda m: m.add("linear"), "`module` must be an `nn.Module`"),
    Row(COLUMNS, lambda m: m.add(nn.Sequential(m)), "`module` must lie outside"),
    Row(COLUMNS, lambda m: m.add(LINEAR, "nowhere"), "must"),
    *(
        Row(
            COLUMNS,
            lambda m, parts=parts: [setattr(m, "num_parts", parts), m(X)],
            rf"`distribute\(\)` must return .* per column \(2\), but returned {parts}",
        )
        for parts in (1, 3)
    ),
    Row(
        COLUMNS,
        lambda m: m(X),
        "Output .* cannot be merged: .* size 4 but got size 5",
        options={"second": nn.Linear(7, 5)},
    ),
    # executor groups
    *(
        Row(GROUP, lambda g, data=data: g.forward(phalanx.DataBatch(*data)), match)
        for data, match in (
            ((FIVE, LABELS[:6]), "label.*7.*6|label.*6.*7"),
            ((FIVE, (LABELS, LABELS)), "label"),
            ((FIVE, {"lable": LABELS}), "lable"),
            (("abc", LABELS), "data"),
            ((FIVE, LABELS, -1), "`pad`"),
            (({},), "`?data`?"),
            (({"data": FIVE, "mask": FIVE},), "mask"),
            (({"date": FIVE},), "date"),
            ((FIVE.unsqueeze(2),), r"`?data`?.*5.*\(7, 5, 1\)"),
        )
    ),
    *(
        Row(NOTHING, lambda _, options=options: groups.group_of(NET, *DATA, **options), match)
        for options, match in (
            ({"workload": [1]}, "one share per device"),
            ({"grad_req": "sum"}, "grad_req"),
        )
    ),
    # tables
    Row(TABLE, lambda t: t.add(torch.ones(1, 3), rows=[5]), "Row 5 is outside"),
    Row(TABLE, lambda t: t.add(torch.ones(1, 3), rows=[0.5]), "`rows` must"),
    Row(TABLE, lambda t: t.add(torch.ones(1, 3), rows=[0, 1]), r"`delta` must have shape \(2, 3\)"),
    Row(TABLE, lambda t: t.add(torch.ones(2, 3)), r"`delta` must have shape \(5, 3\)"),
    Row(TABLE, lambda t: t.add(torch.ones(1, 3).double(), rows=[0]), "`delta` must be of torch."),
    Row(TABLE, lambda t: t.add([[1, 2], [3]], rows=[0, 1]), "`delta` must hold plain numbers"),
    Row(TABLE, lambda t: t.add([["a"]], rows=[0]), "`delta` must hold plain numbers"),
    Row(TABLE, lambda t: t.add(torch.tensor([[1, 2, NAN]]), rows=[0]), "`delta` must be finite"),
    Row(TABLE, lambda t: t.get([5]), "Row 5 is outside"),
    Row(TABLE, lambda t: t.get(out=torch.empty(4, 3)), "`out` must be a tensor of torch.float32"),
    Row(TABLE, lambda t: t.get([1], out=[0]), "`out` must be a tensor"),
    Row(TABLE, lambda t: t.restore("/nowhere"), "embed", CheckpointError),
    Row(TABLE, lambda t: t.world.matrix(2, 4, name="embed"), "`(rows|updater)` of table 'embed'"),
    *(
        Row(TABLE, lambda t, options=options: t.world.matrix(**options), match)
        for options, match in (
            ({"rows": -1, "cols": 3}, "`rows` must be an integer from 0 on, but is -1"),
            ({"rows": 2, "cols": 0}, "`cols` must be an integer from 1 on, but is 0"),
            ({"rows": 2, "cols": 3, "dtype": torch.float16}, "`dtype` must be one of"),
            ({"rows": 2, "cols": 3, "name": "a/b"}, "`name` must be 1 to 100 letters"),
            ({"rows": 2, "cols": 3, "init": [1.0]}, r"`init` must have shape \(2, 3\)"),
            ({"rows": 2, "cols": 3, "init": NAN}, "`init` must be finite"),
            ({"rows": 2, "cols": 3, "staleness": -1}, "`staleness` must be at least 0, but is -1"),
            ({"rows": 2, "cols": 3, "staleness": 2, "sync": True}, "`staleness` must be absent"),
            ({"rows": 2, "cols": 3, "updater": "nobody"}, "`updater` must"),
        )
    ),
    *(
        Row(TABLE, call, match, options={"kind": "keys"})
        for call, match in (
            (lambda t: t.add(torch.ones(1, 2), rows=[9]), r"`delta` must have shape \(1, 3\)"),
            (lambda t: t.add(torch.tensor([[1, 2, NAN]]), rows=[9]), "`delta` must be finite"),
            (lambda t: t.add(torch.ones(1, 3)), "rows"),
        )
    ),
    Row(NOTHING, lambda _: tables.join(timeout_s=-1), "`timeout_s` must be seconds from 0"),
    Row(NOTHING, lambda _: tables.join(num_workers=0), "`num_workers` must be 1 to"),
    Row(NOTHING, lambda _: tables.join("a b"), "`run` must be 1 to 100 letters"),
]


def check(row: Row) -> None:
    with row.subject.open(**row.options) as subject:
        before, drawn, running = row.subject.state(subject), draws(), threads()
        with pytest.raises(row.error, match=row.match) as caught:
            row.call(subject)
        assert type(caught.value) is row.error
        assert_same_bits(row.subject.state(subject), before)
        assert_same_bits(draws(), drawn)
        assert threads() == running
        row.subject.use(subject)


@pytest.mark.parametrize("row", ROWS, ids=[f"{i}-{row.subject.name}" for i, row in enumerate(ROWS)])
def test_a_refused_call_changes_nothing(row: Row) -> None:
    check(row)


def refuse_late(change: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a call that is refused after it has changed something."""

    def call(subject: Any) -> None:
        change(subject)
        raise ConfigError("late")

    return call


@pytest.mark.parametrize(
    ("subject", "change"),
    [
        (TRAINER, lambda t: t.step(vector_batch(8))),
        (TRAINER, lambda t: t.module[0].weight.data.add_(1)),
        (TRAINER, lambda t: t.module.eval()),
        (CONTAINER, lambda m: m(X)),
        (GROUP, lambda g: g.module.body.weight.data.add_(1)),
        (TABLE, lambda t: t.add(torch.ones(1, 3), rows=[2])),
        (NOTHING, lambda _: torch.rand(1)),
        (NOTHING, lambda _: random.random()),
    ],
)
def test_a_call_that_is_refused_too_late_is_caught(
    subject: Subject, change: Callable[[Any], object]
) -> None:
    with pytest.raises(AssertionError):
        check(Row(subject, refuse_late(change), "late"))


def test_a_closed_trainer_says_so() -> None:
    trainer = Trainer(mlp(), MLP.loss, sgd, replicas=2)
    trainer.step(vector_batch(8))
    trainer.close()
    trainer.close()
    for call in (trainer.step, lambda b: trainer.fit([b]), lambda b: trainer.evaluate([b])):
        with pytest.raises(StateError, match="closed"):
            call(vector_batch(8))
