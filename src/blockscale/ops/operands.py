"""The operands of one linear layer y = x W^T in its three products, as its recipe says.

Everything here runs inside an operator's implementation, on real tensors. Legend: M rows, K inputs, N outputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.layouts import PLANES
from blockscale.ops import stages
from blockscale.ops.quantize import fake_grouped
from blockscale.ops.stages import LAYOUT, Operand
from blockscale.ops.weight_cache import weight_operand
from blockscale.recipes import Recipe
from blockscale.tensors import GroupedTensor, Plane


def kept_planes(r: Recipe, save_input: bool, recompute: bool = False) -> tuple[str, ...]:
    """The planes of a linear's input that stay for backward: for wgrad (``save_input``), for the same product again."""
    if r.saved_plane is None:
        return ()
    return tuple(p for p in PLANES if (save_input and p == r.saved_plane) or (recompute and p == "rowwise"))


def fake_saved(x: Tensor, offsets: Tensor, r: Recipe, planes: tuple[str, ...]) -> list[Tensor]:
    """Empty tensors like the planes of x that forward saves."""
    made: list[Tensor] = []
    for name in planes:
        assert r.input is not None
        row, fmt = name == "rowwise", r.input.of(name)
        tensors = fake_grouped(x, x.shape[0], x.shape[1], offsets.shape[0] - 1, fmt, row, not row, LAYOUT)
        made += tensors if fmt.has_amax else tensors[:2]
    return made


@dataclass(frozen=True)
class LinearOperands:
    """A linear's weight (G, N, K), the extents of its rows, its recipe, and the ticket of its weight's cache if there is one."""

    weight: Tensor
    offsets: Tensor
    recipe: Recipe
    cache: Tensor | None

    def input(self, x: Tensor, planes: tuple[str, ...] = ()) -> Operand:
        """x for the forward product, with the planes that are to be kept."""
        return stages.quantize(x, self.offsets, self.recipe.input, rowwise=True, columnwise="columnwise" in planes)

    def input_for_wgrad(self, x: Tensor) -> Operand:
        """x as wgrad reads it, made from x itself."""
        plane = self.recipe.saved_plane
        if plane is None:
            return x
        row = plane == "rowwise"
        return self.seen(stages.quantize(x, self.offsets, self.recipe.input, rowwise=row, columnwise=not row))

    def weight_rows(self) -> Operand:
        """W for the forward product."""
        return weight_operand(self.weight, self.recipe.weight, "rowwise", self.cache)

    def weight_for_dgrad(self) -> Operand:
        """W as dgrad reads it."""
        if self.recipe.backward == "high_precision":
            return self.weight
        if self.recipe.backward == "quantized":
            return weight_operand(self.weight, self.recipe.weight, "columnwise", self.cache)
        w = self.seen(self.weight_rows())
        return w.view(self.weight.shape) if isinstance(w, Tensor) else w

    def gradient(self, dy: Tensor, rowwise: bool, columnwise: bool, rng: Tensor | None) -> Operand:
        """dy as dgrad (rowwise) and wgrad (columnwise) read it."""
        return stages.quantize(dy, self.offsets, self.recipe.gradient, rowwise=rowwise, columnwise=columnwise, rng=rng)

    def seen(self, q: Operand) -> Operand:
        """Where backward is computed from the values that forward saw, those values; the GEMMs round operands to bfloat16."""
        if self.recipe.backward == "dequantized" and isinstance(q, GroupedTensor):
            return q.dequantize(torch.bfloat16)
        return q


@dataclass(frozen=True)
class KeptInput:
    """What forward left of a linear's input: x itself, or planes of it (``tensors``, in the order of ``plane_tensors``)."""

    x: Tensor | None
    tensors: list[Tensor]
    recomputes: bool

    def rows(self, of: LinearOperands, capacity: int) -> Operand:
        """x as the forward product read it; for layers that compute it again."""
        return of.input(self.x) if self.x is not None else self._plane(of, "rowwise", capacity)

    def for_wgrad(self, of: LinearOperands, capacity: int) -> Operand:
        """x as wgrad reads it."""
        plane = of.recipe.saved_plane
        if plane is None:
            assert self.x is not None
            return self.x
        return of.seen(self._plane(of, plane, capacity))

    def _plane(self, of: LinearOperands, name: str, capacity: int) -> GroupedTensor:
        fmt, skip = of.recipe.input, 0
        assert fmt is not None
        if name == "columnwise" and self.recomputes:
            skip = 2 + fmt.of("rowwise").has_amax
        own = fmt.of(name)
        data, scale, *amax = self.tensors[skip : skip + 2 + own.has_amax]
        plane = Plane(data, scale, amax[0] if own.has_amax else None, LAYOUT)
        row, column = (plane, None) if name == "rowwise" else (None, plane)
        return GroupedTensor((capacity, of.weight.shape[2]), own, row, column, of.offsets)
