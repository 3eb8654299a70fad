"""Which modules of a model are watched, and how their tensors reach the watch.

A layer of blockscale hands over every tensor of both passes through its tap. Any other module without children is seen
from outside by hooks: its inputs, its outputs and their gradients. Hooks and taps look; they return nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from blockscale import nn as layers
from blockscale.ops.tap import Tap, recomputing, see
from blockscale.tensors import GroupedTensor

#: "blocks.3.*", several of them, or a function of the name and the module
Filter = str | list[str] | tuple[str, ...] | Callable[[str, nn.Module], bool]
#: they change nothing that could be looked at
_DULL = (nn.Identity, nn.Dropout, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Watcher(Protocol):
    """What a layer tells. ``full``: whether everything is looked at in this step."""

    full: bool

    def look(self, layer: str, role: str, x: Tensor, offsets: Tensor | None, q: GroupedTensor | None) -> None:
        """A tensor of the step."""


class Report:
    """The listener of one layer: passes on its name. Holds the watch weakly: one that is forgotten hears nothing.

    ``rare_inputs``: inputs are looked at in full steps only; those of most modules are outputs of others, or their sums.
    """

    def __init__(self, watcher: Watcher, layer: str, rare_inputs: bool) -> None:
        self._watcher, self._layer, self._rare_inputs = weakref.ref(watcher), layer, rare_inputs

    def __call__(self, role: str, x: Tensor, offsets: Tensor | None, q: GroupedTensor | None) -> None:
        """Pass a tensor on."""
        watcher = self._watcher()
        if watcher is not None and (watcher.full or not (self._rare_inputs and role == "input")):
            watcher.look(self._layer, role, x, offsets, q)


def attach(model: nn.Module, watcher: Watcher, filter: Filter | None, plain: bool) -> tuple[list[str], list[Callable[[], None]]]:
    """Watch the modules of ``model`` that pass the filter.

    Returns:
        their names, and what undoes it.

    Raises:
        ValueError: no module passes.
    """
    names: list[str] = []
    undo: list[Callable[[], None]] = []
    kinds = (layers.GroupedMLP, layers.GroupedLinear, layers.Linear)
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        own = isinstance(module, kinds)
        if own:
            inside.update(m for m in module.modules() if m is not module)
        elif not plain or isinstance(module, _DULL) or any(True for _ in module.children()):
            continue
        shown = name or f"({type(module).__name__})"
        if not _passes(filter, shown, module):
            continue
        names.append(shown)
        undo.append(
            (_tap if own else _hook)(module, Report(watcher, shown, rare_inputs=not own and not isinstance(module, layers.Router)))
        )
    if not names:
        raise ValueError(f"nothing to watch in {type(model).__name__}: filter={filter!r} passes none of its layers")
    return names, undo


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

    def before(module: nn.Module, args: Any) -> None:
        for x in _tensors(args):
            _show(x, tap, "input")

    def after(module: nn.Module, args: Any, output: Any) -> None:
        for y in _tensors(output):
            _show(y, tap, "output")
            if y.requires_grad and torch.is_grad_enabled():
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
    leaves = (tree,) if isinstance(tree, Tensor) else tree_leaves(tree)
    return [x for x in leaves if isinstance(x, Tensor) and x.dtype in _FLOATS]
