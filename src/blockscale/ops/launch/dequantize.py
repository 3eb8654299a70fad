"""Dequantization on the GPU: the kernel of the plane's storage, one launch for all groups, no workspace.

Legend: M rows (capacity), K columns, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockscale.formats import NVFP4, Format, FP8Block
from blockscale.kernels.dequantize import dequantize_columns, dequantize_rows
from blockscale.layouts import ceil_div
from blockscale.ops.launch.call import chunks
from blockscale.ops.launch.start import Candidate, choose, start

ROWS = (Candidate({"COLUMNS": 128}, 1), Candidate({"COLUMNS": 128}, 4))
COLUMNS = (Candidate({"COLUMNS": 64}, 4), Candidate({"COLUMNS": 64}, 8))


def about(fmt: Format) -> str:
    """How a call runs, for ``explain``."""
    return "one launch for all groups"


def dequantize(
    data: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    offsets: Tensor | None,
    shape: tuple[int, int],
    fmt: Format,
    plane: str,
    layout: str,
    dtype: torch.dtype,
) -> Tensor:
    """Values (M, K) of a plane in ``dtype``; ``fmt``: what the plane's bytes are in (``Format.stored``)."""
    M, K = shape
    if M >= 2**31:
        raise ValueError(f"the plane has {M} rows; the GPU kernels count rows in 32 bits: fewer than {2**31} are needed")
    out = torch.empty(shape, dtype=dtype, device=data.device)
    G = 1 if offsets is None else offsets.numel() - 1
    if G == 0:  # no group, nothing is live
        return out.zero_()
    where = data if offsets is None else offsets.contiguous()
    data, scale = data.contiguous(), scale.contiguous()
    column = plane == "columnwise"
    flags = {"GROUPED": offsets is not None, "CHUNKS": chunks(G), **constants(fmt, column, layout)}
    amax = scale if amax is None else amax.contiguous()
    args = (data, scale, amax, where, G, M, K, getattr(fmt, "range", 0.0), out)
    transposed = column and fmt.transposed
    kernel, candidates, height = (dequantize_columns, COLUMNS, 128) if transposed else (dequantize_rows, ROWS, 32)
    if transposed:
        del flags["COLUMN"]
    candidate = choose(kernel, candidates, args, flags)
    slots = ceil_div(M, height) + (0 if offsets is None else G)
    start(kernel, slots * ceil_div(K, candidate.constants["COLUMNS"]), args, flags, candidate)
    return out


def constants(fmt: Format, column: bool, layout: str) -> dict[str, Any]:
    """The kernels' constants of a plane."""
    kind = "square" if isinstance(fmt, FP8Block) and fmt.is_2d else "tensor" if fmt.per_tensor else "block"
    return {
        "PACKED": fmt.packed,
        "E5M2": fmt.element_name == "e5m2",
        "SCALE": fmt.scale_type if fmt.has_codes else kind,
        "BLOCK": fmt.block_length if fmt.has_codes else 128,
        "COLUMN": column,
        "BY_ROW": isinstance(fmt, NVFP4) and fmt.row_scaled,
        "LAYOUT": layout,
    }
