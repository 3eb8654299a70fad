"""Values of a quantized plane: exact operands for a matrix product, and the dequantized tensor.

Legend: P slots of the frame, T tiles of 128 slots, K columns, G groups.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from blockscale.formats import NVFP4, Format, FP8Block, decode, e8m0_decode, unpack_e2m1
from blockscale.formats.scales import nvfp4_decode_scale
from blockscale.layouts import TILE, TileMap
from blockscale.tensors.arrange import Logical


def element_values(plane: Logical, fmt: Format) -> Tensor:
    """float32 element values, no scale applied: rowwise (P, K'), columnwise (P, K) or transposed (T, K, 128)."""
    codes = unpack_e2m1(plane.data) if fmt.packed else plane.data
    return decode(codes.contiguous(), fmt.element_name)


def block_scales(plane: Logical, fmt: Format) -> Tensor:
    """float32 block scales in the shape of ``plane.scale`` (FP8 per tensor: not called)."""
    if fmt.scale_type == "e8m0":
        return e8m0_decode(plane.scale)
    return decode(plane.scale.contiguous(), "e4m3") if fmt.scale_type == "e4m3" else plane.scale


def global_scale(plane: Logical, fmt: Format) -> Tensor | None:
    """float32: what remains to multiply after the block scales; None for formats without one.

    (G,); row-scaled: (P,) of a rowwise plane, (G, K) of a columnwise one.
    """
    if isinstance(fmt, NVFP4):
        assert plane.amax is not None
        return nvfp4_decode_scale(plane.amax, fmt.range)
    return plane.scale if fmt.per_tensor else None


def values(plane: Logical, fmt: Format, which: str, tiles: TileMap, K: int, *, with_global: bool) -> Tensor:
    """float32 (P, K) of a plane in its frame; empty slots are zero, whatever the buffers hold there.

    Args:
        with_global: multiply by the global scale too, in the order that dequantization is defined. Without it the
            result is the operand of a matrix product, whose accumulator is multiplied by alpha afterwards.
    """
    q = element_values(plane, fmt)
    T, P = tiles.num_tiles, tiles.num_tiles * TILE
    if T == 0:
        return q.new_zeros((0, K))
    if fmt.per_tensor:
        x = q if which == "rowwise" else q.mT.reshape(P, K)
        if with_global:
            x = x * F.pad(plane.scale, (0, 1))[tiles.group].repeat_interleave(TILE)[:, None]
    else:
        s = block_scales(plane, fmt)
        if with_global and (total := global_scale(plane, fmt)) is not None:
            s = s * _of_blocks(total, fmt, which, tiles, s)
        x = _times_blocks(q, s, fmt, which, T, K)
    if fmt.packed and which == "columnwise" and not getattr(fmt, "hadamard", False):
        # elsewhere absent elements are zero already (a partial transform block is wholly data)
        x = x.masked_fill((tiles.source < 0)[:, None], 0)
    return x.contiguous()


def _of_blocks(total: Tensor, fmt: Format, which: str, tiles: TileMap, s: Tensor) -> Tensor:
    """The global scale of each block, so that it broadcasts to the block scales ``s``."""
    if fmt.scales_rows and which == "rowwise":
        return total[:, None]
    if fmt.scales_rows:
        return F.pad(total, (0, 0, 0, 1))[tiles.group][..., None]
    per_tile = F.pad(total, (0, 1))[tiles.group]
    return per_tile.repeat_interleave(s.shape[0] // tiles.num_tiles).view(-1, *(1,) * (s.dim() - 1))


def _times_blocks(q: Tensor, s: Tensor, fmt: Format, which: str, T: int, K: int) -> Tensor:
    v = fmt.block_length
    if which == "rowwise":
        if isinstance(fmt, FP8Block) and fmt.is_2d:
            s = s.repeat_interleave(TILE, 0)
        return q[:, :K] * s.repeat_interleave(v, 1)[:, :K]
    if not fmt.transposed:
        return q * s.repeat_interleave(v, 0)
    if isinstance(fmt, FP8Block):
        if fmt.is_2d:
            s = s.repeat_interleave(TILE, 1)[:, :K]
        return (q * s[..., None]).mT.reshape(T * TILE, K)
    return (q * s.repeat_interleave(v, 2)).mT.reshape(T * TILE, K)
