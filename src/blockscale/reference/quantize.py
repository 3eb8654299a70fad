"""The meaning of ``quantize`` and ``quantize_grouped``: planes of a tensor, plain or grouped, on any device.

A plain tensor is one group; only the arrangement at the end differs. Each group starts on a tile of 128 rows of a frame
(see ``layouts.TileMap``), so no block spans two groups, and rows outside every group are zero before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from blockscale.formats import MXFP4, MXFP8, NVFP4, Format, FP8Block, FP8Delayed, FP8Tensor, Hybrid
from blockscale.layouts import PLANES, TileMap
from blockscale.reference import fp8, mxfp4, mxfp8, nvfp4
from blockscale.reference.planes import Planes
from blockscale.tensors.arrange import Logical, place_amax, place_grouped, place_plain
from blockscale.tensors.decode import values


def quantize_frame(
    x: Tensor,
    tiles: TileMap,
    fmt: Format,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    rng: Tensor | None,
    scale: Tensor | None,
) -> Planes:
    """Quantize the live rows of ``x`` (capacity, K) in the asked planes, before arrangement."""
    frame_PK = tiles.to_frame(x).float()
    row_fmt, column_fmt = (fmt.of(which) for which in PLANES)
    if amax is not None and row_fmt.scales_rows:  # given for the one plane that is asked
        amax = tiles.to_frame(amax) if rowwise else amax.reshape(tiles.num_groups, x.shape[1])
    elif amax is not None:
        amax = amax.reshape(-1, tiles.num_groups).expand(2, tiles.num_groups)
    if not isinstance(fmt, Hybrid) and not fmt.from_row:
        return _planes(frame_PK, tiles, fmt, rowwise, columnwise, amax, rng, scale)
    row, column, source = None, None, frame_PK
    if rowwise or fmt.from_row:
        own = amax if rowwise or not row_fmt.scales_rows else None  # a row-scaled amax belongs to the plane that is asked
        row, _ = _planes(frame_PK, tiles, row_fmt, True, False, own, rng, scale)
        assert row is not None
        if columnwise and fmt.from_row:
            source = values(row, row_fmt, "rowwise", tiles, x.shape[1], with_global=True)
    if columnwise:
        _, column = _planes(source, tiles, column_fmt, False, True, amax, rng, scale)
    return row if rowwise else None, column


def _planes(
    frame_PK: Tensor,
    tiles: TileMap,
    fmt: Format,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    rng: Tensor | None,
    scale: Tensor | None,
) -> Planes:
    if isinstance(fmt, MXFP8):
        return mxfp8.quantize_planes(frame_PK, fmt, rowwise, columnwise)
    if isinstance(fmt, MXFP4):
        return mxfp4.quantize_planes(frame_PK, tiles, fmt, rowwise, columnwise)
    if isinstance(fmt, NVFP4):
        return nvfp4.quantize_planes(frame_PK, tiles, fmt, rowwise, columnwise, amax, rng)
    if isinstance(fmt, (FP8Tensor, FP8Delayed)):
        return fp8.quantize_tensor_planes(frame_PK, tiles, fmt, rowwise, columnwise, amax, scale)
    assert isinstance(fmt, FP8Block)
    return fp8.quantize_block_planes(frame_PK, tiles, fmt, rowwise, columnwise)


def quantize(
    x: Tensor,
    fmt: Format,
    rowwise: bool,
    columnwise: bool,
    layout: str,
    amax: Tensor | None,
    rng: Tensor | None,
    scale: Tensor | None = None,
) -> list[Tensor]:
    """Planes of a plain tensor (M, K): data, scale, amax of the rowwise plane, then of the columnwise one."""
    shape = (x.shape[0], x.shape[1])
    tiles = TileMap(torch.tensor([0, shape[0]], device=x.device), shape[0])
    planes = quantize_frame(x, tiles, fmt, rowwise, columnwise, amax, rng, scale)
    tensors = _collect(planes, lambda plane, which: place_plain(plane, fmt.of(which), which, layout, shape), fmt, tiles)
    return [t.flatten() if n % 3 == 2 else t for n, t in enumerate(tensors)]  # a plain tensor's amax has no group dimension


def quantize_grouped(
    x: Tensor,
    offsets: Tensor,
    fmt: Format,
    rowwise: bool,
    columnwise: bool,
    layout: str,
    amax: Tensor | None,
    rng: Tensor | None,
    scale: Tensor | None = None,
) -> list[Tensor]:
    """Planes of a grouped tensor (capacity, K), in the same order."""
    tiles = TileMap(offsets, x.shape[0])
    planes = quantize_frame(x, tiles, fmt, rowwise, columnwise, amax, rng, scale)
    return _collect(planes, lambda plane, which: place_grouped(plane, fmt.of(which), which, layout, tiles), fmt, tiles)


def _collect(planes: Planes, place: Callable[[Logical, str], tuple[Tensor, Tensor]], fmt: Format, tiles: TileMap) -> list[Tensor]:
    tensors: list[Tensor] = []
    for plane, which in zip(planes, PLANES, strict=True):
        if plane is not None:
            kept = place_amax(plane.amax, fmt.of(which), which, tiles)
            amax = plane.scale.new_empty(0, dtype=torch.float32) if kept is None else kept.clone()
            tensors += (*place(plane, which), amax)
    return tensors
