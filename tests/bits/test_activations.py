"""Activations, forward and backward, against the oracle: y and dh by bits, ds within 1e-6."""

import itertools

import numpy as np
import pytest
import torch
from oracle import activations, inputs
from oracle.check import assert_same

import blockscale as bs

F32 = np.float32
CLASSES = {"swiglu": "Swiglu", "clamped_swiglu": "ClampedSwiglu", "squared_relu": "SquaredRelu", "situ": "Situ"}
EVERY = [
    (name, interleave, probs, dtype)
    for name, interleave, probs, dtype in itertools.product(CLASSES, (None, 32), (False, True), inputs.DTYPES)
    if activations.GLU[name] or interleave is None
]


POINTS = np.array([
    np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-39, 0.624999, 0.625, 2.5, 7.0, -7.0, 7.0000005, 88.72, -88.72, 88.720009,
    103.97, -103.97, -103.98, 15.625, 1e4, -1e4, 3e38, -3e38, 1.0, -1.0,
], dtype=F32)  # fmt: skip


def every_pair_of_points(width: int) -> np.ndarray:
    """(rows, 2*width): each pair (a, b) of the values that matter, a in the first half and b in the second."""
    a, b = (half.reshape(-1) for half in np.meshgrid(POINTS, POINTS))
    padding = -len(a) % width
    return np.concatenate([np.pad(half, (0, padding)).reshape(-1, width) for half in (a, b)], axis=1)


def compare(h, name, interleave=None, probs=False, dtype="float32", seed=0, **options) -> None:
    """Forward and backward through autograd, then everything against the oracle."""
    rng = np.random.default_rng((seed, 5))
    act = getattr(bs.activations, CLASSES[name])(**options)
    h = torch.from_numpy(h).to(inputs.DTYPES[dtype])
    exact = h.float().numpy()
    s = rng.uniform(0, 1, h.shape[0]).astype(F32) if probs else None
    h.requires_grad_()
    s_torch = torch.from_numpy(s.copy()).requires_grad_() if probs else None
    y = bs.activation(h, act, probs=s_torch, interleave=interleave)
    assert y.dtype == h.dtype
    assert_same(y, activations.forward(exact, name, s, interleave, dtype, **options), f"{name} y")
    upstream = torch.from_numpy(rng.standard_normal(y.shape).astype(F32)).to(h.dtype)
    y.backward(upstream)
    arguments = (exact, upstream.float().numpy(), name, s, interleave, dtype)
    dh, ds, size = activations.backward(*arguments, **options)
    assert_same(h.grad, dh, f"{name} dh")
    if probs:
        got = s_torch.grad.double().numpy()
        comparable = np.isfinite(size) & (size < 1e37)
        assert np.all(np.abs(got[comparable] - ds[comparable]) <= 1e-6 * size[comparable])
        assert np.isnan(got[np.isnan(size)]).all()


@pytest.mark.parametrize(("name", "interleave", "probs", "dtype"), EVERY)
def test_ordinary_values(name, interleave, probs, dtype):
    rng = np.random.default_rng(1)
    for rows, width in ((1, 64), (33, 192), (70, 128)):
        compare((rng.standard_normal((rows, width)) * 3).astype(F32), name, interleave, probs, dtype)
        compare((rng.standard_normal((rows, width)) * 30).astype(F32), name, interleave, probs, dtype)


@pytest.mark.parametrize(("name", "interleave", "probs", "dtype"), EVERY)
def test_values_over_the_whole_range(name, interleave, probs, dtype):
    for seed, kind in enumerate(("wide", "extreme", "special", "tiny")):
        compare(inputs.values(kind, 40, 128, seed), name, interleave, probs, dtype, seed)


@pytest.mark.parametrize(("name", "interleave", "probs", "dtype"), EVERY)
def test_values_that_matter(name, interleave, probs, dtype):
    compare(every_pair_of_points(64), name, interleave, probs, dtype, 3)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_input(name, dtype):
    pattern = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(inputs.DTYPES[dtype]).float().numpy()
    pattern = pattern.reshape(512, 128)
    if activations.GLU[name]:
        other = np.full((512, 128), 1.5, F32)
        compare(np.concatenate([other, pattern], axis=1), name, dtype=dtype)
        pattern = np.concatenate([pattern, other], axis=1)
    compare(pattern, name, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_many_float32_values(name):
    """8 million inputs over the range in which the exponential is neither 0 nor infinite."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        h = rng.uniform(-110, 110, (1000, 1000)) * rng.choice([1, 0.1, 0.01], (1000, 1000))
        compare(h.astype(F32), name, None, True, seed=seed)


@pytest.mark.parametrize(("name", "options"), [
    ("clamped_swiglu", {"limit": 5.0, "alpha": 1.1, "offset": 0.3}),
    ("clamped_swiglu", {"limit": 10.0, "alpha": 1.0, "offset": 0.0}),
    ("situ", {"beta1": 3.0, "beta2": 7.0}),
])  # fmt: skip
def test_options(name, options):
    compare((np.random.default_rng(2).standard_normal((20, 64)) * 5).astype(F32), name, 32, True, "bfloat16", **options)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 31, 33])
def test_the_bits_do_not_depend_on_the_length(length):
    """A vectorised body and its tail must agree: each element alone gives what it gives in a row."""
    h = (np.random.default_rng(4).standard_normal((1, 2 * length)) * 4).astype(F32)
    for name in CLASSES:
        compare(h, name)


@pytest.mark.parametrize("interleave", [1, 2, 8, 16, 48])
def test_interleaves(interleave):
    h = (np.random.default_rng(interleave).standard_normal((5, 96 * 2)) * 3).astype(F32)
    for name in ("swiglu", "clamped_swiglu", "situ"):
        compare(h, name, interleave, True, "bfloat16")


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("stride", inputs.STRIDES)
def test_strides(name, stride):
    h, exact = inputs.tensor("normal", 21, 64, 8, "bfloat16", stride)
    h.requires_grad_()
    y = bs.activation(h, getattr(bs.activations, CLASSES[name])())
    upstream, p = inputs.tensor("normal", 21, y.shape[1], 9, "bfloat16", stride)
    (dh,) = torch.autograd.grad(y, h, upstream)
    assert_same(y, activations.forward(exact, name, dtype="bfloat16"), f"{name} y")
    assert_same(dh, activations.backward(exact, p, name, dtype="bfloat16")[0], f"{name} dh")


@pytest.mark.parametrize("name", CLASSES)
def test_rows_past_the_last_offset(name):
    rng = np.random.default_rng(6)
    h = (rng.standard_normal((50, 64)) * 3).astype(F32)
    h[37:] = np.nan
    s = rng.uniform(0, 1, 50).astype(F32)
    s[37:] = np.nan
    torch_h, torch_s = (torch.from_numpy(v.copy()).requires_grad_() for v in (h, s))
    act = getattr(bs.activations, CLASSES[name])()
    y = bs.activation(torch_h, act, probs=torch_s, offsets=torch.tensor([0, 5, 5, 37]))
    p = rng.standard_normal(y.shape).astype(F32)
    p[37:] = np.nan
    y.backward(torch.from_numpy(p))
    assert_same(y[:37], activations.forward(h[:37], name, s[:37]))
    dh, ds, size = activations.backward(h[:37], p[:37], name, s[:37])
    assert_same(torch_h.grad[:37], dh)
    assert np.all(np.abs(torch_s.grad[:37].double().numpy() - ds) <= 1e-6 * size)
    for tail in (y[37:], torch_h.grad[37:], torch_s.grad[37:]):
        assert_same(tail.detach(), np.zeros(tail.shape, F32), "dead rows")


def test_a_nan_gives_nan():
    for cls in CLASSES.values():
        h = torch.ones(2, 4)
        h[0, 0] = float("nan")
        h.requires_grad_()
        y = bs.activation(h, getattr(bs.activations, cls)())
        y.sum().backward()
        assert y[0, 0].isnan()
        assert h.grad[0, 0].isnan()
        assert y.isnan().sum() == 1
        assert not h.grad[1].isnan().any()


def test_exp_against_the_true_value_through_swiglu():
    """The written-out exponential is accurate: swiglu(a, 1) within 2 ulp-ish of float64."""
    a = np.linspace(-30, 30, 6000).astype(F32)
    h = torch.from_numpy(np.stack([a, np.ones_like(a)], axis=1))
    y = bs.activation(h, bs.activations.Swiglu()).numpy()[:, 0].astype(np.float64)
    exact = a / (1 + np.exp(-a.astype(np.float64)))
    assert np.all(np.abs(y - exact) <= 4e-7 * np.abs(exact))
