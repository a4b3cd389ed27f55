"""Copies of one module that exchange through tables, beside a plain single-process computation.

Workers are one process, its threads, or processes; what they find is worked out in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx import tables
from phalanx.errors import ConfigError, PeerTimeout, StateError
from tests.multiprocess.children import Children, Parent
from tests.worlds import DEADLINE_S, THREADS, in_table_worlds

pytestmark = pytest.mark.promise("shared-modules")

NAN, INF = float("nan"), float("inf")


class Net(nn.Module):
    """Ties, a frozen parameter, batch norm, two dtypes, and constants that are infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 7).double()
        self.tied = nn.Linear(7, 7).double()
        self.tied.weight = self.second.weight
        self.tied.bias.requires_grad_(False)
        self.register_buffer("mask", torch.tensor([0.0, -INF, NAN]))

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.second(self.norm(self.first(x)).double()).tanh())


def fill(net: nn.Module, seed: int) -> None:
    """Give a net its values by a generator of its own: the global one is shared by threads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)


def seeded_net(seed: int) -> Net:
    net = Net()
    fill(net, seed)
    return net


def batch_of(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(6, 5, generator=generator), torch.randn(6, 7, generator=generator)


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> None:
    x, y = batch_of(worker, step)
    optimizer.zero_grad()
    (net(x) - y).square().mean().backward()
    optimizer.step()


def state_of(net: nn.Module) -> dict[str, list]:
    return {name: value.tolist() for name, value in net.state_dict().items() if name != "mask"}


def sgd(net: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=lr)


# --- what everybody begins with -------------------------------------------------------------------


def begin(world: tables.TableGroup) -> dict[str, list]:
    net = seeded_net(world.worker_id)
    tables.SharedModule(net, world)
    return state_of(net)


@in_table_worlds(mode=[{}, {"sync": True}, {"staleness": 1}])
def test_every_copy_begins_with_the_masters_values(world, n, mode, run):
    found = world.run(begin, n, run=run, **mode)
    assert found == [state_of(seeded_net(0))] * n


# --- one worker -----------------------------------------------------------------------------------


def train_shared(world: tables.TableGroup, every: int, merge: str) -> dict[str, list]:
    net = seeded_net(7)
    torch.set_num_threads(1)  # part of what fixes the bits
    shared = tables.SharedModule(net, world, every, merge)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for step in range(30):
        train_step(net, optimizer, world.worker_id, step)
        assert shared.step() == ((step + 1) % every == 0)
    assert (shared.num_steps, shared.num_syncs) == (30, 30 // every)
    return state_of(net)


@in_table_worlds(at_most=1)
@pytest.mark.parametrize("mode", [{}, {"sync": True}, {"staleness": 2}], ids=str)
@pytest.mark.parametrize(("every", "merge"), [(1, "sum"), (1, "mean"), (7, "mean")])
def test_one_worker_trains_as_if_it_were_alone_to_the_bit(world, n, mode, every, merge, run):
    torch.set_num_threads(1)
    net = seeded_net(7)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for step in range(30):
        train_step(net, optimizer, 0, step)
    found = world.run(partial(train_shared, every=every, merge=merge), 1, run=run, **mode)
    assert found == [state_of(net)]


# --- synchronous ----------------------------------------------------------------------------------


class Plain(nn.Module):
    """A float64 net without buffers, so that everything can be worked out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4).double(), nn.Linear(4, 7).double()
        fill(self, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.double()).tanh())


def train_plain(
    world: tables.TableGroup, every: int, merge: str, outer: object, steps: int
) -> dict[str, list]:
    net = Plain()
    shared = tables.SharedModule(net, world, every, merge, outer)
    optimizer = sgd(net)
    for step in range(steps):
        train_step(net, optimizer, world.worker_id, step)
        shared.step()
    return state_of(net)


def rounds_by_hand(n: int, every: int, merge: str, outer: bool, steps: int) -> dict[str, Tensor]:
    """What n workers would make of it, worked out in one process."""
    lr, momentum = 0.7, 0.9
    nets = [Plain() for _ in range(n)]
    optimizers = [sgd(net) for net in nets]
    shared = [p.detach().clone() for p in nets[0].parameters()]
    velocity = [torch.zeros_like(p) for p in shared]
    for step in range(steps):
        for worker, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            train_step(net, optimizer, worker, step)
        if (step + 1) % every:
            continue
        for index, value in enumerate(shared):
            found = [list(net.parameters())[index].detach() - value for net in nets]
            change = sum(found) / (n if merge == "mean" else 1)
            if outer:
                velocity[index] = momentum * velocity[index] - change
                change = -lr * (-change + momentum * velocity[index])
            value += change
        for net in nets:
            for parameter, value in zip(net.parameters(), shared, strict=True):
                parameter.data.copy_(value)
    return nets[0].state_dict()


@in_table_worlds()
@pytest.mark.parametrize(
    ("every", "merge", "outer"),
    [(1, "mean", None), (1, "sum", None), (4, "mean", None), (4, "mean", "nesterov"),
     (3, "sum", "nesterov")],
)  # fmt: skip
def test_synchronous_rounds_are_what_one_process_works_out(world, n, every, merge, outer, run):
    body = partial(train_plain, every=every, merge=merge, outer=outer, steps=12)
    found = world.run(body, n, run=run, sync=True)
    wanted = rounds_by_hand(n, every, merge, outer is not None, 12)
    assert all(state == found[0] for state in found)  # the same bits
    for name, value in wanted.items():
        # 12 steps of sums of at most 3 float64 numbers, in another order
        torch.testing.assert_close(
            torch.tensor(found[0][name], dtype=torch.float64), value, rtol=1e-12, atol=1e-14
        )


def train_with_statistics(world: tables.TableGroup) -> list[tuple[list, list, list, int]]:
    net = seeded_net(0)
    shared = tables.SharedModule(net, world, merge="sum")
    seen = []
    for step in range(4):
        with torch.no_grad():
            net.train()(batch_of(world.worker_id, step)[0] * (1 + world.worker_id))
        before = net.norm.running_mean.tolist(), net.norm.running_var.tolist()
        shared.sync()
        seen.append((*before, net.norm.running_mean.tolist(), net.norm.running_var.tolist(),
                     net.norm.num_batches_tracked.item()))  # fmt: skip
    assert net.mask.tolist()[:2] == [0.0, -INF]
    assert net.mask.isnan().tolist() == [False, False, True]
    return seen


@in_table_worlds()
def test_statistics_are_averaged_whatever_merge_is_and_counters_are_not(world, n, run):
    found = world.run(train_with_statistics, n, run=run, sync=True)
    for step in range(4):
        for before, after in ((0, 2), (1, 3)):
            mean = torch.tensor([worker[step][before] for worker in found]).double().mean(0)
            for worker in found:
                # one rounding per sum of at most three float32 numbers
                torch.testing.assert_close(
                    torch.tensor(worker[step][after]).double(), mean, rtol=1e-6, atol=1e-7
                )
                assert worker[step][after] == found[0][step][after]
        assert [worker[step][4] for worker in found] == [step + 1] * n


# --- asynchronous and bounded ---------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(-64, 64), st.booleans()), max_size=30),
    st.sampled_from(["sum", "mean"]),
    st.booleans(),
)
def test_any_order_of_moves_and_syncs_is_what_one_process_works_out(turns, merge, has_outer):
    """Two workers move their copies and sync when they like; every number here is exact."""
    outer = tables.Nesterov(lr=0.5, momentum=0.5) if has_outer else None
    share = 2 if merge == "mean" else 1
    value, velocity, copies, bases = 0.0, 0.0, [0.0, 0.0], [0.0, 0.0]
    with tables.join(num_workers=2) as world, world.thread_worker() as other:
        nets = [nn.Linear(1, 3, bias=False).double() for _ in range(2)]
        for net in nets:
            nn.init.zeros_(net.weight)
        shared = [
            tables.SharedModule(net, w, merge=merge, outer=outer, name="net")
            for net, w in zip(nets, (world, other), strict=True)
        ]
        for worker, move, syncs in turns:
            with torch.no_grad():
                nets[worker].weight += move
            copies[worker] += move
            if syncs:
                shared[worker].sync()
                change = (copies[worker] - bases[worker]) / share
                if has_outer:
                    velocity = 0.5 * velocity - change
                    change = -0.5 * (-change + 0.5 * velocity)
                value += change
                copies[worker] = bases[worker] = value
            for net, copy in zip(nets, copies, strict=True):
                assert net.weight.flatten().tolist() == pytest.approx([copy] * 3, abs=1e-9)


def statistics_in_turn(world: tables.TableGroup) -> list[float]:
    net = nn.BatchNorm1d(1).double()
    shared = tables.SharedModule(net, world, merge="sum")
    seen = []
    for step in range(2):
        for worker in range(world.num_workers):
            world.barrier()
            if worker == world.worker_id:
                net.running_mean.fill_(8.0 * worker + step)
                shared.sync()
                seen.append(net.running_mean.item())
    world.barrier()
    return seen


@in_table_worlds()
def test_asynchronous_statistics_go_a_share_of_the_way_to_each_workers(world, n, run):
    value, wanted = 0.0, [[] for _ in range(n)]
    for step in range(2):
        for worker in range(n):
            value += (8.0 * worker + step - value) / n
            wanted[worker].append(value)
    for seen, want in zip(world.run(statistics_in_turn, n, run=run), wanted, strict=True):
        assert seen == pytest.approx(want, rel=1e-14)


# --- what goes wrong ------------------------------------------------------------------------------


def stay_away(world: tables.TableGroup) -> int | None:
    """Worker 0 syncs while another stays away; that is the last sync."""
    net = seeded_net(0)
    shared = tables.SharedModule(net, world)
    rank = None
    world.barrier()
    if world.worker_id == 0:
        kept, world.timeout_s = world.timeout_s, 0.2
        with pytest.raises(PeerTimeout, match=r"within 0\.2 s") as caught:
            shared.sync()
        rank = caught.value.rank
        for call in (shared.sync, partial(shared.restore, "nowhere")):
            with pytest.raises(StateError, match="must come after syncs that succeeded"):
                call()
        world.timeout_s = kept
    world.barrier()
    return rank


def test_a_sync_that_timed_out_is_the_last_one(run):
    assert THREADS.run(stay_away, 2, run=run, sync=True)[0] == 1


def assign_state(net: nn.Sequential) -> None:
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)


def replace_layer(net: nn.Sequential, size: int = 7) -> None:
    net[1] = nn.Linear(7, size)


def add_buffer(net: nn.Sequential) -> None:
    net[0].register_buffer("mean", torch.zeros(3))


OTHERS = {
    "wider": partial(replace_layer, size=9),
    "a layer more": lambda net: net.append(nn.Linear(7, 2)),
    "a layer less": lambda net: net.pop(1),
    "a buffer more": add_buffer,
}


def begin_and_change(
    world: tables.TableGroup, change: Callable[[nn.Sequential], None]
) -> tuple[nn.Sequential, tables.SharedModule]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7))
    shared = tables.SharedModule(net, world, merge="sum")
    change(net)
    return net, shared


def train_after(world: tables.TableGroup, change: Callable[[nn.Sequential], None]) -> list:
    net, shared = begin_and_change(world, change)
    with torch.no_grad():  # worker 0's module is the master's: the others take it over
        for tensor in net.parameters():
            tensor.fill_(world.worker_id)
    shared.sync()
    tensors = {id(p) for p in net.parameters()}
    for _ in range(2):
        train_step(net, sgd(net), world.worker_id, 1)
        shared.sync()
    assert tensors == {id(p) for p in net.parameters()}
    return [p.tolist() for p in net.parameters()]


@pytest.mark.parametrize("change", [assign_state, replace_layer])
def test_tensors_that_took_the_place_of_shared_ones_are_shared(change, run):
    first, second = THREADS.run(partial(train_after, change=change), 2, run=run, sync=True)
    assert first == second


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_a_module_with_other_tensors_than_were_shared_is_refused(change, tmp_path):
    with tables.join() as world:
        net, shared = begin_and_change(world, change)
        before = state_of(net)
        for call in (shared.sync, partial(shared.restore, tmp_path)):
            with pytest.raises(StateError, match="they have changed"):
                call()
        assert state_of(net) == before


def go_nan(world: tables.TableGroup) -> None:
    net = seeded_net(0)
    shared = tables.SharedModule(net, world, merge="sum")
    before = repr(state_of(net))
    for tensor, name in ((net.tied.bias, "tied.bias"), (net.norm.running_var, "norm.running_var")):
        kept = tensor.detach().clone()
        for poison in (NAN, INF):
            tensor.detach()[1] = poison
            held = state_of(net)
            with pytest.raises(ConfigError, match=f"`{name}` must be finite to be shared, but"):
                shared.sync()
            assert repr(state_of(net)) == repr(held)
        tensor.detach().copy_(kept)
    shared.sync()  # and the table has taken nothing
    assert repr(state_of(net)) == before


def test_what_is_not_finite_is_refused_by_name_and_changes_nothing(run):
    THREADS.run(go_nan, 1, run=run)


def sparse_net() -> nn.Module:
    net = nn.Linear(2, 2)
    net.register_buffer("sparse", torch.eye(2).to_sparse())
    return net


def whole_number_net() -> nn.Module:
    net = nn.Module()
    net.whole = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    return net


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"module": "net"}, "`module` must be an nn.Module, but is 'net'"),
        ({"module": nn.ReLU()}, "`module` must have parameters, but ReLU has none"),
        (
            {"module": nn.LazyLinear(3)},
            "`weight` must be a dense .*, but is UninitializedParameter",
        ),
        ({"module": nn.Linear(2, 2, device="meta")}, "`weight` must be a dense .*, on meta"),
        ({"module": sparse_net()}, "`sparse` must be a dense tensor .*, torch.sparse_coo"),
        ({"module": whole_number_net()}, "`whole` must be a dense .* of torch.int64"),
        ({"world": None}, "`world` must be what `join` returned, but is None"),
        ({"every": 0}, "`every` must be at least 1 step, but is 0"),
        ({"every": 2.5}, "`every` must be a whole number, but is 2.5"),
        ({"merge": "max"}, "`merge` must be 'sum' or 'mean', but is 'max'"),
        ({"merge": None}, "`merge` must be 'sum' or 'mean', but is None"),
        ({"outer": "adam"}, "`outer` must be None, 'nesterov' or .*, but is 'adam'"),
    ],
)
def test_what_cannot_be_shared_is_refused(change, message):
    net = nn.Linear(2, 2)
    with tables.join() as world, pytest.raises(ConfigError, match=message):
        tables.SharedModule(**{"module": net, "world": world, **change})


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats_lose_no_small_changes(dtype):
    """A worker's share of each change is a quarter of the last bit at 256, and eight count."""
    last_bit = torch.finfo(dtype).eps * 256
    with tables.join(num_workers=4) as world, world.thread_worker() as other:
        nets = [nn.Linear(1, 1, bias=False).to(dtype) for _ in range(2)]
        nn.init.constant_(nets[0].weight, 256.0)
        still, moving = (
            tables.SharedModule(net, w, name="net")
            for net, w in zip(nets, (world, other), strict=True)
        )
        for _ in range(8):
            nets[1].weight.data += last_bit
            moving.sync()
        still.sync()
        assert nets[0].weight.item() == 256 + 2 * last_bit


def test_a_parameter_keeps_its_place_layout_and_optimizer_state():
    with tables.join() as world:
        net = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(net.parameters())
        places = [p.data_ptr() for p in net.parameters()]
        shared = tables.SharedModule(net, world, outer="nesterov")
        net(torch.ones(1, 3, 4, 4)).sum().backward()
        optimizer.step()
        shared.sync()
        assert [p.data_ptr() for p in net.parameters()] == places
        assert net.weight.is_contiguous(memory_format=torch.channels_last)
        assert all(p.grad is not None and optimizer.state[p] for p in net.parameters())


# --- checkpoints ----------------------------------------------------------------------------------


def train_and_go_back(world: tables.TableGroup, directory: str) -> tuple[dict, dict]:
    net = seeded_net(1)
    shared = tables.SharedModule(net, world, 2, outer="nesterov", name="net")
    optimizer = sgd(net)

    def train(steps: range) -> dict[str, list]:
        for step in steps:
            train_step(net, optimizer, world.worker_id, step)
            shared.step()
        return state_of(net)

    train(range(6))
    world.barrier()
    if world.is_master:
        files = [file.name for file in shared.snapshot(directory)]
        assert files == ["net.parameters.snapshot", "net.statistics.snapshot"]
    world.barrier()
    once = train(range(6, 13))
    shared.restore(directory)
    assert shared.num_steps == 13
    shared.num_steps = 6
    return once, train(range(6, 13))


@in_table_worlds()
def test_a_restored_snapshot_goes_on_to_the_same_bits(world, n, run, tmp_path):
    body = partial(train_and_go_back, directory=str(tmp_path))
    for once, again in world.run(body, n, run=run, sync=True):
        once.pop("norm.num_batches_tracked"), again.pop("norm.num_batches_tracked")
        assert once == again


# --- who comes later ------------------------------------------------------------------------------


def join_late(parent: Parent, run: str, mode: dict) -> None:
    with tables.join(run, timeout_s=DEADLINE_S, **mode) as world:
        net = seeded_net(5)
        shared = tables.SharedModule(net, world, merge="sum", name="net")
        seen = []
        for _ in range(5):
            with torch.no_grad():
                net.first.weight += 1
            shared.sync()
            seen.append(net.first.weight[0, 0].item())
        parent.tell(seen)


@pytest.mark.parametrize("mode", [{}, {"sync": True}, {"staleness": 1}], ids=str)
def test_a_worker_that_comes_later_begins_where_the_others_are(mode, run):
    """In bulk-synchronous mode it comes between the rounds of several tables, at any moment."""
    with Children() as children, tables.join(run, timeout_s=DEADLINE_S, **mode) as world:
        net = seeded_net(0)
        first = net.first.weight[0, 0].item()
        shared = tables.SharedModule(net, world, merge="sum", name="net")
        for _ in range(3):
            with torch.no_grad():
                net.first.weight += 1
            shared.sync()
        child = children.start(join_late, run, mode)
        turns = 0
        while not child.connection.poll(0):
            turns += 1
            shared.sync()
        seen = child.get()
        child.process.join(DEADLINE_S)
        shared.sync()
        assert seen == pytest.approx([first + 3 + turn for turn in range(1, 6)], abs=1e-4)
        assert net.first.weight[0, 0].item() == pytest.approx(first + 8, abs=1e-4)
