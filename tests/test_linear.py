"""nn.Linear: GroupedLinear with one group, by bits, behind torch.nn.Linear's interface."""

import pytest
import torch
from support import RECIPES, assert_all_same, assert_same, calc_diff, normal, offsets_of

import blockscale as bs


def pair(recipe, bias=True, dtype=torch.float32):
    """A Linear and a GroupedLinear with the same parameters."""
    torch.manual_seed(0)
    ours = bs.nn.Linear(40, 24, bias=bias, recipe=RECIPES[recipe], dtype=dtype)
    grouped = bs.nn.GroupedLinear(1, 40, 24, bias=bias, recipe=RECIPES[recipe], dtype=dtype)
    with torch.no_grad():
        for a, b in zip(grouped.parameters(), ours.parameters(), strict=True):
            a.copy_(b[None])
    return ours, grouped


def run(module, x, *args, **kwargs):
    torch.manual_seed(7)
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    y = module(leaf, *args, **kwargs)
    y.backward(normal(*y.shape, seed=5).to(y.dtype))
    return {"y": y.detach(), "x": leaf.grad, **{n: p.grad for n, p in module.named_parameters()}}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_is_a_grouped_linear_of_one_group(recipe, dtype, bias):
    ours, grouped = pair(recipe, bias, dtype)
    x = normal(37, 40, seed=1, spread=1.0, dtype=dtype)
    want = run(grouped, x, offsets=offsets_of([37]))
    got = run(ours, x)
    assert_all_same({n: t if n in ("y", "x") else t[None] for n, t in got.items()}, want, recipe)
    assert all(t.any() for t in got.values())


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 5), (2, 0, 4), (2, 3, 4)])
def test_leading_dimensions(shape):
    ours, _ = pair("mxfp8")
    x = normal(*shape, 40, seed=2)
    got, flat = run(ours, x), run(ours, x.reshape(-1, 40))
    assert got["y"].shape == (*shape, 24)
    assert got["x"].shape == x.shape
    plain = torch.nn.functional.linear(x.double(), ours.weight.double(), ours.bias.double())
    assert calc_diff(got["y"], plain) < 0.05
    if x[..., 0].numel() > 1:  # the upstream gradients of a run are drawn in the shape of y
        assert_same(got["y"].reshape(-1, 24), flat["y"], shape)


def test_it_is_a_torch_linear():
    ours, _ = pair("mxfp8")
    torch.manual_seed(0)
    plain = torch.nn.Linear(40, 24)
    assert isinstance(ours, torch.nn.Linear)
    assert_all_same(dict(ours.state_dict()), dict(plain.state_dict()), "same names, shapes and initial values")
    other = bs.nn.Linear(40, 24, recipe=RECIPES["bf16"])
    other.load_state_dict(plain.state_dict())
    assert_same(other(torch.ones(2, 40)), bs.nn.Linear.forward(other, torch.ones(2, 40)))
    assert repr(ours) == "Linear(in_features=40, out_features=24, bias=True, recipe=mxfp8)"
    assert bs.nn.Linear(3, 4, bias=False).bias is None


def test_autocast_and_main_grad():
    module = bs.nn.Linear(40, 24)
    x = normal(9, 40, seed=3)
    with bs.autocast(RECIPES["mxfp8"]):
        inside = run(module, x)
    module.recipe = RECIPES["mxfp8"]
    want = run(module, x)
    assert_all_same(inside, want)
    module.set_options(RECIPES["mxfp8"], accumulate_into_main_grad=True)
    with pytest.raises(ValueError, match=r"weight.main_grad is missing.*\(24, 40\)"):
        module(x)
    module.weight.main_grad = torch.ones(24, 40)
    assert run(module, x)["weight"] is None
    assert_same(module.weight.main_grad, 1 + want["weight"])


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_compiles_to_the_same_bits(recipe):
    torch._dynamo.reset()
    ours, _ = pair(recipe)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((3, 5, 40), (2, 11, 40)):
        x = normal(*shape, seed=4)
        want = run(ours, x)
        torch.manual_seed(7)
        ours.zero_grad()
        leaf = x.clone().requires_grad_()
        y = compiled(leaf)
        y.backward(normal(*y.shape, seed=5))
        got = {"y": y.detach(), "x": leaf.grad, **{n: p.grad for n, p in ours.named_parameters()}}
        assert_all_same(got, want, shape)


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (ValueError, lambda: bs.nn.Linear(0, 4), "in_features=0 .* at least 1"),
        (ValueError, lambda: bs.nn.Linear(4, 0), "out_features=0 .* at least 1"),
        (TypeError, lambda: bs.nn.Linear(4, 4, recipe="mxfp8"), "recipe is str"),
        (ValueError, lambda: bs.nn.Linear(4, 4)(torch.ones(2, 5)), r"x has shape \(2, 5\); \[..., 4\]"),
        (ValueError, lambda: bs.nn.Linear(4, 4)(torch.tensor(1.0)), r"x has shape \(\); \[..., 4\]"),
        (TypeError, lambda: bs.nn.Linear(4, 4)(torch.ones(2, 4).double()), "x has dtype torch.float64"),
    ],
)
def test_errors(error, call, message):
    with pytest.raises(error, match=message):
        call()
