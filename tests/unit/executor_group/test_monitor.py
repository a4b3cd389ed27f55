"""Monitors against the same numbers taken by hand, on one module, on replicas and in a trainer."""

from __future__ import annotations

import copy
import io
import json
import math
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from phalanx import DataParallel, Trainer
from phalanx.clock import now_s
from phalanx.errors import ConfigError
from phalanx.execution import Span
from phalanx.executor_group import Monitor, Record

SIZES = [1, 5, 9]
THREE = ["cpu"] * 3


def make_net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(dropout), nn.Tanh(), nn.Linear(6, 2))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def watch(monitor: Monitor, module: nn.Module, *batches: Tensor) -> list[list[Record]]:
    """Train on batches by hand, and return the records of each."""
    told = []
    monitor.install(module)
    for batch in batches:
        monitor.tic()
        module.zero_grad()
        module(batch).square().mean().backward()
        told.append(monitor.toc())
    monitor.remove()
    return told


def num_hooks(module: nn.Module) -> int:
    kinds = [name for name in vars(module) if name.endswith("_hooks")]
    return sum(len(vars(child)[kind]) for child in module.modules() for kind in kinds)


def layers(net: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Return the input and the output of each layer."""
    values = [x]
    for layer in net:
        values.append(layer(values[-1]))
    return values


# -- one module ------------------------------------------------------


def test_every_output_is_told_in_the_order_of_the_forward() -> None:
    net, x = make_net(), draw(7, 4)
    (records,) = watch(Monitor(), net, x)
    expected = [value.norm().item() for value in layers(net, x)[1:]]
    names = ["0.output", "1.output", "2.output", "3.output", "output"]
    assert [(r.step, r.device, r.name) for r in records] == [(1, "cpu", name) for name in names]
    assert [r.value for r in records] == [*expected, expected[-1]]


def test_inputs_are_those_before_the_module_has_changed_them() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), draw(7, 4)
    (records,) = watch(Monitor(which="inputs"), net, x)
    value = {record.name: record.value for record in records}
    assert list(value) == ["input", "0.input", "1.input"]
    assert value["1.input"] == net[0](x).norm().item()


def test_parameters_gradients_and_buffers_are_read_without_hooks() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), draw(7, 4)
    monitor = Monitor(which=("buffers", "gradients", "parameters"))
    before = num_hooks(net)
    monitor.install(net)
    assert num_hooks(net) == before
    monitor.remove()
    (records,) = watch(monitor, net, x)
    value = {record.name: record.value for record in records}
    parameters = dict(net.named_parameters())
    expected = {name: p.norm().item() for name, p in parameters.items()}
    expected |= {f"{name}.grad": p.grad.norm().item() for name, p in parameters.items()}
    expected |= {name: b.float().norm().item() for name, b in net.named_buffers()}
    assert value == expected


def test_hooks_come_with_install_and_go_with_remove() -> None:
    net = make_net()
    before = num_hooks(net)
    monitor = Monitor(which=("outputs", "inputs"))
    assert num_hooks(net) == before
    monitor.install(net)
    assert num_hooks(net) > before
    monitor.remove()
    monitor.remove()
    assert num_hooks(net) == before


def test_only_every_third_batch_is_watched() -> None:
    net = make_net()
    seen: list[int] = []

    def statistic(tensor: Tensor) -> Tensor:
        seen.append(1)
        return tensor.abs().max()

    told = watch(Monitor(3, statistic, which=("outputs", "parameters")), net, *draw(7, 5, 4))
    assert [{record.step for record in records} for records in told] == [
        {1}, set(), set(), {4}, set(), set(), {7}
    ]  # fmt: skip
    assert len(seen) == 3 * (5 + 4)


def test_nothing_is_seen_outside_of_tic_and_toc() -> None:
    net = make_net()
    monitor = Monitor()
    monitor.install(net)
    net(draw(3, 4))
    monitor.tic()
    assert monitor.toc() == []
    net(draw(3, 4))
    monitor.tic()
    net(draw(2, 4))
    monitor.tic()  # begins anew
    net(draw(2, 4))
    assert len(monitor.toc()) == 5
    assert monitor.toc() == []


def test_float64_is_measured_in_float64() -> None:
    net, x = nn.Identity(), draw(7, 4).double() / 3
    monitor = Monitor()
    monitor.install(net)
    monitor.tic()
    net(x)
    assert monitor.toc()[0].value == x.norm().item()


def test_names_are_chosen_by_pattern_and_sorted_if_asked() -> None:
    net = nn.Sequential()
    for name in ("b", "a", "ab"):
        net.add_module(name, nn.Linear(4, 4))
    (records,) = watch(Monitor(pattern="a", sort=True), net, draw(3, 4))
    assert [record.name for record in records] == ["a.output", "ab.output"]


class Nested(nn.Module):
    """Takes words and keys, and returns a dict with a tuple and a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3, sparse=True)

    def forward(self, tokens: Tensor, *, scale: Tensor, empty: Tensor | None = None) -> Any:
        words = self.words(tokens)
        return {"all": (words * scale, words[:0]), "count": len(tokens)}


def test_nested_values_are_told_by_their_paths() -> None:
    net, tokens, scale = Nested(), torch.tensor([1, 4]), torch.tensor(2.0, dtype=torch.float16)
    monitor = Monitor(which=("outputs", "inputs", "gradients"))
    monitor.install(net)
    monitor.tic()
    net(tokens, scale=scale)["all"][0].sum().backward()
    value = {record.name: record.value for record in monitor.toc()}
    assert list(value) == [
        "input.0", "input.scale", "words.input", "words.output", "output.all.0", "words.weight.grad"
    ]  # fmt: skip
    assert value["input.0"] == pytest.approx(math.sqrt(17))
    assert value["input.scale"] == 2.0
    assert value["words.weight.grad"] == pytest.approx(2.0 * math.sqrt(6))


def test_a_monitored_module_can_be_copied() -> None:
    net = make_net()
    monitor = Monitor()
    monitor.install(net)
    copy.deepcopy(net)


# -- replicas --------------------------------------------------------


def test_every_replica_tells_of_its_slice() -> None:
    net, x = make_net(), draw(15, 4)
    monitor = Monitor(which=("outputs", "gradients"))
    with DataParallel(net, THREE, workloads=SIZES) as model:
        monitor.install(model)
        for _ in range(2):  # threads that exist already run the hooks as well
            monitor.tic()
            net.zero_grad()
            model(x).square().mean().backward()
            records = monitor.toc()
    monitor.remove()
    expected = [
        (2, f"cpu#{replica}", name, value.norm().item())
        for replica, part in enumerate(x.split(SIZES))
        for name, value in zip(
            ["0.output", "1.output", "2.output", "3.output", "output"],
            [*layers(net, part)[1:], net(part)],
            strict=True,
        )
    ]
    assert [tuple(record) for record in records[:15]] == [
        (step, device, name, pytest.approx(value, rel=1e-5))
        for step, device, name, value in expected
    ]
    assert [(record.device, record.name) for record in records[15:]] == [
        ("cpu", f"{name}.grad") for name, _ in net.named_parameters()
    ]


def test_a_monitor_that_comes_late_and_goes_is_followed_by_replicas_that_exist() -> None:
    net, x = make_net(), draw(15, 4)
    monitor = Monitor()
    with DataParallel(net, THREE) as model:
        model(x)
        executor = model._running.executor
        monitor.install(model)
        monitor.tic()
        model(x)
        assert len(monitor.toc()) == 15
        monitor.remove()
        monitor.tic()
        model(x)
        assert monitor.toc() == []
        assert model._running.executor is executor


def test_several_forward_passes_of_a_replica_are_told_apart() -> None:
    monitor = Monitor(pattern="output")
    with DataParallel(make_net(), ["cpu"] * 2) as model:
        monitor.install(model)
        monitor.tic()
        for seed in range(3):
            model(draw(4, 4, seed=seed))
        records = monitor.toc()
    assert [r.device for r in records] == [f"cpu#{k}/{turn}" for turn in range(3) for k in range(2)]


def test_a_replica_without_rows_tells_nothing() -> None:
    monitor = Monitor(pattern="output")
    with DataParallel(make_net(), THREE) as model:
        monitor.install(model)
        monitor.tic()
        model(draw(2, 4))
        assert [record.device for record in monitor.toc()] == ["cpu#0", "cpu#1"]


def test_threads_of_the_callers_own_lose_nothing() -> None:
    net, monitor, start = make_net(), Monitor(pattern="output"), threading.Barrier(8)
    monitor.install(net)
    monitor.tic()

    def work() -> None:
        start.wait(timeout=30)
        for _ in range(20):
            net(draw(3, 4))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(monitor.toc()) == 160


@pytest.mark.parametrize("devices", [None, THREE])
def test_a_monitor_does_not_show_in_the_bits(devices: list[str] | None) -> None:
    def run(monitor: Monitor | None) -> list[Tensor]:
        net = make_net(dropout=0.5)
        model = net if devices is None else DataParallel(net, devices, workloads=SIZES)
        if monitor is not None:
            monitor.install(model)
        torch.manual_seed(7)
        for seed in range(3):
            if monitor is not None:
                monitor.tic()
            output = model(draw(15, 4, seed=seed))
            output.square().mean().backward()
            if monitor is not None:
                monitor.toc()
        return [output.detach(), *(p.grad for p in net.parameters()), torch.rand(1)]

    everything = ("outputs", "inputs", "parameters", "gradients", "buffers")
    plain, watched = run(None), run(Monitor(which=everything, on_non_finite="raise"))
    for left, right in zip(plain, watched, strict=True):
        assert torch.equal(left, right)


# -- a trainer -------------------------------------------------------


def fit(monitor: Monitor | None, net: nn.Module, loader: list[Any], **options: Any) -> None:
    callbacks = [] if monitor is None else [monitor]
    if monitor is not None:
        monitor.install(net)
        monitor.tic()
    options.setdefault("replicas", 2)
    with Trainer(net, nn.MSELoss(), sgd, callbacks=callbacks, **options) as trainer:
        trainer.fit(loader, validate=loader)


LOADER = [(draw(n, 4, seed=n), draw(n, 2, seed=50 + n)) for n in (15, 13)]


def test_a_trainers_microbatches_are_told_apart_whoever_had_them() -> None:
    net, lines = make_net(), io.StringIO()
    first = copy.deepcopy(net)
    fit(Monitor(lines=lines, which=("outputs", "gradients")), net, LOADER, microbatches=4)
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    roots = [each for each in told if each["name"] == "output"]
    assert [(r["step"], r["device"].partition("/")[2]) for r in roots] == [
        (step, str(microbatch)) for step in (1, 2) for microbatch in range(4)
    ]
    x, y = LOADER[0]
    sizes = (4, 4, 4, 3)
    expected = [first(part).norm().item() for part in x.split(sizes)]
    assert [r["value"] for r in roots[:4]] == pytest.approx(expected, rel=1e-5)
    nn.functional.mse_loss(first(x), y).backward()
    gradients = {r["name"]: r["value"] for r in told if r["step"] == 1 and "grad" in r["name"]}
    assert gradients == {
        f"{name}.grad": pytest.approx(p.grad.norm().item(), rel=1e-5)
        for name, p in first.named_parameters()
    }


def test_neither_trials_nor_validations_are_part_of_a_step() -> None:
    lines = io.StringIO()
    fit(Monitor(pattern="output", lines=lines), make_net(), LOADER, replicas="auto", intra_op=1)
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    replicas = {each["device"] for each in told}
    assert [each["step"] for each in told] == [1] * len(replicas) + [2] * len(replicas)


def test_what_a_trainer_only_evaluates_is_not_even_measured() -> None:
    measured: list[bool] = []
    net = make_net()

    def statistic(tensor: Tensor) -> Tensor:
        measured.append(True)
        return tensor.norm()

    fit(Monitor(statistic=statistic, pattern="output"), net, LOADER, microbatches=4)
    assert len(measured) == 2 * 4


def test_spans_say_which_microbatch_a_replica_had_and_the_event_which_step() -> None:
    monitor = Monitor(2, pattern="output")
    with DataParallel(make_net(), ["cpu"] * 2) as model:
        monitor.install(model)
        monitor.tic()
        start_s = now_s()
        model(draw(4, 4))
        spans = tuple(
            Span(replica=replica, microbatch=microbatch, start_s=start_s, stop_s=now_s())
            for replica, microbatch in ((0, 8), (1, 3))
        )
        model(draw(4, 4))  # no part of the step
        monitor(SimpleNamespace(step=6, spans=spans))
        assert [(r.step, r.device) for r in monitor.records] == [(6, "cpu#1"), (6, "cpu#0")]
        model(draw(4, 4))
        assert {record.step for record in monitor.toc()} == {7}


def test_a_monitor_does_not_show_in_the_trained_bits() -> None:
    plain, watched = make_net(dropout=0.3), make_net(dropout=0.3)
    fit(None, plain, LOADER, microbatches=4)
    everything = ("outputs", "inputs", "parameters", "gradients", "buffers")
    fit(Monitor(which=everything), watched, LOADER, microbatches=4, replicas=3)
    for left, right in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(left, right)


# -- what is not finite ----------------------------------------------


class Spoils(nn.Module):
    """Divides by 0 in rows whose first feature is exactly 5."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x[:, :1] != 5.0)


def spoilt_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), Spoils(), nn.Linear(4, 2))


class Mends(nn.Module):
    """Puts numbers where there are none, so that the loss does not tell."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nan_to_num(x, 0.0, 0.0, 0.0)


def spoilt(row: int, rows: int = 15) -> Tensor:
    x = draw(rows, 4)
    x[row, 0] = 5.0
    return x


def test_the_first_module_and_its_replica_are_named() -> None:
    monitor = Monitor(2)
    with DataParallel(spoilt_net(), THREE, workloads=SIZES) as model:
        monitor.install(model)
        for x in (draw(15, 4), draw(15, 4), spoilt(3)):
            monitor.tic()
            model(x)
            records = monitor.toc()
    (found,) = monitor.non_finite
    assert (found.step, found.module, found.name) == (3, "1", "1.output")
    assert (found.replica, found.forward, found.device) == (1, 0, "cpu")
    strange = [(r.device, r.name) for r in records if not math.isfinite(r.value)]
    assert strange == [("cpu#1", name) for name in ("1.output", "2.output", "output")]


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_microbatch_is_named(replicas: int) -> None:
    monitor = Monitor(which=("outputs", "parameters"))
    loader = [(draw(15, 4), draw(15, 2)), (spoilt(9), draw(15, 2))]
    net = nn.Sequential(nn.Identity(), Spoils(), Mends(), nn.Linear(4, 2))
    fit(monitor, net, loader, microbatches=5, replicas=replicas)
    (found,) = monitor.non_finite
    assert (found.step, found.name, found.microbatch) == (2, "1.output", 3)
    assert "microbatch 3" in str(found)


def test_a_step_that_was_refused_can_still_be_asked() -> None:
    monitor = Monitor()
    with pytest.raises(ConfigError, match="`loss` must be finite"):
        fit(monitor, spoilt_net(), [(spoilt(14), draw(15, 2))], replicas=3)
    monitor.toc()
    assert [(each.name, each.replica) for each in monitor.non_finite] == [("1.output", 2)]


def test_the_earliest_module_counts_not_the_earliest_replica() -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x[:, 1:2] != 6.0)

    x = spoilt(14)
    x[0, 1] = 6.0  # replica 0, but in a later module
    monitor = Monitor()
    with DataParallel(nn.Sequential(Spoils(), Late()), THREE) as model:
        monitor.install(model)
        monitor.tic()
        model(x)
        monitor.toc()
    assert [(each.name, each.replica) for each in monitor.non_finite] == [("0.output", 2)]


def test_the_earliest_module_counts_not_the_earliest_pass() -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x[:, 1:2] != 6.0)

    first = draw(3, 4)
    first[0, 1] = 6.0
    net, monitor = nn.Sequential(Spoils(), Late()), Monitor()
    monitor.install(net)
    monitor.tic()
    for x in (first, spoilt(1, 3)):
        net(x)
    monitor.toc()
    assert [(each.name, each.forward) for each in monitor.non_finite] == [("0.output", 1)]


def test_a_norm_that_overflows_is_no_fault_of_the_tensor() -> None:
    net, x = nn.Identity(), torch.full((8,), 3e38)
    monitor = Monitor(statistic=lambda values: values.sum())
    monitor.install(net)
    monitor.tic()
    net(x)
    (record,) = monitor.toc()
    assert record.value == math.inf
    assert monitor.non_finite == []


def test_it_warns_at_toc_if_asked() -> None:
    monitor = Monitor(on_non_finite="warn")
    monitor.install(net := spoilt_net())
    monitor.tic()
    net(spoilt(2))
    with pytest.warns(UserWarning, match=r"`1.output` must be finite.*step 1, forward pass 0") as w:
        monitor.toc()
    assert w[0].filename == __file__


def test_it_stops_the_forward_pass_if_asked() -> None:
    monitor = Monitor(on_non_finite="raise")
    net = spoilt_net()
    before = copy.deepcopy(net.state_dict())
    x = spoilt(9)
    with pytest.raises(ConfigError, match=r"`1.output` must be finite") as caught:
        fit(monitor, net, [(x, draw(15, 2))], microbatches=5, replicas=1)
    assert any("microbatch 3" in note for note in caught.value.__notes__)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_it_stops_at_toc_for_gradients_and_tells_them_first() -> None:
    lines = io.StringIO()
    monitor = Monitor(which="gradients", on_non_finite="raise", lines=lines)
    net = nn.Linear(4, 2)
    monitor.install(net)
    monitor.tic()
    (net(draw(3, 4)).sum() * math.inf).backward()
    with pytest.raises(ConfigError, match=r"`weight.grad` must be finite"):
        monitor.toc()
    assert len(lines.getvalue().splitlines()) == 2


# -- how it is told --------------------------------------------------


def test_lines_are_strict_json() -> None:
    lines = io.StringIO()
    monitor = Monitor(lines=lines)
    monitor.install(net := spoilt_net())
    monitor.tic()
    net(spoilt(0))
    records = monitor.toc()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    told = [json.loads(line, parse_constant=refuse) for line in lines.getvalue().splitlines()]
    assert [list(each) for each in told] == [["step", "device", "name", "value"]] * len(records)
    assert [float(each["value"]) for each in told] == pytest.approx(
        [record.value for record in records], nan_ok=True
    )
    assert "inf" in [each["value"] for each in told] or "nan" in [each["value"] for each in told]


class FakeBoard:
    """Takes scalars as a `SummaryWriter` does."""

    def __init__(self, folder: str = "") -> None:
        self.folder, self.scalars, self.closed = folder, [], False
        boards.append(self)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


boards: list[FakeBoard] = []


@pytest.fixture(autouse=True)
def no_boards() -> Iterator[None]:
    boards.clear()
    yield
    boards.clear()


def test_a_writer_gets_every_record() -> None:
    board = FakeBoard()
    (records,) = watch(Monitor(board=board), make_net(), draw(3, 4))
    assert board.scalars == [(f"{r.name}/{r.device}", r.value, r.step) for r in records]
    assert not board.closed  # it is the user's


def test_a_folder_gets_a_writer_when_there_is_something_to_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = FakeBoard
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monitor = Monitor(board=tmp_path)
    assert boards == []
    told = watch(monitor, make_net(), draw(3, 4), draw(3, 4))
    (board,) = boards
    assert board.folder == str(tmp_path)
    assert len(board.scalars) == sum(map(len, told))
    assert board.closed


def test_a_table_shows_what_toc_returns() -> None:
    monitor, told = Monitor(pattern="0"), io.StringIO()
    monitor.install(net := make_net())
    monitor.tic()
    net(draw(3, 4))
    table = monitor.toc_print(Console(file=told, width=80))
    assert table.row_count == 1
    for part in ("step", "device", "cpu", "0.output", f"{monitor.records[0].value:.6g}"):
        assert part in told.getvalue()
    monitor.tic()
    assert monitor.toc_print().row_count == 0


# -- what is refused -------------------------------------------------


def test_a_trainer_and_a_wrapped_model_are_installed_by_their_module() -> None:
    net = make_net()
    with Trainer(net, nn.MSELoss(), sgd, replicas=2) as trainer:
        monitor = Monitor()
        monitor.install(trainer)
        assert num_hooks(net) > 0
        assert repr(monitor) == "Monitor(outputs of 1 modules, interval=1, step 0)"
        monitor.remove()
