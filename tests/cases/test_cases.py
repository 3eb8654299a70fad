"""Small inputs on which other libraries failed; each named for its public report. Shapes as reported where a CPU can bear them.

What needs a device (captured graphs, mapped pages, memory growth, other kernels) has no counterpart here.
"""

import dataclasses
import itertools
import math

import pytest
import torch
from composed import problem, run_mlp
from support import (
    ACTIVATIONS,
    E4M3,
    E5M2,
    E8M0,
    GEMM_BOUND,
    RECIPES,
    assert_all_same,
    assert_same,
    gemm64,
    normal,
    offsets_of,
    operand64,
    poison,
    swizzled_offset,
    worst_group,
)

import blockscale as bs

SMALL_OR_AS_GIVEN = [False, pytest.param(True, marks=pytest.mark.slow, id="as_given")]
FORMATS = {
    "mxfp8": bs.MXFP8(),
    "mxfp8_e5m2_square": bs.MXFP8("e5m2", (32, 32)),
    "mxfp8_floor": bs.MXFP8(scale_rounding="floor"),
    "mxfp4": bs.MXFP4(),
    "nvfp4": bs.NVFP4(),
    "nvfp4_square": bs.NVFP4((16, 16)),
    "nvfp4_hadamard_stochastic": bs.NVFP4(hadamard=True, stochastic=True),
    "fp8tensor": bs.FP8Tensor(),
    "fp8tensor_e5m2": bs.FP8Tensor("e5m2", power_of_two=True),
    "fp8block": bs.FP8Block(),
    "fp8block_square": bs.FP8Block(block=(128, 128), power_of_two=False),
}


@pytest.mark.parametrize("as_given", SMALL_OR_AS_GIVEN)
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8_hybrid", "nvfp4", "fp8_current", "fp8_block"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_c01_tail_of_a_buffer(activation, recipe, as_given):
    """TransformerEngine 3484: 1 group, 512 live rows of 768; the tail holds zeros, 3.0, NaN or inf."""
    width, live, capacity = (1024, 512, 768) if as_given else (64, 96, 144)
    p = problem([live], capacity, width, width, activation=activation, probs=True)
    packed = run_mlp(problem_part(p, live), RECIPES[recipe])
    for fill in (0.0, 3.0, math.nan, math.inf):
        for t in (p.x, p.dy, p.probs):
            t[live:] = fill
        got = run_mlp(p, RECIPES[recipe])
        for name in ("w1", "w2"):
            assert torch.isfinite(got[name]).all()
            assert_same(got[name], packed[name], f"{name}, tail of {fill}")
        for name in ("y", "x", "probs"):
            assert_same(got[name][:live], packed[name], f"{name}, tail of {fill}")
            assert not got[name][live:].any()
    assert packed["w1"].abs().max() > 0


def problem_part(p, live):
    """The live rows alone."""
    return dataclasses.replace(p, x=p.x[:live].clone(), dy=p.dy[:live].clone(), probs=p.probs[:live].clone())


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 2, 8, 15, 31, 32])
def test_c05_padding_of_8x4_scales(rows, fmt):
    """flashinfer 2861: 8x4 scales, M <= 32, K=512, N=256; padding scale bytes 0x7F."""
    K = 512 - 16  # K/16 and K/32 leave padding columns as well
    x = normal(rows, K, seed=1, spread=2.0)
    q = bs.quantize(x, FORMATS[fmt], layout="swizzled_8x4")
    blocks = -(-K // FORMATS[fmt].block[1])
    m, k = torch.arange(rows)[:, None], torch.arange(blocks)
    live = ((m // 8) * (-(-blocks // 4)) * 32 + (k // 4) * 32 + (m % 8) * 4 + k % 4).flatten()
    dead = torch.ones(q.rowwise.scale.numel(), dtype=torch.bool)
    dead[live] = False
    assert dead.sum() == -(-rows // 8) * 8 * -(-blocks // 4) * 4 - rows * blocks
    want = q.dequantize()
    assert not q.rowwise.scale[dead].any()
    q.rowwise.scale[dead] = 0x7F
    assert_same(q.dequantize(), want, "values")
    plain = bs.quantize(x, FORMATS[fmt], layout="linear")
    assert_same(q.with_layout("linear").rowwise.scale, plain.rowwise.scale, "live scales")
    cleaned = q.with_layout("linear").with_layout("swizzled_8x4").rowwise.scale
    assert not cleaned[dead].any()
    w = bs.quantize_grouped(normal(1, 256, K, seed=2), None, FORMATS[fmt])
    group = bs.quantize_grouped(x, torch.tensor([0, rows]), FORMATS[fmt])
    padded = q.with_layout("swizzled").rowwise.scale
    other = bs.GroupedTensor(
        (rows, K), FORMATS[fmt], bs.Plane(q.rowwise.data, padded, q.rowwise.amax, "swizzled"), None, group.offsets
    )
    assert_same(bs.grouped_gemm(other, w), bs.grouped_gemm(group, w), "product")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("layout", ["compact", "swizzled"])
def test_c06_nan_in_dead_slots(layout, fmt):
    """flashinfer 3057: 8 tokens, 8 experts, 64 slots, NaN in the dead slots; live scales unchanged."""
    layout = layout if FORMATS[fmt].has_codes else "compact"
    offsets = offsets_of([1, 0, 3, 0, 0, 2, 1, 1])
    x = normal(64, 96, seed=1, spread=2.0)
    clean = x.clone()
    clean[8:] = 0
    x[8:] = math.nan
    rng = torch.tensor([1, 2])
    got, want = (bs.quantize_grouped(t, offsets, FORMATS[fmt], columnwise=True, layout=layout, rng=rng) for t in (x, clean))
    for which, plane in want.planes.items():
        for mine, theirs in zip(got.planes[which].tensors(), plane.tensors(), strict=True):
            assert_same(mine, theirs, which)
        assert plane.scale.any()
    assert torch.isfinite(got.dequantize()).all()


@pytest.mark.parametrize("as_given", SMALL_OR_AS_GIVEN)
@pytest.mark.parametrize(
    ("fmt", "layout"),
    [
        *itertools.product(("mxfp8", "mxfp8_e5m2_square", "nvfp4", "nvfp4_square"), ("compact", "swizzled")),
        ("fp8block_square", "compact"),
    ],
)
def test_c07_padding_of_weight_scales(fmt, layout, as_given):
    """TransformerEngine PR 3070: weights (5760, 2880) and (2880, 2880), padding scale bytes poisoned."""
    f = FORMATS[fmt]
    for N, K in ((5760, 2880), (2880, 2880)) if as_given else ((180, 90), (90, 90)):
        w, x = normal(1, N, K, seed=1), normal(5, K, seed=2)
        offsets = torch.tensor([0, 5])
        x_q = bs.quantize_grouped(x, offsets, FORMATS["mxfp8"])
        dy_q = bs.quantize_grouped(normal(5, N, seed=3), offsets, FORMATS["mxfp8"])
        for byte in (0x7F, 0xFF, 0x3C):
            w_q = bs.quantize_grouped(w, None, f, columnwise=True, layout=layout)
            want = bs.grouped_gemm(x_q, w_q), bs.grouped_gemm(dy_q, w_q, role="dgrad")
            whole = N % 128 == 0 and fmt == "fp8block_square"  # has nothing to poison: its scales have no padding of their own
            assert (poison(w_q, byte) == 0) == whole
            assert_same(bs.grouped_gemm(x_q, w_q), want[0], "forward")
            assert_same(bs.grouped_gemm(dy_q, w_q, role="dgrad"), want[1], "dgrad")
        assert worst_group(want[0], gemm64(x_q, w_q, "forward", offsets, 5), offsets) <= GEMM_BOUND


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4", "fp8_current", "fp8_block"])
def test_c09_rows_past_the_last_offset_twice(recipe):
    """pytorch 193633: rows past the last offset; two backward passes through recycled memory."""
    p = problem([30, 0, 50], 128, 64, 48, probs=True)
    first = run_mlp(p, RECIPES[recipe])
    for _ in range(2):
        trash = [
            torch.full(shape, math.nan) for shape in ((128, 64), (128, 48), (128, 96), (3, 96, 64), (3, 64, 48)) for _ in range(8)
        ]
        del trash
        again = run_mlp(p, RECIPES[recipe])
        assert_all_same(again, first)
    for name in ("y", "x", "probs"):
        assert not first[name][80:].any()
        assert torch.isfinite(first[name]).all()
        assert first[name][:80].any()


@pytest.mark.parametrize("sizes", [[128, 0, 0, 0], [0, 0, 0, 0], [0, 0, 128, 0]])
@pytest.mark.parametrize("fmt", [*FORMATS, None])
def test_c10_empty_groups_and_a_filled_output(fmt, sizes):
    """flashinfer PR 4046: M=N=128, K=256, E=4; sizes [128,0,0,0] and [0,0,0,0]; output filled with 13.0 before."""
    offsets = offsets_of(sizes)
    x, w, dy = normal(128, 256, seed=1), normal(4, 128, 256, seed=2), normal(128, 128, seed=3)
    if fmt is not None:
        rng = torch.tensor([1, 2])
        x, dy = (bs.quantize_grouped(t, offsets, FORMATS[fmt], columnwise=True, rng=rng) for t in (x, dy))
        w = bs.quantize_grouped(w, None, FORMATS[fmt], columnwise=True, rng=rng)
    y = bs.grouped_gemm(x, w, offsets=offsets, out_dtype=torch.float32)
    assert worst_group(y, gemm64(x, w, "forward", offsets, 128), offsets) <= GEMM_BOUND
    assert y.any() == bool(sum(sizes))
    dw = gemm64(dy, x, "wgrad", offsets, 128)
    written, added = torch.full((4, 128, 256), 13.0), torch.full((4, 128, 256), 13.0)
    bs.grouped_gemm(dy, x, role="wgrad", offsets=offsets, out=written)
    bs.grouped_gemm(dy, x, role="wgrad", offsets=offsets, out=added, accumulate=True)
    assert worst_group(written, dw) <= GEMM_BOUND
    for group, size in enumerate(sizes):
        if size == 0:
            assert (added[group] == 13.0).all()
            assert (written[group] == 0).all()
    assert worst_group(added, dw + 13) <= GEMM_BOUND


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sizes", [[128, 130, 65], [44, 1, 127, 129, 33]], ids=["c11", "c15"])
def test_c11_c15_sizes_that_no_tile_divides(sizes, recipe):
    """DeepGEMM PR 450: groups [128,130,65]. TransformerEngine PR 3328, 2966: sizes 44, 1, 127, 129, 33. Right for every row."""
    r = RECIPES[recipe]
    offsets = offsets_of(sizes)
    rows = sum(sizes)
    x, w, dy = normal(rows, 96, seed=1, spread=1.0), normal(len(sizes), 40, 96, seed=3), normal(rows, 40, seed=4, spread=1.0)
    rng = torch.tensor([1, 2])
    if r.input is not None:
        x = bs.quantize_grouped(x, offsets, r.input, columnwise=True)
        w = bs.quantize_grouped(w, None, r.weight, columnwise=True)
        dy = bs.quantize_grouped(dy, offsets, r.gradient, columnwise=True, rng=rng)
    every_row = torch.arange(rows + 1)
    for role, (a, b) in {"forward": (x, w), "dgrad": (dy, w), "wgrad": (dy, x)}.items():
        got = bs.grouped_gemm(a, b, role=role, offsets=offsets, out_dtype=torch.float32)
        expected = gemm64(a, b, role, offsets, rows)
        split = None if role == "wgrad" else every_row
        # a single row may cancel: 1e-5 of its norm; a wrong group or scale is 1
        assert worst_group(got, expected, split) <= (GEMM_BOUND if split is None else 1e-5), role


@pytest.mark.parametrize("as_given", SMALL_OR_AS_GIVEN)
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4", "fp8_current", "fp8_block"])
def test_c12_wgrad_with_a_zero_channel(recipe, as_given):
    """DeepGEMM 365: wgrad, sizes [256,128,128,256], 2048x2048, one all-zero channel; deterministic and right."""
    sizes, width = [256, 128, 128, 256], 2048 if as_given else 96
    r, offsets, rows = RECIPES[recipe], offsets_of([256, 128, 128, 256]), 768
    x, dy = normal(rows, width, seed=1), normal(rows, width, seed=2)
    x[:, 17], dy[:, 40] = 0, 0
    if r.input is not None:
        x = bs.quantize_grouped(x, offsets, r.input, rowwise=False, columnwise=True)
        dy = bs.quantize_grouped(dy, offsets, r.gradient, rowwise=False, columnwise=True, rng=torch.tensor([1, 2]))
    first = bs.grouped_gemm(dy, x, role="wgrad", offsets=offsets)
    assert_same(bs.grouped_gemm(dy, x, role="wgrad", offsets=offsets), first, "again")
    assert worst_group(first, gemm64(dy, x, "wgrad", offsets, rows)) <= GEMM_BOUND
    assert not first[:, :, 17].any()
    assert not first[:, 40].any()
    assert len(sizes) == (first.flatten(1) != 0).any(1).sum()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8_hybrid", "nvfp4", "fp8_current", "fp8_block"])
def test_c14_wgrad_without_rows(recipe):
    """cutlass 2547: a group with 0 rows in wgrad (contraction length 0): zeros written, or left when accumulating."""
    p = problem([0, 32, 0], 40, 64, 48, bias=True)
    got = run_mlp(p, RECIPES[recipe])
    for name in ("w1", "w2", "b1", "b2"):
        assert not got[name][[0, 2]].any(), name
        assert got[name][1].any(), name
    start = normal(*p.w1.shape, seed=1), normal(*p.w2.shape, seed=2)
    buffers = tuple(b.clone() for b in start)
    run_mlp(p, RECIPES[recipe], main_grads=buffers)
    for buffer, before in zip(buffers, start, strict=True):
        assert_same(buffer[[0, 2]], before[[0, 2]], "empty groups")
        assert (buffer[1] != before[1]).any()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_c16_nan_logits(score, normalize):
    """vllm PR 39593: a router must not pick one expert several times for a token when logits are NaN; it reports them."""
    router = bs.nn.Router(16, 8, 4, score=score, normalize=normalize)
    x = normal(6, 16, seed=1)
    clean = router(x)
    x[2], x[4, 3] = math.nan, math.nan
    got = router(x)
    for ids in got.ids.tolist():
        assert len(set(ids)) == 4
        assert all(0 <= i < 8 for i in ids)
    assert int(got.nan_tokens) == 2
    assert int(clean.nan_tokens) == 0
    others = [0, 1, 3, 5]
    for name in ("ids", "probs", "scores"):
        assert_same(getattr(got, name)[others], getattr(clean, name)[others], name)
    assert torch.isnan(got.probs[[2, 4]]).all()
    # one NaN logit only: the expert without a number comes last
    with torch.no_grad():
        router.weight[5] = math.nan
    one = router(normal(6, 16, seed=1))
    assert (one.ids != 5).all()
    assert int(one.nan_tokens) == 6


@pytest.mark.parametrize("recipe", ["mxfp8_hybrid", "fp8_current"])
def test_c18_forward_e4m3_backward_e5m2(recipe):
    """TransformerEngine 3342: E4M3 forward, E5M2 backward; gradients right, not read as E4M3."""
    r, offsets = RECIPES[recipe], torch.tensor([0, 40, 100])
    assert (r.input.element, r.gradient.element) == ("e4m3", "e5m2")
    x, w, dy = normal(100, 64, seed=1), normal(2, 48, 64, seed=2), normal(100, 48, seed=3)
    leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    bs.grouped_linear(leaf, weight, offsets, recipe=r).backward(dy)
    dy_q = bs.quantize_grouped(dy, offsets, r.gradient, columnwise=True)
    x_q = bs.quantize_grouped(x, offsets, r.input, columnwise=True)
    w_q = bs.quantize_grouped(w, None, r.weight, columnwise=True)
    assert worst_group(leaf.grad, gemm64(dy_q, w_q, "dgrad", offsets, 100), offsets) <= GEMM_BOUND
    assert worst_group(weight.grad, gemm64(dy_q, x_q, "wgrad", offsets, 100)) <= GEMM_BOUND
    exact = torch.cat([dy[:40].double() @ w[0].double(), dy[40:].double() @ w[1].double()])
    assert worst_group(leaf.grad, exact, offsets) < 0.15


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("code", [0, 1, 2, 127, 252, 253, 254])
def test_c19_scale_codes_at_the_ends(code, rounding, element):
    """TransformerEngine 2408: blocks whose scale is code 0, 1, 253, 254; exact round trip of representable values."""
    table, top = (E4M3, 0x7E) if element == "e4m3" else (E5M2, 0x7B)
    codes = torch.arange(1, top + 1, dtype=torch.uint8)
    exact = table[codes.int()] * E8M0[code]
    largest = table[top] * 2.0**119 if rounding == "floor" and element == "e4m3" else 2.0**128  # "floor" saturates 480
    codes, exact = codes[(exact <= largest) & exact.float().isfinite()], exact[(exact <= largest) & exact.float().isfinite()]
    assert torch.equal(exact.float().double(), exact)  # every one of them is a float32
    count = -(-len(codes) // 31)
    codes = torch.cat((codes, codes[-1:].expand(31 * count - len(codes)))).view(count, 31)
    codes = torch.cat((codes, codes[-1:, -1:].expand(count, 1)), 1)  # the largest value in every block
    codes = torch.cat((codes, codes | 0x80))
    M, fmt = codes.shape[0], bs.MXFP8(element, scale_rounding=rounding)
    scale = torch.full((M, 1), code, dtype=torch.uint8)
    q = bs.BlockScaledTensor((M, 32), fmt, bs.Plane(codes, scale, None, "linear"), None)
    values = q.dequantize()
    assert torch.equal(values.double(), table[codes.int()] * E8M0[code])
    again = bs.quantize(values, fmt)
    assert_same(again.dequantize(), values, "round trip")
    if table[codes[0, -1].int()] == table[top]:  # the block holds the largest element: its scale is the code itself
        assert (again.rowwise.scale[:M, 0] == code).all()
        assert_same(again.rowwise.data, codes, "codes")
    else:
        assert code >= 252
    other = bs.BlockScaledTensor((32, M), fmt, None, bs.Plane(codes.mT.contiguous(), scale.mT.contiguous(), None, "linear"))
    assert_same(other.dequantize(plane="columnwise"), values.mT.contiguous(), "columnwise")
    group = bs.quantize_grouped(values, torch.tensor([0, M]), fmt)
    assert_same(torch.cat(operand64(group, "rowwise")).float(), values, "by tables")
    eye = bs.quantize_grouped(torch.eye(32)[None], None, bs.MXFP8())
    assert_same(bs.grouped_gemm(group, eye), values, "through a product")


@pytest.mark.parametrize("fmt", FORMATS)
def test_c20_an_all_zero_block(fmt):
    """TensorRT-LLM PR 17635: an all-zero block under every format: zeros, no NaN."""
    x = normal(256, 256, seed=1)
    x[:128, :128] = 0
    rng = torch.tensor([1, 2])
    for t, zero in ((x, (slice(0, 128), slice(0, 128))), (torch.zeros(256, 256), (slice(None), slice(None)))):
        q = bs.quantize(t, FORMATS[fmt], columnwise=True, rng=rng)
        grouped = bs.quantize_grouped(t, torch.tensor([0, 128, 128, 256]), FORMATS[fmt], columnwise=True, rng=rng)
        for values in (one.dequantize(plane=which) for one in (q, grouped) for which in ("rowwise", "columnwise")):
            assert torch.isfinite(values).all()
            assert not values[zero].any()
            assert values.any() == t.any()
        for which in ("rowwise", "columnwise"):
            assert all(torch.isfinite(v).all() for v in operand64(grouped, which))


def test_swizzled_address_of_the_tests():
    """The address formula that these tests rely on, at places worked out by hand."""
    i, j = torch.tensor([0, 1, 31, 32, 127, 128, 0, 5]), torch.tensor([0, 0, 3, 0, 3, 0, 4, 9])
    assert swizzled_offset(i, j, 3).tolist() == [0, 16, 499, 4, 511, 1536, 512, 1024 + 80 + 1]
