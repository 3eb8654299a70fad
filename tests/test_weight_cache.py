"""cache_weights: one quantization a weight version, the same bits, and nothing stale."""

import copy

import pytest
import torch
from layers import KINDS, grads, make, step, weights
from support import RECIPES, assert_all_same, assert_same

import blockscale as bs


def caches(module):
    return [m.weight_cache for m in module.modules() if getattr(m, "weight_cache", None) is not None]


def counts(module):
    """(hits, misses) over all weights."""
    return sum(c.hits for c in caches(module)), sum(c.misses for c in caches(module))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_share_one_quantization(kind, recipe):
    plain, cached = (make(kind, RECIPES[recipe], cache_weights=c) for c in (False, True))
    n = 0 if recipe == "bf16" else len(weights(cached))
    assert len(caches(cached)) == len(weights(cached))
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (plain, cached)]
    for update in range(2):
        for m in range(3):
            assert_all_same(step(cached, m), step(plain, m), (update, m))
        assert_all_same(grads(cached), grads(plain), update)
        assert counts(cached) == (2 * 2 * n * (update + 1), 2 * n * (update + 1))
        for optimizer in optimizers:
            optimizer.step()


CHANGES = {
    "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.5).step(),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.5, fused=True).step(),
    "in place": lambda m: m.weight.detach().mul_(2),
    "no_grad": lambda m: torch.no_grad()(m.weight.mul_)(2),
    "load_state_dict": lambda m: m.load_state_dict({n: t + 1 for n, t in m.state_dict().items()}),
    "assign": lambda m: m.load_state_dict({n: t + 1 for n, t in m.state_dict().items()}, assign=True),
    "data": lambda m: setattr(m.weight, "data", m.weight.data * 2),
    "data twice": lambda m: [setattr(m.weight, "data", m.weight.data * 2) for _ in range(6)],
    "parameter": lambda m: setattr(m, "weight", torch.nn.Parameter(m.weight.detach() * 2)),
    "to": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "half": lambda m: m.half(),
    "view": lambda m: m.weight.view(-1)[:40].detach().fill_(3.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["linear", "grouped_linear"])
def test_a_change_of_the_weight_is_seen(kind, change):
    cached = make(kind, RECIPES["mxfp8"], cache_weights=True)
    step(cached)
    step(cached)
    assert counts(cached) == (2, 2)
    CHANGES[change](cached)
    plain = make(kind, RECIPES["mxfp8"])
    plain.to(cached.weight.dtype).load_state_dict(cached.state_dict())
    assert_all_same(step(cached, 3), step(plain, 3), change)
    assert counts(cached) == (2, 4)


def test_addresses_that_are_used_again():
    """The allocator gives a new weight the old one's address: it is another storage all the same."""
    cached = make("linear", RECIPES["mxfp8"], cache_weights=True)
    seen = set()
    for value in range(20):
        old, cached.weight.data = cached.weight.data, torch.empty(0)
        del old
        value %= 16  # E4M3 has these
        cached.weight.data = torch.full((16, 20), float(value))
        seen.add(cached.weight.data_ptr())
        y = cached(torch.ones(1, 20)) - cached.bias
        assert (y - 20 * value).abs().max() < 1e-3 * (1 + value)
    assert len(seen) < 20  # else nothing was tested


def test_another_recipe_and_clear():
    cached = make("linear", None, cache_weights=True)
    x = torch.ones(3, 20)
    for recipe in ("mxfp8", "fp8_block", "mxfp8", "bf16"):
        with bs.autocast(RECIPES[recipe]):
            assert_same(cached(x), bs.grouped_linear(x, cached.weight[None], torch.tensor([0, 3]), cached.bias[None]))
    assert counts(cached) == (1, 2)
    cached.weight.data.mul_(2)  # not counted by torch: documented
    with bs.autocast(RECIPES["mxfp8"]):
        stale = cached(x)
        cached.weight_cache.clear()
        assert cached.weight_cache.nbytes == 0
        assert (cached(x) != stale).any()
        assert cached.weight_cache.nbytes == sum(
            t.nbytes for t in bs.quantize_grouped(cached.weight[None], None, bs.MXFP8()).rowwise.tensors()
        )


def test_inference():
    cached, plain = (make("linear", RECIPES["mxfp8"], cache_weights=c) for c in (True, False))
    x = torch.ones(3, 20)
    with torch.inference_mode():
        assert_same(cached(x).clone(), plain(x).clone())
        cached(x)
        assert counts(cached) == (1, 1)
        born_there = bs.nn.Linear(20, 16, recipe=RECIPES["mxfp8"], cache_weights=True)
        want = born_there(x)
        born_there.weight.mul_(2)
        assert (born_there(x) != want).any()
        assert counts(born_there) == (0, 0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_compiled(kind, backend):
    torch._dynamo.reset()
    plain, cached = (make(kind, RECIPES["mxfp8"], cache_weights=c) for c in (False, True))
    compiled = torch.compile(cached, fullgraph=True, backend=backend)
    n = len(weights(cached))
    for update in range(2):
        for m in range(3):
            assert_all_same(step(cached, m, compiled), step(plain, m), (update, m))
        assert_all_same(grads(cached), grads(plain), update)
        assert counts(cached) == (4 * n * (update + 1), 2 * n * (update + 1))
        for module in (plain, cached):
            torch.optim.SGD(module.parameters(), lr=0.5).step()


def test_a_compiled_update_is_seen():
    torch._dynamo.reset()
    cached = make("linear", RECIPES["mxfp8"], cache_weights=True)
    step(cached)

    @torch.compile
    @torch.no_grad()
    def update(p, g):
        p.sub_(0.5 * g)

    update(cached.weight, cached.weight.grad)
    plain = make("linear", RECIPES["mxfp8"])
    plain.load_state_dict(cached.state_dict())
    assert_all_same(step(cached, 1), step(plain, 1))


def test_one_graph_serves_two_layers():
    torch._dynamo.reset()
    layers = [make("linear", RECIPES["mxfp8"], cache_weights=True) for _ in range(2)]
    with torch.no_grad():
        layers[1].weight.mul_(3)
    x = torch.ones(2, 20)
    want = [layer(x) for layer in layers]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda layer, x: layer(x), backend=counter, fullgraph=True)
    for layer, expected in zip(layers, want, strict=True):
        assert_same(compiled(layer, x), expected)


def test_copies_and_explain():
    module = make("mlp", RECIPES["mxfp8"], cache_weights=True)
    step(module)
    twin = copy.deepcopy(module)
    assert counts(twin) == (0, 0)
    assert_all_same(step(twin), step(module))
    x = torch.ones(40, 20, requires_grad=True)
    explained = bs.explain(module, x, torch.ones(3).int())
    assert explained.cached_bytes == sum(c.nbytes for c in caches(module)) > 0
    assert [c.name for c in explained.cached] == [f"fc{i}.weight, {p}wise" for p in ("row", "column") for i in (1, 2)]
    assert "quantized weights, between calls" in str(explained)
    assert explained.as_dict()["cached_bytes"] == explained.cached_bytes
    assert any(s.what == "w1 to MXFP8 E4M3 1x32, rowwise, once a weight version" for s in explained.stages)
    assert bs.explain(make("mlp", RECIPES["mxfp8"]), x, torch.ones(3).int()).cached == ()
    with torch.no_grad():
        fresh = make("mlp", RECIPES["mxfp8"], cache_weights=True)
        fresh(x, torch.ones(3).int())
        assert bs.explain(fresh, x, torch.ones(3).int()).cached_bytes == sum(c.nbytes for c in caches(fresh))
