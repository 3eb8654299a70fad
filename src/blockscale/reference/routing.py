"""The meaning of the router, of permute and of unpermute in plain torch, on any device, without a host sync.

Legend: T tokens, E experts, k choices per token, H hidden; t, e, j, r index tokens, experts, choices, permuted rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockscale.reference.activations import exp_f32, row_sums, sigmoid_f32

SCORES = ("softmax", "sigmoid")
#: elements per pass over the tokens; the temporaries of a pass stay in the second-level cache
CHUNK_ELEMENTS = 1 << 17
_FLOAT_MAX = torch.finfo(torch.float32).max


def _softmax(logits_TE: Tensor) -> Tensor:
    """exp(x - max) / sum; a row without any logit above -inf is 0/0, NaN."""
    maximum = logits_TE.amax(1, keepdim=True).clamp(min=-_FLOAT_MAX)
    e = exp_f32(logits_TE - maximum)
    return e / row_sums(e.clone()).unsqueeze(1)


def _scores(logits_TE: Tensor, nan_TE: Tensor, score: str) -> tuple[Tensor, Tensor]:
    """The scores, and what the selection compares: the same, but never NaN and -1 where the logit is NaN."""
    if score == "sigmoid":
        scores = sigmoid_f32(logits_TE)
        return scores, scores.masked_fill(nan_TE, -1.0)
    # one NaN, or an infinite maximum, makes the whole row NaN; the selection goes by the other logits
    key = _softmax(logits_TE.masked_fill(nan_TE, -torch.inf).clamp(max=_FLOAT_MAX))
    undefined = ~torch.isfinite(logits_TE.amax(1, keepdim=True))
    scores = key.masked_fill(undefined, torch.nan)
    return scores, key.nan_to_num_(nan=0.0).masked_fill_(nan_TE, -1.0)


def _top_k(key_TE: Tensor, k: int) -> Tensor:
    """Indices of the k largest in descending order, ties to the lowest index.

    ``torch.topk`` promises nothing about ties, so value and index go into one int64 that has none: the bits of a
    float that is not negative are ordered like the float (-1 becomes 0 here, the least).
    """
    experts = key_TE.shape[1]
    value = (key_TE.view(torch.int32) + 1).clamp_(min=0).to(torch.int64)
    lowest_first = torch.arange(experts - 1, -1, -1, device=key_TE.device)
    return experts - 1 - (torch.topk(value * experts + lowest_first, k, dim=1).values % experts)


def _choice_sum(chosen_Tk: Tensor) -> Tensor:
    total = chosen_Tk[:, 0].clone()
    for j in range(1, chosen_Tk.shape[1]):
        total += chosen_Tk[:, j]
    return total.unsqueeze(1)


def router_forward(logits_TE: Tensor, k: int, score: str, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the k best experts of each token.

    Args:
        logits_TE: float32 [T, E].
        k: choices per token, 1..E.
        score: "softmax" (over E) or "sigmoid".
        normalize: divide a token's k probabilities by their sum, taken in the order of choice.

    Returns:
        ids int64 [T, k], distinct for a token, best first, ties to the lowest expert; experts with a NaN logit come
        last. probs float32 [T, k]. scores float32 [T, E]. A NaN logit makes NaN what depends on it: with softmax all
        of its token, with sigmoid its own score (and, if it is chosen and normalize, the token's probs). A token whose
        chosen sigmoids are all zero has 0/0 = NaN with normalize.
    """
    nan_TE = torch.isnan(logits_TE)
    scores, key = _scores(logits_TE, nan_TE, score)
    ids = _top_k(key, k)
    probs = scores.gather(1, ids)
    if normalize:
        probs = probs / _choice_sum(probs)
    return ids, probs, scores


def router_backward(
    dprobs_Tk: Tensor,
    dscores_TE: Tensor,
    probs_Tk: Tensor,
    ids_Tk: Tensor,
    scores_TE: Tensor,
    score: str,
    normalize: bool,
) -> Tensor:
    """Gradient of :func:`router_forward` for the logits, float32 [T, E]; the choice itself has none."""
    dchosen = dprobs_Tk
    if normalize:
        total = _choice_sum(scores_TE.gather(1, ids_Tk))
        dchosen = (dprobs_Tk - _choice_sum(dprobs_Tk * probs_Tk)) / total
    # scatter, not scatter_add: the ids of a token are distinct
    d = torch.zeros_like(scores_TE).scatter_(1, ids_Tk, dchosen).add_(dscores_TE)
    if score == "sigmoid":
        return d.mul_(scores_TE).mul_(1.0 - scores_TE)
    return d.sub_(row_sums(d * scores_TE).unsqueeze(1)).mul_(scores_TE)


def permute_forward(
    x_TH: Tensor, ids_Tk: Tensor, experts: int, probs_Tk: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Copy each token once per choice, ordered by (expert, token, choice).

    Returns:
        x [T*k, H], probs [T*k] or None, offsets int64 [E+1], row_map int64 [T, k]: the row of token t's choice j.
    """
    sorted_ids, order = torch.sort(ids_Tk.reshape(-1), stable=True)
    # the number of ids below e is where expert e begins
    offsets = torch.searchsorted(sorted_ids, torch.arange(experts + 1, device=ids_Tk.device))
    row_map = torch.empty_like(order)
    row_map[order] = torch.arange(order.shape[0], device=ids_Tk.device)
    x = x_TH.index_select(0, order // ids_Tk.shape[1])
    probs = None if probs_Tk is None else probs_Tk.reshape(-1).index_select(0, order)
    return x, probs, offsets, row_map.view(ids_Tk.shape)


def _token_chunks(tokens: int, width: int) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // max(width, 1))
    return [slice(i, min(i + step, tokens)) for i in range(0, tokens, step)]


def _term(y_RH: Tensor, row_map_Tk: Tensor, probs_Tk: Tensor | None, tokens: slice, j: int) -> Tensor:
    term = y_RH.index_select(0, row_map_Tk[tokens, j]).float()
    return term if probs_Tk is None else term.mul_(probs_Tk[tokens, j, None])


def unpermute_forward(y_RH: Tensor, row_map_Tk: Tensor, probs_Tk: Tensor | None) -> Tensor:
    """out[t] = sum over j of y[row_map[t, j]] * probs[t, j], float32, in the order of j, rounded once to y's dtype."""
    out = y_RH.new_empty(row_map_Tk.shape[0], y_RH.shape[1])
    for tokens in _token_chunks(*out.shape):
        total = _term(y_RH, row_map_Tk, probs_Tk, tokens, 0)
        for j in range(1, row_map_Tk.shape[1]):
            total.add_(_term(y_RH, row_map_Tk, probs_Tk, tokens, j))
        out[tokens] = total
    return out


def unpermute_backward(
    dout_TH: Tensor, row_map_Tk: Tensor, rows: int, y_RH: Tensor | None, probs_Tk: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`unpermute_forward`.

    Args:
        dout_TH: [T, H], the upstream gradient.
        row_map_Tk: as in the forward.
        rows: R.
        y_RH, probs_Tk: as in the forward, or both None.

    Returns:
        dy [rows, H] in dout's dtype, zero in rows that row_map leaves out, and dprobs float32 [T, k] or None.
    """
    dy = dout_TH.new_zeros(rows, dout_TH.shape[1])
    dprobs = None if probs_Tk is None else torch.empty(probs_Tk.shape, dtype=torch.float32, device=dy.device)
    for tokens in _token_chunks(*dout_TH.shape):
        upstream = dout_TH[tokens].float()
        for j in range(row_map_Tk.shape[1]):
            target = row_map_Tk[tokens, j]
            if y_RH is None or probs_Tk is None or dprobs is None:
                dy[target] = dout_TH[tokens]
            else:
                dy[target] = (upstream * probs_Tk[tokens, j, None]).to(dy.dtype)
                dprobs[tokens, j] = row_sums(y_RH.index_select(0, target).float().mul_(upstream))
    return dy, dprobs
