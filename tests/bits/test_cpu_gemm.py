"""The compiled decoder and the grouped GEMM on it against the reference, where bfloat16 products run and where not."""

from dataclasses import replace

import pytest
import torch
from support import GEMM_BOUND, assert_same, normal, offsets_of, worst_group

import blockscale as bs
from blockscale.kernels.cpu import blas
from blockscale.kernels.cpu import gemm as kernel
from blockscale.ops import backend
from blockscale.reference import grouped_gemm as reference

FORMATS = {
    "mxfp8": bs.MXFP8(),
    "mxfp8_square_e5m2": bs.MXFP8("e5m2", (32, 32)),
    "nvfp4": bs.NVFP4(),
    "nvfp4_square": bs.NVFP4((16, 16)),
    "nvfp4_hadamard": bs.NVFP4(hadamard=True),
    "nvfp4_rows": bs.NVFP4(row_scaled=True),
    "nvfp4_rows_hadamard": bs.NVFP4(row_scaled=True, hadamard=True),
    "nvfp4_four": bs.NVFP4(four_over_six="mse", scale_max=256),
    "mxfp4": bs.MXFP4(),
    "mxfp4_square": bs.MXFP4((32, 32)),
    "fp8tensor": bs.FP8Tensor(),
    "fp8block": bs.FP8Block(),
    "fp8block_square": bs.FP8Block(block=(128, 128), power_of_two=False),
}
SIZES = (37, 0, 128, 1, 65, 0, 15)
needs_bf16 = pytest.mark.skipif(blas.bf16_gemm()[0] is None, reason=blas.bf16_gemm()[1])


@pytest.fixture(autouse=True)
def each_backend():
    """These tests name the backends themselves."""


def quantized(x, offsets, fmt, layout="compact"):
    layout = layout if fmt.has_codes else "compact"
    return bs.quantize_grouped(x, offsets, fmt, columnwise=True, layout=layout)


@pytest.mark.parametrize("layout", ["compact", "swizzled"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1.0, 1e-38, 3e38], ids=str)
def test_decoded_operands_are_those_of_the_reference(name, layout, size):
    """Every value of both planes, subnormal ones, infinities and NaNs included, and the range that is reported."""
    fmt, offsets = FORMATS[name], offsets_of(list(SIZES))
    x = normal(int(offsets[-1]) + 9, 70, seed=3, spread=2.0) * size
    x[5, 40], x[50, 3] = torch.nan, torch.inf
    q = quantized(x, offsets, fmt, layout)
    for plane in ("rowwise", "columnwise"):
        want = reference.frame(q, plane, q.tiles).values
        for span in kernel._spans(offsets.tolist()):
            if span.rows:
                got = kernel._matrix(q, plane, span, torch.float32, kernel._Room())
                values = got.view(span.rows, True)
                expected = want[128 * span.tile0 : 128 * span.tile0 + span.rows]
                assert_same(values, expected, f"{name} {plane} group {span.index}")
                live = expected[expected != 0].abs()
                # a transform keeps values of absent rows, which count too
                if not (fmt.kind == "nvfp4" and fmt.hadamard and plane == "columnwise"):
                    exact = bool((live.bfloat16().float() == live).all()) and bool((live >= 2.0**-126).all())
                    exact = exact and bool(live.isfinite().all())
                    assert (got.low is not None) == exact
                    assert got.low is None or len(live) == 0 or 2.0**got.low <= float(live.min()) < 2.0 ** (got.low + 1)


def roles(x, w, dy, offsets):
    return {
        "forward": bs.grouped_gemm(x, w, offsets=offsets, out_dtype=torch.float32),
        "dgrad": bs.grouped_gemm(dy, w, role="dgrad", offsets=offsets, out_dtype=torch.float32),
        "wgrad": bs.grouped_gemm(dy, x, role="wgrad", offsets=offsets),
    }


@pytest.mark.parametrize("name", [*FORMATS, "bf16"])
@pytest.mark.parametrize("size", [1.0, 1e-20], ids=str)
def test_products_agree_with_the_reference(name, size):
    """At 1e-20 products are subnormal: no bfloat16 product may run, and none of the result may be lost."""
    offsets = offsets_of([200, 0, 131, 17])
    x, dy = (normal(360, n, seed=n, spread=1.0) * size for n in (130, 48))
    w = normal(4, 48, 130, seed=7) * size
    if name != "bf16":
        fmt = FORMATS[name]
        plain = replace(fmt, hadamard=False) if getattr(fmt, "hadamard", False) else fmt  # of weights: nothing undoes it
        x, dy, w = quantized(x, offsets, fmt), quantized(dy, offsets, fmt), quantized(w, None, plain)
    got = roles(x, w, dy, offsets)
    with backend.only_reference():
        want = roles(x, w, dy, offsets)
    for role in got:
        worst = worst_group(got[role], want[role], None if role == "wgrad" else offsets)
        print(f"{name} {size} {role}: {worst:.1e}")
        assert worst < GEMM_BOUND, role
        assert want[role].any()


@pytest.mark.parametrize("fmt", [bs.MXFP8(), bs.NVFP4(row_scaled=True)], ids=lambda f: f.kind)
def test_a_thousand_tiny_groups(fmt):
    """Each group's product as it is alone, whatever surrounds it."""
    offsets = torch.arange(1025) * 4
    x, w = quantized(normal(4096, 64, seed=1), offsets, fmt), quantized(normal(1024, 16, 64, seed=2), None, fmt)
    got = bs.grouped_gemm(x, w)
    rows, weights = x.dequantize().view(1024, 4, 64).double(), w.dequantize().view(1024, 16, 64).double()
    assert worst_group(got.view(1024, 4, 16), rows @ weights.mT) < GEMM_BOUND
    for g in (0, 700, 1023):
        alone = quantized(normal(4096, 64, seed=1)[4 * g : 4 * g + 4], offsets_of([4]), fmt)
        weight = quantized(normal(1024, 16, 64, seed=2)[g : g + 1], None, fmt)
        assert_same(got[4 * g : 4 * g + 4], bs.grouped_gemm(alone, weight), f"group {g}")


def test_operands_of_different_formats():
    """A number a group on one side, one a row (a column) on the other, and none: with a bias and the router's factor."""
    offsets = offsets_of([40, 0, 87])
    x, w, bias, probs = (
        normal(130, 64, seed=1, spread=3.0),
        normal(3, 40, 64, seed=2, spread=3.0),
        normal(3, 40, seed=3),
        torch.rand(130),
    )
    sides = (bs.NVFP4(row_scaled=True), bs.NVFP4(), bs.MXFP4(), bs.MXFP8(), None)
    for a_fmt in sides:
        for b_fmt in sides:
            a = x if a_fmt is None else quantized(x, offsets, a_fmt)
            b = w if b_fmt is None else quantized(w, None, b_fmt)
            for dtype in (torch.float32, torch.bfloat16):
                got = bs.grouped_gemm(a, b, offsets=offsets, bias=bias, bias_scale=probs, out_dtype=dtype)
                with backend.only_reference():
                    want = bs.grouped_gemm(a, b, offsets=offsets, bias=bias, bias_scale=probs, out_dtype=dtype)
                assert worst_group(got, want, offsets) < (GEMM_BOUND if dtype == torch.float32 else 2e-3), (a_fmt, b_fmt)


@needs_bf16
def test_the_bfloat16_product_runs_where_it_may(monkeypatch):
    calls = []
    function = blas.call
    monkeypatch.setattr(blas, "call", lambda *args: (calls.append(args[-1]), function(*args))[1])
    offsets = offsets_of([64, 64])
    for size, expected in ((1.0, 2), (1e-20, 0)):
        calls.clear()
        x, w = normal(128, 64, seed=1) * size, normal(2, 32, 64, seed=2) * size
        bs.grouped_gemm(quantized(x, offsets, bs.MXFP8()), quantized(w, None, bs.MXFP8()))
        assert len(calls) == expected
    calls.clear()
    x[3, 3] = 1.0  # one group of the two has a value beside subnormal ones; each decides for itself
    x[64:] *= 1e20
    w *= 1e20
    x[3, 4] = 1e-40
    bs.grouped_gemm(x, w, offsets=offsets)
    assert len(calls) == 1


def test_without_the_library_function_float32_products_run(monkeypatch):
    monkeypatch.setattr(blas, "bf16_gemm", lambda: (None, "a test says so"))
    monkeypatch.setattr(backend, "bf16_gemm", lambda: (None, "a test says so"))
    assert "float32, because a test says so" in backend.choose("gemm", torch.device("cpu")).why
    offsets = offsets_of([40, 24])
    x, w = normal(64, 64, seed=1), normal(2, 32, 64, seed=2)
    a, b = quantized(x, offsets, bs.MXFP8()), quantized(w, None, bs.MXFP8())
    got = bs.grouped_gemm(a, b)
    with backend.only_reference():
        assert worst_group(got, bs.grouped_gemm(a, b), offsets) < GEMM_BOUND


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_the_callers_float_state_change_no_bit(threads):
    x = normal(700, 600, seed=1, spread=20.0) * 2.0**-100
    x[::7] *= 2.0**-40
    want = bs.quantize(x, bs.NVFP4(), columnwise=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    flush = torch.set_flush_denormal(True)
    try:
        got = bs.quantize(x, bs.NVFP4(), columnwise=True)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)
    assert flush
    for plane in ("rowwise", "columnwise"):
        for one, other in zip(got.planes[plane].tensors(), want.planes[plane].tensors(), strict=True):
            assert_same(one, other, plane)
