"""Four over six: a block worked by hand, and what the choice is for (the oracle holds the bits, see test_quantize)."""

import pytest
import torch

import blockscale as bs


def dequantized(x, **options):
    return bs.quantize(x, bs.NVFP4(**options)).dequantize()


@pytest.mark.parametrize("measure", ["mae", "mse"])
def test_a_block_by_hand(measure):
    """amax_g 2688 (S_enc 1): [24, 20, 0, ...] has base 4, s6 = 4 gives 6, 5->4: 24, 16; s4 = 6 gives 4, 3.33->3: 24, 18."""
    x = torch.zeros(1, 16)
    x[0, :2] = torch.tensor([24.0, 20.0])
    amax = torch.tensor([2688.0])
    six, four = (bs.quantize(x, bs.NVFP4(four_over_six=m), amax=amax, layout="linear") for m in (None, measure))
    assert six.rowwise.scale.tolist() == [[0x48]]
    assert four.rowwise.scale.tolist() == [[0x4C]]
    assert six.dequantize()[0, :2].tolist() == [24.0, 16.0]
    assert four.dequantize()[0, :2].tolist() == [24.0, 18.0]


@pytest.mark.parametrize("scale_max", [448, 256])
@pytest.mark.parametrize(("block", "draw"), [((1, 16), torch.randn), ((16, 16), torch.rand)], ids=["1x16 normal", "16x16 uniform"])
def test_the_error_falls(block, draw, scale_max):
    """Each measure lowers its own error against 6 alone by several percent (16x16: for data that fill their range)."""
    x = draw(512, 256, generator=torch.Generator().manual_seed(4))
    x[0, 0] = 8.0  # the largest: leaves the other blocks room for a scale that maps to 4
    plain = dequantized(x, block=block) - x
    for measure, norm in (("mae", torch.Tensor.abs), ("mse", torch.Tensor.square)):
        chosen = dequantized(x, block=block, four_over_six=measure, scale_max=scale_max) - x
        ratio = float(norm(chosen).mean() / norm(plain).mean())
        print(f"{block} E={scale_max} {measure}: {ratio:.4f} of the error of 6 alone")
        assert 0.6 < ratio < 0.97, measure


def test_both_planes_of_square_blocks_agree():
    x = torch.randn(70, 90, generator=torch.Generator().manual_seed(5))
    for measure in ("mae", "mse"):
        q = bs.quantize(x, bs.NVFP4((16, 16), four_over_six=measure), columnwise=True)
        assert torch.equal(q.dequantize(), q.dequantize(plane="columnwise"))


def test_the_smaller_range_leaves_room_for_four():
    """E = 448: the block of the tensor's maximum cannot take 4 (its scale would be 672); E = 256 lets it."""
    x = torch.zeros(1, 16)
    x[0, :2] = torch.tensor([24.0, 20.0])
    assert dequantized(x, four_over_six="mse")[0, :2].tolist() == [24.0, 16.0]
    assert dequantized(x, four_over_six="mse", scale_max=256)[0, :2].tolist() == [24.0, 18.0]
