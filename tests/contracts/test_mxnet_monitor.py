"""MXNet's monitor against the same numbers taken by hand, on a module, replicas and a group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from phalanx import DataParallel
from phalanx.compat.mxnet import Monitor
from tests.contracts.groups import desc, group_of

pytestmark = pytest.mark.promise("mxnet")

SIZES = [1, 5, 9]
THREE = ["cpu"] * 3


def make_net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(dropout), nn.Tanh(), nn.Linear(6, 2))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm(values: Tensor) -> Tensor:
    return values.norm()


def by_size(values: Tensor) -> float:
    """Return MXNet's statistic, taken another way."""
    return float(values.detach().float().square().mean().sqrt())


def watch(
    monitor: Monitor, module: nn.Module, *batches: Tensor
) -> list[list[tuple[int, str, float]]]:
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


def layers(net: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Return the input and the output of each layer."""
    values = [x]
    for layer in net:
        values.append(layer(values[-1]))
    return values


OUTPUTS = ["0.output", "1.output", "2.output", "3.output", "output"]


# -- one module ------------------------------------------------------


def test_outputs_come_in_the_order_of_the_forward_before_parameters_and_buffers() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), draw(7, 4)
    (records,) = watch(Monitor(), net, x)
    standing = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert [(step, name) for step, name, _ in records] == [
        (1, name) for name in ["0.output", "1.output", "output", *standing]
    ]
    value = {name: value for _, name, value in records}
    assert value["0.output"] == pytest.approx(by_size(net[0](x)))
    for name, tensor in standing.items():
        assert value[name] == pytest.approx(by_size(tensor))


def test_records_are_step_name_and_value(capsys: pytest.CaptureFixture[str]) -> None:
    net, x = make_net(), draw(7, 4)
    expected = [value.norm().item() for value in layers(net, x)[1:]]
    monitor = Monitor(1, norm, pattern=".*output")
    (records,) = watch(monitor, net, x)
    pairs = zip(OUTPUTS, [*expected, expected[-1]], strict=True)
    assert records == [(1, name, value) for name, value in pairs]
    monitor.install(net)
    for print_them in (monitor.toc_print, monitor.tocPrint):
        monitor.tic()
        net(x)
        print_them()
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[2] for line in lines] == OUTPUTS
    assert lines[0].split() == ["Batch:", "3", "0.output", f"{expected[0]:.6g}"]


def test_only_every_third_batch_is_watched() -> None:
    net = make_net()
    seen: list[int] = []

    def statistic(tensor: Tensor) -> Tensor:
        seen.append(1)
        return tensor.abs().max()

    told = watch(Monitor(3, statistic), net, *draw(7, 5, 4))
    assert [{step for step, _, _ in records} for records in told] == [
        {1}, set(), set(), {4}, set(), set(), {7}
    ]  # fmt: skip
    assert len(seen) == 3 * (5 + 4)


def test_names_are_chosen_by_pattern_and_sorted_if_asked() -> None:
    net = nn.Sequential()
    for name in ("b", "a", "ab"):
        net.add_module(name, nn.Linear(4, 4))
    (records,) = watch(Monitor(pattern="a.*output", sort=True), net, draw(3, 4))
    assert [name for _, name, _ in records] == ["a.output", "ab.output"]


# -- replicas --------------------------------------------------------


def test_every_replica_tells_of_its_slice() -> None:
    net, x = make_net(), draw(15, 4)
    monitor = Monitor(1, norm)
    with DataParallel(net, THREE, workloads=SIZES) as model:
        model(x)  # threads that exist already run the hooks as well
        monitor.install(model)
        for _ in range(2):
            monitor.tic()
            model(x)
            records = monitor.toc()
        monitor.remove()
        monitor.tic()
        model(x)
        assert monitor.toc() == []
    expected = [
        (2, f"{name}@{replica}", value.norm().item())
        for replica, part in enumerate(x.split(SIZES))
        for name, value in zip(OUTPUTS, [*layers(net, part)[1:], net(part)], strict=True)
    ]
    assert records[:15] == [
        (step, name, pytest.approx(value, rel=1e-5)) for step, name, value in expected
    ]
    assert [name for _, name, _ in records[15:]] == [name for name, _ in net.named_parameters()]


def test_monitor_records_each_thing_once_on_one_device():
    counts = {"fc_0": 3, "act_0": 1, "fc_1": 3, "act_1": 1}
    net, x = nn.Sequential(), draw(7, 2).double()
    for name in counts:
        layer = nn.Linear(2, 2) if name.startswith("fc") else nn.Sigmoid()
        net.add_module(name, layer.double())
    monitor = Monitor(interval=1, sort=True)
    with group_of(net, desc("input", 7, 2), devices=["cpu"]) as group:
        group.install_monitor(monitor)
        monitor.tic()
        group.forward(x)
        group.backward([x])
        names = [name for _, name, _ in monitor.toc()]
    found = {key: sum(name.startswith(key) for name in names) for key in counts}
    assert found == counts


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

    plain, watched = run(None), run(Monitor())
    for left, right in zip(plain, watched, strict=True):
        assert torch.equal(left, right)
