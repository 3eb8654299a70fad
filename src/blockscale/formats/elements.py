"""Element codes: E4M3, E5M2 and E2M1, from float32 and back.

Encoding is ``satfinite`` (what lies beyond the largest finite code becomes that code, with its sign) and rounds to
nearest, ties to even. NaN codes are canonical whatever the sign: 0x7F for both FP8 types, 7 (the value 6, E2M1 has no
NaN) for E2M1.

Source: OCP 8-bit floating point specification 1.0; OCP microscaling formats (MX) specification 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ElementType:
    """Facts of an element type: bits, largest finite value, exponent of that value."""

    name: str
    bits: int
    max: float
    emax: int


E4M3 = ElementType("e4m3", 8, 448.0, 8)
E5M2 = ElementType("e5m2", 8, 57344.0, 15)
E2M1 = ElementType("e2m1", 4, 6.0, 2)
ELEMENTS = {e.name: e for e in (E4M3, E5M2, E2M1)}

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_TORCH_DTYPE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def element(name: str) -> ElementType:
    """The element type called ``name``; ``ValueError`` names the legal ones."""
    if name not in ELEMENTS:
        raise ValueError(f"element={name!r} is not one of {sorted(ELEMENTS)}")
    return ELEMENTS[name]


def encode(x: Tensor, name: str) -> Tensor:
    """Codes of float32 values.

    Args:
        x: float32, any shape.
        name: "e4m3", "e5m2" or "e2m1".

    Returns:
        uint8 of the same shape, one code an element (E2M1 codes in the low nibble, unpacked).
    """
    kind = element(name)
    if x.dtype != torch.float32:
        raise TypeError(f"x has dtype {x.dtype}; element codes are made from torch.float32")
    if kind is E2M1:
        return _encode_e2m1(x)
    # clamp keeps NaN and the sign of zero; the cast itself rounds to nearest even, but its overflow differs by version
    codes = x.clamp(-kind.max, kind.max).to(_TORCH_DTYPE[name]).view(torch.uint8)
    return codes ^ (codes & ~(codes + 1) & 0x80)  # a NaN with its sign, 0xFF, becomes 0x7F: nothing else has this bit set


def _encode_e2m1(x: Tensor) -> Tensor:
    """Codes 0..4 are steps of 0.5, 4..6 of 1, 6..7 of 2: the least of the three roundings is the right one, ties included."""
    x = x.nan_to_num(nan=E2M1.max)
    a = x.abs().clamp_(max=E2M1.max)
    code = torch.minimum((a * 2).round_(), a.round().add_(2))
    code = torch.minimum(code, (a * 0.5).round_().add_(4)).to(torch.int32)
    return (code | ((x.view(torch.int32) >> 28) & 8)).to(torch.uint8)


def decode(codes: Tensor, name: str) -> Tensor:
    """float32 values of uint8 codes (E2M1: unpacked codes 0..15), same shape."""
    kind = element(name)
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes has dtype {codes.dtype}; element codes are torch.uint8")
    if kind is E2M1:
        table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float32, device=codes.device)
    else:
        table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(_TORCH_DTYPE[name]).float()
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Two codes a byte, the even element in the low nibble. ``(..., K)`` with K even -> ``(..., K // 2)``."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack_e2m1`: ``(..., B)`` bytes -> ``(..., 2 B)`` codes."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
