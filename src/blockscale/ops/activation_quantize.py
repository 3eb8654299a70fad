"""Activation and its gradient joined with quantization: ``activation_quantize`` and ``activation_backward_quantize``.

The same bits as the two steps apart: the activation (its gradient) is rounded to h's dtype, then quantized. On a GPU both are one
pass over memory where there is a kernel for it; :func:`blockscale.explain` says whether, and else why not.

Legend: M rows (capacity), W columns of the pre-activation, I = W/2 for a GLU, else W.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockscale.activations import Activation, parse
from blockscale.formats import Format
from blockscale.formats import parse as parse_format
from blockscale.ops import checks, joined, registry
from blockscale.ops.activation import check_activation, check_gradient
from blockscale.ops.quantize import check_options, check_rng, fake_grouped
from blockscale.tensors import GroupedTensor, planes_from_list


def activation_quantize(
    h: Tensor,
    offsets: Tensor,
    act: str | Activation,
    fmt: Format,
    *,
    probs: Tensor | None = None,
    interleave: int | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    layout: str = "compact",
    rng: Tensor | None = None,
) -> GroupedTensor:
    """``quantize_grouped(activation(h, act, probs=probs), offsets, fmt)`` in one operator.

    Args:
        h: (M, W) pre-activation, float32, bfloat16 or float16.
        offsets: int64[G+1]; rows past ``offsets[-1]`` influence nothing.
        act, probs, interleave: as :func:`blockscale.activation`.
        fmt, rowwise, columnwise, layout, rng: as :func:`blockscale.quantize_grouped`.

    Returns:
        The quantized (M, I) activation.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is legal.
    """
    parsed = parse(act)
    check_activation(h, probs, checks.offsets(offsets), interleave)
    check_options(fmt, rowwise, columnwise, layout, ("compact", "swizzled"))
    rng = check_rng(rng, None, fmt, h)
    tensors = torch.ops.blockscale.activation_quantize(
        h, offsets, probs, parsed.spec(), interleave or 0, fmt.spec(), rowwise, columnwise, layout, rng
    )
    row, column = planes_from_list(tensors, fmt, rowwise, columnwise, layout)
    return GroupedTensor((h.shape[0], parsed.out_width(h.shape[1], interleave)), fmt, row, column, offsets)


def activation_backward_quantize(
    dy: Tensor,
    h: Tensor,
    offsets: Tensor,
    act: str | Activation,
    fmt: Format,
    *,
    probs: Tensor | None = None,
    interleave: int | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    layout: str = "compact",
    rng: Tensor | None = None,
    bias: bool = True,
) -> tuple[GroupedTensor, Tensor | None, Tensor | None]:
    """The gradient of the pre-activation, quantized, with the gradients of probs and of the first bias.

    Args:
        dy: (M, I) upstream gradient in h's dtype.
        bias: whether the gradient of the bias is wanted; it costs a few per cent of the time.
        Other arguments as :func:`activation_quantize`.

    Returns:
        (dh quantized (M, W), ds float32 (M,) or None without probs, dbias float32 (G, W) or None if it is not wanted); dbias sums
        the rounded dh. Both sums are float32, added in an order that is fixed on each backend.
    """
    parsed = parse(act)
    check_activation(h, probs, checks.offsets(offsets), interleave)
    checks.same_device(h=h, dy=checks.dtype("dy", dy, (h.dtype,)))
    checks.shape("dy", dy, (h.shape[0], parsed.out_width(h.shape[1], interleave)), "the shape of the activation")
    check_options(fmt, rowwise, columnwise, layout, ("compact", "swizzled"))
    checks.flag("bias", bias)
    rng = check_rng(rng, None, fmt, h)
    *tensors, ds, dbias = torch.ops.blockscale.activation_backward_quantize(
        dy, h, offsets, probs, parsed.spec(), interleave or 0, fmt.spec(), rowwise, columnwise, layout, rng, bias
    )
    row, column = planes_from_list(tensors, fmt, rowwise, columnwise, layout)
    quantized = GroupedTensor((h.shape[0], h.shape[1]), fmt, row, column, offsets)
    return quantized, None if probs is None else ds, dbias if bias else None


def _forward(
    h: Tensor,
    offsets: Tensor,
    probs: Tensor | None,
    act: str,
    interleave: int,
    fmt: str,
    rowwise: bool,
    columnwise: bool,
    layout: str,
    rng: Tensor | None,
) -> list[Tensor]:
    checks.offset_values(offsets, h.shape[0])
    planes = (rowwise, columnwise)
    return joined.forward(h, offsets, parse(act), parse_format(fmt), probs, interleave or None, planes, layout, rng)


def _forward_fake(
    h: Tensor,
    offsets: Tensor,
    probs: Tensor | None,
    act: str,
    interleave: int,
    fmt: str,
    rowwise: bool,
    columnwise: bool,
    layout: str,
    rng: Tensor | None,
) -> list[Tensor]:
    columns = parse(act).out_width(h.shape[1], interleave or None)
    groups = offsets.shape[0] - 1
    return fake_grouped(h, h.shape[0], columns, groups, parse_format(fmt), rowwise, columnwise, layout)


def _backward(
    dy: Tensor,
    h: Tensor,
    offsets: Tensor,
    probs: Tensor | None,
    act: str,
    interleave: int,
    fmt: str,
    rowwise: bool,
    columnwise: bool,
    layout: str,
    rng: Tensor | None,
    bias: bool = True,
) -> list[Tensor]:
    checks.offset_values(offsets, h.shape[0])
    parsed, runs = parse(act), interleave or None
    check_gradient(dy, h, parsed, runs)
    planes = (rowwise, columnwise)
    tensors, ds, dbias = joined.backward(dy, h, offsets, parsed, parse_format(fmt), probs, runs, planes, layout, rng, bias)
    empty = h.new_empty(0, dtype=torch.float32)
    return [*tensors, empty if ds is None else ds, empty.clone() if dbias is None else dbias]


def _backward_fake(
    dy: Tensor,
    h: Tensor,
    offsets: Tensor,
    probs: Tensor | None,
    act: str,
    interleave: int,
    fmt: str,
    rowwise: bool,
    columnwise: bool,
    layout: str,
    rng: Tensor | None,
    bias: bool = True,
) -> list[Tensor]:
    groups = offsets.shape[0] - 1
    planes = fake_grouped(h, h.shape[0], h.shape[1], groups, parse_format(fmt), rowwise, columnwise, layout)
    ds = h.new_empty(0 if probs is None else h.shape[0], dtype=torch.float32)
    return [*planes, ds, h.new_empty((groups, h.shape[1]) if bias else 0, dtype=torch.float32)]


_TAIL = (
    "Tensor h, Tensor offsets, Tensor? probs, str act, int interleave, str fmt, bool rowwise, bool columnwise,"
    " str layout, Tensor? rng"
)
registry.define(f"activation_quantize({_TAIL}) -> Tensor[]", _forward, _forward_fake)
registry.define(f"activation_backward_quantize(Tensor dy, {_TAIL}, bool bias=True) -> Tensor[]", _backward, _backward_fake)
