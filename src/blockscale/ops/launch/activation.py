"""Activations and their gradients on the GPU: plain, or joined with quantization to MXFP8.

Legend: M rows (capacity), I columns of the activation, W of the pre-activation, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockscale.activations import Activation, ClampedSwiglu, Situ
from blockscale.formats import MXFP8, Format
from blockscale.kernels.activation import activation_backward, activation_forward
from blockscale.kernels.activation_mxfp8 import activation_backward_mxfp8, activation_mxfp8
from blockscale.layouts import ceil_div, round_up, tile_capacity
from blockscale.ops.joined import TERMS
from blockscale.ops.launch import sums
from blockscale.ops.launch.call import chunks, empty_planes
from blockscale.ops.launch.start import Candidate, choose, start

# the columns of a partial sum of ds are the same in both gradient kernels, so that both give the same ds
FORWARD = (Candidate({"ROWS": 32, "COLUMNS": 64}, 2), Candidate({"ROWS": 32, "COLUMNS": 64}, 4))
BACKWARD = (Candidate({"ROWS": 32, "COLUMNS": TERMS}, 2), Candidate({"ROWS": 32, "COLUMNS": TERMS}, 4))
FORWARD_MXFP8 = tuple(Candidate({"COLUMNS": 128}, 2, limit) for limit in (96, 112, 128, 160)) + (Candidate({"COLUMNS": 128}, 4),)
BACKWARD_MXFP8 = tuple(Candidate({"COLUMNS": TERMS}, 2, limit) for limit in (96, 112, 128, 160)) + BACKWARD[1:]


def against_joining(act: Activation, fmt: Format, interleave: int | None, width: int, backward: bool) -> str | None:
    """Why an activation (its gradient) of ``width`` columns and its quantization take two passes; None: they take one."""
    if not isinstance(fmt, MXFP8):
        return f"only MXFP8 is joined with it, so that the quantizer to {fmt.label} reads its result again"
    if fmt.from_row:
        return "the columnwise plane comes from the rowwise one, so that it is a pass of its own"
    if not backward or not act.is_glu:
        return None
    if fmt.is_2d:
        return "32x32 blocks are not joined with the gradient of a GLU"
    if width % 64:
        return f"I={width} columns are no multiple of 64, so that a block or a tile of scales has columns of both halves"
    if interleave is not None and interleave % 32 and 16 % interleave:
        return f"interleave={interleave} cuts blocks of 32 columns; None, a multiple of 32, 1, 2, 4, 8 and 16 do not"
    return None


def forward(h: Tensor, act: Activation, probs: Tensor | None, interleave: int | None, offsets: Tensor | None) -> Tensor:
    """act(h) * probs in h's dtype; rows from ``offsets[-1]`` on are zero and not read."""
    h, probs, offsets = _lines(h), _contiguous(probs), _contiguous(offsets)
    width = act.out_width(h.shape[1], interleave)
    y = torch.empty((h.shape[0], width), dtype=h.dtype, device=h.device)
    flags = _flags(act, probs, interleave) | {"LIVE": offsets is not None}
    args = (*_inputs(h, probs, offsets, width), *_options(act), y)
    candidate = choose(activation_forward, FORWARD, args, flags)
    start(activation_forward, _programs(h.shape[0], width, candidate), args, flags, candidate)
    return y


def backward(
    dy: Tensor, h: Tensor, act: Activation, probs: Tensor | None, interleave: int | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(dh in h's dtype, ds float32 (M,) or None without probs); dead rows as in :func:`forward`."""
    dy, h, probs, offsets = _lines(dy), _lines(h), _contiguous(probs), _contiguous(offsets)
    M, width = dy.shape
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    parts = _row_parts(h, M, width, probs)
    flags = _flags(act, probs, interleave) | {"LIVE": offsets is not None}
    args = (dy, dy.stride(0), *_inputs(h, probs, offsets, width), *_options(act), dh, parts)
    candidate = choose(activation_backward, BACKWARD, args, flags)
    start(activation_backward, _programs(M, width, candidate), args, flags, candidate)
    return dh, None if probs is None else sums.row_sums(parts, offsets)


def quantize(
    h: Tensor,
    offsets: Tensor,
    act: Activation,
    fmt: MXFP8,
    probs: Tensor | None,
    interleave: int | None,
    rowwise: bool,
    columnwise: bool,
    layout: str,
    out: list[Tensor] | None = None,
) -> list[Tensor]:
    """Planes of act(h) * probs, (M, I): what ``launch.quantize`` makes of the result of :func:`forward`, in one launch."""
    h, probs, offsets = _lines(h), _contiguous(probs), offsets.contiguous()
    M, G, width = h.shape[0], offsets.numel() - 1, act.out_width(h.shape[1], interleave)
    tensors = empty_planes(h[:, :width], fmt, G, rowwise, columnwise, layout) if out is None else out
    if G == 0:  # no group, no tile: nothing is live
        return [t.zero_() for t in tensors]
    flags = _flags(act, probs, interleave) | _mxfp8_flags(fmt, rowwise, columnwise, layout, G)
    planes = _targets(tensors, rowwise, columnwise, h)
    args = (*_inputs(h, probs, offsets, width), tile_capacity(M, G), *_options(act), *planes)
    flags["WHOLE"] = width % 128 == 0
    candidate = choose(activation_mxfp8, FORWARD_MXFP8, args, flags)
    start(activation_mxfp8, _slot_programs(M, G, round_up(width, 128), candidate), args, flags, candidate)
    return tensors


def backward_quantize(
    dy: Tensor,
    h: Tensor,
    offsets: Tensor,
    act: Activation,
    fmt: MXFP8,
    probs: Tensor | None,
    interleave: int | None,
    rowwise: bool,
    columnwise: bool,
    layout: str,
    bias: bool,
    out: list[Tensor] | None = None,
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """(planes of dh (M, W), ds or None without probs, dbias float32 (G, W) or None): a launch, and one for each sum."""
    dy, h, probs, offsets = _lines(dy), _lines(h), _contiguous(probs), offsets.contiguous()
    (M, W), width, G = h.shape, dy.shape[1], offsets.numel() - 1
    tensors = empty_planes(h, fmt, G, rowwise, columnwise, layout) if out is None else out
    row_parts = _row_parts(h, M, width, probs)
    bias_parts = sums.column_parts(h, M, G, W) if bias else h
    if G == 0:
        tensors = [t.zero_() for t in tensors]
    else:
        flags = _flags(act, probs, interleave) | _mxfp8_flags(fmt, rowwise, columnwise, layout, G)
        flags |= {"WHOLE": width % TERMS == 0, "BIAS": bias}
        planes = _targets(tensors, rowwise, columnwise, h)
        inputs = (dy, dy.stride(0), *_inputs(h, probs, offsets, width))
        args = (*inputs, tile_capacity(M, G), *_options(act), *planes, row_parts, bias_parts)
        candidate = choose(activation_backward_mxfp8, BACKWARD_MXFP8, args, flags)
        padded = width if act.is_glu else round_up(width, 128)
        start(activation_backward_mxfp8, _slot_programs(M, G, padded, candidate), args, flags, candidate)
    ds = None if probs is None else sums.row_sums(row_parts, offsets)
    return tensors, ds, sums.group_sums(bias_parts, offsets, M) if bias else None


def _lines(x: Tensor) -> Tensor:
    """x with the columns of a row side by side."""
    if x.shape[0] >= 2**31:
        raise ValueError(f"h has {x.shape[0]} rows; the GPU kernels count rows in 32 bits: fewer than {2**31} are needed")
    return x if x.stride(1) == 1 else x.contiguous()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _row_parts(h: Tensor, rows: int, width: int, probs: Tensor | None) -> Tensor:
    """Workspace for the partial sums of ds; h where there are none."""
    return h if probs is None else h.new_empty((ceil_div(width, TERMS), rows), dtype=torch.float32)


def _options(act: Activation) -> tuple[float, float, float]:
    """The kernels' ``first``, ``second``, ``third``."""
    if isinstance(act, ClampedSwiglu):
        return float(act.limit), float(act.alpha), float(act.offset)
    return (float(act.beta1), float(act.beta2), 0.0) if isinstance(act, Situ) else (0.0, 0.0, 0.0)


def _flags(act: Activation, probs: Tensor | None, interleave: int | None) -> dict[str, Any]:
    return {"KIND": act.kind, "PROBS": probs is not None, "RUN": interleave or 0}


def _mxfp8_flags(fmt: MXFP8, rowwise: bool, columnwise: bool, layout: str, groups: int) -> dict[str, Any]:
    options = {
        "SQUARE": fmt.is_2d,
        "E5M2": fmt.element == "e5m2",
        "FLOOR": fmt.scale_rounding == "floor",
        "IGNORE_NAN": fmt.nan == "ignore",
    }
    return {"CHUNKS": chunks(groups), "ROW": rowwise, "COL": columnwise, **options, "LAYOUT": layout}


def _inputs(h: Tensor, probs: Tensor | None, offsets: Tensor | None, width: int) -> tuple[Any, ...]:
    """h, stride, probs, offsets, groups, rows, width of the kernels; h in the place of what is not there."""
    groups = 0 if offsets is None else offsets.numel() - 1
    return h, h.stride(0), h if probs is None else probs, h if offsets is None else offsets, groups, h.shape[0], width


def _targets(tensors: list[Tensor], rowwise: bool, columnwise: bool, h: Tensor) -> list[Tensor]:
    """Data and scale of the rowwise plane, then of the columnwise one; h in the place of one that is not asked for."""
    planes = iter(tensors)
    both = [[next(planes) for _ in range(3)][:2] if asked else [h, h] for asked in (rowwise, columnwise)]
    return [t for plane in both for t in plane]


def _programs(rows: int, width: int, candidate: Candidate) -> int:
    return ceil_div(rows, candidate.constants["ROWS"]) * ceil_div(width, candidate.constants["COLUMNS"])


def _slot_programs(rows: int, groups: int, width: int, candidate: Candidate) -> int:
    """Programs of the kernels that quantize: slots of 32 rows, four at a time."""
    return round_up(ceil_div(rows, 32) + groups, 4) * (width // candidate.constants["COLUMNS"])
