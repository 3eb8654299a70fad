"""The bfloat16 matrix product with a float32 result that torch carries in its CPU library, called through its C interface.

torch's own operators round a product of bfloat16 matrices to bfloat16, and the switch that lets float32 products use
bfloat16 is one for the whole process, other threads included. oneMKL's ``cblas_gemm_bf16bf16f32`` does what is needed:
it multiplies exactly, adds in float32 and writes float32. It treats subnormal operands and results as zero, so callers use
it only where there are none (see ``gemm``). Source: oneMKL reference, "cblas_gemm_bf16bf16f32".
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112
_INT, _FLOAT, _PTR = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
_SIGNATURE = (*(_INT,) * 6, _FLOAT, _PTR, _INT, _PTR, _INT, _FLOAT, _PTR, _INT)


@lru_cache(maxsize=1)
def bf16_gemm() -> tuple[Callable[..., None] | None, str]:
    """The C function, or None where it cannot be used, and why."""
    if not getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        return None, "this processor has no bfloat16 products (avx512_bf16)"
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(path)).cblas_gemm_bf16bf16f32
    except (OSError, AttributeError):
        return None, "this build of torch carries no cblas_gemm_bf16bf16f32"
    function.argtypes, function.restype = _SIGNATURE, None
    if not _right(function):
        return None, "cblas_gemm_bf16bf16f32 of this build of torch takes other arguments"
    return function, "oneMKL bf16 x bf16 -> float32, in torch's library"


def _right(function: Callable[..., None]) -> bool:
    """One small product, each of whose elements needs more than bfloat16 to be written.

    On plain memory: this may be asked first while tensors are fake, by ``explain``.
    """
    a, b = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), (101.0, 101.0, 101.0, 0.5, 101.0, 101.0)
    memory = [(ctypes.c_uint16 * 6)(*(int.from_bytes(struct.pack(">f", v)[:2], "big") for v in x)) for x in (a, b)]
    c = (ctypes.c_float * 4)(*(float("nan"),) * 4)
    pointers = [*(ctypes.addressof(x) for x in memory), ctypes.addressof(c)]
    function(_ROW_MAJOR, _AS_IT_IS, _AS_IT_IS, 2, 2, 3, 1.0, pointers[0], 3, pointers[1], 2, 0.0, pointers[2], 2)
    return list(c) == [606.0, 405.0, 1515.0, 1012.5]


#: products of fewer multiplications run on one thread: waiting for another costs more
_SMALL = 1 << 22


@lru_cache(maxsize=1)
def _set_threads() -> Callable[[int], int]:
    """Sets oneMKL's number of threads for the calling thread (0: as it was made) and returns the number before."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(path)).MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return lambda count: 0


def call(function: Callable[..., None], a: Tensor, a_transposed: bool, b: Tensor, b_transposed: bool, c: Tensor, k: int) -> None:
    """c (m, n) = op(a) op(b) over ``k``; a and b bfloat16 and c float32, rows contiguous, leading dimension the stride."""
    m, n = c.shape
    flags = [_TRANSPOSED if t else _AS_IT_IS for t in (a_transposed, b_transposed)]
    pointers = (a.data_ptr(), a.stride(0)), (b.data_ptr(), b.stride(0))
    before = _set_threads()(1) if m * n * k < _SMALL else None
    function(_ROW_MAJOR, *flags, m, n, k, 1.0, *pointers[0], *pointers[1], 0.0, c.data_ptr(), c.stride(0))
    if before is not None:
        _set_threads()(before)
