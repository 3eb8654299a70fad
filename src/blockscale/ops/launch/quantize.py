"""Quantization on the GPU: outputs, the table of tiles, and the kernel of the format.

Legend: M rows (capacity), K columns, G groups, T tiles of 128 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.formats import MXFP8, NVFP4, Format
from blockscale.kernels.quantize_mxfp8 import quantize_mxfp8
from blockscale.kernels.quantize_nvfp4 import quantize_nvfp4
from blockscale.kernels.scale_nvfp4 import group_amax, multipliers
from blockscale.layouts import PLANES, ceil_div, round_up, tile_capacity
from blockscale.ops.device_status import words
from blockscale.ops.launch.start import Candidate, choose, start
from blockscale.tensors.shapes import amax_shape, grouped_plane_shapes, plane_shapes, scale_dtype

#: float32 a plane and group in the table of multipliers
MULTIPLIERS = 256
MULTIPLIERS_CANDIDATE = Candidate({}, 4)


def covers(fmt: Format) -> bool:
    """Whether there is a kernel for the format."""
    return isinstance(fmt, MXFP8) or (isinstance(fmt, NVFP4) and not (fmt.row_scaled or fmt.four_over_six))


def about(fmt: Format) -> str:
    """How a call runs, for ``explain``."""
    if isinstance(fmt, NVFP4):
        return (
            "maxima (unless given), multipliers and codes, a launch each for all groups; "
            f"besides outputs {4 * 2 * (MULTIPLIERS + 1)} bytes a group from torch's allocator"
        )
    return "one launch for all groups"


def slots(call: Call, rows: int) -> int:
    """Pieces of ``rows`` rows that the kernels cut a tensor into, see ``kernels.extent``."""
    return ceil_div(call.x.shape[0], rows) + call.groups if call.grouped else 128 // rows * call.tiles


def chunks(groups: int) -> int:
    """The kernels' CHUNKS: how often 32 groups are looked at, in powers of two; 0 for many."""
    n = 1 << (ceil_div(max(groups, 1), 32) - 1).bit_length()
    return n if n <= 8 else 0


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
    M = x.shape[0]
    if M >= 2**31:
        raise ValueError(f"x has {M} rows; the GPU kernels count rows in 32 bits: fewer than {2**31} are needed")
    G = None if offsets is None else offsets.numel() - 1
    tensors = empty_planes(x, fmt, G, rowwise, columnwise, layout) if out is None else out
    if G == 0:  # no group, no tile: nothing is live
        for t in tensors:
            t.zero_()
        return tensors
    planes = iter(tensors)
    row, column = ([next(planes) for _ in range(3)] if asked else [x, x, x] for asked in (rowwise, columnwise))
    T = ceil_div(M, 128) if G is None else tile_capacity(M, G)
    where = x if offsets is None else offsets.contiguous()
    call = Call(x, where, T, 1 if G is None else G, rowwise, columnwise, layout, row, column, G is not None)
    if isinstance(fmt, MXFP8):
        _mxfp8(call, fmt)
    else:
        assert isinstance(fmt, NVFP4)
        _nvfp4(call, fmt, amax, rng)
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


def mxfp8_candidates(rowwise: bool, columnwise: bool) -> tuple[Candidate, ...]:
    """Tiles of ``quantize_mxfp8``, the fastest first."""
    return _BOTH if rowwise and columnwise else _ONE


def nvfp4_candidates() -> tuple[Candidate, ...]:
    """Tiles of ``quantize_nvfp4``, the fastest first."""
    return _NVFP4


def amax_candidates() -> tuple[Candidate, ...]:
    """Tiles of ``group_amax``, the fastest first."""
    return _AMAX


#: two planes: what a block of 32 rows needs of registers lets 10 programs of 2 warps share a multiprocessor
_BOTH = tuple(Candidate({"COLUMNS": 128}, 2, limit) for limit in (96, 104, 112, 128)) + (Candidate({"COLUMNS": 128}, 4),)
#: one plane: a warp never waits for another
_ONE = (Candidate({"COLUMNS": 128}, 1), Candidate({"COLUMNS": 128}, 4))


@dataclass(frozen=True)
class Call:
    """What the kernels of all formats take. ``row``, ``column``: data, scale, amax of a plane; x where it is not asked."""

    x: Tensor
    offsets: Tensor
    tiles: int
    groups: int
    rowwise: bool
    columnwise: bool
    layout: str
    row: list[Tensor]
    column: list[Tensor]
    grouped: bool


def _mxfp8(call: Call, fmt: MXFP8) -> None:
    M, K = call.x.shape
    flags = {
        "GROUPED": call.grouped,
        "CHUNKS": chunks(call.groups),
        "ROW": call.rowwise,
        "COL": call.columnwise,
        "SQUARE": fmt.is_2d,
        "E5M2": fmt.element == "e5m2",
        "FLOOR": fmt.scale_rounding == "floor",
        "IGNORE_NAN": fmt.nan == "ignore",
        "LAYOUT": call.layout,
    }
    args = (
        call.x,
        call.x.stride(0),
        call.offsets,
        call.groups,
        M,
        K,
        call.tiles,
        *call.row[:2],
        *call.column[:2],
        words(call.x.device),
    )
    candidate = choose(quantize_mxfp8, mxfp8_candidates(call.rowwise, call.columnwise), args, flags)
    programs = round_up(slots(call, 32), 4) * (round_up(K, 128) // candidate.constants["COLUMNS"])
    start(quantize_mxfp8, programs, args, flags, candidate)


_NVFP4 = (
    Candidate({"COLUMNS": 64, "LANES": 4}, 1),
    Candidate({"COLUMNS": 64, "LANES": 2}, 1),
    Candidate({"COLUMNS": 64, "LANES": 4}, 4),
    Candidate({"COLUMNS": 64, "LANES": 4}, 8),
)
_AMAX = (Candidate({"COLUMNS": 256, "LANES": 4}, 4), Candidate({"COLUMNS": 64, "LANES": 4}, 4))


def _nvfp4(call: Call, fmt: NVFP4, amax: Tensor | None, rng: Tensor | None) -> None:
    (M, K), x, G = call.x.shape, call.x, call.groups
    amax = _amax(call, fmt.hadamard) if amax is None else amax.reshape(-1, G).expand(2, G).contiguous()
    times = x.new_empty((2, G, MULTIPLIERS), dtype=torch.float32)
    asked = {"ROW": call.rowwise, "COL": call.columnwise}
    start(multipliers, 2 * G, (amax, times, call.row[2], call.column[2], G), asked, MULTIPLIERS_CANDIDATE)
    flags = {
        "GROUPED": call.grouped,
        "CHUNKS": chunks(call.groups),
        **asked,
        "SQUARE": fmt.is_2d,
        "HADAMARD": fmt.hadamard,
        "STOCHASTIC": fmt.stochastic,
        "IGNORE_NAN": fmt.nan == "ignore",
        "LAYOUT": call.layout,
    }
    data = [t if t is x else t.flatten().view(torch.int32) for t in (call.row[0], call.column[0])]
    rng = times if rng is None else rng
    args = (
        x,
        x.stride(0),
        call.offsets,
        G,
        M,
        K,
        call.tiles,
        times,
        rng,
        data[0],
        call.row[1],
        data[1],
        call.column[1],
        words(x.device),
    )
    candidate = choose(quantize_nvfp4, _NVFP4, args, flags)
    constants = candidate.constants
    height = 16 * constants["LANES"]
    programs = round_up(slots(call, height), 128 // height) * (round_up(K, 128) // constants["COLUMNS"])
    start(quantize_nvfp4, programs, args, flags, candidate)


def _amax(call: Call, hadamard: bool) -> Tensor:
    """float32 (2, G): the largest magnitudes of each group, rowwise and (after the transform) columnwise."""
    M, K = call.x.shape
    amax = call.x.new_zeros((2, call.groups), dtype=torch.int32)
    flags = {"GROUPED": call.grouped, "CHUNKS": chunks(call.groups), "ROW": call.rowwise, "COL": call.columnwise}
    flags["HADAMARD"] = hadamard
    args = (call.x, call.x.stride(0), call.offsets, call.groups, M, K, amax)
    candidate = choose(group_amax, _AMAX, args, flags)
    constants = candidate.constants
    programs = slots(call, 16 * constants["LANES"]) * ceil_div(K, constants["COLUMNS"])
    start(group_amax, programs, args, flags, candidate)
    return amax.view(torch.float32)
