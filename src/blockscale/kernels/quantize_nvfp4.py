"""Quantize to NVFP4: rowwise, columnwise (stored transposed) or both planes in one pass, plain or grouped.

A program holds 16 * LANES rows and COLUMNS columns; a thread holds the 16 rows of a columnwise block, so that its maximum,
its transform and its codes never leave the thread, and a columnwise word of eight codes is written as it comes. Row r of
the program is 16 * lane + i. Legend: M rows, K columns.
"""

import triton
import triton.language as tl

from blockscale.kernels.casts import FLT_MAX, block_amax, pack_codes, pack_e2m1, present_nibbles, split8, to_e4m3_scale, to_float32
from blockscale.kernels.extent import check_offsets, find_rows, store_row_scale, zero_row_scale, zero_rows
from blockscale.kernels.scale_nvfp4 import ENTRIES, hadamard

ALL_SEVEN = tl.constexpr(0x77777777)


@triton.jit
def quantize_nvfp4(
    x,
    stride,
    offsets,
    groups,
    rows,
    columns,
    num_tiles,
    multiplier,
    rng,
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
    HADAMARD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    IGNORE_NAN: tl.constexpr,
    LAYOUT: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: slots of 16 LANES rows * round_up(K, 128) / COLUMNS, slots as in ``quantize_mxfp8``, as are other arguments.

    ``multiplier``: see ``scale_nvfp4.multipliers``; data are int32 words of eight codes. ``rng``: int64[2], read when
    STOCHASTIC.
    """
    HEIGHT: tl.constexpr = 16 * LANES
    PARTS: tl.constexpr = 128 // HEIGHT
    column_programs = tl.cdiv(columns, 128) * (128 // COLUMNS)
    program = tl.program_id(0)
    c0 = program // PARTS % column_programs * COLUMNS
    slot = program // PARTS // column_programs * PARTS + program % PARTS
    blocks = tl.cdiv(columns, 16)
    if GROUPED:
        if program == 0:
            check_offsets(status, 2, offsets, groups, rows)
        group, first, left, before, tiles, row, dead_tile, live = find_rows(slot, offsets, groups, rows, HEIGHT, CHUNKS)
        j = c0 // 16 + tl.arange(0, COLUMNS // 16)
        if dead_tile + slot < num_tiles:  # this program's share of the tiles past the live ones
            tile = dead_tile + slot
            if ROW:
                zero_row_scale(row_scale, tile, 0, j, blocks, LAYOUT)
            if COL:
                _zero_columns(col_data, col_scale, tile, 1, 0, 0, c0, columns, LAYOUT, COLUMNS)
        if ROW:
            if live + slot * HEIGHT < rows:  # and of the rows
                zero_rows(row_data, live + slot * HEIGHT, rows, c0 // 8, blocks * 2, HEIGHT, COLUMNS // 8)
        if left <= 0:
            return
        end = row % 128 + HEIGHT
        if (left <= HEIGHT) & (end < 128):  # the rest of the group's last tile
            if ROW:
                zero_row_scale(row_scale, before + row // 128, end, j, blocks, LAYOUT)
            if COL:
                _zero_columns(col_data, col_scale, before, tiles, row // 128, end, c0, columns, LAYOUT, COLUMNS)
        first = first.to(tl.int64)
    else:
        row = slot * HEIGHT
        first = row.to(tl.int64)
        left = rows - row
        group = slot * 0
        before = slot * 0
        tiles = tl.cdiv(rows, 128)
    i = tl.arange(0, 16)[:, None, None]
    lane = tl.arange(0, LANES)[None, :, None]
    c = tl.arange(0, COLUMNS)[None, None, :]
    r = lane * 16 + i
    inside = (r < left) & (c0 + c < columns)
    value = to_float32(tl.load(x + first * stride + c0 + (r * stride + c), inside, 0.0, eviction_policy="evict_last"))
    if ROW or SQUARE:
        amax_row = block_amax(tl.reshape(tl.abs(value), (16, LANES, COLUMNS // 16, 16)), 3, IGNORE_NAN)
        if SQUARE:
            square = block_amax(amax_row, 0, False)
            amax_row = tl.broadcast_to(square[None, :, :], (16, LANES, COLUMNS // 16))
    at = multiplier + group * ENTRIES
    if ROW:
        scale, times = _scale(amax_row, at)
        y = tl.reshape(
            tl.reshape(_seven(value, IGNORE_NAN), (16, LANES, COLUMNS // 16, 16)) * times[:, :, :, None], (16, LANES, COLUMNS)
        )
        if STOCHASTIC:
            j = c0 // 16 + tl.arange(0, COLUMNS // 16)[None, None, :]
            bits = _random_bits(rng, j, row + r, group, 0, 16, LANES, COLUMNS // 16)
            codes = _stochastic(y, tl.reshape(bits, (16, LANES, COLUMNS)))
            d0, d1, d2, d3, d4, d5, d6, d7 = split8(tl.reshape(codes, (16, LANES, COLUMNS // 8, 2, 2, 2)))
            word = pack_codes(d0, d1, d2, d3, d4, d5, d6, d7)
        else:
            x0, x1, x2, x3, x4, x5, x6, x7 = split8(tl.reshape(y, (16, LANES, COLUMNS // 8, 2, 2, 2)))
            word = pack_e2m1(x0, x1, x2, x3, x4, x5, x6, x7)
        w = tl.arange(0, COLUMNS // 8)[None, None, :]
        nan = tl.reshape(tl.broadcast_to((scale == 0x7F)[:, :, :, None], (16, LANES, COLUMNS // 16, 2)), (16, LANES, COLUMNS // 8))
        word = tl.where(nan, ALL_SEVEN & present_nibbles(columns - c0 - w * 8), word)
        place = first * (blocks * 2) + c0 // 8 + (r * (blocks * 2) + w)
        tl.store(row_data + place, word, (r < left) & (c0 // 8 + w < blocks * 2))
        if SQUARE:  # its scale stands for absent rows too, whose places hold zero
            scale = tl.where(r < left, scale, 0)
        j = c0 // 16 + tl.arange(0, COLUMNS // 16)[None, None, :]
        store_row_scale(row_scale, scale, before + row // 128, row % 128 + r, j, rows, blocks, LAYOUT)
    if COL:
        if SQUARE:
            amax_col = tl.reshape(tl.broadcast_to(square[:, :, None], (LANES, COLUMNS // 16, 16)), (LANES, COLUMNS))
        else:
            if HADAMARD:
                value = hadamard(value, LANES, COLUMNS)
            amax_col = block_amax(tl.abs(value), 0, IGNORE_NAN)
        k = c0 + tl.arange(0, COLUMNS)[None, :]
        amax_col = tl.where(k < columns, amax_col, 0.0)
        scale, times = _scale(amax_col, at + groups * ENTRIES)
        y = _seven(value, IGNORE_NAN) * times[None, :, :]
        block = row // 16 + tl.arange(0, LANES)[:, None]
        if STOCHASTIC:
            bits = _random_bits(rng, block, k, group, 1, LANES, COLUMNS, 1)
            bits = tl.permute(tl.reshape(bits, (LANES, COLUMNS, 16)), (2, 0, 1))
            d0, d1, d2, d3, d4, d5, d6, d7 = split8(_rows_last(_stochastic(y, bits), LANES, COLUMNS))
            word = pack_codes(d0, d1, d2, d3, d4, d5, d6, d7)
        else:
            x0, x1, x2, x3, x4, x5, x6, x7 = split8(_rows_last(y, LANES, COLUMNS))
            word = pack_e2m1(x0, x1, x2, x3, x4, x5, x6, x7)
        _store_columns(
            col_data, col_scale, word, scale, left, before, tiles, row, c0, rows, columns,
            GROUPED, HADAMARD, LAYOUT, LANES, COLUMNS,
        )  # fmt: skip


@triton.jit
def _seven(value, IGNORE_NAN: tl.constexpr):
    """What becomes code 7 for a NaN that its block ignores."""
    if IGNORE_NAN:
        return tl.where(value == value, value, float("inf"))
    else:
        return value


@triton.jit
def _scale(amax, at):
    """(E4M3 code, multiplier) of blocks from their amax; a NaN gives 0x7F and NaN."""
    scaled = tl.minimum(amax * tl.load(at + 128), FLT_MAX, propagate_nan=tl.PropagateNan.ALL)
    code = to_e4m3_scale(scaled)
    return code, tl.load(at + code)


@triton.jit
def _rows_last(y, LANES: tl.constexpr, COLUMNS: tl.constexpr):
    """(16, LANES, COLUMNS) as (2, LANES, COLUMNS, 2, 2, 2): row 8 h + 4 a + 2 b + c is [h, ..., a, b, c]."""
    return tl.permute(tl.reshape(y, (2, 2, 2, 2, LANES, COLUMNS)), (0, 4, 5, 1, 2, 3))


@triton.jit
def _store_columns(
    col_data, col_scale, word, scale, left, before, tiles, row, c0, rows, columns,
    GROUPED: tl.constexpr, HADAMARD: tl.constexpr, LAYOUT: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Words of eight rows, (2, LANES, COLUMNS), and scales of 16, (LANES, COLUMNS), of the transposed plane."""
    k = c0 + tl.arange(0, COLUMNS)[None, :]
    lane = tl.arange(0, LANES)[:, None]
    half = tl.arange(0, 2)[:, None, None]
    nan = tl.broadcast_to((scale == 0x7F)[None, :, :], (2, LANES, COLUMNS))
    live = left - lane[None, :, :] * 16
    if HADAMARD:  # a block with a live row keeps all its outputs
        kept = tl.where(live > 0, -1, 0)
    else:
        kept = present_nibbles(live - half * 8)
    word = tl.where(nan, ALL_SEVEN & kept, word)
    if GROUPED:
        pitch = tiles * 16  # words of a column
        base = before.to(tl.int64) * (columns * 16)
        blocks = tiles * 8
    else:
        pitch = tl.cdiv(rows, 16) * 2
        base = before.to(tl.int64)
        blocks = tl.cdiv(rows, 16)
    w = (row // 8 + lane * 2)[None, :, :] + half
    place = base + k.to(tl.int64)[None, :, :] * pitch + w
    tl.store(col_data + place, word, (k[None, :, :] < columns) & (w < pitch))
    block = row // 16 + lane
    if GROUPED:
        _store_col_scale(col_scale, scale.to(tl.uint8), before, tiles, block, k, columns, block >= 0, LAYOUT)
    else:
        store_row_scale(col_scale, scale, k // 128, k % 128, block, columns, blocks, LAYOUT)


@triton.jit
def _store_col_scale(scale, code, before, tiles, block, k, columns, kept, LAYOUT: tl.constexpr):
    """Store the scales of columns ``k`` and blocks of 16 rows of a group; compact or swizzled."""
    base = scale + before.to(tl.int64) * (tl.cdiv(columns, 128) * 1024)
    if LAYOUT == "compact":
        tl.store(base + k.to(tl.int64) * (tiles * 8) + block, code, kept)
    else:
        place = (k // 128 * (tiles * 2) + block // 4).to(tl.int64) * 512
        tl.store(base + place + (k % 32 * 16 + k % 128 // 32 * 4 + block % 4), code, kept)


@triton.jit
def _zero_columns(
    data, scale, before, tiles, tile, row, c0, columns, LAYOUT: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Zero the words and scales of the rows from ``row`` (0..128, whole blocks) of a group's tile on."""
    k = c0 + tl.arange(0, COLUMNS)[:, None]
    w = tl.arange(0, 16)[None, :]
    place = before.to(tl.int64) * (columns * 16) + k.to(tl.int64) * (tiles * 16) + tile * 16 + w
    tl.store(data + place, tl.zeros((COLUMNS, 16), tl.int32), (k < columns) & (w * 8 >= row))
    block = tl.arange(0, 8)[None, :]
    zero = tl.zeros((COLUMNS, 8), tl.uint8)
    _store_col_scale(scale, zero, before, tiles, tile * 8 + block, k, columns, (block * 16 >= row) & (k >= 0), LAYOUT)


@triton.jit
def _random_bits(rng, j, i, group, PLANE: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Low 16 bits of what element t of each block (A, B, C) draws, int32 (A, B, C, 16): one Philox call a block."""
    seed = tl.load(rng)
    offset = tl.load(rng + 1).to(tl.int32) * 2 + PLANE
    if C == 1:
        zero = tl.zeros((A, B), tl.int32)
    else:
        zero = tl.zeros((A, B, C), tl.int32)
    w0, w1, w2, w3 = tl.philox(seed, zero + j, zero + i, zero + group, zero + offset)
    # element t = 4 * word + turn, the last axis fastest: joins put their index last
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [..., a, b]: word a * 2 + b
    shifted = tl.join(tl.join(words, _rotate(words, 16)), tl.join(_rotate(words, 8), _rotate(words, 24)))
    return shifted & 0xFFFF


@triton.jit
def _rotate(w, by: tl.constexpr):
    return (w >> by) | (w << (32 - by))


@triton.jit
def _stochastic(y, bits):
    """E2M1 codes (int32) of y, up with probability close to the fraction of the step; NaN gives code 0."""
    a = tl.minimum(tl.abs(y), 6.0)
    steps = tl.where(a < 2.0, a * 2.0, tl.where(a < 4.0, a, a * 0.5))
    n = tl.floor(steps)
    up = (steps - n) * 65536.0 > bits.to(tl.float32) + 0.5
    code = n.to(tl.int32) + tl.where(a < 2.0, 0, tl.where(a < 4.0, 2, 4)) + up.to(tl.int32)
    return tl.where(y == y, code, 0) | ((y.to(tl.int32, bitcast=True) >> 28) & 8)
