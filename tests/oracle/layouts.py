"""Scale buffers of a plain tensor. `linear` is the matrix of live scale codes that a Plane holds."""

import numpy as np

from .blocks import ceil_div, roundup


def swizzle_offset(i: np.ndarray, j: np.ndarray, nT: int) -> np.ndarray:
    """Byte offset of (non-contracted index i, block j) in 128x4 tiles, nT tiles along the contraction."""
    return ((i // 128) * nT + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4


def offset_8x4(m: np.ndarray, k: np.ndarray, kT: int) -> np.ndarray:
    """Byte offset of (row m, block k) in 8x4 tiles, kT tiles along the contraction."""
    return (m // 8) * (kT * 32) + (k // 4) * 32 + (m % 8) * 4 + k % 4


def compact(linear: np.ndarray, mx_columnwise: bool = False) -> np.ndarray:
    """Padded with zeros: to multiples of (128, 4), or (4, 128) for MXFP8's columnwise [block][column] scales."""
    rows, columns = linear.shape
    down, across = (4, 128) if mx_columnwise else (128, 4)
    buffer = np.zeros((roundup(rows, down), roundup(columns, across)), dtype=linear.dtype)
    buffer[:rows, :columns] = linear
    return buffer


def _index(linear: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, blocks = linear.shape
    return np.arange(rows, dtype=np.int64)[:, None], np.arange(blocks, dtype=np.int64)[None, :]


def swizzled(linear: np.ndarray, mx_columnwise: bool = False) -> np.ndarray:
    """Flat uint8, the size of `compact`."""
    by_index = linear.T if mx_columnwise else linear
    nT = ceil_div(by_index.shape[1], 4)
    buffer = np.zeros(roundup(by_index.shape[0], 128) * 4 * nT, dtype=linear.dtype)
    buffer[swizzle_offset(*_index(by_index), nT)] = by_index
    return buffer


def swizzled_8x4(linear: np.ndarray, mx_columnwise: bool = False) -> np.ndarray:
    """Flat uint8, the non-contracted index padded to 8, the blocks to 4."""
    by_index = linear.T if mx_columnwise else linear
    kT = ceil_div(by_index.shape[1], 4)
    buffer = np.zeros(roundup(by_index.shape[0], 8) * 4 * kT, dtype=linear.dtype)
    buffer[offset_8x4(*_index(by_index), kT)] = by_index
    return buffer


def arrange(linear: np.ndarray, layout: str, mx_columnwise: bool = False) -> np.ndarray:
    """The scale buffer of a plane in any layout."""
    if layout == "linear":
        return linear
    return {"compact": compact, "swizzled": swizzled, "swizzled_8x4": swizzled_8x4}[layout](linear, mx_columnwise)
