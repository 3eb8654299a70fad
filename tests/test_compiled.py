"""Layers and operators compile to eager's bits, in one graph, for every recipe and for other sizes."""

import shutil

import pytest
import torch
from support import LATER_RECIPES, RECIPES, assert_all_same, normal
from test_operators import SIZES, Setting

import blockscale as bs

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


def step(call, inputs, parameters):
    """The result and every gradient of one step."""
    for p in parameters.values():
        p.grad = None
    torch.manual_seed(5)
    leaves = [t.clone().requires_grad_() for t in inputs]
    y, loss = call(*leaves)
    ((y.float() ** 2).sum() + loss).backward()
    grads = {f"input {n}": t.grad for n, t in enumerate(leaves)} | {n: p.grad for n, p in parameters.items()}
    return {"y": y.detach(), **grads}


def layer(kind, recipe, **options):
    """(module, function of the inputs, inputs)."""
    torch.manual_seed(1)
    sizes = torch.tensor([5, 0, 33])
    x, probs = normal(40, 20, seed=1), torch.rand(40, generator=torch.Generator().manual_seed(2))
    zero = torch.zeros(())
    if kind == "mlp":
        module = bs.nn.GroupedMLP(3, 20, 8, recipe=recipe, bias=True, glu_interleave=4, **options)
        return module, lambda x, s: (module(x, sizes, s), zero), (x, probs)
    if kind == "linear":
        module = bs.nn.GroupedLinear(3, 20, 16, recipe=recipe, bias=True, **options)
        return module, lambda x: (module(x, sizes), zero), (x,)
    module = bs.nn.MoE(20, 8, 4, 2, recipe=recipe, aux_loss_coef=0.01, shared_intermediate=6, **options)
    return module, module, (x.view(2, 20, 20),)


def check_compiled(kind, recipe, backend="aot_eager"):
    torch._dynamo.reset()
    module, call, inputs = layer(kind, recipe)
    parameters = dict(module.named_parameters())
    want = step(call, inputs, parameters)
    assert all(t.any() for t in want.values())
    got = step(torch.compile(call, fullgraph=True, backend=backend), inputs, parameters)
    assert_all_same(got, want, f"{kind} {backend}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_mlp(recipe):
    check_compiled("mlp", RECIPES[recipe])


@pytest.mark.parametrize("recipe", LATER_RECIPES)
def test_compiled_mlp_of_later_recipes(recipe):
    check_compiled("mlp", LATER_RECIPES[recipe])


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4", "fp8_block"])
@pytest.mark.parametrize("kind", ["linear", "moe"])
def test_compiled_layers(kind, recipe):
    check_compiled(kind, RECIPES[recipe])


@needs_compiler
def test_compiled_by_inductor():
    check_compiled("mlp", RECIPES["mxfp8"], "inductor")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("kind", ["mlp", "linear"])  # of a MoE, inductor may fuse the plain sums of the auxiliary loss
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_layer_compiled_by_inductor(kind, recipe):
    check_compiled(kind, RECIPES[recipe], "inductor")


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_compiled_with_autocast(where):
    torch._dynamo.reset()
    module, call, inputs = layer("mlp", None)
    parameters = dict(module.named_parameters())
    plain = step(call, inputs, parameters)
    for recipe in (RECIPES["mxfp8"], RECIPES["fp8_block"]):

        def cast(*args, recipe=recipe):
            with bs.autocast(recipe):
                return call(*args)

        want = step(cast, inputs, parameters)
        if where == "inside":
            got = step(torch.compile(cast, fullgraph=True, backend="aot_eager"), inputs, parameters)
        else:
            compiled = torch.compile(call, fullgraph=True, backend="aot_eager")

            def outer(*args, compiled=compiled, recipe=recipe):
                with bs.autocast(recipe):
                    return compiled(*args)

            got = step(outer, inputs, parameters)
        assert_all_same(got, want, where)
        assert (want["y"] != plain["y"]).any()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", ["mlp", "linear", "moe"])
def test_compiled_with_main_grad(kind, recipe):
    """Two compiled steps add to main_grad what two eager ones add; weight.grad stays None."""
    torch._dynamo.reset()
    module, call, inputs = layer(kind, RECIPES[recipe], accumulate_into_main_grad=True)
    weights = {n: p for n, p in module.named_parameters() if n.endswith("weight") and "router" not in n}
    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        for p in weights.values():
            p.main_grad = torch.ones_like(p)
        step(function, inputs, dict(module.named_parameters()))
        step(function, inputs, dict(module.named_parameters()))
        assert all(p.grad is None for p in weights.values())
        results.append({n: p.main_grad for n, p in weights.items()})
    assert_all_same(results[1], results[0], kind)
    assert all((t != 1).any() for t in results[0].values())


def test_compiled_for_several_recipes_and_formats():
    """Changing the recipe or the format of a compiled function compiles it again; nothing becomes a symbolic size."""
    torch._dynamo.reset()
    module, call, inputs = layer("mlp", None)
    compiled = torch.compile(lambda x, fmt: bs.quantize(x, fmt, columnwise=True), fullgraph=True, backend="aot_eager")
    for fmt in (bs.MXFP8(), bs.MXFP4(), bs.FP8Block(), bs.NVFP4(), bs.MXFP8("e5m2", (32, 32)), bs.FP8Tensor("e5m2")):
        got, want = compiled(inputs[0], fmt), bs.quantize(inputs[0], fmt, columnwise=True)
        for which, plane in want.planes.items():
            assert_all_same(dict(enumerate(got.planes[which].tensors())), dict(enumerate(plane.tensors())), fmt.spec())
    mlp = torch.compile(call, fullgraph=True, backend="aot_eager")
    few = ("bf16", "mxfp8", "nvfp4", "fp8_block", "custom", "planes", "dequantized_nvfp4")  # torch compiles 8 times at most
    for name in few:
        module.recipe = (RECIPES | LATER_RECIPES)[name]
        assert_all_same(step(mlp, inputs, dict(module.named_parameters())), step(call, inputs, dict(module.named_parameters())))


def test_compiled_for_other_sizes():
    """One compiled function serves other rows and other sizes of groups."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    module = bs.nn.GroupedMLP(3, 20, 8, recipe=RECIPES["mxfp8"])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for sizes in ([5, 0, 33], [0, 0, 64], [130, 1, 2], [2, 2, 2]):
        x = normal(sum(sizes) + 3, 20, seed=sum(sizes))
        parameters = dict(module.named_parameters())
        want = step(lambda x, sizes=sizes: (module(x, torch.tensor(sizes)), torch.zeros(())), (x,), parameters)
        got = step(lambda x, sizes=sizes: (compiled(x, torch.tensor(sizes)), torch.zeros(())), (x,), parameters)
        assert_all_same(got, want, sizes)


def test_compiled_with_the_activation_by_name():
    torch._dynamo.reset()
    s = Setting(SIZES["many"], 4)
    for name in ("swiglu", "situ"):

        def call(x, name=name):
            return bs.grouped_mlp(x, s.w1, s.w2, s.offsets, activation=name)

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert_all_same({"y": compiled(s.x)}, {"y": call(s.x)}, name)
