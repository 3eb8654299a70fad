"""bs.watch names step, layer, role and expert of the first NaN; it changes no bit, and holds nothing."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import threading
import weakref

import pytest
import torch
from layers import SIZES, grads, make, step
from support import RECIPES, assert_all_same, normal
from torch import nn
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale.ops import stages
from blockscale.watching import ROLES, read_log

MLP_ROLES = ["weight1", "weight2", "input", "hidden", "activation", "output", "gradient", "da", "dw1", "dw2", "dh", "dx"]


class Net(nn.Module):
    """Norm, MoE, norm, linear: 6 experts, the second and third module watched from outside."""

    def __init__(self, recipe, **options):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.LayerNorm(32)
        self.moe = bs.nn.MoE(32, 64, 6, 2, recipe=recipe, **options)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        y, loss = self.moe(self.first(x))
        return self.head(self.norm(y)), loss


def train(net, watch, steps, poison=lambda step: None, tokens=96, run=None):
    for k in range(steps):
        x = normal(tokens, 32, seed=k, spread=1.0)
        poison(k)
        y, loss = (net if run is None else run)(x)
        (y.square().mean() + loss).backward()
        watch.step()
        net.zero_grad()


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4", "fp8_current", "fp8_block"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nan_in_one_experts_activation(recipe, every, value, monkeypatch):
    """Planted inside the layer: between the first product's activation and the second product, rows of expert 4, step 3."""
    if value == math.inf and every > 1 and recipe not in ("bf16", "mxfp8"):
        pytest.skip("these formats saturate an infinity: full steps alone tell")
    net, activation, now = Net(RECIPES[recipe]), stages.activation, []

    def planted(h, offsets, probs, act):
        a = activation(h, offsets, probs, act)
        if now and now[-1] == 3 and torch._C._current_graph_task_id() == -1:
            a[int(offsets[4]), 5] = value
        return a

    monkeypatch.setattr(stages, "activation", planted)
    watch = bs.watch(net, every=every)
    train(net, watch, 6, now.append)
    found = watch.first_nan if math.isnan(value) else watch.first_inf
    assert (found.step, found.layer, found.role, found.expert) == (3, "moe.experts", "activation", 4)
    assert (found.experts, found.groups, found.value) == ((4,), 6, 1)
    assert found.before == ("moe.experts", "hidden")
    assert math.isinf(value) or found.trail[0] == ("moe.experts", "output")
    report = watch.report()
    name = "NaN" if math.isnan(value) else "Inf"
    assert f"first {name}: step 3, layer moe.experts, role activation, expert 4 of 6: 1 of " in report
    assert "seen just before it, and clean: layer moe.experts, role hidden" in report


def test_a_nan_in_the_tokens_of_one_expert():
    mlp = bs.nn.GroupedMLP(4, 32, 64, recipe=RECIPES["mxfp8"])
    sizes, watch = torch.tensor([10, 0, 20, 30]), bs.watch(mlp)
    for k in range(4):
        x = normal(70, 32, seed=k)
        x[60:] = math.nan  # past the last group: outside
        if k == 2:
            x[12, 7] = math.nan
        mlp(x.requires_grad_(), sizes).sum().backward()
        watch.step()
    found = watch.first_nan
    assert (found.step, found.layer, found.role, found.expert, found.value) == (2, "(GroupedMLP)", "input", 2, 1)
    assert [role for _, role in found.trail][:3] == ["hidden", "activation", "output"]


def test_a_nan_token_in_a_moe_leads_to_its_experts():
    net = Net(RECIPES["mxfp8"])
    net.first = nn.Identity()
    watch = bs.watch(net)
    for k in range(2):
        x = normal(96, 32, seed=k)
        if k == 1:
            x[17, 3] = math.nan
        net(x)[0].sum().backward()
        watch.step()
    assert (watch.first_nan.step, watch.first_nan.layer, watch.first_nan.role) == (1, "moe.router", "input")
    assert ("moe.experts", "input") in watch.first_nan.trail
    assert len(watch._latest["moe.experts", "input"].experts) == 2  # top-2
    assert "moe.experts    input" in watch.text() or "moe.experts   input" in watch.text()


@pytest.mark.parametrize("where", ["weight", "gradient", "dh"])
def test_a_nan_that_arises_elsewhere(where, monkeypatch):
    net = Net(RECIPES["mxfp8"])
    watch = bs.watch(net, every=1)
    if where == "dh":
        backward = stages.activation_backward

        def planted(dy, h, offsets, probs, act):
            dh, ds = backward(dy, h, offsets, probs, act)
            if watch._step == 1:
                dh[int(offsets[2]), 0] = math.nan
            return dh, ds

        monkeypatch.setattr(stages, "activation_backward", planted)

    def poison(k):
        if k == 1 and where == "weight":
            net.moe.experts.fc2.weight.data[3, 1, 1] = math.nan
        if k == 1 and where == "gradient":
            net.norm.register_full_backward_hook(lambda m, gi, go: (torch.where(gi[0] == gi[0].max(), math.nan, gi[0]),))

    train(net, watch, 3, poison)
    found, want = watch.first_nan, {"weight": ("moe.experts", "weight2", 3), "dh": ("moe.experts", "dh", 2)}
    if where == "gradient":
        assert (found.step, found.role) == (1, "gradient")
        assert found.before == ("norm", "gradient")
    else:
        assert (found.step, found.layer, found.role, found.expert) == (1, *want[where])
    if where == "weight":
        assert "not finite now: moe.experts.fc2.weight" in watch.report()


def test_outside_blockscale():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    watch = bs.watch(model)
    for k in range(4):
        if k == 2:
            model[0].bias.data[3] = math.nan
        model(normal(5, 8, seed=k)).sum().backward()
        watch.step()
    assert (watch.first_nan.step, watch.first_nan.layer, watch.first_nan.role, watch.first_nan.expert) == (2, "0", "output", None)
    assert watch.report().count("0.bias") == 1


# no bit changes


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"delay_wgrad": True}, {"cache_weights": True}])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", ["linear", "grouped_linear", "mlp", "moe"])
def test_the_same_bits_and_every_role(kind, recipe, options):
    if kind in ("linear", "grouped_linear") and "recompute" in options:
        pytest.skip("no such option")
    plain, module = make(kind, RECIPES[recipe], **options), make(kind, RECIPES[recipe], **options)
    watch = bs.watch(module, every=1)
    for m in range(2):
        assert_all_same(step(module, m), step(plain, m), m)
    for layer in (plain, module):
        if "delay_wgrad" in options:
            layer.backward_dw()
    watch.step()
    assert_all_same(grads(module), grads(plain))
    want = MLP_ROLES if kind in ("mlp", "moe") else ["input", "weight", "output", "gradient", "dx", "dw"]
    name = "experts" if kind == "moe" else watch.layers[0]
    assert sorted(role for layer, role in watch._latest if layer == name) == sorted(want)
    assert set(want) <= set(ROLES)
    assert not watch.findings


@pytest.mark.parametrize("options", [{}, {"recompute": True}])
def test_each_tensor_is_counted_once(options):
    """recompute and torch's checkpoint run forward again inside backward: not counted again."""
    for rerun in (False, True):
        net = Net(RECIPES["mxfp8"], **options)
        watch = bs.watch(net, every=1)
        taken = []
        original = watch._arrived
        watch._arrived = lambda s, o=original, t=taken: (t.append(s), o(s))
        train(net, watch, 1, run=(lambda x, n=net: checkpoint(n, x, use_reentrant=False)) if rerun else None)
        elements = {(s.layer, s.role): row[4].item() for (s, _), row in zip(taken[0].slots, taken[0].totals(), strict=True)}
        assert elements["moe.experts", "input"] == elements["moe.experts", "dx"] == 96 * 2 * 32
        assert elements["moe.experts", "hidden"] == 96 * 2 * 128
        assert elements["moe.experts", "weight1"] == elements["moe.experts", "dw1"] == 6 * 128 * 32
        assert elements["head", "output"] == elements["head", "gradient"] == 96 * 8


def test_main_grads_are_seen():
    layer = bs.nn.GroupedLinear(3, 20, 16, recipe=RECIPES["mxfp8"], accumulate_into_main_grad=True, delay_wgrad=True)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    watch = bs.watch(layer, every=1)
    layer(normal(40, 20, seed=1), SIZES).sum().backward()
    layer.backward_dw()
    watch.step()
    row = watch._latest["(GroupedLinear)", "dw"].measured
    assert row[4] == pytest.approx(float(layer.weight.main_grad.abs().max()))


# together


def test_two_watches_of_one_model_and_two_models():
    one, two = Net(RECIPES["mxfp8"]), Net(RECIPES["bf16"])
    outer, other = bs.watch(one), bs.watch(two, filter="moe.*")
    with bs.watch(one, filter=lambda name, module: isinstance(module, bs.nn.GroupedMLP)) as inner:
        assert inner.layers == ["moe.experts"]
        train(one, inner, 1)
        outer.step()
    assert len(one.moe.experts.tap.listeners) == 1
    train(one, outer, 1, lambda k: one.moe.experts.fc1.weight.data.fill_(math.nan))
    assert inner.first_nan is None
    assert outer.first_nan.step == 1
    train(two, other, 1)
    assert other.first_nan is None
    assert other.layers == ["moe.router", "moe.experts"]
    assert {layer for layer, _ in other._latest} == {"moe.router", "moe.experts"}


def test_threads_do_not_mix():
    nets = [Net(RECIPES["mxfp8"]) for _ in range(3)]
    watches = [bs.watch(net, every=1) for net in nets]
    threads = [threading.Thread(target=train, args=(n, w, 4)) for n, w in zip(nets, watches, strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    alone = bs.watch(nets[0], every=1)
    assert all(len(w._history.columns) == 4 and not w.findings for w in watches)
    for a, b in itertools.pairwise(watches):
        assert torch.equal(a._history.grid("amax").nan_to_num(), b._history.grid("amax").nan_to_num())
    alone.close()


def test_closing_leaves_the_model_as_it_was():
    net = Net(RECIPES["mxfp8"])
    watch = bs.watch(net)
    assert net.moe.experts.tap is not None
    assert copy.deepcopy(net).moe.experts.tap.listeners == ()
    y = net(normal(96, 32, seed=0))[0]
    watch.close()
    y.sum().backward()  # a backward of a pass that was watched
    assert net.moe.experts.tap is None
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in net.modules())
    watch.close()
    with pytest.raises(RuntimeError, match="closed"):
        watch.step()
    assert "no NaN" in watch.report()


def test_a_forgotten_watch_hears_nothing_and_no_tensor_is_kept():
    net = Net(RECIPES["mxfp8"])
    watch = bs.watch(net, every=1)
    seen = []
    net.norm.register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out)))
    train(net, watch, 2)
    gc.collect()
    assert [r() for r in seen] == [None, None]
    gone = weakref.ref(watch)
    del watch
    gc.collect()
    assert gone() is None
    train(net, bs.watch(net), 1)


def test_an_error_in_the_step_still_finds_the_nan(tmp_path):
    net = Net(RECIPES["mxfp8"])
    watch = bs.watch(net, log=tmp_path / "w.jsonl")

    def night():
        with watch:
            train(net, watch, 2)
            net.norm.weight.data[0] = math.nan
            net(normal(96, 32, seed=0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        night()
    assert (watch.first_nan.step, watch.first_nan.layer) == (2, "head")
    assert [e["event"] for e in read_log(tmp_path / "w.jsonl")] == ["start", "step", "step", "finding", "step", "end"]


def test_paused():
    net = Net(RECIPES["mxfp8"])
    watch = bs.watch(net)
    train(net, watch, 1)
    with watch.paused():
        net(torch.full((96, 32), math.nan))
    watch.step()
    assert watch.first_nan is None


# compiled


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    torch._dynamo.reset()
    net = Net(RECIPES["mxfp8"])
    watch = bs.watch(net, every=1)
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    train(net, watch, 3, lambda k: k == 2 and net.moe.experts.fc2.weight.data[3].fill_(math.nan), run=compiled)
    keys = list(watch._history.keys)
    assert {layer for layer, _ in keys} == {"first", "moe.router", "moe.experts", "norm", "head"}
    assert {role for layer, role in keys if layer == "head"} == {"input", "output", "gradient"}
    assert sorted(role for layer, role in keys if layer == "moe.experts") == sorted(MLP_ROLES)
    assert (watch.first_nan.step, watch.first_nan.layer, watch.first_nan.role, watch.first_nan.expert) == (
        2, "moe.experts", "weight2", 3,
    )  # fmt: skip


def test_compiled_before_is_said():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    compiled = torch.compile(model, backend="aot_eager")
    compiled(normal(5, 8, seed=1))
    watch = bs.watch(model)
    compiled(normal(5, 8, seed=1)).sum().backward()
    with pytest.warns(UserWarning, match=r"2 of 2 watched layers showed nothing .* torch\._dynamo\.reset"):
        watch.step()
