"""The meaning of MXFP8 quantization, in plain torch.

Legend: P slots (rows of the frame), K columns, B blocks along K, v = 32 elements of a block.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from blockscale.formats import MXFP4, MXFP8, e8m0_ceil, e8m0_floor, e8m0_inverse, element, encode
from blockscale.formats.scales import reciprocal_f32
from blockscale.layouts import ceil_div
from blockscale.reference.planes import Planes, block_amax
from blockscale.tensors.arrange import Logical

BLOCK = 32


def scale_code(amax: Tensor, fmt: MXFP8 | MXFP4) -> Tensor:
    """E8M0 code of a block from its float32 amax."""
    kind = element(fmt.element)
    if fmt.scale_rounding == "floor":
        return e8m0_floor(amax, kind.emax)
    return e8m0_ceil(amax * reciprocal_f32(kind.max))


def quantize_planes(frame_PK: Tensor, fmt: MXFP8, rowwise: bool, columnwise: bool) -> Planes:
    """Both planes of a float32 frame (P, K) in which every group starts on a multiple of 128 slots."""
    P, K = frame_PK.shape
    blocks_PBv = F.pad(frame_PK, (0, -K % BLOCK)).view(P, ceil_div(K, BLOCK), BLOCK)
    blocks_PvK = frame_PK.view(P // BLOCK, BLOCK, K)
    row, column = None, None
    if fmt.is_2d:
        amax_PB = block_amax(blocks_PBv.abs(), fmt.nan)
        square = scale_code(block_amax(amax_PB.view(P // BLOCK, BLOCK, blocks_PBv.shape[1]).mT, fmt.nan), fmt)
        scale_PB = square.repeat_interleave(BLOCK, 0)
        scale_PK = square.repeat_interleave(BLOCK, 1)[:, :K]
    else:
        scale_PB = scale_code(block_amax(blocks_PBv.abs(), fmt.nan), fmt) if rowwise else frame_PK
        scale_PK = scale_code(block_amax(blocks_PvK.abs().mT, fmt.nan), fmt) if columnwise else frame_PK
    if rowwise:
        codes = encode(blocks_PBv * e8m0_inverse(scale_PB)[..., None], fmt.element)
        row = Logical(codes.flatten(1)[:, :K], scale_PB)
    if columnwise:
        codes = encode(blocks_PvK * e8m0_inverse(scale_PK)[:, None], fmt.element)
        column = Logical(codes.view(P, K), scale_PK)
    return row, column
