"""Planes in formats of their own, and the columnwise plane from the values of the row plane: each plane is what its format
makes of the right source. (The oracle holds columnwise_source of single formats, see cases.FROM_ROW.)"""

import itertools

import pytest
import torch
from oracle import formats as oracle
from oracle import inputs
from oracle.check import assert_same
from support import calc_diff, normal, offsets_of

import blockscale as bs

ROWS = (bs.MXFP8(), bs.NVFP4(), bs.NVFP4(row_scaled=True, stochastic=True), bs.FP8Tensor(), bs.FP8Block())
COLUMNS = (
    bs.MXFP8("e5m2"),
    bs.MXFP4(),
    bs.NVFP4(hadamard=True),
    bs.NVFP4(row_scaled=True),
    bs.FP8Tensor(),
    bs.MXFP8(block=(32, 32)),
)
RNG = torch.tensor([4, 9])
SIZES = [37, 0, 128, 1]


def same_plane(got, want, what):
    for part in ("data", "scale", "amax"):
        one, other = getattr(got, part), getattr(want, part)
        assert (one is None) == (other is None)
        if other is not None:
            assert_same(one, other.numpy(), f"{what} {part}")


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize(("row", "column"), list(itertools.product(ROWS, COLUMNS)), ids=lambda f: f.label)
def test_each_plane_is_its_formats(row, column, source):
    x, offsets = normal(190, 70, seed=1, spread=3.0), offsets_of(SIZES)
    x[3, 5] = torch.nan
    fmt = bs.Hybrid(row, column, source)
    assert bs.formats.parse(fmt.spec()) == fmt

    def plain(t, f, **planes):
        return bs.quantize(t, f, rng=RNG, **planes)

    def grouped(t, f, **planes):
        return bs.quantize_grouped(t, offsets, f, rng=RNG, **planes)

    for make in (plain, grouped):
        first = make(x, row)
        seen = x if source == "original" else first.dequantize()
        want = make(seen, column, rowwise=False, columnwise=True)
        both, alone = make(x, fmt, columnwise=True), make(x, fmt, rowwise=False, columnwise=True)
        same_plane(both.rowwise, first.rowwise, "rowwise")
        same_plane(both.columnwise, want.columnwise, "columnwise")
        same_plane(alone.columnwise, want.columnwise, "columnwise alone")
        assert_same(both.dequantize(plane="columnwise"), want.dequantize(plane="columnwise").numpy())
    group = both.group(2)
    same_plane(group.rowwise, first.group(2).rowwise, "group")
    same_plane(group.columnwise, want.group(2).columnwise, "group")


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("kind", inputs.KINDS)
def test_planes_against_the_oracle(kind, source):
    """Each pair of kinds in turn, from what the numpy oracle makes of the tensor and of its own row plane's values."""
    names = ("MXFP8", "MXFP4", "NVFP4", "FP8Tensor", "FP8Block")
    for seed, (one, other) in enumerate(itertools.product(names, names)):
        row, column = oracle.Format(one), oracle.Format(other)
        x, exact = inputs.tensor(kind, 40, 70, seed, ("float32", "bfloat16", "float16")[seed % 3])
        want_row = oracle.quantize(exact, row)["rowwise"]
        seen = exact if source == "original" else oracle.dequantize(want_row, row, "rowwise", exact.shape)
        want_column = oracle.quantize(seen, column)["columnwise"]
        got = bs.quantize(x, bs.Hybrid(getattr(bs, one)(), getattr(bs, other)(), source), columnwise=True)
        for which, fmt, want in (("rowwise", row, want_row), ("columnwise", column, want_column)):
            plane, note = got.planes[which], f"{one} {other} {which}"
            assert_same(plane.data, want.data, f"{note} data")
            assert_same(plane.scale, oracle.scale_buffer(want, fmt, which, "compact"), f"{note} scale")
            assert (plane.amax is None) == (want.amax is None)
            if want.amax is not None:
                assert_same(plane.amax, want.amax, f"{note} amax")


def test_planes_are_closer_when_one_is_made_from_the_other():
    """The distance of the two planes' values falls, at the price of a column plane farther from the tensor."""
    x = normal(256, 256, seed=2)
    apart, far = {}, {}
    for source in ("original", "rowwise_dequantized"):
        q = bs.quantize(x, bs.NVFP4(columnwise_source=source), columnwise=True)
        row, column = (q.dequantize(plane=which) for which in ("rowwise", "columnwise"))
        apart[source], far[source] = calc_diff(column, row), calc_diff(column, x)
        print(f"{source}: planes {apart[source]:.4f} apart, column plane {far[source]:.4f} from x")
    assert 0.1 < apart["rowwise_dequantized"] / apart["original"] < 0.8
    assert 1.2 < far["rowwise_dequantized"] / far["original"] < 2
