"""The grouped GEMM on the CPU: each group's operands are decoded by compiled code and multiplied by torch's BLAS.

A group's product runs on bfloat16 operands with float32 accumulation (``blas``) where that is exact: every operand value
is a bfloat16 number and nothing is subnormal on the way. Where is that so?

- MXFP8: a code times 2^k has at most 4 significant bits; E4M3 is exact for k in -117..119, E5M2 for -110..112.
- MXFP4: the same, for k in -125..125.
- NVFP4: an element times its block's E4M3 scale has at most 6 bits: always. FP8 per tensor: the codes alone: always.
- FP8 per block: with power-of-two scales, as MXFP8. With others, or with infinities, never.
- High precision: values are rounded to bfloat16 anyway.

The decoder looks at every value, so no rule above is trusted: it returns the smallest and largest magnitude and the bits
in use. With 8 significant bits a value of exponent e is a multiple of 2^(e-7), so a sum of products is zero or at least
2^(ea+eb-14), which is normal from ea + eb = -112 on. Other groups take the float32 product. A group's own live values decide,
so it is the same alone and beside others.

Legend: G groups, N outputs, K inputs, M rows (capacity).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.formats import NVFP4
from blockscale.kernels.cpu import blas, memory
from blockscale.kernels.cpu.build import load
from blockscale.kernels.cpu.quantize import DTYPES, KINDS
from blockscale.layouts import LAYOUTS, ceil_div, round_up
from blockscale.tensors import GroupedTensor
from blockscale.tensors.arrange import Logical
from blockscale.tensors.decode import global_scale

Operand = GroupedTensor | Tensor
Product = Callable[[Tensor, Tensor], Tensor]
_PTR, _I64, _I32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_SMALLEST_SUM = -112
_INFINITY = 0x7F800000


class _DecodeArgs(ctypes.Structure):
    _fields_ = [
        *((name, _PTR) for name in ("data", "scale", "out")),
        *((name, _I64) for name in ("start", "rows", "columns", "tile0", "tiles", "tile_count", "pitch")),
        ("times", _FLOAT),
        *((name, _I32) for name in ("kind", "e5m2", "square", "hadamard", "column", "layout", "dtype", "threads")),
    ]


class _Range(ctypes.Structure):
    _fields_ = [("smallest", ctypes.c_uint32), ("largest", ctypes.c_uint32), ("any", ctypes.c_uint32)]

    def lowest_exponent(self) -> int | None:
        """Exponent of the smallest value when all are normal bfloat16 numbers (128: all are zero), else None."""
        if self.any & 0xFFFF or self.largest >= _INFINITY or self.smallest < 0x00800000:
            return None
        return (self.smallest >> 23) - 127


class _EpilogueArgs(ctypes.Structure):
    _fields_ = [
        *((name, _PTR) for name in ("acc", "out")),
        *((name, _I64) for name in ("rows", "columns")),
        *((name, _FLOAT) for name in ("row_scale", "column_scale")),
        *((name, _PTR) for name in ("row_scales", "column_scales", "bias", "bias_scale")),
        *((name, _I32) for name in ("has_alpha", "dtype", "threads")),
    ]


@dataclass(frozen=True)
class _Span:
    """One group: its index, first row, rows, tiles before it and its own."""

    index: int
    start: int
    rows: int
    tile0: int
    tiles: int


def _spans(offsets: list[int]) -> list[_Span]:
    spans, before = [], 0
    for g in range(len(offsets) - 1):
        rows = offsets[g + 1] - offsets[g]
        spans.append(_Span(g, offsets[g], rows, before, ceil_div(rows, 128)))
        before += spans[-1].tiles
    return spans


@dataclass
class _Matrix:
    """One group's values, (rows, columns) or, ``transposed``, (columns, rows); ``low`` as in ``_Range``."""

    values: Tensor
    transposed: bool
    low: int | None

    def view(self, length: int, over_rows: bool) -> Tensor:
        """The 2-D matrix, the contraction (rows or columns) cut to ``length``."""
        x = self.values.mT if self.transposed else self.values
        return x[:length] if over_rows else x[:, :length]


class _Room:
    """Memory for one operand at a time, kept from group to group."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor there; the one before is lost."""
        count = math.prod(shape) * dtype.itemsize
        if self._bytes.numel() < count:
            self._bytes = memory.empty((count,), torch.uint8)
        return self._bytes[:count].view(dtype).view(shape)


def _matrix(operand: Operand, plane: str, span: _Span, dtype: torch.dtype, room: _Room) -> _Matrix:
    if isinstance(operand, Tensor):
        return _rounded(operand, span, dtype, room)
    p, fmt, K = operand.plane(plane), operand.format, operand.shape[1]
    column = plane == "columnwise"
    transposed = column and fmt.transposed
    shape = (K, round_up(span.rows, 32)) if transposed else (span.rows, K)
    out = room.tensor(shape, dtype)
    data, scale = p.data.contiguous(), p.scale.contiguous()
    args = _DecodeArgs(data.data_ptr(), scale.data_ptr(), out.data_ptr())
    args.start, args.rows, args.columns, args.tile0, args.tiles = span.start, span.rows, K, span.tile0, span.tiles
    args.pitch, args.times, args.kind, args.e5m2 = shape[1], 1.0, KINDS[type(fmt)], fmt.element_name == "e5m2"
    args.square, args.hadamard, args.column = fmt.is_2d, getattr(fmt, "hadamard", False), column
    args.layout, args.dtype, args.threads = LAYOUTS.index(p.layout), DTYPES[dtype], torch.get_num_threads()
    found = _Range()
    _library().blockscale_decode(ctypes.byref(args), ctypes.byref(found))
    return _Matrix(out, transposed, found.lowest_exponent())


def _rounded(x: Tensor, span: _Span, dtype: torch.dtype, room: _Room) -> _Matrix:
    rows = x[span.index] if x.dim() == 3 else x[span.start : span.start + span.rows]
    rows = rows.contiguous()
    as_it_is = x.dtype == dtype == torch.bfloat16
    out, found = rows if as_it_is else room.tensor(tuple(rows.shape), dtype), _Range()
    _library().blockscale_round(
        _PTR(rows.data_ptr()),
        _I32(DTYPES[x.dtype]),
        _I64(rows.numel()),
        _PTR(None if as_it_is else out.data_ptr()),
        _I32(DTYPES[dtype]),
        _I32(torch.get_num_threads()),
        ctypes.byref(found),
    )
    return _Matrix(out, False, found.lowest_exponent())


def _library() -> ctypes.CDLL:
    library = load().library
    assert library is not None
    return library


@dataclass
class _Scale:
    """What an operand's accumulator must still be multiplied by: a number a group or, row-scaled, one for each row of its plane.

    ``values``: float32 (G,); row-scaled (rows,) of a rowwise plane, (G, columns) of a columnwise one; None: 1.
    """

    values: Tensor | None
    by_row: bool

    def of(self, span: _Span) -> tuple[float, Tensor | None]:
        """(a number, None) or (1, one number for each output row or column of the group)."""
        if self.values is None:
            return 1.0, None
        if self.by_row:
            return 1.0, self.values[span.start : span.start + span.rows]
        own = self.values[span.index]
        return (float(own), None) if own.dim() == 0 else (1.0, own)


def _scale(operand: Operand, plane: str) -> _Scale:
    if not isinstance(operand, GroupedTensor):
        return _Scale(None, False)
    p, fmt = operand.plane(plane), operand.format
    amax = p.amax
    if amax is not None and fmt.scales_rows and plane == "columnwise":
        amax = amax.reshape(operand.num_groups, operand.shape[1])
    values = global_scale(Logical(p.data, p.scale, amax), fmt)
    return _Scale(None if values is None else values.contiguous(), fmt.scales_rows and plane == "rowwise")


def _multiply(
    a: tuple[Operand, str, _Span],
    b: tuple[Operand, str, _Span],
    acc: Tensor,
    length: int,
    over_rows: tuple[bool, bool],
    product: Product,
    room: tuple[_Room, _Room],
) -> None:
    """acc (float32) = op(A) op(B), the contraction over the rows or the columns of each operand."""
    function, _ = blas.bf16_gemm()
    if function is not None:
        left, right = (_matrix(*x, torch.bfloat16, r) for x, r in zip((a, b), room, strict=True))
        if left.low is not None and right.low is not None and left.low + right.low >= _SMALLEST_SUM:
            flags = left.transposed != over_rows[0], right.transposed == over_rows[1]
            blas.call(function, left.values, flags[0], right.values, flags[1], acc, length)
            return
    left, right = (_matrix(*x, torch.float32, r) for x, r in zip((a, b), room, strict=True))
    x, y = left.view(length, over_rows[0]), right.view(length, over_rows[1])
    acc.copy_(product(x.mT if over_rows[0] else x, y if over_rows[1] else y.mT))


def rows_by_weight(
    a: Operand,
    w: Operand,
    offsets: Tensor,
    capacity: int,
    *,
    transpose: bool,
    out_dtype: torch.dtype,
    product: Product,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
) -> Tensor:
    """As ``reference.grouped_gemm.rows_by_weight``, to the order of accumulation.

    Args:
        product: the float32 product, for groups whose operands are no bfloat16 numbers.
    """
    spans = _spans(offsets.tolist())
    plane = "rowwise" if transpose else "columnwise"
    if isinstance(w, GroupedTensor):
        assert w.matrix_rows is not None
        N, K = w.matrix_rows, w.shape[1]
    else:
        N, K = w.shape[1:]
    w_tiles = ceil_div(N, 128)
    scales = _scale(a, "rowwise"), _scale(w, plane)
    scaled = any(scale.values is not None for scale in scales)
    columns, length = (N, K) if transpose else (K, N)
    y, room, third = memory.empty((capacity, columns), out_dtype), (_Room(), _Room()), _Room()
    y[offsets[-1] :].zero_()
    bias = None if bias is None else bias.float().contiguous()
    direct = out_dtype == torch.float32 and not scaled and bias is None
    for span in spans:
        if span.rows == 0:
            continue
        w_span = _Span(span.index, span.index * N, N, span.index * w_tiles, w_tiles)
        rows = y[span.start : span.start + span.rows]
        acc = rows if direct else third.tensor(tuple(rows.shape), torch.float32)
        _multiply((a, "rowwise", span), (w, plane, w_span), acc, length, (False, not transpose), product, room)
        if not direct:
            alpha = (scales[0].of(span), scales[1].of(w_span)) if scaled else None
            _finish(acc, rows, alpha, bias, bias_scale, span)
    return y


_Factor = tuple[float, Tensor | None]


def _finish(
    acc: Tensor,
    out: Tensor,
    alpha: tuple[_Factor, _Factor] | None,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    span: _Span,
) -> None:
    """out = acc * alpha + bias * bias_scale, rounded once to out's dtype; ``alpha``: of the rows, of the columns."""
    factor = None if bias_scale is None else bias_scale[span.start : span.start + span.rows].contiguous()
    args = _EpilogueArgs(acc.data_ptr(), out.data_ptr(), *acc.shape, 1.0, 1.0)
    if alpha is not None:
        (args.row_scale, rows), (args.column_scale, columns) = alpha
        args.row_scales = None if rows is None else rows.data_ptr()
        args.column_scales = None if columns is None else columns.data_ptr()
    args.bias = None if bias is None else bias[span.index].data_ptr()
    args.bias_scale = None if factor is None else factor.data_ptr()
    args.has_alpha, args.dtype, args.threads = alpha is not None, DTYPES[out.dtype], torch.get_num_threads()
    _library().blockscale_epilogue(ctypes.byref(args))


def wgrad(dy: Operand, x: Operand, offsets: Tensor, capacity: int, *, product: Product) -> Tensor:
    """As ``reference.grouped_gemm.wgrad``, to the order of accumulation: float32 (G, N, K)."""
    spans = _spans(offsets.tolist())
    scales = _scale(dy, "columnwise"), _scale(x, "columnwise")
    scaled = any(scale.values is not None for scale in scales)
    dw, room = memory.empty((len(spans), dy.shape[-1], x.shape[-1]), torch.float32), (_Room(), _Room())
    whole_blocks = all(isinstance(t, GroupedTensor) and isinstance(t.format, NVFP4) and t.format.hadamard for t in (dy, x))
    for span in spans:
        if span.rows == 0:
            dw[span.index].zero_()
            continue
        length = round_up(span.rows, 16) if whole_blocks else span.rows
        _multiply((dy, "columnwise", span), (x, "columnwise", span), dw[span.index], length, (True, True), product, room)
        if scaled:
            _finish(dw[span.index], dw[span.index], (scales[0].of(span), scales[1].of(span)), None, None, span)
    return dw
