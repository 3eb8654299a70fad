"""LoRA on frozen quantized experts: gradients against float64, merge and unmerge, what is kept for backward."""

import copy
from itertools import pairwise

import pytest
import torch
from support import RECIPES, assert_all_same, assert_same, calc_diff, normal, offsets_of

import blockscale as bs
from blockscale.nn import GroupedMLP, QuantizedGroupedLinear, QuantizedGroupedMLP

G, H, INTERMEDIATE = 3, 40, 72
SIZES, ROWS = [50, 0, 65], 120
OFFSETS = offsets_of(SIZES)
LORA = ("fc1.lora_a", "fc1.lora_b", "fc2.lora_a", "fc2.lora_b")


def make(recipe=None, fmt=None, rank=4, fill=True, **options):
    """A frozen MLP with biases and adapters whose B is not zero."""
    torch.manual_seed(0)
    fmt = bs.MXFP8(block=(32, 32)) if fmt is None else fmt
    mlp = QuantizedGroupedMLP(G, H, INTERMEDIATE, fmt, recipe=recipe, bias=True, **options)
    mlp.add_lora(rank, alpha=2.0 * rank)
    if fill:
        for linear in mlp.linears():
            torch.nn.init.normal_(linear.lora_b, std=0.2)
    return mlp


def inputs(seed=1):
    x, probs = normal(ROWS, H, seed=seed), torch.rand(ROWS, generator=torch.Generator().manual_seed(seed))
    x[OFFSETS[-1] :] = float("nan")  # outside
    return x.requires_grad_(), probs.requires_grad_(), normal(ROWS, H, seed=seed + 1)


def step(mlp, call=None):
    mlp.zero_grad()
    x, probs, dy = inputs()
    torch.manual_seed(5)
    y = (mlp if call is None else call)(x, None, probs, offsets=OFFSETS)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad, **{n: p.grad for n, p in mlp.named_parameters()}}


def exact(mlp):
    """The same step in float64 by autograd, with the values that the planes hold."""
    x, probs, dy = (t.detach().double() for t in inputs())
    x[OFFSETS[-1] :] = 0
    x, probs = x.requires_grad_(), probs.requires_grad_()
    leaves = {n: p.detach().double().requires_grad_() for n, p in mlp.named_parameters()}
    y = torch.zeros(ROWS, H, dtype=torch.float64)

    def linear(name, x, g):
        layer = getattr(mlp, name)
        w = layer.weight.dequantize()[g].double()
        low = 0
        if f"{name}.lora_a" in leaves:
            low = layer.lora_scaling * (x @ leaves[f"{name}.lora_a"][g].T) @ leaves[f"{name}.lora_b"][g].T
        return x @ w.T + low, layer.bias[g].double()

    for g in range(G):
        rows = slice(int(OFFSETS[g]), int(OFFSETS[g + 1]))
        h, bias = linear("fc1", x[rows], g)
        a, b = (h + bias).chunk(2, 1)
        s = probs[rows, None]
        out, bias = linear("fc2", a * torch.sigmoid(a) * b * s, g)
        y[rows] = out + s * bias
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad, **{n: t.grad for n, t in leaves.items()}}


# gradients


def test_exact_integers():
    """Where every number is a small integer nothing is rounded: the linear layer and its gradients are exact."""
    layer = QuantizedGroupedLinear(G, 16, 8, bs.MXFP8())
    layer.add_lora(3, alpha=1.5)
    generator = torch.Generator().manual_seed(0)

    def integers(*shape, most):
        return torch.randint(-most, most + 1, shape, generator=generator).float()

    w = integers(G, 8, 16, most=4)
    layer.weight.fill(lambda g: w[g])
    with torch.no_grad():
        layer.lora_a.copy_(integers(G, 3, 16, most=1))
        layer.lora_b.copy_(integers(G, 8, 3, most=2))
    x, dy = integers(ROWS, 16, most=2).requires_grad_(), integers(ROWS, 8, most=2)
    y = layer(x, offsets=OFFSETS)
    y.backward(dy)

    x64 = x.detach().double().requires_grad_()
    a, b = (p.detach().double().requires_grad_() for p in (layer.lora_a, layer.lora_b))
    parts = [x64[i:j] @ (w[g].double() + 0.5 * b[g] @ a[g]).T for g, (i, j) in enumerate(pairwise(OFFSETS))]
    parts.append(torch.zeros(ROWS - int(OFFSETS[-1]), 8).double())
    want = torch.cat(parts)
    want.backward(dy.double())
    for got, expected in ((y, want), (x.grad, x64.grad), (layer.lora_a.grad, a.grad), (layer.lora_b.grad, b.grad)):
        assert expected.any()
        assert torch.equal(got.double(), expected)


@pytest.mark.parametrize("rank", [1, 5, 33])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_against_float64(rank, recompute):
    mlp = make(rank=rank, recompute=recompute)
    got, want = step(mlp), exact(mlp)
    assert [n for n in got if "." in n] == list(LORA)
    for name, t in want.items():
        # operands are rounded to bfloat16: 2^-9 each
        assert calc_diff(got[name], t) < 0.008, name
        assert calc_diff(torch.zeros_like(t), t) == 1
    assert (got["fc1.lora_a"][1] == 0).all()
    assert (got["dx"][OFFSETS[-1] :] == 0).all()
    assert all(not b.requires_grad and b.grad is None for b in mlp.buffers())


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "bf16"])
def test_gradients_in_each_recipe(recipe):
    r = RECIPES[recipe]
    mlp = make(r, r.weight)
    bound = 0.35 if recipe.startswith("nvfp4") else 0.15
    got, want = step(mlp), exact(mlp)
    for name, t in want.items():
        assert 0.001 < calc_diff(got[name], t) < bound, name
    mlp.recompute = True
    assert_all_same(step(mlp), got, recipe)


@pytest.mark.parametrize("only", ["fc1", "fc2"])
def test_an_adapter_of_one_linear(only):
    mlp = make()
    for name in {"fc1", "fc2"} - {only}:
        getattr(mlp, name).remove_lora()
    got, want = step(mlp), exact(mlp)
    assert [n for n in got if "." in n] == [n for n in LORA if n.startswith(only)]
    for name, t in want.items():
        assert calc_diff(got[name], t) < 0.008, name


def test_some_gradients_alone_have_the_same_bits():
    mlp = make()
    want = step(mlp)
    x, _, dy = inputs()
    probs = inputs()[1].detach()
    mlp(x.detach(), None, probs, offsets=OFFSETS).backward(dy)
    for name, p in mlp.named_parameters():
        assert torch.equal(p.grad, want[name]), name
    mlp.requires_grad_(False).zero_grad()
    mlp(x, None, probs, offsets=OFFSETS).backward(dy)
    assert_same(x.grad, want["dx"])
    assert all(p.grad is None for p in mlp.parameters())


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4_plain"])
def test_a_fresh_adapter_changes_nothing(recipe):
    mlp = make(RECIPES[recipe], fill=False)
    assert all((linear.lora_b == 0).all() and linear.lora_a.any() for linear in mlp.linears())
    got = step(mlp)
    mlp.remove_lora()
    want = step(mlp)
    for name, t in want.items():
        assert torch.equal(got[name], t), name
    assert all((got[n] == 0).all() == n.endswith("a") for n in LORA)


def test_bfloat16():
    mlp = make(dtype=torch.bfloat16)
    mlp.remove_lora()
    mlp.add_lora(4, dtype=torch.float32)
    x, _, dy = inputs()
    x = x.detach().bfloat16().requires_grad_()
    y = mlp(x, offsets=OFFSETS)
    y.backward(dy.bfloat16())
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert mlp.fc2.lora_b.grad.dtype == torch.float32
    assert mlp.fc2.lora_b.grad.any()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_compiles_without_a_break(recipe, recompute):
    torch._dynamo.reset()
    mlp = make(RECIPES[recipe], recompute=recompute)
    want = step(mlp)
    assert_all_same(step(mlp, torch.compile(mlp, fullgraph=True, backend="aot_eager")), want, recipe)


def test_adapters_learn():
    """Adapters alone bring frozen experts to what other experts compute."""
    torch.manual_seed(0)
    mlp = QuantizedGroupedMLP(G, H, INTERMEDIATE, bs.NVFP4(), recipe=RECIPES["mxfp8"])
    target = copy.deepcopy(mlp)
    target.add_lora(2)
    for linear in target.linears():
        torch.nn.init.normal_(linear.lora_b, std=0.3)
    mlp.add_lora(4)
    optimizer = torch.optim.Adam(mlp.parameters(), lr=0.02)
    x = normal(ROWS, H, seed=1)
    with torch.no_grad():
        goal = target(x, offsets=OFFSETS)
    weights = {n: t.clone() for n, t in mlp.named_buffers()}
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (mlp(x, offsets=OFFSETS) - goal).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    assert losses[-1] < 0.3 * losses[0]
    assert_all_same(dict(mlp.named_buffers()), weights)


# merging


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_plain", "fp8_current", "fp8_block"])
def test_merge_and_unmerge(recipe):
    r = RECIPES[recipe]
    mlp = make(r, r.weight)
    before, state = step(mlp), {n: t.clone() for n, t in mlp.state_dict().items()}
    parameters = dict(mlp.named_parameters())
    base = mlp.fc1.weight.dequantize()
    mlp.merge_lora()
    assert list(mlp.parameters()) == []
    assert not any("lora" in name for name in mlp.state_dict())
    low = torch.stack([parameters["fc1.lora_b"][g] @ parameters["fc1.lora_a"][g] * 2.0 for g in range(G)]).detach()
    want = bs.quantize_grouped(base + low, None, r.weight, columnwise=True)
    got = mlp.fc1.weight.tensor()
    for name, plane in want.planes.items():
        assert calc_diff(got.dequantize(plane=name), want.dequantize(plane=name)) < 1e-3  # a product in another order
        assert plane.data.shape == got.planes[name].data.shape
    merged = step(mlp)
    bound = 0.35 if recipe == "nvfp4_plain" else 0.15
    for name in ("y", "dx", "dprobs"):
        assert 0.001 < calc_diff(merged[name], before[name]) < bound, name

    serving = QuantizedGroupedMLP(G, H, INTERMEDIATE, r.weight, recipe=r, bias=True)
    serving.load_state_dict(mlp.state_dict())
    assert_same(step(serving)["y"], merged["y"])

    mlp.unmerge_lora()
    assert {n: id(p) for n, p in mlp.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    assert_all_same(dict(mlp.state_dict()), state)
    assert_all_same(step(mlp), before)


def test_a_merge_can_be_kept_and_half_merged_layers():
    mlp = make()
    mlp.fc2.remove_lora()
    mlp.merge_lora()
    assert mlp.fc1.lora_a is None
    mlp.unmerge_lora()
    assert mlp.fc1.lora_a is not None
    mlp.merge_lora()
    want = step(mlp)
    mlp.remove_lora()  # for good
    mlp.add_lora(2)
    assert_same(step(mlp)["y"], want["y"])


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (RuntimeError, lambda m: m.add_lora(2), r"the layer has an adapter; remove_lora\(\) first"),
        (RuntimeError, lambda m: (m.merge_lora(), m.add_lora(2)), r"the layer has an adapter \(merged\)"),
        (RuntimeError, lambda m: (m.merge_lora(), m.merge_lora()), r"no adapter to merge: it is merged"),
        (RuntimeError, lambda m: m.unmerge_lora(), r"nothing is merged; merge_lora\(\) first"),
        (RuntimeError, lambda m: (m.remove_lora(), m.merge_lora()), r"no adapter to merge; add_lora\(\) first"),
        (ValueError, lambda m: (m.remove_lora(), m.add_lora(0)), r"rank=0 is not legal; it must be at least 1"),
        (TypeError, lambda m: (m.remove_lora(), m.add_lora(2.0)), r"rank=2.0 is float"),
        (ValueError, lambda m: (m.remove_lora(), m.add_lora(2, float("nan"))), r"alpha=nan is not legal"),
        (TypeError, lambda m: (m.remove_lora(), m.add_lora(2, dtype=torch.float64)), r"dtype=torch.float64; legal"),
    ],
)
def test_errors(error, call, message):
    with pytest.raises(error, match=message):
        call(make())


# what is kept


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4", "fp8_current", "fp8_block"])
def test_less_is_kept_than_by_a_layer_that_trains(recipe):
    r = RECIPES[recipe]
    fmt = r.weight or bs.MXFP8()
    x, probs = normal(256, H, seed=1).bfloat16().requires_grad_(), torch.rand(256)
    offsets = offsets_of([100, 0, 150])
    plain = bs.explain(GroupedMLP(G, H, INTERMEDIATE, recipe=r, dtype=torch.bfloat16), x, None, probs, offsets=offsets)
    kept = {}
    for recompute in (False, True):
        mlp = QuantizedGroupedMLP(G, H, INTERMEDIATE, fmt, recipe=r, recompute=recompute, dtype=torch.bfloat16)
        mlp.add_lora(4)
        kept[recompute] = bs.explain(mlp, x, None, probs, offsets=offsets)
    h = 256 * 2 * INTERMEDIATE * 2
    print(f"{recipe}: {plain.saved_bytes} trains, {kept[False].saved_bytes} LoRA, {kept[True].saved_bytes} LoRA, recompute")
    seed = 16 if r.needs_rng else 0
    assert kept[False].saved_bytes == h + seed
    assert kept[True].saved_bytes == seed  # and x, which the caller holds
    assert plain.saved_bytes == h if recipe == "bf16" else plain.saved_bytes > h
    what = [s.what for s in kept[False].stages]
    assert "t1 = x A1^T" in what
    assert "dA2 = dt2^T a" in what
    assert not any(w.startswith(("weight to", "w1 to")) for w in what)
    assert any("columnwise" in w for w in (s.what for s in plain.stages)) == (recipe != "bf16")
    assert not any("columnwise" in w or "both planes" in w for w in what)
    assert "h = x W1^T, again" in [s.what for s in kept[True].stages]
    linear = bs.explain(QuantizedGroupedLinear(G, H, 8, fmt, recipe=r, dtype=torch.bfloat16), x, offsets=offsets)
    assert linear.saved_bytes == seed
    assert str(linear)


def test_a_frozen_mlp_reads_each_linears_formats():
    """W4A8 for fc1, FP8 for fc2, as a custom recipe says: x's gradient is the trained layer's on the same values by bits."""
    formats = {"fc1": (bs.MXFP8(), bs.MXFP8("e5m2")), "fc2": (bs.FP8Tensor(), None), "linear": (bs.FP8Block(), bs.FP8Block())}
    weight = bs.MXFP4((32, 32))

    def choose(role, linear):
        return weight if role == "weight" else formats[linear][role == "gradient"]

    r, offsets = bs.recipes.CustomTraining(choose), offsets_of([5, 0, 33])
    w1, w2 = normal(3, 32, 64, seed=1), normal(3, 64, 16, seed=2)
    q1, q2 = (bs.quantize_grouped(w, None, weight, columnwise=True) for w in (w1, w2))
    results = []
    for call in (lambda x: bs.frozen_mlp(x, q1, q2, offsets, recipe=r), lambda x: bs.grouped_mlp(x, w1, w2, offsets, recipe=r)):
        x = normal(40, 64, seed=3).requires_grad_()
        y = call(x)
        y.backward(normal(40, 64, seed=4))
        results.append({"y": y.detach(), "x": x.grad})
    assert_all_same(results[0], results[1])
    text = str(bs.explain(lambda x: bs.frozen_mlp(x, q1, q2, offsets, recipe=r), normal(40, 64, seed=3).requires_grad_()))
    for part in ("x to MXFP8 E4M3 1x32, rowwise", "a to FP8Tensor E4M3, rowwise", "dh to MXFP8 E5M2 1x32, rowwise"):
        assert part in text
    assert "dy to" not in text
