"""Quantization on the CPU: blockscale against torchao's eager path, against a copy, and its peak memory.

    OMP_NUM_THREADS=2 python bench/cpu_quantize.py [--rounds 7] [--rows 8192] [--columns 4096]

torchao is optional (``pip install --no-deps torchao==0.18.0``); without it there are no ratios to it. Its path for both planes
of MXFP8 is ``to_mx`` of x and of the transposed copy of x; of NVFP4 the same with ``nvfp4_quantize``, amax included.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import Arm, copy_arm, environment, interleave, peak_memory, ratio, verdict, write
from torch import Tensor

import blockscale as bs
from blockscale.formats import Format
from blockscale.ops import backend

FORMATS: dict[str, Format] = {
    "MXFP8": bs.MXFP8(),
    "MXFP8 32x32": bs.MXFP8(block=(32, 32)),
    "MXFP4": bs.MXFP4(),
    "NVFP4": bs.NVFP4(),
    "NVFP4 hadamard": bs.NVFP4(hadamard=True),
    "NVFP4 stochastic": bs.NVFP4(stochastic=True),
    "NVFP4 row-scaled": bs.NVFP4(row_scaled=True),
    "NVFP4 four over six": bs.NVFP4(four_over_six="mse"),
    "FP8 per tensor": bs.FP8Tensor(),
    "FP8 per block": bs.FP8Block(),
}
RNG = torch.tensor([1, 2])


def tensors(q: bs.BlockScaledTensor) -> list[Tensor]:
    """All that a result holds."""
    return [t for plane in q.planes.values() for t in plane.tensors()]


def ours(x: Tensor, fmt: Format, planes: str) -> list[Tensor]:
    """Planes "rowwise", "columnwise" or "both" in new memory."""
    rng = RNG if getattr(fmt, "stochastic", False) else None
    return tensors(bs.quantize(x, fmt, rowwise=planes != "columnwise", columnwise=planes != "rowwise", rng=rng))


def torchao_arms(x: Tensor) -> dict[str, Arm]:
    """torchao's eager path for both planes of each format that it has; nothing without torchao."""
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    except ImportError:
        return {}

    def mx() -> list[Tensor]:
        both = (to_mx(t, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL) for t in (x, x.mT.contiguous()))
        return [t for pair in both for t in pair]

    def nv() -> list[Tensor]:
        scale = per_tensor_amax_to_scale(x.abs().max())
        return [t for y in (x, x.mT.contiguous()) for t in nvfp4_quantize(y, 16, scale)]

    return {"MXFP8": Arm("torchao MXFP8", mx), "NVFP4": Arm("torchao NVFP4", nv)}


def main() -> None:
    """Time, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 7), ("rows", 8192), ("columns", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    x = torch.randn(options.rows, options.columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    planes = ("both", "rowwise", "columnwise")
    arms = {(name, p): Arm(f"{name} {p}", lambda f=fmt, p=p: ours(x, f, p)) for name, fmt in FORMATS.items() for p in planes}
    copy, theirs = copy_arm(x.numel()), torchao_arms(x)
    # the two that are compared take turns with each other, close in time; then the rest with the copy
    for name, arm in theirs.items():
        interleave([arms[name, "both"], arm, copy], max(3, options.rounds // 2))
    interleave([copy, *arms.values()], options.rounds)
    bandwidth = 2 * x.nbytes / copy.best
    found: dict[str, Any] = {"shape": list(x.shape), "copy_bytes_per_second": bandwidth, "quantize": []}
    rows = [["format", "planes", "backend", "best ms", "median ms", "GB/s", "share of copy", "peak above in + out", "torchao"]]
    notes = []
    for (name, p), arm in arms.items():
        memory = peak_memory(lambda n=name, p=p: ours(x, FORMATS[n], p), x.nbytes)
        speed = memory["least_bytes"] / arm.best
        choice = backend.choose("quantize", x.device, FORMATS[name])
        entry = {"format": FORMATS[name].spec(), "planes": p, "backend": choice.backend, "seconds": arm.seconds}
        entry |= {"bytes_per_second": speed, "share_of_copy": speed / bandwidth, **memory}
        against = ratio(theirs[name], arm) if p == "both" and name in theirs else None
        found["quantize"].append(entry | {"torchao_ratio": against, "torchao_seconds": theirs[name].seconds if against else None})
        times = [f"{1e3 * arm.best:.1f}", f"{1e3 * arm.median:.1f}", f"{speed / 1e9:.1f}", f"{speed / bandwidth:.0%}"]
        rows.append([name, p, choice.backend, *times, f"{memory['overhead']:+.1%}", f"{against['best']:.1f}x" if against else ""])
        if against:
            notes.append(
                verdict(f"{name}, both planes, torchao's eager time", min(against.values()), 3 if name == "MXFP8" else 5, True)
            )
    worst = max(e["overhead"] for e in found["quantize"])
    notes.append(verdict("peak memory above inputs + outputs, the worst of the table", 100 * worst, 25, False, " %"))
    notes.append(f"copy: {bandwidth / 1e9:.1f} GB/s read and written; results lie in new memory in every arm, the copy's does not")
    title = f"Quantize {options.rows}x{options.columns} bfloat16 on the CPU, {torch.get_num_threads()} threads"
    write("cpu_quantize", title, found, rows, notes, environment(("torchao",)))


if __name__ == "__main__":
    main()
