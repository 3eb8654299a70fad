"""GroupedLinear: one weight matrix a group. Legend: M rows, K inputs, N outputs, G groups."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from blockscale.layouts import offsets_from_sizes
from blockscale.nn.delayed import ScaledLayer
from blockscale.ops import checks
from blockscale.ops.grouped_linear import grouped_linear
from blockscale.ops.tap import Tap
from blockscale.ops.weight_cache import WeightCache
from blockscale.ops.wgrad_queue import WgradQueue
from blockscale.recipes import Recipe, check_recipe, current_recipe


class GroupedLinear(ScaledLayer):
    """y = x W_g^T + b_g for the rows of each group g, in the formats of a recipe, forward and backward.

    Args:
        num_groups: G >= 1 (experts on this device).
        in_features, out_features: K, N.
        bias: learn one (N,) bias a group.
        recipe: beats ``autocast``; None: the enclosing autocast's, else BF16.
        accumulate_into_main_grad: add dW in float32 to ``weight.main_grad`` (made by the framework, float32, the weight's
            shape) during backward instead of setting ``weight.grad``.
        delay_wgrad: backward leaves dW to :meth:`backward_dw`.
        cache_weights: keep the quantized weight until the weight changes (see
            :class:`~blockscale.ops.weight_cache.WeightCache`): microbatches share it, for the memory of its planes.
        device, dtype: of the parameters.

    Attributes:
        weight: (G, N, K). bias: (G, N) or None. Both initialised uniformly in +-1/sqrt(K), as torch.nn.Linear.
        wgrad_queue, weight_cache: with delay_wgrad, cache_weights; else None.
        tap: while somebody watches the layer (``bs.watch``); else None.
    """

    tap: Tap | None = None

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        recipe: Recipe | None = None,
        accumulate_into_main_grad: bool = False,
        delay_wgrad: bool = False,
        cache_weights: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("num_groups", num_groups), ("in_features", in_features), ("out_features", out_features)):
            checks.count(name, value)
        checks.flag("bias", bias)
        if dtype is not None and dtype not in checks.FLOATS:
            raise TypeError(f"dtype={dtype}; legal: {checks.names(checks.FLOATS)}")
        if recipe is not None:
            check_recipe(recipe)
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.recipe = recipe
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.wgrad_queue = WgradQueue() if delay_wgrad else None
        self.weight_cache = WeightCache() if cache_weights else None
        self.weight = nn.Parameter(torch.empty(num_groups, out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_groups, out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()
        if recipe is not None:
            self.scaling_for(recipe.of("linear"), num_groups)

    def reset_parameters(self) -> None:
        """Draw the parameters anew; delayed scaling starts anew too."""
        for state in self.tensor_scalings():
            state.reset()
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    def main_grad(self) -> Tensor | None:
        """The buffer that dW is added to, or None; ``ValueError`` when it is wanted but the weight has none."""
        wanted = self.accumulate_into_main_grad and torch.is_grad_enabled()
        return main_grad_of(self.weight) if wanted else None

    def forward(self, x: Tensor, sizes: Tensor | None = None, *, offsets: Tensor | None = None) -> Tensor:
        """y of x (M, K), rows sorted by group.

        Args:
            x: float32, bfloat16 or float16.
            sizes: integer (G,) rows a group, on x's device; or ``offsets`` int64 (G+1,).

        Returns:
            (M, N) in x's dtype; rows past the last group are zero.
        """
        offsets = resolve_offsets(sizes, offsets)
        recipe = current_recipe(self.recipe)
        return grouped_linear(
            x,
            self.weight,
            offsets,
            self.bias,
            recipe=recipe,
            scaling=self.scaling_for(recipe.of("linear"), self.num_groups),
            main_grad=self.main_grad(),
            cache=self.weight_cache,
            queue=self.wgrad_queue,
            tap=self.tap,
        )

    def backward_dw(self, microbatches: int | None = None) -> None:
        """Compute the weight gradients that backward left with ``delay_wgrad``, the oldest microbatch first.

        They go to ``weight.grad`` (hooks of the weight run) or, in float32, to ``weight.main_grad``: the bits that
        backward would have left there.

        Args:
            microbatches: how many backward passes; None: all that wait.

        Raises:
            RuntimeError: nothing waits, or ``delay_wgrad`` is False. ValueError: fewer wait than asked for.
        """
        delayed(self.wgrad_queue).run([self.weight], [self.main_grad()], microbatches, self.tap)

    def extra_repr(self) -> str:
        """Sizes and recipe."""
        recipe = "" if self.recipe is None else f", recipe={self.recipe.name}"
        shape = f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, bias={self.bias is not None}{recipe}"


def delayed(queue: WgradQueue | None) -> WgradQueue:
    """The queue of a layer; ``RuntimeError`` when it has none."""
    if queue is None:
        raise RuntimeError("backward_dw() needs delay_wgrad=True: this layer's weight gradients are computed in backward")
    return queue


def main_grad_of(weight: Tensor) -> Tensor:
    """``weight.main_grad``; ``ValueError`` when there is none."""
    buffer: Tensor | None = getattr(weight, "main_grad", None)
    if buffer is None:
        raise ValueError(
            "accumulate_into_main_grad=True but weight.main_grad is missing; set it to a float32 tensor of shape "
            f"{tuple(weight.shape)} before the forward pass"
        )
    return buffer


def resolve_offsets(sizes: Tensor | None, offsets: Tensor | None) -> Tensor:
    """int64[G+1] from exactly one of the two."""
    if (sizes is None) == (offsets is None):
        given = "neither" if sizes is None else "both"
        raise ValueError(f"{given} of sizes and offsets given; exactly one is needed")
    if offsets is not None:
        return offsets
    assert sizes is not None
    return offsets_from_sizes(sizes)
