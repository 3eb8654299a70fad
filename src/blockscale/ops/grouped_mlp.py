"""The differentiable operator ``grouped_mlp``: y = s * (W2 act(W1 x + b1) + b2) for each group of rows.

A training step reads from top to bottom in :func:`forward_step` and :func:`backward_step`. Between them are kept: the
planes of x that wgrad reads (the columnwise one, mostly) and the pre-activation h (with ``recompute`` the rowwise plane of x
in its stead); the activation is rebuilt in backward, its plane with it.

Legend: M rows (capacity), H hidden, I intermediate, W = columns of the pre-activation (2I for a GLU), G groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockscale.activations import Activation, parse
from blockscale.ops import checks, registry, stages
from blockscale.ops import delayed as delayed_scaling
from blockscale.ops.delayed import Scaling
from blockscale.ops.grouped_linear import check_bias, check_main_grad, check_weight
from blockscale.ops.mlp_tensors import MLPTensors, Needs
from blockscale.ops.operands import KeptInput, fake_saved, kept_planes
from blockscale.ops.quantize import rng_from
from blockscale.ops.tap import Seen, Tap, backward_tap, forward_tap
from blockscale.ops.weight_cache import WeightCache
from blockscale.ops.wgrad_queue import Waiting, WgradQueue, find_queue, waiting, without_hooks
from blockscale.recipes import Recipe, current_recipe, parse_recipe


def forward_step(
    x: Tensor, t: MLPTensors, r: Recipe, act: stages.ActivationSpec, save_input: bool, recompute: bool
) -> list[Tensor]:
    """[y, h (unless ``recompute``), the planes of x that backward reads, amaxes for the histories of delayed scaling]."""
    fc1, fc2 = t.linears(r)
    planes = kept_planes(fc1.recipe, save_input, recompute)
    x_q, w1_q = fc1.input(x, planes), fc1.weight_rows()
    h = stages.forward_gemm(x_q, w1_q, t.offsets, x.dtype, t.b1)
    a = stages.activation(h, t.offsets, t.probs, act)
    a_q, w2_q = fc2.input(a), fc2.weight_rows()
    y = stages.forward_gemm(a_q, w2_q, t.offsets, x.dtype, t.b2, bias_scale=t.probs)
    t.see_weights(w1_q, w2_q)
    t.see(Seen("input", x, x_q), Seen("hidden", h), Seen("activation", a, a_q), Seen("output", y))
    kept = [*([] if recompute else [h]), *stages.plane_tensors(x_q, planes)]
    return [y, *kept, *fc1.amaxes(x_q, w1_q), *fc2.amaxes(a_q, w2_q)]


def backward_step(
    dy: Tensor,
    h: Tensor | None,
    kept: KeptInput,
    t: MLPTensors,
    r: Recipe,
    act: stages.ActivationSpec,
    n: Needs,
    delayed: list[Waiting] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dx, dw1, dw2, dprobs, db1, db2); empty where not needed. h None: made again. dw1's and dw2's operands go to ``delayed``."""
    dx, dw1, dw2 = (stages.empty(like) for like in (dy, t.w1, t.w2))
    ds, db1, db2 = (dy.new_empty(0, dtype=torch.float32) for _ in range(3))
    fc1, fc2 = t.linears(r)
    if h is None:
        h = stages.forward_gemm(kept.rows(fc1, dy.shape[0]), fc1.weight_rows(), t.offsets, dy.dtype, t.b1)

    def wgrad(index: int, dy_q: stages.Operand, x_q: stages.Operand) -> Tensor:
        w = (t.w1, t.w2)[index]
        if delayed is None:
            return stages.wgrad_gemm(dy_q, x_q, t.offsets, w, t.main_grads[index] if t.main_grads else None)
        delayed.append(waiting(index, dy_q, x_q, t.offsets))
        return stages.empty(w)

    dy_q = fc2.gradient(dy, n.below_w2, n.w2, t.rng)
    if n.w2:
        a = stages.activation(h, t.offsets, t.probs, act)
        dw2 = wgrad(1, dy_q, fc2.input_for_wgrad(a))
    if n.b2:
        db2 = stages.bias_grad(dy, t.offsets, t.probs)
    if n.below_w2:
        da = stages.dgrad_gemm(dy_q, fc2.weight_for_dgrad(), t.offsets, dy.dtype)
        dh, ds = stages.activation_backward(da, h, t.offsets, t.probs, act)
        if n.probs and t.b2 is not None:
            ds = ds + stages.row_dot(dy, t.b2, t.offsets)
        if n.b1:
            db1 = stages.bias_grad(dh, t.offsets)
        dh_q = fc1.gradient(dh, n.x, n.w1, stages.next_rng(t.rng, 1))
        if n.w1:
            dw1 = wgrad(0, dh_q, kept.for_wgrad(fc1, dy.shape[0]))
        if n.x:
            dx = stages.dgrad_gemm(dh_q, fc1.weight_for_dgrad(), t.offsets, dy.dtype)
        t.see(Seen("gradient", dy, dy_q), Seen("da", da), Seen("dh", dh, dh_q), Seen("dx", dx) if n.x else None)
    else:
        t.see(Seen("gradient", dy, dy_q))
    t.see_gradients((dw1, dw2), (n.w1 and delayed is None, n.w2 and delayed is None))
    return dx, dw1, dw2, ds, db1, db2


def grouped_mlp(
    x_MH: Tensor,
    w1_GWH: Tensor,
    w2_GHI: Tensor,
    offsets: Tensor,
    *,
    activation: str | Activation = "swiglu",
    interleave: int | None = None,
    probs: Tensor | None = None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    recipe: Recipe | None = None,
    main_grads: tuple[Tensor, Tensor] | None = None,
    rng: Tensor | None = None,
    caches: tuple[WeightCache, WeightCache] | None = None,
    queue: WgradQueue | None = None,
    recompute: bool = False,
    scaling: tuple[Scaling | None, Scaling | None] | None = None,
    tap: Tap | None = None,
) -> Tensor:
    """y = s * (W2 act(W1 x + b1) + b2), group by group; differentiable in x, the weights, the biases and probs.

    s is applied to the activation (before it is quantized) and to b2. The pre-activation, the activation and the gradient
    that reaches the activation are each rounded to x's dtype.

    Args:
        x_MH: (M, H) float32, bfloat16 or float16; rows past ``offsets[-1]`` influence nothing.
        w1_GWH: (G, W, H), W = 2I for a GLU, else I. w2_GHI: (G, H', I).
        offsets: int64[G+1].
        activation: a name, spec or Activation. interleave: None for halves, else the run length of GLU columns.
        probs: float32 (M,).
        b1, b2: (G, W), (G, H').
        recipe: None: the enclosing autocast's, else BF16.
        main_grads: float32 buffers of w1's and w2's shapes: dW is added there and the weights get no gradient.
        rng: int64[2] for stochastic rounding in backward; None: drawn from torch's default generator.
        caches: keep the quantized w1 and w2 until the weights change.
        queue: backward leaves dW1 and dW2 there, to be computed by ``queue.run``.
        recompute: keep the quantized planes of x that backward needs, or x (see ``Recipe.saved_plane``), and compute h again.
        scaling: of both linears, as in ``grouped_linear``.
        tap: somebody watches: the tensors of both passes are shown to its listeners.

    Returns:
        (M, H') in x's dtype, dead rows zero.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is legal.
    """
    x = checks.matrix("x", x_MH, "M", "H")
    act = parse(activation)
    w1 = check_weight("w1", w1_GWH, offsets, x.shape[1])
    w2 = check_weight("w2", w2_GHI, offsets, act.out_width(w1.shape[1], interleave))
    checks.same_device(x=x, offsets=offsets, w1=w1, w2=w2, probs=probs, b1=b1, b2=b2, rng=rng)
    check_bias("b1", b1, w1)
    check_bias("b2", b2, w2)
    if probs is not None:
        checks.shape("probs", checks.dtype("probs", probs, (torch.float32,)), (x.shape[0],), "one a row of x")
    if main_grads is not None:
        if len(main_grads) != 2:
            raise ValueError(f"main_grads has {len(main_grads)} buffers; (w1's, w2's) are needed")
        for w, main_grad in zip((w1, w2), main_grads, strict=True):
            check_main_grad(main_grad, w)
            checks.same_device(x=x, main_grads=main_grad)
    if rng is not None:
        checks.rng(rng)
    recipe = current_recipe(recipe)
    if rng is None and recipe.needs_rng:
        rng = rng_from(None, x.device)
    grad = torch.is_grad_enabled()
    one, two = scaling or (None, None)
    linears = ((recipe.of("fc1"), one), (recipe.of("fc2"), two))
    scales, histories = delayed_scaling.arguments(linears, x, w1.shape[0])
    outputs = torch.ops.blockscale.grouped_mlp(
        x,
        without_hooks(w1, queue),
        without_hooks(w2, queue),
        offsets,
        probs,
        b1,
        b2,
        rng,
        [] if queue is not None else list(main_grads or ()),  # a queue adds to main_grad by itself
        [] if caches is None else [c.ticket for c in caches],
        None if queue is None else queue.ticket,
        scales,
        histories,
        recipe.spec(),
        act.spec(),
        interleave or 0,
        grad and w1.requires_grad,
        grad and recompute,
        None if tap is None else tap.ticket,
    )
    if scales and grad:
        delayed_scaling.record(linears, outputs)
    y: Tensor = outputs[0]
    return y


def _forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    offsets: Tensor,
    probs: Tensor | None,
    b1: Tensor | None,
    b2: Tensor | None,
    rng: Tensor | None,
    main_grads: list[Tensor],
    caches: list[Tensor],
    queue: Tensor | None,
    scales: list[Tensor],
    histories: list[Tensor],
    recipe: str,
    act: str,
    interleave: int,
    save_input: bool,
    recompute: bool,
    tap: Tensor | None,
) -> list[Tensor]:
    checks.offset_values(offsets, x.shape[0])
    t = MLPTensors(w1, w2, offsets, probs, b1, b2, rng, main_grads, caches, scales, [], forward_tap(tap))
    return forward_step(x, t, parse_recipe(recipe), stages.ActivationSpec(act, interleave), save_input, recompute)


def _forward_fake(x: Tensor, w1: Tensor, w2: Tensor, offsets: Tensor, *others: Any) -> list[Tensor]:
    recipe, _, _, save_input, recompute, _ = others[-6:]
    M = x.shape[0]
    r = parse_recipe(recipe)
    kept = [] if recompute else [x.new_empty((M, w1.shape[1]))]
    kept += fake_saved(x, offsets, r.of("fc1"), kept_planes(r.of("fc1"), save_input, recompute))
    return [x.new_empty((M, w2.shape[1])), *kept, *delayed_scaling.fake_amaxes((r.of("fc1"), r.of("fc2")), x, w1.shape[0])]


def _backward(
    dy: Tensor,
    x: Tensor | None,
    h: Tensor | None,
    saved: list[Tensor],
    w1: Tensor,
    w2: Tensor,
    offsets: Tensor,
    probs: Tensor | None,
    b1: Tensor | None,
    b2: Tensor | None,
    rng: Tensor | None,
    main_grads: list[Tensor],
    caches: list[Tensor],
    queue: Tensor | None,
    scales: list[Tensor],
    histories: list[Tensor],
    recipe: str,
    act: str,
    interleave: int,
    copy: bool,
    needs: list[bool],
    tap: Tensor | None,
) -> tuple[Tensor, ...]:
    t = MLPTensors(w1, w2, offsets, probs, b1, b2, rng, main_grads, caches, scales, histories, backward_tap(tap))
    n, spec = Needs(*needs), stages.ActivationSpec(act, interleave)
    delayed: list[Waiting] | None = None if queue is None else []
    dx, dw1, dw2, ds, db1, db2 = backward_step(dy, h, KeptInput(x, saved, h is None), t, parse_recipe(recipe), spec, n, delayed)
    if queue is not None and delayed:
        find_queue(queue).put(delayed, copy)
    db1, db2 = (d if b is None else d.to(b.dtype) for d, b in ((db1, b1), (db2, b2)))
    return dx, dw1, dw2, ds if n.probs else stages.empty(ds), db1, db2


def _backward_fake(
    dy: Tensor,
    x: Tensor | None,
    h: Tensor | None,
    saved: list[Tensor],
    w1: Tensor,
    w2: Tensor,
    offsets: Tensor,
    probs: Tensor | None,
    b1: Tensor | None,
    b2: Tensor | None,
    rng: Tensor | None,
    main_grads: list[Tensor],
    caches: list[Tensor],
    queue: Tensor | None,
    *others: Any,
) -> tuple[Tensor, ...]:
    n = Needs(*others[-2])
    own_dw = not main_grads and queue is None
    dx = dy.new_empty((dy.shape[0], w1.shape[2]) if n.x else 0)
    dw1 = w1.new_empty(w1.shape if n.w1 and own_dw else 0)
    dw2 = w2.new_empty(w2.shape if n.w2 and own_dw else 0)
    ds = dy.new_empty(dy.shape[0] if n.probs else 0, dtype=torch.float32)
    db1, db2 = (
        dy.new_empty(0, dtype=torch.float32) if b is None else b.new_empty(b.shape if need else 0)
        for b, need in ((b1, n.b1), (b2, n.b2))
    )
    return dx, dw1, dw2, ds, db1, db2


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, *tensors, ctx.main_grads, caches, ctx.queue, scales, ctx.histories = inputs[:13]
    ctx.recipe, ctx.act, ctx.interleave, _, ctx.recompute, ctx.tap = inputs[13:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    r = parse_recipe(ctx.recipe)
    x = x if r.of("fc1").saved_plane is None else None  # else planes of it are saved
    ctx.num_caches, ctx.num_scales = len(caches), len(scales)
    kept = output[1 : len(output) - delayed_scaling.count((r.of("fc1"), r.of("fc2")))]
    ctx.save_for_backward(x, *tensors, *caches, *scales, *kept)


def _autograd(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    no_main, no_caches = [None] * len(ctx.main_grads), [None] * ctx.num_caches
    tail = (no_main, no_caches, None, [None] * ctx.num_scales, [None] * len(ctx.histories), *(None,) * 6)
    dy = grads[0]
    if dy is None:
        return (None,) * 8 + tail
    x, w1, w2, offsets, probs, b1, b2, rng, *saved = ctx.saved_tensors
    caches, saved = saved[: ctx.num_caches], saved[ctx.num_caches :]
    scales, saved = saved[: ctx.num_scales], saved[ctx.num_scales :]
    h, saved = (None, saved) if ctx.recompute else (saved[0], saved[1:])
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 4, 5, 6)]
    copy = type(dy) is not Tensor  # traced: the operands will lie in memory that the graph uses again
    options = (scales, ctx.histories, ctx.recipe, ctx.act, ctx.interleave, copy, needs, ctx.tap)
    dx, dw1, dw2, ds, db1, db2 = torch.ops.blockscale.grouped_mlp_backward(
        dy, x, h, saved, w1, w2, offsets, probs, b1, b2, rng, ctx.main_grads, caches, ctx.queue, *options
    )
    own_dw = not ctx.main_grads and ctx.queue is None
    keep = [*needs[:1], *(n and own_dw for n in needs[1:3]), *needs[3:]]
    dx, dw1, dw2, ds, db1, db2 = (g if k else None for g, k in zip((dx, dw1, dw2, ds, db1, db2), keep, strict=True))
    return dx, dw1, dw2, None, ds, db1, db2, None, *tail


_TENSORS = "Tensor w1, Tensor w2, Tensor offsets, Tensor? probs, Tensor? b1, Tensor? b2, Tensor? rng"
_OPTIONS = "str recipe, str act, int interleave"
registry.define(
    f"grouped_mlp(Tensor x, {_TENSORS}, Tensor[] main_grads, Tensor[] caches, Tensor? queue, Tensor[] scales,"
    f" Tensor[] histories, {_OPTIONS}, bool save_input, bool recompute, Tensor? tap) -> Tensor[]",
    _forward,
    _forward_fake,
)
registry.define(
    f"grouped_mlp_backward(Tensor dy, Tensor? x, Tensor? h, Tensor[] saved, {_TENSORS}, Tensor(a!)[] main_grads,"
    f" Tensor[] caches, Tensor(b!)? queue, Tensor[] scales, Tensor(c!)[] histories, {_OPTIONS}, bool copy, bool[] needs,"
    " Tensor? tap) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
registry.autograd("grouped_mlp", _autograd, _setup_context)
