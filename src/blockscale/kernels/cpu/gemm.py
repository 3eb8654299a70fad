"""The grouped GEMM on the CPU: each group's operands are decoded by compiled code and multiplied by torch's BLAS.

A group's product runs on bfloat16 operands with float32 accumulation (``blas``) where that is exact: every operand value
is a bfloat16 number and nothing is subnormal on the way. Where is that so?

- MXFP8: a code times 2^k has at most 4 significant bits; E4M3 is exact for k in -117..119, E5M2 for -110..112.
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
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.formats import NVFP4
from blockscale.kernels.cpu import blas
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
        ("alpha", _FLOAT),
        *((name, _PTR) for name in ("bias", "bias_scale")),
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


def _matrix(operand: Operand, plane: str, span: _Span, dtype: torch.dtype) -> _Matrix:
    if isinstance(operand, Tensor):
        return _rounded(operand, span, dtype)
    p, fmt, K = operand.plane(plane), operand.format, operand.shape[1]
    column = plane == "columnwise"
    transposed = column and fmt.transposed
    shape = (K, round_up(span.rows, 32)) if transposed else (span.rows, K)
    out = torch.empty(shape, dtype=dtype)
    data, scale = p.data.contiguous(), p.scale.contiguous()
    args = _DecodeArgs(data.data_ptr(), scale.data_ptr(), out.data_ptr())
    args.start, args.rows, args.columns, args.tile0, args.tiles = span.start, span.rows, K, span.tile0, span.tiles
    args.pitch, args.times, args.kind, args.e5m2 = shape[1], 1.0, KINDS[type(fmt)], fmt.element_name == "e5m2"
    args.square, args.hadamard, args.column = fmt.is_2d, getattr(fmt, "hadamard", False), column
    args.layout, args.dtype, args.threads = LAYOUTS.index(p.layout), DTYPES[dtype], torch.get_num_threads()
    found = _Range()
    _library().blockscale_decode(ctypes.byref(args), ctypes.byref(found))
    return _Matrix(out, transposed, found.lowest_exponent())


def _rounded(x: Tensor, span: _Span, dtype: torch.dtype) -> _Matrix:
    rows = x[span.index] if x.dim() == 3 else x[span.start : span.start + span.rows]
    rows = rows.contiguous()
    out, found = torch.empty(rows.shape, dtype=dtype), _Range()
    _library().blockscale_round(
        _PTR(rows.data_ptr()),
        _I32(DTYPES[x.dtype]),
        _I64(rows.numel()),
        _PTR(out.data_ptr()),
        _I32(DTYPES[dtype]),
        _I32(torch.get_num_threads()),
        ctypes.byref(found),
    )
    return _Matrix(out, False, found.lowest_exponent())


def _library() -> ctypes.CDLL:
    library = load().library
    assert library is not None
    return library


def _alphas(a: Operand, a_plane: str, b: Operand, b_plane: str) -> list[float] | None:
    """fl(global scale of a * that of b) of each group; None where neither has one."""
    found = []
    for operand, name in ((a, a_plane), (b, b_plane)):
        if isinstance(operand, GroupedTensor):
            p = operand.plane(name)
            found.append(global_scale(Logical(p.data, p.scale, p.amax), operand.format))
    scales = [s for s in found if s is not None]
    if not scales:
        return None
    product: Tensor = scales[0] if len(scales) == 1 else scales[0] * scales[1]
    return product.tolist()


def _multiply(
    a: tuple[Operand, str, _Span],
    b: tuple[Operand, str, _Span],
    acc: Tensor,
    length: int,
    over_rows: tuple[bool, bool],
    product: Product,
) -> None:
    """acc (float32) = op(A) op(B), the contraction over the rows or the columns of each operand."""
    function, _ = blas.bf16_gemm()
    if function is not None:
        left, right = (_matrix(*x, torch.bfloat16) for x in (a, b))
        if left.low is not None and right.low is not None and left.low + right.low >= _SMALLEST_SUM:
            flags = left.transposed != over_rows[0], right.transposed == over_rows[1]
            blas.call(function, left.values, flags[0], right.values, flags[1], acc, length)
            return
        del left, right
    left, right = (_matrix(*x, torch.float32) for x in (a, b))
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
    alphas = _alphas(a, "rowwise", w, plane)
    columns, length = (N, K) if transpose else (K, N)
    y = torch.empty((capacity, columns), dtype=out_dtype)
    y[offsets[-1] :].zero_()
    bias = None if bias is None else bias.float().contiguous()
    direct = out_dtype == torch.float32 and alphas is None and bias is None
    for span in spans:
        if span.rows == 0:
            continue
        w_span = _Span(span.index, span.index * N, N, span.index * w_tiles, w_tiles)
        rows = y[span.start : span.start + span.rows]
        acc = rows if direct else torch.empty(rows.shape, dtype=torch.float32)
        _multiply((a, "rowwise", span), (w, plane, w_span), acc, length, (False, not transpose), product)
        if not direct:
            _finish(acc, rows, None if alphas is None else alphas[span.index], bias, bias_scale, span)
    return y


def _finish(acc: Tensor, out: Tensor, alpha: float | None, bias: Tensor | None, bias_scale: Tensor | None, span: _Span) -> None:
    """out = acc * alpha + bias * bias_scale, rounded once to out's dtype."""
    factor = None if bias_scale is None else bias_scale[span.start : span.start + span.rows].contiguous()
    args = _EpilogueArgs(acc.data_ptr(), out.data_ptr(), *acc.shape, 1.0 if alpha is None else alpha)
    args.bias = None if bias is None else bias[span.index].data_ptr()
    args.bias_scale = None if factor is None else factor.data_ptr()
    args.has_alpha, args.dtype, args.threads = alpha is not None, DTYPES[out.dtype], torch.get_num_threads()
    _library().blockscale_epilogue(ctypes.byref(args))


def wgrad(dy: Operand, x: Operand, offsets: Tensor, capacity: int, *, product: Product) -> Tensor:
    """As ``reference.grouped_gemm.wgrad``, to the order of accumulation: float32 (G, N, K)."""
    spans = _spans(offsets.tolist())
    alphas = _alphas(dy, "columnwise", x, "columnwise")
    dw = torch.empty((len(spans), dy.shape[-1], x.shape[-1]), dtype=torch.float32)
    whole_blocks = all(isinstance(t, GroupedTensor) and isinstance(t.format, NVFP4) and t.format.hadamard for t in (dy, x))
    for span in spans:
        if span.rows == 0:
            dw[span.index].zero_()
            continue
        length = round_up(span.rows, 16) if whole_blocks else span.rows
        _multiply((dy, "columnwise", span), (x, "columnwise", span), dw[span.index], length, (True, True), product)
        if alphas is not None:
            dw[span.index].mul_(alphas[span.index])
    return dw
