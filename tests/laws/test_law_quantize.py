"""Laws 1, 2, 3 and 6 of the quantizer: dead rows change nothing, a group is what it is alone, the same bits twice."""

import pytest
import torch
from groupings import FILLS, Grouping, filled, groupings
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import grouped as oracle_grouped
from oracle.formats import Format
from support import assert_same, data_addresses, normal, scale_addresses, spans

import blockscale as bs

FORMATS = (
    bs.MXFP8(),
    bs.MXFP8("e5m2", (32, 32), "floor"),
    bs.MXFP4(),
    bs.NVFP4(),
    bs.NVFP4((16, 16)),
    bs.NVFP4(row_scaled=True),
    bs.NVFP4((16, 16), four_over_six="mae", scale_max=256),
    bs.NVFP4(hadamard=True, stochastic=True),
    bs.FP8Tensor(),
    bs.FP8Tensor("e5m2", power_of_two=True),
    bs.FP8Block(),
    bs.FP8Block("e5m2", (128, 128), power_of_two=False),
)
RNG = torch.tensor([77, 5])


def layouts(fmt):
    return ("compact", "swizzled") if fmt.has_codes else ("compact",)


def quantize(x, offsets, fmt, layout="compact"):
    return bs.quantize_grouped(x, offsets, fmt, columnwise=True, layout=layout, rng=RNG)


def assert_same_planes(got, want, what=""):
    for which in ("rowwise", "columnwise"):
        for name, one, other in zip(
            ("data", "scale", "amax"), got.planes[which].tensors(), want.planes[which].tensors(), strict=False
        ):
            assert_same(one, other, f"{what} {which} {name}")


def assert_prefix(got, want, what):
    """got lies in a larger buffer: the entries of want first, then zeros only."""
    for which in ("rowwise", "columnwise"):
        for name, one, other in zip(
            ("data", "scale", "amax"), got.planes[which].tensors(), want.planes[which].tensors(), strict=False
        ):
            one, other = one.flatten(), other.flatten()
            assert_same(one[: len(other)], other, f"{what} {which} {name}")
            assert not one[len(other) :].any(), f"{what} {which} {name}: something behind"


def check(g: Grouping, fmt, K: int, fill: float, dtype: torch.dtype) -> None:
    x = normal(g.capacity, K, seed=g.seed, spread=4.0, dtype=dtype)
    layout = layouts(fmt)[g.seed % len(layouts(fmt))]
    packed = quantize(x[: g.live], g.offsets, fmt, layout)
    poisoned = quantize(filled(x, g.live, fill), g.offsets, fmt, layout)
    assert_prefix(poisoned, packed, f"dead rows hold {fill}")
    assert_same_planes(quantize(filled(x, g.live, fill), g.offsets, fmt, layout), poisoned, "again")
    values = poisoned.dequantize()
    assert_same(values[: g.live], packed.dequantize(), "values")
    assert not values[g.live :].any()
    stochastic = getattr(fmt, "stochastic", False)
    for index in g.some_groups():
        rows = x[int(g.offsets[index]) : int(g.offsets[index + 1])]
        one = poisoned.group(index)
        assert one.shape == (g.sizes[index], K)
        if not stochastic or index == 0:  # the random bits of a group depend on its index
            assert_same_planes(one, bs.quantize(rows, fmt, columnwise=True, rng=RNG), f"group {index}")
            alone = quantize(rows, torch.tensor([0, len(rows)]), fmt, layout).group(0)
            assert_same_planes(one, alone, f"group {index} alone")
        values = poisoned.dequantize(plane="columnwise")[g.offsets[index] : g.offsets[index + 1]]
        assert_same(one.dequantize(plane="columnwise"), values, f"group {index}")


ARGUMENTS = {
    "g": groupings(),
    "fmt": st.sampled_from(FORMATS),
    "K": st.sampled_from((1, 16, 33, 64, 130)),
    "fill": st.sampled_from(FILLS),
    "dtype": st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
}


@settings(max_examples=45, deadline=None, derandomize=True)
@given(**ARGUMENTS)
def test_quantize_obeys_the_laws(g, fmt, K, fill, dtype):
    check(g, fmt, K, fill, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.spec())
def test_quantize_obeys_the_laws_at_length(fmt):
    arguments = ARGUMENTS | {"fmt": st.just(fmt), "g": groupings(max_rows=39_000)}
    settings(max_examples=50, deadline=None)(given(**arguments)(check))()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.spec())
def test_addresses_of_the_tests_are_those_of_the_oracle(fmt):
    """The live entries by support.py, used to poison all others, are those of the independent oracle."""
    offsets = torch.tensor([0, 33, 33, 162, 180])
    options = {"block": fmt.block} if hasattr(fmt, "block") else {}
    for layout in layouts(fmt):
        q = quantize(normal(250, 70, seed=1), offsets, fmt, layout)
        marks = oracle_grouped.live(offsets.numpy(), 250, 70, Format(type(fmt).__name__, options), layout)
        for which, plane in q.planes.items():
            pairs = [(plane.data, marks[which].data, data_addresses)]
            if fmt.kind != "fp8tensor":
                pairs.append((plane.scale, marks[which].scale, scale_addresses))
            for tensor, live, addresses in pairs:
                mine = torch.zeros(tensor.numel(), dtype=torch.bool)
                for span in spans(q):
                    mine[addresses(q, which, span).flatten()] = True
                assert torch.equal(mine, torch.from_numpy(live).flatten()), (which, layout)
                assert not tensor.flatten()[~mine].any(), "padding is not zero"


def test_the_checks_see_one_byte():
    """assert_prefix and assert_same_planes refuse a byte outside, a byte inside and a scale."""
    x = normal(40, 33, seed=1)
    good = quantize(x, torch.tensor([0, 33]), bs.MXFP8())
    for which, name, place in (("rowwise", "data", -1), ("columnwise", "scale", 0), ("rowwise", "scale", -1)):
        bad = quantize(x, torch.tensor([0, 33]), bs.MXFP8())
        getattr(bad.planes[which], name).view(-1)[place] += 1
        with pytest.raises(AssertionError):
            assert_same_planes(bad, good)
        with pytest.raises(AssertionError):
            assert_prefix(bad, quantize(x[:33], torch.tensor([0, 33]), bs.MXFP8()), "")
