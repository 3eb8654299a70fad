"""What watch counts: the compiled pass equals the reference, and both equal counting one element at a time."""

from __future__ import annotations

import math

import pytest
import torch
from support import E2M1, E4M3, E5M2, RECIPES

import blockscale as bs
from blockscale.ops import backend, stages
from blockscale.tensors.counters import FIELDS, INDEX, fresh

FORMATS = {
    **{f"{name}.{role}": getattr(r, role) for name, r in RECIPES.items() for role in ("input", "weight", "gradient")},
    "mxfp4": bs.MXFP4(),
    "mxfp4_square": bs.MXFP4(block=(32, 32)),
    "mxfp8_floor": bs.MXFP8(scale_rounding="floor"),
    "mxfp8_floor_e5m2": bs.MXFP8("e5m2", scale_rounding="floor"),
    "nvfp4_rows": bs.NVFP4(row_scaled=True),
    "nvfp4_four_six": bs.NVFP4(four_over_six="mae"),
    "ignore": bs.MXFP8(nan="ignore"),
}
OFFSETS = torch.tensor([0, 5, 5, 140, 300])
#: the values of each element type, and the next one if it had more
EXTREMES = {"e4m3": (E4M3, 480.0), "e5m2": (E5M2, 65536.0), "e2m1": (E2M1, 8.0)}


def wild(dtype: torch.dtype, columns: int) -> torch.Tensor:
    """320 rows, the last 20 dead and poisoned; wide exponents, blocks of zeros, NaNs, infinities."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(320, columns, generator=g) * torch.exp2(torch.randint(-14, 15, (320, columns), generator=g).float())
    x[20:30] = 0
    x[torch.rand(x.shape, generator=g) < 0.05] = 0
    x[7, 3] = x[100, 1] = math.nan
    x[150, 2] = -math.inf
    x[200] *= 1e-30 if dtype != torch.float16 else 1e-3
    x[300:] = math.nan
    return x.to(dtype)


def quantized(x, fmt):
    rng = torch.tensor([1, 0]) if getattr(fmt, "stochastic", False) else None
    return stages.quantize(x, OFFSETS, fmt, rowwise=True, columnwise=False, rng=rng)


def counted(x, q, call=4):
    out = fresh(OFFSETS.numel() - 1, x.device)
    backend.count_into(out, x, OFFSETS, q, call)
    backend.count_into(out, x, OFFSETS, q, call + 1)
    return out


@pytest.mark.parametrize("columns", [40, 129, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_compiled_equals_reference(fmt, dtype, columns):
    x = wild(dtype, columns)
    q = None if fmt is None else quantized(x, fmt)
    assert backend.fast("count", x.device)
    fast = counted(x, q)
    with backend.only_reference():
        slow = counted(x, q)
    for name, i in INDEX.items():
        assert torch.equal(fast[:, i], slow[:, i]), (name, fast[:, i], slow[:, i])
    assert fast[:, INDEX["nans"]].tolist() == [0, 0, 4, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [4, 40, 129])
@pytest.mark.parametrize("offsets", [OFFSETS, None], ids=["groups", "whole"])
def test_finite_tensors_are_counted_and_others_left(offsets, columns, dtype):
    live = 300 if offsets is not None else 320
    x = torch.where(wild(dtype, columns).isfinite(), wild(dtype, columns), 2.5)
    x[live:] = math.nan  # dead rows
    strided = x.repeat(1, 2)[:, :columns]
    groups, extent = (4, OFFSETS) if offsets is not None else (1, torch.tensor([0, 320]))
    want = fresh(groups, x.device)
    backend.count_into(want, x, extent, None, 1)
    assert want[:, INDEX["amax"]].max() == x[:live].abs().max().double() > 0
    for tensor in (x, strided):
        for bad in (None, math.nan, -math.inf):
            made, slow = fresh(groups, x.device), fresh(groups, x.device)
            looked = tensor.clone()
            if bad is not None:
                looked[live - 1, columns - 1] = bad
            finite = backend.count_finite(made, looked, offsets)
            with backend.only_reference():
                assert backend.count_finite(slow, looked, offsets) is finite is (bad is None)
            assert torch.equal(made, slow)
            assert torch.equal(made, want if finite else fresh(groups, x.device))


def test_finite_over_threads():
    x = torch.randn(4096, 1100)
    x[4000, 7] = 100.0
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        out = fresh(1, x.device)
        assert backend.count_finite(out, x, None)
        assert out[0, INDEX["amax"]] == 100
        assert out[0, INDEX["elements"]] == x.numel()
        x[2048, 3] = math.nan
        assert not backend.count_finite(out, x, None)
        assert out[0, INDEX["elements"]] == x.numel()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["mxfp8.input", "mxfp8_floor", "mxfp8_floor_e5m2", "nvfp4.weight", "fp8_block.weight", "mxfp4"])
def test_each_element_by_its_definition(name):
    """Saturated and underflowed elements found from the value that they decode to."""
    fmt = FORMATS[name]
    x = wild(torch.float32, 40)
    x[7, 3] = x[100, 1] = 1.0
    x[150, 2] = 2.0
    q = quantized(x, fmt)
    table, beyond = EXTREMES[fmt.element_name]
    finite = table[table.isfinite()]
    largest = float(finite.max())
    got = counted(x, q)[:, [INDEX[n] for n in ("saturated", "underflow", "elements")]] / 2
    back = q.dequantize(torch.float64)
    codes = q.rowwise.data[:, :40].long()
    if fmt.packed:
        codes = torch.stack((q.rowwise.data & 15, q.rowwise.data >> 4), 2).flatten(1)[:, :40].long()
    for g in range(4):
        a, b = OFFSETS[g : g + 2].tolist()
        lost = (x[a:b] != 0) & (back[a:b] == 0)
        ratio = x[a:b].double().abs() / back[a:b].abs()
        over = (table[codes[a:b]].abs() == largest) & (back[a:b] != 0) & (ratio >= (largest + beyond) / 2 / largest * (1 - 1e-7))
        assert got[g].tolist() == [int(over.sum()), int(lost.sum()), (b - a) * 40], g
    assert got[:, 1].sum() > 0
    if "floor" in name:
        assert got[:, 0].sum() > 0


def test_numbers_of_a_tensor_made_by_hand():
    x = torch.zeros(300, 64)
    x[0, :32] = torch.tensor([448.0, 448 * 2.0**-19, 448 * 2.0**-18, *[0.0] * 29])  # scale 1: 2^-10 is the last that is lost
    x[0, 1], x[0, 2] = 2.0**-10, 1.5 * 2.0**-10
    x[0, 32:] = 3 * 2.0**-20
    x[6, 0] = math.nan
    x[7, 40] = math.inf
    row = counted(x, quantized(x, bs.MXFP8()), call=9)
    named = [dict(zip(FIELDS, r, strict=True)) for r in row.tolist()]
    assert named[0] | {"nans": 0} == {
        "nans": 0, "infs": 0, "saturated": 0, "underflow": 2, "elements": 640, "blocks": 20, "nan_blocks": 0, "inf_blocks": 0,
        "saturated_blocks": 0, "underflow_blocks": 0, "calls": 2, "amax": 448.0, "scale_max": 1.0, "scale_min": -(2.0**-27),
        "first_nan": -math.inf, "first_inf": -math.inf,
    }  # fmt: skip
    assert named[1]["calls"] == 2
    assert named[1]["elements"] == 0
    assert (named[2]["nans"], named[2]["nan_blocks"], named[2]["infs"], named[2]["inf_blocks"]) == (2, 2, 2, 2)
    assert (named[2]["first_nan"], named[2]["first_inf"], named[2]["scale_max"]) == (-9, -9, -math.inf)
