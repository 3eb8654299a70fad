"""Shapes of planes from metadata alone. Legend: M rows, K columns, G groups, T tiles of 128 rows."""

from __future__ import annotations

import torch

from blockscale.formats import Format, FP8Block
from blockscale.layouts import ceil_div, round_up, tile_capacity
from blockscale.tensors.arrange import linear_shape, row_bytes, whole_scale


def plane_shapes(fmt: Format, M: int, K: int, which: str, layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of data and scale of a plain plane, from metadata alone."""
    by_rows = which == "rowwise" or not fmt.transposed
    data = (M, row_bytes(fmt, K)) if by_rows else (K, row_bytes(fmt, M))
    if fmt.per_tensor:
        return data, (1,)
    if isinstance(fmt, FP8Block):
        if fmt.is_2d:
            return data, (ceil_div(M, 128), ceil_div(K, 128))
        return data, ((M, ceil_div(K, 128)) if which == "rowwise" else (ceil_div(M, 128), K))
    rows, columns = linear_shape(fmt, which, (M, K))
    if layout == "linear":
        return data, (rows, columns)
    blocks_first = which == "columnwise" and not fmt.transposed
    i, j = (columns, rows) if blocks_first else (rows, columns)
    i, j = round_up(i, 8 if layout == "swizzled_8x4" else 128), round_up(j, 4)
    if layout == "compact":
        return data, ((j, i) if blocks_first else (i, j))
    return data, (i * j,)


def amax_shape(fmt: Format, which: str, rows: int, K: int, G: int | None) -> tuple[int, ...]:
    """Shape of a plane's amax ((0,) for a format without one); ``G`` is None for a plain tensor."""
    if not fmt.has_amax:
        return (0,)
    if not fmt.scales_rows:
        return (1 if G is None else G,)
    return (rows,) if which == "rowwise" else (K,) if G is None else (G, K)


def grouped_plane_shapes(
    fmt: Format, capacity: int, K: int, G: int, which: str, layout: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of data and scale of a grouped plane, from metadata alone."""
    T, Kp = tile_capacity(capacity, G), round_up(K, 128)
    by_rows = which == "rowwise" or not fmt.transposed
    data: tuple[int, ...] = (capacity, row_bytes(fmt, K)) if by_rows else (T * K * row_bytes(fmt, 128),)
    if fmt.per_tensor:
        return data, (G,)
    if whole_scale(fmt):
        return data, (T, Kp // 128)
    if isinstance(fmt, FP8Block):
        return data, ((capacity, Kp // 128) if which == "rowwise" else (T, K))
    if which == "rowwise":
        scale: tuple[int, ...] = (128 * T, round_up(ceil_div(K, fmt.block_length), 4))
    elif not fmt.transposed:
        scale = (4 * T, Kp)
    else:
        scale = (128 // fmt.block_length * Kp * T,)
    return data, ((scale[0] * scale[1],) if layout == "swizzled" and len(scale) == 2 else scale)


def scale_dtype(fmt: Format) -> torch.dtype:
    """uint8 codes for the formats that have them, else float32."""
    return torch.uint8 if fmt.has_codes else torch.float32
