"""Cutting matrices into blocks, and the record of one quantized plane."""

from dataclasses import dataclass

import numpy as np

F32 = np.float32


@dataclass
class Plane:
    """One quantized plane of a plain tensor, before any scale layout.

    data   uint8, in the stored orientation (NVFP4: packed; NVFP4 and FP8 columnwise: transposed)
    scale  one entry per live block, [row][block] for a rowwise plane; MXFP8 and FP8Block columnwise [block][column];
           NVFP4 columnwise [column][block] (the stored matrix is the transpose); FP8Tensor float32 [1]
    amax   float32 [1] (row-scaled: one a stored row), or None where the format has none
    """

    data: np.ndarray
    scale: np.ndarray
    amax: np.ndarray | None = None


def ceil_div(a: int, b: int) -> int:
    """Quotient rounded up."""
    return -(-a // b)


def roundup(a: int, b: int) -> int:
    """The next multiple of b."""
    return ceil_div(a, b) * b


def row_blocks(x: np.ndarray, length: int) -> np.ndarray:
    """(R, L) as (R, ceil(L/length), length): consecutive blocks along a row, absent elements 0."""
    rows, width = x.shape
    count = ceil_div(width, length)
    padded = np.zeros((rows, count * length), dtype=x.dtype)
    padded[:, :width] = x
    return padded.reshape(rows, count, length)


def tiles(x: np.ndarray, side: int) -> np.ndarray:
    """(R, L) as (ceil(R/side), ceil(L/side), side*side): square tiles, absent elements 0."""
    down, across = ceil_div(x.shape[0], side), ceil_div(x.shape[1], side)
    padded = np.zeros((down * side, across * side), dtype=x.dtype)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded.reshape(down, side, across, side).swapaxes(1, 2).reshape(down, across, side * side)


def amax(x: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """max |x| without NaN; of nothing, or of NaN only, 0. float32."""
    return np.max(np.abs(np.where(np.isnan(x), F32(0), x)), axis=axis, initial=F32(0)).astype(F32)


def over_blocks(per_block: np.ndarray, length: int, width: int) -> np.ndarray:
    """(R, blocks) repeated to (R, width): each element's own block value."""
    return np.repeat(per_block, length, axis=1)[:, :width]


def over_tiles(per_tile: np.ndarray, side: int, rows: int) -> np.ndarray:
    """(tile rows, n) repeated to (rows, n): each row's own tile value."""
    return np.repeat(per_tile, side, axis=0)[:rows]
