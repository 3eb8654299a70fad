"""What would run, why, and what is kept for backward: found by a run on fake tensors, so nothing is computed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from blockscale.formats import Format, parse
from blockscale.ops.backend import Choice, choose
from blockscale.ops.quantize import fake_grouped
from blockscale.ops.registry import NAMESPACE
from blockscale.ops.stages import LAYOUT
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
            names = _OUTPUTS.get(name, ())
            if values.get("recompute") and parse_recipe(values["recipe"]).input is not None:
                names = _recomputed_outputs(values["recipe"])
            self.made |= {_storage(t): n for t, n in zip(made, names, strict=False)}
            self.keep += made
            self._note_cached(name, values)
            forward, backward = _STAGES.get(name, _plain)(name, values)
            self.forward += [Stage("forward", what, choose(kind, device, *formats)) for kind, what, *formats in forward]
            later = [Stage("backward", what, choose(kind, device, *formats)) for kind, what, *formats in backward]
            self.backward = later + self.backward
        return result

    def _note_cached(self, name: str, values: dict[str, Any]) -> None:
        """Planes that a weight's cache will hold, once a weight."""
        weights = {"grouped_linear": ("weight",), "grouped_mlp": ("w1", "w2")}.get(name, ())
        fmt = parse_recipe(values["recipe"]).weight if weights else None
        if fmt is None or not (values.get("cache") is not None or values.get("caches")):
            return
        for w in weights:
            weight = values[w]
            G, N, K = weight.shape
            label = self.given.get(_storage(weight), w)
            for plane, noted in self.cached.items():
                row = plane == "rowwise"
                made = fake_grouped(weight, G * N, K, G, fmt, row, not row, LAYOUT)
                nbytes = sum(t.nbytes for t in made)
                entry = Saved(f"{label}, {plane}", tuple(weight.shape), fmt.label, nbytes, True)
                if entry not in noted:
                    noted.append(entry)


#: kind of stage, what it does, formats of what it makes or multiplies (None: high precision)
Steps = list[tuple[Any, ...]]


def _plain(name: str, values: dict[str, Any]) -> tuple[Steps, Steps]:
    kinds = {"quantize": "quantize", "grouped_gemm": "gemm", "activation": "activation"}
    kind = next((k for prefix, k in kinds.items() if name.startswith(prefix)), "routing")
    formats = [parse(values[n]) for n in ("fmt", "a_format", "b_format") if values.get(n)]
    what = f"{name} to {formats[0].label}" if "fmt" in values else name
    differentiable = kind == "routing" or name == "activation"
    if kind == "activation" and formats:  # joined with quantization
        return [(kind, name), *_to(formats[0], "the result", "the planes asked for")], []
    return [(kind, what, *formats)], [(kind, f"{name} backward")] if differentiable else []


def _to(fmt: Format | None, what: str, planes: str) -> Steps:
    """The step that quantizes; none where the operand stays high precision (rounded to bfloat16 inside the GEMM)."""
    return [] if fmt is None else [("quantize", f"{what} to {fmt.label}, {planes}", fmt)]


def _later(values: dict[str, Any]) -> str:
    """What is said of a weight gradient that backward leaves."""
    return "" if values["queue"] is None else ", in backward_dw()"


def _linear(name: str, values: dict[str, Any]) -> tuple[Steps, Steps]:
    r = parse_recipe(values["recipe"])
    kept = "" if values["cache"] is None else ", once a weight version"
    planes = "both planes" if values["save_input"] else "rowwise"
    forward = [*_to(r.input, "x", planes), *_to(r.weight, "weight", "rowwise" + kept), ("gemm", "y = x W^T", r.input, r.weight)]
    weight = _to(r.weight, "weight", "columnwise" + kept)
    backward = [*_to(r.gradient, "dy", "both planes"), *weight, ("gemm", "dx = dy W", r.gradient, r.weight)]
    backward.append(("gemm", "dW = dy^T x" + _later(values), r.gradient, r.input))
    backward += [("reduce", "dbias")] if values["bias"] is not None else []
    return forward, backward


def _mlp(name: str, values: dict[str, Any]) -> tuple[Steps, Steps]:
    r, act = parse_recipe(values["recipe"]), values["act"].partition(":")[0]
    planes = "both planes" if values["save_input"] else "rowwise"
    kept = ", once a weight version" if values["caches"] else ""
    row, column = "rowwise" + kept, "columnwise" + kept
    again: Steps = [*_to(r.weight, "w1", row), ("gemm", "h = x W1^T, again", r.input, r.weight)] if values["recompute"] else []
    forward: Steps = [
        *_to(r.input, "x", planes),
        *_to(r.weight, "w1", row),
        ("gemm", "h = x W1^T", r.input, r.weight),
        ("activation", f"a = {act}(h)"),
        *_to(r.input, "a", "rowwise"),
        *_to(r.weight, "w2", row),
        ("gemm", "y = a W2^T", r.input, r.weight),
    ]
    backward: Steps = [
        *again,
        *_to(r.gradient, "dy", "both planes"),
        ("activation", f"a = {act}(h), again"),
        *_to(r.input, "a", "columnwise"),
        ("gemm", "dW2 = dy^T a" + _later(values), r.gradient, r.input),
        *([("reduce", "db2")] if values["b2"] is not None else []),
        *_to(r.weight, "w2", column),
        ("gemm", "da = dy W2", r.gradient, r.weight),
        ("activation", "dh and dprobs from da and h"),
        *([("reduce", "db1")] if values["b1"] is not None else []),
        *_to(r.gradient, "dh", "both planes"),
        ("gemm", "dW1 = dh^T x" + _later(values), r.gradient, r.input),
        *_to(r.weight, "w1", column),
        ("gemm", "dx = dh W1", r.gradient, r.weight),
    ]
    return forward, backward


def _adapter(present: bool, names: str, x: str, dy: str) -> tuple[Steps, Steps]:
    """The products of a low-rank adapter of a frozen weight: forward; backward."""
    if not present:
        return [], []
    a, b, t = (f"{letter}{names}" for letter in "ABt")
    forward = [("gemm", f"{t} = {x} {a}^T"), ("gemm", f"{t} {b}^T, added")]
    backward = [f"d{t} = {dy} {b}", f"{t} = {x} {a}^T, again", f"d{a} = d{t}^T {x}", f"d{b} = {dy}^T {t}", f"d{t} {a}, added"]
    return forward, [("gemm", what) for what in backward]


def _frozen_linear(name: str, values: dict[str, Any]) -> tuple[Steps, Steps]:
    r, w = parse_recipe(values["recipe"]), parse(values["weight_format"])
    forward, backward = _adapter(values["lora_a"] is not None, "", "x", "dy")
    return (
        [*_to(r.input, "x", "rowwise"), ("gemm", "y = x W^T", r.input, w), *forward],
        [*_to(r.gradient, "dy", "rowwise"), ("gemm", "dx = dy W", r.gradient, w), *backward],
    )


def _frozen_mlp(name: str, values: dict[str, Any]) -> tuple[Steps, Steps]:
    r, act = parse_recipe(values["recipe"]), values["act"].partition(":")[0]
    w1, w2 = parse(values["w1_format"]), parse(values["w2_format"])
    first, first_back = _adapter(values["lora1_a"] is not None, "1", "x", "dh")
    second, second_back = _adapter(values["lora2_a"] is not None, "2", "a", "dy")
    pre: Steps = [*_to(r.input, "x", "rowwise"), ("gemm", "h = x W1^T", r.input, w1), *first]
    again: Steps = [] if values["save_h"] else [(kind, f"{what}, again", *formats) for kind, what, *formats in pre]
    forward = [*pre, ("activation", f"a = {act}(h)"), *_to(r.input, "a", "rowwise"), ("gemm", "y = a W2^T", r.input, w2), *second]
    backward: Steps = [
        *again,
        *_to(r.gradient, "dy", "rowwise"),
        *([("activation", f"a = {act}(h), again")] if second else []),
        ("gemm", "da = dy W2", r.gradient, w2),
        *second_back,
        ("activation", "dh and dprobs from da and h"),
        *_to(r.gradient, "dh", "rowwise"),
        ("gemm", "dx = dh W1", r.gradient, w1),
        *first_back,
    ]
    return forward, backward


_PLANE = ("x columnwise data", "x columnwise scale", "x columnwise amax")


def _recomputed_outputs(recipe: str) -> tuple[str, ...]:
    """Names of what ``grouped_mlp`` makes when it does not keep h."""
    fmt = parse_recipe(recipe).input
    row = tuple(n.replace("columnwise", "rowwise") for n in _PLANE)
    return ("y", *(row if fmt is not None and fmt.has_amax else row[:2]), *_PLANE)


#: names of what an operator makes, for the list of what is kept
_OUTPUTS = {
    "grouped_linear": ("y", *_PLANE),
    "grouped_mlp": ("y", "h (pre-activation)", *_PLANE),
    "frozen_linear": ("y",),
    "frozen_mlp": ("y", "h (pre-activation)"),
    "permute": ("permuted x", "permuted probs", "offsets", "row map"),
    "router": ("probs", "ids", "scores"),
    "unpermute": ("y",),
}
_STAGES: dict[str, Callable[[str, dict[str, Any]], tuple[Steps, Steps]]] = {
    "grouped_linear": _linear,
    "grouped_mlp": _mlp,
    "frozen_linear": _frozen_linear,
    "frozen_mlp": _frozen_mlp,
}
