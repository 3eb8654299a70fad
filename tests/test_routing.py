"""The router, permute and unpermute operators: choice, NaN, gradients against float64, inverses, messages, opcheck."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from blockscale.ops.routing import permute, router, unpermute
from blockscale.reference import routing as reference

CASES = [(score, normalize) for score in ("softmax", "sigmoid", "sqrt_softplus") for normalize in (False, True)]
NAN = math.nan


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def plain_router(logits, ids, score, normalize):
    """(probs, scores) by the formula, for a given choice, in the dtype of logits."""
    if score == "sqrt_softplus":
        scores = torch.log1p(torch.exp(logits)).sqrt()
    else:
        scores = torch.softmax(logits, 1) if score == "softmax" else torch.sigmoid(logits)
    probs = scores.gather(1, ids)
    return (probs / probs.sum(1, keepdim=True) if normalize else probs), scores


def relative(got, expected):
    assert expected.norm() > 0
    return float((got.double() - expected).norm() / expected.norm())


# the router


@pytest.mark.parametrize(("score", "normalize"), CASES)
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (36, 4), (60, 8), (256, 8), (512, 1)])
def test_choice_and_values(score, normalize, experts, k):
    logits = torch.randn(50, experts, generator=seeded(experts)) * 3
    ids, probs, scores = router(logits, k, score, normalize)
    assert ids.dtype == torch.int64
    assert probs.dtype == scores.dtype == torch.float32
    assert torch.equal(ids, logits.topk(k, 1).indices)
    probs64, scores64 = plain_router(logits.double(), ids, score, normalize)
    torch.testing.assert_close(scores.double(), scores64, rtol=3e-6, atol=0)
    torch.testing.assert_close(probs.double(), probs64, rtol=3e-6, atol=0)


def test_values_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0), 0.0], [math.log(2.0), 0.0, math.log(5.0)]])
    ids, probs, scores = router(logits, 2, "softmax", False)
    assert ids.tolist() == [[1, 0], [2, 0]]
    torch.testing.assert_close(scores, torch.tensor([[0.2, 0.6, 0.2], [0.25, 0.125, 0.625]]))
    torch.testing.assert_close(probs, torch.tensor([[0.6, 0.2], [0.625, 0.25]]))
    _, probs, _ = router(logits, 2, "softmax", True)
    torch.testing.assert_close(probs, torch.tensor([[0.75, 0.25], [5 / 7, 2 / 7]]))
    _, probs, _ = router(logits, 2, "sigmoid", True)
    torch.testing.assert_close(probs, torch.tensor([[0.6, 0.4], [5 / 9, 4 / 9]]))


@pytest.mark.parametrize("score", reference.SCORES)
def test_ties_go_to_the_lowest_expert(score):
    logits = torch.zeros(2, 300)
    logits[0, [7, 250, 299]] = 1.0
    logits[1, 100] = -1.0
    ids, _, _ = router(logits, 5, score, True)
    assert ids.tolist() == [[7, 250, 299, 0, 1], [0, 1, 2, 3, 4]]
    saturated = torch.tensor([[50.0, 90.0, 40.0, 89.0]])  # all sigmoids are 1
    assert router(saturated, 3, "sigmoid", True)[0].tolist() == [[0, 1, 2]]
    assert router(saturated, 3, "softmax", True)[0].tolist() == [[1, 3, 0]]


@pytest.mark.parametrize(("score", "normalize"), CASES)
@pytest.mark.parametrize("where", [[0], [3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_nan_logits(score, normalize, where):
    """C16: ids are distinct, a NaN is chosen last, and what depends on it is NaN."""
    logits = torch.randn(2, 8, generator=seeded(1))
    expected = router(logits, 4, score, normalize)
    logits[0, where] = NAN
    ids, probs, scores = router(logits, 4, score, normalize)
    assert sorted(set(ids[0].tolist())) == sorted(ids[0].tolist())
    others = [e for e in logits[0].nan_to_num(-math.inf).argsort(descending=True).tolist() if e not in where]
    assert ids[0].tolist() == (others + where)[:4]
    chosen = torch.isnan(logits[0, ids[0]])
    if score == "softmax":
        assert torch.isnan(scores[0]).all()
        assert torch.isnan(probs[0]).all()
    else:
        assert torch.equal(torch.isnan(scores[0]), torch.isnan(logits[0]))
        assert torch.equal(torch.isnan(probs[0]), chosen.any().expand(4) if normalize else chosen)
    for got, want in zip((ids, probs, scores), expected, strict=True):
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("score", reference.SCORES)
def test_infinite_logits(score):
    inf = math.inf
    rows = [[1.0, inf, 2.0, NAN], [-inf, 0.0, NAN, -inf], [-inf, NAN, -inf, -inf], [-inf, 3.0, 1.0, -inf]]
    logits = torch.tensor(rows)
    ids, probs, scores = router(logits, 3, score, False)
    # with softmax the finite logits beside an infinite one are all 0: a tie
    first = [1, 0, 2] if score == "softmax" else [1, 2, 0]
    assert ids.tolist() == [first, [1, 0, 3], [0, 2, 3], [1, 2, 0]]
    if score == "softmax":
        assert torch.isnan(scores[:3]).all()
        assert torch.isnan(router(torch.full((1, 4), -inf), 1, score, False)[2]).all()
        assert scores[3, 0] == 0
        assert scores[3].sum() == pytest.approx(1)
    else:
        assert probs[0, 0] == (1.0 if score == "sigmoid" else inf)
        assert probs[1].tolist() == [0.5 if score == "sigmoid" else pytest.approx(math.sqrt(math.log(2))), 0.0, 0.0]


@pytest.mark.parametrize(("score", "normalize"), CASES)
@pytest.mark.parametrize("k", [1, 3, 7])
def test_router_gradient_against_float64(score, normalize, k):
    logits = torch.randn(20, 7, generator=seeded(k))
    dprobs, dscores = torch.randn(20, k, generator=seeded(8)), torch.randn(20, 7, generator=seeded(9))
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    ids, probs, scores = router(ours, k, score, normalize)
    ((probs * dprobs).sum() + (scores * dscores).sum()).backward()
    probs64, scores64 = plain_router(exact, ids, score, normalize)
    ((probs64 * dprobs).sum() + (scores64 * dscores).sum()).backward()
    assert relative(ours.grad, exact.grad) <= 1e-6
    for weight, values in ((dprobs, probs), (dscores, scores)):
        ours.grad = exact.grad = None
        _, *again = router(ours, k, score, normalize)
        (again[0 if values is probs else 1] * weight).sum().backward()
        probs64, scores64 = plain_router(exact, ids, score, normalize)
        ((probs64 if values is probs else scores64) * weight).sum().backward()
        if values is probs and normalize and k == 1:
            assert (ours.grad == 0).all()  # the only choice has probability 1
        else:
            assert relative(ours.grad, exact.grad) <= 2e-6


def test_router_tokens_are_independent():
    logits = torch.randn(33, 40, generator=seeded(0))
    whole = router(logits, 6, "softmax", True)
    for t in (0, 17, 32):
        for got, want in zip(router(logits[t : t + 1], 6, "softmax", True), whole, strict=True):
            assert torch.equal(got[0], want[t])


# permute and unpermute


def test_permute_by_hand():
    x = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    ids = torch.tensor([[2, 0], [0, 2], [2, 3]])
    probs = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    out = permute(x, ids, 5, probs)
    assert out.x[:, 0].tolist() == [1, 2, 1, 2, 3, 3]
    assert out.x[:, 1].tolist() == [10, 20, 10, 20, 30, 30]
    assert out.offsets.tolist() == [0, 2, 2, 5, 6, 6]
    assert out.offsets.dtype == torch.int64
    assert out.row_map.tolist() == [[2, 0], [1, 3], [4, 5]]
    assert torch.equal(out.probs, torch.tensor([0.2, 0.3, 0.1, 0.4, 0.5, 0.6]))
    assert permute(x, ids, 5).probs is None
    y = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]])
    assert unpermute(y, out.row_map).tolist() == [[5.0], [10.0], [48.0]]
    assert unpermute(y, out.row_map, probs).flatten().tolist() == pytest.approx([0.6, 3.8, 27.2])


choices = st.integers(1, 6).flatmap(
    lambda experts: st.integers(1, 4).flatmap(
        lambda k: st.tuples(
            st.just(experts),
            st.just(k),
            st.lists(st.lists(st.integers(0, experts - 1), min_size=k, max_size=k), max_size=12),
        )
    )
)


@settings(deadline=None, max_examples=200)
@given(choices)
def test_permute_properties(case):
    experts, k, rows = case
    ids = torch.tensor(rows, dtype=torch.int64).reshape(-1, k)
    tokens = ids.shape[0]
    x = torch.arange(1.0, tokens * 3 + 1).reshape(tokens, 3)
    probs = torch.arange(1.0, tokens * k + 1).reshape(tokens, k)
    out = permute(x, ids, experts, probs)
    # the order, the slow way
    expected = sorted((e, t, j) for t in range(tokens) for j, e in enumerate(ids[t].tolist()))
    assert out.x.shape == (tokens * k, 3)
    for row, (e, t, j) in enumerate(expected):
        assert out.row_map[t, j] == row
        assert torch.equal(out.x[row], x[t])
        assert out.probs[row] == probs[t, j]
        assert out.offsets[e] <= row < out.offsets[e + 1]
    assert out.offsets[0] == 0
    assert out.offsets[-1] == tokens * k
    assert out.offsets.shape == (experts + 1,)
    # the inverse
    assert torch.equal(unpermute(out.x, out.row_map), x * k)
    weights = torch.full((tokens, k), 0.25)
    assert torch.equal(unpermute(out.x, out.row_map, weights), x * (k * 0.25))


def random_case(tokens=40, k=3, experts=9, hidden=7, seed=0):
    generator = seeded(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k]
    return torch.randn(tokens, hidden, generator=generator), ids, torch.rand(tokens, k, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_probs", [False, True])
def test_unpermute_is_one_rounding_of_an_ordered_float32_sum(dtype, with_probs, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 7 * 11)
    _, ids, probs = random_case(k=5)
    y = torch.randn(200, 7, generator=seeded(3)).to(dtype)
    row_map = permute(torch.zeros(40, 1), ids, 9).row_map
    out = unpermute(y, row_map, probs if with_probs else None)
    total = torch.zeros(40, 7)
    for j in range(5):
        total = total + y[row_map[:, j]].float() * (probs[:, j : j + 1] if with_probs else 1.0)
    assert out.dtype == dtype
    assert torch.equal(out, total.to(dtype))


@pytest.mark.parametrize("k", [1, 3])
def test_permute_and_unpermute_gradients_against_float64(k):
    x, ids, probs = random_case(k=k)
    weight = torch.randn(40 * k, 7, generator=seeded(5))
    upstream = torch.randn(40, 7, generator=seeded(6))

    def ours(x, probs):
        out = permute(x, ids, 9, probs)
        y = torch.tanh(out.x * weight) * out.probs[:, None]
        return (unpermute(y, out.row_map, probs) * upstream).sum(), (unpermute(y, out.row_map) * upstream).sum()

    def exact(x, probs):
        order = ids.flatten().argsort(stable=True)
        scale = torch.empty(40 * k, 7, dtype=torch.float64)
        scale[order] = weight.double()
        y = torch.tanh(x[:, None] * scale.view(40, k, 7)) * probs[..., None]
        return ((y * probs[..., None]).sum(1) * upstream).sum(), (y.sum(1) * upstream).sum()

    for which in (0, 1):
        a, p = x.clone().requires_grad_(), probs.clone().requires_grad_()
        a64, p64 = x.double().requires_grad_(), probs.double().requires_grad_()
        ours(a, p)[which].backward()
        exact(a64, p64)[which].backward()
        assert relative(a.grad, a64.grad) <= 1e-6
        assert relative(p.grad, p64.grad) <= 1e-6


def test_gradients_of_bfloat16_rows_are_rounded_once():
    x, ids, probs = random_case()
    leaf = x.bfloat16().requires_grad_()
    out = permute(leaf, ids, 9)
    upstream = torch.randn(out.x.shape, generator=seeded(2)).bfloat16()
    out.x.backward(upstream)
    assert torch.equal(leaf.grad, upstream[out.row_map].float().sum(1).bfloat16())
    y, p = upstream.clone().requires_grad_(), probs.clone().requires_grad_()
    dout = torch.randn(40, 7, generator=seeded(4)).bfloat16()
    unpermute(y, out.row_map, p).backward(dout)
    assert torch.equal(y.grad[out.row_map], (dout[:, None].float() * probs[..., None]).bfloat16())
    assert relative(p.grad, (dout[:, None].double() * upstream[out.row_map].double()).sum(2)) <= 1e-6


def test_rows_outside_row_map_influence_nothing():
    x, ids, probs = random_case()
    out = permute(x, ids, 9)
    padded = torch.cat([out.x, torch.full((5, 7), NAN)]).requires_grad_()
    p = probs.clone().requires_grad_()
    y = unpermute(padded, out.row_map, p)
    assert torch.equal(y, unpermute(out.x, out.row_map, probs))
    y.sum().backward()
    assert (padded.grad[-5:] == 0).all()
    assert (padded.grad[:-5] != 0).all()
    assert torch.isfinite(p.grad).all()


def test_no_tokens():
    x = torch.empty(0, 4, dtype=torch.bfloat16, requires_grad=True)
    logits = torch.empty(0, 5, requires_grad=True)
    ids, probs, _ = router(logits, 2, "softmax", True)
    out = permute(x, ids, 5, probs)
    assert out.offsets.tolist() == [0] * 6
    assert out.x.shape == (0, 4)
    assert out.row_map.shape == (0, 2)
    unpermute(out.x, out.row_map, probs).sum().backward()
    assert x.grad.shape == (0, 4)
    assert logits.grad.shape == (0, 5)


# arguments and operators

X, IDS, P = torch.ones(3, 2), torch.tensor([[0, 1], [1, 2], [0, 2]]), torch.ones(3, 2)
ROWS, MAP = torch.ones(6, 2), torch.arange(6).view(3, 2)


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (ValueError, lambda: router(torch.ones(3), 1, "softmax", True), r"logits has shape \(3,\)"),
        (TypeError, lambda: router(X.bfloat16(), 1, "softmax", True), r"logits has dtype torch.bfloat16; .*float32"),
        (ValueError, lambda: router(X, 3, "softmax", True), r"top_k=3 .* 1\.\.2"),
        (ValueError, lambda: router(X, 0, "softmax", True), r"top_k=0 .* 1\.\.2"),
        (TypeError, lambda: router(X, 2.0, "softmax", True), r"top_k=2\.0 is float; an int"),
        (TypeError, lambda: router(X, 1, "softmax", 1), r"normalize=1 is int; True or False"),
        (ValueError, lambda: router(X, 1, "topk", True), r"score='topk' is not one of .*sigmoid"),
        (ValueError, lambda: permute(X[0], IDS, 3), r"x has shape \(2,\)"),
        (TypeError, lambda: permute(X.double(), IDS, 3), r"x has dtype torch.float64"),
        (TypeError, lambda: permute(X, IDS.int(), 3), r"ids has dtype torch.int32; .*int64"),
        (ValueError, lambda: permute(X, IDS[:2], 3), r"ids has 2 rows; .* 3"),
        (ValueError, lambda: permute(X, IDS[:, :0], 3), r"ids has shape \(3, 0\)"),
        (ValueError, lambda: permute(X, IDS, 0), r"num_experts=0 .* at least 1"),
        (TypeError, lambda: permute(X, IDS, 4.0), r"num_experts=4\.0 is float; an int"),
        (ValueError, lambda: permute(X, IDS, 10**12), r"num_experts=1000000000000 .* at most 1048576"),
        (ValueError, lambda: permute(X, IDS, 2), r"ids holds 2; .* 0\.\.1"),
        (ValueError, lambda: permute(X, IDS - 2, 3), r"ids holds -2; .* 0\.\.2, or -1"),
        (ValueError, lambda: permute(X, IDS, 3, P[:, :1]), r"probs has shape \(3, 1\); .*\(3, 2\)"),
        (TypeError, lambda: permute(X, IDS, 3, P.bfloat16()), r"probs has dtype torch.bfloat16"),
        (ValueError, lambda: unpermute(ROWS[0], MAP), r"y has shape \(2,\)"),
        (TypeError, lambda: unpermute(ROWS, MAP.int()), r"row_map has dtype torch.int32"),
        (ValueError, lambda: unpermute(ROWS, MAP + 1), r"row_map holds 6; .* 0\.\.5"),
        (ValueError, lambda: unpermute(ROWS, MAP.clamp(max=4)), r"row_map holds 4 more than once"),
        (ValueError, lambda: unpermute(ROWS, MAP, P[:2]), r"probs has shape \(2, 2\); .*\(3, 2\)"),
    ],
)
def test_wrong_arguments(error, call, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize(("score", "normalize"), CASES)
def test_opcheck_router(tokens, score, normalize):
    ops = torch.ops.blockscale
    logits = torch.randn(tokens, 6, generator=seeded(0))
    opcheck(ops.router.default, (logits.clone().requires_grad_(), None, 2, score, normalize, 1, 1))
    probs, ids, scores = ops.router(logits, None, 2, score, normalize, 1, 1)
    needed = logits if score == "sqrt_softplus" else None
    opcheck(ops.router_backward.default, (probs, scores, probs, ids, scores, score, normalize, needed))


@pytest.mark.parametrize(("tokens", "with_probs"), list(itertools.product([0, 5], [False, True])))
def test_opcheck_permute_and_unpermute(tokens, with_probs):
    ops = torch.ops.blockscale
    x, ids, probs = random_case(tokens, k=2)
    p = probs.requires_grad_() if with_probs else None
    opcheck(ops.permute.default, (x.clone().requires_grad_(), ids, 9, p))
    out = permute(x, ids, 9)
    opcheck(ops.unpermute.default, (out.x.clone().requires_grad_(), out.row_map, p))
    y, p = (out.x, probs.detach()) if with_probs else (None, None)
    opcheck(ops.unpermute_backward.default, (x, out.row_map, 2 * tokens, y, p))
