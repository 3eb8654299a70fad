"""Values of quantized planes, plain or grouped, of every format and layout; rows past the last offset come out zero.

``dequantize_rows`` reads planes stored by row (the rowwise ones, MXFP8's columnwise one), ``dequantize_columns`` those stored
transposed. Each value is computed in float32 and rounded once. Legend: M rows, K columns, k column, r row of the program.
"""

import triton
import triton.language as tl

from blockscale.kernels.casts import FLT_MAX, from_e2m1, from_e4m3_scale, from_e8m0, from_fp8, reciprocal, rounded
from blockscale.kernels.extent import find_rows, zero_rows
from blockscale.kernels.tile import ROWS, find_extent


@triton.jit
def dequantize_rows(
    data,
    scale,
    amax,
    offsets,
    groups,
    rows,
    columns,
    top,
    out,
    GROUPED: tl.constexpr,
    CHUNKS: tl.constexpr,
    PACKED: tl.constexpr,
    E5M2: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMN: tl.constexpr,
    BY_ROW: tl.constexpr,
    LAYOUT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: slots of 32 rows * ceil(K / COLUMNS), slots = ceil(M / 32), and G more of a grouped plane.

    Args:
        amax, top: of NVFP4: the global amax, one a group, or BY_ROW one a row of the stored plane; what it is mapped to.
        PACKED: E2M1, two a byte. SCALE: "e8m0", "e4m3" (one a BLOCK elements), "tensor", "block" (1x128), "square" (128x128).
        COLUMN: MXFP8's columnwise plane. LAYOUT: of the scales.
    """
    column_programs = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    c0 = program % column_programs * COLUMNS
    slot = program // column_programs
    if GROUPED:
        group, first, left, before, tiles, row, _, live = find_rows(slot, offsets, groups, rows, 32, CHUNKS)
        if live + slot * 32 < rows:
            zero_rows(out, live + slot * 32, rows, c0, columns, 32, COLUMNS)
        if left <= 0:
            return
    else:
        row = slot * 32
        group = slot * 0
        first = row
        left = rows - row
        before = slot * 0
        tiles = tl.cdiv(rows, 128)
    first = first.to(tl.int64)
    r = tl.arange(0, 32)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    inside = (r < left) & (c0 + c < columns)
    if PACKED:
        pitch = tl.cdiv(columns, BLOCK) * (BLOCK // 2)
        b = tl.arange(0, COLUMNS // 2)[None, :]
        byte = tl.load(data + first * pitch + c0 // 2 + (r * pitch + b), (r < left) & (c0 // 2 + b < pitch), 0)
        value = _nibbles(byte, 32, COLUMNS)
    else:
        value = from_fp8(tl.load(data + first * columns + c0 + (r * columns + c), inside, 0), E5M2)
    if SCALE == "e8m0" or SCALE == "e4m3":
        if COLUMN:
            k = c0 + tl.arange(0, COLUMNS)
            place = _block_of_rows(before, tiles, row // 32, k, columns, LAYOUT)
            value *= from_e8m0(tl.load(scale + place, k < columns, 0).to(tl.int32))[None, :]
        else:
            j = c0 // BLOCK + tl.arange(0, COLUMNS // BLOCK)[None, :]
            code = _row_scale(scale, before + row // 128, row % 128 + r, j, rows, tl.cdiv(columns, BLOCK), LAYOUT)
            if SCALE == "e8m0":
                times = from_e8m0(code)
            elif BY_ROW:
                times = from_e4m3_scale(code) * _global(tl.load(amax + first + r, r < left, 0.0), top)
            else:
                times = from_e4m3_scale(code) * _global(tl.load(amax + group), top)
            blocks = tl.reshape(value, (32, COLUMNS // BLOCK, BLOCK)) * times[:, :, None]
            value = tl.reshape(blocks, (32, COLUMNS))
    elif SCALE == "tensor":
        value *= tl.load(scale + group)
    elif SCALE == "block":
        value *= tl.load(scale + (first + r) * tl.cdiv(columns, 128) + c0 // 128, r < left, 0.0)
    else:
        value *= tl.load(scale + (before + row // 128) * tl.cdiv(columns, 128) + c0 // 128)
    tl.store(out + first * columns + c0 + (r * columns + c), rounded(value, out.dtype.element_ty), inside)


@triton.jit
def dequantize_columns(
    data,
    scale,
    amax,
    offsets,
    groups,
    rows,
    columns,
    top,
    out,
    GROUPED: tl.constexpr,
    CHUNKS: tl.constexpr,
    PACKED: tl.constexpr,
    E5M2: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_ROW: tl.constexpr,
    LAYOUT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: slots of 128 rows * ceil(K / COLUMNS); arguments as of ``dequantize_rows``."""
    column_programs = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    c0 = program % column_programs * COLUMNS
    slot = program // column_programs
    group, first, left, before, tiles, row, _, live = find_extent(slot, offsets, groups, rows, GROUPED, CHUNKS)
    if GROUPED:
        if live + slot * ROWS < rows:
            zero_rows(out, live + slot * ROWS, rows, c0, columns, ROWS, COLUMNS)
    if left <= 0:
        return
    BYTES: tl.constexpr = 64 if PACKED else 128  # of a column in a tile
    k = c0 + tl.arange(0, COLUMNS)[:, None]
    b = row // 128 * BYTES + tl.arange(0, BYTES)[None, :]
    if GROUPED:
        pitch = tiles * BYTES
    elif PACKED:
        pitch = tl.cdiv(rows, BLOCK) * (BLOCK // 2)
    else:
        pitch = rows
    place = before.to(tl.int64) * (columns * BYTES) + k.to(tl.int64) * pitch + b
    byte = tl.load(data + place, (k < columns) & (b < pitch), 0)
    if PACKED:
        value = _nibbles(byte, COLUMNS, 128)
    else:
        value = from_fp8(byte, E5M2)
    if SCALE == "e8m0" or SCALE == "e4m3":
        PER_TILE: tl.constexpr = 128 // BLOCK
        j = row // BLOCK + tl.arange(0, PER_TILE)[None, :]
        if GROUPED:
            base = scale + before.to(tl.int64) * (tl.cdiv(columns, 128) * (128 * PER_TILE))
            code = _row_scale(base, k // 128, k % 128, j, columns, tiles * PER_TILE, LAYOUT)
        else:
            code = _row_scale(scale, k // 128, k % 128, j, columns, tl.cdiv(rows, BLOCK), LAYOUT)
        if SCALE == "e8m0":
            times = from_e8m0(code)
        elif BY_ROW:
            times = from_e4m3_scale(code) * _global(tl.load(amax + group.to(tl.int64) * columns + k, k < columns, 0.0), top)
        else:
            times = from_e4m3_scale(code) * _global(tl.load(amax + group), top)
        blocks = tl.reshape(value, (COLUMNS, PER_TILE, BLOCK)) * times[:, :, None]
        value = tl.reshape(blocks, (COLUMNS, 128))
    elif SCALE == "tensor":
        value *= tl.load(scale + group)
    elif SCALE == "block":
        value *= tl.load(scale + (before + row // 128).to(tl.int64) * columns + k, k < columns, 0.0)
    else:
        value *= tl.load(scale + (before + row // 128) * tl.cdiv(columns, 128) + c0 // 128)
    y = tl.trans(rounded(value, out.dtype.element_ty))
    r = tl.arange(0, 128)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    tl.store(out + first * columns + c0 + (r * columns + c), y, (r < left) & (c0 + c < columns))


@triton.jit
def _nibbles(byte, ROWS_: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 (ROWS_, COLUMNS) values of bytes that hold two E2M1 codes, the even element in the low nibble."""
    wide = byte.to(tl.int32)
    return from_e2m1(tl.reshape(tl.join(wide & 15, wide >> 4), (ROWS_, COLUMNS)))


@triton.jit
def _global(amax, top):
    """S_dec of NVFP4, see ``formats.scales``."""
    s_enc = tl.minimum(tl.math.div_rn(top, amax), FLT_MAX)
    return reciprocal(tl.where((amax == 0) | (s_enc == 0), 1.0, s_enc))


@triton.jit
def _row_scale(scale, tile, i, j, rows, blocks, LAYOUT: tl.constexpr):
    """Codes (int32) of rows ``i`` (0..127) of a tile and blocks ``j`` of a plane of ``rows`` by ``blocks``; 0 outside."""
    m = tile * 128 + i
    quads = (blocks + 3) // 4
    if LAYOUT == "compact":
        place = m.to(tl.int64) * (quads * 4) + j
    elif LAYOUT == "swizzled":
        place = (tile.to(tl.int64) * quads + j // 4) * 512 + ((i % 32) * 16 + i // 32 * 4 + j % 4)
    elif LAYOUT == "swizzled_8x4":
        place = (m // 8).to(tl.int64) * (quads * 32) + j // 4 * 32 + m % 8 * 4 + j % 4
    else:
        place = m.to(tl.int64) * blocks + j
    if LAYOUT == "compact" or LAYOUT == "swizzled":  # they are padded to whole tiles
        kept = (i >= 0) & (j < blocks)
    else:
        kept = (m < rows) & (j < blocks)
    return tl.load(scale + place, kept, 0).to(tl.int32)


@triton.jit
def _block_of_rows(before, tiles, block, k, columns, LAYOUT: tl.constexpr):
    """Where the scales of columns ``k`` and a block of 32 rows of MXFP8's columnwise plane lie."""
    k_tiles = tl.cdiv(columns, 128)
    if LAYOUT == "compact":
        return (before * 4 + block).to(tl.int64) * (k_tiles * 128) + k
    elif LAYOUT == "swizzled":
        tile = before.to(tl.int64) * k_tiles + k // 128 * tiles + block // 4
        return tile * 512 + (k % 32 * 16 + k % 128 // 32 * 4 + block % 4)
    elif LAYOUT == "swizzled_8x4":
        return (k // 8).to(tl.int64) * (tiles * 32) + block // 4 * 32 + k % 8 * 4 + block % 4
    else:
        return block.to(tl.int64) * columns + k
