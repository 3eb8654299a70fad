"""Quantization on the GPU: outputs, the table of tiles, and the kernel of the format.

Legend: M rows (capacity), K columns, G groups, T tiles of 128 rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockscale.formats import MXFP8, Format
from blockscale.kernels.quantize_mxfp8 import quantize_mxfp8
from blockscale.kernels.tiles import tile_table
from blockscale.layouts import PLANES, ceil_div, round_up, tile_capacity
from blockscale.ops.launch.start import Candidate, choose, start
from blockscale.tensors.shapes import amax_shape, grouped_plane_shapes, plane_shapes, scale_dtype

#: 32-bit entries of the table of tiles
TABLE_FIELDS = 8
_TABLE = Candidate({}, 4)


def covers(fmt: Format) -> bool:
    """Whether there is a kernel for the format."""
    return isinstance(fmt, MXFP8)


def workspace_bytes(fmt: Format, capacity: int, num_groups: int | None) -> int:
    """Bytes that a call takes besides its outputs: the table of tiles of a grouped tensor."""
    return 0 if num_groups is None else 4 * TABLE_FIELDS * tile_capacity(capacity, num_groups)


def table_of_tiles(offsets: Tensor, capacity: int) -> Tensor:
    """int32 (T, 8), see ``kernels.tiles``; made on the device, without a sync."""
    G = offsets.numel() - 1
    T = tile_capacity(capacity, G)
    table = torch.empty((T, TABLE_FIELDS), dtype=torch.int32, device=offsets.device)
    flags = {"GROUPS": min(64, max(16, 1 << (G - 1).bit_length()))}
    start(tile_table, ceil_div(T, 128), (offsets.contiguous(), table, G, capacity, T), flags, _TABLE)
    return table


def quantize(
    x: Tensor,
    offsets: Tensor | None,
    fmt: Format,
    rowwise: bool,
    columnwise: bool,
    layout: str,
    amax: Tensor | None,
    rng: Tensor | None,
    out: list[Tensor] | None = None,
) -> list[Tensor]:
    """Planes of x (M, K): data, scale, amax of the rowwise plane, then of the columnwise one. As ``kernels.cpu.quantize``."""
    if x.stride(1) != 1:
        x = x.contiguous()
    M, K = x.shape
    G = None if offsets is None else offsets.numel() - 1
    tensors = empty_planes(x, fmt, G, rowwise, columnwise, layout) if out is None else out
    if G == 0:  # no group, no tile: nothing is live
        for t in tensors:
            t.zero_()
        return tensors
    planes = iter(tensors)
    row, column = ([next(planes) for _ in range(3)] if asked else [x, x, x] for asked in (rowwise, columnwise))
    T = ceil_div(M, 128) if G is None else tile_capacity(M, G)
    table = x if offsets is None else table_of_tiles(offsets, M)
    assert isinstance(fmt, MXFP8)
    _mxfp8(x, table, T, fmt, rowwise, columnwise, layout, row, column, G is not None)
    return tensors


def empty_planes(x: Tensor, fmt: Format, G: int | None, rowwise: bool, columnwise: bool, layout: str) -> list[Tensor]:
    """Tensors to write the planes to, in the operators' order; G None: a plain tensor."""
    M, K = x.shape
    tensors = []
    for name, asked in zip(PLANES, (rowwise, columnwise), strict=True):
        if asked:
            shapes = plane_shapes(fmt, M, K, name, layout) if G is None else grouped_plane_shapes(fmt, M, K, G, name, layout)
            tensors.append(x.new_empty(shapes[0], dtype=torch.uint8))
            tensors.append(x.new_empty(shapes[1], dtype=scale_dtype(fmt)))
            tensors.append(x.new_empty(amax_shape(fmt, name, M, K, G), dtype=torch.float32))
    return tensors


#: two planes: what a block of 32 rows needs of registers lets 10 programs of 2 warps share a multiprocessor
_BOTH = tuple(Candidate({"COLUMNS": 128}, 2, limit) for limit in (96, 104, 112, 128)) + (Candidate({"COLUMNS": 128}, 4),)
#: one plane: a warp never waits for another
_ONE = (Candidate({"COLUMNS": 128}, 1), Candidate({"COLUMNS": 128}, 4))


def _mxfp8(
    x: Tensor, table: Tensor, T: int, fmt: MXFP8, rowwise: bool, columnwise: bool, layout: str, row: list[Tensor],
    column: list[Tensor], grouped: bool,
) -> None:  # fmt: skip
    M, K = x.shape
    flags = {
        "GROUPED": grouped,
        "ROW": rowwise,
        "COL": columnwise,
        "SQUARE": fmt.is_2d,
        "E5M2": fmt.element == "e5m2",
        "FLOOR": fmt.scale_rounding == "floor",
        "IGNORE_NAN": fmt.nan == "ignore",
        "LAYOUT": layout,
    }
    args = (x, x.stride(0), table, M, K, T, row[0], row[1], column[0], column[1])
    candidate = choose(quantize_mxfp8, _BOTH if rowwise and columnwise else _ONE, args, flags)
    programs = 4 * T * (round_up(K, 128) // candidate.constants["COLUMNS"])
    start(quantize_mxfp8, programs, args, flags, candidate)
