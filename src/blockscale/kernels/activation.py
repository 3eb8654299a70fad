"""Activations and their gradients, plain: GLU halves or interleaved, with or without a probability a row.

A program holds ROWS rows and COLUMNS columns of the result. Rows from the live ones on are never read; their results are zero.
Legend: I columns of the activation ("width"), r row and c column of the program; a, b, p, s as in ``activation_math``.
"""

import triton
import triton.language as tl

from blockscale.kernels.activation_math import backward, forward, narrowed
from blockscale.kernels.casts import to_float32


@triton.jit
def halves(c, width, RUN: tl.constexpr):
    """Columns of the pre-activation that give columns ``c``: of the gate and of the linear half. RUN: the interleave, or 0."""
    if RUN == 0:
        return c, c + width
    else:
        gate = c + c // RUN * RUN
        return gate, gate + RUN


@triton.jit
def load_halves(h, c, inside, width, KIND: tl.constexpr, RUN: tl.constexpr):
    """float32 a and b of columns ``c`` of the rows that ``h`` points to, 0 where not ``inside``; b is a without a GLU."""
    if KIND == "squared_relu":
        a = to_float32(tl.load(h + c, inside, 0.0, eviction_policy="evict_last"))
        return a, a
    else:
        gate, linear = halves(c, width, RUN)
        a = to_float32(tl.load(h + gate, inside, 0.0, eviction_policy="evict_last"))
        b = to_float32(tl.load(h + linear, inside, 0.0, eviction_policy="evict_last"))
        return a, b


@triton.jit
def load_probs(probs, first, r, left, PROBS: tl.constexpr):
    """s of the rows, 0 past the live ones; 1 without PROBS."""
    if PROBS:
        return tl.load(probs + first + r, r < left, 0.0)
    else:
        return 1.0


@triton.jit
def live_rows(offsets, groups, rows, LIVE: tl.constexpr):
    """How many rows are live: the last offset, kept within the buffer; all of them where LIVE is False."""
    if LIVE:
        return tl.minimum(tl.maximum(tl.load(offsets + groups), 0), rows).to(tl.int32)
    else:
        return rows


@triton.jit
def activation_forward(
    h,
    stride,
    probs,
    offsets,
    groups,
    rows,
    width,
    first,
    second,
    third,
    y,
    KIND: tl.constexpr,
    PROBS: tl.constexpr,
    RUN: tl.constexpr,
    LIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y (rows, width). Grid: ceil(rows / ROWS) * ceil(width / COLUMNS). ``first``...: the activation's options."""
    column_programs = tl.cdiv(width, COLUMNS)
    program = tl.program_id(0)
    row = program // column_programs * ROWS
    c = program % column_programs * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    left = live_rows(offsets, groups, rows, LIVE) - row
    r = tl.arange(0, ROWS)[:, None]
    start = row.to(tl.int64)
    a, b = load_halves(h + start * stride + r * stride, c, (r < left) & (c < width), width, KIND, RUN)
    s = load_probs(probs, start, r, left, PROBS)
    value = tl.where(r < left, forward(a, b, s, first, second, third, KIND, PROBS), 0.0)
    tl.store(y + start * width + (r * width + c), narrowed(value, y.dtype.element_ty), (row + r < rows) & (c < width))


@triton.jit
def activation_backward(
    dy,
    dy_stride,
    h,
    stride,
    probs,
    offsets,
    groups,
    rows,
    width,
    first,
    second,
    third,
    dh,
    ds_parts,
    KIND: tl.constexpr,
    PROBS: tl.constexpr,
    RUN: tl.constexpr,
    LIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dh (rows, W), and with PROBS the sums of COLUMNS columns of ds: ``ds_parts`` float32 (ceil(width / COLUMNS), rows).

    Grid: as ``activation_forward``. The sums of rows past the live ones are not written.
    """
    column_programs = tl.cdiv(width, COLUMNS)
    program = tl.program_id(0)
    row = program // column_programs * ROWS
    part = program % column_programs
    c = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    left = live_rows(offsets, groups, rows, LIVE) - row
    r = tl.arange(0, ROWS)[:, None]
    start = row.to(tl.int64)
    inside = (r < left) & (c < width)
    p = to_float32(tl.load(dy + start * dy_stride + (r * dy_stride + c), inside, 0.0, eviction_policy="evict_last"))
    a, b = load_halves(h + start * stride + r * stride, c, inside, width, KIND, RUN)
    s = load_probs(probs, start, r, left, PROBS)
    da, db, term = backward(p, a, b, s, first, second, third, KIND, PROBS)
    here = (row + r < rows) & (c < width)
    da = narrowed(tl.where(r < left, da, 0.0), dh.dtype.element_ty)
    if KIND == "squared_relu":
        tl.store(dh + start * width + (r * width + c), da, here)
    else:
        db = narrowed(tl.where(r < left, db, 0.0), dh.dtype.element_ty)
        gate, linear = halves(c, width, RUN)
        line = dh + start * (2 * width) + r * (2 * width)
        tl.store(line + gate, da, here)
        tl.store(line + linear, db, here)
    if PROBS:
        store_row_parts(ds_parts, term, part, start, rows, left)


@triton.jit
def store_row_parts(parts, term, part, start, rows, left):
    """The sums of the rows of ``term``, to line ``part`` of ``parts`` (parts, rows)."""
    r = tl.arange(0, term.shape[0])
    tl.store(parts + part.to(tl.int64) * rows + start + r, tl.sum(term, 1), r < left)
