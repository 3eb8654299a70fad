"""Each role of the grouped GEMM against float64 on the very operands it was handed, group by group.

The operands are decoded by address from their bytes with tables written from the definition of the codes (support.py).
"""

import itertools

import pytest
import torch
from support import GEMM_BOUND, calc_diff, gemm64, normal, offsets_of, operand64, worst_group

import blockscale as bs

M4 = bs.MXFP4
MX, NV, FT, FB = bs.MXFP8, bs.NVFP4, bs.FP8Tensor, bs.FP8Block
HY, FD, FROM = bs.Hybrid, bs.FP8Delayed, "rowwise_dequantized"
#: input, weight, gradient
TRIPLES = {
    "bf16": (None, None, None),
    "mxfp8": (MX(), MX(), MX()),
    "mxfp8_hybrid_square": (MX(), MX(block=(32, 32)), MX("e5m2")),
    "mxfp8_e5m2_floor": (MX("e5m2", scale_rounding="floor"), MX("e5m2", (32, 32), "floor"), MX(scale_rounding="floor")),
    "mxfp4": (M4(), M4(), M4()),
    "mxfp4_square_floor": (M4(scale_rounding="floor"), M4((32, 32)), M4()),
    "nvfp4": (NV(), NV(), NV()),
    "nvfp4_square_stochastic": (NV(), NV((16, 16)), NV(stochastic=True)),
    "nvfp4_hadamard": (NV(hadamard=True), NV((16, 16)), NV(hadamard=True, stochastic=True)),
    "nvfp4_rows": (NV(row_scaled=True), NV(row_scaled=True), NV(row_scaled=True)),
    "nvfp4_rows_by_square": (NV(row_scaled=True, hadamard=True), NV((16, 16)), NV(hadamard=True, row_scaled=True, stochastic=True)),
    "nvfp4_four_over_six": (NV(four_over_six="mse"), NV((16, 16), four_over_six="mae", scale_max=256), NV()),
    "fp8tensor": (FT(), FT(), FT("e5m2")),
    "fp8tensor_pow2": (FT(power_of_two=True), FT("e5m2"), FT()),
    "fp8block": (FB(), FB(block=(128, 128)), FB()),
    "fp8block_float_scales": (FB(power_of_two=False), FB(block=(128, 128), power_of_two=False), FB("e5m2", power_of_two=False)),
    "fp8block_1d_weight": (FB(), FB(), FB("e5m2")),
    "mxfp8_by_nvfp4": (MX(), NV(), MX("e5m2")),
    "w4a8_mxfp4": (MX(), M4((32, 32)), MX()),
    "w4a8_mxfp4_e5m2": (MX("e5m2", scale_rounding="floor"), M4(), MX("e5m2")),
    "w4a8_nvfp4": (MX(), NV((16, 16)), MX("e5m2")),
    "w4a8_nvfp4_rows": (MX(), NV(row_scaled=True, four_over_six="mae"), MX()),
    "a4w8": (NV(row_scaled=True), MX(), M4()),
    "fp8delayed": (FD(), FD(), FD("e5m2")),
    "fp8delayed_by_nvfp4": (FD("e5m2"), NV((16, 16)), FD()),
    "hybrid": (HY(NV(), MX()), HY(MX("e5m2"), M4()), HY(NV(stochastic=True), FB())),
    "hybrid_from_rows": (HY(NV(hadamard=True), NV(hadamard=True), FROM), HY(M4(), FT(), FROM), HY(MX(), NV(hadamard=True), FROM)),
    "bf16_weight": (MX(), None, MX()),
    "weight_only": (None, M4(), None),
}
SIZES = {
    "many": ([37, 0, 128, 1, 130, 65, 0], 380),
    "one": ([77], 77),
    "first_empty": ([0, 31, 129], 161),
}
SHAPES = [(70, 45), (33, 129), (130, 1), (96, 64)]


def operand(x, offsets, fmt, layout="compact", seed=7):
    if fmt is None:
        return x
    layout = layout if fmt.has_codes else "compact"
    scale = None
    if isinstance(fmt, FD):  # any will do: here the largest elements of some groups saturate
        scale = torch.exp2(torch.arange(x.shape[0] if offsets is None else len(offsets) - 1) % 7 + 0.3)
    return bs.quantize_grouped(x, offsets, fmt, columnwise=True, layout=layout, rng=torch.tensor([seed, 3]), scale=scale)


def problem(triple, sizes, capacity, K, N, layout="compact", dtype=torch.float32):
    """(x, w, dy) as handed to the GEMMs, and offsets. Rows differ in size by a factor of about 2^3."""
    offsets = offsets_of(sizes)
    x = normal(capacity, K, seed=1, spread=1.5, dtype=dtype)
    w = normal(len(sizes), N, K, seed=2, spread=1.0, dtype=dtype)
    dy = normal(capacity, N, seed=4, spread=1.5, dtype=dtype)
    inp, weight, grad = triple
    return operand(x, offsets, inp, layout), operand(w, None, weight, layout), operand(dy, offsets, grad, layout), offsets


def roles(x, w, dy):
    return {"forward": (x, w), "dgrad": (dy, w), "wgrad": (dy, x)}


@pytest.mark.parametrize(("case", "shape"), list(itertools.product(SIZES, SHAPES)))
@pytest.mark.parametrize("name", TRIPLES)
def test_every_role_against_float64(name, case, shape):
    sizes, capacity = SIZES[case]
    layout = "swizzled" if shape == (33, 129) else "compact"
    x, w, dy, offsets = problem(TRIPLES[name], sizes, capacity, *shape, layout)
    for role, (a, b) in roles(x, w, dy).items():
        got = bs.grouped_gemm(a, b, role=role, offsets=offsets, out_dtype=torch.float32)
        expected = gemm64(a, b, role, offsets, capacity)
        assert got.dtype == torch.float32
        assert expected.abs().sum() > 0
        assert worst_group(got, expected, None if role == "wgrad" else offsets) <= GEMM_BOUND, role


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4_hadamard", "fp8tensor", "fp8block"])
def test_half_precision_inputs(name, dtype):
    sizes, capacity = SIZES["many"]
    x, w, dy, offsets = problem(TRIPLES[name], sizes, capacity, 70, 45, dtype=dtype)
    for role, (a, b) in roles(x, w, dy).items():
        got = bs.grouped_gemm(a, b, role=role, offsets=offsets, out_dtype=torch.float32)
        expected = gemm64(a, b, role, offsets, capacity)
        assert worst_group(got, expected, None if role == "wgrad" else offsets) <= GEMM_BOUND, role


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8tensor", "fp8block", "bf16"])
def test_the_result_is_rounded_once(name):
    sizes, capacity = SIZES["many"]
    x, w, _, offsets = problem(TRIPLES[name], sizes, capacity, 70, 45)
    exact = bs.grouped_gemm(x, w, offsets=offsets, out_dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(bs.grouped_gemm(x, w, offsets=offsets, out_dtype=dtype), exact.to(dtype))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8tensor", "fp8block", "bf16"])
def test_bias(name, scaled):
    """The bias is added in float32 before the rounding, times one factor a row."""
    sizes, capacity = SIZES["many"]
    x, w, _, offsets = problem(TRIPLES[name], sizes, capacity, 70, 45)
    bias, factor = normal(len(sizes), 45, seed=5) * 40, torch.rand(capacity) + 0.5
    got = bs.grouped_gemm(x, w, offsets=offsets, bias=bias, bias_scale=factor if scaled else None, out_dtype=torch.float32)
    expected = gemm64(x, w, "forward", offsets, capacity)
    rows = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    own = bias.double()[rows]
    expected[: len(rows)] += own * factor[: len(rows), None].double() if scaled else own
    assert worst_group(got, expected, offsets) <= GEMM_BOUND


@pytest.mark.parametrize("name", ["mxfp8_hybrid_square", "nvfp4_hadamard", "fp8tensor", "fp8block", "bf16"])
def test_wgrad_into_a_buffer(name):
    """Written or added to in float32; a group without rows is written as zero and left alone when adding."""
    sizes, capacity = SIZES["many"]
    x, _, dy, offsets = problem(TRIPLES[name], sizes, capacity, 70, 45)
    dw = bs.grouped_gemm(dy, x, role="wgrad", offsets=offsets)
    assert dw.shape == (len(sizes), 45, 70)
    assert (dw[[1, 6]] == 0).all()
    assert (dw[[0, 2, 3, 4, 5]] != 0).flatten(1).any(1).all()
    out = torch.full_like(dw, torch.nan)
    assert bs.grouped_gemm(dy, x, role="wgrad", offsets=offsets, out=out) is out
    assert torch.equal(out, dw)
    start = normal(*dw.shape, seed=6)
    out = start.clone()
    bs.grouped_gemm(dy, x, role="wgrad", offsets=offsets, out=out, accumulate=True)
    assert torch.equal(out, start + dw)
    assert torch.equal(out[1], start[1])


def test_the_transforms_of_a_pair_cancel():
    """dy and x are transformed alike along M: their product is that of the plain tensors, within the precision of E2M1."""
    sizes, capacity = [256, 40], 296
    offsets = offsets_of(sizes)
    x, dy = normal(capacity, 64, seed=1), normal(capacity, 48, seed=2)
    x[:, :48] += dy
    fmt = NV(hadamard=True)
    got = bs.grouped_gemm(operand(dy, offsets, fmt), operand(x, offsets, fmt), role="wgrad")
    plain = torch.stack([dy[a:b].double().mT @ x[a:b].double() for a, b in ((0, 256), (256, 296))])
    assert worst_group(got, plain) < 0.2


def test_hybrid_operands_are_e5m2():
    """A gradient operand of a hybrid recipe holds E5M2: decoded as E4M3 it is another matrix altogether."""
    x, _, dy, offsets = problem(TRIPLES["mxfp8_hybrid_square"], *SIZES["many"], 70, 45)
    assert (dy.format.element, x.format.element) == ("e5m2", "e4m3")
    right = torch.cat(operand64(dy, "rowwise"))
    original = normal(SIZES["many"][1], 45, seed=4, spread=1.5)[: len(right)]
    assert calc_diff(right, original) < 0.1
    wrong = bs.GroupedTensor(dy.shape, MX("e4m3"), dy.rowwise, dy.columnwise, offsets)
    assert calc_diff(torch.cat(operand64(wrong, "rowwise")).nan_to_num(), original) > 0.5
