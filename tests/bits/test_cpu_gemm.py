"""The compiled decoder and the grouped GEMM on it against the reference, where bfloat16 products run and where not."""

from dataclasses import replace

import pytest
import torch
from support import GEMM_BOUND, assert_same, normal, offsets_of, worst_group

import blockscale as bs
from blockscale.kernels.cpu import blas
from blockscale.kernels.cpu import gemm as kernel
from blockscale.kernels.cpu.build import load
from blockscale.ops import backend
from blockscale.reference import grouped_gemm as reference

FORMATS = {
    "mxfp8": bs.MXFP8(),
    "mxfp8_square_e5m2": bs.MXFP8("e5m2", (32, 32)),
    "nvfp4": bs.NVFP4(),
    "nvfp4_square": bs.NVFP4((16, 16)),
    "nvfp4_hadamard": bs.NVFP4(hadamard=True),
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
    layout = layout if fmt.kind in ("mxfp8", "nvfp4") else "compact"
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
                got = kernel._matrix(q, plane, span, torch.float32)
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


def test_explain_says_which_backend_and_why(monkeypatch):
    x = torch.randn(64, 64)
    choice = bs.explain(bs.quantize, x, bs.MXFP8()).stages[0].choice
    assert choice.backend == "cpu"
    assert "compiled by" in choice.why
    with backend.only_reference():
        assert bs.explain(bs.quantize, x, bs.MXFP8()).stages[0].choice.backend == "reference"
    from blockscale.kernels.cpu.build import Loaded

    monkeypatch.setattr(backend, "load", lambda: Loaded(None, "no C++ compiler found"))
    choice = bs.explain(bs.quantize, x, bs.MXFP8()).stages[0].choice
    assert choice.backend == "reference"
    assert "no C++ compiler found" in choice.why
    assert bs.quantize(x, bs.MXFP8()).rowwise.data.any()


def test_a_compiler_that_fails_leaves_the_reference(monkeypatch, tmp_path):
    compiler = tmp_path / "broken-c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho no such header >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = load.__wrapped__()
    assert found.library is None
    assert "no such header" in found.why
    assert list((tmp_path / "cache" / "blockscale").iterdir()) == []


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
