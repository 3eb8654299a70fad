"""Which rows a program works on: a table with an entry for each tile of 128 rows, made on the device from ``offsets``.

Every group starts on a tile. A plain tensor needs no table: it is one group, and the entries follow from its rows.
Entries, int32: first row in the packed buffer, rows of the group from there on, tiles before the group, tiles of the
group, tile within the group, group, live tiles, live rows. A tile past the live ones has 0 rows, group ``num_groups``.
"""

import triton
import triton.language as tl

FIELDS = tl.constexpr(8)
TILES_PER_PROGRAM = tl.constexpr(128)


@triton.jit
def tile_table(offsets, table, num_groups, capacity, num_tiles, GROUPS: tl.constexpr):
    """Write the table. Grid: ceil(num_tiles / 128). ``GROUPS``: how many are looked at together, a power of two.

    Offsets that leave 0..capacity or decrease are clamped, so that whatever they hold, nothing is read or written outside.
    """
    tile = tl.program_id(0) * TILES_PER_PROGRAM + tl.arange(0, TILES_PER_PROGRAM)
    group = tl.zeros((TILES_PER_PROGRAM,), tl.int32)
    before = tl.zeros((TILES_PER_PROGRAM,), tl.int32)
    total = 0
    last = 0
    for g0 in tl.range(0, num_groups, GROUPS):
        g = g0 + tl.arange(0, GROUPS)
        start, end = _bounds(offsets, g, num_groups, capacity)
        count = (end - start + 127) // 128
        reached = tl.cumsum(count, 0) + total
        passed = (reached[None, :] <= tile[:, None]) & (g < num_groups)[None, :]
        group += tl.sum(passed.to(tl.int32), 1)
        before += tl.sum(tl.where(passed, count[None, :], 0), 1)
        total += tl.sum(count, 0)
        last = tl.maximum(last, tl.max(end, 0))
    start, end = _bounds(offsets, group, num_groups, capacity)
    local = tile - before
    live = group < num_groups
    at = table + tile * FIELDS
    kept = tile < num_tiles
    tl.store(at, tl.where(live, start + local * 128, 0), kept)
    tl.store(at + 1, tl.where(live, end - start - local * 128, 0), kept)
    tl.store(at + 2, before, kept)
    tl.store(at + 3, (end - start + 127) // 128, kept)
    tl.store(at + 4, local, kept)
    tl.store(at + 5, group, kept)
    tl.store(at + 6, tl.zeros_like(tile) + total, kept)
    tl.store(at + 7, tl.zeros_like(tile) + last, kept)


@triton.jit
def _bounds(offsets, g, num_groups, capacity):
    start = tl.load(offsets + g, g < num_groups, 0)
    end = tl.load(offsets + g + 1, g < num_groups, 0)
    start = tl.minimum(tl.maximum(start, 0), capacity)
    end = tl.minimum(tl.maximum(end, start), capacity)
    return start.to(tl.int32), end.to(tl.int32)


@triton.jit
def tile_entry(table, tile, rows, GROUPED: tl.constexpr):
    """(first row, rows left, tiles before, tiles of the group, tile within the group, group) of a tile."""
    if GROUPED:
        at = table + tile * FIELDS
        return (
            tl.load(at).to(tl.int64),
            tl.load(at + 1),
            tl.load(at + 2),
            tl.load(at + 3),
            tl.load(at + 4),
            tl.load(at + 5),
        )
    else:
        none = tile * 0
        return (tile * 128).to(tl.int64), rows - tile * 128, none, (rows + 127) // 128, tile, none


@triton.jit
def fill_dead_rows(
    table, share, shares, capacity, first, second, c0, width, pitch,
    FIRST: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Zero a program's share of the rows past the live ones, columns ``c0`` to c0 + COLUMNS (below ``width``).

    ``first``, ``second``: uint8 (capacity, pitch), each if its flag says so. Call it before anything is loaded: there it
    costs no registers.
    """
    live = tl.load(table + 7)
    if live < capacity:
        each = (capacity - live + shares - 1) // shares
        start = live + share * each
        end = tl.minimum(start + each, capacity)
        r = tl.arange(0, ROWS)[:, None]
        c = tl.arange(0, COLUMNS)[None, :]
        zero = tl.zeros((ROWS, COLUMNS), tl.uint8)
        for done in tl.range(0, end - start, ROWS):
            row = start + done
            place = row.to(tl.int64) * pitch + c0 + (r * pitch + c)
            kept = (row + r < end) & (c0 + c < width)
            if FIRST:
                tl.store(first + place, zero, kept)
            if SECOND:
                tl.store(second + place, zero, kept)


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
