"""Linear: torch.nn.Linear in the formats of a recipe. Legend: M rows, K inputs, N outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockscale.layouts import offsets_from_sizes
from blockscale.nn.delayed import ScaledLayer
from blockscale.nn.grouped_linear import delayed, main_grad_of
from blockscale.ops.grouped_linear import grouped_linear
from blockscale.ops.tap import Tap
from blockscale.ops.weight_cache import WeightCache
from blockscale.ops.wgrad_queue import WgradQueue
from blockscale.recipes import Recipe, check_recipe, current_recipe


class Linear(ScaledLayer, nn.Linear):
    """y = x W^T + b, a :class:`~blockscale.nn.grouped_linear.GroupedLinear` of one group: the same operator, the same bits.

    A ``torch.nn.Linear`` in every other respect: parameters, initialisation, state dict, ``isinstance``.

    Args:
        in_features, out_features: K, N, at least 1.
        bias: learn a bias (N,).
        recipe: beats ``autocast``; None: the enclosing autocast's, else BF16.
        accumulate_into_main_grad: add dW in float32 to ``weight.main_grad`` (N, K) during backward instead of setting
            ``weight.grad``.
        delay_wgrad, cache_weights: as in GroupedLinear.
        device, dtype: of the parameters.

    Attributes:
        weight: (N, K). bias: (N,) or None.
        wgrad_queue, weight_cache: with delay_wgrad, cache_weights; else None.
        tap: while somebody watches the layer (``bs.watch``); else None.
    """

    recipe: Recipe | None
    accumulate_into_main_grad: bool
    wgrad_queue: WgradQueue | None
    weight_cache: WeightCache | None
    tap: Tap | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        recipe: Recipe | None = None,
        accumulate_into_main_grad: bool = False,
        delay_wgrad: bool = False,
        cache_weights: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            if value < 1:
                raise ValueError(f"{name}={value} is not legal; it must be at least 1")
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.set_options(recipe, accumulate_into_main_grad, delay_wgrad, cache_weights)

    def set_options(
        self,
        recipe: Recipe | None,
        accumulate_into_main_grad: bool = False,
        delay_wgrad: bool = False,
        cache_weights: bool = False,
    ) -> None:
        """Set what a ``torch.nn.Linear`` does not have; options as in the class."""
        self.recipe = None if recipe is None else check_recipe(recipe)
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.wgrad_queue = WgradQueue() if delay_wgrad else None
        self.weight_cache = WeightCache() if cache_weights else None
        if recipe is not None:
            self.scaling_for(recipe.of("linear"), 1)

    def reset_parameters(self) -> None:
        """As ``torch.nn.Linear``; delayed scaling starts anew too."""
        super().reset_parameters()
        for state in self.tensor_scalings():
            state.reset()

    def main_grad(self) -> Tensor | None:
        """As :meth:`~blockscale.nn.grouped_linear.GroupedLinear.main_grad`, in the weight's own shape (N, K)."""
        return main_grad_of(self.weight) if self.accumulate_into_main_grad else None

    def forward(self, input: Tensor) -> Tensor:
        """y of x [..., K], float32, bfloat16 or float16: [..., N] in x's dtype.

        Raises:
            ValueError: the last dimension of x is not ``in_features``.
        """
        x = input
        if x.dim() < 1 or x.shape[-1] != self.in_features:
            raise ValueError(f"x has shape {tuple(x.shape)}; [..., {self.in_features}] is needed")
        x_MK = x.reshape(-1, self.in_features)
        main_grad, recipe = self.main_grad(), current_recipe(self.recipe)
        y_MN = grouped_linear(
            x_MK,
            self.weight[None],
            one_group(x_MK),
            None if self.bias is None else self.bias[None],
            recipe=recipe,
            scaling=self.scaling_for(recipe.of("linear"), 1),
            main_grad=None if main_grad is None else main_grad[None],
            cache=self.weight_cache,
            queue=self.wgrad_queue,
            tap=self.tap,
        )
        return y_MN.view(*x.shape[:-1], self.out_features)

    def backward_dw(self, microbatches: int | None = None) -> None:
        """As :meth:`~blockscale.nn.grouped_linear.GroupedLinear.backward_dw`."""
        delayed(self.wgrad_queue).run([self.weight], [self.main_grad()], microbatches, self.tap)

    def extra_repr(self) -> str:
        """Sizes and recipe."""
        return super().extra_repr() + ("" if self.recipe is None else f", recipe={self.recipe.name}")


def one_group(x_MK: Tensor) -> Tensor:
    """int64[2] offsets of the one group that all rows of x belong to."""
    return offsets_from_sizes(torch.full((1,), x_MK.shape[0], dtype=torch.int64, device=x_MK.device))
