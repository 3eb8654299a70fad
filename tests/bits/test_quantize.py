"""quantize and dequantize of plain tensors against the oracle: data, scales, amax and values, by bits."""

import numpy as np
import pytest
import torch
from oracle import cases, codes, formats, inputs
from oracle.blocks import Plane, ceil_div
from oracle.check import assert_same
from oracle.formats import PLANES, Format

import blockscale as bs

F32 = np.float32


def make(fmt: Format):
    """The package's format of an oracle format."""
    return getattr(bs, fmt.name)(**fmt.options)


def compare(x: torch.Tensor, exact: np.ndarray, fmt: Format, layout="compact", rng=None, amax=None, what="") -> None:
    """Quantize both planes and compare everything."""
    extra, given = {}, {}
    if rng is not None:
        extra["rng"], given["rng"] = rng, torch.tensor(rng, dtype=torch.int64)
    if amax is not None:
        extra["amax"] = tuple(F32(v) for v in amax)
        given["amax"] = torch.tensor(amax, dtype=torch.float32).reshape(2, 1)
    expected = formats.quantize(exact, fmt, **extra)
    got = bs.quantize(x, make(fmt), rowwise=True, columnwise=True, layout=layout, **given)
    assert tuple(got.shape) == tuple(x.shape)
    for which in PLANES:
        plane, want = getattr(got, which), expected[which]
        note = f"{what} {which}"
        assert plane.layout == layout
        assert_same(plane.scale, formats.scale_buffer(want, fmt, which, layout), f"{note} scale")
        assert_same(plane.data, want.data, f"{note} data")
        assert (plane.amax is None) == (want.amax is None)
        if want.amax is not None:
            assert_same(plane.amax, want.amax, f"{note} amax")
        if fmt.option("hadamard", False) and which == "columnwise":
            continue
        values = formats.dequantize(want, fmt, which, exact.shape)
        assert_same(got.dequantize(plane=which), values, f"{note} values")
        for dtype in (torch.bfloat16, torch.float16):
            back = got.dequantize(dtype, which)
            assert back.dtype == dtype
            assert_same(back, codes.round_to(values, str(dtype).removeprefix("torch.")), f"{note} values {dtype}")


@pytest.mark.parametrize("case", cases.draw(cases.EVERY, 18), ids=str)
def test_every_option(case):
    x, exact = case.tensor()
    compare(x, exact, case.fmt, rng=case.rng, what=case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.draw(cases.EVERY, 60, seed=77), ids=str)
def test_every_option_at_length(case):
    x, exact = case.tensor()
    compare(x, exact, case.fmt, rng=case.rng, what=case)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", cases.FEW, ids=str)
def test_every_pair_of_shapes(fmt):
    for seed, (rows, columns) in enumerate((m, k) for m in inputs.ROWS for k in inputs.ROWS):
        x, exact = inputs.tensor("special", rows, columns, seed, "bfloat16")
        compare(x, exact, fmt, rng=(seed, seed) if fmt.option("stochastic", False) else None, what=(rows, columns))


@pytest.mark.parametrize("fmt", cases.FEW, ids=str)
def test_no_rows(fmt):
    x, exact = inputs.tensor("normal", 0, 40, 0)
    compare(x, exact, fmt, rng=(1, 2) if fmt.option("stochastic", False) else None)


@pytest.mark.parametrize("fmt", cases.FEW, ids=str)
def test_one_plane_is_the_same_as_of_both(fmt):
    x, exact = inputs.tensor("wide", 70, 90, 5)
    rng = (11, 3) if fmt.option("stochastic", False) else None
    expected = formats.quantize(exact, fmt, **({"rng": rng} if rng else {}))
    given = {"rng": torch.tensor(rng, dtype=torch.int64)} if rng else {}
    for which, absent in (PLANES, PLANES[::-1]):
        got = bs.quantize(x, make(fmt), rowwise=which == "rowwise", columnwise=which == "columnwise", **given)
        assert getattr(got, absent) is None
        assert_same(getattr(got, which).data, expected[which].data, which)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_every_16_bit_input_through_the_tensor_scale(element, dtype):
    """With amax = the largest element the scale is 1, so the element cast itself is seen."""
    pattern = torch.arange(65536, dtype=torch.int32).to(torch.int16).reshape(256, 256)
    x = pattern.view(inputs.DTYPES[dtype])
    amax = (float(codes.largest(element)),) * 2
    compare(x, x.float().numpy(), Format("FP8Tensor", {"element": element}), amax=amax)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fmt", [*cases.MXFP8[::2], *cases.MXFP4[::2], cases.NVFP4[0], *cases.FP8_BLOCK[::5]], ids=str)
def test_every_16_bit_input_in_blocks(fmt, dtype):
    """Rows of neighbouring bit patterns: every block has a maximum of its own exponent."""
    pattern = torch.arange(65536, dtype=torch.int32).to(torch.int16).reshape(512, 128)
    x = pattern.view(inputs.DTYPES[dtype])
    compare(x, x.float().numpy(), fmt)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_random_float32_patterns_through_the_tensor_scale(element):
    x = torch.from_numpy(codes.floats(np.random.default_rng(8).integers(0, 2**32, (500, 400), dtype=np.uint32)))
    amax = (float(codes.largest(element)), 1.7)
    compare(x, x.numpy(), Format("FP8Tensor", {"element": element}), amax=amax)


@pytest.mark.parametrize("fmt", [*cases.FP8_TENSOR, *cases.NVFP4, *cases.NVFP4_FOUR[:8], *cases.FROM_ROW[3:8:4]], ids=str)
@pytest.mark.parametrize("amax", [(0.0, 3.0), (1e-44, 1e-37), (3e38, float("inf")), (2688.0, 0.1)], ids=str)
def test_given_amax(fmt, amax):
    x, exact = inputs.tensor("wide", 50, 49, 9)
    compare(x, exact, fmt, rng=(5, 6) if fmt.option("stochastic", False) else None, amax=amax)


@pytest.mark.parametrize("which", PLANES)
@pytest.mark.parametrize("hadamard", [False, True])
def test_given_amax_of_rows(which, hadamard):
    """A row-scaled format takes the amax of one plane, one entry a row of the stored plane."""
    x, exact = inputs.tensor("wide", 50, 49, 9)
    amax = np.array([0.0, 1e-44, 3e38, np.inf, 2688.0] * 10, dtype=F32)[: 50 if which == "rowwise" else 49]
    fmt = Format("NVFP4", {"row_scaled": True, "hadamard": hadamard})
    got = bs.quantize(
        x, make(fmt), rowwise=which == "rowwise", columnwise=which == "columnwise", layout="linear", amax=torch.from_numpy(amax)
    )
    want = formats.quantize(exact, fmt, amax=tuple(amax if name == which else None for name in PLANES))[which]
    for part in ("data", "scale", "amax"):
        assert_same(getattr(got.planes[which], part), getattr(want, part), part)
    assert want.data.any()


def test_rows_of_one_scale_are_the_tensor_scaled_format():
    """Rows with the same maximum: row-scaled and tensor-scaled planes agree; a small row beside a large one does not."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    x[:, 5] = 3.0
    rows, whole = (bs.quantize(x, bs.NVFP4(row_scaled=flag)).rowwise for flag in (True, False))
    assert torch.equal(rows.data, whole.data)
    assert torch.equal(rows.scale, whole.scale)
    x[7] *= 2.0**-20
    rows, whole = (bs.quantize(x, bs.NVFP4(row_scaled=flag)).dequantize()[7] for flag in (True, False))
    assert (rows - x[7]).norm() < 0.2 * x[7].norm()
    assert not whole.any()


@pytest.mark.parametrize("fmt", [Format("FP8Tensor"), Format("NVFP4")], ids=str)
def test_one_given_amax_serves_both_planes(fmt):
    x, exact = inputs.tensor("normal", 20, 33, 9)
    got = bs.quantize(x, make(fmt), columnwise=True, amax=torch.tensor([5.5]))
    for which, want in formats.quantize(exact, fmt, amax=(5.5, 5.5)).items():
        assert_same(getattr(got, which).data, want.data, which)
        assert_same(getattr(got, which).amax, np.array([5.5], dtype=F32), which)


@pytest.mark.parametrize("fmt", cases.EVERY, ids=str)
def test_zero_blocks_decode_to_zero(fmt):
    """C20: an all-zero tensor, and an all-zero block beside others, under every format."""
    rng = {"rng": torch.tensor([1, 2])} if fmt.option("stochastic", False) else {}
    tiny = () if fmt.option("eps", 0.0) else (1e-38,)
    for beside in (0.0, 3.0, *tiny):
        x = torch.zeros(256, 256)
        x[128:, 128:] = beside
        got = bs.quantize(x, make(fmt), columnwise=True, **rng)
        for which in PLANES:
            if fmt.option("hadamard", False) and which == "columnwise":
                continue
            back = got.dequantize(plane=which)
            assert not back[:128, :128].any()
            assert not back[:128, 128:].any()
            assert not back[128:, :128].any()
            assert bool((back[128:, 128:] != 0).all()) == (beside != 0.0)


@pytest.mark.parametrize("fmt", [f for f in cases.MXFP8 if f.option("nan", "") == "propagate"], ids=str)
def test_scale_codes_at_the_ends_survive(fmt):
    """C19: representable values whose scale is code 0 or 1, and the largest scales that finite values reach."""
    element = fmt.options["element"]
    top = int(np.argmax(codes.decode(np.arange(0x7C), element))) if element == "e5m2" else 0x7E
    rng = np.random.default_rng(12)
    largest = int(np.floor(np.log2(codes.FLT_MAX / codes.largest(element)))) + 127
    for code in (0, 1, 2, largest - 1, largest):
        stored = (rng.integers(0, top + 1, (64, 64)) | (rng.integers(0, 2, (64, 64)) << 7)).astype(np.uint8)
        stored[::32, ::32] = top
        stored[:, ::32] = top
        stored[::32, :] = top
        x = codes.decode(stored, element) * np.ldexp(F32(1), code - 127).astype(F32)
        assert np.isfinite(x).all()
        got = bs.quantize(torch.from_numpy(x), make(fmt), columnwise=True)
        for which in PLANES:
            assert_same(getattr(got, which).data, stored, f"code {code} {which}")
            scale = getattr(got, which).scale
            live = scale[:64, :2] if which == "rowwise" else scale[:2, :64]
            assert (live == code).all(), f"code {code} {which}"
            assert_same(got.dequantize(plane=which), x, f"code {code} {which}")


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("which", PLANES)
def test_every_scale_code_with_every_element_code(element, which):
    """Dequantize: 256 scale codes by 256 element codes, codes 253 and 254 (which no finite input reaches) included."""
    fmt = Format("MXFP8", {"element": element})
    got = bs.quantize(torch.zeros(256, 256), make(fmt), rowwise=which == "rowwise", columnwise=which == "columnwise")
    plane = getattr(got, which)
    data, scale = np.indices((256, 256), dtype=np.uint8)[1], np.arange(256, dtype=np.uint8)
    live = np.repeat(scale[:, None], 8, axis=1)
    if which == "columnwise":
        data, live = data.T, live.T
    plane.data.copy_(torch.from_numpy(data.copy()))
    plane.scale.copy_(torch.from_numpy(live.copy()))
    expected = formats.dequantize(Plane(data, live), fmt, which, (256, 256))
    assert_same(got.dequantize(plane=which), expected)
    assert np.isfinite(expected).sum() > 60_000


@pytest.mark.parametrize("amax", [2688.0, 1.0, 1e-37, 3e38, 0.0, float("inf")])
def test_every_nvfp4_scale_code_with_every_element_code(amax):
    fmt = Format("NVFP4")
    got = bs.quantize(torch.zeros(128, 16), make(fmt), amax=torch.tensor([amax]))
    data = np.tile(codes.pack_e2m1(np.arange(16, dtype=np.uint8)[None]), (128, 1))
    scale = np.arange(128, dtype=np.uint8)[:, None]
    got.rowwise.data.copy_(torch.from_numpy(data))
    got.rowwise.scale[:, :1].copy_(torch.from_numpy(scale))
    plane = Plane(data, scale, np.array([amax], dtype=F32))
    assert_same(got.dequantize(), formats.dequantize(plane, fmt, "rowwise", (128, 16)))


def test_nan_marks_its_block_and_no_other():
    x = torch.ones(64, 64)
    x[5, 40] = float("nan")
    for name, length in (("MXFP8", 32), ("NVFP4", 16), ("MXFP4", 32)):
        for which in PLANES:
            lost = bs.quantize(x, make(Format(name)), columnwise=True).dequantize(plane=which).isnan()
            assert lost.sum() == length
            assert lost[5].sum() == (length if which == "rowwise" else 1)
    lost = bs.quantize(x, bs.FP8Tensor(), columnwise=True).dequantize().isnan()
    assert lost.sum() == 1
    assert lost[5, 40]


def test_scale_buffer_padding_is_zero():
    x = torch.full((33, 40), 5.0)
    row = bs.quantize(x, bs.MXFP8(block=(32, 32))).rowwise.scale
    live = ceil_div(40, 32)
    assert row.shape == (128, 4)
    assert row[:33, :live].all()
    assert not row[33:].any()
    assert not row[:, live:].any()
