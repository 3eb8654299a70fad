"""Which rows a program works on, found from ``offsets`` on the device, and the places where nothing lives.

A tensor is cut into slots of ROWS rows (a divisor of 128), each group beginning a slot of its own. Group g has the slots
from offsets[g] // ROWS + g on, offsets[g+1] // ROWS - offsets[g] // ROWS + 1 of them: at least as many as it needs, and
the search for a slot's group needs no sum over groups. What is past the group's rows idles. A plain tensor is one group
whose rows the caller knows.
"""

import triton
import triton.language as tl

#: groups looked at together: one a lane, so that every warp finds its rows without waiting for another
LANES = tl.constexpr(32)
_FAR = tl.constexpr(0x7FFFFFFF)


@triton.jit
def find_rows(
    slot,
    offsets,
    groups,
    capacity,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """(group, first row of the slot, rows left in its group, tile before the group, tiles, row in the group, dead tile).

    Args:
        slot: which. offsets: int64 (groups + 1,). capacity: rows of the buffer.
        CHUNKS: ceil(groups / 32) rounded up to a power of two where that is small; 0 searches in a loop.

    ``rows left`` is at most 0 for a slot that idles. Whatever the offsets hold, no row outside the buffer is named, and no
    tile outside the tiles of its capacity. ``dead tile``: the first tile past the live ones; also returned, last: live rows.
    """
    lane = tl.arange(0, LANES)
    passed = tl.zeros((LANES,), tl.int32)
    tiles_passed = tl.zeros((LANES,), tl.int32)
    tiles_all = tl.zeros((LANES,), tl.int32)
    start = tl.zeros((LANES,), tl.int32)
    end = tl.full((LANES,), _FAR, tl.int32)
    live = tl.zeros((LANES,), tl.int32)
    if CHUNKS == 0:
        for g0 in tl.range(0, groups, LANES):
            passed, tiles_passed, tiles_all, start, end, live = _look(
                slot, offsets, g0 + lane, groups, capacity, ROWS, passed, tiles_passed, tiles_all, start, end, live
            )
    else:
        for chunk in tl.static_range(CHUNKS):
            passed, tiles_passed, tiles_all, start, end, live = _look(
                slot, offsets, chunk * LANES + lane, groups, capacity, ROWS, passed, tiles_passed, tiles_all, start, end, live
            )
    group = tl.sum(passed, 0)
    before = tl.sum(tiles_passed, 0)
    first = tl.max(start, 0)
    rows = tl.min(end, 0) - first
    most = (capacity + 127 * tl.minimum(groups, capacity)) // 128
    row = (slot - group - first // ROWS) * ROWS
    left = tl.where((group < groups) & (before + (rows + 127) // 128 <= most), rows - row, 0)
    group = tl.minimum(group, groups - 1)
    return group, first + row, left, before, (rows + 127) // 128, row, tl.sum(tiles_all, 0), tl.max(live, 0)


@triton.jit
def _look(
    slot, offsets, g, groups, capacity, ROWS: tl.constexpr, passed, tiles_passed, tiles_all, start, end, live
):  # fmt: skip
    """One group a lane: add what it says to the lane's sums."""
    there = g < groups
    a = tl.load(offsets + g, there, 0)
    b = tl.load(offsets + g + 1, there, 0)
    a = tl.minimum(tl.maximum(a, 0), capacity).to(tl.int32)
    b = tl.minimum(tl.maximum(b, 0), capacity).to(tl.int32)
    gone = there & (b // ROWS + g + 1 <= slot)
    tiles = (tl.maximum(b - a, 0) + 127) // 128
    return (
        passed + gone.to(tl.int32),
        tiles_passed + tl.where(gone, tiles, 0),
        tiles_all + tiles,
        tl.maximum(start, tl.where(gone, b, 0)),
        tl.minimum(end, tl.where(there & (gone == 0), b, _FAR)),
        tl.maximum(live, b),
    )


@triton.jit
def check_offsets(status, KERNEL: tl.constexpr, offsets, groups, capacity):
    """Leave the first group whose offsets are not legal in ``status`` (int64 words, see ``ops.device_status``), if there is one.

    For one program of a launch; ``find_rows`` stays within the buffer without it.
    """
    lane = tl.arange(0, LANES)
    found = tl.full((LANES,), _FAR, tl.int32)
    for g0 in tl.range(0, groups, LANES):
        g = g0 + lane
        a = tl.load(offsets + g, g < groups, 0)
        b = tl.load(offsets + g + 1, g < groups, 0)
        bad = (b < a) | (b > capacity) | ((g == 0) & (a != 0))
        found = tl.minimum(found, tl.where(bad & (g < groups), g, _FAR))
    group = tl.min(found, 0)
    if group < groups:
        tl.store(status + 1, group.to(tl.int64))
        tl.store(status + 2, tl.load(offsets + group))
        tl.store(status + 3, tl.load(offsets + group + 1))
        tl.store(status + 4, capacity + group.to(tl.int64) * 0)
        tl.store(status, group.to(tl.int64) * 0 + KERNEL)


@triton.jit
def store_row_scale(scale, code, tile, i, j, rows, blocks, LAYOUT: tl.constexpr):
    """Store the codes of rows ``i`` (0..127) of a tile and blocks ``j``, padding included as far as the layout has it.

    ``rows``: of the plain tensor; ``blocks``: a row's. Programs cover whole tiles of 128 columns. See ``layouts``.
    """
    quads = (blocks + 3) // 4
    code = code.to(tl.uint8)
    if LAYOUT == "compact":
        tl.store(scale + (tile * 128).to(tl.int64) * (quads * 4) + (i * (quads * 4) + j), code, j < quads * 4)
    elif LAYOUT == "swizzled":
        place = tile.to(tl.int64) * quads * 512 + (j // 4 * 512 + (i % 32) * 16 + i // 32 * 4 + j % 4)
        tl.store(scale + place, code, j < quads * 4)
    elif LAYOUT == "swizzled_8x4":
        m = tile * 128 + i
        place = (m // 8).to(tl.int64) * (quads * 32) + j // 4 * 32 + m % 8 * 4 + j % 4
        tl.store(scale + place, code, (m < (rows + 7) // 8 * 8) & (j < quads * 4))
    else:
        m = tile * 128 + i
        tl.store(scale + m.to(tl.int64) * blocks + j, code, (m < rows) & (j < blocks))


@triton.jit
def zero_row_scale(scale, tile, first, j, blocks, LAYOUT: tl.constexpr):
    """Zero the scales of the rows from ``first`` (0..128) of a tile on, blocks ``j`` (1-D); compact or swizzled."""
    i = tl.arange(0, 128)[:, None]
    quads = (blocks + 3) // 4
    j = j[None, :]
    base = scale + tile.to(tl.int64) * quads * 512
    zero = tl.zeros((128, j.shape[1]), tl.uint8)
    kept = (i >= first) & (j < quads * 4)
    if LAYOUT == "compact":
        tl.store(base + (i * (quads * 4) + j), zero, kept)
    else:
        tl.store(base + (j // 4 * 512 + (i % 32) * 16 + i // 32 * 4 + j % 4), zero, kept)


@triton.jit
def zero_rows(data, first, end, c0, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zero rows first..first + ROWS (below ``end``) and columns c0..c0 + COLUMNS (below ``width``, the pitch) of ``data``."""
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    place = first.to(tl.int64) * width + c0 + (r * width + c)
    zero = tl.zeros((ROWS, COLUMNS), data.dtype.element_ty)
    tl.store(data + place, zero, (first + r < end) & (c0 + c < width))
