"""NVFP4 four over six: each block takes the scale that maps its maximum to 6 or to 4, whichever loses less.

The grid of E2M1 is coarse between 4 and 6; a block whose values lie there is better off scaled so that its maximum is 4.
Legend: R rows, B blocks along the contraction, v = 16 elements of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockscale.formats import NVFP4, decode, encode
from blockscale.formats.scales import FLT_MAX, divide, nvfp4_encode_scale


def both_scales(amax_b: Tensor, amax_g: Tensor, fmt: NVFP4) -> tuple[Tensor, Tensor]:
    """E4M3 codes (s6, s4) of blocks, from their amax and the (broadcast) global amax; both saturate at 448."""
    base = torch.div(amax_b, amax_b.new_tensor(6.0)) * nvfp4_encode_scale(amax_g, fmt.range)
    return encode(base, "e4m3"), encode(base * 1.5, "e4m3")


def errors(x_RBv: Tensor, scale_RB: Tensor, amax_g: Tensor, fmt: NVFP4) -> Tensor:
    """float32 (R, B): |d| or d*d summed in element order, d the difference between the decoded block and x."""
    factor = decode(scale_RB, "e4m3")
    s_dec = divide(1.0, nvfp4_encode_scale(amax_g, fmt.range))
    enc = divide(1.0, factor * s_dec).clamp_(max=FLT_MAX)
    q = decode(encode(x_RBv * enc[..., None], "e2m1"), "e2m1")
    back = torch.div(q * factor[..., None] * amax_g[..., None], q.new_tensor(fmt.range))
    d = back - x_RBv
    each = d.abs() if fmt.four_over_six == "mae" else d * d
    total = each[..., 0]
    for t in range(1, each.shape[-1]):
        total = total + each[..., t]
    return total


def choose_four(x_RBv: Tensor, amax_b: Tensor, amax_g: Tensor, fmt: NVFP4) -> Tensor:
    """bool: whether 4 is kept, of each block (R, B), or of each 16x16 tile (R/16, B), whose rows' errors are summed as a tree.

    Args:
        x_RBv: float32 row plane (16x16: R a multiple of 16) or column plane in the same form.
        amax_b: of each block, or of each tile repeated over its rows.
    """
    s6, s4 = both_scales(amax_b, amax_g, fmt)
    six, four = (errors(x_RBv, s, amax_g, fmt) for s in (s6, s4))
    if fmt.is_2d:
        six, four = _over_tiles(six), _over_tiles(four)
    return four < six


def _over_tiles(error_RB: Tensor) -> Tensor:
    """(R, B) -> (R/16, B): row r with r + 8, then + 4, + 2, + 1."""
    e = error_RB.view(-1, 16, error_RB.shape[1])
    for h in (8, 4, 2, 1):
        e = e[:, :h] + e[:, h:]
    return e[:, 0]
