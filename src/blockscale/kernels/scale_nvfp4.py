"""What NVFP4 needs of a whole group before its elements: the largest magnitude, and the multipliers that follow from it.

Legend: G groups; planes 0 rowwise, 1 columnwise.
"""

import triton
import triton.language as tl

from blockscale.kernels.casts import FLT_MAX, from_e4m3_scale, round_bf16, to_float32
from blockscale.kernels.extent import find_rows

#: float32 a plane and group in the table of multipliers: one for each E4M3 code, then S_enc / 6
ENTRIES = tl.constexpr(256)
#: bit i is set where the transform flips the sign of element i
SIGNS_NEGATIVE = tl.constexpr(0xD7E8)


@triton.jit
def multipliers(amax, table, row_amax, col_amax, groups, ROW: tl.constexpr, COL: tl.constexpr):
    """table[plane, g, s]: what x is multiplied by in a block with scale code s; [plane, g, 128]: S_enc / 6. Grid: 2 G.

    ``row_amax``, ``col_amax``: float32 (G,), copies of the two rows of ``amax`` (2, G), each if its flag says so.
    """
    row = tl.program_id(0)
    largest = tl.load(amax + row)
    if ROW:
        if row < groups:
            tl.store(row_amax + row, largest)
    if COL:
        if row >= groups:
            tl.store(col_amax + row - groups, largest)
    s_enc = tl.minimum(tl.math.div_rn(2688.0, largest), FLT_MAX)
    s_enc = tl.where((largest == 0) | (s_enc == 0), 1.0, s_enc)
    s_dec = tl.math.div_rn(1.0, s_enc)
    code = tl.arange(0, 128)
    scale = from_e4m3_scale(code) * s_dec
    inverse = tl.minimum(tl.math.div_rn(tl.full((128,), 1.0, tl.float32), scale), FLT_MAX)
    tl.store(table + row * ENTRIES + code, tl.where(code == 0x7F, float("nan"), inverse))
    tl.store(table + row * ENTRIES + 128, s_enc * 0.16666667163372040)


@triton.jit
def hadamard(v, LANES: tl.constexpr, COLUMNS: tl.constexpr):
    """16-point random Hadamard transform along the first axis of (16, LANES, COLUMNS), rounded to bfloat16, as float32."""
    i = tl.arange(0, 16)[:, None, None]
    negative = (SIGNS_NEGATIVE >> i) & 1
    v = tl.where(negative != 0, -v, v)
    v = tl.permute(tl.reshape(v, (2, 2, 2, 2, LANES, COLUMNS)), (4, 5, 0, 1, 2, 3))
    v = _butterfly(v)
    v = tl.permute(_butterfly(tl.permute(v, (0, 1, 2, 3, 5, 4))), (0, 1, 2, 3, 5, 4))
    v = tl.permute(_butterfly(tl.permute(v, (0, 1, 2, 5, 4, 3))), (0, 1, 2, 5, 4, 3))
    v = tl.permute(_butterfly(tl.permute(v, (0, 1, 5, 3, 4, 2))), (0, 1, 5, 3, 4, 2))
    v = tl.reshape(tl.permute(v, (2, 3, 4, 5, 0, 1)), (16, LANES, COLUMNS))
    return round_bf16(v * 0.25)


@triton.jit
def _butterfly(v):
    low, high = tl.split(v)
    return tl.join(low + high, low - high)


@triton.jit
def group_amax(
    x,
    stride,
    offsets,
    groups,
    rows,
    columns,
    amax,
    GROUPED: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    HADAMARD: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """amax[plane, g] = the larger of it and the magnitudes of a piece of a tile. NaNs do not count.

    ``amax``: float32 (2, G) as int32 bits, zero before: the order of non-negative floats is that of their bits, so that the
    maximum is one of integers and comes out the same in any order. Grid: slots of 16 LANES rows * ceil(K / COLUMNS).
    """
    HEIGHT: tl.constexpr = 16 * LANES
    column_programs = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    c0 = program % column_programs * COLUMNS
    slot = program // column_programs
    if GROUPED:
        group, first, left, _, _, _, _, _ = find_rows(slot, offsets, groups, rows, HEIGHT, CHUNKS)
        first = first.to(tl.int64)
    else:
        group = slot * 0
        first = (slot * HEIGHT).to(tl.int64)
        left = rows - slot * HEIGHT
    if left > 0:
        r = tl.arange(0, LANES)[None, :, None] * 16 + tl.arange(0, 16)[:, None, None]
        c = tl.arange(0, COLUMNS)[None, None, :]
        inside = (r < left) & (c0 + c < columns)
        value = to_float32(tl.load(x + first * stride + c0 + (r * stride + c), inside, 0.0))
        plain = _largest(value)
        if ROW:
            tl.atomic_max(amax + group, plain.to(tl.int32, bitcast=True))
        if COL:
            if HADAMARD:
                plain = _largest(hadamard(value, LANES, COLUMNS))
            tl.atomic_max(amax + groups + group, plain.to(tl.int32, bitcast=True))


@triton.jit
def _largest(value):
    flat = tl.ravel(tl.abs(value))
    return tl.max(tl.where(flat == flat, flat, 0.0), 0)
