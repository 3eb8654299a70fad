"""The meaning of the grouped GEMM in its three roles, in plain torch.

Each group is one float32 product of exact operands (codes times block scales); its accumulator is multiplied by
alpha = fl(global scale of a * global scale of b), then the bias is added, then the result is rounded once. Each side is
padded with zeros to a multiple of 32: thinner products take other kernels in torch's CPU GEMM, whose bits differ.

Legend: G groups, N outputs, K contraction of the forward product, P slots of the frame, M rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blockscale.layouts import TileMap, round_up
from blockscale.tensors import GroupedTensor
from blockscale.tensors.decode import global_scale, values

Operand = GroupedTensor | Tensor
PAD = 32


@dataclass
class Frame:
    """float32 (P, columns) operand values and the scale that the accumulator still needs.

    ``scale`` is float32 (G,) or None; of a row-scaled operand, (P,) for a rowwise plane, (G, columns) for a columnwise one.
    """

    values: Tensor
    scale: Tensor | None
    by_slot: bool = False

    def factor(self, g: int, slots: slice) -> Tensor | None:
        """The scale of a group: 0-dimensional, or one entry for each of its rows (columns) that the product keeps."""
        if self.scale is None:
            return None
        return self.scale[slots] if self.by_slot else self.scale[g]


def frame(operand: Operand, plane: str, tiles: TileMap) -> Frame:
    """Operand values of a quantized plane, or of a high-precision tensor rounded to bfloat16."""
    if isinstance(operand, GroupedTensor):
        logical, fmt = operand.logical(plane), operand.format.of(plane)
        x = values(logical, fmt, plane, tiles, operand.shape[1], with_global=False)
        return Frame(x, global_scale(logical, fmt), fmt.scales_rows and plane == "rowwise")
    return Frame(tiles.to_frame(operand.flatten(0, -2).to(torch.bfloat16)).float(), None)


def weight_tiles(weight: Operand, num_groups: int) -> TileMap:
    """The tiles of a weight (G, N, K), whose groups are its G matrices of N rows."""
    if isinstance(weight, GroupedTensor):
        return weight.tiles
    G, N, _ = weight.shape
    return TileMap(torch.arange(num_groups + 1, device=weight.device) * N, G * N)


def product(a: Tensor, b: Tensor) -> Tensor:
    """float32 a @ b, both padded with zeros to multiples of 32 outside the contraction: never a matrix-vector kernel."""
    m, n = a.shape[0], b.shape[1]
    if m % PAD or n % PAD:
        a, b = F.pad(a, (0, 0, 0, -m % PAD)), F.pad(b, (0, -n % PAD))
    precision = torch.get_float32_matmul_precision()
    if precision == "highest":
        return (a @ b)[:m, :n]
    torch.set_float32_matmul_precision("highest")  # the caller's choice must not change bits
    try:
        return (a @ b)[:m, :n]
    finally:
        torch.set_float32_matmul_precision(precision)


def _times_alpha(acc: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
    """The accumulator times alpha = fl(a * b); ``a`` belongs to its rows, ``b`` to its columns, where they are not one number."""
    if a is not None and a.dim():
        a = a[:, None]
    if a is None or b is None:
        alpha = b if a is None else a
        return acc if alpha is None else acc * alpha
    return acc * (a * b)


def rows_by_weight(
    a: Operand,
    w: Operand,
    offsets: Tensor,
    capacity: int,
    *,
    transpose: bool,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
) -> Tensor:
    """Forward (``transpose=True``: y = x W^T) and dgrad (``False``: dx = dy W): (capacity, columns), dead rows zero.

    Args:
        a: rowwise plane of (capacity, K) or (capacity, N).
        w: (G, N, K): its rowwise plane for forward, its columnwise plane for dgrad.
        bias: (G, columns), added in float32 before the rounding; times ``bias_scale`` (capacity,) when given.
    """
    tiles = TileMap(offsets, capacity)
    w_tiles = weight_tiles(w, tiles.num_groups)
    a_f = frame(a, "rowwise", tiles)
    w_f = frame(w, "rowwise" if transpose else "columnwise", w_tiles)
    N = w.matrix_rows if isinstance(w, GroupedTensor) else w.shape[1]
    assert N is not None
    columns = N if transpose else w_f.values.shape[1]
    y = torch.zeros((capacity, columns), dtype=out_dtype, device=a_f.values.device)
    for g, (start, rows, slot) in enumerate(_groups(tiles)):
        if rows == 0:
            continue
        w_start = g * round_up(N, 128)
        w_NK = w_f.values[w_start : w_start + N]
        acc = product(a_f.values[slot : slot + round_up(rows, PAD)], w_NK.mT if transpose else w_NK)[:rows]
        acc = _times_alpha(acc, a_f.factor(g, slice(slot, slot + rows)), w_f.factor(g, slice(w_start, w_start + N)))
        if bias is not None:
            b = bias[g].float()
            acc = acc + (b if bias_scale is None else bias_scale[start : start + rows, None] * b)
        y[start : start + rows] = acc.to(out_dtype)
    return y


def wgrad(dy: Operand, x: Operand, offsets: Tensor, capacity: int) -> Tensor:
    """dW = dy^T x for each group, from columnwise planes: float32 (G, N, K); zeros for a group without rows."""
    tiles = TileMap(offsets, capacity)
    dy_f, x_f = frame(dy, "columnwise", tiles), frame(x, "columnwise", tiles)
    shape = (tiles.num_groups, dy_f.values.shape[1], x_f.values.shape[1])
    dw = torch.zeros(shape, dtype=torch.float32, device=dy_f.values.device)
    for g, (_, rows, slot) in enumerate(_groups(tiles)):
        if rows:
            slots = slice(slot, slot + round_up(rows, PAD))
            acc = product(dy_f.values[slots].mT, x_f.values[slots])
            dw[g] = _times_alpha(acc, dy_f.factor(g, slots), x_f.factor(g, slots))
    return dw


def bias_grad(dy: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor:
    """Sum of the rows of each group, times ``scale`` (capacity,) when given: float32 (G, columns)."""
    tiles = TileMap(offsets, dy.shape[0])
    rows = tiles.to_frame(dy).float()
    if scale is not None:
        rows = rows * tiles.to_frame(scale)[:, None]
    total = rows.new_zeros((tiles.num_groups, dy.shape[1]))
    for g, (_, count, slot) in enumerate(_groups(tiles)):
        total[g] = rows[slot : slot + count].sum(0)
    return total


def row_dot(dy: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """Each live row of dy (capacity, N) times its group's bias (G, N), summed: float32 (capacity,)."""
    tiles = TileMap(offsets, dy.shape[0])
    own = F.pad(bias.float(), (0, 0, 0, 1))[tiles.group_of_row]
    return (dy.float().masked_fill(~tiles.live[:, None], 0) * own).sum(1)


def _groups(tiles: TileMap) -> list[tuple[int, int, int]]:
    """(first row, rows, first slot) of each group, read on the host."""
    offsets, starts = tiles.offsets.tolist(), tiles.tile_start.tolist()
    return [(offsets[g], offsets[g + 1] - offsets[g], starts[g] * 128) for g in range(tiles.num_groups)]
