"""The differentiable operator ``frozen_mlp``: grouped_mlp with weights that exist only in quantized form.

y = s * (W2 act(W1 x + b1) + b2), each linear with a low-rank adapter or without. Weights and biases are frozen; x, s and
the adapters have gradients. Between the passes are kept the pre-activation h, and x itself if the first linear has an
adapter; with ``recompute`` x alone. The activation, and x A^T, are computed again in backward.

Legend: M rows (capacity), H hidden, I intermediate, W = columns of the pre-activation (2I for a GLU), G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockscale.activations import Activation, parse
from blockscale.ops import checks, low_rank, registry, stages
from blockscale.ops.frozen_linear import (
    check_bias,
    check_column_plane,
    check_rng,
    check_weight,
    fake_grad,
    frozen_recipe,
    pack,
    unpack,
)
from blockscale.ops.low_rank import LowRank
from blockscale.recipes import Recipe, parse_recipe
from blockscale.tensors import GroupedTensor


@dataclass(frozen=True)
class FrozenTensors:
    """What both passes read besides their operand; ``lora``: the adapters of w1 and w2."""

    w1: GroupedTensor
    w2: GroupedTensor
    offsets: Tensor
    probs: Tensor | None
    b1: Tensor | None
    b2: Tensor | None
    rng: Tensor | None
    lora: tuple[LowRank | None, LowRank | None]

    def pre_activation(self, x: Tensor, r: Recipe) -> Tensor:
        """h = W1 x + b1, (M, W) in x's dtype."""
        x_q = stages.quantize(x, self.offsets, r.of("fc1").input, rowwise=True, columnwise=False)
        return low_rank.forward(x, x_q, self.w1, self.offsets, self.b1, self.lora[0])


def forward_step(x: Tensor, t: FrozenTensors, r: Recipe, act: stages.ActivationSpec) -> tuple[Tensor, Tensor]:
    """(y, h)."""
    h = t.pre_activation(x, r)
    a = stages.activation(h, t.offsets, t.probs, act)
    a_q = stages.quantize(a, t.offsets, r.of("fc2").input, rowwise=True, columnwise=False)
    return low_rank.forward(a, a_q, t.w2, t.offsets, t.b2, t.lora[1], bias_scale=t.probs), h


@dataclass(frozen=True)
class Needs:
    """Which gradients are asked for; an adapter's two go together."""

    x: bool
    probs: bool
    lora1: bool
    lora2: bool

    @property
    def below_w2(self) -> bool:
        """Whether anything before the second GEMM needs a gradient."""
        return self.x or self.probs or self.lora1


def backward_step(
    dy: Tensor, x: Tensor | None, h: Tensor | None, t: FrozenTensors, r: Recipe, act: stages.ActivationSpec, n: Needs
) -> tuple[Tensor, ...]:
    """(dx, dprobs, dA1, dB1, dA2, dB2); empty where not needed."""
    if h is None:
        assert x is not None
        h = t.pre_activation(x, r)
    dx, da1, db1 = (stages.empty(dy) for _ in range(3))
    ds = dy.new_empty(0, dtype=torch.float32)
    one, two = r.of("fc1").gradient, r.of("fc2").gradient
    dy_q = stages.quantize(dy, t.offsets, two, rowwise=n.below_w2, columnwise=False, rng=t.rng)
    a = stages.activation(h, t.offsets, t.probs, act) if n.lora2 else None
    da, da2, db2 = low_rank.backward(dy, dy_q, a, t.w2 if n.below_w2 else None, t.offsets, t.lora[1], n.lora2)
    if n.below_w2:
        dh, ds = stages.activation_backward(da, h, t.offsets, t.probs, act)
        if n.probs and t.b2 is not None:
            ds = ds + stages.row_dot(dy, t.b2, t.offsets)
        dh_q = stages.quantize(dh, t.offsets, one, rowwise=n.x, columnwise=False, rng=stages.next_rng(t.rng, 1))
        dx, da1, db1 = low_rank.backward(dh, dh_q, x, t.w1 if n.x else None, t.offsets, t.lora[0], n.lora1)
    return dx, ds if n.probs else stages.empty(ds), da1, db1, da2, db2


def frozen_mlp(
    x_MH: Tensor,
    w1: GroupedTensor,
    w2: GroupedTensor,
    offsets: Tensor,
    *,
    activation: str | Activation = "swiglu",
    interleave: int | None = None,
    probs: Tensor | None = None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    lora1: LowRank | None = None,
    lora2: LowRank | None = None,
    recipe: Recipe | None = None,
    rng: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """y = s * (W2 act(W1 x + b1) + b2), group by group; differentiable in x, probs and the adapters.

    Args:
        x_MH: (M, H) float32, bfloat16 or float16; rows past ``offsets[-1]`` influence nothing.
        w1, w2: ``quantize_grouped`` of (G, W, H) and (G, H', I); their columnwise planes are needed for gradients below them.
        offsets, activation, interleave, probs: as in :func:`blockscale.grouped_mlp`.
        b1, b2: (G, W), (G, H'), frozen.
        lora1, lora2: adapters of w1 and w2, see :mod:`blockscale.ops.low_rank`.
        recipe: the formats of inputs and gradients (weights have their own); None: the enclosing autocast's, else bfloat16
            operands.
        rng: int64[2] for stochastic rounding in backward; None: drawn from torch's default generator.
        recompute: keep x alone between the passes and compute h again in backward.

    Returns:
        (M, H') in x's dtype, dead rows zero.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is legal.
    """
    x = checks.matrix("x", x_MH, "M", "H")
    act = parse(activation)
    n1 = check_weight("w1", w1, offsets, x.shape[1])
    n2 = check_weight("w2", w2, offsets, act.out_width(n1, interleave))
    if probs is not None:
        checks.shape("probs", checks.dtype("probs", probs, (torch.float32,)), (x.shape[0],), "one a row of x")
    check_bias("b1", b1, offsets, n1)
    check_bias("b2", b2, offsets, n2)
    lora: list[Tensor | None] = []
    for name, adapter, w, n in (("lora1", lora1, w1, n1), ("lora2", lora2, w2, n2)):
        low_rank.check(name, adapter, w.num_groups, n, w.shape[1])
        lora += [None, None] if adapter is None else [adapter.a, adapter.b]
    scaling = [1.0 if adapter is None else float(adapter.scaling) for adapter in (lora1, lora2)]
    given = dict(zip(("lora1_a", "lora1_b", "lora2_a", "lora2_b"), lora, strict=True))
    checks.same_device(x=x, offsets=offsets, w1=w1.offsets, w2=w2.offsets, probs=probs, b1=b1, b2=b2, rng=rng, **given)
    wanted = [t is not None and t.requires_grad for t in (x, probs, *lora)]
    check_column_plane("w1", w1, wanted[0])
    check_column_plane("w2", w2, any(wanted[:4]))
    recipe = frozen_recipe(recipe)
    rng = check_rng(rng, recipe, x)
    planes = (*pack(w1), *pack(w2))
    save_h = torch.is_grad_enabled() and any(wanted) and not checks.flag("recompute", recompute)
    options = ([n1, n2], scaling, recipe.spec(), act.spec(), interleave or 0, save_h)
    y: Tensor = torch.ops.blockscale.frozen_mlp(x, offsets, probs, b1, b2, *lora, rng, *planes, *options)[0]
    return y


def _tensors(
    columns: int,
    offsets: Tensor,
    probs: Tensor | None,
    b1: Tensor | None,
    b2: Tensor | None,
    lora: tuple[Tensor | None, ...],
    rng: Tensor | None,
    planes: tuple[Any, ...],
    n: list[int],
    scaling: list[float],
    act: stages.ActivationSpec,
) -> FrozenTensors:
    """An operator's arguments put together; ``columns``: H."""
    inner = parse(act.act).out_width(n[0], act.interleave or None)
    w1 = unpack(planes[0], planes[1], planes[2], n[0], columns, offsets)
    w2 = unpack(planes[3], planes[4], planes[5], n[1], inner, offsets)
    adapters = low_rank.make(lora[0], lora[1], scaling[0]), low_rank.make(lora[2], lora[3], scaling[1])
    return FrozenTensors(w1, w2, offsets, probs, b1, b2, rng, adapters)


def _forward(x: Tensor, offsets: Tensor, probs: Tensor | None, b1: Tensor | None, b2: Tensor | None, *others: Any) -> list[Tensor]:
    checks.offset_values(offsets, x.shape[0])
    lora, rng, planes = others[:4], others[4], others[5:11]
    n, scaling, recipe, act, interleave, save_h = others[11:]
    spec = stages.ActivationSpec(act, interleave)
    t = _tensors(x.shape[1], offsets, probs, b1, b2, lora, rng, planes, n, scaling, spec)
    y, h = forward_step(x, t, parse_recipe(recipe), spec)
    return [y, h] if save_h else [y]


def _forward_fake(x: Tensor, *others: Any) -> list[Tensor]:
    n, save_h = others[-6], others[-1]
    y, h = (x.new_empty((x.shape[0], columns)) for columns in (n[1], n[0]))
    return [y, h] if save_h else [y]


def _backward(
    dy: Tensor,
    x: Tensor | None,
    h: Tensor | None,
    offsets: Tensor,
    probs: Tensor | None,
    b1: Tensor | None,
    b2: Tensor | None,
    *others: Any,
) -> tuple[Tensor, ...]:
    lora, rng, planes = others[:4], others[4], others[5:11]
    n, scaling, recipe, act, interleave, columns, needs = others[11:]
    spec = stages.ActivationSpec(act, interleave)
    t = _tensors(columns, offsets, probs, b1, b2, lora, rng, planes, n, scaling, spec)
    return backward_step(dy, x, h, t, parse_recipe(recipe), spec, Needs(*needs))


def _backward_fake(dy: Tensor, x: Tensor | None, h: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    lora, columns, (need_x, need_s, need_1, need_2) = others[4:8], others[-2], others[-1]
    dx = dy.new_empty((dy.shape[0], columns) if need_x else 0)
    ds = dy.new_empty(dy.shape[0] if need_s else 0, dtype=torch.float32)
    return dx, ds, *(fake_grad(dy, t, need) for t, need in zip(lora, (need_1, need_1, need_2, need_2), strict=True))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, *tensors = inputs[:10]
    planes1, ctx.format1, ctx.layout1, planes2, ctx.format2, ctx.layout2 = inputs[10:16]
    *ctx.options, save_h = inputs[16:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.columns, ctx.counts = x.shape[1], (len(planes1), len(planes2))
    has_lora1 = inputs[5] is not None
    kept = x if has_lora1 or not save_h else None
    ctx.save_for_backward(kept, output[1] if save_h else None, *tensors, *planes1, *planes2)


def _autograd(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    dy = grads[0]
    tail = [None] * ctx.counts[0], None, None, [None] * ctx.counts[1], *(None,) * 8
    if dy is None:
        return (None,) * 10 + tail
    x, h, *saved = ctx.saved_tensors
    tensors, planes = saved[:9], saved[9:]
    planes = planes[: ctx.counts[0]], ctx.format1, ctx.layout1, planes[ctx.counts[0] :], ctx.format2, ctx.layout2
    need = [ctx.needs_input_grad[i] for i in (0, 2, 5, 6, 7, 8)]
    needs = [need[0], need[1], need[2] or need[3], need[4] or need[5]]
    options = (*ctx.options, ctx.columns, needs)
    found = torch.ops.blockscale.frozen_mlp_backward(dy, x, h, *tensors, *planes, *options)
    dx, ds, *lora = (g if wanted else None for g, wanted in zip(found, need, strict=True))
    return dx, None, ds, None, None, *lora, None, *tail


_TENSORS = (
    "Tensor offsets, Tensor? probs, Tensor? b1, Tensor? b2, Tensor? lora1_a, Tensor? lora1_b, Tensor? lora2_a,"
    " Tensor? lora2_b, Tensor? rng, Tensor[] w1, str w1_format, str w1_layout, Tensor[] w2, str w2_format, str w2_layout,"
    " int[] n, float[] scaling, str recipe, str act, int interleave"
)
registry.define(f"frozen_mlp(Tensor x, {_TENSORS}, bool save_h) -> Tensor[]", _forward, _forward_fake)
registry.define(
    f"frozen_mlp_backward(Tensor dy, Tensor? x, Tensor? h, {_TENSORS}, int columns, bool[] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
registry.autograd("frozen_mlp", _autograd, _setup_context)
