"""Quantization on the GPU: outputs, the table of tiles, and the kernel of the format.

Legend: M rows (capacity), K columns, G groups, T tiles of 128 rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockscale.formats import MXFP4, MXFP8, NVFP4, Format, FP8Block, FP8Delayed, FP8Tensor
from blockscale.kernels.quantize_mxfp8 import quantize_mxfp8
from blockscale.kernels.quantize_nvfp4 import quantize_nvfp4
from blockscale.kernels.scale_nvfp4 import group_amax, multipliers
from blockscale.layouts import ceil_div, round_up, tile_capacity
from blockscale.ops.device_status import words
from blockscale.ops.launch import tiles
from blockscale.ops.launch.call import Call, chunks, empty_planes
from blockscale.ops.launch.start import Candidate, choose, start

#: float32 a plane and group in the table of multipliers
MULTIPLIERS = 256
MULTIPLIERS_CANDIDATE = Candidate({}, 4)


def covers(fmt: Format) -> bool:
    """Whether there is a kernel for the format."""
    if isinstance(fmt, NVFP4):
        return not (fmt.row_scaled or fmt.four_over_six)
    return isinstance(fmt, (MXFP8, MXFP4, FP8Tensor, FP8Delayed, FP8Block))


def kernel(fmt: Format) -> str:
    """The module of the format's kernel."""
    names = {FP8Tensor: "fp8_tensor", FP8Delayed: "fp8_tensor", FP8Block: "fp8_block"}
    return f"blockscale.kernels.quantize_{names.get(type(fmt), fmt.kind)}"


def about(fmt: Format) -> str:
    """How a call runs, for ``explain``."""
    if isinstance(fmt, NVFP4):
        return (
            "maxima (unless given), multipliers and codes, a launch each for all groups; "
            f"besides outputs {4 * 2 * (MULTIPLIERS + 1)} bytes a group from torch's allocator"
        )
    if isinstance(fmt, FP8Tensor):
        return "maxima (unless given) and codes, a launch each for all groups"
    return "one launch for all groups"


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
    scale: Tensor | None = None,
) -> list[Tensor]:
    """Planes of x (M, K): data, scale, amax of the rowwise plane, then of the columnwise one. As ``kernels.cpu.quantize``.

    ``scale``: float32 (G,), of ``FP8Delayed``.
    """
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
    elif isinstance(fmt, MXFP4):
        tiles.mxfp4(call, fmt)
    elif isinstance(fmt, FP8Block):
        tiles.fp8_block(call, fmt)
    elif isinstance(fmt, (FP8Tensor, FP8Delayed)):
        tiles.fp8_tensor(call, fmt, amax, scale)
    else:
        assert isinstance(fmt, NVFP4)
        _nvfp4(call, fmt, amax, rng)
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
    programs = round_up(call.slots(32), 4) * (round_up(K, 128) // candidate.constants["COLUMNS"])
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
    programs = round_up(call.slots(height), 128 // height) * (round_up(K, 128) // constants["COLUMNS"])
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
    programs = call.slots(16 * constants["LANES"]) * ceil_div(K, constants["COLUMNS"])
    start(group_amax, programs, args, flags, candidate)
    return amax.view(torch.float32)
