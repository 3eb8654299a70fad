"""The operators ``router``, ``permute`` and ``unpermute`` and their public functions.

Legend: T tokens, E experts, k choices per token, H hidden, R permuted rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockscale.ops import checks, registry
from blockscale.reference import routing as reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: a larger number of experts is taken for a mistake; offsets of so many are 8 MiB
MAX_EXPERTS = 1 << 20


class Permuted(NamedTuple):
    """Tokens ordered by expert; see :func:`permute`."""

    x: Tensor
    probs: Tensor | None
    offsets: Tensor
    row_map: Tensor


def router(
    logits: Tensor,
    top_k: int,
    score: str,
    normalize: bool,
    *,
    expert_bias: Tensor | None = None,
    expert_groups: int = 1,
    group_top_k: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """The ``top_k`` best experts of each token; differentiable in ``probs`` and ``scores``.

    Args:
        logits: float32 [T, E].
        top_k: choices per token, 1..E.
        score: "softmax" (over all E), "sigmoid" or "sqrt_softplus" (the root of log(1 + exp(logit))).
        normalize: divide the probabilities of a token's choices by their sum.
        expert_bias: float32 [E], added to the scores for the choice only: it enters neither probs nor scores.
        expert_groups, group_top_k: the experts lie in so many equal groups in a row; each token chooses among those of the
            ``group_top_k`` groups with the greatest sum of their two best (biased) scores.

    Returns:
        ids int64 [T, k] (distinct for a token, best first, ties to the lowest expert, NaN logits last), probs float32
        [T, k], scores float32 [T, E]. Example: softmax of [0, ln 3], k=1, normalize=False gives id 1, prob 0.75.
        A NaN logit makes NaN what depends on it: all of its token with softmax, its own score with sigmoid.

    Raises:
        ValueError: a shape or an option. TypeError: a dtype.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits has shape {tuple(logits.shape)}; [tokens, experts] is needed")
    if logits.dtype != torch.float32:
        raise TypeError(f"logits has dtype {logits.dtype}; it must be torch.float32")
    checks.within("top_k", top_k, logits.shape[1], "the number of experts")
    checks.flag("normalize", normalize)
    if score not in reference.SCORES:
        raise ValueError(f"score={score!r} is not one of {reference.SCORES}")
    if expert_bias is not None:
        checks.shape("expert_bias", checks.dtype("expert_bias", expert_bias, (torch.float32,)), (logits.shape[1],), "one an expert")
        checks.same_device(logits=logits, expert_bias=expert_bias)
    check_groups(logits.shape[1], top_k, expert_groups, group_top_k)
    probs, ids, scores = torch.ops.blockscale.router(logits, expert_bias, top_k, score, normalize, expert_groups, group_top_k)
    return ids, probs, scores


def check_groups(experts: int, top_k: int, expert_groups: int, group_top_k: int) -> None:
    """``ValueError`` unless the groups divide the experts and the chosen ones hold ``top_k``."""
    if experts % checks.count("expert_groups", expert_groups):
        raise ValueError(f"expert_groups={expert_groups} is not legal; it must divide {experts}, the number of experts")
    checks.within("group_top_k", group_top_k, expert_groups, "the number of groups")
    if group_top_k * (experts // expert_groups) < top_k:
        held = group_top_k * (experts // expert_groups)
        raise ValueError(f"group_top_k={group_top_k} groups hold {held} experts; top_k={top_k} of them are needed")


def permute(x: Tensor, ids: Tensor, num_experts: int, probs: Tensor | None = None) -> Permuted:
    """Copy each token once per choice, ordered by (expert, token, choice); differentiable in ``x`` and ``probs``.

    Args:
        x: [T, H] float32, bfloat16 or float16.
        ids: int64 [T, k], the chosen experts, each in 0..num_experts-1, or -1 for a choice that was dropped.
        num_experts: E.
        probs: float32 [T, k], carried along.

    Returns:
        Permuted(x [T*k, H], probs [T*k] or None, offsets int64 [E+1], row_map int64 [T, k]); ``row_map[t, j]`` is the
        row of token t's choice j, -1 for a dropped one. Dropped choices are no rows of any expert: as many rows as there
        are lie past ``offsets[-1]``, zero, so that no shape depends on how many were dropped. Example: ids [[1], [0]]
        gives rows (token 1, token 0), offsets [0, 1, 2] and row_map [[1], [0]].

    Raises:
        ValueError: a shape or, on the CPU, an id outside -1..E-1. TypeError: a dtype.
    """
    _check_rows("x", x)
    _check_index("ids", ids, x.device)
    if ids.shape[0] != x.shape[0]:
        raise ValueError(f"ids has {ids.shape[0]} rows; it must have one per token of x, {x.shape[0]}")
    checks.count("num_experts", num_experts, most=MAX_EXPERTS)
    _check_probs(probs, ids)
    x_RH, probs_R, offsets, row_map = torch.ops.blockscale.permute(x, ids, num_experts, probs)
    return Permuted(x_RH, None if probs is None else probs_R, offsets, row_map)


def unpermute(y: Tensor, row_map: Tensor, probs: Tensor | None = None) -> Tensor:
    """``out[t] = sum over j of y[row_map[t, j]] * probs[t, j]``; differentiable in ``y`` and ``probs``.

    Args:
        y: [R, H] float32, bfloat16 or float16; rows that ``row_map`` leaves out influence nothing.
        row_map: int64 [T, k] from :func:`permute`; each row at most once; -1, a dropped choice, adds nothing.
        probs: float32 [T, k]; None: ones.

    Returns:
        [T, H] in y's dtype: a float32 sum in the order of j, rounded once.

    Raises:
        ValueError: a shape or, on the CPU, an entry of row_map outside -1..R-1 or used twice. TypeError: a dtype.
    """
    _check_rows("y", y)
    _check_index("row_map", row_map, y.device)
    _check_probs(probs, row_map)
    return torch.ops.blockscale.unpermute(y, row_map, probs)


def _check_rows(name: str, x: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; [rows, hidden] is needed")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be one of {DTYPES}")


def _check_index(name: str, index: Tensor, device: torch.device) -> None:
    if index.dtype != torch.int64:
        raise TypeError(f"{name} has dtype {index.dtype}; it must be torch.int64")
    if index.dim() != 2 or index.shape[1] < 1:
        raise ValueError(f"{name} has shape {tuple(index.shape)}; [tokens, choices] with at least one choice is needed")
    if index.device != device:
        raise ValueError(f"{name} is on {index.device}; it must be on {device}, like the rows")


def _check_probs(probs: Tensor | None, index: Tensor) -> None:
    if probs is None:
        return
    if probs.dtype != torch.float32:
        raise TypeError(f"probs has dtype {probs.dtype}; it must be torch.float32")
    if probs.shape != index.shape:
        raise ValueError(f"probs has shape {tuple(probs.shape)}; one per choice is needed, {tuple(index.shape)}")
    if probs.device != index.device:
        raise ValueError(f"probs is on {probs.device}; it must be on {index.device}, like the choices")


def _check_range(name: str, index: Tensor, size: int) -> None:
    """Values of an index on the CPU; on a device they cannot be read without a sync."""
    if index.device.type != "cpu" or index.numel() == 0:
        return
    low, high = (int(v) for v in index.aminmax())
    if low < -1 or high >= size:
        raise ValueError(f"{name} holds {low if low < -1 else high}; every entry must be in 0..{size - 1}, or -1 (dropped)")


# router


# The operator returns probs before ids: opcheck adds up the outputs' sums in the dtype of the first.


def _router(
    logits: Tensor, expert_bias: Tensor | None, top_k: int, score: str, normalize: bool, groups: int, group_top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    selection = reference.Selection(groups, group_top_k)
    ids, probs, scores = reference.router_forward(logits, top_k, score, normalize, expert_bias, selection)
    return probs, ids, scores


def _router_fake(logits: Tensor, expert_bias: Tensor | None, top_k: int, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    probs = logits.new_empty(logits.shape[0], top_k)
    return probs, logits.new_empty(probs.shape, dtype=torch.int64), logits.new_empty(logits.shape)


def _router_backward_fake(dprobs: Tensor, dscores: Tensor, probs: Tensor, ids: Tensor, scores: Tensor, *options: Any) -> Tensor:
    return scores.new_empty(scores.shape)


def _router_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _, _, ctx.score, ctx.normalize, _, _ = inputs
    ctx.save_for_backward(*output, logits if ctx.score == "sqrt_softplus" else None)


def _router_autograd(ctx: Any, dprobs: Tensor, dids: Any, dscores: Tensor) -> tuple[Any, ...]:
    *outputs, logits = ctx.saved_tensors
    dlogits = torch.ops.blockscale.router_backward(dprobs, dscores, *outputs, ctx.score, ctx.normalize, logits)
    return dlogits, None, None, None, None, None, None


registry.define(
    "router(Tensor logits, Tensor? expert_bias, int top_k, str score, bool normalize, int expert_groups, int group_top_k)"
    " -> (Tensor probs, Tensor ids, Tensor scores)",
    _router,
    _router_fake,
)
registry.define(
    "router_backward(Tensor dprobs, Tensor dscores, Tensor probs, Tensor ids, Tensor scores, str score, bool normalize,"
    " Tensor? logits) -> Tensor",
    reference.router_backward,
    _router_backward_fake,
)
registry.autograd("router", _router_autograd, _router_setup)


# permute


def _permute(x: Tensor, ids: Tensor, num_experts: int, probs: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_range("ids", ids, num_experts)
    x_RH, probs_R, offsets, row_map = reference.permute_forward(x, ids, num_experts, probs)
    return x_RH, x.new_empty(0, dtype=torch.float32) if probs_R is None else probs_R, offsets, row_map


def _permute_fake(x: Tensor, ids: Tensor, num_experts: int, probs: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = ids.shape[0] * ids.shape[1]
    probs_R = x.new_empty(0 if probs is None else rows, dtype=torch.float32)
    return x.new_empty(rows, x.shape[1]), probs_R, ids.new_empty(num_experts + 1), ids.new_empty(ids.shape)


def _permute_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.has_probs = inputs[3] is not None
    ctx.save_for_backward(output[3])


def _permute_autograd(
    ctx: Any, dx: Tensor, dprobs: Tensor, doffsets: Any, drow_map: Any
) -> tuple[Tensor, None, None, Tensor | None]:
    (row_map,) = ctx.saved_tensors
    dprobs_Tk = None
    if ctx.has_probs and row_map.numel():
        row = row_map.reshape(-1)
        dprobs_Tk = dprobs.index_select(0, row.clamp(min=0)).masked_fill(row < 0, 0).view(row_map.shape)
    elif ctx.has_probs:
        dprobs_Tk = dprobs.view(row_map.shape)
    return torch.ops.blockscale.unpermute(dx, row_map, None), None, None, dprobs_Tk


registry.define(
    "permute(Tensor x, Tensor ids, int num_experts, Tensor? probs) -> (Tensor x, Tensor probs, Tensor offsets, Tensor row_map)",
    _permute,
    _permute_fake,
)
registry.autograd("permute", _permute_autograd, _permute_setup)


# unpermute


def _unpermute(y: Tensor, row_map: Tensor, probs: Tensor | None) -> Tensor:
    _check_range("row_map", row_map, y.shape[0])
    if row_map.device.type == "cpu":
        rows = row_map[row_map >= 0]
        used = torch.zeros(y.shape[0], dtype=torch.bool)
        used[rows] = True
        if int(used.sum()) != rows.numel():
            row = int(rows.bincount().argmax())
            raise ValueError(f"row_map holds {row} more than once; each row of y may be used at most once")
    return reference.unpermute_forward(y, row_map, probs)


def _unpermute_fake(y: Tensor, row_map: Tensor, probs: Tensor | None) -> Tensor:
    return y.new_empty(row_map.shape[0], y.shape[1])


def _unpermute_backward(dout: Tensor, row_map: Tensor, rows: int, y: Tensor | None, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    dy, dprobs = reference.unpermute_backward(dout, row_map, rows, y, probs)
    return dy, dout.new_empty(0, dtype=torch.float32) if dprobs is None else dprobs


def _unpermute_backward_fake(
    dout: Tensor, row_map: Tensor, rows: int, y: Tensor | None, probs: Tensor | None
) -> tuple[Tensor, Tensor]:
    dprobs = dout.new_empty(0 if probs is None else row_map.shape, dtype=torch.float32)
    return dout.new_empty(rows, dout.shape[1]), dprobs


def _unpermute_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, row_map, probs = inputs
    ctx.rows = y.shape[0]
    # y is needed for the gradient of probs only
    ctx.save_for_backward(row_map, None if probs is None else y, probs)


def _unpermute_autograd(ctx: Any, dout: Tensor) -> tuple[Tensor, None, Tensor | None]:
    row_map, y, probs = ctx.saved_tensors
    dy, dprobs = torch.ops.blockscale.unpermute_backward(dout, row_map, ctx.rows, y, probs)
    return dy, None, None if probs is None else dprobs


registry.define("unpermute(Tensor y, Tensor row_map, Tensor? probs) -> Tensor", _unpermute, _unpermute_fake)
registry.define(
    "unpermute_backward(Tensor dout, Tensor row_map, SymInt rows, Tensor? y, Tensor? probs) -> (Tensor, Tensor)",
    _unpermute_backward,
    _unpermute_backward_fake,
)
registry.autograd("unpermute", _unpermute_autograd, _unpermute_setup)
