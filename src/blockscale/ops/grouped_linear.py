"""The differentiable operator ``grouped_linear``: y = x W^T + b for each group of rows.

Legend: M rows (capacity), K inputs, N outputs, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockscale.ops import checks, delayed, registry, stages
from blockscale.ops.delayed import Scaling
from blockscale.ops.operands import KeptInput, LinearOperands, fake_saved, kept_planes
from blockscale.ops.quantize import rng_from
from blockscale.ops.tap import Seen, Tap, backward_tap, forward_tap
from blockscale.ops.weight_cache import WeightCache
from blockscale.ops.wgrad_queue import WgradQueue, find_queue, waiting, without_hooks
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
    bias_scale: Tensor | None = None,
    cache: WeightCache | None = None,
    queue: WgradQueue | None = None,
    scaling: Scaling | None = None,
    tap: Tap | None = None,
) -> Tensor:
    """y = x W^T + b, group by group, with quantized operands forward and backward.

    Differentiable in x, W, b and bias_scale.

    Args:
        x_MK: (M, K) float32, bfloat16 or float16; rows past ``offsets[-1]`` influence nothing.
        weight_GNK: (G, N, K), any of the three dtypes; quantized from its own dtype.
        offsets: int64[G+1].
        bias_GN: (G, N).
        recipe: None: the enclosing autocast's, else BF16.
        main_grad: float32 (G, N, K): dW is added there during backward, and W gets no gradient.
        rng: int64[2] for stochastic rounding in backward; None: drawn from torch's default generator.
        bias_scale: float32 (M,), multiplies the bias of each row.
        cache: keeps the quantized weight until the weight changes.
        queue: backward leaves dW there, to be computed by ``queue.run``; W gets no gradient until then.
        scaling: scales and histories of the recipe's ``FP8Delayed`` formats; histories take amaxes where grad is enabled.
        tap: somebody watches: the tensors of both passes are shown to its listeners.

    Returns:
        (M, N) in x's dtype, dead rows zero.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is legal.
    """
    x = checks.matrix("x", x_MK)
    w = check_weight("weight", weight_GNK, offsets, x.shape[1])
    checks.same_device(x=x, offsets=offsets, weight=w, bias=bias_GN, main_grad=main_grad, rng=rng, bias_scale=bias_scale)
    check_bias("bias", bias_GN, w)
    check_bias_scale(bias_scale, bias_GN, x)
    check_main_grad(main_grad, w)
    if rng is not None:
        checks.rng(rng)
    recipe = current_recipe(recipe)
    if rng is None and recipe.needs_rng:
        rng = rng_from(None, x.device)
    needs = torch.is_grad_enabled() and w.requires_grad
    main_grads = [] if main_grad is None or queue is not None else [main_grad]  # a queue adds to main_grad by itself
    linears = ((recipe.of("linear"), scaling),)
    scales, histories = delayed.arguments(linears, x, w.shape[0])
    outputs = torch.ops.blockscale.grouped_linear(
        x,
        without_hooks(w, queue),
        offsets,
        bias_GN,
        bias_scale,
        rng,
        main_grads,
        None if cache is None else cache.ticket,
        None if queue is None else queue.ticket,
        scales,
        histories,
        recipe.spec(),
        needs,
        None if tap is None else tap.ticket,
    )
    if scales and torch.is_grad_enabled():
        delayed.record(linears, outputs)
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


def check_bias_scale(scale: Tensor | None, bias: Tensor | None, x: Tensor) -> None:
    """float32, one a row of x, beside a bias."""
    if scale is not None:
        if bias is None:
            raise ValueError("bias_scale is given but bias is None; it multiplies the bias")
        checks.shape("bias_scale", checks.dtype("bias_scale", scale, (torch.float32,)), (x.shape[0],), "one a row of x")


def check_main_grad(main_grad: Tensor | None, w: Tensor) -> None:
    """float32 in the weight's shape."""
    if main_grad is not None:
        checks.shape("main_grad", checks.dtype("main_grad", main_grad, (torch.float32,)), tuple(w.shape), "as the weight")


def _forward(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    rng: Tensor | None,
    main_grads: list[Tensor],
    cache: Tensor | None,
    queue: Tensor | None,
    scales: list[Tensor],
    histories: list[Tensor],
    recipe: str,
    save_input: bool,
    tap: Tensor | None,
) -> list[Tensor]:
    checks.offset_values(offsets, x.shape[0])
    r = parse_recipe(recipe).of("linear")
    of, planes = LinearOperands(weight, offsets, r, cache, *delayed.of_linear(r, scales, [], 0)), kept_planes(r, save_input)
    x_q, w_q = of.input(x, planes), of.weight_rows()
    y = stages.forward_gemm(x_q, w_q, offsets, x.dtype, bias, bias_scale)
    if (watched := forward_tap(tap)) is not None:
        watched.see_weight("weight", weight, w_q)
        watched.see_pass([Seen("input", x, x_q), Seen("output", y)], offsets)
    return [y, *stages.plane_tensors(x_q, planes), *of.amaxes(x_q, w_q)]


def _forward_fake(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    rng: Tensor | None,
    main_grads: list[Tensor],
    cache: Tensor | None,
    queue: Tensor | None,
    scales: list[Tensor],
    histories: list[Tensor],
    recipe: str,
    save_input: bool,
    tap: Tensor | None,
) -> list[Tensor]:
    y = x.new_empty((x.shape[0], weight.shape[1]))
    r = parse_recipe(recipe).of("linear")
    amaxes = delayed.fake_amaxes((r,), x, weight.shape[0])
    return [y, *fake_saved(x, offsets, r, kept_planes(r, save_input)), *amaxes]


def _backward(
    dy: Tensor,
    x: Tensor | None,
    saved: list[Tensor],
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    rng: Tensor | None,
    main_grads: list[Tensor],
    cache: Tensor | None,
    queue: Tensor | None,
    scales: list[Tensor],
    histories: list[Tensor],
    recipe: str,
    copy: bool,
    needs: list[bool],
    tap: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r = parse_recipe(recipe).of("linear")
    need_dx, need_dw, need_db, need_ds = needs
    of = LinearOperands(weight, offsets, r, cache, *delayed.of_linear(r, scales, histories, 0))
    dy_q = of.gradient(dy, need_dx, need_dw, rng)
    dx, dw, db = (stages.empty(t) for t in (dy, weight, weight if bias is None else bias))
    ds = dy.new_empty(0, dtype=torch.float32)
    if need_dx:
        dx = stages.dgrad_gemm(dy_q, of.weight_for_dgrad(), offsets, dy.dtype)
    if need_dw:
        x_q = KeptInput(x, saved, False).for_wgrad(of, dy.shape[0])
        if queue is None:
            dw = stages.wgrad_gemm(dy_q, x_q, offsets, weight, main_grads[0] if main_grads else None)
        else:
            find_queue(queue).put([waiting(0, dy_q, x_q, offsets)], copy)
    if (watched := backward_tap(tap)) is not None:
        watched.see_pass([Seen("gradient", dy, dy_q), *([Seen("dx", dx)] if need_dx else [])], offsets)
        if need_dw and queue is None:
            watched.see_weight("dw", main_grads[0] if main_grads else dw)
    if need_db and bias is not None:
        db = stages.bias_grad(dy, offsets, bias_scale).to(bias.dtype)
    if need_ds and bias is not None:
        ds = stages.row_dot(dy, bias, offsets)
    return dx, dw, db, ds


def _backward_fake(
    dy: Tensor,
    x: Tensor | None,
    saved: list[Tensor],
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    rng: Tensor | None,
    main_grads: list[Tensor],
    cache: Tensor | None,
    queue: Tensor | None,
    scales: list[Tensor],
    histories: list[Tensor],
    recipe: str,
    copy: bool,
    needs: list[bool],
    tap: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    need_dx, need_dw, need_db, need_ds = needs
    dx = dy.new_empty((dy.shape[0], weight.shape[2]) if need_dx else 0)
    dw = weight.new_empty(weight.shape if need_dw and not main_grads and queue is None else 0)
    db = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape if need_db else 0)
    ds = dy.new_empty(dy.shape[0] if need_ds and bias is not None else 0, dtype=torch.float32)
    return dx, dw, db, ds


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, offsets, bias, bias_scale, rng, ctx.main_grads, cache, ctx.queue, scales, ctx.histories = inputs[:11]
    ctx.recipe, _, ctx.tap = inputs[11:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    r = parse_recipe(ctx.recipe).of("linear")
    x = x if r.saved_plane is None else None  # else a plane of it is saved
    ctx.num_scales = len(scales)
    planes = output[1 : len(output) - delayed.count((r,))]
    ctx.save_for_backward(x, weight, offsets, bias, bias_scale, rng, cache, *scales, *planes)


def _autograd(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    dy = grads[0]
    no_main, no_scales = [None] * len(ctx.main_grads), ([None] * ctx.num_scales, [None] * len(ctx.histories))
    if dy is None:
        return (None,) * 6 + (no_main, None, None, *no_scales, None, None, None)
    x, weight, offsets, bias, bias_scale, rng, cache, *saved = ctx.saved_tensors
    scales, saved = saved[: ctx.num_scales], saved[ctx.num_scales :]
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 3, 4)]
    copy = type(dy) is not Tensor  # traced: the operands will lie in memory that the graph uses again
    options = (scales, ctx.histories, ctx.recipe, copy, needs, ctx.tap)
    dx, dw, db, ds = torch.ops.blockscale.grouped_linear_backward(
        dy, x, saved, weight, offsets, bias, bias_scale, rng, ctx.main_grads, cache, ctx.queue, *options
    )
    keep = [needs[0], needs[1] and not ctx.main_grads and ctx.queue is None, *needs[2:]]
    dx, dw, db, ds = (g if k else None for g, k in zip((dx, dw, db, ds), keep, strict=True))
    return dx, dw, None, db, ds, None, no_main, None, None, *no_scales, None, None, None


registry.define(
    "grouped_linear(Tensor x, Tensor weight, Tensor offsets, Tensor? bias, Tensor? bias_scale, Tensor? rng,"
    " Tensor[] main_grads, Tensor? cache, Tensor? queue, Tensor[] scales, Tensor[] histories, str recipe, bool save_input,"
    " Tensor? tap) -> Tensor[]",
    _forward,
    _forward_fake,
)
registry.define(
    "grouped_linear_backward(Tensor dy, Tensor? x, Tensor[] saved, Tensor weight, Tensor offsets, Tensor? bias,"
    " Tensor? bias_scale, Tensor? rng, Tensor(a!)[] main_grads, Tensor? cache, Tensor(b!)? queue, Tensor[] scales,"
    " Tensor(c!)[] histories, str recipe, bool copy, bool[] needs, Tensor? tap) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
registry.autograd("grouped_linear", _autograd, _setup_context)
