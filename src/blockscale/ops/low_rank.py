"""Low-rank adapters of a grouped weight that is frozen: y = x W^T + scaling * (x A^T) B^T, and their gradients.

The adapter's products take bfloat16 operands and accumulate in float32, like those of a layer without formats. The base
product and the adapter's are added in float32 and rounded once. ``x A^T`` and the gradient that reaches it are rounded to
x's dtype; ``x A^T`` is computed again in backward.

Source: Hu et al., "LoRA: Low-rank adaptation of large language models", 2021.

Legend: M rows (capacity), K inputs, N outputs, R rank, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.ops import backend, checks, stages


@dataclass(frozen=True)
class LowRank:
    """An adapter. a: (G, R, K), b: (G, N, R), of any float dtype; ``scaling`` multiplies the product of the two."""

    a: Tensor
    b: Tensor
    scaling: float = 1.0


def check(name: str, lora: LowRank | None, groups: int, n: int, k: int) -> None:
    """``TypeError`` or ``ValueError`` unless ``lora`` is None or fits a weight (groups, n, k)."""
    if lora is None:
        return
    if not isinstance(lora, LowRank):
        raise TypeError(f"{name} is {type(lora).__name__}; a LowRank or None is needed")
    a, b = (checks.dtype(f"{name}.{part}", getattr(lora, part), checks.FLOATS) for part in ("a", "b"))
    if a.dim() != 3 or a.shape[1] < 1:
        raise ValueError(f"{name}.a has shape {tuple(a.shape)}; ({groups}, rank, {k}) with a rank of at least 1 is needed")
    checks.shape(f"{name}.a", a, (groups, a.shape[1], k), "(groups, rank, inputs)")
    checks.shape(f"{name}.b", b, (groups, n, a.shape[1]), "(groups, outputs, rank)")


def make(a: Tensor | None, b: Tensor | None, scaling: float) -> LowRank | None:
    """An adapter from what an operator is given."""
    return None if a is None or b is None else LowRank(a, b, scaling)


def forward(
    x: Tensor,
    x_q: stages.Operand,
    w: stages.Operand,
    offsets: Tensor,
    bias: Tensor | None,
    lora: LowRank | None,
    bias_scale: Tensor | None = None,
) -> Tensor:
    """x W^T + bias * bias_scale + scaling * (x A^T) B^T, (M, N) in x's dtype; ``x_q``: x as the base product reads it."""
    if lora is None:
        return stages.forward_gemm(x_q, w, offsets, x.dtype, bias, bias_scale)
    y = stages.forward_gemm(x_q, w, offsets, torch.float32, bias, bias_scale)
    t = stages.forward_gemm(x, lora.a, offsets, x.dtype, None)
    # scaled apart: add_(alpha=) may or may not contract to a multiply-add
    return y.add_(stages.forward_gemm(t, lora.b, offsets, torch.float32, None).mul_(lora.scaling)).to(x.dtype)


def backward(
    dy: Tensor,
    dy_q: stages.Operand,
    x: Tensor | None,
    w: stages.Operand | None,
    offsets: Tensor,
    lora: LowRank | None,
    need_lora: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx in dy's dtype, dA, dB in their dtypes); empty where not needed.

    Args:
        dy_q: dy as the base product reads it.
        x: as in the forward; needed for dA and dB.
        w: the weight, with its columnwise plane; None: dx is not needed.
    """
    if lora is None:
        dx = stages.empty(dy) if w is None else stages.dgrad_gemm(dy_q, w, offsets, dy.dtype)
        return dx, stages.empty(dy), stages.empty(dy)
    dx, da, db = (stages.empty(t) for t in (dy, lora.a, lora.b))
    dt = stages.dgrad_gemm(dy, lora.b, offsets, torch.float32).mul_(lora.scaling).to(dy.dtype)
    if need_lora:
        assert x is not None
        t = stages.forward_gemm(x, lora.a, offsets, dy.dtype, None)
        da = backend.wgrad(dt, x, offsets, x.shape[0]).to(lora.a.dtype)
        db = backend.wgrad(dy, t, offsets, x.shape[0]).mul_(lora.scaling).to(lora.b.dtype)
    if w is not None:
        base = stages.dgrad_gemm(dy_q, w, offsets, torch.float32)
        dx = base.add_(stages.dgrad_gemm(dt, lora.a, offsets, torch.float32)).to(dy.dtype)
    return dx, da, db
