"""The stages that a layer is made of, on quantized or bfloat16 operands; the place where a backend is chosen.

Everything here runs inside an operator's implementation, on real tensors. Legend: M rows, K inputs, N outputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockscale.activations import parse as parse_activation
from blockscale.formats import Format
from blockscale.ops import backend
from blockscale.ops.activation import run_backward, run_forward
from blockscale.tensors import GroupedTensor, planes_from_list

Operand = GroupedTensor | Tensor
LAYOUT = "compact"


@dataclass(frozen=True)
class ActivationSpec:
    """An activation as the operators carry it: its spec and the interleave of its GLU columns (0: halves)."""

    act: str
    interleave: int

    def pre_width(self, intermediate: int) -> int:
        """Columns of the pre-activation."""
        return parse_activation(self.act).pre_width(intermediate)


def quantize(
    x: Tensor,
    offsets: Tensor,
    fmt: Format | None,
    *,
    rowwise: bool,
    columnwise: bool,
    rng: Tensor | None = None,
    scale: Tensor | None = None,
) -> Operand:
    """Quantize (M, K) rows; x itself when ``fmt`` is None. ``scale``: of ``FP8Delayed``."""
    if fmt is None or not (rowwise or columnwise):
        return x
    tensors = backend.quantize(x, offsets, fmt, rowwise, columnwise, LAYOUT, None, rng, scale=scale)
    row, column = planes_from_list(tensors, fmt, rowwise, columnwise, LAYOUT)
    return GroupedTensor((x.shape[0], x.shape[1]), fmt, row, column, offsets)


def quantize_weight(w_GNK: Tensor, fmt: Format | None, plane: str, scale: Tensor | None = None) -> Operand:
    """Quantize weights in one plane; w itself when ``fmt`` is None."""
    if fmt is None:
        return w_GNK
    G, N, K = w_GNK.shape
    offsets = torch.arange(G + 1, device=w_GNK.device) * N
    row = plane == "rowwise"
    q = quantize(w_GNK.reshape(G * N, K), offsets, fmt, rowwise=row, columnwise=not row, scale=scale)
    assert isinstance(q, GroupedTensor)
    return replace(q, matrix_rows=N)


def forward_gemm(
    x: Operand, w: Operand, offsets: Tensor, dtype: torch.dtype, bias: Tensor | None, bias_scale: Tensor | None = None
) -> Tensor:
    """y = x W^T + bias * bias_scale, rounded once to ``dtype``."""
    return backend.rows_by_weight(x, w, offsets, x.shape[0], transpose=True, out_dtype=dtype, bias=bias, bias_scale=bias_scale)


def dgrad_gemm(dy: Operand, w: Operand, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """dx = dy W, rounded once to ``dtype``."""
    return backend.rows_by_weight(dy, w, offsets, dy.shape[0], transpose=False, out_dtype=dtype)


def wgrad_gemm(dy: Operand, x: Operand, offsets: Tensor, w: Tensor, main_grad: Tensor | None) -> Tensor:
    """dW = dy^T x in w's dtype; with a main_grad it is added there in float32 instead, and the result is empty."""
    dw = backend.wgrad(dy, x, offsets, dy.shape[0])
    if main_grad is None:
        return dw.to(w.dtype)
    main_grad.add_(dw)
    return empty(w)


def bias_grad(dy: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor:
    """Sum of each group's rows (times ``scale``), (G, N) float32."""
    return backend.bias_grad(dy, offsets, scale)


def activation(h: Tensor, offsets: Tensor, probs: Tensor | None, act: ActivationSpec) -> Tensor:
    """act(h) * probs in h's dtype."""
    return run_forward(h, probs, offsets, act.act, act.interleave)


def activation_backward(dy: Tensor, h: Tensor, offsets: Tensor, probs: Tensor | None, act: ActivationSpec) -> tuple[Tensor, Tensor]:
    """(dh in h's dtype, ds float32 (M,) or empty)."""
    return run_backward(dy, h, probs, offsets, act.act, act.interleave)


def plane_tensors(x: Operand, planes: tuple[str, ...]) -> list[Tensor]:
    """Planes as a list to save for backward."""
    return [t for p in planes for t in x.plane(p).tensors()] if isinstance(x, GroupedTensor) else []


def next_rng(rng: Tensor | None, step: int) -> Tensor | None:
    """The same seed at a later offset, so that two tensors of a step draw different bits."""
    if rng is None:
        return None
    return rng + torch.tensor([0, step], device=rng.device)


def empty(like: Tensor) -> Tensor:
    """An empty tensor that stands for a gradient nobody asked for."""
    return like.new_empty(0)


def row_dot(dy: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """float32 (M,): dy . bias of the row's group; 0 for a dead row."""
    return backend.row_dot(dy, bias, offsets)
