"""New tensors that compiled code fills. A large one asks the system for large pages, whose first use costs less."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache

import torch
from torch import Tensor

#: pages of 2 MiB, on all of Linux's usual targets; a smaller tensor holds none for sure
_PAGE = 2 << 20
_LARGE_PAGES = 14  # MADV_HUGEPAGE of <sys/mman.h>


@lru_cache(maxsize=1)
def _advise() -> ctypes._FuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """``torch.empty`` on the CPU. Only pages that lie wholly inside are advised, so no byte more is taken."""
    x = torch.empty(shape, dtype=dtype)
    advise = _advise()
    if x.nbytes >= 2 * _PAGE and advise is not None:
        start = -(-x.data_ptr() // _PAGE) * _PAGE
        advise(start, (x.data_ptr() + x.nbytes) // _PAGE * _PAGE - start, _LARGE_PAGES)  # advice: a refusal changes nothing
    return x
