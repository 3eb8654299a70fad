"""The bfloat16 matrix product with a float32 result that torch carries in its CPU library, called through its C interface.

torch's own operators round a product of bfloat16 matrices to bfloat16, and the switch that lets float32 products use
bfloat16 is one for the whole process, other threads included. oneMKL's ``cblas_gemm_bf16bf16f32`` does what is needed:
it multiplies exactly, adds in float32 and writes float32. It treats subnormal operands and results as zero, so callers use
it only where there are none (see ``gemm``). Source: oneMKL reference, "cblas_gemm_bf16bf16f32".
"""

from __future__ import annotations

import ctypes
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
    """One small product, each of whose elements needs more than bfloat16 to be written."""
    a, b = torch.arange(1, 7).view(2, 3).bfloat16(), torch.full((3, 2), 100.0).bfloat16()
    b[1, 1] = 1.0
    c = torch.full((2, 2), float("nan"))
    call(function, a, False, b, False, c, 3)
    return bool(torch.equal(c, a.float() @ b.float()))


def call(function: Callable[..., None], a: Tensor, a_transposed: bool, b: Tensor, b_transposed: bool, c: Tensor, k: int) -> None:
    """c (m, n) = op(a) op(b) over ``k``; a and b bfloat16 and c float32, rows contiguous, leading dimension the stride."""
    m, n = c.shape
    flags = [_TRANSPOSED if t else _AS_IT_IS for t in (a_transposed, b_transposed)]
    pointers = (a.data_ptr(), a.stride(0)), (b.data_ptr(), b.stride(0))
    function(_ROW_MAJOR, *flags, m, n, k, 1.0, *pointers[0], *pointers[1], 0.0, c.data_ptr(), c.stride(0))
