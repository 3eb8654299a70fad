"""Philox4x32-10 in plain torch: the random bits of stochastic rounding, the same on every backend.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def _mul(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b, both below 2^32, within int64."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16)
    return (high + (low >> 16)) >> 16, ((high << 16) + low) & _MASK


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    """Four random words a counter.

    Args:
        seed: int64 scalar; key = (low word, high word).
        c0, c1, c2, c3: int64 counters below 2^32, broadcast together.

    Returns:
        int64 (..., 4), each word in 0..2^32-1. Zero key and counter: 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    for _ in range(_ROUNDS):
        hi0, lo0 = _mul(c0, _M0)
        hi1, lo1 = _mul(c2, _M1)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)
