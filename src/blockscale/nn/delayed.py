"""Delayed scaling in layers: the scale and the amax history of each tensor as buffers, and the update after a step.

Legend: G groups, L entries of a history.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from blockscale.formats import FP8Delayed
from blockscale.ops.delayed import RoleScaling, Scaling, delayed_roles
from blockscale.recipes import ROLES, Recipe
from blockscale.reference.delayed import next_scale


class TensorScaling(nn.Module):
    """The delayed scaling of one tensor of a layer. Its buffers stay float32 whatever the model is cast to.

    Attributes:
        scale: float32 (G,), ones before the first update.
        amax_history: float32 (L, G), zeros at first; slot 0 takes the amaxes of the step that runs.
        fmt: the format that it serves; None after a state dict was loaded and before the first call.
    """

    scale: Tensor
    amax_history: Tensor

    def __init__(self, length: int, groups: int, device: torch.device) -> None:
        super().__init__()
        self.fmt: FP8Delayed | None = None
        self.register_buffer("scale", torch.ones(groups, device=device))
        self.register_buffer("amax_history", torch.zeros(length, groups, device=device))

    def reset(self) -> None:
        """As before the first step."""
        self.scale.fill_(1.0)
        self.amax_history.zero_()

    @torch.no_grad()
    def update(self) -> None:
        """Make the next step's scale of the history, in place and without a sync."""
        if self.fmt is not None:
            scale, history = next_scale(self.scale, self.amax_history, self.fmt)
            self.scale.copy_(scale)
            self.amax_history.copy_(history)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TensorScaling:
        """Follow the model to another device, but not to another dtype."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            moved = fn(buffer)
            self._buffers[name] = moved if moved.dtype == torch.float32 else buffer.to(moved.device)
        return self

    def extra_repr(self) -> str:
        """Entries, groups and format."""
        return f"history={self.amax_history.shape[0]}, groups={self.scale.shape[0]}, fmt={self.fmt and self.fmt.spec()}"


class ScaledLayer(nn.Module):
    """What layers with recipes are besides: keepers of delayed scaling, in child modules called ``scaling...``.

    The state is made when a layer is built with a recipe that needs it, else by the first call under one, or when a state
    dict with its keys is loaded.
    """

    def scaling_for(self, r: Recipe, groups: int, name: str = "scaling") -> Scaling | None:
        """The state of one linear's delayed formats as the operators take it; None where ``r`` has none.

        Raises:
            ValueError: a history of another length than the recipe's. RuntimeError: there is none yet and a graph is traced.
        """
        wanted = delayed_roles(r)
        if not wanted:
            return None
        found = self._modules.get(name)
        if not isinstance(found, nn.ModuleDict) or any(role not in found for role in wanted):
            found = self.make_scaling({role: fmt.history for role, fmt in wanted.items()}, groups, name)
        states: dict[str, RoleScaling] = {}
        for role, fmt in wanted.items():
            own = found[role]
            assert isinstance(own, TensorScaling)
            if own.amax_history.shape[0] != fmt.history:
                raise ValueError(
                    f"the layer's {role} has an amax history of {own.amax_history.shape[0]} entries but its recipe asks for"
                    f" {fmt.history}; del layer.{name} starts a new one"
                )
            if own.fmt != fmt:
                own.fmt = fmt
            states[role] = RoleScaling(own.scale, own.amax_history)
        return Scaling(**states)

    def make_scaling(self, lengths: Mapping[str, int], groups: int, name: str = "scaling") -> nn.ModuleDict:
        """Add fresh state for the roles in ``lengths`` that have none."""
        if torch.compiler.is_compiling():
            raise RuntimeError("a compiled layer cannot make the state of delayed scaling: give it recipe=, or call it once before")
        with _disable_current_modes():  # explain() runs layers on fake tensors; their state must be real
            found = self._modules.get(name)
            states = found if isinstance(found, nn.ModuleDict) else nn.ModuleDict()
            device = next(self.parameters()).device
            for role in ROLES:
                if role in lengths and role not in states:
                    states[role] = TensorScaling(lengths[role], groups, device)
            self.add_module(name, states)
        _register(self)
        return states

    def tensor_scalings(self) -> Iterator[TensorScaling]:
        """All states that the layer itself keeps, in a fixed order."""
        for name, child in self._modules.items():
            if _NAME.fullmatch(name) and isinstance(child, nn.ModuleDict):
                yield from (m for m in child.values() if isinstance(m, TensorScaling))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if any(True for _ in self.tensor_scalings()):
            _register(self)

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
        """Make the state that a saved layer had."""
        for key, history in state_dict.items():
            match = _KEY.fullmatch(key[len(prefix) :]) if key.startswith(prefix) else None
            if match:
                self.make_scaling({match["role"]: history.shape[0]}, history.shape[1], match["name"])
        super()._load_from_state_dict(state_dict, prefix, *args)


_NAME = re.compile(r"scaling\d?")
_KEY = re.compile(r"(?P<name>scaling\d?)\.(?P<role>input|weight|gradient)\.amax_history")
_numbers = itertools.count()
#: layers with delayed scaling in the order in which they got it, which is the same in every process of a job
_layers: dict[int, weakref.ref[ScaledLayer]] = {}
_groups: weakref.WeakKeyDictionary[nn.Module, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def _register(layer: ScaledLayer) -> None:
    _watch_optimizers()
    if not any(ref() is layer for ref in _layers.values()):
        number = next(_numbers)
        _layers[number] = weakref.ref(layer, lambda _: _layers.pop(number, None))


def _living() -> list[ScaledLayer]:
    return [layer for ref in list(_layers.values()) if (layer := ref()) is not None]


@cache
def _watch_optimizers() -> None:
    """Update scales after the steps of torch's optimizers."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Update the layers whose first parameter (the weight) the optimizer has."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    _update([layer for layer in _living() if id(next(layer.parameters())) in stepped])


def update_scales(model: nn.Module) -> None:
    """Update the scales of a model's delayed-scaling layers from their amax histories; in place, without a sync.

    Steps of torch's optimizers do it by themselves for the layers whose weights they have. Call it after a step that they
    do not make: another kind of optimizer, one with master copies of the weights, or frozen weights.
    """
    _update([m for m in model.modules() if isinstance(m, ScaledLayer)])


def reduce_amax_over(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Before each update, take the largest amax of all ranks of ``group`` for the layers of ``model``; None undoes it.

    Every rank must hold the same layers with the same groups of rows: of expert-parallel experts, their data-parallel
    group. One all-reduce a process group and step. The choice belongs to these modules: a copy or a pickle has it not.
    ``DistributedDataParallel`` needs ``broadcast_buffers=False`` beside it, or rank 0's history overwrites the others'.
    """
    for m in model.modules():
        if isinstance(m, ScaledLayer):
            _groups.pop(m, None)
            if group is not None:
                _groups[m] = group


@torch.no_grad()
def _update(layers: list[ScaledLayer]) -> None:
    together: dict[dist.ProcessGroup, list[Tensor]] = {}
    states = [(layer, s) for layer in layers for s in layer.tensor_scalings()]
    for layer, s in states:
        if layer in _groups:
            together.setdefault(_groups[layer], []).append(s.amax_history[0])
    for group, slots in together.items():
        largest = torch.cat(slots)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        for slot, amax in zip(slots, largest.split([len(t) for t in slots]), strict=True):
            slot.copy_(amax)
    for _, s in states:
        s.update()
