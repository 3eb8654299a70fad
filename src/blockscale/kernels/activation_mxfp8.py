"""Activation, or its gradient, joined with quantization to MXFP8: what ``activation`` and then ``quantize_mxfp8`` give, in one
pass over memory, for the groups of one buffer.

As in ``quantize_mxfp8`` a program holds 32 rows of one group. The result is rounded to h's dtype before any block maximum.
Legend: I columns of the activation ("width"), W of the pre-activation; the rest as in ``activation``.
"""

import triton
import triton.language as tl

from blockscale.kernels.activation import halves, load_halves, load_probs, store_row_parts
from blockscale.kernels.activation_math import backward, forward, rounded
from blockscale.kernels.casts import block_amax, max_nan, to_float32, to_fp8
from blockscale.kernels.extent import find_rows, store_row_scale
from blockscale.kernels.quantize_mxfp8 import ROWS, row_codes, scale, store_col_scale, store_tile, zero_outside
from blockscale.kernels.sums import store_column_parts


@triton.jit
def activation_mxfp8(
    h,
    stride,
    probs,
    offsets,
    groups,
    rows,
    width,
    num_tiles,
    first,
    second,
    third,
    row_data,
    row_scale,
    col_data,
    col_scale,
    CHUNKS: tl.constexpr,
    KIND: tl.constexpr,
    PROBS: tl.constexpr,
    RUN: tl.constexpr,
    WHOLE: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    SQUARE: tl.constexpr,
    E5M2: tl.constexpr,
    FLOOR: tl.constexpr,
    IGNORE_NAN: tl.constexpr,
    LAYOUT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The quantized (rows, width) activation. Arguments and grid: of ``activation_forward`` and of a grouped ``quantize_mxfp8``.

    WHOLE: width is a multiple of COLUMNS.
    """
    column_programs = tl.cdiv(width, 128) * (128 // COLUMNS)
    program = tl.program_id(0)
    c0 = program // 4 % column_programs * COLUMNS
    slot = program // 4 // column_programs * 4 + program % 4
    _, start, left, before, tiles, row, dead_tile, live = find_rows(slot, offsets, groups, rows, ROWS, CHUNKS)
    targets = (row_data, row_scale, col_data, col_scale)
    zero_outside(slot, row, left, before, tiles, dead_tile, live, c0, rows, width, num_tiles, targets, ROW, COL, LAYOUT, COLUMNS)
    if left <= 0:
        return
    start = start.to(tl.int64)
    r = tl.arange(0, ROWS)[:, None]
    c = c0 + tl.arange(0, COLUMNS)[None, :]
    inside = (r < left) & (c < width)
    a, b = load_halves(h + start * stride + r * stride, c, inside, width, KIND, RUN)
    s = load_probs(probs, start, r, left, PROBS)
    y = rounded(forward(a, b, s, first, second, third, KIND, PROBS), h.dtype.element_ty)
    if PROBS and not WHOLE:  # an infinite s makes NaN of absent columns
        y = tl.where(inside, y, 0.0)
    out = start * width + (r * width + c)
    FLAGS: tl.constexpr = (ROW, COL, SQUARE, E5M2, FLOOR, IGNORE_NAN)
    store_tile(y, inside, out, row, row // ROWS % 4, left, before, tiles, c0, rows, width, targets, FLAGS, LAYOUT)


@triton.jit
def activation_backward_mxfp8(
    dy,
    dy_stride,
    h,
    stride,
    probs,
    offsets,
    groups,
    rows,
    width,
    num_tiles,
    first,
    second,
    third,
    row_data,
    row_scale,
    col_data,
    col_scale,
    ds_parts,
    bias_parts,
    CHUNKS: tl.constexpr,
    KIND: tl.constexpr,
    PROBS: tl.constexpr,
    RUN: tl.constexpr,
    WHOLE: tl.constexpr,
    BIAS: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    SQUARE: tl.constexpr,
    E5M2: tl.constexpr,
    FLOOR: tl.constexpr,
    IGNORE_NAN: tl.constexpr,
    LAYOUT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The quantized (rows, W) gradient of the pre-activation, partial sums of ds (``ds_parts``, as ``activation_backward``) and,
    with BIAS, of its columns (``bias_parts``, as ``sums.column_parts``).

    A GLU's width is a multiple of 64 and of COLUMNS, its RUN 0, a multiple of 32, or a power of two up to 16: then no block of
    32 columns of the result needs more than this program holds, and no column is padding. Its grid has width / COLUMNS programs
    a slot. SQUARE: 32x32 blocks, of an activation that is no GLU.
    """
    GLU: tl.constexpr = KIND != "squared_relu"
    HALVES: tl.constexpr = 2 if GLU else 1
    if GLU:
        column_programs = width // COLUMNS
    else:
        column_programs = tl.cdiv(width, 128) * (128 // COLUMNS)
    columns = width * HALVES
    program = tl.program_id(0)
    c0 = program // 4 % column_programs * COLUMNS
    slot = program // 4 // column_programs * 4 + program % 4
    _, start, left, before, tiles, row, dead_tile, live = find_rows(slot, offsets, groups, rows, ROWS, CHUNKS)
    targets = (row_data, row_scale, col_data, col_scale)
    # where columns lie does not matter here: each program zeroes as many as it fills
    zero_outside(
        slot, row, left, before, tiles, dead_tile, live, c0 * HALVES, rows, columns, num_tiles, targets,
        ROW, COL, LAYOUT, COLUMNS * HALVES,
    )  # fmt: skip
    if left <= 0:
        return
    start = start.to(tl.int64)
    r = tl.arange(0, ROWS)[:, None]
    c = c0 + tl.arange(0, COLUMNS)[None, :]
    inside = (r < left) & (c < width)
    p = to_float32(tl.load(dy + start * dy_stride + (r * dy_stride + c), inside, 0.0, eviction_policy="evict_last"))
    a, b = load_halves(h + start * stride + r * stride, c, inside, width, KIND, RUN)
    s = load_probs(probs, start, r, left, PROBS)
    da, db, term = backward(p, a, b, s, first, second, third, KIND, PROBS)
    if PROBS:
        store_row_parts(ds_parts, term, c0 // COLUMNS, start, rows, left)
    da = rounded(da, h.dtype.element_ty)
    db = rounded(db, h.dtype.element_ty)
    if PROBS and not WHOLE:  # an infinite s makes NaN of absent columns
        da = tl.where(inside, da, 0.0)
    gate, linear = halves(c0 + tl.arange(0, COLUMNS), width, RUN)
    if BIAS:
        store_column_parts(bias_parts, da, slot, gate, columns)
        if GLU:
            store_column_parts(bias_parts, db, slot, linear, columns)
    if not GLU:
        out = start * width + (r * width + c)
        FLAGS: tl.constexpr = (ROW, COL, SQUARE, E5M2, FLOOR, IGNORE_NAN)
        store_tile(da, inside, out, row, row // ROWS % 4, left, before, tiles, c0, rows, width, targets, FLAGS, LAYOUT)
        return
    KINDS: tl.constexpr = (E5M2, FLOOR, IGNORE_NAN)
    line = start * columns + r * columns
    if ROW:
        _store_rows(da, db, line, r < left, row, before, c0, rows, width, row_data, row_scale, RUN, KINDS, LAYOUT)
    if COL:
        block = row // ROWS
        _store_columns(da, line, r < left, gate, before, tiles, block, columns, col_data, col_scale, KINDS, LAYOUT)
        _store_columns(db, line, r < left, linear, before, tiles, block, columns, col_data, col_scale, KINDS, LAYOUT)


@triton.jit
def _store_rows(
    da, db, line, inside, row, before, c0, rows, width, data, scales, RUN: tl.constexpr, KINDS: tl.constexpr, LAYOUT: tl.constexpr
):  # fmt: skip
    """The rowwise plane of both halves. Runs of 16 and less share a block of 32 columns: 16 of each half."""
    E5M2: tl.constexpr = KINDS[0]
    FLOOR: tl.constexpr = KINDS[1]
    IGNORE_NAN: tl.constexpr = KINDS[2]
    SHARED: tl.constexpr = RUN > 0 and RUN <= 16
    UNIT: tl.constexpr = 16 if SHARED else 32
    COLUMNS: tl.constexpr = da.shape[1]
    BLOCKS: tl.constexpr = COLUMNS // UNIT
    amax = block_amax(tl.reshape(tl.abs(da), (ROWS, BLOCKS, UNIT)), 2, IGNORE_NAN)
    amax_b = block_amax(tl.reshape(tl.abs(db), (ROWS, BLOCKS, UNIT)), 2, IGNORE_NAN)
    if SHARED:
        amax = max_nan(amax, amax_b)
        amax_b = amax
    code, inverse = scale(amax, E5M2, FLOOR)
    code_b, inverse_b = scale(amax_b, E5M2, FLOOR)
    gate, linear = halves(c0 + tl.arange(0, COLUMNS)[None, :], width, RUN)
    tl.store(data + line + gate, row_codes(da, inverse, E5M2), inside)
    tl.store(data + line + linear, row_codes(db, inverse_b, E5M2), inside)
    blocks = width // 16  # of a row: W / 32
    gate, linear = halves(c0 + tl.arange(0, BLOCKS)[None, :] * UNIT, width, RUN)
    tile = before + row // 128
    i = row % 128 + tl.arange(0, ROWS)[:, None]
    store_row_scale(scales, code, tile, i, gate // 32, rows, blocks, LAYOUT)
    if not SHARED:
        store_row_scale(scales, code_b, tile, i, linear // 32, rows, blocks, LAYOUT)


@triton.jit
def _store_columns(
    value, line, inside, column, before, tiles, block, columns, data, scales, KINDS: tl.constexpr, LAYOUT: tl.constexpr
):  # fmt: skip
    """The columnwise plane of one half, whose columns are ``column``."""
    E5M2: tl.constexpr = KINDS[0]
    code, inverse = scale(block_amax(tl.abs(value), 0, KINDS[2]), E5M2, KINDS[1])
    tl.store(data + line + column[None, :], to_fp8(value * inverse[None, :], E5M2), inside)
    store_col_scale(scales, code.to(tl.uint8), before, tiles, block, column, columns, True, False, LAYOUT)
