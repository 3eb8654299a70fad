"""The meaning of NVFP4 quantization, in plain torch.

Works on rows of blocks: ``x_RBv`` (R rows, B blocks along the contraction, v = 16 elements); the columnwise plane hands
its transposed tiles in the same form, R = (T, K): T tiles of 128 slots, K columns. P slots, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blockscale.formats import NVFP4, decode, encode, pack_e2m1
from blockscale.formats.scales import FLT_MAX, divide, nvfp4_decode_scale, nvfp4_encode_scale, reciprocal_f32
from blockscale.layouts import TILE, TileMap, ceil_div
from blockscale.reference import four_over_six
from blockscale.reference.philox import philox
from blockscale.reference.planes import Planes, block_amax, column_amax, group_amax, of_tile
from blockscale.tensors.arrange import Logical

BLOCK = 16
HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def block_scale(amax_b: Tensor, s_enc: Tensor) -> Tensor:
    """E4M3 code of a block's scale from its amax and the (broadcast) S_enc; NaN -> 0x7F."""
    return encode((amax_b * (s_enc * reciprocal_f32(6.0))).clamp_(max=FLT_MAX), "e4m3")


def hadamard(x_RBv: Tensor) -> Tensor:
    """16-point random Hadamard transform of each block in the stated order, rounded to bfloat16, as float32."""
    v = x_RBv * torch.tensor(HADAMARD_SIGNS, dtype=torch.float32, device=x_RBv.device)
    for h in (1, 2, 4, 8):
        pairs = v.view(*v.shape[:-1], BLOCK // (2 * h), 2, h)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        v = torch.stack((low + high, low - high), dim=-2).view(v.shape)
    return (v / 4).to(torch.bfloat16).float()


def random_bits(rng: Tensor, j_B: Tensor, i_RB: Tensor, g_RB: Tensor, plane: int) -> Tensor:
    """int64 (R, B, 16) in 0..65535: one Philox call per block, element t takes 16 bits of its word from byte t & 3 on.

    Args:
        rng: int64[2], (seed, offset).
        j_B, i_RB, g_RB: block along the contraction, other index (both within the group), group; broadcast together.
        plane: 0 rowwise, 1 columnwise.
    """
    w = philox(rng[0], j_B, i_RB, g_RB, 2 * rng[1] + plane)
    turned = torch.stack((w, w >> 8, w >> 16, (w >> 24) | (w << 8)), dim=-1)  # rotated by 8 * (t & 3), t = 4 * word + turn
    return (turned & 0xFFFF).flatten(-2)


def stochastic_codes(y: Tensor, bits: Tensor) -> Tensor:
    """E2M1 codes of float32 ``y`` rounded up with probability close to the fraction of the step."""
    a = y.abs().clamp_(max=6.0)
    # half the power of two below a, at least 0.5: 0.5 below 2, 1 below 4, 2 above
    step = ((a.view(torch.int32) & 0x7F800000).view(torch.float32) * 0.5).clamp_(min=0.5)
    part = a / step
    n = part.floor()
    up = part.sub_(n).mul_(65536) > bits + 0.5
    return encode(n.add_(up).mul_(step).copysign_(y), "e2m1")


def scale_codes(amax_b: Tensor, amax_g: Tensor, fmt: NVFP4, four: Tensor | None) -> Tensor:
    """E4M3 codes of blocks from their amax and the (broadcast) global amax; ``four``: which of them are mapped to 4."""
    if four is None:
        return block_scale(amax_b, nvfp4_encode_scale(amax_g))
    s6, s4 = four_over_six.both_scales(amax_b, amax_g, fmt)
    return torch.where(four, s4, s6)


def quantize_rows(
    x_RBv: Tensor, amax_g: Tensor, fmt: NVFP4, scale_RB: Tensor | None = None, bits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows of blocks.

    Args:
        x_RBv: float32.
        amax_g: float32, the global amax of each block, broadcast to (R, B).
        scale_RB: the block scales when decided elsewhere (16x16).
        bits: random bits (R, B, 16) for stochastic rounding.

    Returns:
        uint8 (R, B, 16) unpacked E2M1 codes and uint8 (R, B) E4M3 scale codes.
    """
    if scale_RB is None:
        amax_b = block_amax(x_RBv.abs(), fmt.nan)
        four = four_over_six.choose_four(x_RBv, amax_b, amax_g, fmt) if fmt.four_over_six else None
        scale_RB = scale_codes(amax_b, amax_g, fmt, four)
    enc = divide(1.0, decode(scale_RB, "e4m3") * nvfp4_decode_scale(amax_g, fmt.range)).clamp_(max=FLT_MAX)
    y = x_RBv * enc[..., None]
    codes = encode(y, "e2m1") if bits is None else stochastic_codes(y, bits)
    return codes, scale_RB


def quantize_planes(
    frame_PK: Tensor,
    tiles: TileMap,
    fmt: NVFP4,
    rowwise: bool,
    columnwise: bool,
    amax: Tensor | None,
    rng: Tensor | None,
) -> Planes:
    """Both planes of a float32 frame (P, K).

    Args:
        amax: float32 (2, G) when given; row-scaled, with one plane asked: (P,) rowwise, (G, K) columnwise.
        rng: int64[2] when stochastic.
    """
    T, (P, K) = tiles.num_tiles, frame_PK.shape
    x_PBv = F.pad(frame_PK, (0, -K % BLOCK)).view(P, ceil_div(K, BLOCK), BLOCK)
    square = _square(x_PBv, tiles, fmt, None if amax is None else amax[0]) if fmt.is_2d else None
    row, column = None, None
    if rowwise:
        row = _rows(x_PBv, tiles, fmt, K, square, amax if amax is None or fmt.row_scaled else amax[0], rng)
    if columnwise:
        x_TKBv = frame_PK.view(T, TILE, K).mT.reshape(T, K, TILE // BLOCK, BLOCK)
        column = _columns(x_TKBv, tiles, fmt, square, amax if amax is None or fmt.row_scaled else amax[1], rng)
    return row, column


@dataclass
class Square:
    """What the two planes of 16x16 blocks share: amax (P/16, B), and with four over six which of them are mapped to 4."""

    amax: Tensor
    four: Tensor | None

    def map(self, f: Callable[[Tensor], Tensor]) -> Square:
        """Both rearranged alike."""
        return Square(f(self.amax), None if self.four is None else f(self.four))


def _square(x_PBv: Tensor, tiles: TileMap, fmt: NVFP4, amax: Tensor | None) -> Square:
    """Decided from the row plane, whose global amax is ``amax`` (G,) when given."""
    P, B, _ = x_PBv.shape
    square = block_amax(block_amax(x_PBv.abs(), fmt.nan).view(P // BLOCK, BLOCK, B).mT, fmt.nan)
    if not fmt.four_over_six:
        return Square(square, None)
    amax_P1 = of_tile(group_amax(x_PBv, tiles) if amax is None else amax, tiles).repeat_interleave(TILE)[:, None]
    return Square(square, four_over_six.choose_four(x_PBv, square.repeat_interleave(BLOCK, 0), amax_P1, fmt))


def _rows(
    x_PBv: Tensor, tiles: TileMap, fmt: NVFP4, K: int, square: Square | None, amax: Tensor | None, rng: Tensor | None
) -> Logical:
    P, B, _ = x_PBv.shape
    if amax is None:
        amax = block_amax(x_PBv.abs().flatten(1), "ignore") if fmt.row_scaled else group_amax(x_PBv, tiles)
    amax_P1 = (amax if fmt.row_scaled else of_tile(amax, tiles).repeat_interleave(TILE))[:, None]
    scale, bits = None, None
    if square is not None:
        by_row = square.map(lambda t: t.repeat_interleave(BLOCK, 0))
        scale = scale_codes(by_row.amax, amax_P1, fmt, by_row.four)
    if fmt.stochastic:
        assert rng is not None
        local_P = tiles.local.repeat_interleave(TILE) * TILE + torch.arange(TILE, device=rng.device).repeat(len(tiles.local))
        group_P1 = tiles.group.repeat_interleave(TILE)[:, None]
        bits = random_bits(rng, torch.arange(B, device=rng.device), local_P[:, None], group_P1, plane=0)
    codes, scale = quantize_rows(x_PBv, amax_P1, fmt, scale, bits)
    present = (torch.arange(B * BLOCK, device=codes.device) < K) & (tiles.source >= 0)[:, None]
    return Logical(pack_e2m1(codes.view(P, B * BLOCK).masked_fill_(~present, 0)), scale, amax)


def _columns(x_TKBv: Tensor, tiles: TileMap, fmt: NVFP4, square: Square | None, amax: Tensor | None, rng: Tensor | None) -> Logical:
    T, K, B, _ = x_TKBv.shape
    present = (tiles.source >= 0).view(T, 1, B, BLOCK)
    if fmt.hadamard:  # all outputs of a block with a live row are kept
        present = present.any(-1, keepdim=True)
        x_TKBv = hadamard(x_TKBv)
    if amax is None:
        amax = column_amax(x_TKBv, tiles) if fmt.row_scaled else group_amax(x_TKBv, tiles)
    per_column = amax if fmt.row_scaled else amax[:, None]
    amax_TK1 = F.pad(per_column, (0, 0, 0, 1))[tiles.group][..., None]
    scale, bits = None, None
    if square is not None:
        by_column = square.map(lambda t: t.view(T, B, t.shape[1]).mT.repeat_interleave(BLOCK, 1)[:, :K])
        scale = scale_codes(by_column.amax, amax_TK1, fmt, by_column.four)
    if fmt.stochastic:
        assert rng is not None
        local_T1B = (tiles.local[:, None] * B + torch.arange(B, device=rng.device))[:, None]
        column_K1 = torch.arange(K, device=rng.device)[:, None]
        bits = random_bits(rng, local_T1B, column_K1, tiles.group[:, None, None], plane=1)
    codes, scale = quantize_rows(x_TKBv, amax_TK1, fmt, scale, bits)
    return Logical(pack_e2m1(codes.masked_fill_(~present, 0).view(T, K, TILE)), scale, amax)
