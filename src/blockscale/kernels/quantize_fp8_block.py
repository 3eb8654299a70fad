"""Quantize to FP8 with one float32 scale per 1x128 or 128x128: rowwise, columnwise (stored transposed) or both in one pass.

``quantize_fp8_block`` holds a tile of 128 rows of one group (see ``tile``): two planes need both maxima of the same 128x128.
``quantize_fp8_rows`` makes the rowwise 1x128 plane alone, which knows no groups but only where they end. Legend: M rows, K
columns.
"""

import triton
import triton.language as tl

from blockscale.kernels.casts import fp8_scale, largest, pack_fp8, split4, to_float32, to_fp8
from blockscale.kernels.extent import zero_rows
from blockscale.kernels.tile import (
    ROWS,
    by_fours,
    find_extent,
    find_tile,
    load_tile,
    store_columns,
    store_rows,
    tile_row,
    zero_tile_columns,
)


@triton.jit
def quantize_fp8_block(
    x,
    stride,
    offsets,
    groups,
    rows,
    columns,
    num_tiles,
    eps,
    row_data,
    row_scale,
    col_data,
    col_scale,
    GROUPED: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    SQUARE: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WORDS: tl.constexpr,
    BAND: tl.constexpr,
):
    """Grid: see ``tile.find_tile``, COLUMNS 128; ``rows``, ``stride``, ``num_tiles``: as of ``quantize_mxfp8``.

    ``eps``: the smallest amax assumed. ``col_data``, WORDS: see ``tile.store_columns``. SQUARE: 128x128 blocks.
    """
    slot, c0 = find_tile(columns, ROWS, BAND)
    _, first, left, before, tiles, row, dead_tile, live = find_extent(slot, offsets, groups, rows, GROUPED, CHUNKS)
    blocks = tl.cdiv(columns, 128)
    if GROUPED:
        if dead_tile + slot < num_tiles:  # this program's share of the tiles past the live ones
            _zero_dead_tile(row_scale, col_data, col_scale, dead_tile + slot, c0, columns, ROW, COL, SQUARE)
        if ROW:
            if live + slot * ROWS < rows:  # and of the rows
                zero_rows(row_data, live + slot * ROWS, rows, c0, columns, ROWS, 128)
                if not SQUARE:
                    zero_rows(row_scale, live + slot * ROWS, rows, c0 // 128, blocks, ROWS, 1)
    if left <= 0:
        return
    value = load_tile(x, stride, first, left, c0, columns, 128)
    tile = before + row // 128
    if SQUARE:
        scale, inverse = fp8_scale(largest(largest(largest(value, 0), 1), 0), eps, E5M2, POWER_OF_TWO)
        if ROW:
            tl.store(row_scale + tile * blocks + c0 // 128, inverse)
        if COL:
            tl.store(col_scale + tile * blocks + c0 // 128, inverse)
    if ROW:
        if SQUARE:
            scaled = value * scale
        else:
            row_times, inverse = fp8_scale(largest(value, 2), eps, E5M2, POWER_OF_TWO)
            scaled = value * row_times[:, :, None]
            r = tile_row()
            tl.store(row_scale + first * blocks + c0 // 128 + r * blocks, inverse[:, :, None], r < left)
        store_rows(row_data, to_fp8(scaled, E5M2), first, left, c0, columns, 128)
    if COL:
        if not SQUARE:
            scale, inverse = fp8_scale(largest(largest(value, 0), 0), eps, E5M2, POWER_OF_TWO)
            k = c0 + tl.arange(0, 128)
            tl.store(col_scale + tile.to(tl.int64) * columns + k, inverse, k < columns)
            scale = scale[None, None, :]
        x0, x1, x2, x3 = split4(by_fours(value * scale, 128))
        word = pack_fp8(x0, x1, x2, x3, E5M2)
        store_columns(col_data, word, before, tiles, row, c0, rows, columns, GROUPED, WORDS, 4, 128)


@triton.jit
def _zero_dead_tile(
    row_scale, col_data, col_scale, tile, c0, columns, ROW: tl.constexpr, COL: tl.constexpr, SQUARE: tl.constexpr
):  # fmt: skip
    if SQUARE:
        place = tile * tl.cdiv(columns, 128) + c0 // 128
        if ROW:
            tl.store(row_scale + place, 0.0)
        if COL:
            tl.store(col_scale + place, 0.0)
    if COL:
        zero_tile_columns(col_data, tile, c0, columns, 4, 128)
        if not SQUARE:
            k = c0 + tl.arange(0, 128)
            tl.store(col_scale + tile.to(tl.int64) * columns + k, tl.zeros((128,), tl.float32), k < columns)


@triton.jit
def quantize_fp8_rows(
    x,
    stride,
    offsets,
    groups,
    rows,
    columns,
    eps,
    row_data,
    row_scale,
    GROUPED: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HEIGHT: tl.constexpr,
):
    """Grid: ceil(M / HEIGHT) * ceil(K / 128); other arguments as of ``quantize_fp8_block``."""
    blocks = tl.cdiv(columns, 128)
    program = tl.program_id(0)
    j = program % blocks
    first = program // blocks * HEIGHT
    live = rows
    if GROUPED:
        live = tl.minimum(tl.maximum(tl.load(offsets + groups), 0), rows).to(tl.int32)
        if first + HEIGHT > live:
            start = tl.maximum(first, live)
            end = tl.minimum(first + HEIGHT, rows)
            zero_rows(row_data, start, end, j * 128, columns, HEIGHT, 128)
            zero_rows(row_scale, start, end, j, blocks, HEIGHT, 1)
        if first >= live:
            return
    r = tl.arange(0, HEIGHT)[:, None]
    c = tl.arange(0, 128)[None, :]
    inside = (first + r < live) & (j * 128 + c < columns)
    place = first.to(tl.int64) * stride + j * 128
    value = to_float32(tl.load(x + place + (r * stride + c), inside, 0.0, eviction_policy="evict_last"))
    scale, inverse = fp8_scale(largest(value, 1), eps, E5M2, POWER_OF_TWO)
    code = to_fp8(value * scale[:, None], E5M2)
    tl.store(row_data + first.to(tl.int64) * columns + j * 128 + (r * columns + c), code, inside)
    tl.store(row_scale + first.to(tl.int64) * blocks + j + r * blocks, inverse[:, None], first + r < live)
