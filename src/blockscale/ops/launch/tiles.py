"""Starts the kernels that hold tiles of 128 rows: FP8 with float32 scales, per block and per tensor or group, and MXFP4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockscale.formats import MXFP4, FP8Block, FP8Delayed, FP8Tensor
from blockscale.kernels.quantize_fp8_block import quantize_fp8_block, quantize_fp8_rows
from blockscale.kernels.quantize_fp8_tensor import amax_of_groups, quantize_fp8_tensor
from blockscale.kernels.quantize_mxfp4 import quantize_mxfp4
from blockscale.layouts import ceil_div, round_up
from blockscale.ops.launch.call import Call, words
from blockscale.ops.launch.start import Candidate, choose, start

#: of each kernel, the fastest first as reckoned from registers and instructions. 168 registers: three programs of four warps
#: share a multiprocessor
BLOCK = (Candidate({"BAND": 4}, 4, 168), Candidate({"BAND": 4}, 4), Candidate({"BAND": 4}, 8))
ROWS = (Candidate({"HEIGHT": 32}, 1), Candidate({"HEIGHT": 32}, 4))
TENSOR = tuple(Candidate({"COLUMNS": 64, "BAND": 4}, 2, limit) for limit in (96, 128, None))
AMAX = (Candidate({"HEIGHT": 32, "COLUMNS": 256}, 4), Candidate({"HEIGHT": 32, "COLUMNS": 128}, 4))
FOUR = (Candidate({"COLUMNS": 64, "BAND": 4}, 2), Candidate({"COLUMNS": 64, "BAND": 4}, 4))


def fp8_block(call: Call, fmt: FP8Block) -> None:
    """One scale per 1x128 or 128x128: one launch."""
    K = call.x.shape[1]
    if fmt.is_2d or call.columnwise:
        data, whole = _column_words(call)
        flags = {**call.flags, "SQUARE": fmt.is_2d, **_element(fmt), "WORDS": whole}
        args = (*call.extent, call.tiles, fmt.eps, *call.row[:2], data, call.column[1])
        candidate = choose(quantize_fp8_block, BLOCK, args, flags)
        start(quantize_fp8_block, _programs(call, K, 128, candidate), args, flags, candidate)
        return
    flags = {"GROUPED": call.grouped, **_element(fmt)}
    args = (*call.extent, fmt.eps, *call.row[:2])
    candidate = choose(quantize_fp8_rows, ROWS, args, flags)
    height = candidate.constants["HEIGHT"]
    start(quantize_fp8_rows, ceil_div(call.x.shape[0], height) * ceil_div(K, 128), args, flags, candidate)


def fp8_tensor(call: Call, fmt: FP8Tensor | FP8Delayed, amax: Tensor | None, scale: Tensor | None) -> None:
    """One scale a tensor or group, from its own amax (two launches), a given amax or a given scale (one).

    Args:
        amax: float32 [G] or [2, G] of FP8Tensor. scale: float32 [G] of FP8Delayed.
    """
    kept = [plane[2] for plane, asked in ((call.row, call.rowwise), (call.column, call.columnwise)) if asked]
    if scale is not None:
        for t in kept:
            t.zero_()
        given, pitch = scale.contiguous(), 0
        bits = [t if t is call.x else t.view(torch.int32) for t in (call.row[2], call.column[2])]
    else:
        bits = [call.row[2], call.column[2]]
        given = _amax(call, kept[0]) if amax is None else amax.contiguous()
        pitch = call.groups if given.numel() > call.groups else 0
    data, whole = _column_words(call)
    flags = {**call.flags, "DELAYED": scale is not None, **_element(fmt), "WORDS": whole}
    eps = getattr(fmt, "eps", 0.0)
    args = (*call.extent, call.tiles, eps, given, pitch, *call.row[:2], bits[0], data, call.column[1], bits[1])
    candidate = choose(quantize_fp8_tensor, TENSOR, args, flags)
    programs = _programs(call, call.x.shape[1], candidate.constants["COLUMNS"], candidate)
    start(quantize_fp8_tensor, programs, args, flags, candidate)


def mxfp4(call: Call, fmt: MXFP4) -> None:
    """One launch."""
    flags = {
        **call.flags,
        "SQUARE": fmt.is_2d,
        "FLOOR": fmt.scale_rounding == "floor",
        "IGNORE_NAN": fmt.nan == "ignore",
        "LAYOUT": call.layout,
    }
    row = words(call.row[0]) if call.rowwise else call.x
    column = words(call.column[0]) if call.columnwise else call.x
    args = (*call.extent, call.tiles, row, call.row[1], column, call.column[1])
    candidate = choose(quantize_mxfp4, FOUR, args, flags)
    programs = _programs(call, round_up(call.x.shape[1], 128), candidate.constants["COLUMNS"], candidate)
    start(quantize_mxfp4, programs, args, flags, candidate)


def _programs(call: Call, columns: int, width: int, candidate: Candidate) -> int:
    # at least one: a tensor of no rows has a scale too
    return round_up(max(call.slots(128), 1), candidate.constants["BAND"]) * ceil_div(columns, width)


def _element(fmt: FP8Block | FP8Tensor | FP8Delayed) -> dict[str, Any]:
    return {"E5M2": fmt.element == "e5m2", "POWER_OF_TWO": getattr(fmt, "power_of_two", False)}


def _column_words(call: Call) -> tuple[Tensor, bool]:
    """The columnwise data as the kernel writes them, and whether in words (see ``kernels.tile.store_columns``)."""
    whole = call.grouped or call.x.shape[0] % 16 == 0
    return (words(call.column[0]) if call.columnwise and whole else call.column[0]), whole


def _amax(call: Call, amax: Tensor) -> Tensor:
    """Write each group's largest magnitude to ``amax`` float32 (G,)."""
    amax.zero_()
    flags = {"GROUPED": call.grouped, "CHUNKS": call.flags["CHUNKS"]}
    args = (*call.extent, amax.view(torch.int32))
    candidate = choose(amax_of_groups, AMAX, args, flags)
    constants = candidate.constants
    programs = call.slots(constants["HEIGHT"]) * ceil_div(call.x.shape[1], constants["COLUMNS"])
    start(amax_of_groups, programs, args, flags, candidate)
    return amax
