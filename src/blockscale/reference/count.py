"""The meaning of what ``watch`` counts (``tensors.counters``), in plain torch: no host read, so no sync on any device.

Legend: M rows, K columns, V elements of a block, B blocks of a row, G groups, F counters.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from blockscale.formats import FP8Block, FP8Tensor
from blockscale.layouts import TILE, TileMap, ceil_div
from blockscale.tensors import GroupedTensor
from blockscale.tensors.counters import SUMS, fresh, limits
from blockscale.tensors.decode import block_scales, global_scale

#: elements looked at together: temporaries stay below a few hundred MiB whatever the tensor
_CHUNK = 1 << 22


@torch.no_grad()
def count_into(out: Tensor, x: Tensor, offsets: Tensor, q: GroupedTensor | None, call: int) -> None:
    """Add what the live rows of x hold to the counters of their groups.

    Args:
        out: float64 (G, F), written in place.
        x: (M, K) float32, bfloat16 or float16; rows past ``offsets[-1]`` are not looked at.
        offsets: int64[G+1].
        q: x quantized, with a rowwise plane; None: elements alone are counted.
        call: number of the observation, for ``first_nan`` and ``first_inf``.
    """
    group, G = TileMap(offsets, x.shape[0]).group_of_row, offsets.numel() - 1
    scale = None if q is None else _row_scales(q)
    made, sums = fresh(G + 1, x.device), len(SUMS)
    made[:, sums - 1] = 1
    step = max(1, _CHUNK // max(x.shape[1], 1))
    for a in range(0, x.shape[0] if x.shape[1] else 0, step):
        rows = _rows(x[a : a + step], None if scale is None else scale[a : a + step], q)
        index = group[a : a + step, None]
        made[:, :sums].index_add_(0, index[:, 0], rows[:, :sums])
        made[:, sums : sums + 3].scatter_reduce_(0, index.expand(-1, 3), rows[:, sums:], "amax")
    for field, source in ((sums + 3, 0), (sums + 4, 1)):
        made[:, field] = torch.where(made[:, source] > 0, float(-call), -math.inf)
    out[:, :sums] += made[:G, :sums]
    out[:, sums:] = torch.maximum(out[:, sums:], made[:G, sums:])


@torch.no_grad()
def count_finite(out: Tensor, x: Tensor, offsets: Tensor | None) -> bool:
    """Add what :func:`count_into` would, without scales, if the live rows of x are finite; if not, change nothing.

    Reads the device: for tensors on the CPU.

    Args:
        out: float64 (G, F), written in place if x is finite.
        x: (M, K) with offsets, else of any shape. offsets: int64[G+1]; None: one group.

    Returns:
        whether x is finite.
    """
    if offsets is None:
        x = x.reshape(1, -1)
        offsets = torch.tensor([0, 1], device=x.device)
    if not bool(x[: int(offsets[-1])].isfinite().all()):
        return False
    count_into(out, x, offsets, None, 0)
    return True


def _row_scales(q: GroupedTensor) -> Tensor:
    """float32 (M, B): the decode scale of each block of each row (of a dead row: anything)."""
    fmt, tiles, logical = q.format, q.tiles, q.logical("rowwise")
    group = tiles.group_of_row.clamp(max=max(q.num_groups - 1, 0))
    if isinstance(fmt, FP8Tensor):
        return logical.scale[group][:, None]
    s = block_scales(logical, fmt)
    if isinstance(fmt, FP8Block) and fmt.is_2d:
        s = s.repeat_interleave(TILE, 0)
    s = tiles.to_rows(s)
    total = global_scale(logical, fmt)
    if total is None:
        return s
    return s * (tiles.to_rows(total) if fmt.scales_rows else total[group])[:, None]


def _rows(x: Tensor, scale: Tensor | None, q: GroupedTensor | None) -> Tensor:
    """float64 (M, F - 2): the counters of each row, without calls (0), first_nan and first_inf."""
    M, K = x.shape
    none = torch.full((M,), -math.inf, dtype=torch.float64, device=x.device)
    zero = torch.zeros_like(none)
    if q is None or scale is None:
        nan, inf = x.isnan(), x.isinf()
        largest = x.abs().masked_fill_(nan | inf, 0).amax(1)
        counts = [nan.sum(1), inf.sum(1), zero, zero, torch.full_like(zero, K), *[zero] * 6]
        return torch.stack([t.double() for t in (*counts, largest, none, none)], 1)
    v = q.format.block_length or K
    m = F.pad(x.abs().double(), (0, ceil_div(K, v) * v - K)).view(M, -1, v)
    nan, inf = m.isnan(), m.isinf()
    finite = m.masked_fill(nan | inf, 0)
    block_max = finite.amax(2)
    low, high = limits(q.format)
    d = scale.double()[..., None]
    saturated = (finite >= torch.where(d == 0, math.inf, d * high)) & ~(nan | inf)
    lost = (finite > 0) & (finite <= torch.where(d == 0, math.inf, d * low))
    good = (block_max > 0) & ~(nan | inf).any(2)
    whole = good & (lost | (finite == 0)).all(2)
    blocks = [t.any(2).sum(1) for t in (nan, inf, saturated)]
    counts = [torch.full_like(none, K), torch.full_like(none, m.shape[1]), *blocks, whole.sum(1), zero]
    extremes = [block_max.amax(1), *(torch.where(good & ~d[..., 0].isnan(), s * d[..., 0], -math.inf).amax(1) for s in (1, -1))]
    elements = [t.sum((1, 2)) for t in (nan, inf, saturated, lost)]
    return torch.stack([t.double() for t in (*elements, *counts, *extremes)], 1)
