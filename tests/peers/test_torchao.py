"""MXFP8, NVFP4 and the swizzled layout against torchao 0.18, where the specification says that they agree.

torchao's NVFP4 takes the per-tensor scale as the decode scale, `per_tensor_scale = amax / 2688`, not as an amax.
Known differences, left out here: RCEIL computes amax / 448 and a float32 log2, which lose a maximum a few ulp above
a power of two (never so for bfloat16 inputs); the data of blocks with scale code 0, which torchao multiplies by 1
(RCEIL) or 2^126 (FLOOR); the data of blocks with a NaN under FLOOR, where torchao stores zeros beside the NaN under a
NaN scale; NVFP4 block scales below 2^-6; the sign of NaN codes.
"""

import pytest
import torch
from oracle import codes, inputs
from oracle.check import assert_same

import blockscale as bs

pytest.importorskip("torchao", reason="torchao is an optional peer: pip install --no-deps torchao")
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MODES = {"up": ScaleCalculationMode.RCEIL, "floor": ScaleCalculationMode.FLOOR}
KINDS = ("normal", "wide", "extreme", "special", "tiny", "blocks")


def compare_mx(x: torch.Tensor, element: str, rounding: str) -> None:
    """Scale codes everywhere; data wherever both follow one rule, which must be somewhere."""
    scale, data = to_mx(x, ELEMENTS[element], 32, MODES[rounding])
    ours = bs.quantize(x, bs.MXFP8(element=element, scale_rounding=rounding), layout="linear").rowwise
    theirs = scale.view(torch.uint8)
    assert_same(ours.scale, theirs.numpy(), "scale")
    data = data.view(torch.uint8)
    data = torch.where((data & 0x7F) == 0x7F, 0x7F, data) if element == "e4m3" else data
    data = torch.where((data & 0x7C) == 0x7C, 0x7F, data) if element == "e5m2" else data
    same_rule = (theirs != 0) if rounding == "up" else (theirs != 0) & (theirs != 0xFF)
    live = same_rule.repeat_interleave(32, dim=1)
    assert live.any() or not theirs.any()
    assert_same(ours.data[live], data[live].numpy(), "data")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("rounding", MODES)
def test_mxfp8_bfloat16(kind, element, rounding):
    for seed in range(5):
        x, _ = inputs.tensor(kind, 64, 256, seed, "bfloat16")
        compare_mx(x, element, rounding)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_mxfp8_float32_floor(kind, element):
    for seed in range(5):
        x, _ = inputs.tensor(kind, 64, 256, seed)
        compare_mx(x, element, "floor")


@pytest.mark.parametrize("element", ELEMENTS)
def test_mxfp8_float32_up(element):
    x, _ = inputs.tensor("normal", 512, 512, 1)
    compare_mx(x, element, "up")


@pytest.mark.parametrize("shape", [(1, 1), (33, 5), (128, 4), (129, 47), (300, 12)], ids=str)
def test_swizzled_layout(shape):
    linear = torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(shape[0]))
    padded = torch.zeros(-(-shape[0] // 128) * 128, -(-shape[1] // 4) * 4, dtype=torch.uint8)
    padded[: shape[0], : shape[1]] = linear
    flat = bs.layouts.swizzle(padded)
    assert_same(flat, to_blocked(linear).numpy())
    assert_same(bs.layouts.unswizzle(flat, padded.shape)[: shape[0], : shape[1]].contiguous(), linear.numpy())
    assert torch.equal(from_blocked(flat, *shape), linear)


def test_swizzled_quantize():
    x, _ = inputs.tensor("wide", 200, 320, 3, "bfloat16")
    scale, _ = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL, is_swizzled_scales=True)
    ours = bs.quantize(x, bs.MXFP8(), layout="swizzled").rowwise.scale
    assert_same(ours, scale.view(torch.uint8).flatten().numpy())


def compare_nvfp4(x: torch.Tensor, amax: torch.Tensor) -> tuple[int, int, int]:
    """(blocks with another scale, elements with another code, elements) of blocks whose scale is at least 2^-6."""
    scale, data = nvfp4_quantize(x, per_tensor_scale=per_tensor_amax_to_scale(amax))
    ours = bs.quantize(x, bs.NVFP4(), layout="linear", amax=amax.float().reshape(1)).rowwise
    theirs = scale.view(torch.uint8)
    live = ours.scale >= 8
    elements = live.repeat_interleave(16, dim=1).numpy()
    mine, other = (codes.unpack_e2m1(d.reshape(x.shape[0], -1).numpy()) for d in (ours.data, data.view(torch.uint8)))
    return int((ours.scale != theirs)[live].sum()), int((mine != other)[elements].sum()), int(elements.sum())


@pytest.mark.parametrize("power", [-20, 0, 7])
def test_nvfp4_bfloat16_where_the_tensor_scale_is_a_power_of_two(power):
    """amax 2688 * 2^k: nothing is rounded on the way to the block scale, so both agree on every bit."""
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(power + 50)) * 2.0 ** (power + 9)
    x = x.to(torch.bfloat16)
    wrong_scales, wrong_codes, compared = compare_nvfp4(x, torch.tensor(2688.0 * 2.0**power))
    assert (wrong_scales, wrong_codes) == (0, 0)
    assert compared > 100_000


def test_nvfp4_normal_data():
    """With its own amax, the two orders of rounding differ by an ulp: almost no code moves."""
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(3))
    wrong_scales, wrong_codes, compared = compare_nvfp4(x, x.abs().max())
    assert wrong_scales <= 2
    assert wrong_codes <= 40
    assert compared == x.numel()
