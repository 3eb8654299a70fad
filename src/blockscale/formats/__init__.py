"""Element and scale codes, and the formats made of them."""

from blockscale.formats.base import Format
from blockscale.formats.elements import (
    E2M1,
    E4M3,
    E5M2,
    ElementType,
    decode,
    element,
    encode,
    pack_e2m1,
    unpack_e2m1,
)
from blockscale.formats.scales import e8m0_ceil, e8m0_decode, e8m0_floor, e8m0_inverse
from blockscale.formats.specs import MXFP4, MXFP8, NVFP4, FP8Block, FP8Delayed, FP8Tensor, Hybrid, parse

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "ElementType",
    "FP8Block",
    "FP8Delayed",
    "FP8Tensor",
    "Format",
    "Hybrid",
    "decode",
    "e8m0_ceil",
    "e8m0_decode",
    "e8m0_floor",
    "e8m0_inverse",
    "element",
    "encode",
    "pack_e2m1",
    "parse",
    "unpack_e2m1",
]
