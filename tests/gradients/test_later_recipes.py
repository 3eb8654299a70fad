"""W4A8, custom recipes, hybrid planes, columnwise sources and backward modes: autograd is the public stages composed."""

import dataclasses

import pytest
import torch
from composed import linear, mlp, problem, run_linear, run_mlp
from support import LATER_RECIPES, assert_same, calc_diff, normal
from test_layer_gradients import CAPACITY, HIDDEN, INNER, SIZES, compare

import blockscale as bs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", LATER_RECIPES)
def test_mlp_is_its_stages(recipe, bias, dtype):
    p = problem(SIZES, CAPACITY, HIDDEN, INNER, bias=bias, probs=True, dtype=dtype)
    compare(run_mlp(p, LATER_RECIPES[recipe]), mlp(p, LATER_RECIPES[recipe]), p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", LATER_RECIPES)
def test_linear_is_its_stages(recipe, dtype):
    p = problem(SIZES, CAPACITY, HIDDEN, 21, bias=True, dtype=dtype)
    p = dataclasses.replace(p, dy=normal(CAPACITY, 42, seed=6, spread=1.0, dtype=dtype))
    r = LATER_RECIPES[recipe]
    compare(run_linear(p, r), linear(p, r), p)
    buffer = torch.ones(p.w1.shape)
    assert run_linear(p, r, buffer)["w1"] is None
    assert_same(buffer, 1 + linear(p, r)["w1"], "main_grad")


@pytest.mark.parametrize("recipe", LATER_RECIPES)
def test_texts(recipe):
    r = LATER_RECIPES[recipe]
    assert bs.recipes.parse_recipe(r.spec()) == r


def test_backward_modes_by_hand():
    """x = 1.1 is 1.125 in E4M3 and 1.1015625 in bfloat16: what wgrad reads shows in dW, what dgrad reads in dx."""
    x, w, offsets = torch.full((32, 32), 1.1), torch.full((1, 32, 32), 0.55), torch.tensor([0, 32])
    seen = {"quantized": (1.125, 0.5625), "high_precision": (1.1015625, 0.55078125), "dequantized": (1.125, 0.5625)}
    for mode, (x_seen, w_seen) in seen.items():
        r = bs.recipes.MXFP8Training()
        leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = bs.grouped_linear(leaf, weight, offsets, recipe=r if mode == "quantized" else r.with_backward(mode))
        y.backward(torch.ones(32, 32))
        assert (y == 32 * 1.125 * 0.5625).all()
        assert (weight.grad == 32 * x_seen).all(), mode
        assert (leaf.grad == 32 * w_seen).all(), mode


def test_backward_modes_keep_what_they_say():
    kept = {}
    for mode in ("quantized", "high_precision", "dequantized"):
        r = bs.recipes.MXFP8Training()
        layer = bs.nn.GroupedLinear(2, 64, 32, recipe=r if mode == "quantized" else r.with_backward(mode))
        found = bs.explain(layer, torch.randn(256, 64), torch.tensor([128, 128]))
        kept[mode] = {t.name for t in found.saved if t.owned and t.name.startswith("x ")}
        quantizers = [s.what for s in found.stages if s.direction == "backward" and s.what.startswith(("dy to", "weight"))]
        assert len(quantizers) == {"quantized": 2, "high_precision": 0, "dequantized": 1}[mode]
    assert kept["quantized"] == {"x columnwise data", "x columnwise scale"}
    assert kept["dequantized"] == {"x rowwise data", "x rowwise scale"}
    assert kept["high_precision"] == set()


def test_explain_names_the_format_of_each_linear():
    layer = bs.nn.GroupedMLP(2, 64, 32, recipe=LATER_RECIPES["custom"])
    text = [s.what for s in bs.explain(layer, torch.randn(40, 64), torch.tensor([20, 20])).stages]
    for part in ("w1 to FP8Block E4M3 128x128, rowwise", "w2 to MXFP4 E2M1 1x32, rowwise", "dy to FP8Tensor E5M2, both planes"):
        assert part in text
    assert any(t.startswith("x to rowwise MXFP8 E4M3 1x32, columnwise NVFP4") for t in text)
    assert not any(t.startswith("a to") for t in text)


def test_a_custom_recipe_is_asked_once_for_each_pair():
    asked = []

    def choose(role, linear):
        asked.append((role, linear))
        return bs.MXFP8()

    r = bs.recipes.CustomTraining(choose)
    assert len(asked) == len(set(asked)) == 9
    assert r == bs.recipes.MXFP8Training()
    asked.clear()
    r = bs.recipes.CustomTraining(choose, "high_precision")
    assert len(asked) == 6
    assert r == bs.recipes.MXFP8Training().with_backward("high_precision")


@pytest.mark.parametrize(
    ("recipe", "forward_bound", "backward_bound"),
    [
        ("w4a8", 0.4, 0.5),
        ("w4a8_nvfp4", 0.25, 0.3),
        ("mxfp4", 0.45, 0.6),
        ("high_precision", 0.07, 0.07),
        ("weight_only", 0.2, 0.25),
    ],
)
def test_results_are_near_those_of_bf16(recipe, forward_bound, backward_bound):
    p = problem([64, 150], 214, 96, 64, bias=True, probs=True)
    want, got = run_mlp(p, bs.recipes.BF16()), run_mlp(p, LATER_RECIPES[recipe])
    errors = {name: calc_diff(got[name], t) for name, t in want.items()}
    print(recipe, {name: round(e, 4) for name, e in errors.items()})
    assert forward_bound / 20 < errors["y"] < forward_bound
    assert backward_bound / 20 < max(errors[name] for name in ("x", "w1", "w2")) < backward_bound
