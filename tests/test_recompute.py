"""recompute: h is made again in backward from the quantized x; torch.utils.checkpoint around layers."""

import pytest
import torch
from composed import problem
from layers import grads, make, step
from support import RECIPES, assert_all_same
from torch.utils.checkpoint import checkpoint

import blockscale as bs


@pytest.mark.parametrize("options", [{}, {"delay_wgrad": True}, {"cache_weights": True}])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["mlp", "moe"])
def test_the_same_bits(kind, recipe, options):
    plain, again = make(kind, RECIPES[recipe]), make(kind, RECIPES[recipe], recompute=True, **options)
    for m in range(2):
        assert_all_same(step(again, m), step(plain, m), m)
    if "delay_wgrad" in options:
        again.backward_dw()
    assert_all_same(grads(again), grads(plain))


@pytest.mark.parametrize("frozen", [("fc1.weight",), ("fc2.weight",), ("fc1.weight", "fc2.weight"), ("fc1.bias", "fc1.weight")])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_frozen_parameters(recipe, frozen):
    layers = [make("mlp", RECIPES[recipe], recompute=r) for r in (False, True)]
    for module in layers:
        for name in frozen:
            module.get_parameter(name).requires_grad_(False)
    want, got = (step(module) for module in layers)
    assert_all_same(got, want)
    assert_all_same(grads(layers[1]), grads(layers[0]))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_compiled(recipe, backend):
    torch._dynamo.reset()
    plain, again = (make("mlp", RECIPES[recipe], recompute=r) for r in (False, True))
    assert_all_same(step(again, 0, torch.compile(again, fullgraph=True, backend=backend)), step(plain))
    assert_all_same(grads(again), grads(plain))


def saved(module, rows, hidden):
    """(what explain says is kept, what autograd keeps beyond parameters and arguments), bytes."""
    x = torch.ones(rows, hidden, dtype=torch.bfloat16, requires_grad=True)
    sizes = torch.full((4,), rows // 4)
    explained = bs.explain(module, x, sizes)
    owned = {}
    mine = {t.untyped_storage().data_ptr() for t in (x, sizes, *module.parameters())}

    def pack(t):
        if t.untyped_storage().data_ptr() not in mine:
            owned[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(x, sizes)
    assert y.requires_grad
    return explained, sum(owned.values())


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4", "fp8_block"])
def test_saved_bytes(recipe):
    layers = [bs.nn.GroupedMLP(4, 128, 256, recipe=RECIPES[recipe], recompute=r, dtype=torch.bfloat16) for r in (False, True)]
    (kept, kept_bytes), (again, again_bytes) = (saved(module, 512, 128) for module in layers)
    assert (kept.saved_bytes, again.saved_bytes) == (kept_bytes, again_bytes)
    h = 512 * 512 * 2
    names = {s.name for s in again.saved if s.owned}
    offsets = kept_bytes - h - sum(s.nbytes for s in kept.saved if s.name.startswith("x columnwise"))
    assert offsets < 200
    if recipe == "bf16":
        assert again_bytes == offsets
    else:
        assert {"x rowwise data", "x rowwise scale", "x columnwise data", "x columnwise scale"} <= names
        assert again_bytes < 0.55 * kept_bytes
    assert "h (pre-activation)" not in names
    assert [s.what for s in again.stages if s.what.endswith("again") and "h = x W1^T" in s.what] == ["h = x W1^T, again"]


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", ["linear", "grouped_linear", "mlp", "moe"])
def test_torchs_checkpoint(kind, recipe):
    plain, module = make(kind, RECIPES[recipe]), make(kind, RECIPES[recipe], delay_wgrad=True, cache_weights=True)

    def rerun(*args):
        return checkpoint(module, *args, use_reentrant=False)

    assert_all_same(step(module, 0, rerun), step(plain))
    module.backward_dw()
    assert_all_same(grads(module), grads(plain))
    x = torch.ones(40, 20, requires_grad=True)
    if kind == "linear":
        want, got = bs.explain(plain, x), bs.explain(lambda x: checkpoint(plain, x, use_reentrant=False), x)
        assert got.saved_bytes < want.saved_bytes


def test_no_gradient_no_planes():
    p = problem([10, 20], 30, 32, 16)
    with torch.no_grad():
        y = bs.grouped_mlp(p.x, p.w1, p.w2, p.offsets, recipe=RECIPES["mxfp8"], recompute=True)
    assert_all_same({"y": y}, {"y": bs.grouped_mlp(p.x, p.w1, p.w2, p.offsets, recipe=RECIPES["mxfp8"])})
