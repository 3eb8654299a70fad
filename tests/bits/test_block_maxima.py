"""Scale codes as a function of the block maximum alone: every 16-bit maximum, and float32 ones around each step."""

import numpy as np
import pytest
import torch
from oracle import cases, codes, inputs
from oracle.formats import Format
from test_quantize import compare

F32 = np.float32


def one_block_each(maxima: np.ndarray, length: int) -> np.ndarray:
    """(rows, 8*length): block i holds maxima[i], its half, its negative third, and zeros."""
    maxima = np.concatenate([maxima, np.zeros(-len(maxima) % 8, F32)]).astype(F32)
    x = np.zeros((len(maxima), length), dtype=F32)
    with np.errstate(all="ignore"):
        x[:, 0], x[:, 5], x[:, length - 1] = maxima, maxima * F32(0.5), maxima * F32(-1 / 3)
    return x.reshape(-1, 8 * length)


def steps(limit: float) -> np.ndarray:
    """limit * 2^k and 2^k for every k, each with the three float32 neighbours below and above."""
    with np.errstate(all="ignore"):
        exact = np.concatenate([np.ldexp(limit, np.arange(-165, 128)), np.ldexp(1.0, np.arange(-149, 128))]).astype(F32)
    pattern = codes.bits(exact[np.isfinite(exact) & (exact > 0)]).astype(np.int64)
    pattern = np.clip(pattern[:, None] + np.arange(-3, 4), 0, 0x7F7FFFFF)
    return codes.floats(np.unique(pattern).astype(np.uint32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale_rounding", ["up", "floor"])
def test_mxfp8_every_16_bit_maximum(element, scale_rounding, dtype):
    positive = torch.arange(0x7C00 if dtype == "float16" else 0x7F80, dtype=torch.int16).view(inputs.DTYPES[dtype])
    x = torch.from_numpy(one_block_each(positive.float().numpy(), 32)).to(inputs.DTYPES[dtype])
    compare(x, x.float().numpy(), Format("MXFP8", {"element": element, "scale_rounding": scale_rounding}))


@pytest.mark.parametrize("fmt", [f for f in cases.MXFP8 if f.options["nan"] == "propagate"], ids=str)
def test_mxfp8_maxima_around_every_step(fmt):
    x = one_block_each(steps(float(codes.largest(fmt.options["element"]))), 32)
    compare(torch.from_numpy(x), x, fmt)


@pytest.mark.parametrize("amax", [2688.0, 1.0, 3.3895314e38, 1e-37])
def test_nvfp4_every_16_bit_maximum(amax):
    positive = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    x = torch.from_numpy(one_block_each(positive.float().numpy(), 16)).to(torch.bfloat16)
    compare(x, x.float().numpy(), Format("NVFP4"), amax=(amax, amax))


@pytest.mark.parametrize("amax", [2688.0, 5.7, 1e-30])
def test_nvfp4_block_scales_around_every_midpoint(amax):
    """Block maxima whose scale is an E4M3 code, the middle between two, or a few float32 steps beside."""
    table = codes.decode(np.arange(0x7F), "e4m3").astype(np.float64)
    points = np.concatenate([table, (table[1:] + table[:-1]) / 2]) * 6 * (amax / 2688)
    pattern = codes.bits(points[points > 0].astype(F32)).astype(np.int64)[:, None] + np.arange(-4, 5)
    x = one_block_each(codes.floats(pattern.reshape(-1).astype(np.uint32)), 16)
    compare(torch.from_numpy(x), x, Format("NVFP4"), amax=(amax, amax))


@pytest.mark.parametrize("fmt", [f for f in cases.FP8_BLOCK if f.options["block"] == (1, 128)], ids=str)
def test_fp8_block_maxima(fmt):
    x = one_block_each(steps(float(codes.largest(fmt.options["element"])))[::2], 128)
    compare(torch.from_numpy(x), x, fmt)


@pytest.mark.parametrize("fmt", cases.FP8_TENSOR, ids=str)
def test_fp8_tensor_maxima(fmt):
    for amax in steps(float(codes.largest(fmt.options["element"])))[::37]:
        x = np.array([[amax, -amax / 2, amax / 3, 0.0]], dtype=F32)
        compare(torch.from_numpy(x), x, fmt, what=amax)
