"""What would run, why, and what is kept for backward: found by a run on fake tensors, so nothing is computed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from blockscale.ops.backend import Choice, choose
from blockscale.ops.quantize import fake_grouped
from blockscale.ops.registry import NAMESPACE
from blockscale.ops.stages import LAYOUT
from blockscale.ops.steps import Step, outputs, steps
from blockscale.recipes import parse_recipe


@dataclass(frozen=True)
class Stage:
    """One step: which pass it belongs to, what it does, and the implementation chosen for it."""

    direction: str
    what: str
    choice: Choice


@dataclass(frozen=True)
class Saved:
    """A tensor that autograd keeps until backward. Parameters and arguments cost nothing more: ``owned`` is False."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    owned: bool


@dataclass(frozen=True)
class Explanation:
    """The answer of :func:`explain`; prints as two tables.

    Attributes:
        stages: in the order they run, forward then backward.
        saved: what is kept for backward.
        cached: quantized weights that layers with ``cache_weights`` keep between calls.
    """

    stages: tuple[Stage, ...]
    saved: tuple[Saved, ...]
    cached: tuple[Saved, ...] = ()

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace handed to the largest stage."""
        return max((s.choice.workspace_bytes for s in self.stages), default=0)

    @property
    def saved_bytes(self) -> int:
        """Bytes that exist only because backward needs them (parameters and arguments left out)."""
        return sum(s.nbytes for s in self.saved if s.owned)

    @property
    def cached_bytes(self) -> int:
        """Bytes of quantized weights that stay between calls."""
        return sum(s.nbytes for s in self.cached)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        totals = {name: getattr(self, name) for name in ("workspace_bytes", "saved_bytes", "cached_bytes")}
        return {**asdict(self), **totals}

    def __str__(self) -> str:
        reasons = list(dict.fromkeys(s.choice.why for s in self.stages))
        stages = Table("pass", "stage", "backend", "kernel", "workspace", "why", title="what runs", title_justify="left")
        for s in self.stages:
            c, note = s.choice, f"[{reasons.index(s.choice.why) + 1}]"
            stages.add_row(s.direction, s.what, c.backend, c.kernel, f"{c.workspace_bytes:,} B", Text(note))
        saved = Table("tensor", "shape", "dtype", "bytes", title="kept for backward", title_justify="left")
        for t in self.saved:
            shape = " x ".join(map(str, t.shape)) or "scalar"
            saved.add_row(t.name, shape, t.dtype, f"{t.nbytes:,}" if t.owned else f"({t.nbytes:,})")
        saved.add_row("beyond parameters and arguments", "", "", f"{self.saved_bytes:,}")
        for t in self.cached:
            saved.add_row(f"{t.name} (cached)", " x ".join(map(str, t.shape)), t.dtype, f"{t.nbytes:,}")
        if self.cached:
            saved.add_row("quantized weights, between calls", "", "", f"{self.cached_bytes:,}")
        with open(os.devnull, "w") as sink:
            console = Console(width=150, record=True, file=sink)
            console.print(stages, *(Text(f"[{n + 1}] {why}") for n, why in enumerate(reasons)), saved)
            return console.export_text()


def explain(module_or_op: nn.Module | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say what a call would run, without running it.

    Args:
        module_or_op: a module (any that holds blockscale layers) or a public function such as ``bs.quantize``.
        args, kwargs: what it would be called with; tensors are used for their shapes, dtypes and devices only.

    Returns:
        Stages with backend, kernel, reason and workspace bytes; tensors kept for backward with their bytes.

    Raises:
        What the call itself raises for arguments that metadata shows to be wrong.
    """
    if not callable(module_or_op):
        raise TypeError(f"module_or_op is {type(module_or_op).__name__}; a module or a function such as bs.quantize is needed")
    recorder = _Recorder()
    if isinstance(module_or_op, nn.Module):
        recorder.given |= {_storage(t): name for name, t in (*module_or_op.named_parameters(), *module_or_op.named_buffers())}
    saved: dict[int, Saved] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
        tensors = [t for t in tree_leaves(fakes) if isinstance(t, Tensor)]
        recorder.given |= {_storage(t): f"argument {n}" for n, t in enumerate(tensors)}

        def pack(t: Tensor) -> Tensor:
            key = _storage(t)
            if key not in saved:
                owned = key not in recorder.given
                name = recorder.made.get(key, "intermediate") if owned else recorder.given[key]
                nbytes = t.untyped_storage().nbytes() if owned else t.nbytes
                saved[key] = Saved(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), nbytes, owned)
                recorder.keep.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), recorder:
            module_or_op(*fakes[0], **fakes[1])
    if not recorder.forward:
        raise ValueError("module_or_op called no blockscale operator; a blockscale layer or function is needed")
    passes = (*recorder.forward, *(recorder.backward if saved else []))
    planes = ("rowwise", "columnwise") if saved else ("rowwise",)
    return Explanation(passes, tuple(saved.values()), tuple(c for plane in planes for c in recorder.cached[plane]))


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _stage(direction: str, step: Step, device: torch.device) -> Stage:
    choice = choose(step.kind, device, *step.formats)
    if choice.backend == "triton":
        choice = replace(choice, workspace_bytes=choice.workspace_bytes + step.workspace)
    return Stage(direction, step.what, replace(choice, why="; ".join(filter(None, (choice.why, step.note)))))


class _Recorder(TorchDispatchMode):
    """Notes the blockscale operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[Stage] = []
        self.backward: list[Stage] = []
        self.given: dict[int, str] = {}
        self.made: dict[int, str] = {}
        self.keep: list[Tensor] = []
        self.cached: dict[str, list[Saved]] = {"rowwise": [], "columnwise": []}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace == NAMESPACE:
            values = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            device = next(t.device for t in tree_leaves((result, args)) if isinstance(t, Tensor))
            made = result if isinstance(result, (list, tuple)) else [result]
            self.made |= {_storage(t): n for t, n in zip(made, outputs(name, values), strict=False)}
            self.keep += made
            self._note_cached(name, values)
            forward, backward = steps(name, values)
            self.forward += [_stage("forward", s, device) for s in forward]
            self.backward = [_stage("backward", s, device) for s in backward] + self.backward
        return result

    def _note_cached(self, name: str, values: dict[str, Any]) -> None:
        """Planes that a weight's cache will hold, once a weight."""
        if not (values.get("cache") is not None or values.get("caches")):
            return
        recipe = parse_recipe(values["recipe"])
        for w, linear in {"grouped_linear": (("weight", "linear"),), "grouped_mlp": (("w1", "fc1"), ("w2", "fc2"))}[name]:
            r, weight = recipe.of(linear), values[w]
            if r.weight is None:
                continue
            G, N, K = weight.shape
            label = self.given.get(_storage(weight), w)
            for plane, noted in self.cached.items():
                row = plane == "rowwise"
                if not (row or r.backward == "quantized"):
                    continue
                made = fake_grouped(weight, G * N, K, G, r.weight, row, not row, LAYOUT)
                nbytes = sum(t.nbytes for t in made)
                entry = Saved(f"{label}, {plane}", tuple(weight.shape), r.weight.of(plane).label, nbytes, True)
                if entry not in noted:
                    noted.append(entry)
