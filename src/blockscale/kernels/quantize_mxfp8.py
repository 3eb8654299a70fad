"""Quantize to MXFP8: rowwise, columnwise or both planes in one pass, plain or grouped, scales in any layout.

A program holds 32 rows of one group and COLUMNS columns, a block high, so that a columnwise block never leaves it; two warps
at most, because what waits for other warps costs more than it saves. Legend: M rows, K columns, r row of the program, c
column.
"""

import triton
import triton.language as tl

from blockscale.kernels.casts import block_amax, e8m0, to_float32, to_fp8
from blockscale.kernels.extent import check_offsets, find_rows, store_row_scale, zero_row_scale, zero_rows

ROWS = tl.constexpr(32)


@triton.jit
def quantize_mxfp8(
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
    status,
    GROUPED: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    SQUARE: tl.constexpr,
    E5M2: tl.constexpr,
    FLOOR: tl.constexpr,
    IGNORE_NAN: tl.constexpr,
    LAYOUT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: slots * round_up(K, 128) / COLUMNS, slots = 4 * tiles of a plain tensor, ceil(M / 32) + G of a grouped one.

    ``rows``: M, or the capacity; ``stride``: of x's rows; ``num_tiles``: of the scale buffers. GROUPED: ``offsets`` say where
    groups begin, looked up in CHUNKS. SQUARE: 32x32 blocks. LAYOUT: of the scales.
    """
    column_programs = tl.cdiv(columns, 128) * (128 // COLUMNS)
    program = tl.program_id(0)
    c0 = program // 4 % column_programs * COLUMNS
    slot = program // 4 // column_programs * 4 + program % 4
    if GROUPED:
        if program == 0:
            check_offsets(status, 1, offsets, groups, rows)
        _, first, left, before, tiles, row, dead_tile, live = find_rows(slot, offsets, groups, rows, ROWS, CHUNKS)
        targets = (row_data, row_scale, col_data, col_scale)
        zero_outside(
            slot, row, left, before, tiles, dead_tile, live, c0, rows, columns, num_tiles, targets, ROW, COL, LAYOUT, COLUMNS
        )
        if left <= 0:
            return
        part = row // ROWS % 4
        first = first.to(tl.int64)
    else:
        part = program % 4
        row = slot * ROWS
        first = row.to(tl.int64)
        left = rows - row
        before = slot * 0
        tiles = tl.cdiv(rows, 128)
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    inside = (r < left) & (c0 + c < columns)
    value = to_float32(tl.load(x + first * stride + c0 + (r * stride + c), inside, 0.0, eviction_policy="evict_last"))
    out = first * columns + c0 + (r * columns + c)
    targets = (row_data, row_scale, col_data, col_scale)
    FLAGS: tl.constexpr = (ROW, COL, SQUARE, E5M2, FLOOR, IGNORE_NAN)
    store_tile(value, inside, out, row, part, left, before, tiles, c0, rows, columns, targets, FLAGS, LAYOUT)


@triton.jit
def store_tile(
    value, inside, out, row, part, left, before, tiles, c0, rows, columns, targets, FLAGS: tl.constexpr, LAYOUT: tl.constexpr
):  # fmt: skip
    """Quantize ROWS rows of a group from ``row`` on and columns c0.. of a tensor, and store data and scales.

    Args:
        value: float32, zero where not ``inside``. out: places of the data. part: row // ROWS % 4.
        left: rows left in the group; before, tiles: as ``find_rows`` says. targets: as of ``zero_outside``.
        FLAGS: ROW, COL, SQUARE, E5M2, FLOOR, IGNORE_NAN of the kernel.
    """
    ROW: tl.constexpr = FLAGS[0]
    COL: tl.constexpr = FLAGS[1]
    SQUARE: tl.constexpr = FLAGS[2]
    E5M2: tl.constexpr = FLAGS[3]
    FLOOR: tl.constexpr = FLAGS[4]
    IGNORE_NAN: tl.constexpr = FLAGS[5]
    COLUMNS: tl.constexpr = value.shape[1]
    row_data, row_scale, col_data, col_scale = targets
    r = tl.arange(0, ROWS)[:, None]
    magnitude = tl.abs(value)
    if ROW or SQUARE:
        amax = block_amax(tl.reshape(magnitude, (ROWS, COLUMNS // 32, 32)), 2, IGNORE_NAN)
        if SQUARE:
            amax = tl.broadcast_to(block_amax(amax, 0, False)[None, :], (ROWS, COLUMNS // 32))
        code, inverse = scale(amax, E5M2, FLOOR)
    if ROW:
        tl.store(row_data + out, row_codes(value, inverse, E5M2), inside)
        shown = code
        if SQUARE:  # its scale stands for absent rows too, whose places hold zero
            shown = tl.where(r < left, code, 0)
        j = c0 // 32 + tl.arange(0, COLUMNS // 32)[None, :]
        store_row_scale(row_scale, shown, before + row // 128, part * ROWS + r, j, rows, tl.cdiv(columns, 32), LAYOUT)
    if COL:
        if SQUARE:
            column_code = tl.reshape(tl.broadcast_to(tl.max(code, 0)[:, None], (COLUMNS // 32, 32)), (COLUMNS,))
            column_code = tl.where(c0 + tl.arange(0, COLUMNS) < columns, column_code, 0)
            q = row_codes(value, inverse, E5M2)
        else:
            column_code, inverse = scale(block_amax(magnitude, 0, IGNORE_NAN), E5M2, FLOOR)
            q = to_fp8(value * inverse[None, :], E5M2)
        tl.store(col_data + out, q, inside)
        k = c0 + tl.arange(0, COLUMNS)
        kept = k < tl.where(left > 0, columns, 0)  # in the linear layout; the others hold padding
        if LAYOUT == "swizzled_8x4":
            kept = k < tl.cdiv(columns, 8) * 8
        MASKED: tl.constexpr = LAYOUT == "linear" or LAYOUT == "swizzled_8x4"
        store_col_scale(col_scale, column_code.to(tl.uint8), before, tiles, row // ROWS, k, columns, kept, MASKED, LAYOUT)


@triton.jit
def row_codes(value, inverse, E5M2: tl.constexpr):
    """Codes of ``value`` (rows, columns) times ``inverse`` (rows, blocks)."""
    blocks = tl.reshape(value, (inverse.shape[0], inverse.shape[1], value.shape[1] // inverse.shape[1]))
    return tl.reshape(to_fp8(blocks * inverse[:, :, None], E5M2), value.shape)


@triton.jit
def zero_outside(
    slot, row, left, before, tiles, dead_tile, live, c0, rows, columns, num_tiles, targets,
    ROW: tl.constexpr, COL: tl.constexpr, LAYOUT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What a slot of a grouped tensor zeroes of columns c0..c0 + COLUMNS: its share of the tiles and rows past the live ones,
    and, where its group ends, the rest of the group's last tile. Arguments: of and by ``find_rows``, and of the kernel;
    ``targets``: data and scales of the rowwise plane, then of the columnwise one.
    """
    row_data, row_scale, col_data, col_scale = targets
    j = c0 // 32 + tl.arange(0, COLUMNS // 32)
    if dead_tile + slot < num_tiles:
        tile = dead_tile + slot
        if ROW:
            zero_row_scale(row_scale, tile, 0, j, tl.cdiv(columns, 32), LAYOUT)
        if COL:
            zero_col_scale(col_scale, tile, 1, 0, c0, columns, LAYOUT, COLUMNS)
    if live + slot * ROWS < rows:
        if ROW:
            zero_rows(row_data, live + slot * ROWS, rows, c0, columns, ROWS, COLUMNS)
        if COL:
            zero_rows(col_data, live + slot * ROWS, rows, c0, columns, ROWS, COLUMNS)
    part = row // ROWS % 4
    if (left > 0) & (left <= ROWS) & (part < 3):
        if ROW:
            zero_row_scale(row_scale, before + row // 128, (part + 1) * ROWS, j, tl.cdiv(columns, 32), LAYOUT)
        if COL:
            zero_col_scale(col_scale, before, tiles, row // ROWS + 1, c0, columns, LAYOUT, COLUMNS)


@triton.jit
def scale(amax, E5M2: tl.constexpr, FLOOR: tl.constexpr):
    """(E8M0 code, 2^(127 - code)) of blocks from their amaxes, see ``casts.e8m0``."""
    if E5M2:
        return e8m0(amax, 15, 0x1FFFFF, 0x07E00001, FLOOR)
    else:
        return e8m0(amax, 8, 0x1FFFFF, 0x04600001, FLOOR)


@triton.jit
def store_col_scale(scale, code, before, tiles, block, k, columns, kept, MASKED: tl.constexpr, LAYOUT: tl.constexpr):
    """Store the scales of columns ``k`` and blocks of 32 rows; ``tiles`` and ``block`` are the group's."""
    k_tiles = tl.cdiv(columns, 128)
    if LAYOUT == "compact":
        place = (before * 4 + block).to(tl.int64) * (k_tiles * 128) + k
    elif LAYOUT == "swizzled":
        tile = before.to(tl.int64) * k_tiles + k // 128 * tiles + block // 4
        place = tile * 512 + (k % 32 * 16 + k % 128 // 32 * 4 + block % 4)
    elif LAYOUT == "swizzled_8x4":
        place = (k // 8).to(tl.int64) * (tiles * 32) + block // 4 * 32 + k % 8 * 4 + block % 4
    else:
        place = block.to(tl.int64) * columns + k
    if MASKED:
        tl.store(scale + place, code, kept)
    else:
        tl.store(scale + place, code)


@triton.jit
def zero_col_scale(scale, before, tiles, block, c0, columns, LAYOUT: tl.constexpr, COLUMNS: tl.constexpr):
    """Zero the scales of the blocks from ``block`` to the end of its tile."""
    k = c0 + tl.arange(0, COLUMNS)[None, :]
    b = block // 4 * 4 + tl.arange(0, 4)[:, None]
    zero = tl.zeros((4, COLUMNS), tl.uint8)
    store_col_scale(scale, zero, before, tiles, b, k, columns, b >= block, True, LAYOUT)
