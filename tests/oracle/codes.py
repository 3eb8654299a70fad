"""Element and scale codes: E4M3, E5M2, E2M1, E8M0. Arrays of float32 values and of uint8 codes, any shape."""

import ml_dtypes
import numpy as np

F32 = np.float32
FLT_MAX = np.finfo(np.float32).max
ELEMENTS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 0x7F, 8),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0, 0x7F, 15),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0, 0x07, 2),
}


def largest(element: str) -> np.float32:
    """The largest finite value of an element type."""
    return F32(ELEMENTS[element][1])


def emax(element: str) -> int:
    """The exponent of the largest finite value."""
    return ELEMENTS[element][3]


def bits(values: np.ndarray) -> np.ndarray:
    """The uint32 bit pattern of float32 values."""
    return np.ascontiguousarray(values, dtype=F32).view(np.uint32)


def floats(patterns: np.ndarray) -> np.ndarray:
    """The float32 values of uint32 bit patterns."""
    return np.ascontiguousarray(patterns, dtype=np.uint32).view(F32)


def encode(values: np.ndarray, element: str) -> np.ndarray:
    """satfinite_RNE: float32 values to codes. NaN gives the canonical code (E2M1 has none: code 7)."""
    values = np.asarray(values, dtype=F32)
    dtype, limit, nan_code, _ = ELEMENTS[element]
    nan = np.isnan(values)
    clamped = np.clip(np.where(nan, F32(0), values), F32(-limit), F32(limit))
    codes = np.ascontiguousarray(clamped.astype(dtype)).view(np.uint8)
    return np.where(nan, np.uint8(nan_code), codes).astype(np.uint8)


def decode(codes: np.ndarray, element: str) -> np.ndarray:
    """Codes to float32 values, exact."""
    codes = np.ascontiguousarray(codes, dtype=np.uint8)
    return codes.view(ELEMENTS[element][0]).astype(F32)


def e8m0_ceil(values: np.ndarray) -> np.ndarray:
    """The smallest E8M0 code whose value is >= v, for v >= 0: +inf gives 0xFE, NaN 0xFF."""
    pattern = bits(values).astype(np.int64) & 0x7FFFFFFF
    exponent, mantissa = pattern >> 23, pattern & 0x7FFFFF
    code = exponent + (mantissa != 0)
    code = np.where((exponent == 0) & (mantissa <= 0x400000), 0, code)
    code = np.minimum(code, 0xFE)
    return np.where(pattern > 0x7F800000, 0xFF, code).astype(np.uint8)


def e8m0_floor(amax: np.ndarray, element_emax: int) -> np.ndarray:
    """The OCP rule: max(exponent field of amax - emax, 0); NaN gives 0xFF."""
    pattern = bits(amax).astype(np.int64) & 0x7FFFFFFF
    code = np.maximum((pattern >> 23) - element_emax, 0)
    return np.where(pattern > 0x7F800000, 0xFF, code).astype(np.uint8)


def e8m0_decode(codes: np.ndarray) -> np.ndarray:
    """2^(code-127) in float32, 2^-127 (a subnormal) for code 0, NaN for code 255."""
    codes = np.asarray(codes, dtype=np.uint8).astype(np.uint32)
    pattern = np.where(codes == 0, np.uint32(0x00400000), codes << np.uint32(23))
    return floats(np.where(codes == 255, np.uint32(0x7FC00000), pattern)).reshape(codes.shape)


def pack_e2m1(codes: np.ndarray) -> np.ndarray:
    """Two codes per byte along the last axis, the even element in the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def unpack_e2m1(packed: np.ndarray) -> np.ndarray:
    """The inverse of pack_e2m1."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16 (nearest, ties to even), returned as float32."""
    with np.errstate(all="ignore"):
        return np.asarray(values, dtype=F32).astype(ml_dtypes.bfloat16).astype(F32)


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 rounded to "float32", "bfloat16" or "float16", returned as float32."""
    if dtype == "bfloat16":
        return to_bf16(values)
    with np.errstate(all="ignore"):
        return np.asarray(values, dtype=F32).astype({"float32": F32, "float16": np.float16}[dtype]).astype(F32)
