"""Each activation and its gradients, on the input it was handed, against the table of formulas in float64, a group at a time."""

import itertools

import pytest
import torch
from support import ACTIVATION_BOUND, ACTIVATIONS, RECIPES, assert_same, normal, offsets_of, worst_group

import blockscale as bs
from blockscale.activations import parse
from blockscale.ops.activation_quantize import activation_backward_quantize, activation_quantize

SIZES, CAPACITY = [37, 0, 128, 1, 65], 250
OFFSETS = offsets_of(SIZES)
LIVE = int(OFFSETS[-1])


def split(h, interleave):
    """(a, b) of a GLU input."""
    width = interleave or h.shape[1] // 2
    runs = h.unflatten(1, (-1, 2, width))
    return runs[:, :, 0].flatten(1), runs[:, :, 1].flatten(1)


def joined(a, b, interleave):
    width = interleave or a.shape[1]
    return torch.stack((a.unflatten(1, (-1, width)), b.unflatten(1, (-1, width))), 2).flatten(1)


def table(name, h, s, p, interleave):
    """(y, dh, ds) in float64 by the formulas of the specification, default constants."""
    h, s, p = h.double(), s.double()[:, None], p.double()
    if name == "squared_relu":
        x = h.clamp(min=0)
        return x * x * s, 2 * p * s * x, (p * x * x).sum(1)
    a, b = split(h, interleave)
    if name == "swiglu":
        sig = torch.sigmoid(a)
        f, da, db = a * sig * b, (sig + a * sig * (1 - sig)) * b, a * sig
    elif name == "clamped_swiglu":
        gate, line = a.clamp(max=7), b.clamp(-7, 7) + 1
        sig = torch.sigmoid(1.702 * gate)
        f = gate * sig * line
        da = (a <= 7) * (sig + 1.702 * gate * sig * (1 - sig)) * line
        db = (b.abs() <= 7) * gate * sig
    else:
        t, u, sig = torch.tanh(a / 4), 25 * torch.tanh(b / 25), torch.sigmoid(a)
        g = 4 * t * sig
        f, da = g * u, ((1 - t * t) * sig + 4 * t * sig * (1 - sig)) * u
        db = g * (1 - torch.tanh(b / 25) ** 2)
    return f * s, joined(p * s * da, p * s * db, interleave), (p * f).sum(1)


def problem(name, dtype=torch.float32):
    h = normal(CAPACITY, parse(name).pre_width(24), seed=1, dtype=dtype) * 4
    s = torch.rand(CAPACITY, generator=torch.Generator().manual_seed(2)) + 0.1
    dy = normal(CAPACITY, 24, seed=3, spread=1.5, dtype=dtype)
    for t in (h, s, dy):
        t[LIVE:] = torch.nan
    return h, s, dy


def run(name, h, s, dy, interleave=None):
    h, s = h.clone().requires_grad_(), s.clone().requires_grad_()
    y = bs.activation(h, name, probs=s, interleave=interleave, offsets=OFFSETS)
    y.backward(dy)
    return y.detach(), h.grad, s.grad


CASES = [(name, i) for name, i in itertools.product(ACTIVATIONS, (None, 1, 4)) if name != "squared_relu" or i is None]


@pytest.mark.parametrize(("name", "interleave"), CASES)
def test_forward_and_gradients_against_float64(name, interleave):
    h, s, dy = problem(name)
    expected = table(name, h[:LIVE], s[:LIVE], dy[:LIVE], interleave)
    for what, got, want in zip(("y", "dh", "ds"), run(name, h, s, dy, interleave), expected, strict=True):
        assert (got[LIVE:] == 0).all(), what
        assert worst_group(got[:LIVE], want, OFFSETS) <= ACTIVATION_BOUND, what


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_half_precision_rounds_the_float32_result_once(name, dtype):
    h, s, dy = problem(name, dtype)
    y, dh, ds = run(name, h, s, dy)
    y32, dh32, ds32 = run(name, h.float(), s, dy.float())
    for got, want in ((y, y32.to(dtype)), (dh, dh32.to(dtype)), (ds, ds32)):
        assert_same(got, want, name)
    expected = table(name, h[:LIVE], s[:LIVE], dy[:LIVE], None)
    assert worst_group(ds[:LIVE], expected[2], OFFSETS) <= ACTIVATION_BOUND


@pytest.mark.parametrize("mutation", ["zero", "scale", "swap", "halves", "no_probs"])
@pytest.mark.parametrize("name", ["swiglu", "situ"])
def test_the_check_refuses(name, mutation):
    h, s, dy = problem(name)
    expected = table(name, h[:LIVE], s[:LIVE], dy[:LIVE], None)
    y, dh, _ = (t[:LIVE].clone() for t in run(name, h, s, dy))
    assert worst_group(dh, expected[1], OFFSETS) <= ACTIVATION_BOUND
    if mutation == "halves":  # gate and linear part exchanged
        y, dh, _ = (t[:LIVE] for t in run(name, torch.cat(split(h, None)[::-1], 1), s, dy))
    elif mutation == "no_probs":
        y, dh, _ = (t[:LIVE] for t in run(name, h, torch.ones_like(s), dy))
    elif mutation == "swap":
        y, dh = (torch.cat((t[37:165], t[:37], t[165:])) for t in (y, dh))
    else:
        y, dh = (t * (0.0 if mutation == "zero" else 1.00001) for t in (y, dh))
    assert worst_group(y, expected[0], OFFSETS) > 4 * ACTIVATION_BOUND
    assert worst_group(dh, expected[1], OFFSETS) > 4 * ACTIVATION_BOUND


@pytest.mark.parametrize("recipe", ["mxfp8_hybrid", "nvfp4", "fp8_current", "fp8_block"])
@pytest.mark.parametrize(("name", "interleave"), [("swiglu", 4), ("squared_relu", None)])
def test_activation_joined_with_quantization(name, interleave, recipe):
    """The operators that quantize at once give the bits of the two steps."""
    h, s, dy = problem(name, torch.bfloat16)
    y, dh, ds = run(name, h, s, dy, interleave)
    fmt, grad, rng = RECIPES[recipe].input, RECIPES[recipe].gradient, torch.tensor([5, 2])
    got = activation_quantize(h, OFFSETS, name, fmt, probs=s, interleave=interleave, columnwise=True)
    want = bs.quantize_grouped(y, OFFSETS, fmt, columnwise=True)
    back, got_ds, dbias = activation_backward_quantize(dy, h, OFFSETS, name, grad, probs=s, interleave=interleave, rng=rng)
    want_back = bs.quantize_grouped(dh, OFFSETS, grad, columnwise=True, rng=rng)
    for one, other in ((got, want), (back, want_back)):
        assert one.format == other.format
        for which in ("rowwise", "columnwise"):
            for mine, theirs in zip(getattr(one, which).tensors(), getattr(other, which).tensors(), strict=True):
                assert_same(mine, theirs, which)
    assert_same(got_ds, ds, "ds")
    sums = torch.stack([dh[a:b].double().sum(0) for a, b in itertools.pairwise(OFFSETS.tolist())])
    assert worst_group(dbias, sums) <= ACTIVATION_BOUND
