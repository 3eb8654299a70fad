"""The router of a mixture-of-experts layer. Legend: T tokens, E experts, k choices per token, H hidden."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockscale.ops.routing import router
from blockscale.reference.routing import SCORES


class Routing(NamedTuple):
    """Which experts a token goes to, and with what weight.

    ids int64 [T, k], probs float32 [T, k], scores float32 [T, E], aux_loss float32 scalar, nan_tokens int64 scalar:
    the number of tokens with a NaN logit (on the device; reading it is the caller's sync). One such token makes aux_loss NaN.
    """

    ids: Tensor
    probs: Tensor
    scores: Tensor
    aux_loss: Tensor
    nan_tokens: Tensor


def _full_precision(device: str) -> AbstractContextManager[object]:
    """No ``torch.autocast`` inside, on devices that have one."""
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


class Router(nn.Module):
    """Top-k router: float32 logits ``x W^T``, scores, choice, and the load-balancing loss.

    ``aux_loss = aux_loss_coef * E * sum_e(fraction_e * mean over tokens of scores_e)`` with ``fraction_e`` = choices of
    expert e / (T*k). It is ``aux_loss_coef`` for a uniform softmax router. The gradient goes through the mean score
    only (Switch Transformers, eq. 4).

    Args:
        hidden: H.
        num_experts: E.
        top_k: k, 1..E.
        score: "softmax" or "sigmoid".
        normalize: divide the probabilities of a token's choices by their sum.
        aux_loss_coef: >= 0; 0 gives a constant zero loss.
        device: of the weight.
        dtype: of the weight [E, H]; float32 by default. The logits are float32 whatever it is.

    Raises:
        ValueError: an option, naming the legal ones.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        score: str = "softmax",
        normalize: bool = True,
        aux_loss_coef: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden < 1:
            raise ValueError(f"hidden={hidden} is not legal; it must be at least 1")
        if num_experts < 1:
            raise ValueError(f"num_experts={num_experts} is not legal; it must be at least 1")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k} is not legal; it must be in 1..{num_experts}, the number of experts")
        if score not in SCORES:
            raise ValueError(f"score={score!r} is not one of {SCORES}")
        if not 0.0 <= aux_loss_coef < math.inf:
            raise ValueError(f"aux_loss_coef={aux_loss_coef!r} is not legal; it must be finite and >= 0")
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        self.score, self.normalize, self.aux_loss_coef = score, normalize, aux_loss_coef
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype or torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(hidden), like ``torch.nn.Linear``."""
        bound = 1.0 / math.sqrt(self.hidden)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Routing:
        """Route x [T, H].

        Raises:
            ValueError: x is not [T, hidden].
        """
        if x.dim() != 2 or x.shape[1] != self.hidden:
            raise ValueError(f"x has shape {tuple(x.shape)}; [tokens, {self.hidden}] is needed")
        with _full_precision(x.device.type):
            logits = F.linear(x.float(), self.weight.float())
        ids, probs, scores = router(logits, self.top_k, self.score, self.normalize)
        nan_tokens = torch.isnan(logits.detach()).any(1).sum()
        return Routing(ids, probs, scores, self._aux_loss(ids, scores), nan_tokens)

    def _aux_loss(self, ids: Tensor, scores: Tensor) -> Tensor:
        if self.aux_loss_coef == 0.0:
            return scores.new_zeros(())
        tokens, choices = ids.shape
        chosen = ids.reshape(-1)
        # an integer sum: the counts do not depend on the order of the atomics
        counts = ids.new_zeros(self.num_experts).scatter_add(0, chosen, torch.ones_like(chosen))
        fraction = counts.float() / max(tokens * choices, 1)
        mean = scores.sum(0) / max(tokens, 1)
        return (self.aux_loss_coef * self.num_experts) * (fraction * mean).sum()

    def extra_repr(self) -> str:
        """The options, for ``print``."""
        return (
            f"hidden={self.hidden}, num_experts={self.num_experts}, top_k={self.top_k}, score={self.score!r}, "
            f"normalize={self.normalize}, aux_loss_coef={self.aux_loss_coef}"
        )
