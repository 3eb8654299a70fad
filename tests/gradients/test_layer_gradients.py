"""Autograd of GroupedMLP and GroupedLinear is the public stages composed, bit for bit.

Sums of rows (the gradients of biases, and what a bias adds to the gradient of probs) are compared with float64.
"""

import dataclasses
import itertools

import pytest
import torch
from composed import SUMS, Problem, linear, mlp, problem, run_linear, run_mlp
from support import ACTIVATIONS, GEMM_BOUND, RECIPES, assert_all_same, assert_same, calc_diff, normal, offsets_of, worst_group

import blockscale as bs

SIZES, CAPACITY, HIDDEN, INNER = [37, 0, 128, 1, 65], 250, 70, 44
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def compare(got, want, p: Problem):
    """By bits, after the one rounding to the leaf's dtype; sums within a bound."""
    leaves = p.leaves()
    for name, expected in want.items():
        if name in SUMS or expected.dtype == torch.float64:
            assert got[name].dtype == leaves[name].dtype, name
            bound = GEMM_BOUND + ROUNDING[got[name].dtype]
            # a row's ds is a sum that may cancel: a measure over all rows
            difference = calc_diff(got[name], expected) if name == "probs" else worst_group(got[name], expected)
            assert difference <= bound, name
            continue
        dtype = p.x.dtype if name in ("y", "x") else leaves[name].dtype
        assert_same(got[name], expected.to(dtype), name)
        assert expected.any(), name


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_mlp_is_its_stages(recipe, activation):
    p = problem(SIZES, CAPACITY, HIDDEN, INNER, activation=activation, bias=True, probs=True)
    r = RECIPES[recipe]
    compare(run_mlp(p, r), mlp(p, r), p)


@pytest.mark.parametrize(("bias", "probs"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_mlp_options(recipe, dtype, bias, probs):
    interleave = 4 if bias else None
    p = problem(SIZES, CAPACITY, 33, 20, interleave=interleave, bias=bias, probs=probs, dtype=dtype)
    r = RECIPES[recipe]
    compare(run_mlp(p, r), mlp(p, r), p)


@pytest.mark.parametrize("interleave", [1, 4, 22])
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "situ"])
def test_interleaved_columns_are_the_same_network(activation, interleave):
    """Interleaving the rows of W1 and b1 changes nothing but their order."""
    p = problem(SIZES, CAPACITY, 64, 44, activation=activation, bias=True, probs=True)
    order = torch.arange(88).view(2, -1, interleave).transpose(0, 1).flatten()
    other = dataclasses.replace(p, w1=p.w1[:, order], b1=p.b1[:, order], interleave=interleave)
    for recipe in ("bf16", "fp8_current"):  # blocks along the columns of h do not matter there
        want, got = run_mlp(p, RECIPES[recipe]), run_mlp(other, RECIPES[recipe])
        for name in ("y", "w2", "probs", "b2"):
            assert_same(got[name], want[name], name)
        assert_same(got["w1"], want["w1"][:, order], "w1")
        # a column's sum over rows has an order that depends on its place, and the contraction of dx has another order
        assert worst_group(got["b1"], want["b1"][:, order]) <= GEMM_BOUND
        assert calc_diff(got["x"], want["x"]) <= GEMM_BOUND


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_weights_of_another_dtype(recipe, weight_dtype):
    dtype = torch.bfloat16 if weight_dtype == torch.float32 else torch.float32
    p = problem(SIZES, CAPACITY, HIDDEN, INNER, bias=True, probs=True, dtype=dtype, weight_dtype=weight_dtype)
    compare(run_mlp(p, RECIPES[recipe]), mlp(p, RECIPES[recipe]), p)


@pytest.mark.parametrize("sizes", [[], [0, 0], [77], [1] * 9, [3, 0, 300]])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8_hybrid", "nvfp4", "fp8_block"])
def test_groupings(recipe, sizes):
    r = RECIPES[recipe]
    p = problem(sizes, sum(sizes) + 5, 33, 20, bias=True, probs=True)
    got = run_mlp(p, r)
    if sum(sizes):
        compare(got, mlp(p, r), p)
    else:
        assert got["y"].shape == p.x.shape
        for name, leaf in p.leaves().items():
            assert got[name].shape == leaf.shape, name
        assert all((t == 0).all() for t in got.values())


LEAVES = ("x", "w1", "w2", "probs", "b1", "b2")


@pytest.mark.parametrize("needs", [(name,) for name in LEAVES] + [("x", "w2"), ("w1", "b2"), ("w1", "w2"), ()], ids="+".join)
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8_hybrid", "nvfp4", "fp8_current"])
def test_only_some_inputs_require_a_gradient(recipe, needs):
    p = problem(SIZES, CAPACITY, 33, 20, bias=True, probs=True)
    everything = run_mlp(p, RECIPES[recipe])
    expected = {name: t if name == "y" or name in needs else None for name, t in everything.items()}
    assert_all_same(run_mlp(p, RECIPES[recipe], needs), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_main_grad_accumulates(recipe, dtype):
    """Two backward passes add float32 weight gradients, unrounded, to what is there; weight.grad stays None."""
    r = RECIPES[recipe]
    p = problem(SIZES, CAPACITY, 33, 20, bias=True, probs=True, dtype=dtype)
    q = dataclasses.replace(p, dy=normal(CAPACITY, 33, seed=99, dtype=dtype), rng=torch.tensor([3, 4]))
    buffers = (normal(*p.w1.shape, seed=1), normal(*p.w2.shape, seed=2))
    want = [b.clone() for b in buffers]
    for step in (p, q):
        got, stages = run_mlp(step, r, main_grads=buffers), mlp(step, r)
        want = [b + stages[name] for b, name in zip(want, ("w1", "w2"), strict=True)]
        assert got["w1"] is None
        assert got["w2"] is None
        compare({**got, "w1": stages["w1"].to(dtype), "w2": stages["w2"].to(dtype)}, stages, step)
    assert_same(buffers[0], want[0], "w1")
    assert_same(buffers[1], want[1], "w2")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_module_is_the_operator(recipe):
    """GroupedMLP draws its rng from torch's generator, accumulates as told, and has the operator's gradients."""
    r = RECIPES[recipe]
    p = problem(SIZES, CAPACITY, 33, 20, bias=True, probs=True, interleave=2)
    torch.manual_seed(123)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,))
    p = dataclasses.replace(p, rng=torch.cat((seed, torch.zeros_like(seed))))
    want = run_mlp(p, r)
    for accumulate in (False, True):
        module = bs.nn.GroupedMLP(5, 33, 20, bias=True, recipe=r, glu_interleave=2, accumulate_into_main_grad=accumulate)
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), (p.w1, p.b1, p.w2, p.b2), strict=True):
                parameter.copy_(value)
        if accumulate:
            module.fc1.weight.main_grad, module.fc2.weight.main_grad = torch.ones_like(p.w1), torch.ones_like(p.w2)
        torch.manual_seed(123)
        x, s = p.x.clone().requires_grad_(), p.probs.clone().requires_grad_()
        y = module(x, torch.tensor(SIZES), s)
        y.backward(p.dy)
        got = {"y": y.detach(), "x": x.grad, "w1": module.fc1.weight.grad, "w2": module.fc2.weight.grad, "probs": s.grad}
        got |= {"b1": module.fc1.bias.grad, "b2": module.fc2.bias.grad}
        if accumulate:
            assert got["w1"] is got["w2"] is None
            assert_same(module.fc1.weight.main_grad, 1 + want["w1"], "main_grad 1")
            assert_same(module.fc2.weight.main_grad, 1 + want["w2"], "main_grad 2")
            got |= {"w1": want["w1"], "w2": want["w2"]}
        assert_all_same(got, want, f"accumulate={accumulate}")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_is_its_stages(recipe, dtype, bias):
    p = problem(SIZES, CAPACITY, HIDDEN, 21, bias=bias, dtype=dtype)
    p = dataclasses.replace(p, dy=normal(CAPACITY, 42, seed=6, spread=1.0, dtype=dtype))
    r = RECIPES[recipe]
    want = linear(p, r)
    compare(run_linear(p, r), want, p)
    buffer = torch.ones(p.w1.shape)
    assert run_linear(p, r, buffer)["w1"] is None
    assert run_linear(p, r, buffer)["w1"] is None
    assert_same(buffer, 1 + want["w1"] + want["w1"], "main_grad")


def test_quantized_gradients_are_near_the_exact_ones():
    """The end to end check that no stage is skipped: against float64 autograd of the plain formula."""
    bounds = {"bf16": 0.02, "mxfp8": 0.12, "mxfp8_hybrid": 0.2, "nvfp4": 0.6, "fp8_current": 0.2, "fp8_block": 0.12}
    p = problem([64, 150], 214, 96, 64, bias=True, probs=True)
    leaves = {name: t.double().requires_grad_() for name, t in p.leaves().items()}
    rows = torch.repeat_interleave(torch.arange(2), torch.tensor([64, 150]))
    h = torch.einsum("mh,mwh->mw", leaves["x"], leaves["w1"][rows]) + leaves["b1"][rows]
    a, b = h.chunk(2, 1)
    y = torch.einsum("mi,mhi->mh", a * torch.sigmoid(a) * b, leaves["w2"][rows]) + leaves["b2"][rows]
    y = y * leaves["probs"][:, None]
    y.backward(p.dy.double())
    exact = {"y": y.detach(), **{name: t.grad for name, t in leaves.items()}}
    for recipe, bound in bounds.items():
        got = run_mlp(p, RECIPES[recipe])
        worst = max(calc_diff(got[name], t) for name, t in exact.items())
        assert bound / 20 < worst < bound, recipe


@pytest.mark.parametrize("layer", ["linear", "mlp"])
def test_hybrid_is_honoured(layer):
    """With gradient_element="e5m2" small gradients beside large ones survive and 1.125 does not; with E4M3 the reverse."""
    dy = torch.zeros(32, 32)
    dy[:, 0], dy[:, 1], dy[:, 2] = 1.0, 2.0**-25, 1.125
    expected = {"e4m3": [1.0, 0.0, 1.125], "e5m2": [1.0, 2.0**-25, 1.0]}
    for element, want in expected.items():
        r = bs.recipes.MXFP8Training(element)
        eye = torch.eye(32)[None]
        if layer == "linear":
            x = torch.ones(32, 32, requires_grad=True)
            bs.grouped_linear(x, eye, torch.tensor([0, 32]), recipe=r).backward(dy)
        else:  # relu(1)^2 has the derivative 2; the gradient is rounded twice to the same values
            x = torch.ones(32, 32, requires_grad=True)
            bs.grouped_mlp(x, eye, eye, torch.tensor([0, 32]), activation="squared_relu", recipe=r).backward(dy)
            want = [2 * v for v in want]
        assert x.grad[0, :3].tolist() == want, element
        assert (x.grad[:, 3:] == 0).all()
    p = problem(SIZES, CAPACITY, HIDDEN, INNER)
    other = mlp(p, RECIPES["mxfp8"])
    got = run_mlp(p, RECIPES["mxfp8_hybrid"])
    for name in ("x", "w1", "w2"):
        assert calc_diff(got[name], other[name]) > 0.01, name
    assert_same(got["y"], other["y"], "the forward pass is E4M3 in both")


def test_backward_uses_the_recipe_of_forward():
    p = problem(SIZES, CAPACITY, 33, 20)
    leaves = {name: t.clone().requires_grad_() for name, t in p.leaves().items()}
    with bs.autocast(RECIPES["mxfp8"]):
        y = bs.grouped_mlp(leaves["x"], leaves["w1"], leaves["w2"], p.offsets)
    with bs.autocast(RECIPES["fp8_block"]):
        y.backward(p.dy)
    want = run_mlp(p, RECIPES["mxfp8"])
    assert_all_same({"y": y.detach(), **{name: t.grad for name, t in leaves.items()}}, want)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4", "fp8_block"])
def test_strides_do_not_change_a_bit(recipe):
    """Transposed, sliced and expanded inputs and upstream gradients hold the same numbers: the same bits."""
    p = problem(SIZES, CAPACITY, 32, 24, bias=True, probs=True)
    p.dy[:] = p.dy[:1]
    want = run_mlp(p, RECIPES[recipe])

    def transposed(t):
        return t.mT.contiguous().mT if t.dim() > 1 else torch.stack((t, t), 1)[:, 0]

    other = dataclasses.replace(p, **{name: transposed(t) for name, t in p.leaves().items()}, dy=p.dy[:1].expand(CAPACITY, -1))
    assert not other.w1.is_contiguous()
    assert_all_same(run_mlp(other, RECIPES[recipe]), want)
    other = dataclasses.replace(p, dy=transposed(p.dy))
    assert_all_same(run_mlp(other, RECIPES[recipe]), want)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8_hybrid", "nvfp4"])
def test_torch_autocast_does_not_reach_the_stages(recipe):
    """float32 products stay float32 inside torch.autocast, whose dtype belongs to plain torch operators."""
    p = problem(SIZES, CAPACITY, 33, 20, bias=True, probs=True)
    want = run_mlp(p, RECIPES[recipe])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_all_same(run_mlp(p, RECIPES[recipe]), want)


def test_inference_and_checkpointing():
    p = problem(SIZES, CAPACITY, 33, 20, bias=True)
    module = bs.nn.GroupedMLP(5, 33, 20, bias=True, recipe=RECIPES["nvfp4"])

    def run(call):
        module.zero_grad()
        torch.manual_seed(4)
        x = p.x.clone().requires_grad_()
        y = call(x)
        y.backward(p.dy)
        return {"y": y.detach(), "x": x.grad, **{name: t.grad.clone() for name, t in module.named_parameters()}}

    want = run(lambda x: module(x, offsets=p.offsets))
    again = run(lambda x: torch.utils.checkpoint.checkpoint(lambda t: module(t, offsets=p.offsets), x, use_reentrant=False))
    assert_all_same(again, want)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_same(module(p.x, torch.tensor(SIZES)).clone(), want["y"], context.__name__)


def test_offsets_and_sizes_say_the_same():
    module = bs.nn.GroupedLinear(3, 20, 30)
    x = normal(60, 20, seed=1)
    sizes = torch.tensor([20, 0, 33])
    want = module(x, offsets=offsets_of([20, 0, 33]))
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        assert_same(module(x, sizes.to(dtype)), want, dtype)
    assert want[:53].abs().min(1).values.max() > 0
    assert (want[53:] == 0).all()
