"""What the passes of ``grouped_mlp`` read besides their operands, and which gradients are asked for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from blockscale.ops import stages
from blockscale.ops.delayed import of_linear
from blockscale.ops.operands import LinearOperands
from blockscale.ops.tap import Seen, Tap
from blockscale.recipes import Recipe


@dataclass(frozen=True)
class MLPTensors:
    """What both passes read besides their operand.

    ``main_grads``: empty, or the float32 buffers of w1 and w2. ``caches``: empty, or the tickets of their caches.
    ``tap``: of somebody who watches.
    """

    w1: Tensor
    w2: Tensor
    offsets: Tensor
    probs: Tensor | None
    b1: Tensor | None
    b2: Tensor | None
    rng: Tensor | None
    main_grads: list[Tensor]
    caches: list[Tensor]
    scales: list[Tensor]
    histories: list[Tensor]
    tap: Tap | None

    def see(self, *tensors: Seen | None) -> None:
        """Show the tensors of a pass, in order, to whoever watches."""
        if self.tap is not None:
            self.tap.see_pass([t for t in tensors if t is not None], self.offsets)

    def see_gradients(self, dws: tuple[Tensor, Tensor], made: tuple[bool, bool]) -> None:
        """Show the weight gradients that were made, or the main_grads that they were added to."""
        for i in (0, 1):
            if self.tap is not None and made[i]:
                self.tap.see_weight(f"dw{i + 1}", self.main_grads[i] if self.main_grads else dws[i])

    def see_weights(self, w1_q: stages.Operand, w2_q: stages.Operand) -> None:
        """Show the weights as forward multiplies them."""
        if self.tap is not None:
            self.tap.see_weight("weight1", self.w1, w1_q)
            self.tap.see_weight("weight2", self.w2, w2_q)

    def linears(self, r: Recipe) -> tuple[LinearOperands, LinearOperands]:
        """Both linears' operands by recipe ``r``."""
        weights, caches, recipes = (self.w1, self.w2), self.caches or (None, None), (r.of("fc1"), r.of("fc2"))
        one, two = (
            LinearOperands(weights[i], self.offsets, recipes[i], caches[i], *of_linear(recipes[i], self.scales, self.histories, i))
            for i in (0, 1)
        )
        return one, two


@dataclass(frozen=True)
class Needs:
    """Which gradients are asked for."""

    x: bool
    w1: bool
    w2: bool
    probs: bool
    b1: bool
    b2: bool

    @property
    def below_w2(self) -> bool:
        """Whether anything before the second GEMM needs a gradient."""
        return self.x or self.w1 or self.b1 or self.probs
