"""The compiled activations against the reference by bits, ds included: every dtype, interleave, stride and thread count."""

import pytest
import torch
from support import ACTIVATIONS, assert_same, normal, offsets_of, on_threads, seeded

import blockscale as bs
from blockscale.activations import ClampedSwiglu, Situ, parse
from blockscale.kernels.cpu import activation as kernel
from blockscale.ops import backend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VARIANTS = [parse(name) for name in ACTIVATIONS] + [ClampedSwiglu(5.0, 1.1, 0.3), Situ(3.0, 7.0)]
SPECIAL = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-39, 0.625, 7.0, -7.0, 88.72, -88.72, -103.98, 3e38])


@pytest.fixture(autouse=True)
def each_backend():
    """These tests name the backends themselves."""


def agree(h, dy, act, probs, interleave, offsets=None, what="", threads=(1,)) -> None:
    """y, dh and ds: the kernel on these numbers of threads, and the reference, through the operators."""
    spec, runs = act.spec(), interleave or 0

    def run():
        y = bs.activation(h, act, probs=probs, interleave=interleave, offsets=offsets)
        return y, *torch.ops.blockscale.activation_backward(dy, h, probs, offsets, spec, runs)

    assert backend.fast("activation", h.device)
    with backend.only_reference():
        assert not backend.fast("activation", h.device)
        want = run()
    for count in threads:
        with on_threads(count):
            got = run()
        for name, one, other in zip(("y", "dh", "ds"), got, want, strict=True):
            assert_same(one, other, f"{what} {spec} interleave={interleave} {name}, {count} threads")


def problem(act, rows, width, interleave=None, dtype=torch.float32, seed=1, spread=1.0):
    """h with every special value at some place, dy, probs."""
    h = normal(rows, act.pre_width(width), seed=seed, spread=spread) * 3
    where = torch.randint(0, 6, h.shape, generator=seeded(seed)) == 0
    drawn = SPECIAL[torch.randint(0, len(SPECIAL), h.shape, generator=seeded(seed + 2))]
    h = torch.where(where, drawn, h).to(dtype)
    return h, normal(rows, width, seed=seed + 3, dtype=dtype), torch.rand(rows, generator=seeded(seed + 4))


def interleaves(act, width):
    return [None, *(g for g in (1, 2, 12, 16, 24, 48) if width % g == 0)] if act.is_glu else [None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", VARIANTS, ids=lambda a: a.spec())
def test_every_interleave(act, dtype):
    for rows, width in ((5, 96), (300, 48), (3, 1), (1, 4096)):
        h, dy, probs = problem(act, rows, width, dtype=dtype)
        for interleave in interleaves(act, width):
            agree(h, dy, act, probs, interleave, threads=(1, 2))
        agree(h, dy, act, None, None, threads=(1, 2))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_poisoned_tails_and_empty_ones(name):
    act = parse(name)
    for sizes, capacity in (([37, 0, 128, 1], 200), ([0, 0], 9), ([], 4), ([8], 8), ([0], 0)):
        h, dy, probs = problem(act, capacity, 40)
        offsets = offsets_of(sizes)
        live = int(offsets[-1])
        h[live:], dy[live:], probs[live:] = torch.nan, torch.inf, torch.nan
        agree(h, dy, act, probs, None, offsets, f"{sizes} of {capacity}")
        y = bs.activation(h, act, probs=probs, offsets=offsets)
        assert_same(y[live:], torch.zeros_like(y[live:]))
        assert live == 0 or y[:live].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_strides(name, dtype):
    act = parse(name)
    h, dy, probs = problem(act, 30, 40, dtype=dtype)
    wide = torch.full((60, h.shape[1] + 7), torch.nan, dtype=dtype)
    wide[::2, 3:-4] = h
    expanded = h[:1].expand(30, -1)
    for x, g, s in (
        (wide[::2, 3:-4], dy, probs),
        (h.mT.contiguous().mT, dy.mT.contiguous().mT, probs.repeat(2)[::2]),
        (expanded, dy, probs),
    ):
        agree(x, g, act, s, None)


def test_a_row_alone_gives_what_it_gives_among_others():
    act = parse("swiglu")
    h, dy, probs = problem(act, 400, 33)
    dh, ds = kernel.backward(dy, h, act, probs, None, 400)
    for r in (0, 1, 399):
        one_dh, one_ds = kernel.backward(dy[r : r + 1], h[r : r + 1], act, probs[r : r + 1], None, 1)
        assert_same(one_dh[0], dh[r], "dh")
        assert_same(one_ds[0], ds[r], "ds")


def test_the_callers_float_state_changes_no_bit():
    """Subnormal inputs and results, with the caller's flush-to-zero on."""
    act = parse("swiglu")
    h, dy, _ = problem(act, 40, 64)
    h = h * 2.0**-130
    want = kernel.forward(h, act, None, None, 40), kernel.backward(dy, h, act, None, None, 40)[0]
    assert (want[1][want[1] != 0].abs() < 2.0**-126).any()
    assert torch.set_flush_denormal(True)
    try:
        got = kernel.forward(h, act, None, None, 40), kernel.backward(dy, h, act, None, None, 40)[0]
    finally:
        torch.set_flush_denormal(False)
    for one, other in zip(got, want, strict=True):
        assert_same(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_many_patterns(name):
    """Random float32 bit patterns, 8 million; then every pair of a bfloat16 gate with bfloat16 linear values of some exponents."""
    act = parse(name)
    for seed in range(8):
        h = torch.randint(-(2**31), 2**31, (1000, 1000), generator=seeded(seed)).to(torch.int32).view(torch.float32)
        width = act.out_width(1000)
        agree(h, normal(1000, width, seed=seed), act, torch.rand(1000, generator=seeded(seed)), None, what=seed)
    every = torch.arange(65536).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    for other in every[::509].tolist():
        a = every.view(64, 1024)
        h = torch.cat((a, torch.full_like(a, other)), 1) if act.is_glu else a
        agree(h, normal(64, 1024, seed=1, dtype=torch.bfloat16), act, None, None, what=other)
