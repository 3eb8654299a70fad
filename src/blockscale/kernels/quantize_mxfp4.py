"""Quantize to MXFP4: rowwise, columnwise (stored transposed) or both planes in one pass, plain or grouped.

A program holds a tile of 128 rows of one group (see ``tile``); four neighbouring lanes hold a columnwise block of 32 rows.
Legend: M rows, K columns.
"""

import triton
import triton.language as tl

from blockscale.kernels.casts import block_amax, e8m0, pack_e2m1, present_nibbles, split8
from blockscale.kernels.extent import store_row_scale, zero_row_scale, zero_rows
from blockscale.kernels.tile import (
    HEIGHT,
    LANES,
    ROWS,
    find_extent,
    find_tile,
    load_tile,
    store_columns,
    tile_row,
    zero_tile_columns,
)

ALL_SEVEN = tl.constexpr(0x77777777)
#: blocks of a tile along M
BLOCKS = tl.constexpr(4)


@triton.jit
def quantize_mxfp4(
    x,
    stride,
    offsets,
    groups,
    rows,
    columns,
    num_tiles,
    row_data,
    row_scale,
    col_data,
    col_scale,
    GROUPED: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    SQUARE: tl.constexpr,
    FLOOR: tl.constexpr,
    IGNORE_NAN: tl.constexpr,
    LAYOUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
):
    """Grid: see ``tile.find_tile``, over round_up(K, 128) columns; arguments as of ``quantize_mxfp8``.

    Data are int32 words of eight codes. SQUARE: 32x32 blocks.
    """
    GROUPS_OF_32: tl.constexpr = COLUMNS // 32
    slot, c0 = find_tile(tl.cdiv(columns, 128) * 128, COLUMNS, BAND)
    _, first, left, before, tiles, row, dead_tile, live = find_extent(slot, offsets, groups, rows, GROUPED, CHUNKS)
    blocks = tl.cdiv(columns, 32)
    if GROUPED:
        if dead_tile + slot < num_tiles:  # this program's share of the tiles past the live ones
            tile = dead_tile + slot
            if ROW:
                zero_row_scale(row_scale, tile, 0, c0 // 32 + tl.arange(0, GROUPS_OF_32), blocks, LAYOUT)
            if COL:
                zero_tile_columns(col_data, tile, c0, columns, 8, COLUMNS)
                k = c0 + tl.arange(0, COLUMNS)[None, :]
                zero = tl.zeros((BLOCKS, COLUMNS), tl.uint8)
                _store_col_scale(col_scale, zero, tile, 1, tl.arange(0, BLOCKS)[:, None], k, columns, LAYOUT)
        if ROW:
            if live + slot * ROWS < rows:  # and of the rows
                zero_rows(row_data, live + slot * ROWS, rows, c0 // 8, blocks * 4, ROWS, COLUMNS // 8)
    if left <= 0:
        return
    value = load_tile(x, stride, first, left, c0, columns, COLUMNS)
    r = tile_row()
    if ROW or SQUARE:
        by_block = tl.reshape(tl.abs(value), (HEIGHT, LANES, GROUPS_OF_32, 32))
        amax = block_amax(by_block, 3, IGNORE_NAN)
        if SQUARE:
            square = block_amax(tl.reshape(block_amax(amax, 0, False), (BLOCKS, 4, GROUPS_OF_32)), 1, False)
            amax = tl.broadcast_to(square[None, :, None, :], (HEIGHT, BLOCKS, 4, GROUPS_OF_32))
            amax = tl.reshape(amax, (HEIGHT, LANES, GROUPS_OF_32))
    seen = _six(value, IGNORE_NAN)
    if ROW:
        code, inverse = e8m0(amax, 2, 0x3FFFFF, 0x01400001, FLOOR)
        y = tl.reshape(seen, (HEIGHT, LANES, GROUPS_OF_32, 32)) * inverse[:, :, :, None]
        x0, x1, x2, x3, x4, x5, x6, x7 = split8(tl.reshape(y, (HEIGHT, LANES, COLUMNS // 8, 2, 2, 2)))
        word = pack_e2m1(x0, x1, x2, x3, x4, x5, x6, x7)
        w = tl.arange(0, COLUMNS // 8)[None, None, :]
        nan = tl.broadcast_to((code == 255)[:, :, :, None], (HEIGHT, LANES, GROUPS_OF_32, 4))
        nan = tl.reshape(nan, (HEIGHT, LANES, COLUMNS // 8))
        word = tl.where(nan, ALL_SEVEN & present_nibbles(columns - c0 - w * 8), word)
        place = first * (blocks * 4) + c0 // 8 + (r * (blocks * 4) + w)
        tl.store(row_data + place, word, (r < left) & (c0 // 8 + w < blocks * 4))
        if SQUARE:  # its scale stands for absent rows too, whose places hold zero
            code = tl.where(r < left, code, 0)
        j = c0 // 32 + tl.arange(0, GROUPS_OF_32)[None, None, :]
        store_row_scale(row_scale, code, before + row // 128, r, j, rows, blocks, LAYOUT)
    if COL:
        k = c0 + tl.arange(0, COLUMNS)[None, :]
        if SQUARE:
            amax_col = tl.reshape(tl.broadcast_to(square[:, :, None], (BLOCKS, GROUPS_OF_32, 32)), (BLOCKS, COLUMNS))
        else:
            amax_col = block_amax(tl.reshape(block_amax(tl.abs(value), 0, IGNORE_NAN), (BLOCKS, 4, COLUMNS)), 1, False)
        amax_col = tl.where(k < columns, amax_col, 0.0)
        code, inverse = e8m0(amax_col, 2, 0x3FFFFF, 0x01400001, FLOOR)
        y = tl.reshape(seen, (HEIGHT, BLOCKS, 4, COLUMNS)) * inverse[None, :, None, :]
        y = tl.reshape(y, (2, 2, 2, LANES, COLUMNS))
        x0, x1, x2, x3, x4, x5, x6, x7 = split8(tl.permute(y, (3, 4, 0, 1, 2)))
        word = pack_e2m1(x0, x1, x2, x3, x4, x5, x6, x7)
        lane = tl.arange(0, LANES)[:, None]
        nan = tl.reshape(tl.broadcast_to((code == 255)[:, None, :], (BLOCKS, 4, COLUMNS)), (LANES, COLUMNS))
        word = tl.where(nan, ALL_SEVEN & present_nibbles(left - lane * HEIGHT), word)
        word = tl.reshape(word, (1, LANES, COLUMNS))
        # words of a plain tensor's column: its rows are whole blocks of 32
        store_columns(col_data, word, before, tiles, row, c0, tl.cdiv(rows, 32) * 32, columns, GROUPED, True, 8, COLUMNS)
        block = row // 32 + tl.arange(0, BLOCKS)[:, None]
        if GROUPED:
            _store_col_scale(col_scale, code.to(tl.uint8), before, tiles, block, k, columns, LAYOUT)
        else:
            store_row_scale(col_scale, code, k // 128, k % 128, block, columns, tl.cdiv(rows, 32), LAYOUT)


@triton.jit
def _six(value, IGNORE_NAN: tl.constexpr):
    """What becomes 6 for a NaN that its block ignores."""
    if IGNORE_NAN:
        return tl.where(value == value, value, float("inf"))
    else:
        return value


@triton.jit
def _store_col_scale(scale, code, before, tiles, block, k, columns, LAYOUT: tl.constexpr):
    """Store the scales of columns ``k`` and blocks of 32 rows of a group; compact or swizzled."""
    base = scale + before.to(tl.int64) * (tl.cdiv(columns, 128) * 512)
    if LAYOUT == "compact":
        tl.store(base + k.to(tl.int64) * (tiles * 4) + block, code)
    else:
        place = (k // 128 * tiles + block // 4).to(tl.int64) * 512
        tl.store(base + place + (k % 32 * 16 + k % 128 // 32 * 4 + block % 4), code)
