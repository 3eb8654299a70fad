"""Sums over the rows of groups and over columns on the GPU: partial sums in a workspace, then their sum, without atomics."""

from __future__ import annotations

import torch
from torch import Tensor

from blockscale.kernels import sums
from blockscale.layouts import ceil_div
from blockscale.ops.joined import HEIGHT
from blockscale.ops.launch.call import chunks
from blockscale.ops.launch.start import Candidate, start

ROW_SUMS = Candidate({"LANES": 32, "HEIGHT": 64}, 4)
COLUMN_PARTS = Candidate({"COLUMNS": 128}, 2)
GROUP_SUMS = Candidate({"LANES": 32, "COLUMNS": 32}, 4)


def column_parts(x: Tensor, rows: int, groups: int, columns: int) -> Tensor:
    """Workspace for partial sums of groups of rows: float32 (slots of 32 rows, columns), on x's device."""
    return x.new_empty((ceil_div(rows, HEIGHT) + groups, columns), dtype=torch.float32)


def group_sums(parts: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """float32 (G, columns) from the partial sums of each group's rows."""
    G, columns = offsets.numel() - 1, parts.shape[1]
    out = parts.new_empty((G, columns))
    programs = G * ceil_div(columns, GROUP_SUMS.constants["COLUMNS"])
    start(sums.group_sums, programs, (parts, offsets, G, rows, columns, out), {}, GROUP_SUMS)
    return out


def row_sums(parts: Tensor, offsets: Tensor | None) -> Tensor:
    """float32 (rows,) from the partial sums of each row, (parts, rows); 0 for a dead row."""
    count, rows = parts.shape
    out = parts.new_empty(rows)
    args = (parts, parts if offsets is None else offsets, 0 if offsets is None else offsets.numel() - 1, rows, count, out)
    start(sums.row_sums, ceil_div(rows, ROW_SUMS.constants["HEIGHT"]), args, {"LIVE": offsets is not None}, ROW_SUMS)
    return out


def bias_grad(dy: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor:
    """Sum of the rows of each group, times ``scale`` (M,) when given: float32 (G, N)."""
    dy, offsets = dy if dy.stride(1) == 1 else dy.contiguous(), offsets.contiguous()
    (M, N), G = dy.shape, offsets.numel() - 1
    parts = column_parts(dy, M, G, N)
    if G:
        factor = dy if scale is None else scale.contiguous()
        args = (dy, dy.stride(0), factor, offsets, G, M, N, parts)
        programs = parts.shape[0] * ceil_div(N, COLUMN_PARTS.constants["COLUMNS"])
        start(sums.column_parts, programs, args, {"SCALED": scale is not None, "CHUNKS": chunks(G)}, COLUMN_PARTS)
    return group_sums(parts, offsets, M)
