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
from torch.nn.utils.rnn import pack_sequence

from phalanx.errors import ConfigError
from phalanx.parallel.on_device import OnDevice

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


def saved_and_loaded(module: nn.Module, **options: object) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False, **options)


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

    def test_the_sizes_of_a_packed_sequence_stay_on_the_cpu(self):
        packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
        output, _ = OnDevice(nn.GRU(2, 4), "meta")(packed)
        assert output.data.device.type == "meta"
        assert output.batch_sizes.device.type == "cpu"

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

    def test_lazy_modules_can_be_wrapped(self):
        wrapped = OnDevice(nn.LazyLinear(2), "cpu")
        nn.Sequential(wrapped).to("meta", torch.float64)
        assert wrapped(torch.ones(3, 4, dtype=torch.float64)).dtype == torch.float64

    def test_unknown_devices_are_refused(self):
        net = nn.Linear(3, 2)
        for device in ("gpu-of-my-dreams", "cuda:-1", 1.5, None):
            with pytest.raises(
                ConfigError, match=r"`device` must be a name such as 'cpu' or 'cuda:0'"
            ):
                OnDevice(net, device)
        with pytest.raises(ConfigError, match=r"`output_device` must .* but is 'nowhere'"):
            OnDevice(net, "meta", "nowhere")
        with pytest.raises(
            ConfigError, match=r"`module` must be an `nn.Module`, but is 'function'"
        ):
            OnDevice(lambda x: x, "cpu")
        assert devices(net) == {"cpu"}


class TestTraining:
    def test_wrapped_equals_unwrapped(self):
        plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))
        wrapped = copy.deepcopy(plain)
        wrapped[1] = OnDevice(wrapped[1], "cpu")
        wrapped = OnDevice(wrapped, "cpu", "cpu")
        inputs = [torch.randn(7, 3, requires_grad=True)]
        inputs.append(inputs[0].detach().clone().requires_grad_())
        for net, x in zip((plain, wrapped), inputs, strict=True):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            for _ in range(3):
                optimizer.zero_grad()
                net(x).square().sum().backward()
                optimizer.step()
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)


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

    def test_its_own_to_does_not_move_it_either(self):
        wrapped = OnDevice(nn.BatchNorm1d(2), "cpu").to("meta").to_empty(device="meta")
        assert devices(wrapped) == {"cpu"}
        assert torch.equal(wrapped.running_var, torch.ones(2))

    def test_no_copy_is_made_where_it_does_not_belong(self):
        """The module may be pinned because it fits nowhere else."""
        largest = 0

        def move(tensor: Tensor) -> Tensor:
            nonlocal largest
            largest = max(largest, tensor.numel())
            return tensor.to("meta")

        OnDevice(nn.Linear(100, 100), "cpu")._apply(move)
        assert largest <= 4

    def test_what_does_not_move_is_applied_as_it_is(self):
        wrapped = OnDevice(nn.Linear(3, 2), "cpu").share_memory()
        assert wrapped.weight.is_shared()

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

    @pytest.mark.parametrize("wrapped_file", [True, False])
    @pytest.mark.parametrize("wrapped_net", [True, False])
    def test_files_go_in_and_out(self, wrapped_file, wrapped_net):
        def build(wraps):
            inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
            return nn.Sequential(nn.Linear(3, 3), OnDevice(inner, "cpu") if wraps else inner)

        for part in (lambda net: net, lambda net: net[1]):  # inside a model, and alone
            source, target = part(build(wrapped_file)), part(build(wrapped_net))
            result = target.load_state_dict(source.state_dict())
            assert not result.missing_keys
            assert not result.unexpected_keys
            for key, value in source.state_dict().items():
                assert torch.equal(target.state_dict()[key], value)

    def test_keys_that_do_not_fit_are_told_by_their_unwrapped_names(self):
        net = nn.Sequential(OnDevice(OnDevice(nn.Linear(3, 2), "cpu"), "cpu"))
        result = net.load_state_dict({"0.weight": torch.ones(2, 3), "0.more": torch.ones(1)}, False)
        assert result.missing_keys == ["0.bias"]
        assert result.unexpected_keys == ["0.more"]
        assert torch.equal(net[0].weight, torch.ones(2, 3))

    def test_a_module_inside_learns_which_version_of_it_wrote_the_file(self):
        class Versioned(nn.Linear):
            _version = 7

            def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
                self.told = local_metadata.get("version")
                super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

        net = nn.Sequential(OnDevice(OnDevice(nn.Sequential(Versioned(3, 2)), "cpu"), "cpu"))
        net.load_state_dict(net.state_dict())
        assert net[0].module.module[0].told == 7
        alone = OnDevice(Versioned(3, 2), "cpu")
        alone.load_state_dict(alone.module.state_dict())
        assert alone.told == 7

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

    def test_functional_calls_use_the_values_given_or_refuse_them(self):
        net = nn.Sequential(OnDevice(nn.Sequential(nn.Linear(3, 2)), "cpu"))
        zeros = {name: torch.zeros_like(value) for name, value in net.named_parameters()}
        assert torch.func.functional_call(net, zeros, torch.ones(1, 3)).tolist() == [[0.0, 0.0]]
        net = nn.Sequential(OnDevice(nn.Linear(3, 2), "cpu"))
        zeros = {name: torch.zeros_like(value) for name, value in net.named_parameters()}
        with pytest.raises(TypeError, match="as parameter"):
            torch.func.functional_call(net, zeros, torch.ones(1, 3))

    @pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
    def test_a_copy_works_and_is_independent(self, copied):
        net = OnDevice(nn.Linear(3, 2), "cpu", "meta")
        other = copied(net)
        assert type(other) is OnDevice
        assert (other.device, other.output_device) == (net.device, net.output_device)
        assert torch.equal(other.weight, net.weight)
        assert other.weight.data_ptr() != net.weight.data_ptr()
        assert other(torch.ones(1, 3)).device.type == "meta"
        other.load_state_dict(net.state_dict())

    def test_it_shows_where_it_runs(self):
        assert "cpu → meta" in repr(OnDevice(nn.Linear(3, 2), "cpu", "meta"))
        assert repr(OnDevice(nn.Tanh(), "meta")) == "OnDevice(\n  meta\n  (module): Tanh()\n)"
        assert "cuda:99 → cpu, runs on cpu" in repr(absent(nn.Linear(3, 2), "cpu"))


@pytest.mark.gpu
class TestGpu:
    def test_inputs_and_gradients_come_and_go(self, gpu):
        plain = nn.Linear(3, 2)
        net = OnDevice(copy.deepcopy(plain), gpu, "cpu")
        x = torch.randn(5, 3, requires_grad=True)
        y = torch.randn(5, 3, device=gpu, requires_grad=True)
        current = torch.accelerator.current_device_index()
        output = net(x) + net(y)
        output.square().sum().backward()
        assert net.weight.device.type == net.weight.grad.device.type == gpu.type
        assert (output.device.type, x.grad.device.type, y.grad.device.type) == (
            "cpu",
            "cpu",
            gpu.type,
        )
        own, other = (leaf.detach().cpu().requires_grad_() for leaf in (x, y))
        (plain(own) + plain(other)).square().sum().backward()
        torch.testing.assert_close(x.grad, own.grad, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(y.grad.cpu(), other.grad, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(net.weight.grad.cpu(), plain.weight.grad, rtol=1e-3, atol=1e-3)
        assert torch.accelerator.current_device_index() == current

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
        loaded = saved_and_loaded(net, map_location="cpu")
        x = torch.randn(2, 3)
        torch.testing.assert_close(loaded(x), net(x), rtol=1e-3, atol=1e-3)
        assert devices(loaded) == {"cpu"}
        assert devices(loaded.to(gpu.type)) == {str(gpu)}
        assert devices(saved_and_loaded(net)) == {str(gpu)}
