"""The operator ``dequantize``, which the quantized tensors' method of that name calls."""

from __future__ import annotations

import torch
from torch import Tensor

from blockscale.formats import parse
from blockscale.ops import backend, registry
from blockscale.tensors import Plane


def _dequantize(
    data: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    offsets: Tensor | None,
    rows: int,
    columns: int,
    fmt: str,
    plane: str,
    layout: str,
    dtype: torch.dtype,
) -> Tensor:
    return backend.dequantize(Plane(data, scale, amax, layout), offsets, (rows, columns), parse(fmt), plane, dtype)


def _fake(
    data: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    offsets: Tensor | None,
    rows: int,
    columns: int,
    fmt: str,
    plane: str,
    layout: str,
    dtype: torch.dtype,
) -> Tensor:
    return data.new_empty((rows, columns), dtype=dtype)


registry.define(
    "dequantize(Tensor data, Tensor scale, Tensor? amax, Tensor? offsets, SymInt rows, SymInt columns, str fmt, str plane,"
    " str layout, ScalarType dtype) -> Tensor",
    _dequantize,
    _fake,
)
