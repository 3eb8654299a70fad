"""GroupedMLP: the experts of a mixture-of-experts layer. Legend: M rows, H hidden, I intermediate, G groups."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockscale.activations import Activation, parse
from blockscale.nn.grouped_linear import GroupedLinear, delayed, resolve_offsets
from blockscale.ops import checks
from blockscale.ops.grouped_mlp import grouped_mlp
from blockscale.ops.tap import Tap
from blockscale.ops.wgrad_queue import WgradQueue
from blockscale.recipes import Recipe, check_recipe, current_recipe


class GroupedMLP(nn.Module):
    """y = s * (W2 act(W1 x + b1) + b2) for the rows of each group, in the formats of a recipe, forward and backward.

    Args:
        num_groups: G >= 1 (experts on this device).
        hidden: H, columns of x and y. intermediate: I, columns between the two linears.
        activation: "swiglu", "clamped_swiglu", "squared_relu", "situ", or an Activation with other constants.
        recipe: beats ``autocast``; None: the enclosing autocast's, else BF16.
        bias: learn b1 and b2.
        glu_interleave: None: a GLU's gate columns come first; g: gate and linear columns alternate in runs of g.
        accumulate_into_main_grad: add weight gradients in float32 to ``weight.main_grad``.
        delay_wgrad: backward leaves the weight gradients to :meth:`backward_dw`.
        cache_weights: keep the quantized weights until the weights change, as in GroupedLinear.
        recompute: keep only x between the passes, quantized in both planes (without formats: as it is), and compute the
            pre-activation again in backward: the same bits for one more product and less memory.
        device, dtype: of the parameters.

    Attributes:
        fc1.weight (G, 2I or I, H), fc2.weight (G, H, I), and their biases (G, .) or None.
        tap: while somebody watches the layer (``bs.watch``); else None.
    """

    tap: Tap | None = None

    def __init__(
        self,
        num_groups: int,
        hidden: int,
        intermediate: int,
        activation: str | Activation = "swiglu",
        recipe: Recipe | None = None,
        bias: bool = False,
        glu_interleave: int | None = None,
        accumulate_into_main_grad: bool = False,
        delay_wgrad: bool = False,
        cache_weights: bool = False,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = parse(activation)
        for name, value in (("num_groups", num_groups), ("hidden", hidden), ("intermediate", intermediate)):
            checks.count(name, value)
        if glu_interleave is not None and intermediate % checks.count("glu_interleave", glu_interleave):
            raise ValueError(f"intermediate={intermediate} is not a multiple of glu_interleave={glu_interleave}")
        width = self.activation.pre_width(intermediate)
        self.activation.out_width(width, glu_interleave)
        self.glu_interleave = glu_interleave
        self.recipe = None if recipe is None else check_recipe(recipe)
        self.recompute = recompute
        self.wgrad_queue = WgradQueue() if delay_wgrad else None
        shared = (bias, None, accumulate_into_main_grad, False, cache_weights, device, dtype)
        self.fc1 = GroupedLinear(num_groups, hidden, width, *shared)
        self.fc2 = GroupedLinear(num_groups, intermediate, hidden, *shared)
        for name, layer in (("fc1", self.fc1), ("fc2", self.fc2)):
            layer.recipe = recipe  # not given before: what the linear would keep alone may not be what it keeps here
            if recipe is not None:
                layer.scaling_for(recipe.of(name), num_groups)

    def forward(
        self, x: Tensor, sizes: Tensor | None = None, probs: Tensor | None = None, *, offsets: Tensor | None = None
    ) -> Tensor:
        """y of x (M, H), rows sorted by group.

        Args:
            x: float32, bfloat16 or float16.
            sizes: integer (G,) rows a group, on x's device; or ``offsets`` int64 (G+1,).
            probs: float32 (M,), the router's probability of each row.

        Returns:
            (M, H) in x's dtype; rows past the last group are zero.
        """
        main1, main2 = self.fc1.main_grad(), self.fc2.main_grad()
        cache1, cache2 = self.fc1.weight_cache, self.fc2.weight_cache
        recipe, G = current_recipe(self.recipe), self.fc1.num_groups
        return grouped_mlp(
            x,
            self.fc1.weight,
            self.fc2.weight,
            resolve_offsets(sizes, offsets),
            activation=self.activation,
            interleave=self.glu_interleave,
            probs=probs,
            b1=self.fc1.bias,
            b2=self.fc2.bias,
            recipe=recipe,
            main_grads=None if main1 is None or main2 is None else (main1, main2),
            caches=None if cache1 is None or cache2 is None else (cache1, cache2),
            queue=self.wgrad_queue,
            recompute=self.recompute,
            scaling=(self.fc1.scaling_for(recipe.of("fc1"), G), self.fc2.scaling_for(recipe.of("fc2"), G)),
            tap=self.tap,
        )

    def backward_dw(self, microbatches: int | None = None) -> None:
        """As :meth:`~blockscale.nn.grouped_linear.GroupedLinear.backward_dw`, for both weights."""
        weights, main_grads = [self.fc1.weight, self.fc2.weight], [self.fc1.main_grad(), self.fc2.main_grad()]
        delayed(self.wgrad_queue).run(weights, main_grads, microbatches, self.tap, ("dw1", "dw2"))

    def extra_repr(self) -> str:
        """Activation, interleave and recipe."""
        recipe = "" if self.recipe is None else f", recipe={self.recipe.name}"
        return f"activation={self.activation.spec()}, glu_interleave={self.glu_interleave}{recipe}"
