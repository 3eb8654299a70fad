"""Counting for ``watch`` on the CPU in compiled code: one pass over the tensor, equal to the reference."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from blockscale.formats import FP8Block, FP8Tensor
from blockscale.kernels.cpu.build import load
from blockscale.kernels.cpu.quantize import DTYPES
from blockscale.tensors import GroupedTensor
from blockscale.tensors.arrange import Logical
from blockscale.tensors.counters import limits
from blockscale.tensors.decode import global_scale

_PTR, _I64, _I32, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double
#: elements below which another thread costs more than it saves
_ELEMENTS_A_THREAD = 1 << 20
_KINDS = {"e8m0": 1, "e4m3": 2}


class _Args(ctypes.Structure):
    """``struct CountArgs`` of csrc/count.cpp."""

    _fields_ = [
        ("x", _PTR),
        ("ldx", _I64),
        ("offsets", _PTR),
        *((name, _I64) for name in ("groups", "columns", "block")),
        ("scale", _PTR),
        ("pitch", _I64),
        ("total", _PTR),
        *((name, _DOUBLE) for name in ("low", "high")),
        ("out", _PTR),
        ("call", _DOUBLE),
        *((name, _I32) for name in ("dtype", "scale_kind", "tile_scales", "total_by_row", "threads")),
    ]


def count_into(out: Tensor, x: Tensor, offsets: Tensor, q: GroupedTensor | None, call: int) -> None:
    """Add what x (M, K) holds to ``out`` (see ``reference.count.count_into``).

    Args:
        out: contiguous float64 (G, FIELDS).
        x: float32, bfloat16 or float16. offsets: int64[G+1], checked.
        q: x quantized, with a rowwise plane in layout "compact"; None: elements alone are counted.
        call: number of the observation.
    """
    M, K = x.shape
    if x.stride(1) != 1 and K > 1:
        x = x.contiguous()
    offsets, groups = offsets.contiguous(), offsets.shape[0] - 1
    threads = max(1, min(torch.get_num_threads(), M * K // _ELEMENTS_A_THREAD))
    if q is None:
        _look()(x.data_ptr(), x.stride(0), offsets.data_ptr(), groups, K, out.data_ptr(), call, DTYPES[x.dtype], threads)
        return
    args = _Args(x.data_ptr(), x.stride(0), offsets.data_ptr(), groups, K, max(K, 1))
    args.out, args.call, args.dtype, args.threads = out.data_ptr(), call, DTYPES[x.dtype], threads
    kept = _describe_scales(args, q)
    library = load().library
    assert library is not None
    library.blockscale_count(ctypes.byref(args))
    del kept


def count_finite(out: Tensor, x: Tensor, offsets: Tensor | None) -> bool:
    """Add what :func:`count_into` would, without scales, if all of x is finite; if not, change nothing. Whether it is.

    Args:
        out: contiguous float64 (G, FIELDS).
        x: float32, bfloat16 or float16; (M, K) with offsets, else of any shape. offsets: int64[G+1], checked; None: one group.
    """
    x, n = x.contiguous(), x.numel()
    threads = 1 if n < 2 * _ELEMENTS_A_THREAD else min(torch.get_num_threads(), n // _ELEMENTS_A_THREAD)
    if offsets is None:
        return bool(_finite()(x.data_ptr(), None, 1, 1, n, out.data_ptr(), DTYPES[x.dtype], threads))
    offsets = offsets.contiguous()
    shape = (offsets.shape[0] - 1, 0, x.shape[1])
    return bool(_finite()(x.data_ptr(), offsets.data_ptr(), *shape, out.data_ptr(), DTYPES[x.dtype], threads))


@cache
def _finite() -> Any:
    library = load().library
    assert library is not None
    function = library.blockscale_count_finite
    function.argtypes = [_PTR, _PTR, _I64, _I64, _I64, _PTR, _I32, _I32]
    function.restype = _I32
    return function


@cache
def _look() -> Any:
    library = load().library
    assert library is not None
    function = library.blockscale_look
    function.argtypes = [_PTR, _I64, _PTR, _I64, _I64, _PTR, _DOUBLE, _I32, _I32]
    function.restype = None
    return function


def _describe_scales(args: _Args, q: GroupedTensor) -> list[Tensor]:
    """Fill in what tells of the scales; the tensors that must live until the call is over."""
    fmt, p = q.format, q.plane("rowwise")
    scale = p.scale.contiguous()
    args.low, args.high = limits(fmt)
    args.scale, args.pitch = scale.data_ptr(), scale.shape[-1]
    if isinstance(fmt, FP8Tensor):
        args.scale_kind = 3
        return [scale]
    args.block = fmt.block_length
    if isinstance(fmt, FP8Block):
        args.scale_kind, args.tile_scales = 4, fmt.is_2d
        return [scale]
    args.scale_kind = _KINDS[fmt.scale_type]
    total = global_scale(Logical(p.data, scale, p.amax), fmt)
    if total is None:
        return [scale]
    args.total, args.total_by_row = total.data_ptr(), fmt.scales_rows
    return [scale, total]
