"""Whole buffers of a grouped tensor: every group quantized on its own, every entry put at its address."""

from dataclasses import dataclass

import numpy as np

from . import formats
from .blocks import Plane, ceil_div, roundup
from .formats import PLANES, Format
from .layouts import swizzle_offset


@dataclass
class GroupedPlane:
    """The buffers of one plane of a grouped tensor."""

    data: np.ndarray
    scale: np.ndarray
    amax: np.ndarray | None


@dataclass
class Extents:
    """offsets [G+1], capacity rows, K columns; t tiles of each group, T before it, `tiles` in a whole buffer."""

    offsets: np.ndarray
    capacity: int
    K: int

    def __post_init__(self) -> None:
        self.G = len(self.offsets) - 1
        self.m = np.diff(self.offsets)
        self.t = (self.m + 127) // 128
        self.T = np.concatenate([[0], np.cumsum(self.t)])
        self.tiles = (self.capacity + 127 * min(self.G, self.capacity)) // 128
        self.Kt = ceil_div(self.K, 128)


def quantize_groups(x: np.ndarray, offsets: np.ndarray, fmt: Format, amax=None, rng=None) -> list[dict[str, Plane]]:
    """Each group's planes as of a plain tensor. amax: [G] or [2, G]; rng: (seed, offset)."""
    result = []
    for g in range(len(offsets) - 1):
        extra = {}
        if amax is not None:
            both = np.broadcast_to(np.asarray(amax, dtype=np.float32), (2, len(offsets) - 1))
            extra["amax"] = (both[0, g], both[1, g])
        if rng is not None:
            extra |= {"rng": rng, "group": g}
        result.append(formats.quantize(x[offsets[g] : offsets[g + 1]], fmt, **extra))
    return result


def _data(groups: list[Plane], fmt: Format, which: str, e: Extents) -> np.ndarray:
    if which == "rowwise" or fmt.mx:
        width = fmt.length // 2 * ceil_div(e.K, fmt.length) if fmt.packed else e.K
        buffer = np.zeros((e.capacity, width), dtype=np.uint8)
        for g, plane in enumerate(groups):
            buffer[e.offsets[g] : e.offsets[g + 1]] = plane.data
        return buffer
    pitch = 64 if fmt.packed else 128
    buffer = np.zeros(pitch * e.K * e.tiles, dtype=np.uint8)
    k = np.arange(e.K)[:, None]
    for g, plane in enumerate(groups):
        byte = np.arange(plane.data.shape[1])[None, :]
        buffer[pitch * e.K * e.T[g] + pitch * e.t[g] * k + byte] = plane.data
    return buffer


def _codes(groups: list[Plane], fmt: Format, which: str, layout: str, e: Extents) -> np.ndarray:
    """uint8 scales of MXFP8, MXFP4 and NVFP4."""
    C = roundup(ceil_div(e.K, fmt.length), 4)
    if which == "rowwise":
        shape = (128 * e.tiles, C)
    elif fmt.mx:
        shape = (4 * e.tiles, 128 * e.Kt)
    else:
        shape = (128 * (128 // fmt.length) * e.Kt * e.tiles,)
    buffer = np.zeros(int(np.prod(shape)), dtype=np.uint8)
    for g, plane in enumerate(groups):
        first, second = np.indices(plane.scale.shape, dtype=np.int64)
        buffer[_address(first, second, which, layout, fmt, e, g, C)] = plane.scale
    return buffer.reshape(shape) if layout == "compact" else buffer


def _address(first, second, which: str, layout: str, fmt: Format, e: Extents, g: int, C: int) -> np.ndarray:
    """Bytes of a group's live scales; first, second index Plane.scale."""
    T, t = e.T[g], e.t[g]
    if which == "rowwise":
        i, j = first, second
        if layout == "compact":
            return (128 * T + i) * C + j
        return 512 * (C // 4) * T + swizzle_offset(i, j, C // 4)
    if fmt.mx:
        b, k = first, second
        if layout == "compact":
            return (4 * T + b) * 128 * e.Kt + k
        return 512 * e.Kt * T + swizzle_offset(k, b, t)
    k, b, per_tile = first, second, 128 // fmt.length  # NVFP4 has 8 blocks in a tile of 128 rows, MXFP4 4
    start = 128 * per_tile * e.Kt * T
    if layout == "compact":
        return start + per_tile * t * k + b
    return start + swizzle_offset(k, b, per_tile // 4 * t)


def _float_scales(groups: list[Plane], fmt: Format, which: str, e: Extents) -> np.ndarray:
    """float32 scales of FP8Tensor ([G]) and FP8Block."""
    if fmt.name == "FP8Tensor":
        return np.array([plane.scale[0] for plane in groups], dtype=np.float32)
    square = fmt.option("block", (1, 128)) == (128, 128)
    if which == "rowwise" and not square:
        buffer = np.zeros((e.capacity, e.Kt), dtype=np.float32)
        start = e.offsets
    else:
        buffer = np.zeros((e.tiles, e.Kt if square else e.K), dtype=np.float32)
        start = e.T
    for g, plane in enumerate(groups):
        buffer[start[g] : start[g] + plane.scale.shape[0]] = plane.scale
    return buffer


def _amax(groups: list[Plane], fmt: Format, which: str, e: Extents) -> np.ndarray:
    """float32 [G]; row-scaled [capacity] rowwise (dead rows 0), [G, K] columnwise."""
    if not fmt.option("row_scaled", False):
        return np.array([plane.amax[0] for plane in groups], dtype=np.float32)
    if which == "columnwise":
        return np.array([plane.amax for plane in groups], dtype=np.float32).reshape(e.G, e.K)
    buffer = np.zeros(e.capacity, dtype=np.float32)
    for g, plane in enumerate(groups):
        buffer[e.offsets[g] : e.offsets[g + 1]] = plane.amax
    return buffer


def quantize(
    x: np.ndarray, offsets: np.ndarray, fmt: Format, layout: str = "compact", amax=None, rng=None
) -> dict[str, GroupedPlane]:
    """Both planes of x (capacity, K) with groups at offsets."""
    e = Extents(np.asarray(offsets, dtype=np.int64), x.shape[0], x.shape[1])
    groups = quantize_groups(x, e.offsets, fmt, amax, rng)
    result = {}
    for which in PLANES:
        planes = [group[which] for group in groups]
        scale = _codes(planes, fmt, which, layout, e) if fmt.has_codes else _float_scales(planes, fmt, which, e)
        held = _amax(planes, fmt, which, e) if fmt.has_amax else None
        result[which] = GroupedPlane(_data(planes, fmt, which, e), scale, held)
    return result


def live(offsets: np.ndarray, capacity: int, K: int, fmt: Format, layout: str = "compact") -> dict[str, GroupedPlane]:
    """Which entries of the buffers hold something: boolean arrays. All the others are dead rows or padding."""
    e = Extents(np.asarray(offsets, dtype=np.int64), capacity, K)
    groups = quantize_groups(np.ones((capacity, K), dtype=np.float32), e.offsets, fmt)
    marks = {}
    for which in PLANES:
        ones = [Plane(np.ones_like(group[which].data), np.ones_like(group[which].scale)) for group in groups]
        scale = _codes(ones, fmt, which, layout, e) if fmt.has_codes else _float_scales(ones, fmt, which, e)
        marks[which] = GroupedPlane(_data(ones, fmt, which, e) != 0, scale != 0, None)
    return marks


def dequantize(x: np.ndarray, offsets: np.ndarray, fmt: Format, which: str, amax=None, rng=None) -> np.ndarray:
    """float32 (capacity, K) of the quantized x: group by group, dead rows 0."""
    result = np.zeros(x.shape, dtype=np.float32)
    for g, planes in enumerate(quantize_groups(x, offsets, fmt, amax, rng)):
        rows = slice(offsets[g], offsets[g + 1])
        result[rows] = formats.dequantize(planes[which], fmt, which, result[rows].shape)
    return result
