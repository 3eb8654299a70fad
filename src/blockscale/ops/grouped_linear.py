"""The differentiable operator ``grouped_linear``: y = x W^T + b for each group of rows.

Legend: M rows (capacity), K inputs, N outputs, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockscale.ops import checks, registry, stages
from blockscale.ops.quantize import fake_grouped, rng_from
from blockscale.recipes import Recipe, current_recipe, parse_recipe


def grouped_linear(
    x_MK: Tensor,
    weight_GNK: Tensor,
    offsets: Tensor,
    bias_GN: Tensor | None = None,
    *,
    recipe: Recipe | None = None,
    main_grad: Tensor | None = None,
    rng: Tensor | None = None,
) -> Tensor:
    """y = x W^T + b, group by group, with quantized operands forward and backward; differentiable in x, W and b.

    Args:
        x_MK: (M, K) float32, bfloat16 or float16; rows past ``offsets[-1]`` influence nothing.
        weight_GNK: (G, N, K), any of the three dtypes; quantized from its own dtype.
        offsets: int64[G+1].
        bias_GN: (G, N).
        recipe: None: the enclosing autocast's, else BF16.
        main_grad: float32 (G, N, K): dW is added there during backward, and W gets no gradient.
        rng: int64[2] for stochastic rounding in backward; None: drawn from torch's default generator.

    Returns:
        (M, N) in x's dtype, dead rows zero.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is legal.
    """
    x = checks.matrix("x", x_MK)
    w = check_weight("weight", weight_GNK, offsets, x.shape[1])
    checks.same_device(x=x, offsets=offsets, weight=w, bias=bias_GN, main_grad=main_grad, rng=rng)
    check_bias("bias", bias_GN, w)
    check_main_grad(main_grad, w)
    if rng is not None:
        checks.rng(rng)
    recipe = current_recipe(recipe)
    if rng is None and recipe.needs_rng:
        rng = rng_from(None, x.device)
    needs = torch.is_grad_enabled() and w.requires_grad
    main_grads = [] if main_grad is None else [main_grad]
    outputs = torch.ops.blockscale.grouped_linear(x, w, offsets, bias_GN, rng, main_grads, recipe.spec(), needs)
    y: Tensor = outputs[0]
    return y


def check_weight(name: str, w: object, offsets: object, columns: int) -> Tensor:
    """(G, N, K) of any float dtype, G from the offsets, K as many columns as x has."""
    t = checks.dtype(name, w, checks.FLOATS)
    if t.dim() != 3 or 0 in t.shape[1:]:
        raise ValueError(f"{name} has shape {tuple(t.shape)}; (G, N, K) with N, K >= 1 is needed")
    checks.offsets(offsets, t.shape[0])
    if t.shape[2] != columns:
        raise ValueError(f"{name} has K={t.shape[2]} inputs but its input has {columns} columns; they must be equal")
    return t


def check_bias(name: str, bias: Tensor | None, w: Tensor) -> None:
    """(G, N) of any float dtype."""
    if bias is not None:
        checks.shape(name, checks.dtype(name, bias, checks.FLOATS), (w.shape[0], w.shape[1]), "one row a group")


def check_main_grad(main_grad: Tensor | None, w: Tensor) -> None:
    """float32 in the weight's shape."""
    if main_grad is not None:
        checks.shape("main_grad", checks.dtype("main_grad", main_grad, (torch.float32,)), tuple(w.shape), "as the weight")


def _forward(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    rng: Tensor | None,
    main_grads: list[Tensor],
    recipe: str,
    save_input: bool,
) -> list[Tensor]:
    checks.offset_values(offsets, x.shape[0])
    r = parse_recipe(recipe).of("linear")
    x_q = stages.quantize_input(x, offsets, r, save_input)
    w_q = stages.quantize_weight(weight, r.weight, "rowwise")
    y = stages.forward_gemm(x_q, w_q, offsets, x.dtype, bias)
    return [y, *(stages.saved_tensors(x_q, r) if save_input else [])]


def _forward_fake(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    rng: Tensor | None,
    main_grads: list[Tensor],
    recipe: str,
    save_input: bool,
) -> list[Tensor]:
    y = x.new_empty((x.shape[0], weight.shape[1]))
    return [y, *fake_saved(x, offsets, parse_recipe(recipe).of("linear"), save_input)]


def fake_saved(x: Tensor, offsets: Tensor, r: Recipe, save_input: bool) -> list[Tensor]:
    """Empty tensors like the plane of x that forward saves."""
    which = r.saved_plane
    if which is None or r.input is None or not save_input:
        return []
    row = which == "rowwise"
    planes = fake_grouped(x, x.shape[0], x.shape[1], offsets.shape[0] - 1, r.input, row, not row, stages.LAYOUT)
    return planes if r.input.of(which).has_amax else planes[:2]


def _backward(
    dy: Tensor,
    x: Tensor | None,
    saved: list[Tensor],
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    rng: Tensor | None,
    main_grads: list[Tensor],
    recipe: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    r = parse_recipe(recipe).of("linear")
    need_dx, need_dw, need_db = needs
    dy_q = stages.quantize(dy, offsets, r.gradient, rowwise=need_dx, columnwise=need_dw, rng=rng)
    dx, dw, db = (stages.empty(t) for t in (dy, weight, weight if bias is None else bias))
    if need_dx:
        dx = stages.dgrad_gemm(dy_q, stages.backward_weight(weight, r), offsets, dy.dtype)
    if need_dw:
        x_q = stages.saved_operand(saved, x, (dy.shape[0], weight.shape[2]), r, offsets)
        dw = stages.wgrad_gemm(dy_q, x_q, offsets, weight, main_grads[0] if main_grads else None)
    if need_db and bias is not None:
        db = stages.bias_grad(dy, offsets).to(bias.dtype)
    return dx, dw, db


def _backward_fake(
    dy: Tensor,
    x: Tensor | None,
    saved: list[Tensor],
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    rng: Tensor | None,
    main_grads: list[Tensor],
    recipe: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    need_dx, need_dw, need_db = needs
    dx = dy.new_empty((dy.shape[0], weight.shape[2]) if need_dx else 0)
    dw = weight.new_empty(weight.shape if need_dw and not main_grads else 0)
    db = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape if need_db else 0)
    return dx, dw, db


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, offsets, bias, rng, ctx.main_grads, ctx.recipe, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    x = x if parse_recipe(ctx.recipe).of("linear").saved_plane is None else None  # else a plane of it is saved
    ctx.save_for_backward(x, weight, offsets, bias, rng, *output[1:])


def _autograd(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    dy = grads[0]
    no_main = [None] * len(ctx.main_grads)
    if dy is None:
        return (None,) * 5 + (no_main, None, None)
    x, weight, offsets, bias, rng, *saved = ctx.saved_tensors
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    dx, dw, db = torch.ops.blockscale.grouped_linear_backward(
        dy, x, saved, weight, offsets, bias, rng, ctx.main_grads, ctx.recipe, needs
    )
    dw_kept = needs[1] and not ctx.main_grads
    return dx if needs[0] else None, dw if dw_kept else None, None, db if needs[2] else None, None, no_main, None, None


registry.define(
    "grouped_linear(Tensor x, Tensor weight, Tensor offsets, Tensor? bias, Tensor? rng, Tensor[] main_grads, str recipe,"
    " bool save_input) -> Tensor[]",
    _forward,
    _forward_fake,
)
registry.define(
    "grouped_linear_backward(Tensor dy, Tensor? x, Tensor[] saved, Tensor weight, Tensor offsets, Tensor? bias,"
    " Tensor? rng, Tensor(a!)[] main_grads, str recipe, bool[] needs) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
registry.autograd("grouped_linear", _autograd, _setup_context)
