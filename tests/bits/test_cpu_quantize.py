"""The compiled quantizers against the reference by bits: every format, dtype, layout, stride and number of threads.

The oracle has its say on both backends in the other files; here the two meet on larger tensors and many groups.
"""

import time

import pytest
import torch
from oracle import cases
from support import assert_same, normal, offsets_of, on_threads, seeded

import blockscale as bs
from blockscale.ops import backend

FORMATS = [getattr(bs, fmt.name)(**fmt.options) for fmt in cases.EVERY]
FEW = [getattr(bs, fmt.name)(**fmt.options) for fmt in cases.FEW]
SPECIAL = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-45, -1e-39, 3.4e38, -3.4e38, 2.0**-126, 448.0, 6.0, 5e-36])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RNG = torch.tensor([-(2**62) + 5, 77])


@pytest.fixture(autouse=True)
def each_backend():
    """These tests name the backends themselves."""


def special(rows, columns, dtype=torch.float32, seed=1, rate=400):
    """Rows of different sizes; one element in ``rate`` is a special value."""
    x = normal(rows, columns, seed=seed, spread=20.0)
    x[: rows // 2] = normal(rows // 2, columns, seed=seed + 1)
    where = torch.randint(0, rate, x.shape, generator=seeded(seed)) == 0
    return torch.where(where, SPECIAL[torch.randint(0, len(SPECIAL), x.shape, generator=seeded(seed + 2))], x).to(dtype)


def agree(x, fmt, offsets=None, what="", layout="compact", threads=(1,)) -> None:
    """All tensors of both planes: the kernel on these numbers of threads, and the reference."""
    assert backend.fast("quantize", x.device, fmt), fmt.label
    args = (x, fmt.spec(), True, True, layout, None, RNG if getattr(fmt, "stochastic", False) else None)
    if offsets is not None:
        args = (x, offsets, *args[1:])
    quantize = getattr(torch.ops.blockscale, "quantize" if offsets is None else "quantize_grouped")
    with backend.only_reference():
        want = quantize(*args)
    assert any(t.any() for t in want) or x.numel() == 0
    for count in threads:
        with on_threads(count):
            got = quantize(*args)
        for n, (one, other) in enumerate(zip(got, want, strict=True)):
            plane, part = ("rowwise", "columnwise")[n // 3], ("data", "scale", "amax")[n % 3]
            assert_same(one, other, f"{fmt.spec()} {plane} {part} {what}, {count} threads")


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.spec())
def test_every_format(fmt):
    agree(special(300, 530), fmt, threads=(1, 2))
    offsets = offsets_of([37, 0, 128, 1, 100])
    x = special(290, 300, torch.bfloat16, seed=4)
    x[266:] = torch.nan  # rows of no group
    agree(x, fmt, offsets, "grouped", threads=(1, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FEW, ids=lambda f: f.spec())
def test_dtypes_layouts_and_strides(fmt, dtype):
    x = special(150, 200, dtype)
    for layout in ("compact", "swizzled", "swizzled_8x4", "linear") if fmt.has_codes else ("compact", "linear"):
        agree(x, fmt, layout=layout)
    wide = torch.full((300, 211), torch.nan, dtype=dtype)
    wide[::2, 5:205] = x
    for y in (wide[::2, 5:205], x.mT.contiguous().mT, x[3:4].expand(150, -1), x[:, 7:8]):
        agree(y, fmt, what=y.stride())
    offsets = offsets_of([40, 0, 61])
    for layout in ("compact", "swizzled") if fmt.has_codes else ("compact",):
        agree(wide[::2, 5:205], fmt, offsets, layout, layout=layout)


@pytest.mark.parametrize("fmt", FEW, ids=lambda f: f.spec())
def test_groups_of_every_kind(fmt):
    for sizes, capacity in (([], 5), ([0, 0], 7), ([1] * 20, 20), ([200], 200), ([31, 33, 129, 0, 15, 17], 300)):
        x = special(capacity, 65, seed=3, rate=100)
        offsets = offsets_of(sizes)
        x[int(offsets[-1]) :] = torch.nan
        if int(offsets[-1]):
            agree(x, fmt, offsets, sizes)


@pytest.mark.parametrize("fmt", [f for f in FEW if not getattr(f, "stochastic", False)], ids=lambda f: f.spec())
def test_a_thousand_tiny_groups(fmt):
    """1024 groups of 4 rows: the first and the last of them as they are alone, and all of them in less than a processor's second.

    The reference takes about two seconds for MXFP8 here; compiled code takes milliseconds.
    """
    x = normal(4096, 256, seed=1, spread=3.0)
    offsets = torch.arange(1025) * 4
    start = time.process_time()
    got = bs.quantize_grouped(x, offsets, fmt, columnwise=True)
    elapsed = time.process_time() - start
    print(f"{fmt.label}: {1e3 * elapsed:.1f} ms")
    assert elapsed < 1
    for g in (0, 511, 1023):
        alone, own = bs.quantize(x[4 * g : 4 * g + 4], fmt, columnwise=True), got.group(g)
        for plane in ("rowwise", "columnwise"):
            assert_same(own.dequantize(plane=plane), alone.dequantize(plane=plane), f"group {g} {plane}")
            assert_same(own.planes[plane].data, alone.planes[plane].data, f"group {g} {plane}")


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.spec())
def test_random_bit_patterns(fmt):
    """float32 bit patterns of every kind, a million; then rows of one exponent each, all exponents."""
    for seed in range(4):
        x = torch.randint(-(2**31), 2**31, (512, 512), generator=seeded(seed)).to(torch.int32)
        agree(x.view(torch.float32), fmt, what=seed, threads=(1, 2))
        exponent = (torch.arange(512) % 255).to(torch.int32)[:, None] << 23
        agree(((x & -2139095041) | exponent).view(torch.float32), fmt, what=f"{seed} by exponent")


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FEW, ids=lambda f: f.spec())
def test_every_pair_of_small_shapes(fmt):
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 257):
        for columns in (1, 2, 15, 16, 17, 31, 32, 33, 127, 255, 256, 257, 300):
            agree(special(rows, columns, seed=rows, rate=50), fmt, what=(rows, columns))
