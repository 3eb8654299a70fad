"""The activations and their gradients on the CPU in compiled code, bit-equal to ``reference.activations``, ds included.

exp and tanh are those of spec/numerics.md, written out: no library function whose bits could differ is called. A row is
read once and written once; a thread takes six rows of floats for itself.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from blockscale.activations import Activation, ClampedSwiglu, Situ, SquaredRelu, Swiglu
from blockscale.kernels.cpu import memory
from blockscale.kernels.cpu.build import load
from blockscale.kernels.cpu.quantize import DTYPES

_PTR, _I64, _I32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_KINDS: dict[type[Activation], int] = {Swiglu: 0, ClampedSwiglu: 1, SquaredRelu: 2, Situ: 3}


class _Args(ctypes.Structure):
    """``struct ActivationArgs`` of csrc/activation.cpp."""

    _fields_ = [
        *((name, _PTR) for name in ("h", "dy", "probs", "out", "ds")),
        *((name, _I64) for name in ("ldh", "lddy", "rows", "width", "run")),
        *((name, _FLOAT) for name in ("first", "second", "third")),
        *((name, _I32) for name in ("kind", "dtype", "threads")),
    ]


def forward(h: Tensor, act: Activation, probs: Tensor | None, interleave: int | None, live: int) -> Tensor:
    """act(h) * probs in h's dtype; rows from ``live`` on are zero and not read. Arguments as the operator ``activation``."""
    y = memory.empty((h.shape[0], act.out_width(h.shape[1], interleave)), h.dtype)
    _run(h, None, act, probs, interleave, live, y, None)
    return y


def backward(
    dy: Tensor, h: Tensor, act: Activation, probs: Tensor | None, interleave: int | None, live: int
) -> tuple[Tensor, Tensor | None]:
    """(dh in h's dtype, ds float32 (rows,) or None without probs); rows from ``live`` on are zero and not read."""
    dh = memory.empty(h.shape, h.dtype)
    ds = None if probs is None else torch.empty(h.shape[0])
    _run(h, dy, act, probs, interleave, live, dh, ds)
    return dh, ds


def _run(
    h: Tensor,
    dy: Tensor | None,
    act: Activation,
    probs: Tensor | None,
    interleave: int | None,
    live: int,
    out: Tensor,
    ds: Tensor | None,
) -> None:
    h, dy, probs = _lines(h), None if dy is None else _lines(dy), None if probs is None else probs.contiguous()
    args = _Args(*(None if t is None else t.data_ptr() for t in (h, dy, probs, out, ds)))
    args.ldh, args.lddy, args.rows = h.stride(0), 0 if dy is None else dy.stride(0), live
    args.width = act.out_width(h.shape[1], interleave)
    args.run, args.kind = interleave or args.width, _KINDS[type(act)]
    if isinstance(act, ClampedSwiglu):
        args.first, args.second, args.third = act.limit, act.alpha, act.offset
    elif isinstance(act, Situ):
        args.first, args.second = act.beta1, act.beta2
    args.dtype, args.threads = DTYPES[h.dtype], torch.get_num_threads()
    library = load().library
    assert library is not None
    if args.width:
        library.blockscale_activation(ctypes.byref(args))
    elif ds is not None:
        ds.zero_()
    for tensor in (out, ds):
        if tensor is not None:
            tensor[live:].zero_()


def _lines(x: Tensor) -> Tensor:
    """x with the columns of a row side by side."""
    return x if x.stride(1) == 1 else x.contiguous()
