"""Run the activation kernels in Triton's interpreter on small tensors and compare them with the reference.

Every byte of activations, gradients and planes; ds and dbias within the bound of their kernels. As ``interpreted.py``:
``python interpreted_activation.py FIRST STEP``; STEP 0 runs every combination.
"""

import itertools
import sys

import torch

import blockscale as bs
from blockscale.activations import ClampedSwiglu, Situ, parse
from blockscale.ops.launch import activation as launch
from blockscale.ops.launch import sums
from blockscale.reference import activations as reference
from blockscale.reference import quantize as reference_quantize

FORMATS = [bs.MXFP8(), bs.MXFP8("e5m2", nan="ignore"), bs.MXFP8(scale_rounding="floor"), bs.MXFP8(block=(32, 32))]
#: activation, interleave, columns of the result
ACTS = [
    ("swiglu", None, 64),
    ("clamped_swiglu", 8, 64),
    ("squared_relu", None, 70),
    ("situ", 32, 64),
    ("swiglu", 1, 128),
    (ClampedSwiglu(3.0, 1.1, 0.25), None, 33),
    (Situ(3.0, 7.0), 24, 48),
    ("swiglu", 16, 192),
]
#: rows, offsets (the last one of rows that are live)
ROWS = [(70, [0, 0, 33, 34, 60]), (5, [0, 5]), (0, [0, 0]), (12, [0]), (33, [0, 0, 0])]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
PLANES = [(True, True), (True, False), (False, True)]
#: the last ones are where sigmoid, tanh and the clamps change their way
SPECIAL = torch.tensor(
    [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-38, -1e-40, 3.3e38, 2e-36, 6e4]
    + [-40.0, -87.5, -88.5, -88.7, -89.0, 88.7, 104.0, 0.625, -0.624, 7.0, -7.0625, 20.0]
)


def tensor(rows, columns, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp2(torch.randint(-6, 6, (rows, 1), generator=generator).float())
    if rows:
        places = torch.randint(0, rows * columns, (rows * columns // 30,), generator=generator)
        x.view(-1)[places] = SPECIAL[torch.randint(0, len(SPECIAL), places.shape, generator=generator)]
    return x.to(dtype)


def same(got, want, what):
    """Bits, but for what a NaN carries."""
    assert got.dtype == want.dtype, what
    got = got.cpu()
    if got.is_floating_point():
        got, want = (t.float().masked_fill(t.isnan(), 9.0).view(torch.int32).where(~t.isnan(), 0) for t in (got, want))
    assert torch.equal(got, want), (what, (got != want).nonzero()[:3].tolist())


def close(got, want, size, terms, what):
    """A sum of ``terms`` terms, whose magnitudes sum to ``size``: see ``kernels.sums``, and as much again for the reference."""
    got = got.cpu()
    known = torch.isfinite(size) & (size < 1e37)
    bound = 2 * (96 + terms / 1024) * 2**-24 * size
    assert got.dtype == torch.float32, what
    assert ((got - want).abs() <= bound)[known].all(), what
    assert torch.equal(got.isnan(), want.isnan()), what


def planes(fmt, result, offsets, asked, layout, call, device):
    want = reference_quantize.quantize_grouped(result, offsets, fmt, *asked, layout, None, None)
    poisoned = [torch.full_like(t, 0x7F if t.dtype == torch.uint8 else float("nan"), device=device) for t in want]
    others = call(poisoned)
    for n, (a, b) in enumerate(zip(poisoned, want, strict=True)):
        same(a, b, (n, fmt.spec(), layout, asked))
    return others


def compare(n, act, rows, dtype, fmt, asked, layout, with_probs, device="cpu"):
    act, interleave, width = parse(act[0]), *act[1:]
    rows, offsets = rows[0], torch.tensor(rows[1])
    h, dy = tensor(rows, act.pre_width(width), dtype, n), tensor(rows, width, dtype, n + 1)
    probs = torch.rand(rows, generator=torch.Generator().manual_seed(n)) if with_probs else None
    end = int(offsets[-1])
    if with_probs and end > 4:
        probs[1], probs[3] = float("inf"), float("nan")
    for t in (h, dy, *([probs] if with_probs else [])):
        t[end:] = float("nan")
    live, what = torch.arange(rows) < end, (n, act.spec(), interleave, width, rows, dtype)
    y = reference.activation_forward(h, act, probs, interleave, live)
    dh, ds = reference.activation_backward(dy, h, act, probs, interleave, live)
    there = [t if t is None else t.to(device) for t in (h, dy, probs, offsets)]
    h_there, dy_there, probs_there, offsets_there = there
    same(launch.forward(h_there, act, probs_there, interleave, offsets_there), y, what)
    got_dh, got_ds = launch.backward(dy_there, h_there, act, probs_there, interleave, offsets_there)
    same(got_dh, dh, what)
    if with_probs:
        terms = row_terms(dy, h, act, interleave, live)
        close(got_ds, ds, terms, width, what)
    args = (act, fmt, probs_there, interleave, *asked, layout)
    planes(fmt, y, offsets, asked, layout, lambda out: launch.quantize(h_there, offsets_there, *args, out), device)
    sizes, bias = group_sums(dh.abs(), offsets), group_sums(dh, offsets)
    close(sums.bias_grad(dh.to(device), offsets_there), bias, sizes, rows, what)
    if launch.against_joining(act, fmt, interleave, width, True) is None:
        call = lambda out: launch.backward_quantize(dy_there, h_there, offsets_there, *args, True, out)  # noqa: E731
        _, joined_ds, joined_bias = planes(fmt, dh, offsets, asked, layout, call, device)
        close(joined_bias, bias, sizes, rows, what)
        if with_probs:
            close(joined_ds, ds, terms, width, what)
        else:
            assert joined_ds is None


def row_terms(dy, h, act, interleave, live):
    """The sum of the magnitudes that ds adds up: |p| times the activation without its probability."""
    y = reference.activation_forward(h.float(), act, None, interleave, live)
    return (dy.float().masked_fill(~live[:, None], 0.0) * y).abs().sum(1)


def group_sums(x, offsets):
    """float32 (groups, columns)."""
    ends = offsets.tolist()
    rows = [x[a:b].float().sum(0) for a, b in itertools.pairwise(ends)]
    return torch.stack(rows) if rows else torch.zeros(0, x.shape[1])


def cases():
    """Each activation with each shape of rows, the other choices in turn."""
    for n, (act, rows) in enumerate(itertools.product(ACTS, ROWS)):
        choices = DTYPES[n % 3], FORMATS[n % 4], PLANES[n // 3 % 3], ("compact", "swizzled")[n // 2 % 2], n % 5 != 4
        yield n, act, rows, *choices


def every_case():
    """All combinations of what matters to the kernels."""
    layouts, probs = ("compact", "swizzled"), (True, False)
    for n, case in enumerate(itertools.product(ACTS, ROWS[:2], DTYPES, FORMATS, PLANES, layouts, probs)):
        yield n, *case


def every_bfloat16():
    """Sigmoid and tanh of all bfloat16 numbers, and of float32 ones close to where results leave the normal numbers."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    edges = torch.cat([torch.linspace(a, b, 4096) for a, b in ((-88.8, -87.2), (0.62, 0.63), (-41.0, -39.0), (16.0, 18.0))])
    a = torch.cat([x, edges, -edges]).view(-1, 128)
    for act, b in (("swiglu", 1.0), ("situ", 1.5), (Situ(1.0, 1.0), 40.0)):
        h = torch.cat([a, torch.full_like(a, b)], 1)
        same(launch.forward(h, parse(act), None, None, None), reference.activation_forward(h, parse(act), None, None, None), act)


def main():
    first, step = map(int, sys.argv[1:])
    chosen = list(every_case() if step == 0 else cases())
    chosen = chosen[first::8] if step == 0 else chosen[first::step]
    for case in chosen:
        compare(*case)
    if first == 0:
        every_bfloat16()
    print(len(chosen))


if __name__ == "__main__":
    main()
