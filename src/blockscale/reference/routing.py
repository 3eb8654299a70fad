"""The meaning of the router, of permute and of unpermute in plain torch, on any device, without a host sync.

Legend: T tokens, E experts, k choices per token, H hidden; t, e, j, r index tokens, experts, choices, permuted rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.reference.activations import exp_f32, row_sums, sigmoid_f32

SCORES = ("softmax", "sigmoid", "sqrt_softplus")
#: elements per pass over the tokens; the temporaries of a pass stay in the second-level cache
CHUNK_ELEMENTS = 1 << 17
_FLOAT_MAX = torch.finfo(torch.float32).max


def _softmax(logits_TE: Tensor) -> Tensor:
    """exp(x - max) / sum; a row without any logit above -inf is 0/0, NaN."""
    maximum = logits_TE.amax(1, keepdim=True).clamp(min=-_FLOAT_MAX)
    e = exp_f32(logits_TE - maximum)
    return e / row_sums(e.clone()).unsqueeze(1)


def softplus_f32(x: Tensor) -> Tensor:
    """log(1 + exp(x)) in float32, the same bits whatever the tensor's length (torch's are not): within 4 ulp.

    max(x, 0) + log1p(z) with z = exp(-|x|); log1p(z) = 2 atanh(u), u = z / (2 + z) <= 1/3, by its odd series.
    """
    z = exp_f32(-x.abs())
    u = z / (z + 2.0)
    square = u * u
    series = torch.full_like(u, 1 / 17)
    for n in range(15, 0, -2):
        series = series.mul_(square).add_(1 / n)
    return x.clamp(min=0).add_(u.mul_(2.0).mul_(series))


def _scores(logits_TE: Tensor, nan_TE: Tensor, score: str) -> tuple[Tensor, Tensor]:
    """The scores, and what the selection compares: the same, but never NaN and -inf where the logit is NaN."""
    if score != "softmax":
        scores = sigmoid_f32(logits_TE) if score == "sigmoid" else softplus_f32(logits_TE).sqrt_()
        return scores, scores.masked_fill(nan_TE, -torch.inf)
    # one NaN, or an infinite maximum, makes the whole row NaN; the selection goes by the other logits
    key = _softmax(logits_TE.masked_fill(nan_TE, -torch.inf).clamp(max=_FLOAT_MAX))
    undefined = ~torch.isfinite(logits_TE.amax(1, keepdim=True))
    scores = key.masked_fill(undefined, torch.nan)
    return scores, key.nan_to_num_(nan=0.0).masked_fill_(nan_TE, -torch.inf)


def _ordered(x: Tensor) -> Tensor:
    """int64 in the order of the floats: the bits of one that is not negative; of a negative one, all but the sign turned."""
    code = x.contiguous().view(torch.int32)
    return torch.where(code < 0, code ^ 0x7FFFFFFF, code).to(torch.int64)


def _top_k(value: Tensor, k: int) -> Tensor:
    """Indices of the k largest of (T, E) int64 in descending order, ties to the lowest index.

    ``torch.topk`` promises nothing about ties, so value and index go into one int64 that has none.
    """
    experts = value.shape[1]
    lowest_first = torch.arange(experts - 1, -1, -1, device=value.device)
    return experts - 1 - (torch.topk(value * experts + lowest_first, k, dim=1).values % experts)


@dataclass(frozen=True)
class Selection:
    """How experts are chosen from their scores.

    ``groups``: the E experts lie in so many equal groups, of which each token may use ``group_top_k``: those with the
    greatest sum of their two best biased scores (DeepSeek-V3, section 2.1.2). ``groups=1``: no restriction.
    """

    groups: int = 1
    group_top_k: int = 1


def select(key_TE: Tensor, k: int, bias_E: Tensor | None, selection: Selection) -> Tensor:
    """ids int64 [T, k] by the biased key; -inf and NaN come last within the groups that a token may use."""
    if bias_E is not None:
        key_TE = (key_TE + bias_E).nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    value = _ordered(key_TE)
    if selection.groups > 1:
        grouped = key_TE.unflatten(1, (selection.groups, -1))
        best = grouped.topk(min(2, grouped.shape[2]), 2).values
        total = (best[..., 0] + best[..., 1] if best.shape[2] == 2 else best[..., 0]).nan_to_num(nan=-torch.inf, posinf=torch.inf)
        chosen = _top_k(_ordered(total), selection.group_top_k)
        closed = torch.ones_like(total, dtype=torch.bool).scatter_(1, chosen, False)
        closed_TE = closed.repeat_interleave(grouped.shape[2], 1)
        value = value.masked_fill_(closed_TE, -(1 << 31) - 1)  # below every float
    return _top_k(value, k)


def _choice_sum(chosen_Tk: Tensor) -> Tensor:
    total = chosen_Tk[:, 0].clone()
    for j in range(1, chosen_Tk.shape[1]):
        total += chosen_Tk[:, j]
    return total.unsqueeze(1)


def router_forward(
    logits_TE: Tensor,
    k: int,
    score: str,
    normalize: bool,
    bias_E: Tensor | None = None,
    selection: Selection = Selection(),
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the k best experts of each token.

    Args:
        logits_TE: float32 [T, E].
        k: choices per token, 1..E.
        score: "softmax" (over E), "sigmoid" or "sqrt_softplus" (the root of log(1 + exp(logit))).
        normalize: divide a token's k probabilities by their sum, taken in the order of choice.
        bias_E: float32 [E], added to the scores for the choice only.
        selection: groups of experts.

    Returns:
        ids int64 [T, k], distinct for a token, best first, ties to the lowest expert; experts with a NaN logit come
        last. probs float32 [T, k]. scores float32 [T, E]. A NaN logit makes NaN what depends on it: with softmax all
        of its token, with sigmoid its own score (and, if it is chosen and normalize, the token's probs). A token whose
        chosen sigmoids are all zero has 0/0 = NaN with normalize.
    """
    nan_TE = torch.isnan(logits_TE)
    scores, key = _scores(logits_TE, nan_TE, score)
    ids = select(key, k, bias_E, selection)
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
    logits_TE: Tensor | None = None,
) -> Tensor:
    """Gradient of :func:`router_forward` for the logits, float32 [T, E]; the choice itself has none.

    ``logits_TE``: needed for "sqrt_softplus", whose derivative is sigmoid(logit) / (2 score), 0 where the score is 0.
    """
    dchosen = dprobs_Tk
    if normalize:
        total = _choice_sum(scores_TE.gather(1, ids_Tk))
        dchosen = (dprobs_Tk - _choice_sum(dprobs_Tk * probs_Tk)) / total
    # scatter, not scatter_add: the ids of a token are distinct
    d = torch.zeros_like(scores_TE).scatter_(1, ids_Tk, dchosen).add_(dscores_TE)
    if score == "sigmoid":
        return d.mul_(scores_TE).mul_(1.0 - scores_TE)
    if score == "sqrt_softplus":
        assert logits_TE is not None
        slope = sigmoid_f32(logits_TE) / (scores_TE * 2.0)
        return d.mul_(slope.masked_fill_(scores_TE == 0, 0.0))
    return d.sub_(row_sums(d * scores_TE).unsqueeze(1)).mul_(scores_TE)


def permute_forward(
    x_TH: Tensor, ids_Tk: Tensor, experts: int, probs_Tk: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Copy each token once per choice, ordered by (expert, token, choice); choices of expert -1 are dropped.

    Returns:
        x [T*k, H], probs [T*k] or None, offsets int64 [E+1], row_map int64 [T, k]: the row of token t's choice j, -1 for
        a dropped one. As many rows as choices were dropped lie past offsets[-1]; they are zero.
    """
    flat = ids_Tk.reshape(-1)
    sorted_ids, order = torch.sort(torch.where(flat < 0, experts, flat), stable=True)
    # the number of ids below e is where expert e begins
    offsets = torch.searchsorted(sorted_ids, torch.arange(experts + 1, device=ids_Tk.device))
    row_map, dropped = torch.empty_like(order), sorted_ids == experts
    row_map[order] = torch.arange(order.shape[0], device=ids_Tk.device).masked_fill_(dropped, -1)
    x = x_TH.index_select(0, order // ids_Tk.shape[1])
    if x.device.type != "cpu" or dropped.any():  # reading it costs nothing on the CPU, another pass over x would
        x.masked_fill_(dropped[:, None], 0)
    probs = None if probs_Tk is None else probs_Tk.reshape(-1).index_select(0, order).masked_fill_(dropped, 0)
    return x, probs, offsets, row_map.view(ids_Tk.shape)


def _token_chunks(tokens: int, width: int) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // max(width, 1))
    return [slice(i, min(i + step, tokens)) for i in range(0, tokens, step)]


def _drops(row_map_Tk: Tensor) -> bool:
    """Whether choices may have been dropped: reading it is free on the CPU, and masks are not; elsewhere it is assumed."""
    return row_map_Tk.device.type != "cpu" or bool((row_map_Tk < 0).any())


def _term(y_RH: Tensor, row_Tn: Tensor, probs_Tn: Tensor | None, drops: bool) -> Tensor:
    """float32 y[row] * probs for one choice of some tokens; zeros where the row is -1, whatever y and probs hold."""
    if drops and y_RH.shape[0] == 0:
        return y_RH.new_zeros(row_Tn.shape[0], y_RH.shape[1], dtype=torch.float32)
    term = y_RH.index_select(0, row_Tn.clamp(min=0) if drops else row_Tn).float()
    if probs_Tn is not None:
        term.mul_(probs_Tn[:, None])
    return term.masked_fill_((row_Tn < 0)[:, None], 0) if drops else term


def unpermute_forward(y_RH: Tensor, row_map_Tk: Tensor, probs_Tk: Tensor | None) -> Tensor:
    """out[t] = sum over j of y[row_map[t, j]] * probs[t, j], float32, in the order of j, rounded once to y's dtype.

    A row of -1 adds zero.
    """
    out, drops = y_RH.new_empty(row_map_Tk.shape[0], y_RH.shape[1]), _drops(row_map_Tk)
    for tokens in _token_chunks(*out.shape):
        terms = (
            _term(y_RH, row_map_Tk[tokens, j], None if probs_Tk is None else probs_Tk[tokens, j], drops)
            for j in range(row_map_Tk.shape[1])
        )
        total = next(terms)
        for term in terms:
            total.add_(term)
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
    drops = _drops(row_map_Tk)
    dy = dout_TH.new_zeros(rows + drops, dout_TH.shape[1])  # one more row takes what was dropped
    dprobs = None if probs_Tk is None else torch.empty(probs_Tk.shape, dtype=torch.float32, device=dy.device)
    for tokens in _token_chunks(*dout_TH.shape):
        upstream = dout_TH[tokens].float()
        for j in range(row_map_Tk.shape[1]):
            row = row_map_Tk[tokens, j]
            target = torch.where(row < 0, rows, row) if drops else row
            if y_RH is None or probs_Tk is None or dprobs is None:
                dy[target] = dout_TH[tokens]
            else:
                dy[target] = (upstream * probs_Tk[tokens, j, None]).to(dy.dtype)
                products = row_sums(_term(y_RH, row, None, drops).mul_(upstream))
                dprobs[tokens, j] = products.masked_fill_(row < 0, 0) if drops else products
    return dy[:rows], dprobs
