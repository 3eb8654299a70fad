"""An activation, or its gradient, and the quantization of the result: in one pass where there is a kernel of both.

Legend: M rows (capacity), W columns of the pre-activation, I of the activation, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockscale.activations import Activation
from blockscale.formats import Format, FP8Delayed
from blockscale.layouts import PLANES, ceil_div
from blockscale.ops import backend

Planes = tuple[bool, bool]
#: of a partial sum on a GPU: columns, of ds; rows, of a bias gradient
TERMS, HEIGHT = 64, 32


def against_joining(
    device: torch.device, act: Activation, fmt: Format, planes: Planes, interleave: int | None, width: int, gradient: bool
) -> str | None:
    """Why there are two passes for ``width`` columns of the activation (or its gradient); None: there is one.

    Args:
        planes: whether the rowwise and the columnwise one are made.
    """
    if device.type != "cuda":
        return f"on {device.type} devices they are two steps"
    own = _one_format(fmt, planes)
    if own is None:
        return f"the planes of {fmt.label} are not made by one kernel"
    why = backend.against_triton("joined", device, own)
    if why is not None:
        return why
    told: str | None = backend.triton_launch("activation").against_joining(act, own, interleave, width, gradient)
    return told


def _one_format(fmt: Format, planes: Planes) -> Format | None:
    """The format that all planes asked for are made in, from the high-precision tensor; None where there is none."""
    if isinstance(fmt, FP8Delayed) or (planes[1] and fmt.from_row):
        return None
    own = [fmt.stored(name) for name, asked in zip(PLANES, planes, strict=True) if asked]
    return own[0] if own[0] == own[-1] else None


def workspace_bytes(
    h: Tensor, groups: int, act: Activation, fmt: Format, planes: Planes, interleave: int | None, probs: bool, bias: bool | None
) -> int:
    """Bytes that :func:`forward` (``bias`` None), or :func:`backward`, takes from torch's allocator beyond its results on a GPU.

    The result in h's dtype where a second pass quantizes it, and the partial sums of ds and of the bias gradient.
    """
    (M, W), width, gradient = h.shape, act.out_width(h.shape[1], interleave), bias is not None
    one = against_joining(h.device, act, fmt, planes, interleave, width, gradient) is None
    stored = 0 if one else M * (W if gradient else width) * h.element_size()
    return stored + (sums_bytes(M, width, W, groups, probs, bool(bias)) if gradient else 0)


def sums_bytes(rows: int, width: int, columns: int, groups: int, probs: bool, bias: bool) -> int:
    """Bytes of the partial sums of a gradient on a GPU: of ds if there are probabilities, of the bias gradient if asked for."""
    return 4 * (rows * ceil_div(width, TERMS) * probs + (ceil_div(rows, HEIGHT) + groups) * columns * bias)


def forward(
    h: Tensor,
    offsets: Tensor,
    act: Activation,
    fmt: Format,
    probs: Tensor | None,
    interleave: int | None,
    planes: Planes,
    layout: str,
    rng: Tensor | None,
) -> list[Tensor]:
    """Planes of act(h) * probs, in the operators' order."""
    width = act.out_width(h.shape[1], interleave)
    if against_joining(h.device, act, fmt, planes, interleave, width, False) is None:
        own = _one_format(fmt, planes)
        return backend.triton_launch("activation").quantize(h, offsets, act, own, probs, interleave, *planes, layout)
    y = backend.activation_forward(h, act, probs, interleave, offsets)
    return backend.quantize(y, offsets, fmt, *planes, layout, None, rng)


def backward(
    dy: Tensor,
    h: Tensor,
    offsets: Tensor,
    act: Activation,
    fmt: Format,
    probs: Tensor | None,
    interleave: int | None,
    planes: Planes,
    layout: str,
    rng: Tensor | None,
    bias: bool,
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """(planes of the gradient of h, ds or None without probs, bias gradient float32 (G, W) or None where it is not asked for)."""
    if against_joining(h.device, act, fmt, planes, interleave, dy.shape[1], True) is None:
        own = _one_format(fmt, planes)
        launch = backend.triton_launch("activation")
        return launch.backward_quantize(dy, h, offsets, act, own, probs, interleave, *planes, layout, bias)
    dh, ds = backend.activation_backward(dy, h, act, probs, interleave, offsets)
    return backend.quantize(dh, offsets, fmt, *planes, layout, None, rng), ds, backend.bias_grad(dh, offsets) if bias else None
