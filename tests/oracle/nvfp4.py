"""NVFP4: E2M1 elements, one E4M3 scale per 16 along the contraction, one float32 amax per tensor."""

import numpy as np

from . import codes, four_six, philox
from .blocks import Plane, amax, ceil_div, over_blocks, over_tiles, row_blocks, tiles

F32 = np.float32
V = 16
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=F32)


def global_scales(tensor_amax: np.ndarray, largest: float = 2688) -> tuple[np.ndarray, np.ndarray]:
    """(S_enc, S_dec) of amax values, one a tensor or (row-scaled) one a row."""
    tensor_amax = np.asarray(tensor_amax, dtype=F32)
    with np.errstate(all="ignore"):
        encode = np.minimum(F32(largest) / tensor_amax, codes.FLT_MAX)
    encode = np.where((tensor_amax == 0) | (encode == 0), F32(1), encode).astype(F32)
    return encode, F32(1) / encode


def block_scales(block_amax: np.ndarray, encode: np.ndarray) -> np.ndarray:
    """E4M3 codes of the block scales."""
    with np.errstate(all="ignore"):
        product = block_amax * (encode * (F32(1) / F32(6)))
    return codes.encode(np.minimum(product, codes.FLT_MAX), "e4m3")


def encode_factors(scale: np.ndarray, decode: np.ndarray) -> np.ndarray:
    """enc of every block, float32."""
    with np.errstate(all="ignore"):
        return np.minimum(F32(1) / (codes.decode(scale, "e4m3") * decode), codes.FLT_MAX)


def hadamard_transform(columns: np.ndarray) -> np.ndarray:
    """The 16-point transform of [..., 16] float32, bfloat16 values in float32."""
    with np.errstate(all="ignore"):
        v = SIGNS * columns
        index = np.arange(V)
        for h in (1, 2, 4, 8):
            low = index[(index & h) == 0]
            total, difference = v[..., low] + v[..., low + h], v[..., low] - v[..., low + h]
            v = v.copy()
            v[..., low], v[..., low + h] = total, difference
        return codes.to_bf16(v / F32(4))


def stochastic_codes(y: np.ndarray, r: np.ndarray) -> np.ndarray:
    """E2M1 codes of y with the random bits r, element by element."""
    a = np.minimum(np.abs(y), F32(6))
    step = np.where(a < 2, F32(0.5), np.where(a < 4, F32(1), F32(2)))
    quotient = np.where(np.isnan(y), F32(0), a / step)
    n = np.floor(quotient)
    fraction = (quotient - n).astype(np.float64)
    magnitude = step * (n + (65536 * fraction > r + 0.5))
    return codes.encode(np.where(np.isnan(y), y, np.copysign(magnitude.astype(F32), y)), "e2m1")


def _elements(cut: np.ndarray, scale: np.ndarray, decode: np.ndarray, width: int, random: np.ndarray | None) -> np.ndarray:
    """Packed codes (R, 8*blocks) of (R, blocks, 16); elements past width are absent."""
    with np.errstate(all="ignore"):
        y = cut * encode_factors(scale, decode)[..., None]
    q = codes.encode(y, "e2m1") if random is None else stochastic_codes(y, random)
    q = np.where((scale == 0x7F)[..., None], np.uint8(7), q)
    q = q.reshape(q.shape[0], q.shape[1] * V)
    q[:, width:] = 0
    return codes.pack_e2m1(q)


def _plane(
    cut: np.ndarray, scale: np.ndarray, has_nan: np.ndarray, nan: str, decode: np.ndarray, width: int, random
) -> tuple[np.ndarray, np.ndarray]:
    scale = np.where(has_nan & (nan == "propagate"), np.uint8(0x7F), scale).astype(np.uint8)
    return _elements(cut, scale, decode, width, random), scale


def quantize(
    x: np.ndarray,
    block: tuple = (1, 16),
    hadamard: bool = False,
    stochastic: bool = False,
    nan: str = "propagate",
    row_scaled: bool = False,
    four_over_six: str | None = None,
    scale_max: int = 448,
    amax: tuple | None = None,
    rng: tuple[int, int] = (0, 0),
    group: int = 0,
) -> dict[str, Plane]:
    """Both planes of x (M, K). amax: (rowwise, columnwise) given maxima; rng: (seed, offset); group: its number.

    row_scaled: an amax for each row of the stored plane, (M,) and (K,); amax, if given, in these shapes.
    Row plane: data (M, 8*ceil(K/16)), scale (M, ceil(K/16)).
    Column plane: data (K, 8*ceil(M/16)), scale (K, ceil(M/16)).
    """
    if four_over_six:
        return four_six.quantize(x, block, four_over_six, scale_max, nan, row_scaled, amax)
    result = {}
    for number, name in enumerate(("rowwise", "columnwise")):
        stored = x if number == 0 else np.ascontiguousarray(x.T)
        given = None if amax is None else amax[number]
        transform = hadamard and number == 1
        result[name] = _quantize_stored(stored, number, block, transform, stochastic, nan, row_scaled, given, rng, group)
    return result


def _quantize_stored(stored, number, block, transform, stochastic, nan, row_scaled, given, rng, group) -> Plane:
    """One plane; `stored` is x or its transpose."""
    rows, width = stored.shape
    cut = row_blocks(stored, V)
    if transform:
        cut, width = hadamard_transform(cut), ceil_div(width, V) * V
    if given is not None:
        kept = np.asarray(given, dtype=F32).reshape(-1)
    elif row_scaled:
        kept = amax(cut, (1, 2))
    else:
        kept = np.array([amax(cut)], dtype=F32)
    encode, decode = global_scales(kept[:, None])  # (rows, 1) or (1, 1), beside (rows, blocks)
    if block == (1, 16):
        scale, has_nan = block_scales(amax(cut, -1), encode), np.isnan(cut).any(-1)
    else:
        square = tiles(stored, V)
        scale = over_tiles(block_scales(amax(square, -1), encode), V, rows)
        has_nan = over_tiles(np.isnan(square).any(-1), V, rows)
    random = philox.block_bits(rows, cut.shape[1], rng, group, number) if stochastic else None
    data, scale = _plane(cut, scale, has_nan, nan, decode, width, random)
    return Plane(data, scale, kept)


def dequantize(plane: Plane, which: str, shape: tuple[int, int], scale_max: int = 448) -> np.ndarray:
    """float32 (M, K); the column plane transposed back, the Hadamard transform not undone."""
    _, decode = global_scales(plane.amax[:, None], 6 * scale_max)
    width = shape[1] if which == "rowwise" else shape[0]
    with np.errstate(all="ignore"):
        factor = over_blocks(codes.decode(plane.scale, "e4m3") * decode, V, width)
        values = codes.decode(codes.unpack_e2m1(plane.data)[:, :width], "e2m1") * factor
    return values if which == "rowwise" else np.ascontiguousarray(values.T)
