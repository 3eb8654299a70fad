"""Sums over the rows of groups (bias gradients) and dot products of rows with a bias, on the CPU in compiled code.

As ``reference.grouped_gemm`` defines them, to the order of the sums, which only the shape of a group (a row) decides.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from blockscale.kernels.cpu.build import load
from blockscale.kernels.cpu.quantize import DTYPES

_PTR, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Args(ctypes.Structure):
    """``struct ReduceArgs`` of csrc/reduce.cpp."""

    _fields_ = [
        ("x", _PTR),
        ("ldx", _I64),
        ("offsets", _PTR),
        ("groups", _I64),
        ("columns", _I64),
        ("factor", _PTR),
        ("out", _PTR),
        ("dtype", _I32),
        ("threads", _I32),
    ]


def bias_grad(dy: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor:
    """Sum of the rows of each group, times ``scale`` (capacity,) when given: float32 (G, columns)."""
    out = torch.empty((offsets.shape[0] - 1, dy.shape[1]))
    _call("blockscale_sum_rows", dy, offsets, scale, out)
    return out


def row_dot(dy: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """Each live row of dy (capacity, N) times its group's bias (G, N), summed: float32 (capacity,), dead rows 0."""
    out = torch.empty(dy.shape[0])
    _call("blockscale_dot_rows", dy, offsets, bias.float(), out)
    out[offsets[-1] :].zero_()
    return out


def _call(name: str, x: Tensor, offsets: Tensor, factor: Tensor | None, out: Tensor) -> None:
    x = x if x.stride(1) == 1 else x.contiguous()
    offsets, factor = offsets.contiguous(), None if factor is None else factor.contiguous()
    args = _Args(x.data_ptr(), x.stride(0), offsets.data_ptr(), offsets.shape[0] - 1, x.shape[1])
    args.factor, args.out = None if factor is None else factor.data_ptr(), out.data_ptr()
    args.dtype, args.threads = DTYPES[x.dtype], torch.get_num_threads()
    library = load().library
    assert library is not None
    getattr(library, name)(ctypes.byref(args))
