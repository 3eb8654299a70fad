"""Arguments of the operators of frozen layers and of routing, for test_operators.py; ``s`` is its Setting: H = 20, I = 8."""

import itertools

import torch
from support import RECIPES, normal

import blockscale as bs
from blockscale.ops.frozen_linear import pack

OPS = torch.ops.blockscale
MX, RNG = bs.MXFP8(), torch.tensor([3, 1])
FEW = [RECIPES[name] for name in ("bf16", "mxfp8_hybrid", "nvfp4")]


def dequantize(s):
    formats = (MX, bs.MXFP4(), bs.NVFP4(), bs.FP8Tensor(), bs.FP8Block("e5m2"))
    for n, (fmt, name, offsets) in enumerate(itertools.product(formats, ("rowwise", "columnwise"), (s.offsets, None))):
        layout, dtype = ("compact", "swizzled")[n % 3 % 2 * fmt.has_codes], (torch.float32, torch.bfloat16)[n % 2]
        options = {"rowwise": name == "rowwise", "columnwise": name == "columnwise", "layout": layout}
        q = bs.quantize(s.x, fmt, **options) if offsets is None else bs.quantize_grouped(s.x, offsets, fmt, **options)
        plane = q.planes[name]
        yield plane.data, plane.scale, plane.amax, offsets, *s.x.shape, fmt.spec(), name, layout, dtype


def frozen(s, columnwise=True):
    """Packed planes of w1 and w2, and adapters of rank 3."""
    packed = [pack(bs.quantize_grouped(w, None, MX, columnwise=columnwise)) for w in (s.w1, s.w2)]
    shapes = ((s.G, 3, 20), (s.G, 16, 3), (s.G, 3, 8), (s.G, 20, 3))
    return packed, [normal(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]


def frozen_linear(s):
    (w, _), lora = frozen(s)
    for recipe in FEW:
        yield s.leaf("x"), w[0], s.offsets, s.b1, *lora[:2], RNG, *w[1:], 16, 0.5, recipe.spec()
    (w, _), _ = frozen(s, columnwise=False)
    yield s.x, w[0], s.offsets, None, None, None, None, *w[1:], 16, 1.0, FEW[0].spec()


def frozen_linear_backward(s):
    (w, _), lora = frozen(s)
    lora = [t.detach() for t in lora]
    for recipe in FEW:
        yield s.h, s.x, w[0], s.offsets, *lora[:2], RNG, *w[1:], 20, 0.5, recipe.spec(), [True, True]
    yield s.h, None, w[0], s.offsets, None, None, None, *w[1:], 20, 1.0, FEW[0].spec(), [True, False]


def frozen_mlp(s):
    (w1, w2), lora = frozen(s)
    for recipe in FEW:
        options = [16, 20], [0.5, 2.0], recipe.spec(), "swiglu", 4
        yield s.leaf("x"), s.offsets, s.leaf("probs"), s.b1, s.b2, *lora, RNG, *w1, *w2, *options, True
        yield s.leaf("x"), s.offsets, s.leaf("probs"), s.b1, s.b2, *lora, RNG, *w1, *w2, *options, False
    yield s.leaf("x"), s.offsets, *(None,) * 8, *w1, *w2, [16, 20], [1.0, 1.0], FEW[1].spec(), "situ", 0, True


def frozen_mlp_backward(s):
    for x, *others in frozen_mlp(s):
        *others, save_h = [t.detach() if isinstance(t, torch.Tensor) else t for t in others]
        x, needs = x.detach(), [True, others[1] is not None, others[4] is not None, others[6] is not None]
        yield s.dy, x, OPS.frozen_mlp(x, *others, True)[1] if save_h else None, *others, 20, needs


def router(s):
    yield normal(s.rows, 6, seed=1).requires_grad_(), None, 2, "softmax", True, 1, 1
    yield normal(s.rows, 6, seed=1).requires_grad_(), None, 6, "sigmoid", False, 1, 1
    yield normal(s.rows, 6, seed=1).requires_grad_(), normal(6, seed=2), 3, "sqrt_softplus", True, 3, 2


def router_backward(s):
    for logits, *options in router(s):
        logits = logits.detach()
        probs, ids, scores = OPS.router(logits, *options)
        score, normalize = options[2:4]
        yield probs, scores, probs, ids, scores, score, normalize, logits if score == "sqrt_softplus" else None


def permute(s):
    ids = torch.arange(2 * s.rows).view(s.rows, 2) % 5
    yield s.leaf("x"), ids - 1, 4, torch.rand(ids.shape).requires_grad_()  # some are dropped
    yield s.leaf("x"), ids, 5, None
    yield s.leaf("x"), ids, 5, torch.rand(ids.shape).requires_grad_()


def unpermute(s):
    for x, ids, experts, probs in permute(s):
        out = bs.permute(x.detach(), ids, experts)
        yield out.x.requires_grad_(), out.row_map, probs


def unpermute_backward(s):
    for y, row_map, probs in unpermute(s):
        y, probs = (None, None) if probs is None else (y.detach(), probs.detach())
        yield s.x, row_map, 2 * s.rows, y, probs
