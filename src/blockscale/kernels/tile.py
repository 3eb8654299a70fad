"""A tile of 128 rows and COLUMNS columns of one group, and the columnwise plane that is stored transposed.

The tile is (8, 16, COLUMNS), row r = 8 * lane + i: a thread holds 8 rows of its columns, so that the codes of a column come
together in a thread, as words of four bytes. Legend: M rows, K columns, k column of the tensor.
"""

import triton
import triton.language as tl

from blockscale.kernels.casts import to_float32
from blockscale.kernels.extent import find_rows

ROWS = tl.constexpr(128)
HEIGHT = tl.constexpr(8)
LANES = tl.constexpr(16)


@triton.jit
def find_tile(columns, COLUMNS: tl.constexpr, BAND: tl.constexpr):
    """(slot of 128 rows, first column) of this program; BAND programs side by side share columns, those after them rows.

    What a band writes of a transposed column lies together. Grid: slots, rounded up to BAND, * ceil(K / COLUMNS).
    """
    column_programs = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    slot = program // BAND // column_programs * BAND + program % BAND
    return slot, program // BAND % column_programs * COLUMNS


@triton.jit
def find_extent(slot, offsets, groups, rows, GROUPED: tl.constexpr, CHUNKS: tl.constexpr):
    """As ``extent.find_rows``, of a plain tensor too: one group, nothing dead."""
    if GROUPED:
        group, first, left, before, tiles, row, dead_tile, live = find_rows(slot, offsets, groups, rows, ROWS, CHUNKS)
    else:
        row = slot * ROWS
        group = slot * 0
        first = row
        left = rows - row
        before = slot * 0
        tiles = tl.cdiv(rows, ROWS)
        dead_tile = tiles
        live = rows
    return group, first.to(tl.int64), left, before, tiles, row, dead_tile, live


@triton.jit
def tile_row():
    """Row of the tile, (8, 16, 1)."""
    return tl.arange(0, LANES)[None, :, None] * HEIGHT + tl.arange(0, HEIGHT)[:, None, None]


@triton.jit
def load_tile(x, stride, first, left, c0, columns, COLUMNS: tl.constexpr):
    """float32 (8, 16, COLUMNS) of x from row ``first`` and column ``c0`` on; 0 past ``left`` rows and past the last column."""
    r = tile_row()
    c = tl.arange(0, COLUMNS)[None, None, :]
    inside = (r < left) & (c0 + c < columns)
    return to_float32(tl.load(x + first * stride + c0 + (r * stride + c), inside, 0.0, eviction_policy="evict_last"))


@triton.jit
def store_rows(data, code, first, left, c0, columns, COLUMNS: tl.constexpr):
    """Store the codes of the rowwise plane, uint8 (8, 16, COLUMNS)."""
    r = tile_row()
    c = tl.arange(0, COLUMNS)[None, None, :]
    tl.store(data + first * columns + c0 + (r * columns + c), code, (r < left) & (c0 + c < columns))


@triton.jit
def by_fours(value, COLUMNS: tl.constexpr):
    """(8, 16, COLUMNS) as (2, 16, COLUMNS, 2, 2): row 4 a + 2 b + c of a lane is [a, ..., b, c]."""
    return tl.permute(tl.reshape(value, (2, 2, 2, LANES, COLUMNS)), (0, 3, 4, 1, 2))


@triton.jit
def store_columns(
    data, word, before, tiles, row, c0, rows, columns,
    GROUPED: tl.constexpr, WORDS: tl.constexpr, WORD_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store words of WORD_ROWS rows, int32 (8 / WORD_ROWS, 16, COLUMNS), of a transposed plane.

    ``data``: int32, or uint8 without WORDS, where a plain tensor's columns are not whole pieces of 16 bytes.
    """
    PER_LANE: tl.constexpr = HEIGHT // WORD_ROWS
    k = c0 + tl.arange(0, COLUMNS)[:, None]
    w = row // WORD_ROWS + tl.arange(0, PER_LANE * LANES)[None, :]
    word = tl.reshape(tl.permute(word, (2, 1, 0)), (COLUMNS, PER_LANE * LANES))
    if GROUPED:
        base = data + before.to(tl.int64) * (columns * (ROWS // WORD_ROWS))
        tl.store(base + k.to(tl.int64) * (tiles * (ROWS // WORD_ROWS)) + w, word, k < columns)
    elif WORDS:
        pitch = tl.multiple_of(rows // WORD_ROWS, 4)
        tl.store(data + k.to(tl.int64) * pitch + w, word, (k < columns) & (w < pitch))
    else:
        for byte in tl.static_range(4):
            m = w * 4 + byte
            tl.store(data + k.to(tl.int64) * rows + m, (word >> (8 * byte)).to(tl.uint8), (k < columns) & (m < rows))


@triton.jit
def zero_tile_columns(data, tile, c0, columns, WORD_ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zero a whole tile's words of a transposed plane, in columns c0..c0 + COLUMNS."""
    k = c0 + tl.arange(0, COLUMNS)[:, None]
    w = tl.arange(0, ROWS // WORD_ROWS)[None, :]
    place = data + (tile.to(tl.int64) * columns + k) * (ROWS // WORD_ROWS) + w
    tl.store(place, tl.zeros((COLUMNS, ROWS // WORD_ROWS), tl.int32), k < columns)
