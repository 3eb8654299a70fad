"""Laws 1, 2, 3 and 6 of GroupedMLP, GroupedLinear and MoE, forward and backward."""

import dataclasses

import pytest
import torch
from composed import problem, run_linear, run_mlp
from groupings import FILLS, Grouping, filled, groupings
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ACTIVATIONS, RECIPES, ROUNDED, assert_all_same, assert_same, normal

import blockscale as bs

ROWS = ("y", "x", "probs")
ALL = ROUNDED | RECIPES


def taken(p, rows: slice, groups: slice, offsets):
    """The part of a problem with these rows and groups."""
    return dataclasses.replace(
        p,
        x=p.x[rows],
        dy=p.dy[rows],
        probs=None if p.probs is None else p.probs[rows],
        w1=p.w1[groups],
        w2=p.w2[groups],
        b1=None if p.b1 is None else p.b1[groups],
        b2=None if p.b2 is None else p.b2[groups],
        offsets=offsets,
    )


def with_fill(p, live: int, fill: float):
    probs = None if p.probs is None else filled(p.probs, live, fill)
    return dataclasses.replace(p, x=filled(p.x, live, fill), dy=filled(p.dy, live, fill), probs=probs)


def check_padded(got, want, live: int, what: str) -> None:
    """Rows equal, dead rows zero, everything else equal."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        if name in ROWS:
            assert_same(got[name][:live], expected, f"{what}: {name}")
            assert not got[name][live:].any(), f"{what}: dead rows of {name}"
        else:
            assert_same(got[name], expected, f"{what}: {name}")


def check(g: Grouping, recipe: str, activation: str, fill: float, dtype, options: tuple[bool, bool], layer: str) -> None:
    bias, probs = options
    sizes, r = list(g.sizes), ALL[recipe]
    p = problem(sizes, g.capacity, 33, 20, activation=activation, bias=bias, probs=probs, dtype=dtype, seed=g.seed)
    run = run_mlp
    if layer == "linear":
        p = dataclasses.replace(p, dy=normal(g.capacity, p.w1.shape[1], seed=g.seed, dtype=dtype))
        run = run_linear
    everything = slice(None)
    want = run(taken(p, slice(0, g.live), everything, g.offsets), r)
    got = run(with_fill(p, g.live, fill), r)
    check_padded(got, want, g.live, f"dead rows hold {fill}")
    assert_all_same(run(with_fill(p, g.live, fill), r), got, "again")
    if r.needs_rng:  # the random bits of a group depend on its index
        return
    for index in g.some_groups(3):
        rows = slice(int(g.offsets[index]), int(g.offsets[index + 1]))
        alone = run(taken(p, rows, slice(index, index + 1), torch.tensor([0, g.sizes[index]])), r)
        for name, expected in alone.items():
            mine = want[name][rows] if name in ROWS else want[name][index : index + 1]
            assert_same(mine, expected, f"{name} of group {index} alone")


ARGUMENTS = {
    # an empty list of groups has no module; the operators with 0 groups are in test_layer_gradients.py
    "g": groupings(max_rows=1500).filter(lambda g: g.sizes),
    "recipe": st.sampled_from(sorted(ALL)),
    "activation": st.sampled_from(ACTIVATIONS),
    "fill": st.sampled_from(FILLS),
    "dtype": st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    "options": st.tuples(st.booleans(), st.booleans()),
    "layer": st.sampled_from(("mlp", "mlp", "linear")),
}


@settings(max_examples=45, deadline=None, derandomize=True)
@given(**ARGUMENTS)
def test_layers_obey_the_laws(g, recipe, activation, fill, dtype, options, layer):
    check(g, recipe, activation, fill, dtype, options, layer)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(ALL))
def test_layers_obey_the_laws_at_length(recipe):
    arguments = ARGUMENTS | {"recipe": st.just(recipe), "g": groupings(max_rows=20_000).filter(lambda g: g.sizes)}
    settings(max_examples=60, deadline=None)(given(**arguments)(check))()


@pytest.mark.parametrize("recipe", sorted(ALL))
def test_every_recipe_with_every_fill(recipe):
    for number, fill in enumerate(FILLS):
        check(
            Grouping((37, 0, 128, 1, 65), 70, number),
            recipe,
            ACTIVATIONS[number],
            fill,
            torch.float32,
            (True, True),
            "mlp" if number < 3 else "linear",
        )


SLOW_RECIPES = [pytest.param(name, marks=[] if name in ("bf16", "mxfp8_hybrid") else pytest.mark.slow) for name in sorted(ALL)]


@pytest.mark.parametrize("recipe", SLOW_RECIPES)
def test_a_thousand_groups(recipe):
    """More groups than any table of a kernel holds, most of them empty."""
    sizes = [7 * (n % 13 == 0) + (n % 97 == 0) for n in range(1000)]
    check(Grouping(tuple(sizes), 3, 1), recipe, "squared_relu", torch.nan, torch.bfloat16, (False, True), "mlp")


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp8_block", "nvfp4_hadamard"])
def test_a_token_does_not_see_the_batch_of_its_expert(recipe):
    """MoE routes rows; the result of two runs on the same tokens is the same, through recycled memory that held NaN."""
    torch.manual_seed(1)
    moe = bs.nn.MoE(32, 24, 5, 2, recipe=ALL[recipe], shared_intermediate=16, aux_loss_coef=0.01)
    x = normal(3, 11, 32, seed=2)

    def run():
        moe.zero_grad()
        leaf = x.clone().requires_grad_()
        y, loss = moe(leaf)
        ((y * y).sum() + loss).backward()
        return {"y": y.detach(), "loss": loss.detach(), "x": leaf.grad, **{n: t.grad.clone() for n, t in moe.named_parameters()}}

    first = run()
    trash = [torch.full((n,), torch.nan) for n in (32, 1000, 24 * 32 * 5, 33 * 32, 66 * 48) for _ in range(20)]
    del trash
    assert_all_same(run(), first)
    assert all(t.any() for t in first.values())
