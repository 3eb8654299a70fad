"""The activations: accuracy of their functions, gradients against float64, NaN, dead rows, messages, opcheck."""

import dataclasses
import math

import pytest
import torch
from torch.library import opcheck

from blockscale.activations import ClampedSwiglu, Situ, SquaredRelu, Swiglu, parse
from blockscale.ops.activation import activation
from blockscale.reference import activations as reference

ALL = ("swiglu", "clamped_swiglu", "squared_relu", "situ")
GLUS = ("swiglu", "clamped_swiglu", "situ")


def plain(h, name, s=None, interleave=None):
    """The mathematical formula in h's dtype, for autograd."""
    if name == "squared_relu":
        y = torch.relu(h) ** 2
    else:
        runs = h.unflatten(1, (-1, 2, interleave or h.shape[1] // 2))
        a, b = runs[:, :, 0].flatten(1), runs[:, :, 1].flatten(1)
        if name == "swiglu":
            y = a * torch.sigmoid(a) * b
        elif name == "clamped_swiglu":
            gate = a.clamp(max=7.0)
            y = gate * torch.sigmoid(1.702 * gate) * (b.clamp(-7.0, 7.0) + 1.0)
        else:
            y = 4.0 * torch.tanh(a / 4.0) * torch.sigmoid(a) * 25.0 * torch.tanh(b / 25.0)
    return y if s is None else y * s[:, None]


def make(name, rows=37, width=48, dtype=torch.float32, seed=0, spread=4.0):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(rows, parse(name).pre_width(width), generator=generator) * spread
    s = torch.rand(rows, generator=generator) + 0.1
    dy = torch.randn(rows, width, generator=generator)
    return h.to(dtype), s, dy.to(dtype)


def relative(got, expected):
    """Relative distance in the Frobenius norm; the expected tensor must not be zero."""
    assert expected.norm() > 0
    return float((got.double() - expected).norm() / expected.norm())


def run(h, name, s=None, dy=None, interleave=None, offsets=None):
    """(y, dh, ds) of the operator."""
    h = h.detach().clone().requires_grad_()
    s = None if s is None else s.detach().clone().requires_grad_()
    y = activation(h, name, probs=s, interleave=interleave, offsets=offsets)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return y.detach(), h.grad, None if s is None else s.grad


# values and gradients


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize(("name", "interleave"), [*((name, None) for name in ALL), *((name, 4) for name in GLUS)])
def test_forward_and_gradients_against_float64(name, interleave, with_probs):
    h, s, dy = make(name)
    got = run(h, name, s if with_probs else None, dy, interleave)
    h64, s64 = h.double().requires_grad_(), s.double().requires_grad_()
    y64 = plain(h64, name, s64 if with_probs else None, interleave)
    y64.backward(dy.double())
    assert relative(got[0], y64.detach()) <= 3e-7
    assert relative(got[1], h64.grad) <= 1e-6
    if with_probs:
        assert relative(got[2], s64.grad) <= 1e-6


def test_swiglu_by_hand():
    h = torch.tensor([[1.0, 0.0, 3.0, 5.0], [2.0, -1.0, -1.0, 2.0]])
    s = torch.tensor([0.5, 2.0])
    sig1, sig2, sig_1 = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2)), 1 / (1 + math.e)
    expected = torch.tensor([[1 * sig1 * 3 * 0.5, 0.0], [2 * sig2 * -1 * 2, -1 * sig_1 * 2 * 2]])
    torch.testing.assert_close(activation(h, "swiglu", probs=s), expected, rtol=1e-6, atol=0)
    paired = h[:, [0, 2, 1, 3]]
    assert torch.equal(activation(paired, "swiglu", probs=s, interleave=1), activation(h, "swiglu", probs=s))


def test_options_change_the_result():
    h = torch.tensor([[3.0, 2.0]])
    gate = 2.0 / (1 + math.exp(-0.5 * 2.0))
    got = activation(h, ClampedSwiglu(limit=2.0, alpha=0.5, offset=0.25))
    assert got.item() == pytest.approx(gate * 2.25, rel=1e-6)
    got = activation(h, Situ(beta1=2.0, beta2=3.0))
    expected = 2 * math.tanh(1.5) / (1 + math.exp(-3)) * 3 * math.tanh(2 / 3)
    assert got.item() == pytest.approx(expected, rel=1e-6)


def test_squared_relu_by_hand():
    y, dh, ds = run(torch.tensor([[-2.0, 3.0, 0.5]]), "squared_relu", torch.tensor([0.25]))
    assert y.tolist() == [[0.0, 2.25, 0.0625]]
    assert dh.tolist() == [[0.0, 1.5, 0.25]]
    assert ds.tolist() == [9.25]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_rounding_to_the_modules_dtype(name, dtype):
    h, s, dy = make(name, dtype=dtype)
    y, dh, ds = run(h, name, s, dy)
    y32, dh32, ds32 = run(h.float(), name, s, dy.float())
    assert y.dtype == dh.dtype == dtype
    assert ds.dtype == torch.float32
    assert torch.equal(y, y32.to(dtype))
    assert torch.equal(dh, dh32.to(dtype))
    assert torch.equal(ds, ds32)


@pytest.mark.parametrize("name", ALL)
def test_no_probs_is_ones(name):
    h, s, dy = make(name)
    without, ones = run(h, name, None, dy), run(h, name, torch.ones_like(s), dy)
    assert torch.equal(without[0], ones[0])
    assert torch.equal(without[1], ones[1])
    assert without[2] is None
    assert ones[2].abs().min() > 0


@pytest.mark.parametrize("name", ALL)
def test_rows_and_chunks_are_independent(name, monkeypatch):
    h, s, dy = make(name, rows=23)
    whole = run(h, name, s, dy)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 5 * 48)
    for a, b in zip(whole, run(h, name, s, dy), strict=True):
        assert torch.equal(a, b)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    for a, b in zip(whole, run(h[order], name, s[order], dy[order]), strict=True):
        assert torch.equal(a[order], b)


@pytest.mark.parametrize("name", ALL)
def test_strided_inputs(name):
    h, s, dy = make(name)
    wide = torch.full((h.shape[0], h.shape[1] + 3), torch.nan)
    wide[:, 1:-2] = h
    got = run(h, name, s, dy)
    y = activation(wide[:, 1:-2], name, probs=s)
    dh, ds = torch.ops.blockscale.activation_backward(dy.t().contiguous().t(), wide[:, 1:-2], s, None, name, 0)
    assert torch.equal(y, got[0])
    assert torch.equal(dh, got[1])
    assert torch.equal(ds, got[2])


# NaN and dead rows


@pytest.mark.parametrize("name", GLUS)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("other", [0.5, 100.0])
def test_nan_propagates_in_a_glu(name, half, other):
    h = torch.full((2, 2), other)
    h[1, half] = torch.nan
    y, dh, ds = run(h, name, torch.ones(2))
    assert torch.isnan(y[1]).all()
    assert torch.isnan(ds[1])
    assert torch.isnan(dh[1, 0])  # d/da has both a and b
    if half == 0:
        assert torch.isnan(dh[1, 1])  # d/db has a only, also where b is clamped
    assert torch.isfinite(y[0]).all()
    assert torch.isfinite(dh[0]).all()
    assert y[0].item() != 0


def test_nan_propagates_in_squared_relu():
    y, dh, ds = run(torch.tensor([[1.0, torch.nan], [1.0, -1.0]]), "squared_relu", torch.ones(2))
    assert torch.isnan(y).tolist() == [[False, True], [False, False]]
    assert torch.isnan(dh).tolist() == [[False, True], [False, False]]
    assert torch.isnan(ds).tolist() == [True, False]


@pytest.mark.parametrize("name", ALL)
def test_nan_in_probs_and_upstream(name):
    h, s, dy = make(name, rows=3, width=8, spread=1.0)
    h = h.abs()
    s[1] = torch.nan
    dy[2, 5] = torch.nan
    y, dh, ds = run(h, name, s, dy)
    assert torch.isnan(y).all(1).tolist() == [False, True, False]
    assert torch.isnan(dh).sum(1).tolist() == [0, dh.shape[1], dh.shape[1] // 8]
    assert torch.isnan(ds).tolist() == [False, False, True]


def test_clamped_swiglu_masks():
    a = torch.tensor([[6.9, 7.0, 7.1, -50.0]]).repeat(3, 1)
    b = torch.tensor([[7.0], [7.1], [-7.1]]).expand(3, 4)
    _, dh, _ = run(torch.cat([a, b], 1), "clamped_swiglu")
    assert (dh[:, :4] != 0).tolist() == [[True, True, False, True]] * 3
    assert (dh[:, 4:] != 0).all(1).tolist() == [True, False, False]
    assert (dh[1:, 4:] == 0).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 3.0])
def test_dead_rows(name, poison):
    h, s, dy = make(name, rows=20)
    expected = run(h[:13], name, s[:13], dy[:13])
    for tensor in (h, s, dy):
        tensor[13:] = poison
    got = run(h, name, s, dy, offsets=torch.tensor([0, 4, 4, 13]))
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a[:13], b)
        assert (a[13:] == 0).all()
        assert not torch.signbit(a[13:]).any()


@pytest.mark.parametrize("name", ALL)
def test_live_mask_of_the_reference(name):
    """The form that devices use: a mask, any rows, the same bits."""
    h, s, dy = make(name, rows=20)
    live = torch.arange(20) % 3 != 1
    expected = run(h[live], name, s[live], dy[live])
    for tensor in (h, s, dy):
        tensor[~live] = torch.nan
    act = parse(name)
    y = reference.activation_forward(h, act, s, None, live)
    dh, ds = reference.activation_backward(dy, h, act, s, None, live)
    for a, b in zip((y, dh, ds), expected, strict=True):
        assert torch.equal(a[live], b)
        assert (a[~live] == 0).all()
        assert not torch.signbit(a[~live]).any()


# names, arguments, operators


def test_specs_round_trip():
    for act in (Swiglu(), ClampedSwiglu(), ClampedSwiglu(0.1, 1e-3, -2.5), SquaredRelu(), Situ(), Situ(1.5, 1e9)):
        assert parse(act.spec()) == act
        assert parse(act) is act
    assert [parse(name).is_glu for name in ALL] == [True, True, False, True]
    assert [parse(name).pre_width(96) for name in ALL] == [192, 192, 96, 192]
    assert parse("clamped_swiglu") == ClampedSwiglu(7.0, 1.702, 1.0)
    assert parse("situ") == Situ(4.0, 25.0)
    assert parse("clamped_swiglu:limit=3") == ClampedSwiglu(limit=3.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Situ().beta1 = 2.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parse("gelu"), r"'gelu' is not one of .*'swiglu'"),
        (lambda: parse("swiglu:limit=1"), r"option 'limit' is not one of \[\]"),
        (lambda: parse("situ:beta1=x"), r"beta1='x' is not a number"),
        (lambda: parse("situ:beta1=nan"), r"beta1=nan .* finite"),
        (lambda: ClampedSwiglu(limit=-1.0), r"limit=-1.0 .* above 0"),
        (lambda: ClampedSwiglu(offset=math.inf), r"offset=inf .* finite"),
        (lambda: Situ(beta2=0.0), r"beta2=0.0 .* above 0"),
        (lambda: activation(torch.ones(4), "swiglu"), r"h has shape \(4,\)"),
        (lambda: activation(torch.ones(4, 5), "swiglu"), r"h has 5 columns; .* multiple of 2"),
        (lambda: activation(torch.ones(4, 12), "swiglu", interleave=4), r"12 columns; .*interleave=4.* multiple of 8"),
        (lambda: activation(torch.ones(4, 12), "swiglu", interleave=0), r"interleave=0 .* at least 1"),
        (lambda: activation(torch.ones(4, 12), "squared_relu", interleave=2), r"interleave=2 .* no GLU"),
        (lambda: activation(torch.ones(4, 2), "swiglu", probs=torch.ones(3)), r"probs has shape \(3,\).*\(4,\)"),
        (lambda: activation(torch.ones(4, 2), "swiglu", offsets=torch.tensor([[0]])), r"offsets has shape \(1, 1\)"),
        (lambda: activation(torch.ones(4, 2), "swiglu", offsets=torch.tensor([0, 5])), r"offsets\[-1\]=5: .* the 4 rows"),
        (lambda: activation(torch.ones(4, 2), "swiglu", offsets=torch.tensor([0, -1])), r"offsets decrease .*offsets\[1\]=-1"),
    ],
)
def test_wrong_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parse(3), r"act=3 is a int"),
        (lambda: Situ(beta1="4"), r"beta1='4' is a str"),
        (lambda: activation(torch.ones(4, 2).double(), "swiglu"), r"h has dtype torch.float64"),
        (lambda: activation(torch.ones(4, 2), "swiglu", probs=torch.ones(4).bfloat16()), r"probs has dtype .*float32"),
        (lambda: activation(torch.ones(4, 2), "swiglu", offsets=torch.tensor([0, 4]).int()), r"offsets .*torch.int64"),
    ],
)
def test_wrong_types(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize(("name", "interleave", "dtype"), [
    ("swiglu", 0, torch.float32),
    ("clamped_swiglu", 4, torch.bfloat16),
    ("squared_relu", 0, torch.bfloat16),
    ("situ", 2, torch.float32),
])  # fmt: skip
def test_opcheck(rows, name, interleave, dtype):
    h, s, dy = make(name, rows=rows, width=8, dtype=dtype)
    offsets = torch.tensor([0, min(rows, 3)])
    for probs, end in ((None, None), (s, offsets)):
        opcheck(torch.ops.blockscale.activation_backward.default, (dy, h, probs, end, name, interleave))
        grad = None if probs is None else probs.clone().requires_grad_()
        opcheck(torch.ops.blockscale.activation.default, (h.clone().requires_grad_(), grad, end, name, interleave))


def test_no_rows():
    for name in ALL:
        h, s, _ = make(name, rows=0, dtype=torch.bfloat16)
        y, dh, ds = run(h, name, s, offsets=torch.tensor([0, 0, 0]))
        assert y.shape == (0, 48)
        assert dh.shape == h.shape
        assert ds.shape == (0,)
        assert y.dtype == torch.bfloat16


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [*ALL, Situ(beta1=2.0), SquaredRelu()])
def test_compiles_without_a_break(name):
    h, s, _ = make(name)
    call = torch.compile(lambda h, s: activation(h, name, probs=s), fullgraph=True, backend="aot_eager")
    h, s = h.requires_grad_(), s.requires_grad_()
    expected = run(h, name, s)
    y = call(h, s)
    y.sum().backward()
    assert torch.equal(y, expected[0])
    assert torch.equal(h.grad, expected[1])
    assert torch.equal(s.grad, expected[2])
