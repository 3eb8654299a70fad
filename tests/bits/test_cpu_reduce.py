"""The compiled sums over rows and dot products: near float64, the same for a group alone and on any number of threads."""

from itertools import pairwise

import pytest
import torch
from support import GEMM_BOUND, assert_same, normal, offsets_of, on_threads, seeded

from blockscale.kernels.cpu import reduce as kernel
from blockscale.reference import grouped_gemm as reference

SIZES = [[37, 0, 128, 1, 300], [4] * 256, [0, 0], [1], [2000]]


@pytest.fixture(autouse=True)
def each_backend():
    """These tests name the backends themselves."""


def problem(sizes, columns, dtype=torch.float32):
    offsets = offsets_of(sizes)
    capacity = int(offsets[-1]) + 9
    dy, scale = normal(capacity, columns, seed=1, spread=2.0, dtype=dtype), torch.rand(capacity, generator=seeded(3))
    dy[offsets[-1] :], scale[offsets[-1] :] = torch.nan, torch.nan
    return dy, scale, offsets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [1, 33, 700])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"{len(s)}_groups_of_{sum(s)}")
def test_sums_and_dots(sizes, columns, dtype):
    dy, scale, offsets = problem(sizes, columns, dtype)
    bias = normal(len(sizes), columns, seed=2)
    for factor in (None, scale):
        got = kernel.bias_grad(dy, offsets, factor)
        # the product with the factor is rounded before it is summed
        rows = dy.float() if factor is None else dy.float() * factor[:, None]
        want, size = (torch.stack([t[a:b].double().sum(0) for a, b in pairwise(offsets.tolist())]) for t in (rows, rows.abs()))
        # terms of both signs may cancel: an error is small beside what was added up, not beside what is left
        assert ((got.double() - want).abs() <= GEMM_BOUND * size).all()
        assert ((got.double() - reference.bias_grad(dy, offsets, factor).double()).abs() <= 2 * GEMM_BOUND * size).all()
        assert got.any() or not int(offsets[-1])
    dots, live = kernel.row_dot(dy, bias, offsets), int(offsets[-1])
    own = bias.repeat_interleave(offsets.diff(), 0)
    exact = (dy[:live].double() * own.double()).abs().sum(1)
    assert ((dots[:live].double() - (dy[:live].double() * own.double()).sum(1)).abs() <= GEMM_BOUND * exact).all()
    assert_same(dots[live:], torch.zeros(dots.shape[0] - live), "dead rows")
    assert live == 0 or dots.any()


def test_threads_strides_and_neighbours_change_no_bit():
    dy, scale, offsets = problem([300, 0, 5, 700], 600)
    bias = normal(4, 600, seed=2)
    want = kernel.bias_grad(dy, offsets, scale), kernel.row_dot(dy, bias, offsets)
    for threads in (1, 2, 5):
        with on_threads(threads):
            got = kernel.bias_grad(dy.mT.contiguous().mT, offsets, scale), kernel.row_dot(dy, bias.mT.contiguous().mT, offsets)
        for one, other in zip(got, want, strict=True):
            assert_same(one, other, threads)
    for g, (a, b) in enumerate(pairwise(offsets.tolist())):
        alone = offsets_of([b - a])
        assert_same(kernel.bias_grad(dy[a:b], alone, scale[a:b])[0], want[0][g], f"group {g}")
        assert_same(kernel.row_dot(dy[a:b], bias[g : g + 1], alone), want[1][a:b], f"group {g}")
