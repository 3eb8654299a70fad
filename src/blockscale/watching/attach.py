"""Which modules of a model are watched, and how their tensors reach the watch.

A layer of blockscale hands over every tensor of both passes through its tap. Any other module without children is seen
from outside by hooks: its inputs, its outputs and their gradients. Hooks and taps look; they return nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from blockscale import nn as layers
from blockscale.ops.tap import Seen, Tap, recomputing, see
from blockscale.watching.findings import RARE

#: "blocks.3.*", several of them, or a function of the name and the module
Filter = str | list[str] | tuple[str, ...] | Callable[[str, nn.Module], bool]
_OWN = (layers.GroupedMLP, layers.GroupedLinear, layers.Linear)
#: they change nothing that could be looked at
_DULL = (nn.Identity, nn.Dropout, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Watcher(Protocol):
    """What layers tell. ``full``: whether everything is looked at in this step."""

    full: bool

    def look(self, layer: str, tensor: Seen, offsets: Tensor | None) -> None:
        """A tensor of the step."""

    def look_at_pass(self, layer: str, tensors: Sequence[Seen], offsets: Tensor) -> None:
        """Tensors each of which is made of the one before."""


class Report:
    """The listener of one layer: passes on its name. Holds the watch weakly: one that is forgotten hears nothing.

    ``rare``: roles that are looked at in full steps only; "loss" is an output that is a number.
    """

    def __init__(self, watcher: Watcher, layer: str, rare: frozenset[str] = frozenset()) -> None:
        self._watcher, self._layer, self._rare = weakref.ref(watcher), layer, rare

    def wants(self, role: str) -> bool:
        """Whether a tensor of this role would be looked at now."""
        watcher = self._watcher()
        return watcher is not None and (watcher.full or role not in self._rare)

    def see(self, tensor: Seen, offsets: Tensor | None) -> None:
        """Pass a tensor on."""
        watcher = self._watcher()
        if watcher is not None and self.wants(tensor.role):
            watcher.look(self._layer, tensor, offsets)

    def see_pass(self, tensors: Sequence[Seen], offsets: Tensor) -> None:
        """Pass several on."""
        watcher = self._watcher()
        if watcher is not None:
            watcher.look_at_pass(self._layer, tensors, offsets)


def attach(model: nn.Module, watcher: Watcher, filter: Filter | None, plain: bool) -> tuple[list[str], list[Callable[[], None]]]:
    """Watch the modules of ``model`` that pass the filter.

    Returns:
        their names, and what undoes it.

    Raises:
        ValueError: no module passes.
    """
    chosen = [(name, module) for name, module in _candidates(model, plain) if _passes(filter, name, module)]
    if not chosen:
        raise ValueError(f"nothing to watch in {type(model).__name__}: filter={filter!r} passes none of its layers")
    kinds = {_kind(module) for _, module in chosen}
    undo = []
    for name, module in chosen:
        report = Report(watcher, name, _rare(_kind(module), kinds))
        undo.append((_tap if isinstance(module, _OWN) else _hook)(module, report))
    return [name for name, _ in chosen], undo


def _candidates(model: nn.Module, plain: bool) -> Iterator[tuple[str, nn.Module]]:
    """Layers of blockscale and, with ``plain``, other modules without children; names as in ``named_modules``."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        if isinstance(module, _OWN):
            inside.update(m for m in module.modules() if m is not module)
        elif not plain or isinstance(module, _DULL) or any(True for _ in module.children()):
            continue
        yield name or f"({type(module).__name__})", module


def _kind(module: nn.Module) -> str:
    """ "own", "router", "product" (has a matrix: linear, convolution, embedding) or "other" (norms, activations)."""
    if isinstance(module, (*_OWN, layers.Router)):
        return "router" if isinstance(module, layers.Router) else "own"
    return "product" if any(p.dim() > 1 for p in module.parameters(recurse=False)) else "other"


def _rare(kind: str, kinds: set[str]) -> frozenset[str]:
    """Roles of a layer that only full steps look at.

    A NaN that comes to a norm or an activation reaches the output of the product behind it, one that comes back to a product
    or a router the gradient of what stands before it: between full steps it is enough to look there, where there are both.
    """
    if kind == "own":
        return RARE
    if kind == "router":
        return frozenset({"gradient", "loss"})
    if kind == "product":
        return frozenset({"input", "gradient"} if kinds & {"own", "other"} else {"input"})
    return frozenset({"input", "output"} if kinds & {"own", "product"} else {"input"})


def _passes(filter: Filter | None, name: str, module: nn.Module) -> bool:
    if filter is None:
        return True
    if callable(filter):
        return bool(filter(name, module))
    patterns = [filter] if isinstance(filter, str) else list(filter)
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _tap(module: Any, report: Report) -> Callable[[], None]:
    if module.tap is None:
        module.tap = Tap()
    tap: Tap = module.tap
    tap.listeners += (report,)

    def undo() -> None:
        tap.listeners = tuple(r for r in tap.listeners if r is not report)
        if not tap.listeners and module.tap is tap:
            module.tap = None

    return undo


def _hook(module: nn.Module, report: Report) -> Callable[[], None]:
    """Inputs, outputs and the gradients of outputs of any module, in compiled graphs too."""
    tap = Tap()
    tap.listeners = (report,)

    def wants(role: str) -> bool:  # a compiled graph serves every step
        return torch.compiler.is_compiling() or report.wants(role)

    def before(module: nn.Module, args: Any) -> None:
        if wants("input"):
            for x in _tensors(args):
                _show(x, tap, "input")

    def after(module: nn.Module, args: Any, output: Any) -> None:
        seen, gradients = wants("output"), wants("gradient")
        for y in _tensors(output) if seen or gradients else ():
            if seen and (y.dim() or wants("loss")):
                _show(y, tap, "output")
            if gradients and y.requires_grad and torch.is_grad_enabled():
                y.register_hook(lambda gradient: _show(gradient, tap, "gradient"))

    handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def undo() -> None:
        tap.listeners = ()
        for handle in handles:
            handle.remove()

    return undo


def _show(x: Tensor, tap: Tap, role: str) -> None:
    if torch.compiler.is_compiling():
        see(x, tap, role)
    elif type(x) in (Tensor, nn.Parameter) and (role == "gradient" or not recomputing()):
        tap.see(role, x)


def _tensors(tree: Any) -> list[Tensor]:
    flat = (tree,) if isinstance(tree, Tensor) else tree
    leaves = flat if isinstance(flat, tuple) and all(isinstance(x, Tensor) for x in flat) else tree_leaves(flat)
    return [x for x in leaves if isinstance(x, Tensor) and x.dtype in _FLOATS]
