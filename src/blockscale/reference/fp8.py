"""The meaning of FP8 quantization with float32 scales (per tensor or group, per block), in plain torch.

Legend: P slots, T tiles of 128 slots, K columns, B blocks of 128 columns, G groups. The scale kept is the decode scale.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blockscale.formats import FP8Block, FP8Delayed, FP8Tensor, element, encode
from blockscale.formats.scales import FLT_MAX, divide
from blockscale.layouts import TILE, TileMap, ceil_div
from blockscale.reference.planes import Planes, block_amax, group_amax, of_tile
from blockscale.tensors.arrange import Logical


def scale_of(amax: Tensor, fmt: FP8Block | FP8Tensor) -> Tensor:
    """The multiplier that brings ``amax`` (float32, no NaN) to the largest code."""
    floor = amax.clamp(min=fmt.eps)
    scale = divide(element(fmt.element).max, floor).clamp_(max=FLT_MAX)
    scale.masked_fill_((floor == 0) | floor.isinf(), 1.0)
    if fmt.power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def quantize_tensor_planes(
    frame_PK: Tensor,
    tiles: TileMap,
    fmt: FP8Tensor | FP8Delayed,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    scale: Tensor | None,
) -> Planes:
    """One scale a group, from its amax, or (``FP8Delayed``) ``scale`` float32 (G,); ``amax`` float32 (2, G) when given."""
    T, K = tiles.num_tiles, frame_PK.shape[1]
    own = group_amax(frame_PK, tiles) if amax is None else None
    planes: list[Logical | None] = [None, None]
    for n, asked in enumerate((rowwise, columnwise)):
        if asked:
            amax_G = amax[n] if own is None and amax is not None else own
            assert amax_G is not None
            if isinstance(fmt, FP8Delayed):
                assert scale is not None
                scale_G = scale
            else:
                scale_G = scale_of(amax_G, fmt)
            scaled = frame_PK * of_tile(scale_G, tiles).repeat_interleave(TILE)[:, None]
            codes = encode(scaled, fmt.element)
            data = codes.view(T, TILE, K).mT if n else codes
            planes[n] = Logical(data, divide(1.0, scale_G), amax_G)
    return planes[0], planes[1]


def quantize_block_planes(frame_PK: Tensor, tiles: TileMap, fmt: FP8Block, rowwise: bool, columnwise: bool) -> Planes:
    """One scale per 1x128 or 128x128; scales that no live element has are 0."""
    T, (P, K) = tiles.num_tiles, frame_PK.shape
    B = ceil_div(K, TILE)
    blocks_PBv = F.pad(frame_PK, (0, -K % TILE)).view(P, B, TILE)
    used_T = tiles.group < tiles.num_groups
    row, column = None, None
    if fmt.is_2d:
        square = scale_of(block_amax(block_amax(blocks_PBv.abs(), "ignore").view(T, TILE, B).mT, "ignore"), fmt)
        scale_PB = square.repeat_interleave(TILE, 0)
        scale_TK = square.repeat_interleave(TILE, 1)[:, :K]
        kept = divide(1.0, square).masked_fill_(~used_T[:, None], 0)
    if rowwise:
        if not fmt.is_2d:
            scale_PB = scale_of(block_amax(blocks_PBv.abs(), "ignore"), fmt)
            kept = divide(1.0, scale_PB).masked_fill_((tiles.source < 0)[:, None], 0)
        codes = encode(blocks_PBv * scale_PB[..., None], fmt.element)
        row = Logical(codes.flatten(1)[:, :K], kept)
    if columnwise:
        blocks_TvK = frame_PK.view(T, TILE, K)
        if not fmt.is_2d:
            scale_TK = scale_of(block_amax(blocks_TvK.abs().mT, "ignore"), fmt)
            kept = divide(1.0, scale_TK).masked_fill_(~used_T[:, None], 0)
        codes = encode(blocks_TvK * scale_TK[:, None], fmt.element)
        column = Logical(codes.mT, kept.clone())
    return row, column
