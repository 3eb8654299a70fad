"""The router's options: groups, expert bias, scaling, z-loss, capacity; against slow oracles, float64 and transformers."""

import math

import pytest
import torch
from support import calc_diff, normal

import blockscale as bs
from blockscale.nn.router import Router, expert_counts
from blockscale.ops.routing import router

E, H = 12, 16


def make(k=3, seed=0, **options):
    torch.manual_seed(seed)
    return Router(H, E, k, **options)


def slow_choice(key, k, groups, group_top_k):
    """Ids of one token's k best experts in its best groups, by sorting; ties to the lowest index."""

    def best(values, count):
        return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]

    per_group = len(key) // groups
    parts = [key[g * per_group : (g + 1) * per_group] for g in range(groups)]
    # float32 sums of the two best, as they are compared
    totals = [sum(torch.tensor(sorted(part, reverse=True)[:2])).item() for part in parts]
    open_groups = best(totals, group_top_k)
    allowed = [v if i // per_group in open_groups else -math.inf for i, v in enumerate(key)]
    return best(allowed, k)


# choice


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize(("groups", "group_top_k", "k"), [(1, 1, 5), (3, 1, 4), (4, 2, 6), (6, 3, 4), (12, 5, 5), (4, 4, 12)])
def test_groups_and_bias_against_a_slow_oracle(score, groups, group_top_k, k):
    logits = normal(60, E, seed=groups) * 2
    logits[:20] = logits[:20].round()  # many ties
    bias = normal(E, seed=7) * 0.3
    for b in (None, bias):
        ids, probs, scores = router(logits, k, score, False, expert_bias=b, expert_groups=groups, group_top_k=group_top_k)
        key = scores if b is None else scores + b
        assert ids.tolist() == [slow_choice(row, k, groups, group_top_k) for row in key.tolist()]
        assert torch.equal(probs, scores.gather(1, ids))
        assert torch.equal(scores, router(logits, k, score, False)[2])
    free = router(logits, k, score, False)[0]
    assert (free.sort(1).values != ids.sort(1).values).any() or k == E


def test_a_group_is_scored_by_its_two_best():
    # group 0 has the best expert, group 1 the best pair, group 2 the best mean
    scores = torch.tensor([[0.9, 0.1, 0.1, 0.7, 0.6, 0.1, 0.55, 0.5, 0.5]])
    logits = torch.log(scores / (1 - scores))
    ids, probs, _ = router(logits, 2, "sigmoid", True, expert_groups=3, group_top_k=1)
    assert ids.tolist() == [[3, 4]]
    torch.testing.assert_close(probs, torch.tensor([[7 / 13, 6 / 13]]))
    # all biased scores below zero: the choice stays in the groups all the same
    ids, _, _ = router(logits, 2, "sigmoid", True, expert_bias=torch.full((9,), -5.0), expert_groups=3, group_top_k=1)
    assert ids.tolist() == [[3, 4]]


def test_nan_logits_with_groups_and_bias():
    logits = normal(4, E, seed=1)
    options = {"expert_bias": normal(E, seed=2) * 0.1, "expert_groups": 4, "group_top_k": 2}
    clean = router(logits, 3, "sigmoid", True, **options)
    logits[0] = math.nan
    logits[1, 4] = math.nan
    ids, probs, scores = router(logits, 3, "sigmoid", True, **options)
    assert ids[0].tolist() == [0, 1, 2]
    assert torch.isnan(probs[0]).all()
    assert 4 not in ids[1].tolist()
    assert torch.isnan(scores[1]).nonzero().flatten().tolist() == [4]
    for got, want in zip((ids, probs, scores), clean, strict=True):
        assert torch.equal(got[2:], want[2:])
    # a bias that is NaN keeps its expert from being chosen
    bias = torch.zeros(E)
    bias[5] = math.nan
    assert not (router(logits[2:], 11, "softmax", True, expert_bias=bias)[0] == 5).any()


def test_deepseek_v3():
    """transformers' router: the same experts and weights, its gradients within float32."""
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(
        hidden_size=H,
        n_routed_experts=E,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    peer = modeling.DeepseekV3TopkRouter(config)
    ours = make(4, score="sigmoid", expert_groups=4, group_top_k=2, expert_bias=True, scaling_factor=2.5)
    with torch.no_grad():
        peer.weight.copy_(ours.weight)
        peer.e_score_correction_bias.copy_(normal(E, seed=3) * 0.2)
        ours.expert_bias.copy_(peer.e_score_correction_bias)
    x = normal(200, H, seed=4)
    upstream = normal(200, E, seed=5)
    logits, weights, ids = peer(x)
    if weights.shape[1] == E:  # other versions return them in another order
        weights, ids = logits, weights
    routing = ours(x)
    assert torch.equal(routing.ids.sort(1).values, ids.sort(1).values)
    torch.testing.assert_close(
        torch.zeros(200, E).scatter(1, routing.ids, routing.probs), torch.zeros(200, E).scatter(1, ids, weights), rtol=1e-5, atol=0
    )
    (weights * upstream.gather(1, ids)).sum().backward()
    (routing.probs * upstream.gather(1, routing.ids)).sum().backward()
    assert calc_diff(ours.weight.grad, peer.weight.grad) < 1e-5


# balance without a loss


def test_bias_update_by_hand():
    module = Router(2, 4, 1, expert_bias=True)
    module.update_expert_bias(0.5, torch.tensor([4, 0, 2, 2]))
    assert module.expert_bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    module.update_expert_bias(0.25, torch.tensor([0, 1, 0, 0]))  # a mean of 1/4
    assert module.expert_bias.tolist() == [-0.25, 0.25, 0.25, 0.25]


def test_choices_are_counted_while_training_and_forgotten_after_an_update():
    module = make(expert_bias=True)
    first, second = module(normal(30, H, seed=1)), module(normal(50, H, seed=2))
    counts = torch.bincount(torch.cat((first.ids.flatten(), second.ids.flatten())), minlength=E)
    assert torch.equal(module.expert_counts, counts)
    assert torch.equal(expert_counts(first.ids, E) + expert_counts(second.ids, E), counts)
    module.eval()
    module(normal(30, H, seed=1))
    assert torch.equal(module.expert_counts, counts)
    module.update_expert_bias(0.1)
    assert torch.equal(module.expert_bias, 0.1 * torch.sign(counts.double().mean() - counts).float())
    assert (module.expert_counts == 0).all()
    assert not module.expert_bias.requires_grad
    assert sorted(module.state_dict()) == ["expert_bias", "weight"]
    assert sorted(make().state_dict()) == ["weight"]


def test_the_update_balances_a_skewed_router():
    module = make(2, score="sigmoid", expert_bias=True)
    with torch.no_grad():
        module.weight[:, 0] += torch.linspace(-2, 2, E)  # and the first feature is always 1
    x = normal(512, H, seed=1)
    x[:, 0] = 1.0

    def imbalance():
        counts = expert_counts(module.eval()(x).ids, E).double()
        return float(counts.max() / counts.mean())

    before = imbalance()
    for _ in range(300):
        module.train()(x)
        module.update_expert_bias(5e-3)
    assert before > 3
    assert imbalance() < 1.3


def test_the_bias_stays_float32():
    module = make(expert_bias=True)
    module.expert_bias += 0.7001
    want = module.expert_bias.clone()
    module.to(torch.bfloat16)
    assert module.weight.dtype == torch.bfloat16
    assert torch.equal(module.expert_bias, want)
    assert module.expert_bias is dict(module.named_buffers())["expert_bias"]
    assert module.half().float().expert_bias.tolist() == want.tolist()
    assert module.to("meta").expert_bias.device.type == "meta"


# losses and gradients


def scores64(logits, score):
    if score == "softmax":
        return torch.softmax(logits, 1)
    return torch.sigmoid(logits) if score == "sigmoid" else torch.log1p(torch.exp(logits)).sqrt()


def test_z_loss_by_hand():
    module = Router(3, 3, 1, z_loss_coef=0.5)
    with torch.no_grad():
        module.weight.copy_(torch.eye(3))
    x = torch.tensor([[math.log(2), 0.0, 0.0], [math.log(5), math.log(2), 0.0]])
    assert module(x).z_loss.item() == pytest.approx(0.5 * (math.log(4) ** 2 + math.log(8) ** 2) / 2, rel=1e-6)
    assert Router(3, 3, 1)(x).z_loss.item() == 0
    assert module(x[:0]).z_loss.item() == 0


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("capacity", [None, 0.5])
def test_gradients_of_everything_together_against_float64(score, capacity):
    module = make(
        score=score,
        aux_loss_coef=0.5,
        z_loss_coef=0.1,
        expert_groups=4,
        group_top_k=2,
        expert_bias=True,
        scaling_factor=2.5,
        capacity_factor=capacity,
    )
    module.expert_bias += normal(E, seed=6) * 0.1
    x, upstream = normal(40, H, seed=1).requires_grad_(), normal(40, 3, seed=2)
    routing = module(x)
    ((routing.probs * upstream).sum() + routing.aux_loss + routing.z_loss).backward()
    assert (routing.ids < 0).any() == (capacity is not None)

    chosen = make(score=score, expert_groups=4, group_top_k=2, expert_bias=True)
    chosen.load_state_dict(module.state_dict())
    ids = chosen(x.detach()).ids
    x64, w64 = x.detach().double().requires_grad_(), module.weight.detach().double().requires_grad_()
    logits = x64 @ w64.T
    scores = scores64(logits, score)
    probs = scores.gather(1, ids)
    probs = 2.5 * probs / probs.sum(1, keepdim=True) * (routing.ids >= 0)
    fraction = torch.bincount(ids.flatten(), minlength=E) / ids.numel()
    aux = 0.5 * E * (fraction * scores.mean(0)).sum()
    z = 0.1 * torch.logsumexp(logits, 1).square().mean()
    ((probs * upstream).sum() + aux + z).backward()
    assert routing.aux_loss.item() == pytest.approx(aux.item(), rel=1e-5)
    assert routing.z_loss.item() == pytest.approx(z.item(), rel=1e-5)
    assert calc_diff(routing.probs, probs) < 1e-6
    assert calc_diff(x.grad, x64.grad) < 3e-6
    assert calc_diff(module.weight.grad, w64.grad) < 3e-6


# compile, arguments

ALL = {
    "score": "sqrt_softplus",
    "z_loss_coef": 0.01,
    "aux_loss_coef": 0.02,
    "expert_groups": 4,
    "group_top_k": 2,
    "expert_bias": True,
    "scaling_factor": 2.5,
    "capacity_factor": 0.8,
}


@pytest.mark.parametrize("drop", ["probs", "position"])
def test_compiles_without_a_break(drop):
    torch._dynamo.reset()
    module = make(**ALL, drop=drop)

    def step(x):
        routing = module(x)
        rows = bs.permute(x, routing.ids, E, routing.probs)
        return bs.unpermute(rows.x * rows.probs[:, None], rows.row_map), routing.aux_loss + routing.z_loss, routing.ids

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (40, 27):
        results = []
        for function in (step, compiled):
            module.weight.grad = None
            module.expert_counts.zero_()
            x = normal(tokens, H, seed=tokens).requires_grad_()
            y, loss, ids = function(x)
            (y.square().sum() + loss).backward()
            results.append([y, loss, ids, x.grad, module.weight.grad, module.expert_counts.clone()])
        assert (ids < 0).any()
        for eager, traced in zip(*results, strict=True):
            assert eager.any()
            assert torch.equal(eager, traced)


def test_a_moe_with_every_option_compiles():
    torch._dynamo.reset()
    torch.manual_seed(0)
    moe = bs.nn.MoE(
        16, 8, E, 3, score="sigmoid", router_options={k: v for k, v in ALL.items() if k not in ("score", "aux_loss_coef")}
    )
    x = normal(2, 30, 16, seed=1)
    want, got = moe(x), torch.compile(moe, fullgraph=True, backend="aot_eager")(x)
    for eager, traced in zip(want, got, strict=True):
        assert eager.any()
        assert torch.equal(eager, traced)


L = torch.zeros(2, 6)


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (ValueError, lambda: make(expert_groups=5), r"expert_groups=5 .* must divide 12"),
        (ValueError, lambda: make(expert_groups=0), r"expert_groups=0 .* at least 1"),
        (ValueError, lambda: make(expert_groups=4, group_top_k=5), r"group_top_k=5 .* 1\.\.4, the number of groups"),
        (ValueError, lambda: make(4, expert_groups=4), r"group_top_k=1 groups hold 3 experts; top_k=4"),
        (TypeError, lambda: make(expert_groups=4.0), r"expert_groups=4\.0 is float"),
        (ValueError, lambda: make(z_loss_coef=-1.0), r"z_loss_coef=-1.0 .* >= 0"),
        (ValueError, lambda: make(scaling_factor=0.0), r"scaling_factor=0.0 .* > 0"),
        (ValueError, lambda: make(capacity_factor=math.inf), r"capacity_factor=inf .* finite"),
        (ValueError, lambda: make(drop="random"), r"drop='random' is not one of \('probs', 'position'\)"),
        (TypeError, lambda: make(2.0), r"top_k=2\.0 is float"),
        (TypeError, lambda: make(expert_bias=1), r"expert_bias=1 is int"),
        (ValueError, lambda: Router(H, 10**12, 2), r"num_experts=1000000000000 .* at most 1048576"),
        (RuntimeError, lambda: make().update_expert_bias(), r"needs a Router with expert_bias=True"),
        (TypeError, lambda: make(expert_bias=True).update_expert_bias(counts=torch.ones(E)), r"counts has dtype torch.float32"),
        (
            ValueError,
            lambda: make(expert_bias=True).update_expert_bias(counts=torch.ones(3).long()),
            r"counts has shape \(3,\); \(12,\)",
        ),
        (ValueError, lambda: router(L, 1, "softmax", True, expert_bias=torch.zeros(5)), r"expert_bias has shape \(5,\); \(6,\)"),
        (
            TypeError,
            lambda: router(L, 1, "softmax", True, expert_bias=torch.zeros(6).half()),
            r"expert_bias has dtype torch.float16",
        ),
        (ValueError, lambda: router(L, 1, "softmax", True, expert_bias=torch.zeros(6, device="meta")), r"expert_bias is on meta"),
        (TypeError, lambda: bs.nn.MoE(8, 8, 4, 2, router_options={"capacity": 2}), r"capacity"),
    ],
)
def test_wrong_arguments(error, call, message):
    with pytest.raises(error, match=message):
        call()
