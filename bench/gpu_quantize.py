"""Quantization on the GPU: each kernel's share of the copy bandwidth, torch.compile and torchao beside it.

    python bench/gpu_quantize.py [--commit HASH]

A share is (bytes read + bytes written) / time over what a device-to-device copy of the same tensor reaches in the same run.
Times are CUDA events', medians. Random data; groups are skewed (cubes of uniform numbers). torchao is optional.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import environment, write
from torch import Tensor
from triton.testing import do_bench

import blockscale as bs
from blockscale.activations import parse
from blockscale.formats import Format
from blockscale.ops import backend
from blockscale.ops.launch import activation
from blockscale.ops.launch.quantize import empty_planes

SHAPES = [(131072, 2048), (32768, 7168), (16384, 16384)]
#: name, format, rowwise, columnwise, groups (0: plain), layout, amax given, share demanded
CASES: list[tuple[str, Format, bool, bool, int, str, bool, float | None]] = [
    ("MXFP8 row", bs.MXFP8(), True, False, 0, "swizzled", False, 97),
    ("MXFP8 row, 16 groups", bs.MXFP8(), True, False, 16, "swizzled", False, None),
    ("MXFP8 row, 128 groups", bs.MXFP8(), True, False, 128, "swizzled", False, None),
    ("MXFP8 column", bs.MXFP8(), False, True, 0, "swizzled", False, None),
    ("MXFP8 both", bs.MXFP8(), True, True, 0, "swizzled", False, 95),
    ("MXFP8 both, compact", bs.MXFP8(), True, True, 0, "compact", False, None),
    ("MXFP8 both, 16 groups", bs.MXFP8(), True, True, 16, "swizzled", False, 93),
    ("MXFP8 both, 128 groups", bs.MXFP8(), True, True, 128, "swizzled", False, 93),
    ("MXFP8 32x32 both", bs.MXFP8(block=(32, 32)), True, True, 0, "swizzled", False, None),
    ("NVFP4 row", bs.NVFP4(), True, False, 0, "swizzled", True, None),
    ("NVFP4 both", bs.NVFP4(), True, True, 0, "swizzled", True, 88),
    ("NVFP4 both, Hadamard, stochastic, 16 groups", bs.NVFP4(hadamard=True, stochastic=True), True, True, 16, "swizzled", True, 65),
    ("FP8 1x128 row", bs.FP8Block(), True, False, 0, "compact", False, None),
    ("FP8 1x128 both", bs.FP8Block(), True, True, 0, "compact", False, 93),
    ("FP8 1x128 both, 16 groups", bs.FP8Block(), True, True, 16, "compact", False, 93),
    ("FP8 128x128 both", bs.FP8Block(block=(128, 128)), True, True, 0, "compact", False, None),
    ("FP8 per tensor both", bs.FP8Tensor(), True, True, 0, "compact", True, None),
    ("FP8 per tensor both, 16 groups", bs.FP8Tensor(), True, True, 16, "compact", True, None),
    ("MXFP4 both", bs.MXFP4(), True, True, 0, "swizzled", False, None),
]
#: activation joined with MXFP8, both planes, swizzled: name, groups, of the gradient, share demanded
JOINED: list[tuple[str, int, bool, float]] = [
    ("swiglu, probabilities, MXFP8 both, 16 groups", 16, False, 93),
    ("swiglu, probabilities, MXFP8 both, 128 groups", 128, False, 93),
    ("swiglu gradient, MXFP8 both, ds, 16 groups", 16, True, 88),
    ("swiglu gradient, MXFP8 both, ds, dbias, 16 groups", 16, True, 88),
]


def median(call: Callable[[], Any]) -> float:
    """Milliseconds."""
    return float(do_bench(call, warmup=15, rep=60, return_mode="median"))


def offsets_of(groups: int, rows: int) -> Tensor:
    """int64 (groups + 1,), skewed."""
    weight = torch.rand(groups).pow(3)
    sizes = (weight / weight.sum() * rows).long()
    sizes[-1] += rows - sizes.sum()
    return bs.offsets_from_sizes(sizes.cuda())


def share(x: Tensor, bandwidth: float, case: tuple[Any, ...]) -> float:
    """Percent of the copy bandwidth that a case reaches."""
    _, fmt, rowwise, columnwise, groups, layout, given, _ = case
    offsets = offsets_of(groups, x.shape[0]) if groups else None
    out = empty_planes(x, fmt, groups or None, rowwise, columnwise, layout)
    amax = torch.full((max(groups, 1),), 6.0, device="cuda") if given else None
    rng = torch.tensor([1, 2], device="cuda")
    time = median(lambda: backend.quantize(x, offsets, fmt, rowwise, columnwise, layout, amax, rng, out))
    return 100 * (x.nbytes + sum(t.nbytes for t in out)) / time / bandwidth


def joined_share(h: Tensor, bandwidth: float, case: tuple[str, int, bool, float]) -> float:
    """As :func:`share`, of an activation of the pre-activation ``h``, or of its gradient, in one pass with MXFP8."""
    name, groups, gradient, _ = case
    act, fmt, offsets = parse("swiglu"), bs.MXFP8(), offsets_of(groups, h.shape[0])
    probs = torch.rand(h.shape[0], device="cuda")
    args = (offsets, act, fmt, probs, None, True, True, "swizzled")
    half = h[:, : h.shape[1] // 2]
    moved = h.nbytes + probs.nbytes
    if not gradient:
        out = empty_planes(half, fmt, groups, True, True, "swizzled")
        time = median(lambda: activation.quantize(h, *args, out))
    else:
        dy, bias = torch.randn_like(half), "dbias" in name
        out = empty_planes(h, fmt, groups, True, True, "swizzled")
        time = median(lambda: activation.backward_quantize(dy, h, *args, bias, out))
        moved += dy.nbytes + probs.nbytes + 4 * groups * h.shape[1] * bias
    return 100 * (moved + sum(t.nbytes for t in out)) / time / bandwidth


def peers() -> dict[str, Callable[[Tensor], Any]]:
    """What else quantizes to MXFP8 here."""
    found: dict[str, Callable[[Tensor], Any]] = {}

    def plain(x: Tensor) -> tuple[Tensor, Tensor]:  # the meaning for finite, normal numbers, without layout
        blocks = x.float().view(x.shape[0], -1, 32)
        bits = (blocks.abs().amax(-1) * (1 / 448)).view(torch.int32)
        code = (bits + 0x7FFFFF) >> 23
        scaled = blocks * ((254 - code) << 23).view(torch.float32)[..., None]
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(x.shape), code.to(torch.uint8)

    found["torch.compile of the row formula"] = torch.compile(plain, dynamic=False)
    try:
        from torchao.prototype.mx_formats import kernels as torchao

        found["torchao Triton row"] = lambda x: torchao.triton_to_mxfp8_dim0(x, 32)
        found["torchao Triton column"] = lambda x: torchao.triton_to_mxfp8_dim1(x, 32)
    except ImportError:
        pass
    return found


def peer_share(x: Tensor, bandwidth: float, call: Callable[[Tensor], Any]) -> float | None:
    """As :func:`share`; None where the peer does not run here."""
    try:
        out = call(x)
        return 100 * (x.nbytes + sum(t.nbytes for t in out)) / median(lambda: call(x)) / bandwidth
    except Exception as error:
        print("peer does not run:", repr(error)[:300])
        return None


def small() -> dict[str, float]:
    """Microseconds on the GPU's clock inside a CUDA graph: 64 rows in 8 groups, beside an empty Triton kernel."""
    import triton

    @triton.jit
    def nothing():
        pass

    x, offsets = torch.randn(64, 2048, device="cuda").bfloat16(), offsets_of(8, 64)

    def captured(call: Callable[[], Any], n: int = 200) -> float:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(n):
                call()
        return 1000 * median(graph.replay) / n

    found = {"empty kernel": captured(lambda: nothing[(1,)]())}
    for name, fmt in (("MXFP8", bs.MXFP8()), ("NVFP4", bs.NVFP4())):
        out = empty_planes(x, fmt, 8, True, True, "swizzled")
        found[name] = captured(lambda f=fmt, o=out: backend.quantize(x, offsets, f, True, True, "swizzled", None, None, o))
    return found


def main() -> None:
    """Measure and write ``results/gpu_quantize``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", help="of the code, where git is not at hand")
    commit = parser.parse_args().commit
    torch.manual_seed(0)
    shares: dict[str, list[float | None]] = {case[0]: [] for case in (*CASES, *JOINED)} | {name: [] for name in peers()}
    copies = []
    for rows, columns in SHAPES:
        x = torch.randn(rows, columns, device="cuda").bfloat16()
        copies.append(2 * x.nbytes / median(partial(torch.empty_like(x).copy_, x)))
        for case in CASES:
            shares[case[0]].append(share(x, copies[-1], case))
        for joined in JOINED:
            shares[joined[0]].append(joined_share(x, copies[-1], joined))
        for name, call in peers().items():
            shares[name].append(peer_share(x, copies[-1], call))
    demanded = {case[0]: case[-1] for case in (*CASES, *JOINED)}
    rows_of = [["kernel", *(f"{m}x{k}" for m, k in SHAPES), "median", "demanded"]]
    for name, values in shares.items():
        known = [v for v in values if v is not None]
        cells = ["-" if v is None else f"{v:.1f} %" for v in values]
        bound = demanded.get(name)
        middle = f"{statistics.median(known):.1f} %" if known else "does not run"
        rows_of.append([name, *cells, middle, "" if bound is None else f"{bound:g} %"])
    latency = small()
    about = environment(("triton", "torchao")) | {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    if commit:
        about["commit"] = commit
    notes = ["copy: " + ", ".join(f"{c / 1e9:.3f} TB/s" for c in copies)]
    notes.append("64 rows in 8 groups, in a CUDA graph: " + ", ".join(f"{k} {v:.1f} us" for k, v in latency.items()))
    title = "Quantization on the GPU, share of the copy bandwidth (bfloat16 in)"
    write("gpu_quantize", title, {"shares": shares, "copy": copies, "small_us": latency}, rows_of, notes, about)


if __name__ == "__main__":
    main()
