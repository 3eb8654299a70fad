"""The operands of one linear layer y = x W^T in its three products, as its recipe says.

Everything here runs inside an operator's implementation, on real tensors. Legend: M rows, K inputs, N outputs, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockscale.formats import FP8Delayed
from blockscale.layouts import PLANES
from blockscale.ops import stages
from blockscale.ops.quantize import fake_grouped
from blockscale.ops.stages import LAYOUT, Operand
from blockscale.ops.weight_cache import weight_operand
from blockscale.recipes import Recipe
from blockscale.reference.delayed import record
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
    """A linear's weight (G, N, K), the extents of its rows, its recipe, the ticket of its weight's cache, and its scales.

    ``scales``: of its ``FP8Delayed`` formats, by role; ``history``: of the gradient's amax.
    """

    weight: Tensor
    offsets: Tensor
    recipe: Recipe
    cache: Tensor | None
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    history: Tensor | None = None

    def input(self, x: Tensor, planes: tuple[str, ...] = ()) -> Operand:
        """x for the forward product, with the planes that are to be kept."""
        return self._input(x, True, "columnwise" in planes)

    def _input(self, x: Tensor, rowwise: bool, columnwise: bool) -> Operand:
        scale = self.scales.get("input")
        return stages.quantize(x, self.offsets, self.recipe.input, rowwise=rowwise, columnwise=columnwise, scale=scale)

    def input_for_wgrad(self, x: Tensor) -> Operand:
        """x as wgrad reads it, made from x itself."""
        plane = self.recipe.saved_plane
        if plane is None:
            return x
        return self.seen(self._input(x, plane == "rowwise", plane == "columnwise"))

    def weight_rows(self) -> Operand:
        """W for the forward product."""
        return self._weight("rowwise")

    def _weight(self, plane: str) -> Operand:
        return weight_operand(self.weight, self.recipe.weight, plane, self.cache, self.scales.get("weight"))

    def weight_for_dgrad(self) -> Operand:
        """W as dgrad reads it."""
        if self.recipe.backward == "high_precision":
            return self.weight
        if self.recipe.backward == "quantized":
            return self._weight("columnwise")
        w = self.seen(self.weight_rows())
        return w.view(self.weight.shape) if isinstance(w, Tensor) else w

    def gradient(self, dy: Tensor, rowwise: bool, columnwise: bool, rng: Tensor | None) -> Operand:
        """dy as dgrad (rowwise) and wgrad (columnwise) read it; a delayed format's history takes its amax."""
        fmt, scale = self.recipe.gradient, self.scales.get("gradient")
        q = stages.quantize(dy, self.offsets, fmt, rowwise=rowwise, columnwise=columnwise, rng=rng, scale=scale)
        if isinstance(fmt, FP8Delayed) and isinstance(q, GroupedTensor):
            assert self.history is not None
            record(self.history, amax_of(q))
        return q

    def amaxes(self, x_q: Operand, w_q: Operand) -> list[Tensor]:
        """What the histories of the input and the weight are to take, where their formats are delayed."""
        pairs = ((self.recipe.input, x_q), (self.recipe.weight, w_q))
        return [amax_of(q).clone() for fmt, q in pairs if isinstance(fmt, FP8Delayed) and isinstance(q, GroupedTensor)]

    def seen(self, q: Operand) -> Operand:
        """Where backward is computed from the values that forward saw, those values; the GEMMs round operands to bfloat16."""
        if self.recipe.backward == "dequantized" and isinstance(q, GroupedTensor):
            return q.dequantize(torch.bfloat16)
        return q


def amax_of(q: GroupedTensor) -> Tensor:
    """The amax that a plane holds (both hold the same)."""
    amax = next(iter(q.planes.values())).amax
    assert amax is not None
    return amax


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
