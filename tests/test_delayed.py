"""Delayed scaling in layers: what is recorded, when scales change, what a state dict holds, and that nothing else changes it."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from layers import KINDS, SIZES, call, grads, make, step
from support import LATER_RECIPES, assert_all_same, assert_same, normal
from torch import nn

import blockscale as bs
from blockscale.reference.delayed import next_scale

RECIPE = bs.recipes.FP8DelayedTraining(history=3)
LAST = bs.recipes.FP8DelayedTraining(history=3, algorithm="most_recent", margin=1)


MIXED = ("delayed", "delayed_dequantized", "delayed_weight", "planes", "w4a8", "custom", "high_precision")


def state(module):
    """The delayed-scaling entries of a state dict."""
    return {name: t.clone() for name, t in module.state_dict().items() if "scaling" in name}


def optimizer(module, lr=0.01):
    return torch.optim.SGD(module.parameters(), lr)


def amax_by_group(x):
    return torch.stack([x[a:b].abs().amax() if b > a else torch.tensor(0.0) for a, b in ((0, 5), (5, 5), (5, 38))])


def test_three_steps_by_hand():
    """A grouped linear: the scales of a step are those that the amaxes of the steps before make; the first is 1."""
    module = make("grouped_linear", RECIPE)
    opt, seen, want = optimizer(module), [], {role: (torch.ones(3), torch.zeros(3, 3)) for role in ("input", "weight", "gradient")}
    for n in range(3):
        assert_all_same({r: module.scaling[r].scale for r in want}, {r: s for r, (s, _) in want.items()}, f"step {n}")
        weight, amax = module.weight.detach().clone(), {}
        for microbatch in (2 * n, 2 * n + 1):
            seen.append(step(module, microbatch)["y"])
            x, dy = normal(40, 20, seed=10 + microbatch, spread=1.0), normal(40, 16, seed=30 + microbatch, spread=1.0)
            new = {"input": amax_by_group(x), "gradient": amax_by_group(dy), "weight": weight.abs().amax((1, 2))}
            amax = {role: torch.maximum(t, amax.get(role, t)) for role, t in new.items()}
        for role, (scale, history) in want.items():
            history[0] = amax[role]
            assert_same(module.scaling[role].amax_history, history, f"step {n} {role}")
            want[role] = next_scale(scale, history, module.scaling[role].fmt)
        opt.step()
        opt.zero_grad()
    assert all((module.scaling[role].scale[0] > 10).all() for role in want)
    assert module.scaling["input"].scale[1] == 1  # a group without rows


@pytest.mark.parametrize("recipe", [RECIPE, LAST], ids=["max", "most_recent"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_a_state_dict(kind, recipe):
    """Resumed in a new layer, and in copies, the next steps are the same by bits; under autocast too."""
    module = make(kind, recipe)
    for n in range(2):
        step(module, n)
        optimizer(module).step()
        module.zero_grad()
    step(module, 2)  # in the middle of a step: slot 0 is not empty
    module.zero_grad()
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    resumed, cast = make(kind, recipe), make(kind, None)
    for fresh in (resumed, cast):
        fresh.load_state_dict(torch.load(file, weights_only=True))
        file.seek(0)
    others = [resumed, copy.deepcopy(module), pickle.loads(pickle.dumps(module))]

    def follow(m):
        found = {}
        for n in (3, 4):
            found |= {f"{name}{n}": t for name, t in step(m, n).items()}
            optimizer(m).step()
            m.zero_grad()
        return found | state(m)

    want = follow(module)
    for other in others:
        assert_all_same(follow(other), want)
    with bs.autocast(recipe):
        assert_all_same(follow(cast), want)


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_train_records_nothing(kind):
    module = make(kind, RECIPE)
    step(module)
    before = state(module)
    with torch.no_grad():
        call(module)(100 * normal(40, 20, seed=5))
    module.eval()
    with torch.inference_mode():
        call(module)(100 * normal(40, 20, seed=5))
    args = (SIZES,) if kind in ("grouped_linear", "mlp") else ()
    text = str(bs.explain(module, normal(40, 20, seed=5).requires_grad_(), *args))
    assert "FP8Delayed" in text
    assert_all_same(state(module), before)
    other = nn.Linear(3, 3)
    other(torch.ones(1, 3)).sum().backward()
    optimizer(other).step()  # another's optimizer
    assert_all_same(state(module), before)
    optimizer(module).step()
    assert any((t != before[name]).any() for name, t in state(module).items() if name.endswith("scale"))


def test_explain_under_autocast_leaves_a_real_state():
    module = make("grouped_linear", None)
    with bs.autocast(RECIPE):
        bs.explain(module, normal(40, 20, seed=5), SIZES)
        assert not module.scaling["input"].amax_history.any()
        step(module)
    assert module.scaling["input"].amax_history[0].any()


@pytest.mark.parametrize("options", [{"cache_weights": True}, {"recompute": True}, {"delay_wgrad": True}], ids=str)
@pytest.mark.parametrize(
    "recipe", ["delayed", "delayed_dequantized", "delayed_weight", "planes", "w4a8", "custom", "high_precision"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_cache_recompute_and_delayed_gradients(kind, recipe, options):
    """Two steps of two microbatches: the same bits as the plain layer, histories included."""
    if "recompute" in options and kind in ("linear", "grouped_linear"):
        pytest.skip("these keep no activation")
    layers = [make(kind, LATER_RECIPES[recipe], **o) for o in ({}, options)]
    results = []
    for module in layers:
        found, opt = {}, optimizer(module)
        for n in range(4):
            found |= {f"{name}{n}": t for name, t in step(module, n).items()}
            if n % 2:
                if "delay_wgrad" in options and module is layers[1]:
                    module.backward_dw()
                found |= {f"{name}.grad{n}": t for name, t in grads(module).items()}
                opt.step()
                opt.zero_grad()
        results.append(found | state(module))
    assert_all_same(results[1], results[0])


@pytest.mark.parametrize("recipe", ["delayed", "delayed_dequantized"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_keep_the_same_state(kind, recipe):
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        module, found = make(kind, LATER_RECIPES[recipe]), {}
        function = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else None
        for n in range(3):
            found |= {f"{name}{n}": t for name, t in step(module, n, function).items()}
            optimizer(module).step()
            found |= {f"{name}.grad{n}": t for name, t in grads(module).items()}
            module.zero_grad()
        results.append(found | state(module))
    assert_all_same(results[1], results[0])
    assert any((t != 1).any() for name, t in results[0].items() if name.endswith("scale"))


def test_a_new_scale_is_a_new_quantized_weight():
    """The cache knows the scale: an update that leaves the weight alone is not missed."""
    module = make("linear", RECIPE, cache_weights=True)
    step(module)
    assert module.weight_cache.misses == 2
    bs.update_scales(module)
    step(module)
    assert module.weight_cache.misses == 4
    step(module)
    assert (module.weight_cache.misses, module.weight_cache.hits) == (4, 2)


def test_scales_stay_float32_and_start_anew_with_the_parameters():
    module = make("grouped_linear", RECIPE)
    step(module)
    optimizer(module).step()
    before = state(module)
    module.to(torch.bfloat16)
    assert module.weight.dtype == torch.bfloat16
    assert_all_same(state(module), before)
    module.to("meta").to_empty(device="cpu").reset_parameters()
    assert all((t == name.endswith("scale")).all() and t.dtype == torch.float32 for name, t in state(module).items())


def test_frozen_weights_are_updated_by_hand():
    module = make("linear", RECIPE)
    module.requires_grad_(False)
    x = normal(40, 20, seed=1).requires_grad_()
    module(x).sum().backward()
    assert (module.scaling["input"].scale == 1).all()
    bs.update_scales(nn.Sequential(module))
    assert_same(module.scaling["input"].scale, 448 / x.detach().abs().amax()[None], "scale")


def test_an_infinity_and_a_zero_keep_the_scale():
    module = make("linear", LAST)
    module.scaling["input"].scale.fill_(3.0)
    for value in (0.0, float("inf")):
        with torch.enable_grad():
            module(torch.full((4, 20), value))
        bs.update_scales(module)
        assert module.scaling["input"].scale.item() == 3.0
    module(torch.full((4, 20), 2.0))
    bs.update_scales(module)
    assert module.scaling["input"].scale.item() == 112.0


class Experts(nn.Module):
    """Fused experts as transformers 5 has them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.gate_up_proj = nn.Parameter(torch.randn(3, 32, 20) / 5)
        self.down_proj = nn.Parameter(torch.randn(3, 20, 16) / 5)
        self.act_fn = nn.SiLU()
        self.is_transposed, self.has_bias, self.is_concatenated = False, False, True

    def forward(self, x, ids, probs):
        raise NotImplementedError


def test_converted_modules_keep_their_scales():
    ids = torch.arange(40)[:, None] % 3
    model = bs.convert_model(nn.ModuleList([nn.Linear(20, 20), Experts()]), RECIPE)
    assert set(model[0].scaling) == {"input", "weight", "gradient"}
    for n in range(2):
        x = normal(40, 20, seed=n)
        y = model[1](model[0](x), ids, torch.ones(40, 1))
        y.square().sum().backward()
        optimizer(model, 1e-4).step()
        model.zero_grad()
    found = state(model)
    assert {name.split(".")[1] for name in found} == {"scaling", "scaling1", "scaling2"}
    assert all((t != 1).all() for name, t in found.items() if name.endswith("scale"))
    assert bs.restore_model(model) is model
    assert state(model) == {}
    assert type(model[1]) is Experts


ERRORS = [
    (lambda: bs.quantize(torch.ones(4, 32), bs.FP8Delayed()), ValueError, r"scale is None; float32, one a group, is needed"),
    (lambda: bs.quantize(torch.ones(4, 32), bs.MXFP8(), scale=torch.ones(1)), ValueError, r"scale is given but the format makes"),
    (
        lambda: bs.quantize(torch.ones(4, 32), bs.FP8Delayed(), scale=torch.ones(1), amax=torch.ones(1)),
        ValueError,
        r"amax is given but fp8delayed",
    ),
    (lambda: bs.quantize(torch.ones(4, 32), bs.FP8Delayed(), scale=torch.ones(2)), ValueError, r"scale has shape \(2,\); \(1,\)"),
    (lambda: bs.FP8Delayed(history=0), ValueError, r"history=0 is not legal; it must be an integer in 1\.\."),
    (lambda: bs.FP8Delayed(margin=0.5), ValueError, r"margin=0.5 is not legal"),
    (lambda: bs.FP8Delayed(algorithm="mean"), ValueError, r"algorithm='mean' is not legal"),
    (lambda: bs.Hybrid(bs.FP8Delayed(), bs.MXFP8()), ValueError, r"rowwise is FP8Delayed, whose scale belongs to both planes"),
    (
        lambda: bs.grouped_linear(torch.ones(4, 8), torch.ones(1, 8, 8), torch.tensor([0, 4]), recipe=RECIPE),
        ValueError,
        r"the recipe's input is FP8Delayed but scaling has no input",
    ),
    (
        lambda: bs.activation_quantize(torch.ones(4, 16), torch.tensor([0, 4]), "swiglu", bs.FP8Delayed()),
        ValueError,
        r"fp8delayed quantizes with a scale that is kept between steps",
    ),
]


@pytest.mark.parametrize(("wrong", "error", "message"), ERRORS, ids=[m[:40] for _, _, m in ERRORS])
def test_what_is_wrong_is_named(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


def test_another_history_length_is_an_error():
    module = make("linear", RECIPE)
    module.recipe = bs.recipes.FP8DelayedTraining(history=4)
    with pytest.raises(ValueError, match=r"has an amax history of 3 entries but its recipe asks for 4; del layer.scaling"):
        module(torch.ones(4, 20))
    del module.scaling
    module(torch.ones(4, 20))
    assert module.scaling["input"].amax_history.shape == (4, 1)


def _rank(rank, folder, reduce):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    module = nn.Sequential(make("linear", RECIPE), bs.nn.Linear(16, 20, recipe=RECIPE))
    bs.reduce_amax_over(module, dist.group.WORLD if reduce else None)
    for n in range(2):
        x = normal(8, 20, seed=10 * rank + n) * (1 + rank)
        module(x).square().sum().backward()
        for p in module.parameters():
            dist.all_reduce(p.grad)
        optimizer(module, 1e-3).step()
        module.zero_grad()
    torch.save({**state(module), "x": normal(8, 20, seed=10 * rank).abs().amax() * (1 + rank)}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("reduce", [True, False])
def test_two_processes(tmp_path, reduce):
    """With the all-reduce both ranks have the same scales, of the larger amax; without it each has its own."""
    mp.spawn(_rank, (str(tmp_path), reduce), nprocs=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    first = [r.pop("x") for r in (one, two)]
    assert first[0] != first[1]
    same = {name: torch.equal(t, two[name]) for name, t in one.items()}
    if reduce:
        assert all(same.values())
        assert_same(one["0.scaling.input.amax_history"][1], torch.stack(first).max()[None], "the oldest entry")
    else:
        assert not same["0.scaling.input.scale"]
        assert not same["1.scaling.gradient.scale"]
        assert same["0.scaling.weight.scale"]
