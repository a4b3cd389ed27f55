"""What torch's own programs do with a group beyond plain calls; each failed over `phalanx` once."""

from __future__ import annotations

import datetime
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import phalanx  # noqa: F401
from phalanx.errors import ConfigError, PeerError
from tests.multiprocess.ranks import Ranks

pytestmark = pytest.mark.promise("backend-carries-other-libraries")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def default_ranks() -> Iterator[Ranks]:
    with Ranks(2, backend="phalanx") as ranks:
        yield ranks


def make(timeout_s: float = 20.0) -> Any:
    group = dist.new_group(None, datetime.timedelta(seconds=timeout_s), "phalanx")
    dist.barrier()  # else a rank may give up or leave while another still connects
    return group


# --- futures --------------------------------------------------------------------------------------


def begun_in_a_callback(rank: int, folder: str) -> list[float]:
    group, sums = make(5.0), []
    other = dist.FileStore(f"{folder}/begun", 2)
    for turn in range(20):
        first, second = torch.ones(3), torch.ones(3)

        def then(_: Any, second: Tensor = second, key: str = str(turn)) -> Any:
            if rank == 1:
                other.wait([key], datetime.timedelta(seconds=20))
            future = dist.all_reduce(second, group=group, async_op=True).get_future()
            if rank == 0:
                other.set(key, b"")
            return future

        work = dist.all_reduce(first, group=group, async_op=True)
        work.get_future().then(then).wait().wait()
        sums.append(second.sum().item())
    dist.destroy_process_group(group)
    return sums


def test_a_collective_may_begin_in_a_futures_callback(ranks, tmp_path: Path):
    assert ranks.run(begun_in_a_callback, str(tmp_path)) == [[6.0] * 20] * 2


def a_future_waited_for_in_a_callback(rank: int, folder: str, driven: bool) -> list[float]:
    group = make(10.0)
    begun = dist.FileStore(f"{folder}/begun", 2)
    first, second = torch.ones(3), torch.ones(3)

    def then(_: Any) -> None:
        future = dist.all_reduce(second, group=group, async_op=True).get_future()
        begun.set("second", b"")
        future.wait()  # in C++: this thread runs nothing meanwhile

    if rank == 0:
        work = dist.all_reduce(first, group=group, async_op=True)
        told = work.get_future().then(then)
        begun.set("first", b"")
        if driven:
            work.wait()  # the callback runs in here
        told.wait()
    else:
        for key, tensor in (("first", first), ("second", second)):
            begun.wait([key], datetime.timedelta(seconds=20))
            dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    return [first.mean().item(), second.mean().item()]


@pytest.mark.parametrize("driven", [False, True])
def test_a_callback_may_wait_for_a_future_of_its_group(ranks, tmp_path: Path, driven):
    sums = ranks.run(a_future_waited_for_in_a_callback, str(tmp_path), driven)
    assert sums == [[2.0, 2.0]] * 2


def waited_for_in_a_callback(rank: int, folder: str) -> list[float]:
    one, other = make(5.0), make(5.0)
    begun = dist.FileStore(f"{folder}/begun", 2)
    first, second, large = torch.ones(3), torch.ones(3), torch.ones(1_000_003)
    if rank == 0:
        told = dist.all_reduce(first, group=one, async_op=True).get_future()
        told = told.then(lambda _: dist.all_reduce(second, group=one))
        work = dist.all_reduce(large, group=other, async_op=True)
        begun.set("both", b"")
        told.wait()
        work.wait()
    else:
        # The other rank leaves both to its thread.
        begun.wait(["both"], datetime.timedelta(seconds=20))
        dist.all_reduce(first, group=one)
        dist.all_reduce(large, group=other)  # while the other's callback waits for us
        dist.all_reduce(second, group=one)
    for group in (one, other):
        dist.destroy_process_group(group)
    return [tensor.mean().item() for tensor in (first, second, large)]


def test_other_groups_go_on_while_a_callback_waits(ranks, tmp_path: Path):
    assert ranks.run(waited_for_in_a_callback, str(tmp_path)) == [[2.0] * 3] * 2


def with_power_sgd(rank: int) -> list[float]:
    torch.manual_seed(0)
    group = make()
    model = DistributedDataParallel(nn.Linear(20, 20), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, 2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(30, 20, generator=generator)).square().mean().backward()
    gradient = model.module.weight.grad
    dist.destroy_process_group(group)
    return gradient.flatten().tolist()


def test_the_power_sgd_hook_gives_all_ranks_one_gradient(ranks):
    first, second = ranks.run(with_power_sgd)
    assert first == second
    assert max(map(abs, first)) > 0


def results(rank: int, backend: str) -> dict[str, tuple[Any, Any]]:
    group = dist.new_group(backend=backend)

    def mine() -> Tensor:
        return torch.full((2,), rank + 1.0)

    def parts() -> list[Tensor]:
        return [torch.zeros(2), torch.zeros(2)]

    at_root = dist.GatherOptions()
    scattered, reduced, given = dist.ScatterOptions(), dist.ReduceOptions(), dist.BroadcastOptions()
    scattered.rootRank = reduced.rootRank = given.rootRank = 1
    reduced.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    calls = {
        "all_reduce": lambda: group.allreduce([mine()]),
        "broadcast": lambda: group.broadcast([mine()], given),
        "reduce": lambda: group.reduce([mine()], reduced),
        "all_gather": lambda: group.allgather([parts()], [mine()]),
        "all_gather into one": lambda: group._allgather_base(torch.zeros(4), mine()),
        "gather": lambda: group.gather([parts()] if rank == 0 else [], [mine()], at_root),
        "scatter": lambda: group.scatter(
            [torch.zeros(2)], [[mine(), mine() + 5]] if rank == 1 else [], scattered
        ),
        "all_to_all": lambda: group.alltoall(parts(), [mine(), mine()]),
        "barrier": lambda: group.barrier(),
    }
    found = {}
    for name, call in calls.items():
        work = call()
        work.wait()
        if name.startswith("reduce") and rank == 0:
            continue  # undefined where it is not the root
        found[name] = as_lists(work.result()), as_lists(work.get_future().wait())
    dist.destroy_process_group(group)
    return found


def as_lists(given: Any) -> Any:
    return given.tolist() if isinstance(given, Tensor) else [as_lists(one) for one in given]


def results_of_both(rank: int) -> tuple[Any, Any]:
    return results(rank, "phalanx"), results(rank, "gloo")


def test_results_and_futures_are_shaped_as_gloos(ranks):
    for ours, gloos in ranks.run(results_of_both):
        assert ours == gloos


# --- DDP and the compiler -------------------------------------------------------------------------


def joined_by_present_size(rank: int, uneven: bool) -> list[float]:
    group = make(8.0)
    layer = nn.Linear(5, 5, bias=False)
    nn.init.ones_(layer.weight)
    model = DistributedDataParallel(layer, process_group=group)
    gradients = []
    with model.join(divide_by_initial_world_size=False):
        for _ in range(3 + 2 * uneven * rank):
            model.zero_grad()
            model(torch.full((1, 5), rank + 1.0)).sum().backward()
            gradients.append(layer.weight.grad.mean().item())
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    return gradients


@pytest.mark.parametrize("uneven", [False, True])
def test_join_divides_by_the_ranks_that_still_have_batches(ranks, uneven):
    first, second = ranks.run(joined_by_present_size, uneven)
    assert first == [1.5] * 3
    assert second == [1.5] * 3 + [2.0] * (2 * uneven)


def compiled_ddp(rank: int, static: bool) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = torch.compile(DistributedDataParallel(module, static_graph=static), backend="aot_eager")
    for step in range(3):
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(5, 4, generator=generator)).square().mean().backward()
    return module[0].weight.grad.flatten().tolist()


@pytest.mark.parametrize("static", [False, pytest.param(True, marks=pytest.mark.night)])
def test_a_compiled_ddp_model_trains(default_ranks, static):
    first, second = default_ranks.run(compiled_ddp, static)
    assert first == second


# --- what is asked of a group ---------------------------------------------------------------------


def asked(rank: int) -> tuple[Any, ...]:
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device = dist.distributed_c10d._get_pg_default_device()
    return str(device), backend.size(), backend.rank(), backend.name()


def test_a_group_answers_as_its_own_backend(default_ranks):
    assert default_ranks.run(asked) == [("cpu", 2, rank, "phalanx") for rank in range(2)]


def loaded_into_meta(rank: int, folder: str) -> bool:
    torch.manual_seed(0)
    source = nn.Linear(4, 3)
    checkpoint.save({"model": source.state_dict()}, checkpoint_id=folder)
    with torch.device("meta"):
        target = nn.Linear(4, 3)
    state = {"model": target.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    return all(
        torch.equal(value, source.state_dict()[name]) for name, value in state["model"].items()
    )


def test_a_checkpoint_is_loaded_into_meta_tensors(default_ranks, tmp_path: Path):
    assert default_ranks.run(loaded_into_meta, str(tmp_path)) == [True, True]


def broadcast_from_rank_0(rank: int) -> list[float]:
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    full = get_model_state_dict(model) if rank == 0 else {}
    set_model_state_dict(model, full, options=options)
    return model.weight.flatten().tolist()


def test_a_state_dict_is_broadcast_from_rank_0(default_ranks):
    first, second = default_ranks.run(broadcast_from_rank_0)
    assert first == second


def profiled(rank: int) -> list[tuple[str, int]]:
    group = make()
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(2), group=group)
        dist.all_reduce(torch.ones(2), group=group, async_op=True).wait()
    dist.destroy_process_group(group)
    found = profile.key_averages()
    return sorted((one.key, one.count) for one in found if one.key.startswith("phalanx:"))


def test_a_profiler_shows_the_calls(ranks):
    first, second = ranks.run(profiled)
    assert first == second == [("phalanx:all_reduce", 2)]


# --- arguments ------------------------------------------------------------------------------------


def rooted(kind: Any, root: int) -> Any:
    options = kind()
    options.rootRank = root
    return options


def out_of_range(rank: int) -> list[str]:
    """Refused before anything is sent, by every rank; the group goes on."""
    group = make()
    one, two = torch.ones(2), [torch.ones(2), torch.ones(2)]
    said = []
    for call in (
        lambda: group.broadcast([one], rooted(dist.BroadcastOptions, 2)),
        lambda: group.broadcast([one], rooted(dist.BroadcastOptions, -1)),
        lambda: group.reduce([one], rooted(dist.ReduceOptions, 5)),
        lambda: group.gather([two], [one], rooted(dist.GatherOptions, 2)),
        lambda: group.scatter([one], [two], rooted(dist.ScatterOptions, 2)),
        lambda: group.send([one], dstRank=2, tag=0),
        lambda: group.recv([one], srcRank=-1, tag=0),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        said.append(str(caught.value))
    total = torch.ones(2)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [2.0, 2.0]
    dist.destroy_process_group(group)
    return said


def test_ranks_out_of_range_are_refused_on_every_rank(ranks):
    for said in ranks.run(out_of_range):
        assert said == [
            f"`{name}` must be a rank of the group (0 to 1), but is {rank}."
            for name, rank in [
                ("root", 2),
                ("root", -1),
                ("root", 5),
                ("root", 2),
                ("root", 2),
                ("dstRank", 2),
                ("srcRank", -1),
            ]
        ]


def without_time(rank: int) -> str:
    """Rank 1 comes only after rank 0 has given up, which a timeout of 0 makes at once."""
    group, said, options = make(), "", dist.AllreduceOptions()
    options.timeout = datetime.timedelta(0)
    if rank == 0:
        with pytest.raises(PeerError) as caught:
            group.allreduce([torch.ones(2)], options).wait()
        said = str(caught.value)
    dist.barrier()
    dist.destroy_process_group(group)
    return said


def test_a_timeout_of_0_does_not_wait(ranks):
    began_s = time.monotonic()
    assert "did not come to all_reduce of group" in ranks.run(without_time)[0]
    assert time.monotonic() - began_s < 15.0  # the group's own timeout is 20 s


def received_into_a_parameter(rank: int) -> list[float]:
    """A view of the parameter is used afterwards: DDP and torch's own tests do it."""
    group, parameter = make(), nn.Parameter(torch.full((4,), float(rank)))
    first, _ = torch.chunk(parameter, 2)
    dist.broadcast(parameter, 0, group)
    first.sum().backward()
    dist.destroy_process_group(group)
    return parameter.tolist()


def test_a_parameter_may_be_received_into_between_its_view_and_backward(ranks):
    assert ranks.run(received_into_a_parameter) == [[0.0] * 4] * 2


def end_in_a_callback(rank: int, store: str) -> None:
    dist.init_process_group("phalanx", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    other = dist.FileStore(f"{store}.begun", 2)
    begun, tensor = threading.Event(), torch.ones(3)
    if rank == 1:  # rank 0 waits, so that its thread for asynchronous operations ends them
        other.wait(["begun"], datetime.timedelta(seconds=20))

    def slow(_: Any) -> None:
        begun.set()
        if threading.current_thread() is not threading.main_thread():
            threading.main_thread().join(20)  # until the interpreter begins to end

    dist.all_reduce(tensor, async_op=True).get_future().add_done_callback(slow)
    if rank == 0:
        other.set("begun", b"")
    assert begun.wait(20)


@pytest.mark.night
def test_a_process_ends_well_while_a_callback_runs(tmp_path: Path):
    command = (
        "import sys; from tests.multiprocess.test_backend_torch import end_in_a_callback as end; "
        "end(int(sys.argv[1]), sys.argv[2])"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", command, str(rank), str(tmp_path / "store")])
        for rank in range(2)
    ]
    assert [process.wait(60) for process in started] == [0, 0]
