"""`OnDevice`; "meta" stands for a second device, "cuda:99" for one that no machine has."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import warnings
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from phalanx import OnDevice
from phalanx.errors import ConfigError
from tests.contracts.containers import Total, assert_equal_pass, draw, fresh, loss_of, stored
from tests.zoo import assert_close, twin_of

pytestmark = pytest.mark.promise("containers")

F64 = torch.float64
ABSENT = "cuda:99"


class Spy(nn.Module):
    """Keeps what it is given, and returns all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return {"args": args, "kwargs": kwargs}


class Raises(nn.Module):
    def forward(self, word):
        if word == "fails":
            raise ValueError(word)
        return word


class Tied(nn.Module):
    """One parameter and one buffer under two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(3))
        self.first.register_buffer("seen", self.seen)


@dataclass
class Pair:
    left: Tensor
    right: Tensor


def absent(module: nn.Module, *devices: str) -> OnDevice:
    with pytest.warns(UserWarning, match=ABSENT):
        return OnDevice(module, ABSENT, *devices)


def devices(module: nn.Module) -> set[str]:
    return {str(tensor.device) for tensor in (*module.parameters(), *module.buffers())}


class TestMoving:
    def test_the_module_goes_to_its_device_and_stays_trained_in_place(self):
        net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        wrapped = OnDevice(net, "meta")
        assert wrapped.module is net
        assert devices(net) == {"meta"}

    def test_inputs_go_there_whatever_they_are_nested_in(self):
        spy = Spy()
        x = torch.ones(2, 3)
        named = OrderedDict(b=[x, (x, "text")], a=Pair(x, torch.ones(1, device="meta")))
        OnDevice(spy, "meta")(x, named, None, flag=True, mask=x)
        assert spy.args[0].device.type == "meta"
        assert type(spy.args[1]) is OrderedDict
        assert list(spy.args[1]) == ["b", "a"]
        first, (second, text) = spy.args[1]["b"]
        pair = spy.args[1]["a"]
        moved = (first, second, pair.left, pair.right, spy.kwargs["mask"])
        assert all(leaf.device.type == "meta" for leaf in moved)
        assert isinstance(pair, Pair)
        assert (text, spy.args[2], spy.kwargs["flag"]) == ("text", None, True)

    def test_outputs_go_to_their_device_or_stay(self):
        x = torch.ones(2, 3)
        assert OnDevice(nn.Linear(3, 2), "meta")(x).device.type == "meta"
        outputs = OnDevice(Spy(), "cpu", "meta")(x, {"a": [x, 1]}, more=x)
        leaves = (outputs["args"][0], outputs["args"][1]["a"][0], outputs["kwargs"]["more"])
        assert all(leaf.device.type == "meta" for leaf in leaves)
        assert outputs["args"][1]["a"][1] == 1

    def test_its_device_is_the_current_one_inside_and_the_callers_one_after(self, monkeypatch):
        entered = []

        @contextlib.contextmanager
        def current(device):
            entered.append(device)
            try:
                yield
            finally:
                entered.append("left")

        monkeypatch.setattr(torch.cuda, "device_count", lambda: 100)
        monkeypatch.setattr(torch.accelerator, "device_index", current)
        wrapped = OnDevice(Raises(), ABSENT)
        for word, error in (("text", None), ("fails", ValueError)):
            with pytest.raises(error) if error else contextlib.nullcontext():
                wrapped(word)
        assert entered == [99, "left"] * 2

    def test_unknown_devices_are_refused(self):
        net = nn.Linear(3, 2)
        for device in ("gpu-of-my-dreams", "cuda:-1", 1.5, None):
            with pytest.raises(
                ConfigError, match=r"`device` must be a name such as 'cpu' or 'cuda:0'"
            ):
                OnDevice(net, device)
        with pytest.raises(ConfigError, match=r"`output_device` must .* but is 'nowhere'"):
            OnDevice(net, "meta", "nowhere")
        with pytest.raises(ConfigError, match=r"`module` must be an `nn.Module`, but is <function"):
            OnDevice(lambda x: x, "cpu")
        assert devices(net) == {"cpu"}


class TestPinned:
    def test_a_model_around_it_changes_the_dtype_but_not_the_device(self):
        net = nn.Sequential(nn.Linear(3, 2), OnDevice(nn.Linear(2, 2), "cpu"), nn.BatchNorm1d(2))
        values = net[1].weight.detach().clone()
        net.to("meta", torch.float64)
        assert net[0].weight.device.type == net[2].running_mean.device.type == "meta"
        assert net[1].weight.device.type == "cpu"
        assert net[1].weight.dtype == torch.float64
        assert torch.equal(net[1].weight, values.double())
        assert net.half()[1].weight.dtype == torch.float16

    def test_no_copy_is_made_where_it_does_not_belong(self):
        """The module may be pinned because it fits nowhere else."""
        largest = 0

        def move(tensor: Tensor) -> Tensor:
            nonlocal largest
            largest = max(largest, tensor.numel())
            return tensor.to("meta")

        OnDevice(nn.Linear(100, 100), "cpu")._apply(move)
        assert largest <= 4

    def test_a_wrapper_in_a_wrapper_runs_on_the_inner_device(self):
        spy = Spy()
        outer = OnDevice(OnDevice(spy, "meta"), "cpu", "meta")
        assert outer(torch.ones(2))["args"][0].device.type == "meta"
        assert spy.args[0].device.type == "meta"
        assert devices(outer.to("cpu")) == {"meta"}

    def test_moving_the_module_itself_takes_it_elsewhere_until_the_model_moves(self):
        wrapped = OnDevice(nn.Linear(3, 2), "cpu")
        wrapped.module.to("meta")
        assert wrapped(torch.ones(1, 3)).device.type == "meta"
        assert "cpu, runs on meta" in repr(wrapped)


class TestAbsentDevice:
    def test_inputs_come_to_the_module_and_outputs_to_a_device_that_exists(self):
        wrapped = absent(Spy(), "meta").to("meta")
        assert devices(wrapped) == {"meta"}  # nothing pins it here
        assert wrapped(torch.ones(2))["args"][0].device.type == "meta"
        assert wrapped.module.args[0].device.type == "meta"
        assert absent(nn.Tanh(), "meta")(torch.ones(2)).device.type == "meta"

    def test_one_warning_says_so_at_the_users_line(self):
        line = inspect.currentframe().f_lineno + 2
        with pytest.warns(UserWarning, match=r"`OnDevice\(Linear\)` runs where it is") as caught:
            wrapped = OnDevice(nn.Linear(3, 2), ABSENT, ABSENT)
        assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrapped(torch.ones(1, 3))
            wrapped(torch.ones(1, 3))
            wrapped.float()


class TestWrapping:
    def test_keys_and_names_are_those_of_the_unwrapped_module(self):
        def build(wrap):
            inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
            return nn.Sequential(OrderedDict(a=wrap(nn.Linear(3, 3)), module=wrap(wrap(inner))))

        plain, wrapped = build(lambda module: module), build(lambda module: OnDevice(module, "cpu"))
        for one, other in ((plain, wrapped), (plain.module, wrapped.module)):
            assert list(one.state_dict()) == list(other.state_dict())
            assert list(dict(one.named_parameters())) == list(dict(other.named_parameters()))
            assert list(dict(one.named_buffers())) == list(dict(other.named_buffers()))
            assert list(one.state_dict(prefix="x.")) == list(other.state_dict(prefix="x."))
        for name, parameter in wrapped.named_parameters():
            assert wrapped.get_parameter(name) is parameter

    def test_attributes_of_the_module_can_be_read_and_its_tensors_set(self):
        net = OnDevice(nn.Linear(3, 2), "cpu")
        assert net.in_features == 3
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = net.nothing
        net.weight = nn.Parameter(torch.ones(2, 3))
        net.extra = nn.Parameter(torch.ones(1))
        net.register_parameter("more", nn.Parameter(torch.ones(1)))
        net.register_buffer("seen", torch.ones(1))
        assert net.module.weight.sum() == 6
        assert list(net.state_dict()) == ["weight", "bias", "extra", "more", "seen"]
        assert list(dict(net.named_parameters())) == ["weight", "bias", "extra", "more"]
        net.child = nn.Linear(1, 1, bias=False)
        net.bias = None
        assert list(net.state_dict()) == ["weight", "extra", "more", "seen", "child.weight"]
        net.note = "mine"
        assert not hasattr(net.module, "note")
        net.eval()
        assert not net.module.training


@pytest.mark.gpu
class TestGpu:
    def test_a_model_around_it_goes_elsewhere_and_it_stays(self, gpu):
        tied = Tied()
        weight = tied.first.weight
        net = nn.Sequential(nn.Linear(3, 3), OnDevice(tied, gpu), OnDevice(nn.Tanh(), "cpu"))
        assert devices(net[1]) == {str(gpu)}
        assert tied.first.weight is tied.second.weight is weight
        net.cpu().double()
        assert devices(net[1]) == {str(gpu)}
        assert weight.dtype == torch.float64
        pinned = nn.Sequential(OnDevice(nn.Linear(3, 2), "cpu")).to(gpu.type)
        assert devices(pinned) == {"cpu"}

    def test_a_model_of_the_gpu_is_loaded_onto_the_cpu_and_back(self, gpu):
        net = OnDevice(nn.Linear(3, 2), gpu, "cpu")
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False, map_location="cpu")
        x = torch.randn(2, 3)
        torch.testing.assert_close(loaded(x), net(x), rtol=1e-3, atol=1e-3)
        assert devices(loaded) == {"cpu"}
        assert devices(loaded.to(gpu.type)) == {str(gpu)}
        assert devices(stored(net)) == {str(gpu)}


@pytest.mark.gpu
def test_gradients_of_a_table_go_back_to_the_device_of_each_leaf(gpu: torch.device) -> None:
    net = Total()
    twin = copy.deepcopy(net)
    model = OnDevice(net, gpu, "cpu")
    assert model.linear.weight.device == gpu
    current = torch.accelerator.current_device_index()
    here, there = fresh([draw(5, 3), draw(5, 3, seed=1, device=gpu)])
    output = model([here, there])
    loss_of(output).backward()
    assert torch.accelerator.current_device_index() == current
    assert (here.grad.device.type, there.grad.device.type) == ("cpu", gpu.type)
    assert output.device.type == "cpu"
    left, right = fresh([here.detach(), there.detach().cpu()])
    expected = twin([left, right])
    loss_of(expected).backward()
    assert_close([output, here.grad, there.grad.cpu()], [expected, left.grad, right.grad], F64)


def test_a_chain_made_for_several_gpus_loads_and_runs_without_them(device: torch.device) -> None:
    """Converted, stored and loaded as well; the original took the library away to show it."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double().to(device)
    twin = twin_of(plain)
    with pytest.warns(UserWarning, match="no such device") as warned:
        chain = nn.Sequential(
            *(OnDevice(layer, f"cuda:{97 + place}") for place, layer in enumerate(plain))
        )
    assert len(warned) == 3  # one for each object
    with pytest.warns(UserWarning, match="no such device"):
        loaded = stored(chain)
    x = draw(5, 4, device=device)
    for model in (chain, loaded, copy.deepcopy(chain)):
        assert_equal_pass(model, twin, x)
    assert_equal_pass(copy.deepcopy(chain[1]), twin[1], x)
    assert_close(chain.float()(x.float()), twin.float()(x.float()), torch.float32)
