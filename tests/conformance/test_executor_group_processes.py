"""Groups on worker processes against the same groups on threads: the same bits in all that they do.

One executor of three workers serves most cases, for it takes seconds to start; each case opens a
group of its own on it, with the module as it was in the beginning.
"""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics.classification import MulticlassAccuracy

from phalanx.errors import ConfigError, StateError, UnsupportedError
from phalanx.execution import Processes, ProcessExecutor
from phalanx.executor_group import DataBatch, DataDesc, DataParallelExecutorGroup, Monitor
from phalanx.parallel import DataParallel
from tests.conformance.containers import draw
from tests.conformance.groups import Loss, classes, labels_desc
from tests.conformance.zoo import CLASSES, RULES, Zoo

pytestmark = pytest.mark.filterwarnings("ignore:`replicas` should be at most")

THREE = ["cpu"] * 3
ROWS, IMAGE = (11, 5), (11, 2, 4, 3)
STEPS = 3


class Stable:
    """Three workers that serve one group after another."""

    def __init__(self) -> None:
        self.net = Zoo()
        self._fresh = copy.deepcopy(self.net.state_dict())
        self._make = DataParallel._make_executor
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(DataParallel, "_make_executor", lambda model: self.lend(model))
        self.executor: ProcessExecutor | None = None

    def lend(self, model: DataParallel) -> Any:
        if model.module is not self.net:
            return self._make(model)
        if self.executor is None or not self.executor.matches_source():
            self.close_executor()
            self.executor = self._make(model)
            self.executor.close = lambda: None
        self.executor.workloads, self.executor._workers._on_failure = (
            list(model._workloads),
            model._failures().add,
        )
        self.executor._rng_watched = frozenset()  # as for a new one
        return self.executor

    def close_executor(self) -> None:
        if self.executor is not None:
            ProcessExecutor.close(self.executor)
            self.executor = None

    def reset(self) -> Zoo:
        """Return the module as it was in the beginning."""
        with torch.no_grad():
            self.net.load_state_dict(self._fresh)
        self.net.train().zero_grad()
        self.net.drop.p, self.net.fails = 0.0, ""
        return self.net


@pytest.fixture(scope="module")
def stable() -> Iterator[Stable]:
    stable = Stable()
    with group_on(stable.net, "processes") as group:
        group.forward(torch.ones(ROWS))
    yield stable
    stable.close_executor()
    stable.patch.undo()


@pytest.fixture
def remote(stable: Stable) -> Zoo:
    return stable.reset()


def group_on(net: nn.Module, executor: str, shape: Any = ROWS, **options: Any) -> Any:
    options.setdefault("data", [("data", shape)])
    options.setdefault("buffers", RULES)
    return DataParallelExecutorGroup(net, THREE, executor=executor, **options)


def everything(group: DataParallelExecutorGroup, net: nn.Module) -> list[Any]:
    """Return all that one pass there and back leaves behind."""
    found: list[Any] = [group.outputs(), group.outputs(merge=False), group.slices]
    if group.inputs_need_grad:
        found += [group.input_grads(), group.input_grads(merge=False)]
    found += [{name: p.grad for name, p in net.named_parameters()}, net.state_dict()]
    return copy.deepcopy(pytree.tree_map(lambda x: x.detach() if is_tensor(x) else x, found))


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def same(ours: Any, theirs: Any) -> bool:
    own, spec = pytree.tree_flatten(ours)
    other, other_spec = pytree.tree_flatten(theirs)
    assert spec == other_spec
    return all(
        (torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride())
        if isinstance(a, Tensor)
        else a == b
        for a, b in zip(own, other, strict=True)
    )


# --- the same bits --------------------------------------------------------------------------------

Case = Callable[[DataParallelExecutorGroup, Zoo], Any]


def train(shape: tuple[int, ...], dropout: float = 0.0) -> Case:
    """Return a case: some steps of SGD, the last one with another number of rows."""

    def run(group: DataParallelExecutorGroup, net: Zoo) -> Any:
        net.drop.p = dropout
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
        found = []
        for step in range(STEPS):
            rows = shape[0] - (step == STEPS - 1)
            group.forward(draw(rows, *shape[1:], seed=step, dtype=torch.float32))
            group.backward([draw(rows, CLASSES, seed=step + 9, dtype=torch.float32)])
            found.append(everything(group, net))
            group.update(optimizer)
        return found

    return run


def of_rows(*rows: int) -> Case:
    def run(group: DataParallelExecutorGroup, net: Zoo) -> Any:
        found = []
        for count in rows:
            group.forward(draw(count, 5, dtype=torch.float32))
            group.backward([draw(count, CLASSES, seed=1, dtype=torch.float32)])
            found.append(everything(group, net))
        return found

    return run


def mask_and_modes(group: DataParallelExecutorGroup, net: Zoo) -> Any:
    """What is given whole, evaluation between training, autocast, inference mode."""
    net.drop.p = 0.4
    batch = {"data": draw(*ROWS, dtype=torch.float32), "mask": draw(5, dtype=torch.float32)}
    found: list[Any] = []
    for trains in (True, False, True):
        group.forward(batch, is_train=trains)
        found.append(group.outputs())
    group.backward([draw(ROWS[0], CLASSES, dtype=torch.float32)])
    found.append(everything(group, net))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        group.forward(batch)
    group.backward([draw(ROWS[0], CLASSES, dtype=torch.bfloat16)])
    found.append(everything(group, net))
    with torch.inference_mode():
        group.forward(batch)
        found.append([output.clone() for output in group.outputs()])
    return [*found, net.training]


def states(group: DataParallelExecutorGroup, net: Zoo) -> Any:
    group.set_states(value=0.5)
    found = []
    for step in range(STEPS):
        group.forward(draw(*ROWS, seed=step, dtype=torch.float32))
        group.backward([draw(ROWS[0], CLASSES, dtype=torch.float32), None])
        found.append(everything(group, net))
        group.set_states([group.outputs(merge=False)[1]])
    return [*found, group.states()]


def by_device(group: DataParallelExecutorGroup, net: Zoo) -> Any:
    """A batch per device, one of which rests, with padded rows."""
    batches = [
        DataBatch(draw(4, 5, dtype=torch.float32), pad=1),
        None,
        DataBatch(draw(3, 5, seed=1, dtype=torch.float32)),
    ]
    group.forward(batches)
    group.backward([draw(6, CLASSES, dtype=torch.float32)])
    return everything(group, net)


def losses(group: DataParallelExecutorGroup, net: Zoo) -> Any:
    """Losses as outputs: fit, score and predict, with metrics; and a loss of weighted rows."""
    loader = [
        DataBatch(
            draw(rows, 5, seed=rows, dtype=torch.float32),
            classes(rows),
            pad=pad,
        )
        for rows, pad in ((11, 0), (11, 2), (5, 0))
    ]
    epochs = group.fit(
        loader,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3),
        epochs=2,
        metrics={"accuracy": MulticlassAccuracy(CLASSES)},
        validate=loader,
    )
    scores = group.score(loader, {"accuracy": MulticlassAccuracy(CLASSES)})
    told = [(epoch.metrics, epoch.validation) for epoch in epochs]
    predicted = group.predict(loader)
    weights = torch.linspace(0.5, 2, ROWS[0])
    group.forward(DataBatch(loader[0].data, loader[0].labels, weights=weights))
    group.backward()
    return told, scores, predicted, everything(group, net)


LABELS = {"labels": [DataDesc("label", (ROWS[0],), torch.int64)]}
MASKED = {"data": [("data", ROWS), DataDesc("mask", (5,), layout="C")]}
INPUTS = {"inputs_need_grad": True}
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "mlp": (train(ROWS), INPUTS),
    "cnn with batch norm": (train(IMAGE), {"shape": IMAGE, **INPUTS}),
    "dropout": (train(ROWS, dropout=0.3), {}),
    "cnn with dropout": (train(IMAGE, dropout=0.3), {"shape": IMAGE}),
    "unequal workloads": (of_rows(11, 7, 1, 0), {"workloads": [1, 5, 9], **INPUTS}),
    "a workload of 0": (of_rows(11, 1), {"workloads": [0, 2, 1], **INPUTS}),
    "added gradients": (train(ROWS), {"grad_req": {"conv.*": "null", "*": "add"}}),
    "fixed parameters": (train(ROWS), {"fixed_parameters": ["first.*"], **INPUTS}),
    "modes": (mask_and_modes, {**MASKED, **INPUTS}),
    "states": (states, {"states": [("h", (ROWS[0], 7))]}),
    "by device": (by_device, INPUTS),
    "losses": (losses, LABELS),
}


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_threads(name: str, remote: Zoo) -> None:
    case, options = CASES[name]
    found = []
    for net, executor in ((Zoo(), "threads"), (remote, "processes")):
        torch.manual_seed(5)
        with group_on(net, executor, **options) as group:
            found.append(case(group, net))
            drawn = torch.rand(())
        found[-1] = (found[-1], drawn, [p.requires_grad for p in net.parameters()])
    assert same(*found)


def test_auto_workloads_follow_the_workers_and_the_bits_are_those_of_the_same_slices(
    remote: Zoo,
) -> None:
    twin = Zoo()
    grad = draw(ROWS[0], CLASSES, dtype=torch.float32)
    with (
        group_on(remote, "processes", workloads="auto") as group,
        group_on(twin, "threads") as other,
    ):
        for step in range(4):
            x = draw(*ROWS, seed=step, dtype=torch.float32)
            group.forward(x)
            group.backward([grad])
            parts = [x[rows] for rows in group.slices]
            other.forward([DataBatch(part) if len(part) else None for part in parts])
            other.backward([grad])
            assert same(everything(group, remote), everything(other, twin))
        assert len(group.decisions) == 4


# --- what is refused ------------------------------------------------------------------------------


def test_a_refused_batch_and_a_failing_module_leave_the_pass_before(remote: Zoo) -> None:
    """The graph of the last good pass is still there, whatever became of the next."""
    twin = Zoo()
    x, grad = draw(*ROWS, dtype=torch.float32), draw(ROWS[0], CLASSES, dtype=torch.float32)
    with group_on(twin, "threads") as other, group_on(remote, "processes") as group:
        for each in (other, group):
            each.forward(x)
        with pytest.raises(ConfigError, match="`data` must"):
            group.forward(draw(3, 5, 5, 5, 5, dtype=torch.float32))
        remote.fails = "forward"
        before = copy.deepcopy(remote.state_dict())
        with pytest.raises(ArithmeticError, match="as told") as error:
            group.forward(draw(3, 5, dtype=torch.float32))
        notes = "".join(error.value.__notes__)
        assert "in process" in notes
        assert "zoo.py" in notes
        remote.fails = ""
        assert same(before, remote.state_dict())
        for each in (other, group):
            each.backward([grad])
        assert same(everything(other, twin), everything(group, remote))


def test_a_backward_pass_that_fails_leaves_the_gradients_and_the_next_one_is_right(
    remote: Zoo,
) -> None:
    twin = Zoo()
    grad = torch.ones(ROWS[0], CLASSES)
    with group_on(twin, "threads") as other, group_on(remote, "processes") as group:
        for each, net in ((other, twin), (group, remote)):
            each.forward(torch.ones(ROWS))
            each.backward([grad])
            before = copy.deepcopy([p.grad for p in net.parameters()])
            net.fails = "backward"
            each.forward(torch.ones(ROWS))
            with pytest.raises(ArithmeticError, match="on the way back"):
                each.backward([grad])
            assert same(before, [p.grad for p in net.parameters()])
            with pytest.raises(StateError, match="needs a forward pass"):
                each.backward([grad])
            net.fails = ""
            each.forward(torch.ones(ROWS))
            each.backward([2 * grad])
        assert same(everything(other, twin), everything(group, remote))


def test_a_pass_may_be_gone_back_through_twice_if_told_and_passes_may_overlap(remote: Zoo) -> None:
    twin = Zoo()
    found = []
    options = {"buffers": RULES}
    for model in (
        DataParallel(twin, THREE, **options),
        DataParallel(remote, THREE, **options, executor=Processes(timeout_s=90.0)),
    ):
        with model:
            losses = [
                sum(
                    p.sum()
                    for p in model.forward_parts([x, None, x[:2]], [7, 0, 2])
                    if p is not None
                )
                for x in (draw(7, 5, seed=seed, dtype=torch.float32) for seed in range(2))
            ]
            losses[0].backward(retain_graph=True)
            losses[1].backward()
            losses[0].backward()
            with pytest.raises(StateError, match="has freed it"):
                losses[1].backward()
            found.append([p.grad for p in model.parameters()])
    assert same(*found)


def test_what_needs_replicas_in_this_process_is_refused(remote: Zoo) -> None:
    with DataParallel(remote, THREE, buffers=RULES, executor="processes") as model:
        with pytest.raises(UnsupportedError, match="`forward_loss\\(\\)` needs replicas in this"):
            model.forward_loss(nn.functional.mse_loss, torch.ones(ROWS), torch.ones(ROWS))
        with pytest.raises(UnsupportedError, match="`threads\\(\\)` needs replicas in this"):
            model.threads(print)
        with pytest.raises(UnsupportedError, match="`flat_parameters\\(\\)` needs replicas in"):
            model.flat_parameters()


def test_parameters_must_stay_until_backward(remote: Zoo) -> None:
    with group_on(remote, "processes") as group:
        group.forward(torch.ones(ROWS))
        with torch.no_grad():
            remote.first.bias.add_(1)
        with pytest.raises(StateError, match="Parameters must stay as they are"):
            group.backward([torch.ones(ROWS[0], CLASSES)])
        assert remote.first.bias.grad is None


def test_a_monitor_sees_what_lies_in_the_module_as_with_threads(remote: Zoo) -> None:
    twin, found = Zoo(), []
    for net, executor in ((twin, "threads"), (remote, "processes")):
        monitor = Monitor(which=("parameters", "gradients", "buffers"))
        with group_on(net, executor, **LABELS) as group:
            group.install_monitor(monitor)
            monitor.tic()
            group.forward(DataBatch(torch.ones(ROWS), classes(ROWS[0])))
            group.backward()
            found.append([(each.name, each.value) for each in monitor.toc()])
            monitor.remove()
    assert found[0] == found[1]
    assert len(found[0]) > 15


def test_a_monitor_of_passes_is_refused(remote: Zoo) -> None:
    with group_on(remote, "processes", **LABELS) as group:
        with pytest.raises(UnsupportedError, match="executor='threads'"):
            group.install_monitor(Monitor())
        with pytest.raises(UnsupportedError, match="executor='threads'"):
            group.fit(
                [(torch.ones(ROWS), classes(ROWS[0]))],
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                monitor=Monitor(),
            )


class Graphs(nn.Module):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 2)
        self.register_buffer("adjacency", buffer)

    def forward(self, data: Tensor) -> Tensor:
        return self.fc(data)


@pytest.mark.parametrize(
    ("net", "options", "match"),
    [
        (Zoo(), {"buffers": "sync"}, "`buffers` must be .* but is 'sync' for `norm.running_mean`"),
        (Graphs(torch.eye(3).to_sparse()), {}, "Buffer `adjacency` must be dense .*sparse_coo"),
        (nn.LazyLinear(3), {"data": [("input", ROWS)]}, "Parameter `weight` must have a shape"),
        (
            Zoo(),
            {"executor": "inline"},
            "`executor` must be one of 'threads', 'processes', or `Processes.*, but is 'inline'",
        ),
        (Zoo(), {"memory_dir": "/tmp"}, r"Give executor=Processes\(memory_dir="),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    net: nn.Module, options: dict[str, Any], match: str
) -> None:
    options = {"executor": "processes", "data": [("data", ROWS)], "buffers": "mean", **options}
    with pytest.raises((ConfigError, UnsupportedError), match=match):
        DataParallelExecutorGroup(net, THREE, **options)


def test_a_module_that_cannot_be_sent_is_as_it_was() -> None:
    net = Zoo()
    net.rule = threading.Lock()
    mapped = shared_addresses()
    with group_on(net, "processes") as group:
        with pytest.raises(ConfigError, match="Attribute `rule` of `module` must be picklable"):
            group.forward(torch.ones(ROWS))
        assert group.worker_pids == ()
    gc.collect()
    assert not shared_addresses() - mapped


# --- life and end ---------------------------------------------------------------------------------


def shared_addresses() -> set[int]:
    """Return the addresses of all regions that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split("-")[0], 16) for line in lines if "memfd:" in line}


def open_regions() -> int:
    folder = Path("/proc/self/fd")
    return sum("memfd:" in os.readlink(each) for each in folder.iterdir() if each.is_symlink())


def test_closing_leaves_no_process_and_no_region_and_groups_share_parameters() -> None:
    """Two groups of unequal modules train one set of parameters, each with workers of its own."""
    gc.collect()
    before, mapped = open_regions(), shared_addresses()
    net, other = Loss(), Loss()
    twin, other_twin = Loss(), Loss()
    data, labels = [DataDesc("data", (7, 5), torch.float64)], [labels_desc(7)]
    found = []
    for executor, ours, theirs in (("threads", twin, other_twin), ("processes", net, other)):
        options = {"data": data, "labels": labels, "executor": executor}
        first = DataParallelExecutorGroup(ours, 2, **options)
        second = DataParallelExecutorGroup(theirs, 2, shared_group=first, **options)
        assert theirs.body.weight is ours.body.weight
        with first, second:
            optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
            for step in range(4):
                group = (first, second)[step % 2]
                group.forward(DataBatch(draw(7, 5, seed=step), classes(7)))
                group.backward()
                group.update(optimizer)
                if step == 1:
                    pids = (*first.worker_pids, *second.worker_pids)
            found.append([copy.deepcopy(ours.state_dict()), first.outputs(), second.outputs()])
            assert (*first.worker_pids, *second.worker_pids) == pids  # nobody was started anew
    assert len(set(pids)) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(StateError, match="closed group"):
        second.backward()
    assert same(*found)
    assert open_regions() == before
    assert not shared_addresses() - mapped


def test_groups_that_come_and_go_beside_one_they_share_with_leave_no_region() -> None:
    net = Loss()
    options = {
        "data": [DataDesc("data", (7, 5), torch.float64)],
        "labels": [labels_desc(7)],
        "executor": "processes",
    }
    held, pids = [], []
    with DataParallelExecutorGroup(net, 1, **options) as first:
        for seed in range(2):
            with DataParallelExecutorGroup(Loss(), 1, shared_group=first, **options) as other:
                for group in (first, other):
                    group.forward(DataBatch(draw(7, 5, seed=seed), classes(7)))
                    group.backward()
            del group, other
            gc.collect()
            held.append(open_regions())
            pids.append(first.worker_pids)
    assert held[1] == held[0]
    assert pids[1] == pids[0]
