"""Bad input: every message names the argument, its value and what is legal, and nothing was written before it was raised."""

import re

import pytest
import torch
from support import normal, offsets_of

import blockscale as bs
from blockscale.ops.activation_quantize import activation_backward_quantize, activation_quantize

M, K, N, G = 12, 8, 6, 3
X, W, DY = normal(M, K, seed=1), normal(G, N, K, seed=2), normal(M, N, seed=3)
SIZES, OFFSETS = torch.tensor([5, 0, 4]), offsets_of([5, 0, 4])
W1, W2 = normal(G, 2 * N, K, seed=4), normal(G, K, N, seed=5)
BAD_OFFSETS = {
    "past": (torch.tensor([0, 5, 5, 13]), r"offsets\[-1\]=13.*12 rows"),
    "decrease": (torch.tensor([0, 7, 5, 9]), r"offsets decrease at group 1: offsets\[1\]=7, offsets\[2\]=5.*at least"),
    "start": (torch.tensor([1, 5, 5, 9]), r"offsets\[0\]=1.*start at 0"),
    "dtype": (OFFSETS.int(), r"offsets has dtype torch.int32; legal: torch.int64"),
    "shape": (OFFSETS[None], r"offsets has shape \(1, 4\); .*num_groups \+ 1|offsets has shape \(1, 4\); \(4,\)"),
    "empty": (OFFSETS[:0], r"offsets has shape \(0,\); "),
    "device": (
        OFFSETS.to("meta"),
        r"offsets is on meta(; it must be on the device of h,| but \w+ is on) cpu|\w+ is on cpu but offsets is on meta",
    ),
    "type": ([0, 5, 5, 9], r"offsets is list; a tensor of dtype torch.int64"),
}
MX, NV, FT, FB = bs.MXFP8(), bs.NVFP4(), bs.FP8Tensor(), bs.FP8Block()


def grouped(x=X, offsets=OFFSETS, fmt=MX, **options):
    return bs.quantize_grouped(x, offsets, fmt, **({"columnwise": True} | options))


def gemm(a=None, b=None, **options):
    return bs.grouped_gemm(
        grouped() if a is None else a, bs.quantize_grouped(W, None, MX, columnwise=True) if b is None else b, **options
    )


def wgrad(a=None, b=None, **options):
    return bs.grouped_gemm(grouped(DY) if a is None else a, grouped() if b is None else b, role="wgrad", **options)


def linear(x=X, w=W, offsets=OFFSETS, *args, **options):
    return bs.grouped_linear(x, w, offsets, *args, **options)


def mlp(x=X, w1=W1, w2=W2, offsets=OFFSETS, **options):
    return bs.grouped_mlp(x, w1, w2, offsets, **options)


# offsets and sizes

TAKES_OFFSETS = {
    "quantize_grouped": lambda o: grouped(offsets=o),
    "grouped_gemm": lambda o: bs.grouped_gemm(X, W, offsets=o),
    "grouped_gemm wgrad": lambda o: bs.grouped_gemm(DY, X, role="wgrad", offsets=o),
    "grouped_linear": lambda o: linear(offsets=o),
    "grouped_mlp": lambda o: mlp(offsets=o),
    "GroupedLinear": lambda o: bs.nn.GroupedLinear(G, K, N)(X, offsets=o),
    "GroupedMLP": lambda o: bs.nn.GroupedMLP(G, K, N)(X, offsets=o),
    "activation_quantize": lambda o: activation_quantize(X, o, "swiglu", MX),
    "activation_backward_quantize": lambda o: activation_backward_quantize(X[:, :4], X, o, "swiglu", MX),
}


@pytest.mark.parametrize("bad", BAD_OFFSETS)
@pytest.mark.parametrize("call", TAKES_OFFSETS)
def test_offsets(call, bad):
    offsets, message = BAD_OFFSETS[bad]
    if call.startswith("activation") and bad in ("dtype", "shape"):
        message = "offsets"
    with pytest.raises(TypeError if bad in ("dtype", "type") else ValueError, match=message):
        TAKES_OFFSETS[call](offsets)


@pytest.mark.parametrize("call", ["GroupedLinear", "GroupedMLP"])
@pytest.mark.parametrize(
    ("error", "sizes", "message"),
    [
        (ValueError, torch.tensor([5, 0, 8]), r"offsets\[-1\]=13: the sizes sum to more than the 12 rows"),
        (ValueError, torch.tensor([5, -2, 4]), r"offsets decrease at group 1.*size is not negative"),
        (ValueError, torch.tensor([5, 0]), r"offsets has shape \(3,\); \(4,\) is needed for 3 groups"),
        (ValueError, SIZES[None], r"sizes has shape \(1, 3\).*\(G,\)"),
        (TypeError, SIZES.float(), r"sizes is torch.float32; an integer tensor"),
        (TypeError, SIZES.bool(), r"sizes is torch.bool; an integer tensor"),
        (TypeError, [5, 0, 4], r"sizes is list; an integer tensor"),
        (ValueError, SIZES.to("meta"), r"offsets is on meta but x is on cpu"),
        (ValueError, None, r"neither of sizes and offsets given; exactly one"),
    ],
)
def test_sizes(call, error, sizes, message):
    layer = bs.nn.GroupedLinear(G, K, N) if call == "GroupedLinear" else bs.nn.GroupedMLP(G, K, N)
    with pytest.raises(error, match=message):
        layer(X, sizes)
    with pytest.raises(ValueError, match=r"both of sizes and offsets given; exactly one"):
        layer(X, SIZES, offsets=OFFSETS)


# everything else: (error, call, what the message says)

VALUES = [
    # quantize
    (
        TypeError,
        lambda: bs.quantize(X.double(), MX),
        r"x has dtype torch.float64; legal: torch.float32, torch.bfloat16, torch.float16",
    ),
    (TypeError, lambda: bs.quantize(X.int(), MX), r"x has dtype torch.int32; legal: torch.float32"),
    (TypeError, lambda: bs.quantize([[1.0]], MX), r"x is list; a tensor"),
    (ValueError, lambda: bs.quantize(X[0], MX), r"x has shape \(8,\); \(M, K\)"),
    (ValueError, lambda: bs.quantize(X[:, :0], MX), r"x has shape \(12, 0\): K=0 columns; at least 1"),
    (TypeError, lambda: bs.quantize(X, "mxfp8"), r"fmt is str; a format such as MXFP8\(\)"),
    (TypeError, lambda: bs.quantize(X, None), r"fmt is NoneType; a format"),
    (ValueError, lambda: bs.quantize(X, MX, rowwise=False), r"rowwise=False and columnwise=False: at least one"),
    (ValueError, lambda: bs.quantize(X, MX, layout="tiled"), r"layout='tiled' is not legal for mxfp8.*'compact', 'swizzled'"),
    (
        ValueError,
        lambda: bs.quantize(X, FB, layout="swizzled"),
        r"layout='swizzled' is not legal for fp8block.*'compact', 'linear'",
    ),
    (ValueError, lambda: bs.quantize(X, MX, amax=torch.ones(1)), r"amax is given but mxfp8 has no global scale"),
    (ValueError, lambda: bs.quantize(X, FB, amax=torch.ones(1)), r"amax is given but fp8block has no global scale"),
    (ValueError, lambda: bs.quantize(X, NV, amax=torch.ones(3)), r"amax has shape \(3,\); \(1,\) or \(2, 1\)"),
    (TypeError, lambda: bs.quantize(X, FT, amax=torch.ones(1).double()), r"amax has dtype torch.float64; legal: torch.float32"),
    (ValueError, lambda: bs.quantize(X, FT, amax=torch.ones(1, device="meta")), r"amax is on meta but x is on cpu"),
    (ValueError, lambda: grouped(fmt=NV, amax=torch.ones(1)), r"amax has shape \(1,\); \(3,\) or \(2, 3\)"),
    (ValueError, lambda: grouped(layout="linear"), r"layout='linear' is not legal for mxfp8 here; legal: 'compact', 'swizzled'"),
    (ValueError, lambda: bs.quantize_grouped(X, None, MX), r"x has shape \(12, 8\) and offsets is None; \(G, N, K\)"),
    (ValueError, lambda: bs.quantize_grouped(X[:, :0], OFFSETS, MX), r"x has shape \(12, 0\): K=0 columns"),
    (TypeError, lambda: bs.quantize_grouped(W.double(), None, MX), r"x has dtype torch.float64"),
    # random bits
    (
        TypeError,
        lambda: bs.quantize(X, bs.NVFP4(stochastic=True), rng=torch.ones(2)),
        r"rng has dtype torch.float32; legal: torch.int64",
    ),
    (
        ValueError,
        lambda: bs.quantize(X, bs.NVFP4(stochastic=True), rng=torch.tensor([1])),
        r"rng has shape \(1,\); \(2,\).*seed, offset",
    ),
    (TypeError, lambda: bs.quantize(X, bs.NVFP4(stochastic=True), rng=5), r"rng is int; a tensor of dtype torch.int64"),
    (
        ValueError,
        lambda: bs.quantize(X, bs.NVFP4(stochastic=True), rng=torch.tensor([1, 2]), generator=torch.Generator()),
        r"rng and generator are both given; one",
    ),
    (
        ValueError,
        lambda: bs.quantize(X, bs.NVFP4(stochastic=True), rng=torch.tensor([1, 2], device="meta")),
        r"rng is on meta but x is on cpu",
    ),
    # formats, planes, layouts
    (ValueError, lambda: bs.MXFP8("e3m4"), r"element='e3m4' is not legal.*'e4m3', 'e5m2'"),
    (ValueError, lambda: bs.MXFP8(block=(1, 16)), r"block=\(1, 16\) is not legal.*\(1, 32\), \(32, 32\)"),
    (ValueError, lambda: bs.MXFP8(scale_rounding="down"), r"scale_rounding='down' is not legal.*'up', 'floor'"),
    (ValueError, lambda: bs.MXFP8(nan="drop"), r"nan='drop' is not legal.*'propagate', 'ignore'"),
    (ValueError, lambda: bs.NVFP4(block=(1, 32)), r"block=\(1, 32\) is not legal.*\(1, 16\)"),
    (ValueError, lambda: bs.NVFP4((16, 16), hadamard=True), r"hadamard=True is not legal with block=\(16, 16\)"),
    (ValueError, lambda: bs.FP8Tensor("e2m1"), r"element='e2m1' is not legal"),
    (ValueError, lambda: bs.FP8Block(eps=-1.0), r"eps=-1.0 is not legal; .*>= 0"),
    (ValueError, lambda: bs.formats.parse("mxfp9"), r"'mxfp9': kind 'mxfp9' is not one of .*'mxfp8'"),
    (ValueError, lambda: bs.formats.parse("mxfp8:size=3"), r"option 'size' is not one of .*'element'"),
    (ValueError, lambda: bs.formats.parse("fp8tensor:eps=x"), r"'x' is not a legal value"),
    (ValueError, lambda: bs.quantize(X, MX).dequantize(plane="columnwise"), r"plane='columnwise' is absent.*columnwise=False"),
    (ValueError, lambda: bs.quantize(X, MX).dequantize(plane="rows"), r"plane='rows' is not one of .*'rowwise', 'columnwise'"),
    (IndexError, lambda: grouped().group(3), r"index=3 is not a group; legal are 0..2"),
    (IndexError, lambda: grouped().group(-1), r"index=-1 is not a group; legal are 0..2"),
    (ValueError, lambda: grouped().to_padded(48), r"alignment=48 is not one of 32, 64, 128, 256"),
    (ValueError, lambda: bs.quantize(X, MX).with_layout("tiled"), r"layout='tiled' is not one of .*'compact'"),
    (ValueError, lambda: grouped().with_layout("tiled"), r"layout='tiled' is not"),
    (ValueError, lambda: bs.layouts.swizzle(torch.zeros(4, 4), plane="rows"), r"plane='rows' is not one of"),
    (ValueError, lambda: bs.layouts.swizzle(torch.zeros(4)), r"scale has shape \(4,\); a 2-D"),
    (ValueError, lambda: bs.layouts.unswizzle(torch.zeros(9), (4, 4)), r"flat has 9 elements; shape=\(4, 4\).*needs 512"),
    # grouped_gemm
    (ValueError, lambda: gemm(role="backward"), r"role='backward' is not one of \('forward', 'dgrad', 'wgrad'\)"),
    (ValueError, lambda: bs.grouped_gemm(X, W), r"offsets is None and no quantized activation carries them; int64"),
    (TypeError, lambda: bs.grouped_gemm(X.double(), W, offsets=OFFSETS), r"a has dtype torch.float64; legal"),
    (TypeError, lambda: bs.grouped_gemm(X, W.double(), offsets=OFFSETS), r"b has dtype torch.float64; legal"),
    (ValueError, lambda: bs.grouped_gemm(X[0], W, offsets=OFFSETS), r"a has shape \(8,\); \(capacity, K\)"),
    (ValueError, lambda: bs.grouped_gemm(X[:, :0], W[:, :, :0], offsets=OFFSETS), r"a has shape \(12, 0\): K=0 columns"),
    (ValueError, lambda: bs.grouped_gemm(X, W[:2], offsets=OFFSETS), r"b has shape \(2, 6, 8\); \(3, N, K\)"),
    (ValueError, lambda: gemm(b=W.to("meta")), r"b is on meta but offsets is on cpu"),
    (ValueError, lambda: gemm(b=W[:, :, :5]), r"a has 8 columns; forward with b of 6 x 5 a group needs 5"),
    (ValueError, lambda: gemm(role="dgrad"), r"a has 8 columns; dgrad with b of 6 x 8 a group needs 6"),
    (ValueError, lambda: gemm(b=bs.quantize_grouped(W[:2], None, MX)), r"b was quantized from 2 matrices; .* of 3 groups"),
    (ValueError, lambda: gemm(b=grouped()), r"b was quantized from no weights \(G, N, K\); .* of 3 groups"),
    (ValueError, lambda: gemm(a=grouped(rowwise=False)), r"a: plane='rowwise' is absent.*rowwise=False"),
    (ValueError, lambda: gemm(grouped(DY), bs.quantize_grouped(W, None, MX), role="dgrad"), r"b: plane='columnwise' is absent"),
    (ValueError, lambda: wgrad(b=grouped(columnwise=False)), r"b: plane='columnwise' is absent.*columnwise=False"),
    (ValueError, lambda: gemm(bias=torch.ones(N)), r"bias has shape \(6,\); \(3, 6\)"),
    (TypeError, lambda: gemm(bias=torch.ones(G, N).int()), r"bias has dtype torch.int32; legal"),
    (ValueError, lambda: gemm(bias=torch.ones(G, N, device="meta")), r"bias is on meta but offsets is on cpu"),
    (ValueError, lambda: gemm(bias=torch.ones(G, N), bias_scale=torch.ones(9)), r"bias_scale has shape \(9,\); \(12,\).*one a row"),
    (TypeError, lambda: gemm(bias=torch.ones(G, N), bias_scale=torch.ones(M).half()), r"bias_scale has dtype torch.float16"),
    (
        ValueError,
        lambda: bs.grouped_gemm(DY, W, role="dgrad", offsets=OFFSETS, bias=torch.ones(G, K)),
        r"bias is for role='forward', not 'dgrad'",
    ),
    (ValueError, lambda: wgrad(bias=torch.ones(G, N)), r"bias is for role='forward', not 'wgrad'"),
    (ValueError, lambda: gemm(out=torch.ones(M, N)), r"out and accumulate are for role='wgrad'; role='forward'"),
    (ValueError, lambda: gemm(accumulate=True), r"out and accumulate are for role='wgrad'"),
    (TypeError, lambda: gemm(out_dtype=torch.float64), r"out_dtype=torch.float64; legal: torch.float32"),
    (TypeError, lambda: wgrad(out_dtype=torch.bfloat16), r"out_dtype=torch.bfloat16; wgrad is torch.float32"),
    (ValueError, lambda: wgrad(accumulate=True), r"accumulate=True needs out"),
    (ValueError, lambda: wgrad(b=grouped(normal(13, K, seed=1))), r"b has 13 rows but a has 12; wgrad contracts"),
    (
        ValueError,
        lambda: wgrad(grouped(DY, fmt=bs.NVFP4(hadamard=True)), grouped(fmt=NV)),
        r"hadamard is True for a and False for b; wgrad needs the same",
    ),
    # one extent: two different ones, or one that does nothing
    (ValueError, lambda: gemm(offsets=offsets_of([4, 1, 4])), r"offsets"),
    (ValueError, lambda: wgrad(b=grouped(offsets=offsets_of([4, 1, 4]))), r"offsets"),
    (ValueError, lambda: gemm(bias_scale=torch.ones(M)), r"bias_scale.*bias"),
    (ValueError, lambda: wgrad(bias_scale=torch.ones(M)), r"bias_scale.*"),
    # grouped_linear
    (TypeError, lambda: linear(X.double()), r"x has dtype torch.float64; legal"),
    (ValueError, lambda: linear(X[None]), r"x has shape \(1, 12, 8\); \(M, K\)"),
    (ValueError, lambda: linear(X[:, :0], W[:, :, :0]), r"x has shape \(12, 0\): K=0 columns; at least 1"),
    (TypeError, lambda: linear(w=W.int()), r"weight has dtype torch.int32; legal"),
    (ValueError, lambda: linear(w=W[0]), r"weight has shape \(6, 8\); \(G, N, K\)"),
    (ValueError, lambda: linear(w=W[:, :0]), r"weight has shape \(3, 0, 8\); .*N, K >= 1"),
    (ValueError, lambda: linear(w=W[:, :, :5]), r"weight has K=5 inputs but its input has 8 columns"),
    (ValueError, lambda: linear(w=W[:2]), r"offsets has shape \(4,\); \(3,\) is needed for 2 groups"),
    (ValueError, lambda: linear(w=W.to("meta")), r"weight is on meta but x is on cpu"),
    (ValueError, lambda: linear(X, W, OFFSETS, torch.ones(N)), r"bias has shape \(6,\); \(3, 6\)"),
    (TypeError, lambda: linear(X, W, OFFSETS, torch.ones(G, N).long()), r"bias has dtype torch.int64"),
    (ValueError, lambda: linear(main_grad=torch.zeros(G, K, N)), r"main_grad has shape \(3, 8, 6\); \(3, 6, 8\).*weight"),
    (
        TypeError,
        lambda: linear(main_grad=torch.zeros(G, N, K).bfloat16()),
        r"main_grad has dtype torch.bfloat16; legal: torch.float32",
    ),
    (ValueError, lambda: linear(main_grad=torch.zeros(G, N, K, device="meta")), r"main_grad is on meta but x is on cpu"),
    (TypeError, lambda: linear(recipe="mxfp8"), r"recipe is str; "),
    (TypeError, lambda: linear(recipe=bs.recipes.NVFP4Training(), rng=torch.ones(2)), r"rng has dtype torch.float32"),
    (ValueError, lambda: linear(recipe=bs.recipes.NVFP4Training(), rng=torch.tensor([1])), r"rng has shape \(1,\); \(2,\)"),
    # grouped_mlp
    (ValueError, lambda: mlp(w1=W1[:, :, :5]), r"w1 has K=5 inputs but its input has 8 columns"),
    (ValueError, lambda: mlp(w2=W2[:, :, :5]), r"w2 has K=5 inputs but its input has 6 columns"),
    (ValueError, lambda: mlp(w1=W1[:, :11]), r"h has 11 columns; swiglu .* multiple of 2"),
    (ValueError, lambda: mlp(w2=W2.to("meta")), r"w2 is on meta but x is on cpu"),
    (ValueError, lambda: mlp(x=X[:, :0], w1=W1[:, :, :0]), r"x has shape \(12, 0\): H=0 columns"),
    (ValueError, lambda: mlp(probs=torch.ones(9)), r"probs has shape \(9,\); \(12,\) is needed: one a row of x"),
    (ValueError, lambda: mlp(probs=torch.ones(M, 1)), r"probs has shape \(12, 1\); \(12,\)"),
    (TypeError, lambda: mlp(probs=torch.ones(M).bfloat16()), r"probs has dtype torch.bfloat16; legal: torch.float32"),
    (ValueError, lambda: mlp(probs=torch.ones(M, device="meta")), r"probs is on meta but x is on cpu"),
    (ValueError, lambda: mlp(b1=torch.ones(G, N)), r"b1 has shape \(3, 6\); \(3, 12\)"),
    (ValueError, lambda: mlp(b2=torch.ones(N)), r"b2 has shape \(6,\); \(3, 8\)"),
    (ValueError, lambda: mlp(interleave=4), r"12 columns; swiglu with interleave=4 needs a multiple of 8"),
    (TypeError, lambda: mlp(interleave=4.0), r"interleave=4.0 is float; an int or None"),
    (ValueError, lambda: mlp(activation="gelu"), r"'gelu' is not one of .*'swiglu'"),
    (TypeError, lambda: mlp(activation=3), r"act=3 is a int"),
    (
        ValueError,
        lambda: mlp(main_grads=(torch.zeros_like(W1), torch.zeros_like(W1))),
        r"main_grad.* has shape \(3, 12, 8\); \(3, 8, 6\)",
    ),
    (
        TypeError,
        lambda: mlp(main_grads=(torch.zeros_like(W1).half(), torch.zeros_like(W2))),
        r"main_grad.* has dtype torch.float16",
    ),
    (ValueError, lambda: mlp(main_grads=(torch.zeros_like(W1),)), r"main_grads"),
    (ValueError, lambda: mlp(main_grads=(torch.zeros_like(W1), torch.zeros_like(W2, device="meta"))), r"main_grad.*meta"),
    (TypeError, lambda: mlp(recipe="mxfp8"), r"recipe is str; "),
    (ValueError, lambda: mlp(recipe=bs.recipes.NVFP4Training(), rng=torch.tensor([1])), r"rng has shape \(1,\); \(2,\)"),
    # activation
    (TypeError, lambda: bs.activation(X, "swiglu", interleave=4.0), r"interleave=4.0 is float; an int"),
    (ValueError, lambda: bs.activation(X, "swiglu", interleave=0), r"interleave=0 is not legal; .*at least 1"),
    (TypeError, lambda: bs.activation_quantize(X, None, "swiglu", MX), r"offsets is NoneType; a tensor of dtype torch.int64"),
    (TypeError, lambda: bs.activation_backward_quantize(X, X, None, "swiglu", MX), r"offsets is NoneType; a tensor"),
    (TypeError, lambda: bs.activation_quantize(X, OFFSETS, "swiglu", MX, interleave=2.0), r"interleave=2.0 is float"),
    # modules and recipes
    (ValueError, lambda: bs.nn.GroupedLinear(0, K, N), r"num_groups=0 is not legal; it must be at least 1"),
    (ValueError, lambda: bs.nn.GroupedLinear(G, 0, N), r"in_features=0 is not legal"),
    (ValueError, lambda: bs.nn.GroupedMLP(G, K, 0), r"=0 is not legal; it must be at least 1"),
    (TypeError, lambda: bs.nn.GroupedMLP(G, K, N, recipe="mxfp8"), r"recipe is str; a blockscale Recipe"),
    (ValueError, lambda: bs.nn.GroupedMLP(G, K, N, activation="squared_relu", glu_interleave=2), r"interleave=2 .*squared_relu"),
    (
        ValueError,
        lambda: bs.nn.GroupedMLP(G, K, N, accumulate_into_main_grad=True)(X, SIZES),
        r"main_grad is missing; .*float32.*\(3, 12, 8\)",
    ),
    (ValueError, lambda: bs.nn.MoE(K, N, 4, 2)(X[:, :5]), r"x has shape \(12, 5\); \[\.\.\., 8\]"),
    (ValueError, lambda: bs.nn.Router(K, 4, 5), r"top_k=5 .* 1\.\.4"),
    (TypeError, lambda: bs.nn.MoE(K, N, 4, 2.0), r"top_k=2.0 is float; an int"),
    (TypeError, lambda: bs.autocast("mxfp8").__enter__(), r"recipe is str; a blockscale Recipe such as MXFP8Training\(\)"),
    (TypeError, lambda: bs.recipes.Recipe("mxfp8", MX, MX), r"input is str; a blockscale format or None"),
    (ValueError, lambda: bs.recipes.Recipe(bs.NVFP4(hadamard=True), NV, NV), r"hadamard must be the same for input and gradient"),
    (ValueError, lambda: bs.recipes.Recipe(bs.NVFP4(stochastic=True), NV, NV), r"input with stochastic=True is not legal"),
    (TypeError, lambda: bs.save({"a": X}, "nowhere"), r"tensors\['a'\] is Tensor; BlockScaledTensor or GroupedTensor"),
]


@pytest.mark.parametrize(("error", "call", "message"), VALUES, ids=[re.sub(r"[^\w=]+", "_", v[2])[:50] for v in VALUES])
def test_message(error, call, message):
    with pytest.raises(error, match=message):
        call()


# nothing is written before an error


def snapshot(q):
    return [t.clone() for p in q.planes.values() for t in p.tensors()]


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (ValueError, lambda q: grouped(X[:11], out=q), r"out is \(12, 8\) mxfp8.*\(11, 8\) mxfp8"),
        (ValueError, lambda q: grouped(fmt=bs.MXFP8("e5m2"), out=q), r"out is .*e4m3.*e5m2.* is needed"),
        (ValueError, lambda q: grouped(columnwise=False, out=q), r"out.columnwise is there but columnwise=False"),
        (ValueError, lambda q: grouped(layout="swizzled", out=q), r"out.rowwise.layout='compact' but layout='swizzled'"),
        (ValueError, lambda q: grouped(offsets=OFFSETS[:3], out=q), r"out.offsets has shape \(4,\); \(3,\)"),
        (ValueError, lambda q: grouped(offsets=torch.tensor([0, 7, 5, 9]), out=q), r"offsets decrease at group 1"),
        (ValueError, lambda q: grouped(offsets=torch.tensor([0, 7, 7, 13]), out=q), r"offsets\[-1\]=13"),
        (TypeError, lambda q: bs.quantize(X, MX, columnwise=True, out=q), r"out is GroupedTensor; a BlockScaledTensor"),
        (TypeError, lambda q: grouped(out=q.rowwise.data), r"out is Tensor; a GroupedTensor"),
        (TypeError, lambda q: grouped(X.double(), out=q), r"x has dtype torch.float64"),
    ],
)
def test_quantize_writes_nothing(error, call, message):
    q = grouped(normal(M, K, seed=9))
    before, offsets = snapshot(q), q.offsets.clone()
    with pytest.raises(error, match=message):
        call(q)
    assert all(torch.equal(a, b) for a, b in zip(snapshot(q), before, strict=True))
    assert torch.equal(q.offsets, offsets)


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ValueError, {"offsets": torch.tensor([0, 7, 5, 9])}, r"offsets decrease at group 1"),
        (ValueError, {"offsets": torch.tensor([0, 7, 7, 13])}, r"offsets\[-1\]=13"),
        (ValueError, {"a": DY[:11]}, r"b has 12 rows but a has 11"),
        (ValueError, {"a": DY[:, :5]}, r"out has shape \(3, 6, 8\); \(3, 5, 8\).*\(G, N, K\)"),
        (ValueError, {"offsets": offsets_of([5, 4])}, r"out has shape \(3, 6, 8\); \(2, 6, 8\)"),
        (TypeError, {"out_dtype": torch.bfloat16}, r"out_dtype=torch.bfloat16; wgrad is torch.float32"),
        (ValueError, {"bias": torch.ones(G, N)}, r"bias is for role='forward'"),
    ],
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_wgrad_writes_nothing(error, options, message, accumulate):
    out = torch.full((G, N, K), 13.0)
    arguments = {"a": DY, "b": X, "offsets": OFFSETS, "out": out, "accumulate": accumulate} | options
    with pytest.raises(error, match=message):
        bs.grouped_gemm(arguments.pop("a"), arguments.pop("b"), role="wgrad", **arguments)
    assert (out == 13.0).all()


@pytest.mark.parametrize(
    "out", [torch.full((G, N, K), 13.0).bfloat16(), torch.full((G, K, N), 13.0), torch.full((G, N, K), 13.0, device="meta")]
)
def test_wrong_out(out):
    wrong_dtype = out.dtype != torch.float32
    with pytest.raises(
        TypeError if wrong_dtype else ValueError, match=r"out (has dtype torch.bfloat16|has shape \(3, 8, 6\)|is on meta)"
    ):
        bs.grouped_gemm(DY, X, role="wgrad", offsets=OFFSETS, out=out)
    assert out.is_meta or (out == 13.0).all()


@pytest.mark.parametrize("bad", ["past", "decrease", "start"])
def test_layers_write_nothing(bad):
    """A layer that refuses its offsets leaves main_grad and every .grad as they were."""
    layer = bs.nn.GroupedMLP(G, K, N, accumulate_into_main_grad=True)
    for p in layer.parameters():
        p.main_grad = torch.full_like(p, 13.0)
    with pytest.raises(ValueError, match=BAD_OFFSETS[bad][1]):
        layer(X, offsets=BAD_OFFSETS[bad][0])
    assert all(p.grad is None and (p.main_grad == 13.0).all() for p in layer.parameters())


def test_autocast_is_left_after_an_error():
    def fail():
        with bs.autocast(bs.recipes.MXFP8Training()):
            linear(X.double())

    plain = linear()
    with pytest.raises(TypeError, match="x has dtype"):
        fail()
    assert torch.equal(linear(), plain)
    with bs.autocast(bs.recipes.MXFP8Training()):
        assert not torch.equal(linear(), plain)
