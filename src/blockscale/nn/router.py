"""The router of a mixture-of-experts layer. Legend: T tokens, E experts, k choices per token, H hidden."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockscale.ops import checks
from blockscale.ops.routing import MAX_EXPERTS, check_groups, router
from blockscale.reference.routing import SCORES

DROPS = ("probs", "position")


class Routing(NamedTuple):
    """Which experts a token goes to, and with what weight.

    ids int64 [T, k], probs float32 [T, k], scores float32 [T, E], aux_loss float32 scalar, nan_tokens int64 scalar:
    the number of tokens with a NaN logit (on the device; reading it is the caller's sync). z_loss: float32 scalar. One
    such token makes both losses NaN.

    With a capacity, a dropped choice has id -1 and probability 0; ``permute`` and ``unpermute`` know it.
    """

    ids: Tensor
    probs: Tensor
    scores: Tensor
    aux_loss: Tensor
    nan_tokens: Tensor
    z_loss: Tensor


def _full_precision(device: str) -> AbstractContextManager[object]:
    """No ``torch.autocast`` inside, on devices that have one."""
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


class Router(nn.Module):
    """Top-k router: float32 logits ``x W^T``, scores, choice, and the load-balancing loss.

    ``aux_loss = aux_loss_coef * E * sum_e(fraction_e * mean over tokens of scores_e)`` with ``fraction_e`` = choices of
    expert e / (T*k). It is ``aux_loss_coef`` for a uniform softmax router. The gradient goes through the mean score
    only (Switch Transformers, eq. 4), and choices count before a capacity drops any.
    ``z_loss = z_loss_coef * mean over tokens of logsumexp(logits)^2`` (ST-MoE, eq. 5).

    Args:
        hidden: H.
        num_experts: E.
        top_k: k, 1..E.
        score: "softmax", "sigmoid" or "sqrt_softplus".
        normalize: divide the probabilities of a token's choices by their sum.
        aux_loss_coef, z_loss_coef: >= 0; 0 gives a constant zero loss.
        expert_groups, group_top_k: as in :func:`blockscale.ops.routing.router`: each token chooses among the experts of
            ``group_top_k`` of ``expert_groups`` groups.
        expert_bias: hold a float32 buffer ``expert_bias`` [E] that shifts the choice, not the probabilities (balance without
            a loss, DeepSeek-V3, section 2.1.2), and count choices while training: see :meth:`update_expert_bias`.
        scaling_factor: multiplies the probabilities at the end.
        capacity_factor: None: no choice is dropped. f: an expert takes at most ceil(f * T * k / E) choices, the others get
            id -1 and probability 0; the probabilities that are left are not normalised again.
        drop: which choices an expert keeps: "probs", those of the greatest probability (a NaN is the least; ties as by
            position), or "position", those that come first by token, then choice. No shape depends on how many are dropped.
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
        *,
        z_loss_coef: float = 0.0,
        expert_groups: int = 1,
        group_top_k: int = 1,
        expert_bias: bool = False,
        scaling_factor: float = 1.0,
        capacity_factor: float | None = None,
        drop: str = "probs",
    ) -> None:
        super().__init__()
        checks.count("hidden", hidden)
        checks.count("num_experts", num_experts, most=MAX_EXPERTS)
        checks.within("top_k", top_k, num_experts, "the number of experts")
        checks.flag("normalize", normalize)
        checks.flag("expert_bias", expert_bias)
        if score not in SCORES:
            raise ValueError(f"score={score!r} is not one of {SCORES}")
        for name, coef in (("aux_loss_coef", aux_loss_coef), ("z_loss_coef", z_loss_coef)):
            if not 0.0 <= coef < math.inf:
                raise ValueError(f"{name}={coef!r} is not legal; it must be finite and >= 0")
        for name, factor in (("scaling_factor", scaling_factor), ("capacity_factor", capacity_factor)):
            if factor is not None and not 0.0 < factor < math.inf:
                raise ValueError(f"{name}={factor!r} is not legal; it must be finite and > 0")
        if drop not in DROPS:
            raise ValueError(f"drop={drop!r} is not one of {DROPS}")
        check_groups(num_experts, top_k, expert_groups, group_top_k)
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        self.score, self.normalize, self.aux_loss_coef = score, normalize, aux_loss_coef
        self.z_loss_coef, self.scaling_factor = z_loss_coef, scaling_factor
        self.expert_groups, self.group_top_k = expert_groups, group_top_k
        self.capacity_factor, self.drop = capacity_factor, drop
        self.register_buffer("expert_bias", torch.zeros(num_experts, device=device) if expert_bias else None)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=device) if expert_bias else None
        self.register_buffer("expert_counts", counts, persistent=False)
        self.expert_bias: Tensor | None
        self.expert_counts: Tensor | None
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype or torch.float32))
        self.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """``.bfloat16()`` and the like leave the bias float32: steps of 1e-3 would be lost in it."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

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
        ids, probs, scores = router(
            logits,
            self.top_k,
            self.score,
            self.normalize,
            expert_bias=self.expert_bias,
            expert_groups=self.expert_groups,
            group_top_k=self.group_top_k,
        )
        if self.scaling_factor != 1.0:
            probs = probs * self.scaling_factor
        if self.expert_counts is not None and self.training:
            with torch.no_grad():
                self.expert_counts += expert_counts(ids, self.num_experts)
        aux_loss, z_loss = self._aux_loss(ids, scores), self._z_loss(logits)
        nan_tokens = torch.isnan(logits.detach()).any(1).sum()
        if self.capacity_factor is not None:
            capacity = math.ceil(self.capacity_factor * ids.shape[0] * self.top_k / self.num_experts)
            kept = capacity_mask(ids, probs.detach(), self.num_experts, capacity, self.drop)
            ids, probs = ids.masked_fill(~kept, -1), probs.masked_fill(~kept, 0.0)
        return Routing(ids, probs, scores, aux_loss, nan_tokens, z_loss)

    def update_expert_bias(self, rate: float = 1e-3, counts: Tensor | None = None) -> None:
        """Raise the bias of experts that were chosen less than the mean by ``rate``, lower that of the others.

        Call it after each optimizer step. ``expert_bias += rate * sign(mean(counts) - counts)``.

        Args:
            counts: int64 [E]; None: the choices of this router's training passes since the last update, which are then
                forgotten. Ranks that route together pass the sum of theirs (``router.expert_counts``, all-reduced).

        Raises:
            RuntimeError: the router was made with ``expert_bias=False``. ValueError, TypeError: counts.
        """
        if self.expert_bias is None or self.expert_counts is None:
            raise RuntimeError("update_expert_bias() needs a Router with expert_bias=True")
        own = self.expert_counts if counts is None else counts
        if own.dtype != torch.int64:
            raise TypeError(f"counts has dtype {own.dtype}; it must be torch.int64")
        if own.shape != self.expert_counts.shape:
            raise ValueError(f"counts has shape {tuple(own.shape)}; ({self.num_experts},) is needed, one an expert")
        with torch.no_grad():
            self.expert_bias += rate * torch.sign(own.sum() - own * self.num_experts).float()
            self.expert_counts.zero_()

    def _z_loss(self, logits: Tensor) -> Tensor:
        if self.z_loss_coef == 0.0:
            return logits.new_zeros(())
        return self.z_loss_coef * torch.logsumexp(logits, 1).square().sum() / max(logits.shape[0], 1)

    def _aux_loss(self, ids: Tensor, scores: Tensor) -> Tensor:
        if self.aux_loss_coef == 0.0:
            return scores.new_zeros(())
        tokens, choices = ids.shape
        fraction = expert_counts(ids, self.num_experts).float() / max(tokens * choices, 1)
        mean = scores.sum(0) / max(tokens, 1)
        return (self.aux_loss_coef * self.num_experts) * (fraction * mean).sum()

    def extra_repr(self) -> str:
        """The options, for ``print``."""
        return (
            f"hidden={self.hidden}, num_experts={self.num_experts}, top_k={self.top_k}, score={self.score!r}, "
            f"normalize={self.normalize}, aux_loss_coef={self.aux_loss_coef}"
            + (f", groups={self.group_top_k} of {self.expert_groups}" if self.expert_groups > 1 else "")
            + (f", capacity_factor={self.capacity_factor}" if self.capacity_factor is not None else "")
        )


def expert_counts(ids: Tensor, num_experts: int) -> Tensor:
    """int64 [E]: how often each expert is in ids (int64, any shape, entries 0..E-1; -1, dropped, counts nowhere)."""
    chosen = ids.reshape(-1)
    # an integer sum: the counts do not depend on the order of the atomics
    counts = ids.new_zeros(num_experts + 1).scatter_add(0, chosen + 1, torch.ones_like(chosen))
    return counts[1:]


def capacity_mask(ids: Tensor, probs: Tensor, num_experts: int, capacity: int, drop: str) -> Tensor:
    """bool [T, k]: which choices lie within ``capacity`` of their expert; ``drop`` as in :class:`Router`. No sync."""
    flat = ids.reshape(-1)
    order = torch.arange(flat.shape[0], device=ids.device)
    if drop == "probs":  # a NaN is the least
        order = torch.sort(probs.reshape(-1).nan_to_num(nan=-1.0), stable=True, descending=True).indices
    sorted_ids, within = torch.sort(flat[order], stable=True)
    first = torch.searchsorted(sorted_ids, torch.arange(num_experts, device=ids.device))
    rank = torch.arange(flat.shape[0], device=ids.device) - first[sorted_ids]
    kept = torch.empty_like(flat, dtype=torch.bool).scatter(0, order[within], rank < capacity)
    return kept.view(ids.shape)
