"""Quantize to MXFP8: rowwise, columnwise or both planes in one pass, plain or grouped, scales in any layout.

A program holds 32 rows and ``COLUMNS`` columns, a block high, so that a columnwise block never leaves it; two warps at most,
because what waits for other warps costs more than it saves. Its rows belong to one group; the part of the tile's scales
and the dead rows that nobody else writes, it fills with zeros. Legend: M rows, K columns, r row of the program, c column.
"""

import triton
import triton.language as tl

from blockscale.kernels.casts import block_amax, e8m0, to_fp8
from blockscale.kernels.tiles import fill_dead_rows, store_row_scale, tile_entry

ROWS = tl.constexpr(32)


@triton.jit
def quantize_mxfp8(
    x,
    stride,
    table,
    rows,
    columns,
    num_tiles,
    row_data,
    row_scale,
    col_data,
    col_scale,
    GROUPED: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    SQUARE: tl.constexpr,
    E5M2: tl.constexpr,
    FLOOR: tl.constexpr,
    IGNORE_NAN: tl.constexpr,
    LAYOUT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: 4 * num_tiles * ceil(round_up(K, 128) / COLUMNS). ``rows``: M, or the capacity; ``stride``: of x's rows.

    GROUPED: ``table`` holds the tiles. SQUARE: 32x32 blocks. LAYOUT: of the scales.
    """
    column_programs = tl.cdiv(tl.cdiv(columns, 128) * 128, COLUMNS)
    program = tl.program_id(0)
    part = program % 4
    c0 = program // 4 % column_programs * COLUMNS
    tile = program // 4 // column_programs
    first, left, before, tiles, local, _ = tile_entry(table, tile, rows, GROUPED)
    left -= part * ROWS
    first += part * ROWS
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    if GROUPED:
        fill_dead_rows(table, tile * 4 + part, num_tiles * 4, rows, row_data, col_data, c0, columns, columns, ROW, COL, ROWS, COLUMNS)
    inside = (r < left) & (c0 + c < columns)
    value = tl.load(x + first * stride + c0 + (r * stride + c), inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    out = first * columns + c0 + (r * columns + c)
    magnitude = tl.abs(value)
    value_b = tl.reshape(value, (ROWS, COLUMNS // 32, 32))
    blocks = tl.cdiv(columns, 32)
    if ROW or SQUARE:
        amax = block_amax(tl.reshape(magnitude, (ROWS, COLUMNS // 32, 32)), 2, IGNORE_NAN)
        if SQUARE:
            amax = tl.broadcast_to(block_amax(amax, 0, False)[None, :], (ROWS, COLUMNS // 32))
        code, inverse = _scale(amax, E5M2, FLOOR)
    if ROW:
        q = tl.reshape(to_fp8(value_b * inverse[:, :, None], E5M2), (ROWS, COLUMNS))
        tl.store(row_data + out, q, inside)
        j = c0 // 32 + tl.arange(0, COLUMNS // 32)[None, :]
        shown = code
        if SQUARE:  # its scale stands for absent rows too, whose places hold zero
            shown = tl.where(r < left, code, 0)
        store_row_scale(row_scale, shown, before + local, part * ROWS + r, j, rows, blocks, LAYOUT)
    if COL:
        if SQUARE:
            column_code = tl.reshape(tl.broadcast_to(tl.max(code, 0)[:, None], (COLUMNS // 32, 32)), (COLUMNS,))
            column_code = tl.where(c0 + tl.arange(0, COLUMNS) < columns, column_code, 0)
            q = tl.reshape(to_fp8(value_b * inverse[:, :, None], E5M2), (ROWS, COLUMNS))
        else:
            column_code, inverse = _scale(block_amax(magnitude, 0, IGNORE_NAN), E5M2, FLOOR)
            q = to_fp8(value * inverse[None, :], E5M2)
        tl.store(col_data + out, q, inside)
        k = c0 + tl.arange(0, COLUMNS)
        _store_col_scale(col_scale, column_code, before, tiles, local * 4 + part, k, left, columns, LAYOUT)


@triton.jit
def _scale(amax, E5M2: tl.constexpr, FLOOR: tl.constexpr):
    if E5M2:
        return e8m0(amax, 15, 0x1FFFFF, 0x07E00001, FLOOR)
    else:
        return e8m0(amax, 8, 0x1FFFFF, 0x04600001, FLOOR)


@triton.jit
def _store_col_scale(scale, code, before, tiles, block, k, left, columns, LAYOUT: tl.constexpr):
    """Store the scales of columns ``k`` and a block of 32 rows; ``tiles`` and ``block`` are the group's."""
    k_tiles = tl.cdiv(columns, 128)
    code = code.to(tl.uint8)
    if LAYOUT == "compact":
        tl.store(scale + (before * 4 + block).to(tl.int64) * (k_tiles * 128) + k, code)
    elif LAYOUT == "swizzled":
        tile = before.to(tl.int64) * k_tiles + k // 128 * tiles + block // 4
        tl.store(scale + tile * 512 + (k % 32 * 16 + k % 128 // 32 * 4 + block % 4), code)
    elif LAYOUT == "swizzled_8x4":
        place = (k // 8).to(tl.int64) * (tiles * 32) + block // 4 * 32 + k % 8 * 4 + block % 4
        tl.store(scale + place, code, k < tl.cdiv(columns, 8) * 8)
    else:
        tl.store(scale + block.to(tl.int64) * columns + k, code, (k < columns) & (left > 0))
