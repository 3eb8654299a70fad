"""Quantization on the CPU in compiled code: every format, plane, layout and grouping, bit-equal to the reference.

Outputs are allocated here (or given) and written once; a call takes nothing else but up to 170 KiB a thread. Legend: M
rows (capacity), K columns, G groups.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from blockscale.formats import MXFP4, MXFP8, NVFP4, Format, FP8Block, FP8Tensor
from blockscale.kernels.cpu import memory
from blockscale.kernels.cpu.build import load
from blockscale.layouts import LAYOUTS, PLANES
from blockscale.tensors.shapes import amax_shape, grouped_plane_shapes, plane_shapes, scale_dtype

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KINDS: dict[type[Format], int] = {MXFP8: 0, NVFP4: 1, FP8Tensor: 2, FP8Block: 3, MXFP4: 4}
ERRORS = (None, "mae", "mse")


def covers(fmt: Format) -> bool:
    """Whether there is compiled code for the format, in both directions."""
    return type(fmt) in KINDS


_PTR, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Plane(ctypes.Structure):
    _fields_ = [("data", _PTR), ("scale", _PTR), ("amax", _PTR), ("data_bytes", _I64), ("scale_bytes", _I64)]


class _Args(ctypes.Structure):
    """``struct Args`` of csrc/common.h."""

    _fields_ = [
        ("x", _PTR),
        ("ldx", _I64),
        ("offsets", _PTR),
        *((name, _I64) for name in ("groups", "capacity", "columns")),
        ("row", _Plane),
        ("col", _Plane),
        ("amax", _PTR),
        *((name, _I64) for name in ("seed", "rng_offset")),
        *((name, ctypes.c_float) for name in ("eps", "range")),
        *((name, _I32) for name in ("dtype", "plain", "layout", "threads", "kind")),
        *((name, _I32) for name in ("e5m2", "square", "floor", "ignore", "power_of_two", "hadamard", "stochastic")),
        *((name, _I32) for name in ("row_scaled", "four_over_six")),
    ]


def quantize(
    x: Tensor,
    offsets: Tensor | None,
    fmt: Format,
    rowwise: bool,
    columnwise: bool,
    layout: str,
    amax: Tensor | None,
    rng: Tensor | None,
    out: list[Tensor] | None = None,
) -> list[Tensor]:
    """Planes of x (M, K): data, scale, amax of the rowwise plane, then of the columnwise one.

    Args:
        x: float32, bfloat16 or float16 on the CPU.
        offsets: int64[G+1], checked; None: a plain tensor.
        fmt, rowwise, columnwise, layout, amax, rng: as the operators take them.
        out: contiguous tensors of the right shapes to write instead of new ones, none of them overlapping x.
    """
    M, K = x.shape
    plain = offsets is None
    offsets = torch.tensor([0, M]) if offsets is None else offsets.contiguous()
    if x.stride(1) != 1:
        x = x.contiguous()
    G = offsets.numel() - 1
    if amax is not None:
        amax = amax.contiguous() if fmt.scales_rows else amax.reshape(-1, G).expand(2, G).contiguous()
    seed, offset = (0, 0) if rng is None else rng.tolist()
    tensors = empty_planes(fmt, M, K, None if plain else G, rowwise, columnwise, layout) if out is None else out
    planes = iter(tensors)
    row, column = (_plane(next(planes), next(planes), next(planes), fmt) if asked else _Plane() for asked in (rowwise, columnwise))
    args = _Args(x.data_ptr(), x.stride(0), offsets.data_ptr(), G, M, K, row, column, None if amax is None else amax.data_ptr())
    args.seed, args.rng_offset, args.eps = seed, offset, getattr(fmt, "eps", 0.0)
    args.dtype, args.plain, args.layout, args.threads = DTYPES[x.dtype], plain, LAYOUTS.index(layout), torch.get_num_threads()
    args.kind, args.e5m2, args.square = KINDS[type(fmt)], fmt.element_name == "e5m2", fmt.is_2d
    args.floor = getattr(fmt, "scale_rounding", "") == "floor"
    args.ignore = getattr(fmt, "nan", "") == "ignore"
    args.range, args.four_over_six = getattr(fmt, "range", 0.0), ERRORS.index(getattr(fmt, "four_over_six", None))
    for name in ("power_of_two", "hadamard", "stochastic", "row_scaled"):
        setattr(args, name, getattr(fmt, name, False))
    library = load().library
    assert library is not None
    library.blockscale_quantize(ctypes.byref(args))
    return tensors


def _plane(data: Tensor, scale: Tensor, amax: Tensor, fmt: Format) -> _Plane:
    return _Plane(data.data_ptr(), scale.data_ptr(), amax.data_ptr() if fmt.has_amax else None, data.nbytes, scale.nbytes)


def empty_planes(fmt: Format, M: int, K: int, G: int | None, rowwise: bool, columnwise: bool, layout: str) -> list[Tensor]:
    """Tensors to write the planes to, in the operators' order; G None: a plain tensor."""
    tensors = []
    for name, asked in zip(PLANES, (rowwise, columnwise), strict=True):
        if asked:
            shapes = plane_shapes(fmt, M, K, name, layout) if G is None else grouped_plane_shapes(fmt, M, K, G, name, layout)
            tensors += [memory.empty(shapes[0], torch.uint8), memory.empty(shapes[1], scale_dtype(fmt))]
            tensors.append(torch.empty(amax_shape(fmt, name, M, K, G)))
    return tensors
