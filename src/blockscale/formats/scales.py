"""Scale codes: E8M0 (powers of two) and E4M3 used as an unsigned scale.

E8M0 code c is 2^(c - 127); code 0 is 2^-127 (not zero), code 255 is NaN.
Source: OCP microscaling formats (MX) specification 1.0, section 5.4.1.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

E8M0_NAN = 0xFF
FLT_MAX = torch.finfo(torch.float32).max


def divide(numerator: float, x: Tensor) -> Tensor:
    """fl(numerator / x) in float32, one rounding. (``number / tensor`` in torch multiplies by a rounded reciprocal.)"""
    return torch.div(torch.tensor(numerator, dtype=torch.float32, device=x.device), x)


@lru_cache(maxsize=16)
def reciprocal_f32(value: float) -> float:
    """fl(1 / value) in float32, as a Python number."""
    return float(divide(1.0, torch.tensor(value, dtype=torch.float32)))


def _bits(v: Tensor) -> Tensor:
    return v.view(torch.int32)


def e8m0_ceil(v: Tensor) -> Tensor:
    """The smallest E8M0 value that is at least ``v``, as a uint8 code.

    Args:
        v: float32, non-negative or NaN, any shape.

    0 -> code 0; +inf -> 0xFE; NaN -> 0xFF. Worked: 1.0 -> 127, 1.5 -> 128, 2^-127 -> 0, 1.1 * 2^-127 -> 1.
    """
    bits = _bits(v) & 0x7FFFFFFF
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa != 0) & ~((exponent == 0) & (mantissa <= 0x400000))  # 0x400000 is 2^-127, code 0
    code = (exponent + up).clamp_(max=0xFE)
    return code.masked_fill_(v.isnan(), E8M0_NAN).to(torch.uint8)


def e8m0_floor(amax: Tensor, emax: int) -> Tensor:
    """OCP MX v1.0 scale: ``max(E - emax, 0)``, E the exponent field of ``amax`` (float32); NaN -> 0xFF."""
    code = (((_bits(amax) & 0x7FFFFFFF) >> 23) - emax).clamp_(min=0)
    return code.masked_fill_(amax.isnan(), E8M0_NAN).to(torch.uint8)


def e8m0_decode(code: Tensor) -> Tensor:
    """float32 values of uint8 E8M0 codes: 2^(code - 127), NaN for 255."""
    wide = code.to(torch.int32)
    bits = torch.where(wide == 0, 0x400000, wide << 23)
    return torch.where(wide == E8M0_NAN, 0x7FC00000, bits).view(torch.float32)


def e8m0_inverse(code: Tensor) -> Tensor:
    """float32 ``2^(127 - code)``, the exact multiplier that brings a block to its codes; NaN for 255."""
    inverse = e8m0_decode((254 - code.to(torch.int32)).clamp_(min=0).to(torch.uint8))
    return inverse.masked_fill_(code == E8M0_NAN, float("nan"))


NVFP4_RANGE = 448.0 * 6.0


def nvfp4_encode_scale(amax: Tensor, largest: float = NVFP4_RANGE) -> Tensor:
    """S_enc of NVFP4: float32, from the global amax (float32, no NaN); ``largest``: what the amax is mapped to."""
    s_enc = divide(largest, amax).clamp_(max=FLT_MAX)
    return s_enc.masked_fill_((amax == 0) | (s_enc == 0), 1.0)


def nvfp4_decode_scale(amax: Tensor, largest: float = NVFP4_RANGE) -> Tensor:
    """S_dec = fl(1 / S_enc), always computed from the stored amax."""
    return divide(1.0, nvfp4_encode_scale(amax, largest))
