"""Every operator of the namespace passes torch.library.opcheck, 0 rows and 0 groups included."""

import pytest
import torch
from composed import scaling_of
from operator_calls import (
    dequantize,
    frozen_linear,
    frozen_linear_backward,
    frozen_mlp,
    frozen_mlp_backward,
    permute,
    router,
    router_backward,
    unpermute,
    unpermute_backward,
)
from support import LATER_RECIPES, RECIPES, normal, offsets_of
from torch.library import opcheck

import blockscale as bs
from blockscale.ops.delayed import arguments
from blockscale.ops.tap import Tap
from blockscale.ops.weight_cache import WeightCache
from blockscale.ops.wgrad_queue import WgradQueue

OPS = torch.ops.blockscale
SIZES = {"many": [5, 0, 33], "no_rows": [0, 0, 0], "no_groups": []}
M4, NR = bs.MXFP4(), bs.NVFP4(row_scaled=True, four_over_six="mse")
MX, NV, FT, FB = bs.MXFP8(), bs.NVFP4(hadamard=True, stochastic=True), bs.FP8Tensor("e5m2"), bs.FP8Block()
RNG = torch.tensor([3, 1])
FEW = [RECIPES[name] for name in ("bf16", "mxfp8_hybrid", "nvfp4", "fp8_current", "fp8_block")]
FEW += [LATER_RECIPES[name] for name in ("custom", "planes", "dequantized_nvfp4", "weight_only", "delayed")]


class Setting:
    """Tensors of one step: sizes of groups, rows behind them, H = 20, I = 8."""

    def __init__(self, sizes, room):
        self.offsets = offsets_of(sizes)
        self.G, self.rows = len(sizes), sum(sizes) + room
        self.x, self.dy = normal(self.rows, 20, seed=1), normal(self.rows, 20, seed=2)
        self.w1, self.w2 = normal(self.G, 16, 20, seed=3), normal(self.G, 20, 8, seed=4)
        self.b1, self.b2 = normal(self.G, 16, seed=5), normal(self.G, 20, seed=6)
        self.probs = torch.rand(self.rows, generator=torch.Generator().manual_seed(7))
        self.h, self.da = normal(self.rows, 16, seed=8), normal(self.rows, 8, seed=9)

    def leaf(self, name):
        return getattr(self, name).clone().requires_grad_()

    def packed(self, x, fmt, which, offsets=None, layout="compact"):
        """(tensors, format, layout) of an operand."""
        if fmt is None:
            return [x], "", ""
        q = bs.quantize_grouped(
            x, offsets, fmt, rowwise=which == "rowwise", columnwise=which == "columnwise", layout=layout, rng=RNG
        )
        return q.planes[which].tensors(), fmt.spec(), layout


def quantize(s):
    for fmt, layout in ((MX, "swizzled_8x4"), (M4, "compact"), (NR, "linear"), (NV, "swizzled"), (FT, "compact"), (FB, "linear")):
        amax = torch.ones(2, 1) if fmt is NV else None
        yield s.x, fmt.spec(), True, True, layout, amax, RNG if fmt is NV else None


def quantize_out(s):
    for args in quantize(s):
        yield *args, [t + 1 for t in OPS.quantize(*args)]


def quantize_grouped(s):
    for fmt, layout in (
        (MX, "swizzled"),
        (M4, "swizzled"),
        (NR, "swizzled"),
        (NV, "compact"),
        (FT, "compact"),
        (bs.FP8Block(block=(128, 128)), "compact"),
    ):
        yield s.x, s.offsets, fmt.spec(), fmt is not MX, True, layout, None, RNG if fmt is NV else None


def quantize_grouped_out(s):
    for args in quantize_grouped(s):
        yield *args, [*(t + 1 for t in OPS.quantize_grouped(*args)), s.offsets + 1]


def grouped_gemm(s):
    n, k = 16, 20
    for fmt, layout in (
        (None, ""),
        (MX, "swizzled"),
        (M4, "compact"),
        (NR, "compact"),
        (NV, "compact"),
        (FT, "compact"),
        (FB, "compact"),
    ):
        a, b = s.packed(s.x, fmt, "rowwise", s.offsets, layout), s.packed(s.w1, fmt, "rowwise", None, layout)
        yield *a, *b, s.offsets, "forward", s.rows, n, k, s.b1, s.probs, torch.bfloat16
        a, b = s.packed(s.h, fmt, "rowwise", s.offsets, layout), s.packed(s.w1, fmt, "columnwise", None, layout)
        yield *a, *b, s.offsets, "dgrad", s.rows, n, k, None, None, torch.float32


def grouped_gemm_wgrad_out(s):
    for fmt, layout in (
        (None, ""),
        (MX, "swizzled"),
        (M4, "compact"),
        (NR, "compact"),
        (NV, "compact"),
        (FT, "compact"),
        (FB, "compact"),
    ):
        a, b = s.packed(s.h, fmt, "columnwise", s.offsets, layout), s.packed(s.x, fmt, "columnwise", s.offsets, layout)
        yield *a, *b, s.offsets, s.rows, 16, 20, torch.ones(s.G, 16, 20), fmt is not MX


def activation(s):
    yield s.leaf("h"), None, None, "swiglu", 4
    yield s.leaf("h"), s.leaf("probs"), s.offsets if s.G else torch.tensor([0]), "situ", 0
    yield s.h.bfloat16().requires_grad_(), s.leaf("probs"), s.offsets, "squared_relu", 0


def activation_backward(s):
    yield s.da, s.h, None, None, "clamped_swiglu", 0
    yield s.h, s.h, s.probs, s.offsets, "squared_relu", 0


def activation_quantize(s):
    for fmt, layout in ((MX, "swizzled"), (NV, "compact"), (FT, "compact"), (FB, "compact")):
        yield (
            s.h,
            s.offsets,
            s.probs if fmt is MX else None,
            "swiglu",
            4,
            fmt.spec(),
            True,
            True,
            layout,
            RNG if fmt is NV else None,
        )


def activation_backward_quantize(s):
    for args in activation_quantize(s):
        yield s.da, *args


def quantize_scaled(s):
    for fmt, offsets in ((bs.FP8Delayed(), None), (bs.FP8Delayed("e5m2"), s.offsets)):
        scale = torch.full((1 if offsets is None else s.G,), 3.0)
        yield s.x, offsets, fmt.spec(), True, offsets is None, "compact", scale


def kept(s, recipe, *linears):
    """(scales, histories) of delayed formats."""
    return arguments([(recipe.of(name), scaling_of(recipe.of(name), s.G, 1)) for name in linears], s.x, s.G)


# alive while the operators that hold their tickets run
CACHES, QUEUE, TAP = (WeightCache(), WeightCache()), WgradQueue(), Tap()


def grouped_linear(s):
    for recipe in FEW:
        state = kept(s, recipe, "linear")
        leaves = s.leaf("x"), s.leaf("w1"), s.offsets, s.leaf("b1"), s.leaf("probs")
        yield *leaves, RNG, [], None, None, *state, recipe.spec(), True, None
    main = [torch.ones_like(s.w1)]
    yield s.leaf("x"), s.leaf("w1"), s.offsets, None, None, None, main, None, None, [], [], RECIPES["mxfp8"].spec(), True, None
    yield s.x, s.w1, s.offsets, None, None, None, [], None, None, [], [], RECIPES["fp8_block"].spec(), False, None
    tickets = CACHES[0].ticket, QUEUE.ticket.clone()
    yield s.leaf("x"), s.leaf("w1"), s.offsets, None, None, None, [], *tickets, [], [], RECIPES["mxfp8"].spec(), True, TAP.ticket


def grouped_linear_backward(s):
    for recipe in FEW:
        state = kept(s, recipe, "linear")
        saved = OPS.grouped_linear(s.x, s.w1, s.offsets, None, None, None, [], None, None, *state, recipe.spec(), True, None)[1:]
        x = s.x if recipe.of("linear").saved_plane is None else None
        tensors = s.h, x, saved, s.w1, s.offsets, s.b1, s.probs, RNG
        for main, needs in (([], [True] * 4), ([torch.ones_like(s.w1)], [False, True, False, False])):
            yield *tensors, main, None, None, *kept(s, recipe, "linear"), recipe.spec(), False, needs, None
        yield *tensors, [], CACHES[0].ticket, QUEUE.ticket.clone(), *state, recipe.spec(), True, [True] * 4, TAP.ticket


def grouped_mlp(s):
    for recipe in FEW:
        leaves, state = [s.leaf(n) for n in ("x", "w1", "w2", "probs", "b1", "b2")], kept(s, recipe, "fc1", "fc2")
        yield *leaves[:3], s.offsets, *leaves[3:], RNG, [], [], None, *state, recipe.spec(), "swiglu", 4, True, False, None
        tickets = [c.ticket for c in CACHES], QUEUE.ticket.clone()
        yield *leaves[:3], s.offsets, *leaves[3:], RNG, [], *tickets, *state, recipe.spec(), "swiglu", 4, True, True, TAP.ticket
    main, tensors = [torch.ones_like(s.w1), torch.ones_like(s.w2)], (s.leaf("x"), s.leaf("w1"), s.leaf("w2"), s.offsets)
    yield *tensors, None, None, None, None, main, [], None, [], [], RECIPES["mxfp8"].spec(), "situ", 0, True, False, None


def grouped_mlp_backward(s):
    for recipe in FEW:
        state = kept(s, recipe, "fc1", "fc2")
        args = s.x, s.w1, s.w2, s.offsets, s.probs, s.b1, s.b2, None, [], [], None, *state, recipe.spec(), "swiglu", 0, True
        x = s.x if recipe.of("fc1").saved_plane is None else None
        others = (s.w1, s.w2, s.offsets, s.probs, s.b1, s.b2, RNG)
        _, h, *saved = OPS.grouped_mlp(*args, False, None)
        for main, needs in (
            ([], [True] * 6),
            ([torch.ones_like(s.w1), torch.ones_like(s.w2)], [False, True, True, False, False, True]),
        ):
            yield (
                s.dy,
                x,
                h,
                saved,
                *others,
                main,
                [],
                None,
                *kept(s, recipe, "fc1", "fc2"),
                recipe.spec(),
                "swiglu",
                0,
                False,
                needs,
                None,
            )
        tickets = [c.ticket for c in CACHES], QUEUE.ticket.clone()
        saved = OPS.grouped_mlp(*args, True, None)[1:]
        yield s.dy, x, None, saved, *others, [], *tickets, *state, recipe.spec(), "swiglu", 0, True, [True] * 6, TAP.ticket


def see(s):
    yield s.x, TAP.ticket.clone(), 0
    yield s.leaf("x"), TAP.ticket.clone(), 2
    yield s.x, torch.tensor([-1, 0]), 1


CALLS = {
    f.__name__: f
    for f in (
        quantize,
        quantize_out,
        quantize_grouped,
        quantize_grouped_out,
        quantize_scaled,
        grouped_gemm,
        grouped_gemm_wgrad_out,
        activation,
        activation_backward,
        activation_quantize,
        activation_backward_quantize,
        grouped_linear,
        grouped_linear_backward,
        grouped_mlp,
        grouped_mlp_backward,
        frozen_linear,
        frozen_linear_backward,
        frozen_mlp,
        frozen_mlp_backward,
        router,
        router_backward,
        permute,
        unpermute,
        unpermute_backward,
        dequantize,
        see,
    )
}


def test_no_operator_is_forgotten():
    registered = {n.removeprefix("blockscale::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("blockscale::")}
    assert registered == set(CALLS)


@pytest.mark.parametrize(("sizes", "room"), [("many", 4), ("no_rows", 0), ("no_groups", 0), ("no_groups", 3)])
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, sizes, room):
    s = Setting(SIZES[sizes], room)
    count = 0
    for args in CALLS[name](s):
        result = opcheck(getattr(OPS, name).default, args)
        assert set(result.values()) == {"SUCCESS"}
        assert len(result) == 4
        count += 1
    assert count > 0
