"""What every quantizer's launch needs: its arguments, its outputs and how many pieces the rows are cut into.

Legend: M rows (capacity), K columns, G groups, T tiles of 128 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockscale.formats import Format
from blockscale.layouts import PLANES, ceil_div
from blockscale.tensors.shapes import amax_shape, grouped_plane_shapes, plane_shapes, scale_dtype


@dataclass(frozen=True)
class Call:
    """What the kernels of all formats take. ``row``, ``column``: data, scale, amax of a plane; x where it is not asked."""

    x: Tensor
    offsets: Tensor
    tiles: int
    groups: int
    rowwise: bool
    columnwise: bool
    layout: str
    row: list[Tensor]
    column: list[Tensor]
    grouped: bool

    @property
    def extent(self) -> tuple[Any, ...]:
        """A kernel's first arguments: x, its row stride, offsets, groups, rows, columns."""
        return (self.x, self.x.stride(0), self.offsets, self.groups, *self.x.shape)

    @property
    def flags(self) -> dict[str, Any]:
        """Constants that say how groups are found and which planes are asked."""
        return {"GROUPED": self.grouped, "CHUNKS": chunks(self.groups), "ROW": self.rowwise, "COL": self.columnwise}

    def slots(self, rows: int) -> int:
        """Pieces of ``rows`` rows that the kernels cut a tensor into, see ``kernels.extent``."""
        return ceil_div(self.x.shape[0], rows) + self.groups if self.grouped else 128 // rows * self.tiles


def chunks(groups: int) -> int:
    """The kernels' CHUNKS: how often 32 groups are looked at, in powers of two; 0 for many."""
    n = 1 << (ceil_div(max(groups, 1), 32) - 1).bit_length()
    return n if n <= 8 else 0


def words(data: Tensor) -> Tensor:
    """Data as the int32 words that a kernel writes."""
    return data.flatten().view(torch.int32)


def empty_planes(x: Tensor, fmt: Format, G: int | None, rowwise: bool, columnwise: bool, layout: str) -> list[Tensor]:
    """Tensors to write the planes to, in the operators' order; G None: a plain tensor."""
    M, K = x.shape
    tensors = []
    for name, asked in zip(PLANES, (rowwise, columnwise), strict=True):
        if asked:
            shapes = plane_shapes(fmt, M, K, name, layout) if G is None else grouped_plane_shapes(fmt, M, K, G, name, layout)
            tensors.append(x.new_empty(shapes[0], dtype=torch.uint8))
            tensors.append(x.new_empty(shapes[1], dtype=scale_dtype(fmt)))
            tensors.append(x.new_empty(amax_shape(fmt, name, M, K, G), dtype=torch.float32))
    return tensors
