"""Sums of rows and of the rows of groups, without atomics: partial sums in a workspace, then one sum of those.

Deterministic: a partial sum belongs to 32 rows of one group (or to the columns of one program), and partial sums are added in
an order that their number alone decides. So a group's sum depends on no other group, and a row's on no other row.

A sum of n terms differs from the exact one by at most (t + p / 32 + 31) 2^-24 times the sum of their magnitudes: t terms in a
partial sum (32 rows, or the columns of a program), p partial sums in 32 lanes. The reference adds in another order.
"""

import triton
import triton.language as tl

from blockscale.kernels.activation import live_rows
from blockscale.kernels.casts import to_float32
from blockscale.kernels.extent import find_rows

#: rows of a partial sum
ROWS = tl.constexpr(32)


@triton.jit
def row_sums(parts, offsets, groups, rows, count, out, LIVE: tl.constexpr, LANES: tl.constexpr, HEIGHT: tl.constexpr):
    """out (rows): sums of the ``count`` lines of ``parts`` (count, rows); 0 past the live rows. Grid: ceil(rows / HEIGHT)."""
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)[None, :]
    live = live_rows(offsets, groups, rows, LIVE)
    lane = tl.arange(0, LANES)[:, None]
    total = tl.zeros((LANES, HEIGHT), tl.float32)
    for start in tl.range(0, count, LANES):
        line = start + lane
        total += tl.load(parts + line.to(tl.int64) * rows + row, (line < count) & (row < live), 0.0)
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    tl.store(out + row, tl.sum(total, 0), row < rows)


@triton.jit
def column_parts(
    x,
    stride,
    factor,
    offsets,
    groups,
    rows,
    columns,
    parts,
    SCALED: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums of the rows of a slot of 32, times their ``factor`` if SCALED: ``parts`` float32 (slots, columns).

    Grid: slots * ceil(columns / COLUMNS). Slots that idle write nothing.
    """
    column_programs = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    slot = program // column_programs
    c = program % column_programs * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    _, first, left, _, _, _, _, _ = find_rows(slot, offsets, groups, rows, ROWS, CHUNKS)
    if left <= 0:
        return
    r = tl.arange(0, ROWS)[:, None]
    start = first.to(tl.int64)
    value = to_float32(tl.load(x + start * stride + (r * stride + c), (r < left) & (c < columns), 0.0))
    if SCALED:
        value = value * tl.load(factor + start + r, r < left, 0.0)
    store_column_parts(parts, value, slot, tl.ravel(c), columns)


@triton.jit
def store_column_parts(parts, value, slot, column, columns):
    """The sums of the columns of ``value``, which are ``column`` of ``parts`` (slots, columns), those that it has."""
    tl.store(parts + slot.to(tl.int64) * columns + column, tl.sum(value, 0), column < columns)


@triton.jit
def group_sums(parts, offsets, groups, rows, columns, out, LANES: tl.constexpr, COLUMNS: tl.constexpr):
    """out (groups, columns): for each group the sum of its slots of ``parts`` (slots, columns); 0 without rows.

    Grid: groups * ceil(columns / COLUMNS). Slots: see ``extent``.
    """
    column_programs = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    g = program // column_programs
    c = program % column_programs * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.minimum(tl.maximum(tl.load(offsets + g), 0), rows).to(tl.int32)
    end = tl.minimum(tl.maximum(tl.load(offsets + g + 1), 0), rows).to(tl.int32)
    count = tl.cdiv(tl.maximum(end - begin, 0), ROWS)
    lane = tl.arange(0, LANES)[:, None]
    source = parts + (begin // ROWS + g).to(tl.int64) * columns + c[None, :]
    total = tl.zeros((LANES, COLUMNS), tl.float32)
    for start in tl.range(0, count, LANES):
        line = start + lane
        total += tl.load(source + line.to(tl.int64) * columns, (line < count) & (c[None, :] < columns), 0.0)
    tl.store(out + g.to(tl.int64) * columns + c, tl.sum(total, 0), c < columns)
