"""Grouped buffers against the address table: every byte of every buffer, for many groupings."""

import numpy as np
import pytest
import torch
from oracle import cases, codes, formats, grouped, inputs
from oracle.check import assert_same
from oracle.formats import PLANES, Format
from test_quantize import make

import blockscale as bs

F32 = np.float32
SIZES = {
    "none": [],
    "one-empty": [0],
    "all-empty": [0, 0, 0, 0],
    "one": [129],
    "one-of-four": [128, 0, 0, 0],
    "deepgemm": [128, 130, 65],
    "reported": [44, 1, 127, 129, 33],
    "ones": [1] * 9,
    "ends-empty": [0, 17, 0, 0, 31, 16, 0],
    "tiles": [128, 256, 128],
}


def check(fmt, offsets, capacity, K, seed, layout="compact", kind="wide", dtype="float32", dead=float("nan"), amax=None):
    """Quantize rows 0..offsets[-1] of a buffer of `capacity` rows whose other rows hold `dead`; compare all buffers."""
    x, exact = inputs.tensor(kind, capacity, K, seed, dtype)
    live = int(offsets[-1])
    x[live:] = dead
    rng = (seed - 3, seed) if fmt.option("stochastic", False) else None
    extra = {} if rng is None else {"rng": torch.tensor(rng, dtype=torch.int64)}
    if amax is not None:
        extra["amax"] = torch.from_numpy(amax)
    got = bs.quantize_grouped(x, torch.from_numpy(offsets), make(fmt), rowwise=True, columnwise=True, layout=layout, **extra)
    want = grouped.quantize(exact, offsets, fmt, layout, amax, rng)
    assert tuple(got.shape) == (capacity, K)
    assert got.num_groups == len(offsets) - 1
    assert got.capacity == capacity
    assert got.offsets.tolist() == offsets.tolist()
    for which in PLANES:
        plane, note = getattr(got, which), f"{fmt} {np.diff(offsets).tolist()} capacity {capacity} K {K} {which}"
        assert_same(plane.scale, want[which].scale, f"{note} scale")
        assert_same(plane.data, want[which].data, f"{note} data")
        assert (plane.amax is None) == (want[which].amax is None)
        if plane.amax is not None:
            assert_same(plane.amax, want[which].amax, f"{note} amax")
        if not (fmt.option("hadamard", False) and which == "columnwise"):
            values = grouped.dequantize(exact, offsets, fmt, which, amax, rng)
            assert_same(got.dequantize(torch.float32, which), values, f"{note} values")
    return got, exact, rng


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("fmt", cases.FEW, ids=str)
def test_named_groupings(fmt, sizes):
    offsets = np.concatenate([[0], np.cumsum(SIZES[sizes])]).astype(np.int64)
    check(fmt, offsets, int(offsets[-1]), 72, 1)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("fmt", cases.FEW, ids=str)
def test_named_groupings_in_a_larger_buffer(fmt, sizes):
    offsets = np.concatenate([[0], np.cumsum(SIZES[sizes])]).astype(np.int64)
    check(fmt, offsets, int(offsets[-1]) + 100, 40, 2, layout="swizzled" if fmt.has_codes else "compact")


@pytest.mark.parametrize("fmt", cases.FEW, ids=str)
def test_random_groupings(fmt):
    for seed, groups in enumerate((2, 3, 5, 36, 60, 130)):
        rng = np.random.default_rng((seed, 1))
        live, K = int(rng.integers(1, 500)), int(rng.choice([16, 33, 96, 130, 200]))
        capacity = live + int(rng.integers(0, 300))
        layout = "swizzled" if seed % 2 and fmt.has_codes else "compact"
        dtype = ("bfloat16", "float32", "float16")[seed % 3]
        check(fmt, inputs.offsets(groups, live, seed), capacity, K, seed, layout, "special", dtype)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["compact", "swizzled"])
@pytest.mark.parametrize("fmt", cases.EVERY, ids=str)
def test_random_groupings_of_every_option(fmt, layout):
    if layout == "swizzled" and not fmt.has_codes:
        layout = "compact"
    for seed in range(12):
        rng = np.random.default_rng((seed, 2))
        groups, live = int(rng.integers(1, 20)), int(rng.integers(0, 700))
        offsets = inputs.offsets(groups, live, seed)
        check(fmt, offsets, live + int(rng.integers(0, 200)), int(rng.integers(1, 300)), seed, layout, "special")


@pytest.mark.parametrize("dead", [float("nan"), float("inf"), 3.0, 0.0])
@pytest.mark.parametrize("fmt", [cases.FEW[0], cases.FEW[2], cases.FEW[5], cases.FEW[7], cases.FEW[9]], ids=str)
def test_dead_rows_hold_anything(fmt, dead):
    check(fmt, np.array([0, 40, 173]), 300, 64, 4, dead=dead)


@pytest.mark.parametrize("fmt", cases.FEW, ids=str)
def test_group_is_the_plain_tensor_of_its_rows(fmt):
    offsets = np.array([0, 33, 33, 162, 180], dtype=np.int64)
    for layout in ("compact", "swizzled") if fmt.has_codes else ("compact",):
        got, exact, rng = check(fmt, offsets, 200, 48, 6, layout)
        for g in range(4):
            one, rows = got.group(g), exact[offsets[g] : offsets[g + 1]]
            assert tuple(one.shape) == rows.shape
            extra = {} if rng is None else {"rng": rng, "group": g}
            for which, want in formats.quantize(rows, fmt, **extra).items():
                plane = getattr(one, which)
                assert plane.layout in ("compact", "linear")
                note = f"{layout} group {g} {which}"
                assert_same(plane.scale, formats.scale_buffer(want, fmt, which, plane.layout), f"{note} scale")
                assert_same(plane.data, want.data, f"{note} data")
                if want.amax is not None:
                    assert_same(plane.amax, want.amax, f"{note} amax")
                if not (fmt.option("hadamard", False) and which == "columnwise"):
                    values = formats.dequantize(want, fmt, which, rows.shape)
                    assert_same(one.dequantize(plane=which), values, f"{note} values")


@pytest.mark.parametrize("fmt", [f for f in cases.FEW if f.option("stochastic", False) is False], ids=str)
def test_group_equals_quantize(fmt):
    """The package against itself: law 6, grouped equals the per-group results."""
    x, _ = inputs.tensor("wide", 150, 80, 7, "bfloat16")
    offsets = torch.tensor([0, 70, 150])
    got = bs.quantize_grouped(x, offsets, make(fmt), columnwise=True)
    for g, rows in enumerate((slice(0, 70), slice(70, 150))):
        alone = bs.quantize(x[rows], make(fmt), columnwise=True, layout=got.group(g).rowwise.layout)
        for which in PLANES:
            one, other = getattr(got.group(g), which), getattr(alone, which)
            assert torch.equal(one.data, other.data), (g, which)
            assert torch.equal(one.scale, other.scale), (g, which)


@pytest.mark.parametrize("fmt", [Format("NVFP4"), Format("NVFP4", {"hadamard": True}), Format("FP8Tensor")], ids=str)
@pytest.mark.parametrize("shape", ["G", "2G"])
def test_given_amax(fmt, shape):
    amax = np.array([[1.0, 0.0, 3e38], [2688.0, 1e-40, np.inf]], dtype=F32)
    check(fmt, np.array([0, 20, 50, 67]), 80, 48, 3, amax=amax if shape == "2G" else amax[0].copy())


@pytest.mark.parametrize("which", PLANES)
def test_given_amax_of_rows(which):
    x, exact = inputs.tensor("wide", 80, 48, 3)
    offsets = np.array([0, 20, 20, 67])
    shape = (80,) if which == "rowwise" else (3, 48)
    amax = np.random.default_rng(1).choice(np.array([0, 1, 1e-40, 3e38, 2688], dtype=F32), shape)
    fmt = Format("NVFP4", {"row_scaled": True})
    options = {"rowwise": which == "rowwise", "columnwise": which == "columnwise"}
    got = bs.quantize_grouped(x, torch.from_numpy(offsets), make(fmt), **options, amax=torch.from_numpy(amax)).planes[which]
    for g in range(3):
        rows = slice(offsets[g], offsets[g + 1])
        own = amax[rows] if which == "rowwise" else amax[g]
        want = formats.quantize(exact[rows], fmt, amax=tuple(own if name == which else None for name in PLANES))[which]
        if which == "rowwise":
            assert_same(got.data[rows], want.data)
            assert_same(got.amax[rows], want.amax)
        else:
            assert_same(got.amax[g], want.amax)
    assert got.data.any()
    if which == "rowwise":
        assert not got.amax[67:].any()


def test_empty_groups_have_amax_zero_and_scale_one():
    x = torch.ones(4, 16)
    offsets = torch.tensor([0, 0, 4, 4])
    assert bs.quantize_grouped(x, offsets, bs.NVFP4(), columnwise=True).columnwise.amax.tolist() == [0, 1, 0]
    tensor = bs.quantize_grouped(x, offsets, bs.FP8Tensor())
    assert tensor.rowwise.amax.tolist() == [0, 1, 0]
    assert tensor.rowwise.scale.tolist() == [1, float(F32(1) / F32(448)), 1]


def test_no_block_spans_two_groups():
    """Two groups of 16 rows in one 32-row span: each has a block, and so a scale, of its own."""
    x = torch.cat([torch.full((16, 128), 448.0), torch.full((16, 128), 2.0**-20)])
    column = bs.quantize_grouped(x, torch.tensor([0, 16, 32]), bs.MXFP8(), rowwise=False, columnwise=True).columnwise
    assert column.scale.shape == (8, 128)
    assert column.scale[0].unique().tolist() == [127]
    assert column.scale[4].unique().tolist() == codes.e8m0_ceil(np.array([2.0**-20 / 448], dtype=F32)).tolist()
    assert not column.scale[[1, 2, 3, 5, 6, 7]].any()


def test_offsets_from_sizes():
    got = bs.offsets_from_sizes(torch.tensor([3, 0, 5], dtype=torch.int32))
    assert got.dtype == torch.int64
    assert got.tolist() == [0, 3, 3, 8]
    assert bs.offsets_from_sizes(torch.zeros(0, dtype=torch.int64)).tolist() == [0]
