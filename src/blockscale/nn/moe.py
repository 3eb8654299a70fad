"""A mixture-of-experts layer: router, permute, grouped experts, unpermute, and an optional shared expert.

Legend: T tokens, E experts, k choices per token, H hidden, R = T*k permuted rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from blockscale.activations import Activation
from blockscale.nn.grouped_mlp import GroupedMLP
from blockscale.nn.router import Router
from blockscale.ops.routing import permute, unpermute
from blockscale.recipes import Recipe


class MoE(nn.Module):
    """``y = sum over the k choices of prob * expert(x)``, plus ``shared(x)`` if there is a shared expert.

    The probabilities are applied inside the experts' activation; the choices, then the shared expert's output, are
    summed in float32 and rounded once to x's dtype.

    Args:
        hidden: H.
        intermediate: width between an expert's two linears.
        num_experts: E.
        top_k: choices per token.
        activation: of the experts, the shared one included.
        score, normalize, aux_loss_coef: as in :class:`~blockscale.nn.router.Router`, whose weight is float32.
        shared_intermediate: width of a shared expert that sees every token; None: there is none.
        bias, glu_interleave, recipe, accumulate_into_main_grad, delay_wgrad, cache_weights, recompute, dtype: as in
            :class:`~blockscale.nn.grouped_mlp.GroupedMLP`.
        router_options: further arguments of the Router: expert_groups, expert_bias, capacity_factor, z_loss_coef, ...
        device: of all parameters.

    Attributes:
        router, experts, and shared (a GroupedMLP with one group, or None).
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        activation: str | Activation = "swiglu",
        score: str = "softmax",
        normalize: bool = True,
        aux_loss_coef: float = 0.0,
        shared_intermediate: int | None = None,
        bias: bool = False,
        glu_interleave: int | None = None,
        recipe: Recipe | None = None,
        accumulate_into_main_grad: bool = False,
        delay_wgrad: bool = False,
        cache_weights: bool = False,
        recompute: bool = False,
        router_options: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()

        def mlp(groups: int, width: int) -> GroupedMLP:
            return GroupedMLP(
                groups,
                hidden,
                width,
                activation=activation,
                recipe=recipe,
                bias=bias,
                glu_interleave=glu_interleave,
                accumulate_into_main_grad=accumulate_into_main_grad,
                delay_wgrad=delay_wgrad,
                cache_weights=cache_weights,
                recompute=recompute,
                device=device,
                dtype=dtype,
            )

        self.hidden = hidden
        options = router_options or {}
        self.router = Router(hidden, num_experts, top_k, score, normalize, aux_loss_coef, device=device, **options)
        self.experts = mlp(num_experts, intermediate)
        self.shared = None if shared_intermediate is None else mlp(1, shared_intermediate)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run x [..., H] through the layer.

        Returns:
            y [..., H] in x's dtype and the router's losses, aux_loss + z_loss, a float32 scalar. A token whose choices were
            all dropped comes out as zero (or as the shared expert's output).

        Raises:
            ValueError: the last dimension of x is not ``hidden``.
        """
        if x.dim() < 1 or x.shape[-1] != self.hidden:
            raise ValueError(f"x has shape {tuple(x.shape)}; [..., {self.hidden}] is needed")
        x_TH = x.reshape(-1, self.hidden)
        routing = self.router(x_TH)
        rows = permute(x_TH, routing.ids, self.router.num_experts, routing.probs)
        y_RH = self.experts(rows.x, None, rows.probs, offsets=rows.offsets)
        loss = routing.aux_loss + routing.z_loss if self.router.z_loss_coef else routing.aux_loss
        if self.shared is None:
            return unpermute(y_RH, rows.row_map).view(x.shape), loss
        # a sum, since inductor cannot compile torch.full of a symbolic number of tokens
        sizes = torch.ones(x_TH.shape[0], dtype=torch.int64, device=x.device).sum(0, keepdim=True)
        shared_TH = self.shared(x_TH, sizes)
        y_TH = unpermute(y_RH.float(), rows.row_map) + shared_TH.float()
        return y_TH.to(x.dtype).view(x.shape), loss

    def backward_dw(self, microbatches: int | None = None) -> None:
        """As :meth:`~blockscale.nn.grouped_linear.GroupedLinear.backward_dw`, for the experts and the shared expert."""
        self.experts.backward_dw(microbatches)
        if self.shared is not None:
            self.shared.backward_dw(microbatches)
