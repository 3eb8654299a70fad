"""One plane between its logical form and its place in memory, plain and grouped, both directions.

Legend: M rows, K columns, P slots of the frame (each group starting on a tile of 128), T tiles, B blocks, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from blockscale import layouts
from blockscale.formats import Format, FP8Block
from blockscale.layouts import TILE, TileMap, ceil_div, round_up


@dataclass
class Logical:
    """One plane, unpadded but for whole tiles.

    Rowwise: data (P, bytes of a row), scale (P, B).
    Columnwise MXFP8: data (P, K), scale (P/32, K).
    Columnwise of the transposed formats: data (T, K, bytes of 128 rows), scale (T, K, B); FP8 1x128 blocks (T, K).
    128x128 blocks: scale (T, ceil(K/128)) in both planes. FP8 per tensor: scale float32 (G,).
    ``amax`` is float32 (G,) where the format has one; row-scaled (P,) rowwise, (G, K) columnwise.
    """

    data: Tensor
    scale: Tensor
    amax: Tensor | None = None


def row_bytes(fmt: Format, length: int) -> int:
    """Bytes of ``length`` elements along the contraction (two a byte: whole blocks)."""
    v = fmt.block_length
    return v // 2 * ceil_div(length, v) if fmt.packed else length


def whole_scale(fmt: Format) -> bool:
    """Whether the scale array has one form only, whatever the plane's arrangement."""
    return fmt.per_tensor or (isinstance(fmt, FP8Block) and fmt.is_2d)


def place_plain(plane: Logical, fmt: Format, which: str, layout: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(data, scale) of a plain tensor of ``shape`` (M, K)."""
    M, K = shape
    data, scale = plane.data, plane.scale
    if which == "rowwise":
        data = data[:M]
        scale = scale if whole_scale(fmt) else scale[:M]
    elif not fmt.transposed:
        data, scale = data[:M], scale[: ceil_div(M, fmt.block_length)]
    else:
        data = data.transpose(0, 1).reshape(K, -1)[:, : row_bytes(fmt, M)]
        if fmt.has_codes:
            scale = scale.transpose(0, 1).reshape(K, -1)[:, : ceil_div(M, fmt.block_length)]
    if fmt.has_codes:
        scale = layouts.arrange(scale, layout, _scale_plane(fmt, which))
    return data.contiguous(), scale.contiguous()


def restore_plain(data: Tensor, scale: Tensor, fmt: Format, which: str, layout: str, shape: tuple[int, int]) -> Logical:
    """Inverse of :func:`place_plain`."""
    M, K = shape
    tiles = ceil_div(M, TILE)
    if fmt.has_codes:
        scale = layouts.restore(scale, layout, linear_shape(fmt, which, shape), _scale_plane(fmt, which))
    if which == "rowwise" or not fmt.transposed:
        data = _pad_rows(data, tiles * TILE)
        if not whole_scale(fmt):
            scale = _pad_rows(scale, tiles * (TILE if which == "rowwise" else 4))
        return Logical(data, scale)
    data = _split_columns(data, K, tiles, row_bytes(fmt, TILE))
    if fmt.has_codes:
        scale = _split_columns(scale, K, tiles, TILE // fmt.block_length)
    return Logical(data, scale)


def place_amax(amax: Tensor | None, fmt: Format, which: str, tiles: TileMap) -> Tensor | None:
    """The amax of a plane as a grouped tensor keeps it: row-scaled rowwise (capacity,), dead rows zero."""
    return tiles.to_rows(amax) if amax is not None and fmt.scales_rows and which == "rowwise" else amax


def restore_amax(amax: Tensor | None, fmt: Format, which: str, tiles: TileMap, K: int) -> Tensor | None:
    """Inverse of :func:`place_amax`; also of a plain tensor's, whose columnwise one is (K,)."""
    if amax is None or not fmt.scales_rows:
        return amax
    return tiles.to_frame(amax) if which == "rowwise" else amax.reshape(tiles.num_groups, K)


def linear_shape(fmt: Format, which: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Shape of the linear array of scales of a plain (M, K) tensor (formats with scale codes)."""
    M, K = shape
    v = fmt.block_length
    if which == "rowwise":
        return M, ceil_div(K, v)
    return (K, ceil_div(M, v)) if fmt.transposed else (ceil_div(M, v), K)


def place_grouped(plane: Logical, fmt: Format, which: str, layout: str, tiles: TileMap) -> tuple[Tensor, Tensor]:
    """(data, scale) of a grouped tensor."""
    data, scale = plane.data, plane.scale
    packed = which == "rowwise" or not fmt.transposed
    data = tiles.to_rows(data) if packed else tiles.interleave(data)
    if which == "rowwise":
        if fmt.has_codes:
            # a 2-D block's scale is replicated over its rows, dead ones included
            scale = layouts.arrange(scale.masked_fill((tiles.source < 0)[:, None], 0), layout)
        elif not whole_scale(fmt):
            scale = tiles.to_rows(scale)
    elif not fmt.transposed:
        scale = layouts.compact(scale, "columnwise")
        if layout == "swizzled":
            T, K = tiles.num_tiles, scale.shape[1]
            units = scale.view(T, 4, K // TILE, 4, 32).permute(0, 2, 4, 3, 1)
            scale = tiles.interleave(units.reshape(T, K // TILE, 512))
    elif fmt.has_codes:
        T, K, n = tiles.num_tiles, round_up(scale.shape[1], TILE), scale.shape[2]
        scale = F.pad(scale, (0, 0, 0, K - scale.shape[1]))
        if layout == "swizzled":
            units = scale.view(T, K // TILE, 4, 32, n // 4, 4).permute(0, 1, 4, 3, 2, 5)
            scale = units.reshape(T, K // TILE, TILE * n)
        scale = tiles.interleave(scale)
    return data.contiguous(), scale.contiguous()


def restore_grouped(data: Tensor, scale: Tensor, fmt: Format, which: str, layout: str, tiles: TileMap, K: int) -> Logical:
    """Inverse of :func:`place_grouped`; what belongs to no live row comes back as zero, whatever the buffers hold."""
    T = tiles.num_tiles
    packed = which == "rowwise" or not fmt.transposed
    data = tiles.to_frame(data) if packed else tiles.deinterleave(data, K, row_bytes(fmt, TILE))
    Kp = round_up(K, TILE)
    if which == "rowwise":
        if fmt.has_codes:
            scale = layouts.restore(scale, layout, (T * TILE, ceil_div(K, fmt.block_length)))
        elif not whole_scale(fmt):
            scale = tiles.to_frame(scale)
    elif not fmt.transposed:
        if layout == "swizzled":
            units = tiles.deinterleave(scale, Kp // TILE, 512).view(T, Kp // TILE, 32, 4, 4)
            scale = units.permute(0, 4, 1, 3, 2).reshape(4 * T, Kp)
        scale = scale[:, :K]
    elif fmt.has_codes:
        n = TILE // fmt.block_length
        if layout == "swizzled":
            units = tiles.deinterleave(scale, Kp // TILE, TILE * n).view(T, Kp // TILE, n // 4, 32, 4, 4)
            scale = units.permute(0, 1, 4, 3, 2, 5).reshape(T, Kp, n)
        else:
            scale = tiles.deinterleave(scale, Kp, n)
        scale = scale[:, :K]
    return _clean(Logical(data, scale), fmt, tiles)


def _clean(plane: Logical, fmt: Format, tiles: TileMap) -> Logical:
    """Zero the data and scales of blocks without a live row.

    A transform block (NVFP4 with Hadamard) with a live row keeps all its elements; elsewhere absent elements of a partial
    block are masked where values are made (``decode.values``).
    """
    T = tiles.num_tiles
    if T == 0:
        return plane
    live_P = tiles.source >= 0

    def alive(entries: int) -> Tensor:
        """bool (T, entries): whether the first row of each of ``entries`` equal parts of a tile is live."""
        return live_P.view(T, entries, TILE // entries)[..., 0]

    data, scale = plane.data, plane.scale
    if data.dim() == 3:
        v = fmt.block_length
        kept = alive(TILE // v).repeat_interleave(v // 2, 1) if fmt.packed else alive(TILE)
        data = data.masked_fill(~kept[:, None], 0)
    if scale.dim() == 3:
        scale = scale.masked_fill(~alive(scale.shape[2])[:, None], 0)
    elif not fmt.per_tensor:
        scale = scale.masked_fill(~alive(scale.shape[0] // T).reshape(-1, 1), 0)
    return Logical(data, scale)


def _scale_plane(fmt: Format, which: str) -> str:
    """A transposed plane's scales lie as a rowwise plane's of the transposed matrix."""
    return "rowwise" if fmt.transposed else which


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, rows - x.shape[0]))


def _split_columns(x: Tensor, K: int, tiles: int, unit: int) -> Tensor:
    return F.pad(x, (0, tiles * unit - x.shape[1])).view(K, tiles, unit).transpose(0, 1)
