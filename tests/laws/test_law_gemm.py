"""Laws 1, 2, 3 and 6 of the grouped GEMM, all roles: poison in every byte that is not live changes no bit of the result."""

import dataclasses

import pytest
import torch
from groupings import BYTES, FILLS, Grouping, filled, groupings
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_same, normal, poison

import blockscale as bs

#: input, weight, gradient
TRIPLES = {
    "bf16": (None, None, None),
    "mxfp8": (bs.MXFP8(), bs.MXFP8(block=(32, 32)), bs.MXFP8("e5m2")),
    "nvfp4": (bs.NVFP4(), bs.NVFP4((16, 16)), bs.NVFP4()),
    "nvfp4_hadamard": (bs.NVFP4(hadamard=True), bs.NVFP4(), bs.NVFP4(hadamard=True)),
    "fp8tensor": (bs.FP8Tensor(), bs.FP8Tensor(), bs.FP8Tensor("e5m2")),
    "fp8block": (bs.FP8Block(), bs.FP8Block(block=(128, 128)), bs.FP8Block()),
    "fp8block_1d": (bs.FP8Block("e5m2"), bs.FP8Block(), bs.FP8Block(power_of_two=False)),
}


def quantized(x, offsets, fmt, layout):
    if fmt is None:
        return x
    layout = layout if fmt.has_codes else "compact"
    return bs.quantize_grouped(x, offsets, fmt, columnwise=True, layout=layout)


def poisoned(q, live, fill, byte):
    if isinstance(q, bs.GroupedTensor):
        poison(q, byte)
        return q
    return filled(q, live, fill) if q.dim() == 2 else q


def run(x, w, dy, offsets, bias, factor):
    """Results of the three roles, wgrad also added to a buffer."""
    more = {"offsets": offsets, "out_dtype": torch.float32}
    dw = bs.grouped_gemm(dy, x, role="wgrad", offsets=offsets)
    added = torch.ones_like(dw)
    bs.grouped_gemm(dy, x, role="wgrad", offsets=offsets, out=added, accumulate=True)
    return {
        "forward": bs.grouped_gemm(x, w, bias=bias, bias_scale=factor, **more),
        "dgrad": bs.grouped_gemm(dy, w, role="dgrad", **more),
        "wgrad": dw,
        "added": added,
    }


def check(g: Grouping, name: str, K: int, N: int, layout: str, fill: float, byte: int) -> None:
    inp, weight, grad = TRIPLES[name]
    G, live, offsets = len(g.sizes), g.live, g.offsets
    x, dy = normal(g.capacity, K, seed=g.seed, spread=1.0), normal(g.capacity, N, seed=g.seed + 2, spread=1.0)
    w, bias = normal(G, N, K, seed=g.seed + 4), normal(G, N, seed=g.seed + 5)
    factor = torch.rand(g.capacity, generator=torch.Generator().manual_seed(g.seed)) + 0.5
    w_q = quantized(w, None, weight, layout)
    clean = [quantized(t[:live], offsets, f, layout) for t, f in ((x, inp), (dy, grad))]
    want = run(clean[0], w_q, clean[1], offsets, bias, factor[:live])

    for again in range(2):  # twice: the second pass through memory that the first has left
        x_p, dy_p = (poisoned(quantized(t, offsets, f, layout), live, fill, byte) for t, f in ((x, inp), (dy, grad)))
        w_p = poisoned(quantized(w, None, weight, layout), 0, fill, byte)
        got = run(x_p, w_p, dy_p, offsets, bias, filled(factor, live, fill))
        for role in ("forward", "dgrad"):
            assert_same(got[role][:live], want[role], f"{role}, pass {again}")
            assert not got[role][live:].any(), f"{role}: dead rows"
        assert_same(got["wgrad"], want["wgrad"], f"wgrad, pass {again}")
        assert_same(got["added"], 1 + want["wgrad"], f"added, pass {again}")

    for index in g.some_groups(3):
        rows = slice(int(offsets[index]), int(offsets[index + 1]))
        one = torch.tensor([0, g.sizes[index]])
        alone = run(
            quantized(x[rows], one, inp, layout),
            quantized(w[index : index + 1], None, weight, layout),
            quantized(dy[rows], one, grad, layout),
            one,
            bias[index : index + 1],
            factor[rows],
        )
        for role in ("forward", "dgrad"):
            assert_same(want[role][rows], alone[role], f"{role} of group {index} alone")
        assert_same(want["wgrad"][index], alone["wgrad"][0], f"wgrad of group {index} alone")
        assert want["wgrad"][index].any() == (g.sizes[index] > 0)


ARGUMENTS = {
    "g": groupings(max_rows=2500),
    "name": st.sampled_from(sorted(TRIPLES)),
    "K": st.sampled_from((33, 64, 130)),
    "N": st.sampled_from((1, 30, 48)),
    "layout": st.sampled_from(("compact", "swizzled")),
    "fill": st.sampled_from(FILLS),
    "byte": st.sampled_from(BYTES),
}


@settings(max_examples=45, deadline=None, derandomize=True)
@given(**ARGUMENTS)
def test_gemm_obeys_the_laws(g, name, K, N, layout, fill, byte):
    check(g, name, K, N, layout, fill, byte)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIPLES)
def test_gemm_obeys_the_laws_at_length(name):
    arguments = ARGUMENTS | {"name": st.just(name), "g": groupings(max_rows=20_000)}
    settings(max_examples=100, deadline=None)(given(**arguments)(check))()


@pytest.mark.parametrize("name", [n for n in TRIPLES if n != "bf16"])
@pytest.mark.parametrize("layout", ["compact", "swizzled"])
def test_every_poison_byte_in_every_plane(name, layout):
    """The same with a fixed grouping whose parts are all there: partial tiles, blocks and nibbles, empty groups, room."""
    for byte in BYTES:
        check(Grouping((37, 0, 128, 1, 65, 0, 15), 70, byte), name, 33, 30, layout, torch.nan, byte)


@pytest.mark.parametrize("name", TRIPLES)
def test_thin_groups_and_matrices(name):
    """A product of few rows or columns has the same bits whatever lies beside it (a matrix library has paths for them)."""
    for seed, sizes in enumerate([(0, 17), (17, 3), (1, 0), (5,), (0, 128, 2)]):
        for N, K in ((1, 33), (2, 1), (30, 64), (1, 130), (32, 64), (64, 32)):
            check(Grouping(sizes, 0, seed), name, K, N, "compact", torch.nan, 0x7F)


def test_poison_in_a_live_byte_is_seen():
    """The comparison above fails when the poison hits one live entry: it is not blind."""
    x, w = normal(64, 33, seed=1), normal(1, 30, 33, seed=2)
    offsets = torch.tensor([0, 64])
    a, b = bs.quantize_grouped(x, offsets, bs.MXFP8()), bs.quantize_grouped(w, None, bs.MXFP8())
    want = bs.grouped_gemm(a, b)
    for part in ("data", "scale"):
        bad = dataclasses.replace(a, rowwise=a.rowwise.map(torch.clone))
        getattr(bad.rowwise, part)[5, 1] = 0xFF
        with pytest.raises(AssertionError):
            assert_same(bs.grouped_gemm(bad, b), want)
