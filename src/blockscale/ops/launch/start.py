"""Which tile a kernel runs with, and its start.

A kernel comes with candidates: tile constants, warps and a limit of registers, the fastest first as measured. The first that
the compiler fits without spilling registers to memory is used, for this combination of flags, dtypes and alignments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor


@dataclass(frozen=True)
class Candidate:
    """Tile constants of a kernel, and the options that it is compiled with."""

    constants: dict[str, int]
    num_warps: int
    maxnreg: int | None = None

    def all_options(self) -> dict[str, Any]:
        """Keyword arguments of a launch besides the kernel's own."""
        capped = {} if self.maxnreg is None else {"maxnreg": self.maxnreg}
        return {**self.constants, "num_warps": self.num_warps, "enable_fp_fusion": False, **capped}


_chosen: dict[tuple[object, ...], Candidate] = {}


def choose(kernel: Any, candidates: tuple[Candidate, ...], args: tuple[Any, ...], flags: dict[str, Any]) -> Candidate:
    """The first candidate that does not spill; the last if all do."""
    key = (kernel, candidates[0].num_warps, *(_kind(a) for a in args), *flags.items())
    if key not in _chosen:
        fits = (c for c in candidates if triton.knobs.runtime.interpret or _spills(kernel, c, args, flags) == 0)
        _chosen[key] = next(fits, candidates[-1])
    return _chosen[key]


def _spills(kernel: Any, candidate: Candidate, args: tuple[Any, ...], flags: dict[str, Any]) -> int:
    compiled = kernel.warmup(*args, grid=(1,), **flags, **candidate.all_options())
    compiled._init_handles()
    spills: int = compiled.n_spills
    return spills


def _kind(arg: object) -> object:
    """What of an argument changes the compiled code: dtype and alignment."""
    if isinstance(arg, Tensor):
        return arg.device, arg.dtype, arg.data_ptr() % 16 == 0
    return arg % 16 == 0 if isinstance(arg, int) and arg != 1 else arg


def start(kernel: Any, programs: int, args: tuple[Any, ...], flags: dict[str, Any], candidate: Candidate) -> None:
    """Run ``programs`` programs; nothing when there are none."""
    if programs:
        kernel[(programs,)](*args, **flags, **candidate.all_options())
