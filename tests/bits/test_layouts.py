"""Scale layouts of plain tensors against the address formulas, and each conversion with its inverse."""

import numpy as np
import pytest
import torch
from oracle import cases, inputs, layouts
from oracle.blocks import roundup
from oracle.check import assert_same
from oracle.formats import PLANES, Format
from test_quantize import compare, make

import blockscale as bs

SHAPES = [(1, 1), (3, 5), (32, 4), (33, 47), (127, 3), (128, 4), (129, 9), (260, 130), (17, 90)]
CODED = [f for f in cases.FEW if f.has_codes]


def live_codes(rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((rows, blocks, seed)).integers(1, 256, (rows, blocks), dtype=np.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("plane", PLANES)
def test_swizzle_and_back(shape, plane):
    columnwise = plane == "columnwise"
    linear = live_codes(*shape).T if columnwise else live_codes(*shape)
    compact = layouts.compact(linear, columnwise)
    flat = bs.layouts.swizzle(torch.from_numpy(compact), plane)
    assert_same(flat, layouts.swizzled(linear, columnwise))
    assert_same(bs.layouts.unswizzle(flat, compact.shape, plane), compact)


@pytest.mark.parametrize("plane", PLANES)
def test_swizzle_moves_every_byte_of_the_buffer(plane):
    """The padding is permuted with the rest: nothing is lost or made, whatever the padding holds."""
    shape = (256, 8) if plane == "rowwise" else (8, 256)
    compact = torch.from_numpy(live_codes(*shape, seed=1))
    flat = bs.layouts.swizzle(compact, plane)
    assert sorted(flat.tolist()) == sorted(compact.flatten().tolist())
    assert_same(bs.layouts.unswizzle(flat, shape, plane), compact.numpy())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_8x4_and_back(shape):
    linear = live_codes(*shape)
    compact = layouts.compact(linear)
    rows8 = roundup(shape[0], 8)
    flat = bs.layouts.swizzle_8x4(torch.from_numpy(compact[:rows8].copy()))
    assert_same(flat, layouts.swizzled_8x4(linear))
    assert_same(bs.layouts.unswizzle_8x4(flat, (rows8, compact.shape[1])), compact[:rows8])


@pytest.mark.parametrize("layout", ["compact", "swizzled", "swizzled_8x4", "linear"])
@pytest.mark.parametrize("fmt", CODED, ids=str)
def test_quantize_into_every_layout(fmt, layout):
    for seed, (rows, columns) in enumerate([(1, 1), (33, 70), (129, 500), (40, 1504), (257, 100), (128, 256)]):
        x, exact = inputs.tensor("wide", rows, columns, seed, "bfloat16")
        rng = (seed, 1) if fmt.option("stochastic", False) else None
        compare(x, exact, fmt, layout=layout, rng=rng, what=(rows, columns))


@pytest.mark.parametrize("layout", ["compact", "linear"])
@pytest.mark.parametrize("fmt", [f for f in cases.FEW if not f.has_codes], ids=str)
def test_float_scales_have_one_arrangement(fmt, layout):
    x, exact = inputs.tensor("wide", 130, 140, 3)
    compare(x, exact, fmt, layout=layout)
    with pytest.raises(ValueError, match="layout"):
        bs.quantize(x, make(fmt), layout="swizzled")


def test_the_mxfp8_column_tile_depends_on_the_rows():
    """[K/128][M/128][32][4][4]: column 128 starts behind all tiles of the first 128 columns."""
    x = torch.zeros(256, 256)
    x[:, 128] = 448.0
    scale = bs.quantize(x, bs.MXFP8(), rowwise=False, columnwise=True, layout="swizzled").columnwise.scale
    assert scale.nonzero().flatten().tolist() == [1024, 1025, 1026, 1027, 1536, 1537, 1538, 1539]
    assert set(scale[1024:1028].tolist()) == {127}


def test_layouts_hold_the_same_codes():
    x, _ = inputs.tensor("wide", 200, 300, 4)
    fmt = Format("NVFP4")
    compact = bs.quantize(x, make(fmt), columnwise=True)
    swizzled = bs.quantize(x, make(fmt), columnwise=True, layout="swizzled")
    for which in PLANES:
        plain = getattr(compact, which).scale
        assert_same(bs.layouts.unswizzle(getattr(swizzled, which).scale, plain.shape, "rowwise"), plain.numpy(), which)
