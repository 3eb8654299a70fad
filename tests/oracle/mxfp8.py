"""MXFP8: one E8M0 scale per 32 elements along the contraction, or per 32x32 tile."""

import numpy as np

from . import codes
from .blocks import Plane, amax, over_blocks, over_tiles, row_blocks, tiles

F32 = np.float32
V = 32


def scale_codes(block_amax: np.ndarray, has_nan: np.ndarray, element: str, scale_rounding: str, nan: str) -> np.ndarray:
    """E8M0 codes of block maxima (NaN left out of them); has_nan marks blocks that hold one."""
    if scale_rounding == "up":
        e = codes.e8m0_ceil(block_amax * (F32(1) / codes.largest(element)))
    else:
        e = codes.e8m0_floor(block_amax, codes.emax(element))
    return np.where(has_nan & (nan == "propagate"), np.uint8(0xFF), e).astype(np.uint8)


def elements(x: np.ndarray, e: np.ndarray, element: str) -> np.ndarray:
    """Element codes, e the scale code of each element (same shape)."""
    factor = np.ldexp(F32(1), 127 - e.astype(np.int32)).astype(F32)
    with np.errstate(all="ignore"):
        q = codes.encode(x * factor, element)
    return np.where(e == 0xFF, np.uint8(0x7F), q).astype(np.uint8)


def _rows(x: np.ndarray, element: str, scale_rounding: str, nan: str) -> Plane:
    cut = row_blocks(x, V)
    e = scale_codes(amax(cut, -1), np.isnan(cut).any(-1), element, scale_rounding, nan)
    return Plane(elements(x, over_blocks(e, V, x.shape[1]), element), e)


def quantize(
    x: np.ndarray, element: str = "e4m3", block: tuple = (1, 32), scale_rounding: str = "up", nan: str = "propagate"
) -> dict[str, Plane]:
    """Both planes of x (M, K): data (M, K) in each; scales rowwise (M, ceil(K/32)), columnwise (ceil(M/32), K)."""
    if block == (1, 32):
        column = _rows(np.ascontiguousarray(x.T), element, scale_rounding, nan)
        return {
            "rowwise": _rows(x, element, scale_rounding, nan),
            "columnwise": Plane(column.data.T, column.scale.T),
        }
    cut = tiles(x, V)
    tile_codes = scale_codes(amax(cut, -1), np.isnan(cut).any(-1), element, scale_rounding, nan)
    by_row = over_tiles(tile_codes, V, x.shape[0])
    data = elements(x, over_blocks(by_row, V, x.shape[1]), element)
    return {"rowwise": Plane(data, by_row), "columnwise": Plane(data, over_blocks(tile_codes, V, x.shape[1]))}


def dequantize(plane: Plane, which: str, shape: tuple[int, int], element: str = "e4m3") -> np.ndarray:
    """float32 (M, K)."""
    e = over_blocks(plane.scale, V, shape[1]) if which == "rowwise" else over_tiles(plane.scale, V, shape[0])
    with np.errstate(all="ignore"):
        return codes.decode(plane.data, element) * codes.e8m0_decode(e)
