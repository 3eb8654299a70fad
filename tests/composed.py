"""GroupedLinear and GroupedMLP composed by hand from the public stages: what their autograd must equal, by bits.

Legend: M rows (capacity), H hidden, I intermediate, W columns of the pre-activation, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from support import normal, offsets_of
from torch import Tensor

import blockscale as bs
from blockscale.activations import parse
from blockscale.ops.delayed import RoleScaling, Scaling, delayed_roles
from blockscale.recipes import Recipe

#: entries of a result that are sums of rows: compared with float64 within a bound, the rest by bits
SUMS = ("b1", "b2")


def quantized(
    x: Tensor, offsets: Tensor | None, fmt: bs.formats.Format | None, rng: Tensor | None = None, scaling: RoleScaling | None = None
) -> bs.GroupedTensor | Tensor:
    """Both planes of x; x itself without a format."""
    scale = None if scaling is None else scaling.scale
    return x if fmt is None else bs.quantize_grouped(x, offsets, fmt, columnwise=True, rng=rng, scale=scale)


def scaling_of(r: Recipe, groups: int, seed: int) -> Scaling | None:
    """Scales between 1/4 and 64 and histories of random numbers for the delayed formats of a linear's recipe."""
    made = {}
    for n, (role, fmt) in enumerate(delayed_roles(r).items()):
        g = torch.Generator().manual_seed(seed + n)
        made[role] = RoleScaling(torch.exp2(8 * torch.rand(groups, generator=g) - 2), torch.rand(fmt.history, groups, generator=g))
    return Scaling(**made) if made else None


@dataclass
class Problem:
    """Everything one step of an MLP takes. ``dy`` is the upstream gradient."""

    x: Tensor
    w1: Tensor
    w2: Tensor
    dy: Tensor
    offsets: Tensor
    probs: Tensor | None = None
    b1: Tensor | None = None
    b2: Tensor | None = None
    rng: Tensor | None = None
    activation: str = "swiglu"
    interleave: int | None = None

    def leaves(self) -> dict[str, Tensor]:
        """What can have a gradient."""
        named = {name: getattr(self, name) for name in ("x", "w1", "w2", "probs", "b1", "b2")}
        return {name: t for name, t in named.items() if t is not None}


def problem(
    sizes: list[int],
    capacity: int,
    H: int,
    I: int,  # noqa: E741
    *,
    activation: str = "swiglu",
    interleave: int | None = None,
    bias: bool = False,
    probs: bool = False,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Problem:
    """Random tensors; rows, weights and gradients of very different size; dead rows hold numbers too."""
    G, W, wd = len(sizes), parse(activation).pre_width(I), weight_dtype or dtype
    return Problem(
        x=normal(capacity, H, seed=seed + 1, spread=1.0, dtype=dtype),
        w1=(normal(G, W, H, seed=seed + 2, spread=0.5) / H**0.5).to(wd),
        w2=(normal(G, H, I, seed=seed + 4, spread=0.5) / I**0.5).to(wd),
        dy=normal(capacity, H, seed=seed + 6, spread=1.0, dtype=dtype),
        offsets=offsets_of(sizes),
        probs=torch.rand(capacity, generator=torch.Generator().manual_seed(seed + 8)) + 0.1 if probs else None,
        b1=normal(G, W, seed=seed + 9, dtype=wd) if bias else None,
        b2=normal(G, H, seed=seed + 10, dtype=wd) if bias else None,
        rng=torch.tensor([seed - 5, 11]),
        activation=activation,
        interleave=interleave,
    )


class Operands:
    """What a linear's products read: the forward pass (rowwise planes) and, by the recipe's backward, dgrad and wgrad."""

    def __init__(self, x: Tensor, w: Tensor, offsets: Tensor, r: Recipe, scaling: Scaling):
        self.x = quantized(x, offsets, r.input, None, scaling.input)
        self.w = quantized(w, None, r.weight, None, scaling.weight)
        self.x_back, self.w_back = self.x, self.w
        if r.backward == "high_precision":
            self.x_back, self.w_back = x, w
        elif r.backward == "dequantized":
            self.x_back = x if r.input is None else self.x.dequantize()
            self.w_back = w if r.weight is None else self.w.dequantize().view(w.shape)


def _group_sums(x: Tensor, offsets: Tensor) -> Tensor:
    return torch.stack([x[a:b].sum(0) for a, b in pairwise(offsets.tolist())])


def mlp(p: Problem, r: Recipe) -> dict[str, Tensor]:
    """y, every gradient (dw float32, before the rounding to the weight's dtype; bias sums and the bias part of ds in float64)."""
    dtype, offsets = p.x.dtype, p.offsets
    r1, r2 = r.of("fc1"), r.of("fc2")
    s1, s2 = (scaling_of(r, len(offsets) - 1, seed) or Scaling() for r, seed in ((r1, 1), (r2, 2)))
    one = Operands(p.x, p.w1, offsets, r1, s1)
    h = bs.grouped_gemm(one.x, one.w, offsets=offsets, bias=p.b1, out_dtype=dtype).requires_grad_()
    s = None if p.probs is None else p.probs.clone().requires_grad_()
    a = bs.activation(h, p.activation, probs=s, interleave=p.interleave, offsets=offsets)
    two = Operands(a.detach(), p.w2, offsets, r2, s2)
    scale = p.probs if p.b2 is not None else None
    y = bs.grouped_gemm(two.x, two.w, offsets=offsets, bias=p.b2, bias_scale=scale, out_dtype=dtype)

    later = None if p.rng is None else p.rng + torch.tensor([0, 1])
    dy_q = quantized(p.dy, offsets, r2.gradient, p.rng, s2.gradient)
    a.backward(bs.grouped_gemm(dy_q, two.w_back, role="dgrad", offsets=offsets, out_dtype=dtype))
    dh_q = quantized(h.grad, offsets, r1.gradient, later, s1.gradient)
    result = {
        "y": y,
        "x": bs.grouped_gemm(dh_q, one.w_back, role="dgrad", offsets=offsets, out_dtype=dtype),
        "w1": bs.grouped_gemm(dh_q, one.x_back, role="wgrad", offsets=offsets),
        "w2": bs.grouped_gemm(dy_q, two.x_back, role="wgrad", offsets=offsets),
    }
    rows = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    live = slice(0, len(rows))
    dy = p.dy[live].double()
    if s is not None:
        result["probs"] = s.grad
        if p.b2 is not None:
            result["probs"] = s.grad.double()
            result["probs"][live] += (dy * p.b2.double()[rows]).sum(1)
    if p.b1 is not None:
        result["b1"] = _group_sums(h.grad[live].double(), offsets)
    if p.b2 is not None:
        result["b2"] = _group_sums(dy if p.probs is None else dy * p.probs[live, None].double(), offsets)
    return result


def linear(p: Problem, r: Recipe) -> dict[str, Tensor]:
    """The first linear alone (x, w1, b1, upstream gradient of its width in dy)."""
    offsets, dtype = p.offsets, p.x.dtype
    r = r.of("linear")
    scaling = scaling_of(r, len(offsets) - 1, 1) or Scaling()
    one = Operands(p.x, p.w1, offsets, r, scaling)
    dy_q = quantized(p.dy, offsets, r.gradient, p.rng, scaling.gradient)
    result = {
        "y": bs.grouped_gemm(one.x, one.w, offsets=offsets, bias=p.b1, out_dtype=dtype),
        "x": bs.grouped_gemm(dy_q, one.w_back, role="dgrad", offsets=offsets, out_dtype=dtype),
        "w1": bs.grouped_gemm(dy_q, one.x_back, role="wgrad", offsets=offsets),
    }
    if p.b1 is not None:
        result["b1"] = _group_sums(p.dy[: int(offsets[-1])].double(), offsets)
    return result


def run_mlp(
    p: Problem,
    r: Recipe | None,
    needs: tuple[str, ...] | None = None,
    main_grads: tuple[Tensor, Tensor] | None = None,
    scaling: tuple[Scaling | None, Scaling | None] | None = None,
) -> dict[str, Tensor | None]:
    """y and the gradients of the operator; ``needs``: which leaves require one (all by default)."""
    if scaling is None and r is not None:
        scaling = tuple(scaling_of(r.of(name), len(p.offsets) - 1, seed) for name, seed in (("fc1", 1), ("fc2", 2)))
    leaves = {name: t.clone().requires_grad_(needs is None or name in needs) for name, t in p.leaves().items()}
    y = bs.grouped_mlp(
        leaves["x"],
        leaves["w1"],
        leaves["w2"],
        p.offsets,
        activation=p.activation,
        interleave=p.interleave,
        probs=leaves.get("probs"),
        b1=leaves.get("b1"),
        b2=leaves.get("b2"),
        recipe=r,
        main_grads=main_grads,
        rng=p.rng,
        scaling=scaling,
    )
    if y.requires_grad:
        y.backward(p.dy)
    return {"y": y.detach(), **{name: t.grad for name, t in leaves.items()}}


def run_linear(p: Problem, r: Recipe | None, main_grad: Tensor | None = None) -> dict[str, Tensor | None]:
    """y and the gradients of the operator ``grouped_linear``."""
    leaves = {name: t.clone().requires_grad_() for name, t in (("x", p.x), ("w1", p.w1), ("b1", p.b1)) if t is not None}
    options = {"recipe": r, "main_grad": main_grad, "rng": p.rng}
    if r is not None:
        options["scaling"] = scaling_of(r.of("linear"), len(p.offsets) - 1, 1)
    y = bs.grouped_linear(leaves["x"], leaves["w1"], p.offsets, leaves.get("b1"), **options)
    y.backward(p.dy)
    return {"y": y.detach(), **{name: t.grad for name, t in leaves.items()}}
