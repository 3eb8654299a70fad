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
from blockscale.ops.registry import NAMESPACE
from blockscale.recipes import Recipe, parse_recipe


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
    """

    stages: tuple[Stage, ...]
    saved: tuple[Saved, ...]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace handed to the largest stage."""
        return max((s.choice.workspace_bytes for s in self.stages), default=0)

    @property
    def saved_bytes(self) -> int:
        """Bytes that exist only because backward needs them (parameters and arguments left out)."""
        return sum(s.nbytes for s in self.saved if s.owned)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "workspace_bytes": self.workspace_bytes, "saved_bytes": self.saved_bytes}

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
    return Explanation((*recorder.forward, *(recorder.backward if saved else [])), tuple(saved.values()))


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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace == NAMESPACE:
            values = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            device = next(t.device for t in tree_leaves((result, args)) if isinstance(t, Tensor))
            made = result if isinstance(result, (list, tuple)) else [result]
            names = _outputs(name, values)
            self.made |= {_storage(t): n for t, n in zip(made, names, strict=False)}
            self.keep += made
            forward, backward = _STAGES.get(name, _plain)(name, values)
            self.forward += [Stage("forward", what, choose(kind, device)) for kind, what in forward]
            self.backward = [Stage("backward", what, choose(kind, device)) for kind, what in backward] + self.backward
        return result


Steps = list[tuple[str, str]]


def _plain(name: str, values: dict[str, Any]) -> tuple[Steps, Steps]:
    kinds = {"quantize": "quantize", "grouped_gemm": "gemm", "activation": "activation"}
    kind = next((k for prefix, k in kinds.items() if name.startswith(prefix)), "routing")
    what = f"{name} to {parse(values['fmt']).label}" if "fmt" in values else name
    differentiable = kind == "routing" or name == "activation"
    return [(kind, what)], [(kind, f"{name} backward")] if differentiable else []


def _to(fmt: Format | None, what: str, planes: str) -> Steps:
    """The step that quantizes; none where the operand stays high precision (rounded to bfloat16 inside the GEMM)."""
    if fmt is None:
        return []
    label = fmt.label if planes == "both planes" else fmt.of(planes).label
    return [("quantize", f"{what} to {label}, {planes}")]


def _input(r: Recipe, what: str, keep: bool) -> Steps:
    return _to(r.input, what, "both planes" if keep and r.saved_plane == "columnwise" else "rowwise")


def _again(r: Recipe, fmt: Format | None, what: str) -> Steps:
    """An operand that backward makes anew from the high-precision tensor."""
    if r.backward == "dequantized":
        return _to(fmt, f"{what} (then dequantized)", "rowwise")
    return _to(fmt, what, "columnwise") if r.backward == "quantized" else []


def _linear(name: str, values: dict[str, Any]) -> tuple[Steps, Steps]:
    r = parse_recipe(values["recipe"]).of("linear")
    forward = [*_input(r, "x", values["save_input"]), *_to(r.weight, "weight", "rowwise"), ("gemm", "y = x W^T")]
    backward = [*_to(r.gradient, "dy", "both planes"), *_again(r, r.weight, "weight"), ("gemm", "dx = dy W")]
    backward += [("gemm", "dW = dy^T x")] + ([("reduce", "dbias")] if values["bias"] is not None else [])
    return forward, backward


def _mlp(name: str, values: dict[str, Any]) -> tuple[Steps, Steps]:
    r, act = parse_recipe(values["recipe"]), values["act"].partition(":")[0]
    r1, r2 = r.of("fc1"), r.of("fc2")
    forward: Steps = [
        *_input(r1, "x", values["save_input"]),
        *_to(r1.weight, "w1", "rowwise"),
        ("gemm", "h = x W1^T"),
        ("activation", f"a = {act}(h)"),
        *_to(r2.input, "a", "rowwise"),
        *_to(r2.weight, "w2", "rowwise"),
        ("gemm", "y = a W2^T"),
    ]
    backward: Steps = [
        *_to(r2.gradient, "dy", "both planes"),
        ("activation", f"a = {act}(h), again"),
        *_again(r2, r2.input, "a"),
        ("gemm", "dW2 = dy^T a"),
        *([("reduce", "db2")] if values["b2"] is not None else []),
        *_again(r2, r2.weight, "w2"),
        ("gemm", "da = dy W2"),
        ("activation", "dh and dprobs from da and h"),
        *([("reduce", "db1")] if values["b1"] is not None else []),
        *_to(r1.gradient, "dh", "both planes"),
        ("gemm", "dW1 = dh^T x"),
        *_again(r1, r1.weight, "w1"),
        ("gemm", "dx = dh W1"),
    ]
    return forward, backward


def _outputs(name: str, values: dict[str, Any]) -> tuple[str, ...]:
    """Names of what an operator makes, for the list of what is kept."""
    names = _OUTPUTS.get(name, ())
    if name in ("grouped_linear", "grouped_mlp"):
        which = parse_recipe(values["recipe"]).of("linear" if name == "grouped_linear" else "fc1").saved_plane
        names += tuple(f"x {which} {part}" for part in ("data", "scale", "amax"))
    return names


_OUTPUTS = {
    "grouped_linear": ("y",),
    "grouped_mlp": ("y", "h (pre-activation)"),
    "permute": ("permuted x", "permuted probs", "offsets", "row map"),
    "router": ("probs", "ids", "scores"),
    "unpermute": ("y",),
}
_STAGES: dict[str, Callable[[str, dict[str, Any]], tuple[Steps, Steps]]] = {"grouped_linear": _linear, "grouped_mlp": _mlp}
