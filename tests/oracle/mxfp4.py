"""MXFP4: E2M1 elements, one E8M0 scale per 32 along the contraction or per 32x32 tile; the column plane is transposed."""

import numpy as np

from . import codes
from .blocks import Plane, amax, over_blocks, over_tiles, row_blocks, tiles

F32 = np.float32
V = 32


def scale_codes(block_amax: np.ndarray, has_nan: np.ndarray, scale_rounding: str, nan: str) -> np.ndarray:
    """E8M0 codes of block maxima (NaN left out of them): MXFP8's rule with max = 6, emax = 2."""
    up, floor = codes.e8m0_ceil(block_amax * (F32(1) / F32(6))), codes.e8m0_floor(block_amax, 2)
    e = {"up": up, "floor": floor}[scale_rounding]
    return np.where(has_nan & (nan == "propagate"), np.uint8(0xFF), e).astype(np.uint8)


def _packed(cut: np.ndarray, e: np.ndarray, width: int) -> np.ndarray:
    """(R, 16*blocks) bytes of (R, blocks, 32) values under scale codes (R, blocks); elements past width are code 0."""
    with np.errstate(all="ignore"):
        q = codes.encode(cut * np.ldexp(F32(1), 127 - e.astype(np.int32)).astype(F32)[..., None], "e2m1")
    q = np.where((e == 0xFF)[..., None], np.uint8(7), q).reshape(cut.shape[0], cut.shape[1] * V)
    q[:, width:] = 0
    return codes.pack_e2m1(q)


def quantize(x: np.ndarray, block: tuple = (1, 32), scale_rounding: str = "up", nan: str = "propagate") -> dict[str, Plane]:
    """Both planes of x (M, K): data (M, 16*ceil(K/32)) and (K, 16*ceil(M/32)), scales (M, ceil(K/32)) and (K, ceil(M/32))."""
    result = {}
    for name, stored in (("rowwise", x), ("columnwise", np.ascontiguousarray(x.T))):
        rows, width = stored.shape
        cut = row_blocks(stored, V)
        if block == (1, 32):
            e = scale_codes(amax(cut, -1), np.isnan(cut).any(-1), scale_rounding, nan)
        else:
            square = tiles(stored, V)
            e = over_tiles(scale_codes(amax(square, -1), np.isnan(square).any(-1), scale_rounding, nan), V, rows)
        result[name] = Plane(_packed(cut, e, width), e)
    return result


def dequantize(plane: Plane, which: str, shape: tuple[int, int]) -> np.ndarray:
    """float32 (M, K), the column plane transposed back."""
    width = shape[1] if which == "rowwise" else shape[0]
    with np.errstate(all="ignore"):
        factor = over_blocks(codes.e8m0_decode(plane.scale), V, width)
        values = codes.decode(codes.unpack_e2m1(plane.data)[:, :width], "e2m1") * factor
    return values if which == "rowwise" else np.ascontiguousarray(values.T)
