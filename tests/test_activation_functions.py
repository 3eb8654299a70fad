"""exp, sigmoid, tanh and the row sum that the activations are made of: accuracy, ends, independence of length."""

import math

import pytest
import torch

from blockscale.reference import activations as reference


def every_exponent():
    """Each float32 exponent and sign with 512 mantissas spread over the range, the ends included."""
    exponent = torch.arange(255, dtype=torch.int64)[:, None] << 23
    mantissa = torch.linspace(0, (1 << 23) - 1, 512, dtype=torch.float64).round().to(torch.int64)
    magnitude = (exponent | mantissa).flatten().to(torch.int32).view(torch.float32)
    return torch.cat([magnitude, -magnitude])


def ulps(got, exact):
    """Largest error in units of the spacing of float32 at the exact value."""
    _, exponent = torch.frexp(exact)
    spacing = torch.ldexp(torch.ones_like(exact), (exponent - 24).clamp(min=-149))
    return float(((got.double() - exact).abs() / spacing).max())


def test_exp_over_every_exponent():
    x = every_exponent()
    got, exact = reference.exp_f32(x), torch.exp(x.double())
    high, low = x > torch.tensor(88.72), x < torch.tensor(-103.97)
    assert high.sum() > 1000
    assert torch.isposinf(got[high]).all()
    assert low.sum() > 1000
    assert (got[low] == 0).all()
    assert not torch.signbit(got[low]).any()
    between = ~(high | low)
    assert between.sum() > 100_000
    assert ulps(got[between], exact[between]) < 1.0


def test_exp_in_its_range_and_at_its_ends():
    x = torch.linspace(-103.96, 88.71, 1_000_000)
    assert ulps(reference.exp_f32(x), torch.exp(x.double())) < 1.0
    inf, nan = math.inf, math.nan
    ends = torch.tensor([0.0, -0.0, inf, -inf, nan, 88.72, 88.72001, -103.97, -103.98])
    got = reference.exp_f32(ends)
    assert got[:4].tolist() == [1.0, 1.0, inf, 0.0]
    assert torch.isnan(got[4])
    assert 3.3e38 < got[5] < inf
    assert got[6] == inf
    assert got[7] == 2.0**-149
    assert got[8] == 0.0


@pytest.mark.parametrize(("name", "limit"), [("sigmoid", 2.5), ("tanh", 1.5)])
def test_sigmoid_and_tanh_over_every_exponent(name, limit):
    ours, theirs = getattr(reference, f"{name}_f32"), getattr(torch, name)
    x = torch.cat([every_exponent(), torch.linspace(-30, 30, 500_001)])
    if name == "sigmoid":
        assert (ours(x[x < -88.73]) == 0).all()
        x = x[x > -88.7]
    assert ulps(ours(x), theirs(x.double())) < limit
    special = ours(torch.tensor([math.inf, -math.inf, math.nan]))
    assert special[:2].tolist() == [1.0, 0.0 if name == "sigmoid" else -1.0]
    assert torch.isnan(special[2])


def test_bits_do_not_depend_on_length_or_threads():
    x = torch.linspace(-9, 9, 70_001)
    threads = torch.get_num_threads()
    for function in (reference.exp_f32, reference.sigmoid_f32, reference.tanh_f32):
        whole = function(x)
        assert torch.equal(torch.cat([function(part) for part in x[:99].split(3)]), whole[:99])
        try:
            torch.set_num_threads(1)
            assert torch.equal(function(x), whole)
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 127, 464])
def test_row_sums(width):
    terms = torch.randn(9, width, generator=torch.Generator().manual_seed(width))
    exact = terms.double().sum(1)
    alone = torch.cat([reference.row_sums(terms[i : i + 1].clone()) for i in range(9)])
    got = reference.row_sums(terms.clone())
    assert torch.equal(got, alone)
    assert ((got.double() - exact).abs() <= 1e-6 * terms.double().abs().sum(1)).all()
    assert reference.row_sums(torch.empty(3, 0)).tolist() == [0.0, 0.0, 0.0]
