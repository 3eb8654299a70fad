"""FP8 with one float32 scale per tensor (FP8Tensor) or per 1x128 / 128x128 block (FP8Block)."""

import numpy as np

from . import codes
from .blocks import Plane, over_blocks, over_tiles, row_blocks, tiles
from .blocks import amax as amax_of

F32 = np.float32
V = 128


def encode_scale(block_amax: np.ndarray, element: str, power_of_two: bool, eps: float) -> np.ndarray:
    """scale(amax), the factor that elements are multiplied by before rounding. float32."""
    m = np.maximum(np.asarray(block_amax, dtype=F32), F32(eps))
    with np.errstate(all="ignore"):
        scale = np.minimum(codes.largest(element) / m, codes.FLT_MAX)
    if power_of_two:
        scale = codes.floats(codes.bits(scale) & np.uint32(0x7F800000)).reshape(scale.shape)
    return np.where((m == 0) | np.isinf(m), F32(1), scale).astype(F32)


def _elements(x: np.ndarray, scale: np.ndarray, element: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return codes.encode(x * scale, element)


def quantize_tensor(
    x: np.ndarray, element: str = "e4m3", power_of_two: bool = False, eps: float = 0.0, amax: tuple | None = None
) -> dict[str, Plane]:
    """Both planes of x (M, K): rowwise (M, K), columnwise (K, M); scale = scale_inv [1]. amax: given (row, column)."""
    result = {}
    for number, name in enumerate(("rowwise", "columnwise")):
        tensor_amax = np.array([amax_of(x) if amax is None else amax[number]], dtype=F32)
        scale = encode_scale(tensor_amax, element, power_of_two, eps)
        data = _elements(x, scale[0], element)
        result[name] = Plane(data if number == 0 else data.T, F32(1) / scale, tensor_amax)
    return result


def _rows(x: np.ndarray, element: str, power_of_two: bool, eps: float) -> Plane:
    scale = encode_scale(amax_of(row_blocks(x, V), -1), element, power_of_two, eps)
    return Plane(_elements(x, over_blocks(scale, V, x.shape[1]), element), F32(1) / scale)


def quantize_block(
    x: np.ndarray, element: str = "e4m3", block: tuple = (1, 128), power_of_two: bool = True, eps: float = 0.0
) -> dict[str, Plane]:
    """Both planes of x (M, K): data (M, K) and (K, M).

    Scales (scale_inv) 1x128: rowwise (M, ceil(K/128)), columnwise (ceil(M/128), K); 128x128: the same
    (ceil(M/128), ceil(K/128)) in both.
    """
    if block == (1, 128):
        column = _rows(np.ascontiguousarray(x.T), element, power_of_two, eps)
        return {"rowwise": _rows(x, element, power_of_two, eps), "columnwise": Plane(column.data, column.scale.T)}
    scale = encode_scale(amax_of(tiles(x, V), -1), element, power_of_two, eps)
    data = _elements(x, over_blocks(over_tiles(scale, V, x.shape[0]), V, x.shape[1]), element)
    return {"rowwise": Plane(data, F32(1) / scale), "columnwise": Plane(data.T, F32(1) / scale)}


def dequantize_tensor(plane: Plane, which: str, shape: tuple[int, int], element: str = "e4m3") -> np.ndarray:
    """float32 (M, K)."""
    with np.errstate(all="ignore"):
        values = codes.decode(plane.data, element) * plane.scale[0]
    return values if which == "rowwise" else values.T


def dequantize_block(
    plane: Plane, which: str, shape: tuple[int, int], element: str = "e4m3", block: tuple = (1, 128)
) -> np.ndarray:
    """float32 (M, K)."""
    scale = plane.scale
    if which == "columnwise" or block == (128, 128):
        scale = over_tiles(scale, V, shape[0])
    if which == "rowwise" or block == (128, 128):
        scale = over_blocks(scale, V, shape[1])
    data = plane.data if which == "rowwise" else plane.data.T
    with np.errstate(all="ignore"):
        return codes.decode(data, element) * scale


def quantize_delayed(
    x: np.ndarray, scale: np.ndarray, element: str = "e4m3", columnwise_source: str = "original"
) -> dict[str, Plane]:
    """Both planes of x (M, K) with a given scale [1]; amax is x's own."""
    amax = np.array([amax_of(x)], dtype=F32)
    row = Plane(_elements(x, scale[0], element), F32(1) / scale, amax)
    seen = x if columnwise_source == "original" else dequantize_tensor(row, "rowwise", x.shape, element)
    column_amax = np.array([amax_of(seen)], dtype=F32)
    return {"rowwise": row, "columnwise": Plane(_elements(seen, scale[0], element).T, F32(1) / scale, column_amax)}


def next_scale(scale: list, history: list, element: str, algorithm: str, margin: int) -> tuple[list, list]:
    """(scale, history) after a step, one tensor after another; history: a list of steps, each a list by tensor."""
    scales = []
    for g, old in enumerate(scale):
        column = [step[g] for step in history]
        amax = max(column) if algorithm == "max" else column[0]
        if amax > 0 and np.isfinite(amax):
            with np.errstate(all="ignore"):
                made = F32(codes.largest(element) / F32(amax))
                made = F32(made / F32(2.0**margin))
            scales.append(codes.FLT_MAX if np.isinf(made) else made)
        else:
            scales.append(F32(old))
    rolled = [*history[1:], history[0]]
    return scales, [[F32(0)] * len(scale), *rolled[1:]]
