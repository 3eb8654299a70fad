"""What each operator does, step by step, in words and formats: what ``explain`` shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from blockscale.activations import parse as parse_activation
from blockscale.formats import Format, FP8Delayed, parse
from blockscale.layouts import PLANES
from blockscale.ops.joined import against_joining, sums_bytes, workspace_bytes
from blockscale.ops.operands import kept_planes
from blockscale.recipes import Recipe, parse_recipe

Values = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One step: its kind (as ``backend.choose`` takes it), what it does, and the formats that it writes or reads.

    ``workspace``: bytes that a Triton kernel takes beyond results. ``note``: what else is to be said of the choice.
    """

    kind: str
    what: str
    formats: tuple[Format, ...] = ()
    workspace: int = 0
    note: str = ""


Steps = list[Step]


def steps(name: str, values: Values) -> tuple[Steps, Steps]:
    """The steps of operator ``name`` called with ``values`` (by argument name): forward, backward."""
    special: dict[str, Callable[[Values], tuple[Steps, Steps]]] = {
        "grouped_linear": _linear,
        "grouped_mlp": _mlp,
        "frozen_linear": _frozen_linear,
        "frozen_mlp": _frozen_mlp,
    }
    return special[name](values) if name in special else _plain(name, values)


def outputs(name: str, values: Values) -> tuple[str, ...]:
    """Names of what an operator makes, for the list of what is kept."""
    if name not in ("grouped_linear", "grouped_mlp"):
        return _OUTPUTS.get(name, ())
    r = parse_recipe(values["recipe"]).of("linear" if name == "grouped_linear" else "fc1")
    recompute = values.get("recompute", False)
    names = ["y"] if recompute or name == "grouped_linear" else ["y", "h (pre-activation)"]
    for plane in kept_planes(r, values["save_input"], recompute):
        parts = ("data", "scale", "amax") if r.input is not None and r.input.of(plane).has_amax else ("data", "scale")
        names += [f"x {plane} {part}" for part in parts]
    return tuple(names)


_OUTPUTS = {
    "frozen_linear": ("y",),
    "frozen_mlp": ("y", "h (pre-activation)"),
    "permute": ("permuted x", "permuted probs", "offsets", "row map"),
    "router": ("probs", "ids", "scores"),
    "unpermute": ("y",),
}


def _plain(name: str, values: Values) -> tuple[Steps, Steps]:
    kinds = {"quantize": "quantize", "dequantize": "dequantize", "grouped_gemm": "gemm", "activation": "activation"}
    kind = next((k for prefix, k in kinds.items() if name.startswith(prefix)), "routing")
    formats = tuple(parse(values[key]) for key in ("fmt", "a_format", "b_format") if values.get(key))
    if kind == "gemm":
        formats = tuple(f.stored("rowwise") for f in formats)  # each is the format of one plane
    what = f"{name} {'from' if kind == 'dequantize' else 'to'} {parse(values['fmt']).label}" if "fmt" in values else name
    if kind == "activation" and formats:
        return _activation_and_format(name, values, formats[0]), []
    differentiable = kind == "routing" or name == "activation"
    workspace = _ds_bytes(values, *values["h"].shape) if kind == "activation" else 0
    if name == "activation_backward":
        return [Step(kind, name, workspace=workspace)], []
    return [Step(kind, what, formats)], [Step(kind, f"{name} backward", workspace=workspace)] if differentiable else []


def _ds_bytes(values: Values, rows: int, columns: int) -> int:
    """Workspace of an activation's gradient for that of the probabilities; ``columns``: of the pre-activation."""
    width = parse_activation(values["act"]).out_width(columns, values["interleave"] or None)
    return sums_bytes(rows, width, 0, 0, values["probs"] is not None, False)


def _bias_step(what: str, x: Tensor, w: Tensor) -> Step:
    """The gradient of the bias of a linear of weights (G, N, K)."""
    return Step("reduce", what, workspace=sums_bytes(x.shape[0], 0, w.shape[1], w.shape[0], False, True))


def _activation_and_format(name: str, values: Values, fmt: Format) -> Steps:
    """An activation (or its gradient) joined with quantization, where one kernel does both."""
    act, h, planes = parse_activation(values["act"]), values["h"], (values["rowwise"], values["columnwise"])
    runs, probs = values["interleave"] or None, values["probs"] is not None
    bias = bool(values.get("bias", True)) if "dy" in values else None
    why = against_joining(h.device, act, fmt, planes, runs, act.out_width(h.shape[1], runs), bias is not None)
    need = workspace_bytes(h, values["offsets"].shape[0] - 1, act, fmt, planes, runs, probs, bias)
    both = "both planes" if all(planes) else PLANES[planes.index(True)]
    if why is None:
        own = fmt.stored(PLANES[planes.index(True)])
        sums = [text for text, there in (("ds", probs and bias is not None), ("dbias", bool(bias))) if there]
        note = (
            f"partial sums of {' and '.join(sums)} in the workspace, then a launch for each to add them, no atomics" if sums else ""
        )
        return [Step("joined", f"{name} to {own.label}, {both}", (own,), need, note)]
    note = f"not joined with the quantizer: {why}" if h.device.type == "cuda" else ""
    asked = tuple(p for p in PLANES if values[p])
    sum_step = [Step("reduce", "dbias")] if bias else []
    return [Step("activation", name, (), need, note), *_to(fmt, "the result", asked), *sum_step]


def _to(fmt: Format | None, what: str, planes: tuple[str, ...], note: str = "") -> Steps:
    """The step that quantizes; none where the operand stays high precision (rounded to bfloat16 inside the GEMM)."""
    if fmt is None or not planes:
        return []
    label = fmt.label if len(planes) > 1 else fmt.of(planes[0]).label
    whole = isinstance(fmt, FP8Delayed) or (fmt.from_row and "columnwise" in planes)
    formats = (fmt,) if whole else tuple(fmt.stored(p) for p in planes)
    return [Step("quantize", f"{what} to {label}, {'both planes' if len(planes) > 1 else planes[0]}{note}", formats)]


class _Layer:
    """The steps of one linear, whose operands have names."""

    def __init__(
        self, r: Recipe, x: str, w: str, dy: str, cached: bool = False, later: bool = False, weight: Format | None = None
    ) -> None:
        self.r, self.x, self.w, self.dy = r, x, w, dy
        self.w_format = r.weight if weight is None else weight
        self.cached, self.later = ", once a weight version" if cached else "", ", in backward_dw()" if later else ""

    def input(self, planes: tuple[str, ...] = ()) -> Steps:
        """Its input for the forward product, with the planes that are kept."""
        return _to(self.r.input, self.x, ("rowwise", *(p for p in planes if p == "columnwise")))

    def weight(self) -> Steps:
        """Its weight for the forward product."""
        return _to(self.r.weight, self.w, ("rowwise",), self.cached)

    def again(self, fmt: Format | None, what: str, note: str = "") -> Steps:
        """An operand of backward that is made from the high-precision tensor."""
        if self.r.backward == "dequantized":
            return _to(fmt, what, ("rowwise",), f", then its values in bfloat16{note}")
        return _to(fmt, what, ("columnwise",), note) if self.r.backward == "quantized" else []

    def input_again(self) -> Steps:
        """Its input for wgrad."""
        return self.again(self.r.input, self.x)

    def weight_again(self) -> Steps:
        """Its weight for dgrad."""
        return self.again(self.r.weight, self.w, self.cached)

    def gradient(self) -> Steps:
        """Its upstream gradient."""
        return _to(self.r.gradient, self.dy, PLANES)

    def gemm(self, what: str, role: str) -> Steps:
        """One of its products."""
        a, b, planes = {
            "forward": (self.r.input, self.w_format, ("rowwise", "rowwise")),
            "dgrad": (self.r.gradient, self.w_format, ("rowwise", "columnwise")),
            "wgrad": (self.r.gradient, self.r.input, ("columnwise", "columnwise")),
        }[role]
        if role != "forward" and self.r.backward != "quantized":
            a, b = None, None
        formats = tuple(f.stored(p) for f, p in zip((a, b), planes, strict=True) if f is not None)
        return [Step("gemm", what + (self.later if role == "wgrad" else ""), formats)]


def _linear(values: Values) -> tuple[Steps, Steps]:
    r = parse_recipe(values["recipe"]).of("linear")
    one = _Layer(r, "x", "weight", "dy", values["cache"] is not None, values["queue"] is not None)
    forward = [*one.input(kept_planes(r, values["save_input"])), *one.weight(), *one.gemm("y = x W^T", "forward")]
    backward = [*one.gradient(), *one.weight_again(), *one.gemm("dx = dy W", "dgrad"), *one.gemm("dW = dy^T x", "wgrad")]
    return forward, backward + ([_bias_step("dbias", values["x"], values["weight"])] if values["bias"] is not None else [])


def _mlp(values: Values) -> tuple[Steps, Steps]:
    r, act = parse_recipe(values["recipe"]), values["act"].partition(":")[0]
    shared = bool(values["caches"]), values["queue"] is not None
    one, two = _Layer(r.of("fc1"), "x", "w1", "dh", *shared), _Layer(r.of("fc2"), "a", "w2", "dy", *shared)
    planes = kept_planes(one.r, values["save_input"], values["recompute"])
    own = one.input() if values["recompute"] and not planes else []
    again: Steps = [*own, *one.weight(), *one.gemm("h = x W1^T, again", "forward")] if values["recompute"] else []
    forward: Steps = [
        *one.input(planes),
        *one.weight(),
        *one.gemm("h = x W1^T", "forward"),
        Step("activation", f"a = {act}(h)"),
        *two.input(),
        *two.weight(),
        *two.gemm("y = a W2^T", "forward"),
    ]
    backward: Steps = [
        *again,
        *two.gradient(),
        Step("activation", f"a = {act}(h), again"),
        *two.input_again(),
        *two.gemm("dW2 = dy^T a", "wgrad"),
        *([_bias_step("db2", values["x"], values["w2"])] if values["b2"] is not None else []),
        *two.weight_again(),
        *two.gemm("da = dy W2", "dgrad"),
        Step("activation", "dh and dprobs from da and h", (), _ds_bytes(values, values["x"].shape[0], values["w1"].shape[1])),
        *([_bias_step("db1", values["x"], values["w1"])] if values["b1"] is not None else []),
        *one.gradient(),
        *one.gemm("dW1 = dh^T x", "wgrad"),
        *one.weight_again(),
        *one.gemm("dx = dh W1", "dgrad"),
    ]
    return forward, backward


def _adapter(present: bool, names: str, x: str, dy: str) -> tuple[Steps, Steps]:
    """The products of a low-rank adapter of a frozen weight: forward; backward."""
    if not present:
        return [], []
    a, b, t = (f"{letter}{names}" for letter in "ABt")
    forward = [f"{t} = {x} {a}^T", f"{t} {b}^T, added"]
    backward = [f"d{t} = {dy} {b}", f"{t} = {x} {a}^T, again", f"d{a} = d{t}^T {x}", f"d{b} = {dy}^T {t}", f"d{t} {a}, added"]
    return [Step("gemm", what) for what in forward], [Step("gemm", what) for what in backward]


def _frozen_linear(values: Values) -> tuple[Steps, Steps]:
    r = parse_recipe(values["recipe"]).of("linear")
    one = _Layer(r, "x", "weight", "dy", weight=parse(values["weight_format"]))
    forward, backward = _adapter(values["lora_a"] is not None, "", "x", "dy")
    return (
        [*one.input(), *one.gemm("y = x W^T", "forward"), *forward],
        [*_to(r.gradient, "dy", ("rowwise",)), *one.gemm("dx = dy W", "dgrad"), *backward],
    )


def _frozen_mlp(values: Values) -> tuple[Steps, Steps]:
    recipe, act = parse_recipe(values["recipe"]), values["act"].partition(":")[0]
    one = _Layer(recipe.of("fc1"), "x", "w1", "dh", weight=parse(values["w1_format"]))
    two = _Layer(recipe.of("fc2"), "a", "w2", "dy", weight=parse(values["w2_format"]))
    first, first_back = _adapter(values["lora1_a"] is not None, "1", "x", "dh")
    second, second_back = _adapter(values["lora2_a"] is not None, "2", "a", "dy")
    pre: Steps = [*one.input(), *one.gemm("h = x W1^T", "forward"), *first]
    again: Steps = [] if values["save_h"] else [replace(s, what=f"{s.what}, again") for s in pre]
    activation = Step("activation", f"a = {act}(h)")
    forward = [*pre, activation, *two.input(), *two.gemm("y = a W2^T", "forward"), *second]
    backward: Steps = [
        *again,
        *_to(two.r.gradient, "dy", ("rowwise",)),
        *([replace(activation, what=f"{activation.what}, again")] if second else []),
        *two.gemm("da = dy W2", "dgrad"),
        *second_back,
        Step("activation", "dh and dprobs from da and h", (), _ds_bytes(values, values["x"].shape[0], values["n"][0])),
        *_to(one.r.gradient, "dh", ("rowwise",)),
        *one.gemm("dx = dh W1", "dgrad"),
        *first_back,
    ]
    return forward, backward
