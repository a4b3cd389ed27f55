"""One forward pass of a group: what went in, what came out, and in which mode.

Shape legend: B rows of the batch, padded ones included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import StateError
from phalanx.executor_group.batches import DataDesc
from phalanx.executor_group.binding import Binding, Share, resized
from phalanx.executor_group.given_tensors import savable
from phalanx.executor_group.outputs import Output

__all__ = ["Pass", "apart", "check_graph", "leaves_of", "mode_of", "normal_share", "telling_shapes"]


@dataclass
class Pass:
    """What is known of the last forward pass.

    Attributes:
        shares: What each device was given.
        leaves: The data by device as the module got them; they hold gradients after backward.
        outputs: What came out.
        rows: How many counted.
        pads: Padded rows: of the batch, or of each device's.
        trains: Whether the module was in training mode.
        graph: Whether it can be gone back through.
        inferred: Whether it ran under `torch.inference_mode`, which records no graph.
        went_back: Whether it was gone back through, to the end.
    """

    shares: list[Share]
    leaves: list[dict[str, Tensor]]
    outputs: list[Output]
    rows: int
    pads: list[int]
    trains: bool
    graph: bool
    inferred: bool
    went_back: bool = False

    @property
    def pad(self) -> int:
        """Padded rows at the end of the whole batch; 0 if every device has its own."""
        return self.pads[0] if len(self.pads) == 1 else 0

    @property
    def sizes(self) -> list[int]:
        """Each device's rows."""
        return [share.rows for share in self.shares]

    # Any: a tensor, or a list of them by device.
    def input_gradient(self, desc: DataDesc, home: torch.device | None) -> Any:
        """Return the gradient of one input: by device, or merged on ``home``.

        Merged, it is [B, ...], with zeros for padded rows.
        """
        grads = [_gradient(own.get(desc.name)) for own in self.leaves]
        if home is None:
            return grads
        found = [grad for grad in grads if grad is not None]
        if not found:
            return None
        moved = [each.to(home) for each in found]
        axis = desc.batch_axis
        if axis is None:
            return torch.stack(moved).sum(0)
        if len(self.pads) == 1:
            return torch.cat([*moved, _zeros(moved[0], axis, self.pads[0])], axis)
        pads = [pad for pad, grad in zip(self.pads, grads, strict=True) if grad is not None]
        pairs = zip(moved, pads, strict=True)
        return torch.cat(
            [each for grad, pad in pairs for each in (grad, _zeros(grad, axis, pad))], axis
        )

    # Any: labels in any of their forms.
    def labels(
        self, binding: Binding, given: Any, pre_sliced: bool, home: torch.device
    ) -> dict[str, Tensor]:
        """Return whole labels by name, without padded rows; the pass's own if none are given.

        Raises:
            ConfigError: They do not fit.
        """
        if given is None:
            found = [share.labels for share in self.shares]
        elif pre_sliced:
            pads = self.pads if len(self.pads) == len(self.shares) else [0] * len(self.shares)
            found = binding.read_sliced(given, self.sizes, pads)
        else:
            found = binding.cut_labels(given, self.sizes, self.pad)
        return binding.join_labels(found, self.sizes, home)


def _zeros(like: Tensor, axis: int, rows: int) -> Tensor:
    shape = list(like.shape)
    shape[axis] = rows
    return like.new_zeros(shape)


def _gradient(leaf: Tensor | None) -> Tensor | None:
    if leaf is None or not leaf.requires_grad:
        return None
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def normal_share(share: Share) -> Share:
    """Return ``share`` without tensors of inference mode, which a graph could not save."""
    return Share(_normal(share.data), _normal(share.labels), share.rows)


def _normal(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: savable(value) for name, value in tensors.items()}


def leaves_of(share: Share, needs_grad: bool) -> dict[str, Tensor]:
    """Return the data as the module gets it: cut off from what made it."""
    leaves = {name: value.detach() for name, value in share.data.items()}
    for leaf in leaves.values() if needs_grad else ():
        leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
    return leaves


def check_graph(last: Pass | None) -> Pass:
    """Return the pass that gradients are to go back through.

    Raises:
        StateError: There is none, it has no graph, or none can be gone back through here.
    """
    if torch.is_inference_mode_enabled():
        raise StateError(
            "`backward()` must be called outside of `torch.inference_mode()`, but is called inside."
        )
    if last is not None and last.graph:
        return last
    told = "before"
    if last is not None and not last.trains:
        told = "that was run to train, but it was not"
    elif last is not None and last.inferred:
        told = "outside of `torch.inference_mode()`, but it was inside"
    raise StateError(f"`backward()` needs a forward pass {told}. Call `forward()` first.")


def apart(
    parts: Sequence[dict[str, Tensor]],
    descs: Sequence[DataDesc],
    devices: Sequence[torch.device],
    sizes: Sequence[int],
) -> list[dict[str, Tensor]]:
    """Let no two devices share the memory of what is given whole: a module may write to it.

    The first keeps the caller's own tensor, to which plain PyTorch would write, too.
    """
    whole = [each.name for each in descs if each.batch_axis is None]
    seen: set[tuple[str, int]] = set()
    separated = []
    for own, device, size in zip(parts, devices, sizes, strict=True):
        copies = {}
        for name in whole if size else ():
            tensor = own.get(name)
            if tensor is None or tensor.device != device:
                continue  # it is copied on its way to the device
            place = name, tensor.untyped_storage().data_ptr()
            if place in seen:
                copies[name] = tensor.clone()
            seen.add(place)
        separated.append({**own, **copies})
    return separated


@contextlib.contextmanager
def telling_shapes(before: Binding, now: Binding) -> Iterator[None]:
    """Add to what the module raises which shapes are not those that were bound."""
    try:
        yield
    except Exception as error:
        for then, own in zip(before.data, now.data, strict=True):
            if resized(own, 1).shape != resized(then, 1).shape:
                error.add_note(
                    f"`{own.name}` has shape {own.shape}, and the group was bound to {then.shape}."
                )
        raise


@contextlib.contextmanager
def mode_of(module: nn.Module, trains: bool, graph: bool) -> Iterator[None]:
    """Train or evaluate in the body; a part that evaluates in a module that trains goes on so.

    Args:
        graph: Whether what is needed to go back is kept.
    """
    if module.training == trains:
        with torch.set_grad_enabled(graph):
            yield
        return
    before = [(each, each.training) for each in module.modules()]
    module.train(trains)
    try:
        with torch.set_grad_enabled(graph):
            yield
    finally:
        for each, training in before:
            each.training = training
