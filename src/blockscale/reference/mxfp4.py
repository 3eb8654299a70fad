"""The meaning of MXFP4 quantization, in plain torch: MXFP8's rule with E2M1 elements, stored as NVFP4 stores them.

Legend: P slots (rows of the frame), T tiles of 128 slots, K columns, B blocks along the contraction, v = 32 elements of a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blockscale.formats import MXFP4, e8m0_inverse, encode, pack_e2m1
from blockscale.layouts import TILE, TileMap, ceil_div
from blockscale.reference.mxfp8 import BLOCK, scale_code
from blockscale.reference.planes import Planes, block_amax
from blockscale.tensors.arrange import Logical


def quantize_planes(frame_PK: Tensor, tiles: TileMap, fmt: MXFP4, rowwise: bool, columnwise: bool) -> Planes:
    """Both planes of a float32 frame (P, K)."""
    T, (P, K) = tiles.num_tiles, frame_PK.shape
    x_PBv = F.pad(frame_PK, (0, -K % BLOCK)).view(P, ceil_div(K, BLOCK), BLOCK)
    B, per_tile = x_PBv.shape[1], TILE // BLOCK
    live_P = tiles.source >= 0
    square = None
    if fmt.is_2d:
        amax_PB = block_amax(x_PBv.abs(), fmt.nan)
        square = scale_code(block_amax(amax_PB.view(P // BLOCK, BLOCK, B).mT, fmt.nan), fmt)
    row, column = None, None
    if rowwise:
        scale = scale_code(block_amax(x_PBv.abs(), fmt.nan), fmt) if square is None else square.repeat_interleave(BLOCK, 0)
        present = (torch.arange(B * BLOCK, device=frame_PK.device) < K) & live_P[:, None]
        row = Logical(_elements(x_PBv, scale, present.view(x_PBv.shape)), scale)
    if columnwise:
        x_TKBv = frame_PK.view(T, TILE, K).mT.reshape(T, K, per_tile, BLOCK)
        if square is None:
            scale = scale_code(block_amax(x_TKBv.abs(), fmt.nan), fmt)
        else:
            scale = square.view(T, per_tile, B).mT.repeat_interleave(BLOCK, 1)[:, :K]
        column = Logical(_elements(x_TKBv, scale, live_P.view(T, 1, per_tile, BLOCK)), scale)
    return row, column


def _elements(x: Tensor, scale: Tensor, present: Tensor) -> Tensor:
    """Packed codes of (..., B, v) -> (..., B * v / 2); absent elements are 0, in a NaN block too."""
    codes = encode(x * e8m0_inverse(scale)[..., None], "e2m1").masked_fill_(~present, 0)
    return pack_e2m1(codes.flatten(-2))
