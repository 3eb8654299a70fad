"""The differentiable operator ``grouped_mlp``: y = s * (W2 act(W1 x + b1) + b2) for each group of rows.

A training step reads from top to bottom in :func:`forward_step` and :func:`backward_step`. Between them are kept: the
plane of x that wgrad reads (the columnwise one, mostly) and the pre-activation h; the activation is rebuilt in backward,
its plane with it.

Legend: M rows (capacity), H hidden, I intermediate, W = columns of the pre-activation (2I for a GLU), G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockscale.activations import Activation, parse
from blockscale.ops import checks, registry, stages
from blockscale.ops.grouped_linear import check_bias, check_main_grad, check_weight, fake_saved
from blockscale.ops.quantize import rng_from
from blockscale.recipes import Recipe, current_recipe, parse_recipe


@dataclass(frozen=True)
class MLPTensors:
    """What both passes read besides their operand. ``main_grads``: empty, or the float32 buffers of w1 and w2."""

    w1: Tensor
    w2: Tensor
    offsets: Tensor
    probs: Tensor | None
    b1: Tensor | None
    b2: Tensor | None
    rng: Tensor | None
    main_grads: list[Tensor]


def forward_step(x: Tensor, t: MLPTensors, r: Recipe, act: stages.ActivationSpec, save_input: bool) -> list[Tensor]:
    """[y, h, the plane of x that wgrad reads (when ``save_input``)]."""
    r1, r2 = r.of("fc1"), r.of("fc2")
    x_q = stages.quantize_input(x, t.offsets, r1, save_input)
    h = stages.forward_gemm(x_q, stages.quantize_weight(t.w1, r1.weight, "rowwise"), t.offsets, x.dtype, t.b1)
    a = stages.activation(h, t.offsets, t.probs, act)
    a_q = stages.quantize_input(a, t.offsets, r2, False)
    w2_q = stages.quantize_weight(t.w2, r2.weight, "rowwise")
    y = stages.forward_gemm(a_q, w2_q, t.offsets, x.dtype, t.b2, bias_scale=t.probs)
    return [y, h, *(stages.saved_tensors(x_q, r1) if save_input else [])]


@dataclass(frozen=True)
class Needs:
    """Which gradients are asked for."""

    x: bool
    w1: bool
    w2: bool
    probs: bool
    b1: bool
    b2: bool

    @property
    def below_w2(self) -> bool:
        """Whether anything before the second GEMM needs a gradient."""
        return self.x or self.w1 or self.b1 or self.probs


def backward_step(
    dy: Tensor,
    x: Tensor | None,
    h: Tensor,
    saved: list[Tensor],
    t: MLPTensors,
    r: Recipe,
    act: stages.ActivationSpec,
    n: Needs,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dx, dw1, dw2, dprobs, db1, db2); empty where not needed."""
    dx, dw1, dw2 = (stages.empty(like) for like in (dy, t.w1, t.w2))
    ds, db1, db2 = (dy.new_empty(0, dtype=torch.float32) for _ in range(3))
    main1, main2 = t.main_grads or (None, None)
    r1, r2 = r.of("fc1"), r.of("fc2")

    dy_q = stages.quantize(dy, t.offsets, r2.gradient, rowwise=n.below_w2, columnwise=n.w2, rng=t.rng)
    if n.w2:
        a = stages.activation(h, t.offsets, t.probs, act)
        dw2 = stages.wgrad_gemm(dy_q, stages.backward_input(a, t.offsets, r2), t.offsets, t.w2, main2)
    if n.b2:
        db2 = stages.bias_grad(dy, t.offsets, t.probs)
    if n.below_w2:
        da = stages.dgrad_gemm(dy_q, stages.backward_weight(t.w2, r2), t.offsets, dy.dtype)
        dh, ds = stages.activation_backward(da, h, t.offsets, t.probs, act)
        if n.probs and t.b2 is not None:
            ds = ds + stages.row_dot(dy, t.b2, t.offsets)
        if n.b1:
            db1 = stages.bias_grad(dh, t.offsets)
        dh_q = stages.quantize(dh, t.offsets, r1.gradient, rowwise=n.x, columnwise=n.w1, rng=stages.next_rng(t.rng, 1))
        if n.w1:
            x_q = stages.saved_operand(saved, x, (dy.shape[0], t.w1.shape[2]), r1, t.offsets)
            dw1 = stages.wgrad_gemm(dh_q, x_q, t.offsets, t.w1, main1)
        if n.x:
            dx = stages.dgrad_gemm(dh_q, stages.backward_weight(t.w1, r1), t.offsets, dy.dtype)
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
    save_input = torch.is_grad_enabled() and w1.requires_grad
    outputs = torch.ops.blockscale.grouped_mlp(
        x,
        w1,
        w2,
        offsets,
        probs,
        b1,
        b2,
        rng,
        list(main_grads or ()),
        recipe.spec(),
        act.spec(),
        interleave or 0,
        save_input,
    )
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
    recipe: str,
    act: str,
    interleave: int,
    save_input: bool,
) -> list[Tensor]:
    checks.offset_values(offsets, x.shape[0])
    t = MLPTensors(w1, w2, offsets, probs, b1, b2, rng, main_grads)
    return forward_step(x, t, parse_recipe(recipe), stages.ActivationSpec(act, interleave), save_input)


def _forward_fake(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    offsets: Tensor,
    probs: Tensor | None,
    b1: Tensor | None,
    b2: Tensor | None,
    rng: Tensor | None,
    main_grads: list[Tensor],
    recipe: str,
    act: str,
    interleave: int,
    save_input: bool,
) -> list[Tensor]:
    M = x.shape[0]
    return [
        x.new_empty((M, w2.shape[1])),
        x.new_empty((M, w1.shape[1])),
        *fake_saved(x, offsets, parse_recipe(recipe).of("fc1"), save_input),
    ]


def _backward(
    dy: Tensor,
    x: Tensor | None,
    h: Tensor,
    saved: list[Tensor],
    w1: Tensor,
    w2: Tensor,
    offsets: Tensor,
    probs: Tensor | None,
    b1: Tensor | None,
    b2: Tensor | None,
    rng: Tensor | None,
    main_grads: list[Tensor],
    recipe: str,
    act: str,
    interleave: int,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    t = MLPTensors(w1, w2, offsets, probs, b1, b2, rng, main_grads)
    n = Needs(*needs)
    dx, dw1, dw2, ds, db1, db2 = backward_step(dy, x, h, saved, t, parse_recipe(recipe), stages.ActivationSpec(act, interleave), n)
    db1, db2 = (d if b is None else d.to(b.dtype) for d, b in ((db1, b1), (db2, b2)))
    return dx, dw1, dw2, ds if n.probs else stages.empty(ds), db1, db2


def _backward_fake(
    dy: Tensor,
    x: Tensor | None,
    h: Tensor,
    saved: list[Tensor],
    w1: Tensor,
    w2: Tensor,
    offsets: Tensor,
    probs: Tensor | None,
    b1: Tensor | None,
    b2: Tensor | None,
    rng: Tensor | None,
    main_grads: list[Tensor],
    recipe: str,
    act: str,
    interleave: int,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    n = Needs(*needs)
    dx = dy.new_empty((dy.shape[0], w1.shape[2]) if n.x else 0)
    dw1 = w1.new_empty(w1.shape if n.w1 and not main_grads else 0)
    dw2 = w2.new_empty(w2.shape if n.w2 and not main_grads else 0)
    ds = dy.new_empty(dy.shape[0] if n.probs else 0, dtype=torch.float32)
    db1, db2 = (
        dy.new_empty(0, dtype=torch.float32) if b is None else b.new_empty(b.shape if need else 0)
        for b, need in ((b1, n.b1), (b2, n.b2))
    )
    return dx, dw1, dw2, ds, db1, db2


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, w1, w2, offsets, probs, b1, b2, rng, ctx.main_grads, ctx.recipe, ctx.act, ctx.interleave, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    x = x if parse_recipe(ctx.recipe).of("fc1").saved_plane is None else None  # else a plane of it is saved
    ctx.save_for_backward(x, w1, w2, offsets, probs, b1, b2, rng, *output[1:])


def _autograd(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    no_main = [None] * len(ctx.main_grads)
    if grads[0] is None:
        return (None,) * 8 + (no_main,) + (None,) * 4
    x, w1, w2, offsets, probs, b1, b2, rng, h, *saved = ctx.saved_tensors
    need = ctx.needs_input_grad
    needs = [need[i] for i in (0, 1, 2, 4, 5, 6)]
    dx, dw1, dw2, ds, db1, db2 = torch.ops.blockscale.grouped_mlp_backward(
        grads[0],
        x,
        h,
        saved,
        w1,
        w2,
        offsets,
        probs,
        b1,
        b2,
        rng,
        ctx.main_grads,
        ctx.recipe,
        ctx.act,
        ctx.interleave,
        needs,
    )
    keep = [*needs[:1], *(n and not ctx.main_grads for n in needs[1:3]), *needs[3:]]
    dx, dw1, dw2, ds, db1, db2 = (g if k else None for g, k in zip((dx, dw1, dw2, ds, db1, db2), keep, strict=True))
    return dx, dw1, dw2, None, ds, db1, db2, None, no_main, None, None, None, None


_TENSORS = "Tensor w1, Tensor w2, Tensor offsets, Tensor? probs, Tensor? b1, Tensor? b2, Tensor? rng"
_OPTIONS = "str recipe, str act, int interleave"
registry.define(
    f"grouped_mlp(Tensor x, {_TENSORS}, Tensor[] main_grads, {_OPTIONS}, bool save_input) -> Tensor[]",
    _forward,
    _forward_fake,
)
registry.define(
    f"grouped_mlp_backward(Tensor dy, Tensor? x, Tensor h, Tensor[] saved, {_TENSORS}, Tensor(a!)[] main_grads, {_OPTIONS},"
    " bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
registry.autograd("grouped_mlp", _autograd, _setup_context)
