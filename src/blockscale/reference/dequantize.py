"""The meaning of ``dequantize``: the values of a quantized plane, in plain torch on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from blockscale.formats import Format
from blockscale.tensors import BlockScaledTensor, GroupedTensor, Plane
from blockscale.tensors.decode import values


def dequantize(plane: Plane, offsets: Tensor | None, shape: tuple[int, int], fmt: Format, which: str, dtype: torch.dtype) -> Tensor:
    """Values (M, K) in ``dtype``, computed in float32 and rounded once; grouped by ``offsets``: dead rows are zero.

    Args:
        which: "rowwise" or "columnwise". fmt: what the plane's bytes are in.
    """
    row, column = (plane, None) if which == "rowwise" else (None, plane)
    q = BlockScaledTensor(shape, fmt, row, column) if offsets is None else GroupedTensor(shape, fmt, row, column, offsets)
    frame = values(q.logical(which), fmt, which, q.tiles, shape[1], with_global=True)
    return (frame[: shape[0]] if offsets is None else q.tiles.to_rows(frame)).to(dtype)
