"""Quantize to FP8 with one float32 scale a tensor or group: the largest magnitude, and the cast.

Current scaling takes two launches for all groups, the amax and the cast; a given amax one; delayed scaling one, which records
the amax as it casts with the scale that it is given. The columnwise plane is stored transposed. Legend: M rows, K columns.
"""

import triton
import triton.language as tl

from blockscale.kernels.casts import fp8_scale, largest, pack_fp8, reciprocal, split4, to_float32, to_fp8
from blockscale.kernels.extent import find_rows, zero_rows
from blockscale.kernels.tile import (
    ROWS,
    by_fours,
    find_extent,
    find_tile,
    load_tile,
    store_columns,
    store_rows,
    zero_tile_columns,
)


@triton.jit
def amax_of_groups(
    x,
    stride,
    offsets,
    groups,
    rows,
    columns,
    amax,
    GROUPED: tl.constexpr,
    CHUNKS: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """amax[g] = the larger of it and the magnitudes of a piece of group g. NaNs do not count.

    ``amax``: float32 (G,) as int32 bits, zero before: non-negative floats are in the order of their bits, so the maximum is one
    of integers and comes out the same in any order. Grid: slots of HEIGHT rows * ceil(K / COLUMNS).
    """
    column_programs = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    c0 = program % column_programs * COLUMNS
    slot = program // column_programs
    if GROUPED:
        group, first, left, _, _, _, _, _ = find_rows(slot, offsets, groups, rows, HEIGHT, CHUNKS)
    else:
        group = slot * 0
        first = slot * HEIGHT
        left = rows - first
    if left > 0:
        r = tl.arange(0, HEIGHT)[:, None]
        c = tl.arange(0, COLUMNS)[None, :]
        inside = (r < left) & (c0 + c < columns)
        value = to_float32(tl.load(x + first.to(tl.int64) * stride + c0 + (r * stride + c), inside, 0.0))
        _record(amax, group, value)


@triton.jit
def _record(amax, group, value):
    tl.atomic_max(amax + group, largest(tl.ravel(value), 0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def quantize_fp8_tensor(
    x,
    stride,
    offsets,
    groups,
    rows,
    columns,
    num_tiles,
    eps,
    given,
    given_pitch,
    row_data,
    row_scale,
    row_amax,
    col_data,
    col_scale,
    col_amax,
    GROUPED: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    DELAYED: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
):
    """Grid: see ``tile.find_tile``; arguments as of ``quantize_fp8_block``.

    ``given``: float32, the amax of group g at g (rowwise) and ``given_pitch + g`` (columnwise); DELAYED: the scale, at g.
    ``row_amax``, ``col_amax``: float32 (G,), written; DELAYED: int32 bits, zero before, that this tensor's amax is recorded in.
    """
    slot, c0 = find_tile(columns, COLUMNS, BAND)
    group, first, left, before, tiles, row, dead_tile, live = find_extent(slot, offsets, groups, rows, GROUPED, CHUNKS)
    if GROUPED:
        if COL:
            if dead_tile + slot < num_tiles:  # this program's share of the tiles past the live ones
                zero_tile_columns(col_data, dead_tile + slot, c0, columns, 4, COLUMNS)
        if ROW:
            if live + slot * ROWS < rows:  # and of the rows
                zero_rows(row_data, live + slot * ROWS, rows, c0, columns, ROWS, COLUMNS)
    row_times = _scale(given, group, 0, eps, DELAYED, E5M2, POWER_OF_TWO)
    col_times = row_times
    if COL and not DELAYED:
        col_times = _scale(given, group, given_pitch, eps, DELAYED, E5M2, POWER_OF_TWO)
    if (row == 0) & (c0 == 0):  # a group has such a program even if it has no rows
        if ROW:
            tl.store(row_scale + group, reciprocal(row_times))
        if COL:
            tl.store(col_scale + group, reciprocal(col_times))
        if not DELAYED:
            if ROW:
                tl.store(row_amax + group, tl.load(given + group))
            if COL:
                tl.store(col_amax + group, tl.load(given + given_pitch + group))
    if left <= 0:
        return
    value = load_tile(x, stride, first, left, c0, columns, COLUMNS)
    if DELAYED:
        if ROW:
            _record(row_amax, group, value)
        if COL:
            _record(col_amax, group, value)
    if ROW:
        store_rows(row_data, to_fp8(value * row_times, E5M2), first, left, c0, columns, COLUMNS)
    if COL:
        x0, x1, x2, x3 = split4(by_fours(value * col_times, COLUMNS))
        store_columns(col_data, pack_fp8(x0, x1, x2, x3, E5M2), before, tiles, row, c0, rows, columns, GROUPED, WORDS, 4, COLUMNS)


@triton.jit
def _scale(given, group, pitch, eps, DELAYED: tl.constexpr, E5M2: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    value = tl.load(given + pitch + group)
    if not DELAYED:
        value, _ = fp8_scale(value, eps, E5M2, POWER_OF_TWO)
    return value
