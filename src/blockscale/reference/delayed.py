"""The meaning of delayed scaling: the scale of the next step from the amax history, in plain torch, without a sync."""

from __future__ import annotations

import torch
from torch import Tensor

from blockscale.formats import FP8Delayed, element
from blockscale.formats.scales import FLT_MAX, divide


def record(history: Tensor, amax: Tensor) -> None:
    """Enter ``amax`` float32 (G,) in slot 0 of ``history`` (L, G), in place: a step keeps the largest of its calls."""
    history[0].copy_(torch.maximum(history[0], amax))


def next_scale(scale: Tensor, history: Tensor, fmt: FP8Delayed) -> tuple[Tensor, Tensor]:
    """(scale, history) of the next step; G entries each, or none.

    The scale is fl(fl(max / amax) / 2^margin), an infinity FLT_MAX, of the largest entry of the history ("max") or of slot 0
    ("most_recent"); where that amax is 0 or not finite the old scale stays. Then the history rolls by one, so that its
    oldest entry, slot 1, falls to slot 0, which is zeroed for the step to come.

    Args:
        scale: float32 (G,), what values are multiplied by. history: float32 (L, G), this step's amax in slot 0.

    Source: the delayed scaling recipe as NVIDIA's Transformer Engine documents it.
    """
    amax = history.amax(0) if fmt.algorithm == "max" else history[0]
    made = (divide(element(fmt.element).max, amax) / 2.0**fmt.margin).clamp(max=FLT_MAX)
    kept = torch.where((amax > 0) & amax.isfinite(), made, scale)
    rolled = history.roll(-1, 0)
    rolled[0].zero_()
    return kept, rolled
