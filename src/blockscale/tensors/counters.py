"""What is counted in a tensor by ``watch``: one row of float64 numbers a group (exact: counts stay below 2**53).

Elements are those of the live rows. A block is the run of elements in a row that share a scale (a 2-D block's rows count
one by one; FP8 per tensor: a row).

* ``nans``, ``infs``: elements of the high-precision tensor.
* ``saturated``: finite elements at least half a step beyond the block's largest value (a rounding would have overflowed):
  |x| >= 464 d for E4M3, 61440 d for E5M2, 7 d for E2M1, d the block's decode scale.
* ``underflow``: non-zero elements of at most half the block's smallest value, which become zero (rounded stochastically:
  mostly): |x| <= 2^-10 d, 2^-17 d, d/4; all of them where d is 0.
* ``..._blocks``: blocks with a NaN, with an infinity, with a saturated element; blocks lost whole (every non-zero element
  underflows).
* ``amax``: the largest finite magnitude. ``scale_max``, ``scale_min``: of the decode scales of finite, non-zero blocks.
* ``calls``: observations. ``first_nan``, ``first_inf``: number of the first observation with one.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from blockscale.formats import Format

SUMS = (
    "nans",
    "infs",
    "saturated",
    "underflow",
    "elements",
    "blocks",
    "nan_blocks",
    "inf_blocks",
    "saturated_blocks",
    "underflow_blocks",
    "calls",
)
#: combined by maximum; of the last three the negative is kept, so that the smallest survives
MAXIMA = ("amax", "scale_max", "scale_min", "first_nan", "first_inf")
NEGATED = ("scale_min", "first_nan", "first_inf")
FIELDS = SUMS + MAXIMA
INDEX = {name: i for i, name in enumerate(FIELDS)}
#: magnitudes in units of the decode scale: (at most this is lost, from this on it overflows)
LIMITS = {"e4m3": (2.0**-10, 464.0), "e5m2": (2.0**-17, 61440.0), "e2m1": (0.25, 7.0)}


@lru_cache(maxsize=8)
def _fresh_row(device: torch.device) -> Tensor:
    values = [0.0] * (len(SUMS) + 1) + [-math.inf] * (len(MAXIMA) - 1)
    return torch.tensor(values, dtype=torch.float64, device=device)


def fresh(rows: int, device: torch.device) -> Tensor:
    """float64 (rows, FIELDS) with nothing counted."""
    return _fresh_row(device).repeat(rows, 1)


def limits(fmt: Format) -> tuple[float, float]:
    """What is lost and what overflows in a format, in units of the decode scale."""
    return LIMITS[fmt.element_name]
