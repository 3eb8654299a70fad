"""The MoE layer against a dense float64 layer that sends every token through every expert."""

import math

import pytest
import torch

from blockscale.nn.moe import MoE
from blockscale.ops.routing import permute

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 32, 48, 5, 2


def make(seed=0, **options):
    torch.manual_seed(seed)
    options = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": EXPERTS, "top_k": TOP_K} | options
    return MoE(**options)


def expert(mlp, e, x):
    """swiglu expert e in float64."""
    w1, w2 = mlp.fc1.weight[e].double(), mlp.fc2.weight[e].double()
    h = x @ w1.T + (0 if mlp.fc1.bias is None else mlp.fc1.bias[e].double())
    a, b = h.chunk(2, 1)
    return (a * torch.sigmoid(a) * b) @ w2.T + (0 if mlp.fc2.bias is None else mlp.fc2.bias[e].double())


def dense(moe, x):
    """The layer by its formula, every expert on every token, in float64 with moe's own parameters."""
    x = x.double()
    scores = torch.softmax(x @ moe.router.weight.double().T, 1)
    top = scores.topk(TOP_K, 1)
    probs = top.values / top.values.sum(1, keepdim=True) if moe.router.normalize else top.values
    weight = torch.zeros_like(scores).scatter(1, top.indices, probs)
    y = sum(weight[:, e : e + 1] * expert(moe.experts, e, x) for e in range(EXPERTS))
    return y if moe.shared is None else y + expert(moe.shared, 0, x)


def relative(got, want):
    assert want.norm() > 0
    return float((got.double() - want).norm() / want.norm())


CONFIGS = [{}, {"shared_intermediate": 40}, {"bias": True, "normalize": False}, {"bias": True, "shared_intermediate": 16}]


@pytest.mark.parametrize("options", CONFIGS)
def test_against_a_dense_layer(options):
    moe = make(**options)
    x = torch.randn(3, 20, HIDDEN)
    upstream = torch.randn(3, 20, HIDDEN)
    ours, exact = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, _ = moe(ours)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    y.backward(upstream)
    grads = {name: p.grad for name, p in moe.named_parameters()}
    moe.zero_grad()
    want = dense(moe, exact.flatten(0, 1))
    want.backward(upstream.flatten(0, 1).double())
    # the operands of the GEMMs are bfloat16 (2^-9 of relative error each)
    assert relative(y.detach().flatten(0, 1), want.detach()) < 0.01
    assert relative(ours.grad, exact.grad.double()) < 0.015
    for name, p in moe.named_parameters():
        assert relative(grads[name], p.grad.double()) < 0.02, name


def test_bfloat16_layer_keeps_a_float32_router():
    moe = make(shared_intermediate=40, dtype=torch.bfloat16)
    assert moe.router.weight.dtype == torch.float32
    assert moe.experts.fc1.weight.dtype == moe.shared.fc1.weight.dtype == torch.bfloat16
    x = torch.randn(40, HIDDEN).bfloat16()
    y, _ = moe(x)
    assert y.dtype == torch.bfloat16
    assert relative(y.detach(), dense(moe, x).detach()) < 0.02


def test_choices_and_the_shared_expert_are_summed_in_float32():
    moe = make(shared_intermediate=40, dtype=torch.bfloat16)
    x = torch.randn(40, HIDDEN).bfloat16()
    with torch.no_grad():
        routing = moe.router(x)
        rows = permute(x, routing.ids, EXPERTS, routing.probs)
        parts = moe.experts(rows.x, None, rows.probs, offsets=rows.offsets).float()[rows.row_map]
        shared = moe.shared(x, torch.tensor([40])).float()
        y, _ = moe(x)
    assert torch.equal(y, (parts[:, 0] + parts[:, 1] + shared).bfloat16())
    twice_rounded = (parts[:, 0] + parts[:, 1]).bfloat16() + shared.bfloat16()
    assert not torch.equal(y, twice_rounded)


def test_the_order_of_tokens_does_not_matter():
    moe = make()
    x = torch.randn(64, HIDDEN)
    order = torch.randperm(64)
    with torch.no_grad():
        assert relative(moe(x[order])[0], moe(x)[0][order].double()) < 1e-6


def test_aux_loss_is_the_routers():
    moe = make(aux_loss_coef=0.3)
    x = torch.randn(16, HIDDEN)
    _, loss = moe(x)
    assert loss.item() == moe.router(x).aux_loss.item()
    assert 0.2 < loss.item() < 0.6
    loss.backward()
    assert moe.router.weight.grad.norm() > 0
    assert moe.experts.fc1.weight.grad is None


def test_experts_without_tokens():
    moe = make()
    with torch.no_grad():
        moe.router.weight[3:] = 0
        moe.router.weight[:3, 0] = 100.0
    x = torch.randn(10, HIDDEN)
    x[:, 0] = 1.0
    y, _ = moe(x)
    y.square().sum().backward()
    per_expert = moe.experts.fc1.weight.grad.flatten(1).norm(dim=1)
    assert (per_expert[3:] == 0).all()
    assert per_expert[:3].max() > 0


def test_no_tokens():
    moe = make(shared_intermediate=40, aux_loss_coef=0.1)
    x = torch.empty(2, 0, HIDDEN, requires_grad=True)
    y, loss = moe(x)
    (y.sum() + loss).backward()
    assert y.shape == (2, 0, HIDDEN)
    assert loss.item() == 0
    assert x.grad.shape == x.shape
    assert (moe.experts.fc1.weight.grad == 0).all()


def test_a_nan_token_stays_alone():
    moe = make(shared_intermediate=40)
    x = torch.randn(12, HIDDEN)
    with torch.no_grad():
        clean, _ = moe(x)
        x[4, 1] = math.nan
        y, _ = moe(x)
    others = [t for t in range(12) if t != 4]
    assert torch.isnan(y[4]).all()
    assert relative(y[others], clean[others].double()) < 1e-6


def test_wrong_arguments():
    with pytest.raises(ValueError, match=rf"x has shape \(4, 3\); \[\.\.\., {HIDDEN}\]"):
        make()(torch.ones(4, 3))
    with pytest.raises(ValueError, match=r"top_k=6 .* 1\.\.5"):
        make(top_k=6)
    with pytest.raises(ValueError, match="'gelu' is not one of"):
        make(activation="gelu")


def test_compiles_without_a_break():
    moe = make(shared_intermediate=40, aux_loss_coef=0.1)
    x = torch.randn(4, 6, HIDDEN)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    results = []
    for module in (moe, compiled):
        moe.zero_grad()
        y, loss = module(x)
        (y.square().sum() + loss).backward()
        results.append([y, loss, *(p.grad for p in moe.parameters())])
    for eager, traced in zip(*results, strict=True):
        assert eager.abs().max() > 0
        assert torch.equal(eager, traced)
