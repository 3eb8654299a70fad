"""The differentiable operator ``frozen_linear``: y = x W^T + b with a W that exists only in quantized form.

W and b are frozen: x and the low-rank adapter, if there is one, have gradients.

Legend: M rows (capacity), K inputs, N outputs, G groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blockscale.formats import parse
from blockscale.ops import checks, low_rank, registry, stages
from blockscale.ops.delayed import delayed_roles
from blockscale.ops.low_rank import LowRank
from blockscale.ops.quantize import rng_from
from blockscale.recipes import Recipe, current_recipe, parse_recipe
from blockscale.tensors import GroupedTensor, planes_from_list


def frozen_linear(
    x_MK: Tensor,
    weight: GroupedTensor,
    offsets: Tensor,
    bias_GN: Tensor | None = None,
    *,
    lora: LowRank | None = None,
    recipe: Recipe | None = None,
    rng: Tensor | None = None,
) -> Tensor:
    """y = x W^T + b, group by group; differentiable in x and in the adapter.

    Args:
        x_MK: (M, K) float32, bfloat16 or float16; rows past ``offsets[-1]`` influence nothing.
        weight: ``quantize_grouped(w_GNK, None, fmt, ...)``; its columnwise plane is needed for the gradient of x.
        offsets: int64[G+1].
        bias_GN: (G, N), frozen.
        lora: an adapter, see :mod:`blockscale.ops.low_rank`.
        recipe: the formats of the input and the gradient (that of the weight is its own); None: the enclosing autocast's,
            else bfloat16 operands.
        rng: int64[2] for stochastic rounding in backward; None: drawn from torch's default generator.

    Returns:
        (M, N) in x's dtype, dead rows zero.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is legal.
    """
    x = checks.matrix("x", x_MK)
    n = check_weight("weight", weight, offsets, x.shape[1])
    check_column_plane("weight", weight, x.requires_grad)
    check_bias("bias", bias_GN, offsets, n)
    low_rank.check("lora", lora, offsets.shape[0] - 1, n, x.shape[1])
    a, b, scaling = (None, None, 1.0) if lora is None else (lora.a, lora.b, lora.scaling)
    checks.same_device(x=x, offsets=offsets, weight=weight.offsets, bias=bias_GN, lora_a=a, lora_b=b, rng=rng)
    recipe = frozen_recipe(recipe)
    rng = check_rng(rng, recipe, x)
    tensors, fmt, layout = pack(weight)
    y: Tensor = torch.ops.blockscale.frozen_linear(
        x, tensors, offsets, bias_GN, a, b, rng, fmt, layout, n, float(scaling), recipe.spec()
    )
    return y


def frozen_recipe(own: Recipe | None) -> Recipe:
    """A module's own recipe or the enclosing autocast's, for a frozen layer.

    Raises:
        ValueError: its backward reads high-precision weights or forward's values, or it keeps state for delayed scaling.
    """
    recipe = current_recipe(own)
    for r in (recipe, *(linear for _, linear in recipe.linears)):
        if r.backward != "quantized":
            raise ValueError(f"recipe has backward={r.backward!r}; a frozen layer has only quantized weights: 'quantized'")
        if any(role != "weight" for role in delayed_roles(r)):
            raise ValueError("recipe has FP8Delayed inputs or gradients; a frozen layer keeps no amax history")
    return recipe


def check_weight(name: str, w: object, offsets: object, columns: int) -> int:
    """N of a quantized weight (G, N, K), G from the offsets, K as many columns as its input has."""
    if not isinstance(w, GroupedTensor):
        raise TypeError(f"{name} is {type(w).__name__}; a GroupedTensor from quantize_grouped(w_GNK, None, fmt) is needed")
    if w.matrix_rows is None:
        raise ValueError(f"{name} was quantized with offsets; quantize_grouped(w_GNK, None, fmt) is needed")
    w.plane("rowwise")
    checks.offsets(offsets, w.num_groups)
    if w.shape[1] != columns:
        raise ValueError(f"{name} has K={w.shape[1]} inputs but its input has {columns} columns; they must be equal")
    return w.matrix_rows


def check_column_plane(name: str, w: GroupedTensor, needed: bool) -> None:
    """``ValueError`` where backward would need a plane that is not there."""
    if needed and torch.is_grad_enabled() and w.columnwise is None:
        raise ValueError(
            f"{name} has no columnwise plane, which the gradient of its input needs; quantize it with columnwise=True"
            " (of a module: backward=True), or run under torch.no_grad()"
        )


def check_bias(name: str, bias: Tensor | None, offsets: Tensor, n: int) -> None:
    """(G, N) of any float dtype, frozen."""
    if bias is not None:
        checks.shape(name, checks.dtype(name, bias, checks.FLOATS), (offsets.shape[0] - 1, n), "one row a group")
        if bias.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient but is frozen here; pass {name}.detach()")


def check_rng(rng: Tensor | None, recipe: Recipe, x: Tensor) -> Tensor | None:
    """The rng given, or one drawn where the recipe needs one."""
    if rng is not None:
        return checks.rng(rng)
    return rng_from(None, x.device) if recipe.needs_rng else None


def pack(w: GroupedTensor) -> tuple[list[Tensor], str, str]:
    """(tensors, format, layout) of a weight as the operators take it: data, scale, amax (may be empty) of each plane."""
    tensors: list[Tensor] = []
    row = w.plane("rowwise")
    for p in (row, w.columnwise):
        if p is not None:
            if p.layout != row.layout:
                raise ValueError(f"the planes of a weight have the layouts {row.layout!r} and {p.layout!r}; one is needed")
            amax = p.data.new_empty(0, dtype=torch.float32) if p.amax is None else p.amax
            tensors += [p.data, p.scale, amax]
    return tensors, w.format.spec(), row.layout


def unpack(tensors: list[Tensor], fmt: str, layout: str, n: int, columns: int, offsets: Tensor) -> GroupedTensor:
    """Inverse of :func:`pack`; G is that of ``offsets``."""
    parsed, groups = parse(fmt), offsets.shape[0] - 1
    row, column = planes_from_list(tensors, parsed, True, len(tensors) == 6, layout)
    own = torch.arange(groups + 1, device=offsets.device) * n
    return replace(GroupedTensor((groups * n, columns), parsed, row, column, own), matrix_rows=n)


def _forward(
    x: Tensor,
    weight: list[Tensor],
    offsets: Tensor,
    bias: Tensor | None,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    rng: Tensor | None,
    weight_format: str,
    layout: str,
    n: int,
    scaling: float,
    recipe: str,
) -> Tensor:
    checks.offset_values(offsets, x.shape[0])
    x_q = stages.quantize(x, offsets, parse_recipe(recipe).of("linear").input, rowwise=True, columnwise=False)
    w = unpack(weight, weight_format, layout, n, x.shape[1], offsets)
    return low_rank.forward(x, x_q, w, offsets, bias, low_rank.make(lora_a, lora_b, scaling))


def _forward_fake(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty((x.shape[0], others[-3]))


def _backward(
    dy: Tensor,
    x: Tensor | None,
    weight: list[Tensor],
    offsets: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    rng: Tensor | None,
    weight_format: str,
    layout: str,
    k: int,
    scaling: float,
    recipe: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    need_x, need_lora = needs
    dy_q = stages.quantize(dy, offsets, parse_recipe(recipe).of("linear").gradient, rowwise=need_x, columnwise=False, rng=rng)
    w = unpack(weight, weight_format, layout, dy.shape[1], k, offsets) if need_x else None
    return low_rank.backward(dy, dy_q, x, w, offsets, low_rank.make(lora_a, lora_b, scaling), need_lora)


def _backward_fake(
    dy: Tensor,
    x: Tensor | None,
    weight: list[Tensor],
    offsets: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    k, (need_x, need_lora) = others[3], others[-1]
    da, db = (fake_grad(dy, t, need_lora) for t in (lora_a, lora_b))
    return dy.new_empty((dy.shape[0], k) if need_x else 0), da, db


def fake_grad(dy: Tensor, parameter: Tensor | None, needed: bool) -> Tensor:
    """An empty tensor like a parameter's gradient."""
    if parameter is None:
        return dy.new_empty(0)
    return parameter.new_empty(parameter.shape if needed else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, offsets, _, lora_a, lora_b, rng, ctx.format, ctx.layout, _, ctx.scaling, ctx.recipe = inputs
    ctx.k, ctx.planes = x.shape[1], len(weight)
    ctx.save_for_backward(None if lora_a is None else x, offsets, lora_a, lora_b, rng, *weight)


def _autograd(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, offsets, lora_a, lora_b, rng, *weight = ctx.saved_tensors
    need_x, need_a, need_b = (ctx.needs_input_grad[i] for i in (0, 4, 5))
    options = (ctx.format, ctx.layout, ctx.k, ctx.scaling, ctx.recipe, [need_x, need_a or need_b])
    grads = torch.ops.blockscale.frozen_linear_backward(dy, x, weight, offsets, lora_a, lora_b, rng, *options)
    dx, da, db = (g if need else None for g, need in zip(grads, (need_x, need_a, need_b), strict=True))
    return dx, [None] * ctx.planes, None, None, da, db, *(None,) * 6


_LORA = "Tensor? lora_a, Tensor? lora_b, Tensor? rng, str weight_format, str layout"
registry.define(
    f"frozen_linear(Tensor x, Tensor[] weight, Tensor offsets, Tensor? bias, {_LORA}, int n, float scaling, str recipe) -> Tensor",
    _forward,
    _forward_fake,
)
registry.define(
    f"frozen_linear_backward(Tensor dy, Tensor? x, Tensor[] weight, Tensor offsets, {_LORA}, int k, float scaling,"
    " str recipe, bool[] needs) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
registry.autograd("frozen_linear", _autograd, _setup_context)
