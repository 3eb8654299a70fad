"""The Router module: logits, the load-balancing loss by hand and by autograd, NaN tokens, compile."""

import math

import pytest
import torch

from blockscale.nn.router import Router
from blockscale.ops.routing import permute, router, unpermute


def make(hidden=16, experts=6, k=2, seed=0, **options):
    torch.manual_seed(seed)
    return Router(hidden, experts, k, **options)


def one_hot_router(k, **options):
    """Weight = identity: the logits are the tokens themselves."""
    module = Router(3, 3, k, **options)
    with torch.no_grad():
        module.weight.copy_(torch.eye(3))
    return module


def test_routing_is_the_operator_on_float32_logits():
    module = make(score="sigmoid")
    assert module.weight.shape == (6, 16)
    assert module.weight.dtype == torch.float32
    bound = 1 / math.sqrt(16)
    assert module.weight.abs().max() <= bound
    assert module.weight.std() > bound / 3
    x = torch.randn(11, 16).bfloat16()
    routing = module(x)
    logits = x.double() @ module.weight.double().T
    ids, probs, scores = router(logits.float(), 2, "sigmoid", True)
    assert torch.equal(routing.ids, ids)
    torch.testing.assert_close(routing.probs, probs, rtol=1e-5, atol=0)
    torch.testing.assert_close(routing.scores, scores, rtol=1e-5, atol=0)
    assert routing.aux_loss.shape == routing.nan_tokens.shape == ()
    assert routing.aux_loss.item() == 0
    assert routing.nan_tokens.item() == 0
    assert routing.aux_loss.dtype == torch.float32
    assert routing.nan_tokens.dtype == torch.int64


def test_logits_stay_float32_under_torchs_autocast_and_in_a_bfloat16_module():
    x = torch.randn(64, 16)
    module = make()
    plain = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x).scores, plain.scores)
    module = module.to(torch.bfloat16)
    exact = torch.softmax(x.double() @ module.weight.double().T, 1)
    torch.testing.assert_close(module(x).scores.double(), exact, rtol=1e-5, atol=0)


def test_aux_loss_by_hand():
    # two tokens, one choice each: token 0 chooses expert 0, token 1 expert 2
    x = torch.tensor([[math.log(2), 0.0, 0.0], [0.0, math.log(2), math.log(5)]])
    # scores 1/2 1/4 1/4 and 1/8 2/8 5/8: means 5/16 4/16 7/16; fractions 1/2 0 1/2
    routing = one_hot_router(1, aux_loss_coef=0.1)(x)
    assert routing.ids.tolist() == [[0], [2]]
    assert routing.aux_loss.item() == pytest.approx(0.1 * 3 * (0.5 * 5 / 16 + 0.5 * 7 / 16), rel=1e-6)
    # two choices each: (0, 1) by the tie, and (2, 1): fractions 1/4 2/4 1/4
    routing = one_hot_router(2, aux_loss_coef=0.1)(x)
    assert routing.ids.tolist() == [[0, 1], [2, 1]]
    assert routing.aux_loss.item() == pytest.approx(0.1 * 3 * (5 / 16 + 2 * 4 / 16 + 7 / 16) / 4, rel=1e-6)
    # balanced choices: the coefficient itself, whatever the softmax
    balanced = one_hot_router(1, aux_loss_coef=0.25)(torch.eye(3) * 2)
    assert balanced.aux_loss.item() == pytest.approx(0.25, rel=1e-6)
    sigmoid = one_hot_router(1, score="sigmoid", aux_loss_coef=1.0)(torch.tensor([[0.0, math.log(3), 0.0]]))
    assert sigmoid.aux_loss.item() == pytest.approx(3 * 0.75, rel=1e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_against_float64(score, normalize):
    module = make(score=score, normalize=normalize, aux_loss_coef=0.5, k=3)
    x = torch.randn(20, 16, requires_grad=True)
    routing = module(x)
    upstream = torch.randn(20, 3)
    ((routing.probs * upstream).sum() + routing.aux_loss).backward()

    x64, w64 = x.detach().double().requires_grad_(), module.weight.detach().double().requires_grad_()
    logits = x64 @ w64.T
    scores = torch.softmax(logits, 1) if score == "softmax" else torch.sigmoid(logits)
    probs = scores.gather(1, routing.ids)
    probs = probs / probs.sum(1, keepdim=True) if normalize else probs
    fraction = torch.bincount(routing.ids.flatten(), minlength=6) / 60
    loss = 0.5 * 6 * (fraction * scores.mean(0)).sum()
    ((probs * upstream).sum() + loss).backward()
    assert routing.aux_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    for got, want in ((x.grad, x64.grad), (module.weight.grad, w64.grad)):
        assert want.norm() > 0
        assert (got - want).norm() <= 3e-6 * want.norm()


def test_the_loss_alone_moves_the_weight_towards_balance():
    module = one_hot_router(1, aux_loss_coef=1.0)
    x = torch.tensor([[2.0, 0.0, 0.0]] * 5 + [[0.0, 1.0, 0.0]])
    before = module(x)
    before.aux_loss.backward()
    with torch.no_grad():
        module.weight -= 0.5 * module.weight.grad
    assert module.weight.grad[0, 0] > 0 > module.weight.grad[2, 0]
    assert module(x).aux_loss < before.aux_loss - 0.01


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_nan_tokens_are_counted_and_stay_nan(score):
    module = make(experts=8, k=4, score=score, aux_loss_coef=0.1)
    x = torch.randn(9, 16)
    clean = module(x)
    x[[2, 5], [0, 7]] = math.nan
    routing = module(x)
    assert routing.nan_tokens.item() == 2
    assert all(len(set(row)) == 4 for row in routing.ids.tolist())
    assert torch.isnan(routing.probs).all(1).nonzero().flatten().tolist() == [2, 5]
    kept = [0, 1, 3, 4, 6, 7, 8]
    assert torch.equal(routing.probs[kept], clean.probs[kept])
    assert torch.equal(routing.ids[kept], clean.ids[kept])
    assert torch.isnan(routing.aux_loss)
    with torch.no_grad():
        module.weight[3] = math.nan  # one bad expert: not chosen by anybody
    routing = module(x[kept])
    assert routing.nan_tokens.item() == 7
    assert not (routing.ids == 3).any()
    assert torch.isnan(routing.probs).any().item() == (score == "softmax")


def test_no_tokens():
    routing = make(aux_loss_coef=0.1)(torch.empty(0, 16))
    assert routing.ids.shape == routing.probs.shape == (0, 2)
    assert routing.scores.shape == (0, 6)
    assert routing.aux_loss.item() == 0
    assert routing.nan_tokens.item() == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Router(0, 4, 1), r"hidden=0 .* at least 1"),
        (lambda: Router(4, 0, 1), r"num_experts=0 .* at least 1"),
        (lambda: Router(4, 4, 5), r"top_k=5 .* 1\.\.4"),
        (lambda: Router(4, 4, 0), r"top_k=0 .* 1\.\.4"),
        (lambda: Router(4, 4, 1, score="tanh"), r"score='tanh' is not one of .*softmax.*sigmoid"),
        (lambda: Router(4, 4, 1, aux_loss_coef=-0.1), r"aux_loss_coef=-0.1 .* >= 0"),
        (lambda: Router(4, 4, 1, aux_loss_coef=math.nan), r"aux_loss_coef=nan"),
        (lambda: Router(4, 4, 1)(torch.ones(2, 3)), r"x has shape \(2, 3\); \[tokens, 4\]"),
        (lambda: Router(4, 4, 1)(torch.ones(4)), r"x has shape \(4,\)"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_router_permute_and_unpermute_compile_without_a_break(score):
    module = make(score=score, aux_loss_coef=0.1)

    def step(x):
        routing = module(x)
        rows = permute(x, routing.ids, 6, routing.probs)
        y = rows.x * rows.probs[:, None]
        return unpermute(y, rows.row_map), unpermute(rows.x, rows.row_map, routing.probs), routing.aux_loss, routing.ids

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (7, 12):
        x = torch.randn(tokens, 16)
        results = []
        for function in (step, compiled):
            module.weight.grad = None
            leaf = x.clone().requires_grad_()
            out = function(leaf)
            (out[0].square().sum() + out[1].sum() + out[2]).backward()
            results.append([*out, leaf.grad, module.weight.grad])
        assert results[0][4].norm() > 0
        assert results[0][5].norm() > 0
        for eager, traced in zip(*results, strict=True):
            assert torch.equal(eager, traced)
