"""MXFP4 against torchao 0.18 (both scale rules), compressed-tensors (decoding) and ModelOpt (where it agrees).

Known differences, left out here: torchao's data of blocks with scale code 0 (multiplied by 1 under RCEIL, 2^126 under
FLOOR) and of blocks with a NaN (E2M1 has none); RCEIL's float32 log2, exact for bfloat16 maxima. ModelOpt rounds ties
towards zero and gives zeros a sign bit; its scales are ours.
"""

import pytest
import torch
from oracle import codes, inputs
from oracle.check import assert_same

import blockscale as bs

KINDS = ("normal", "wide", "extreme", "special", "tiny", "blocks")


def unpacked(data: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(codes.unpack_e2m1(data.numpy()).copy())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounding", ["up", "floor"])
def test_torchao(kind, rounding):
    pytest.importorskip("torchao", reason="torchao is an optional peer: pip install --no-deps torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    mode = {"up": ScaleCalculationMode.RCEIL, "floor": ScaleCalculationMode.FLOOR}[rounding]
    for seed in range(5):
        x, _ = inputs.tensor(kind, 64, 256, seed, "bfloat16")
        scale, data = to_mx(x, torch.float4_e2m1fn_x2, 32, mode)
        scale, data = scale.view(torch.uint8), data.view(torch.uint8)
        ours = bs.quantize(x, bs.MXFP4(scale_rounding=rounding), layout="linear").rowwise
        assert_same(ours.scale, scale.numpy(), "scale")
        live = ((scale != 0) & (scale != 0xFF)).repeat_interleave(32, 1)
        assert live.any() or not scale.any()
        assert_same(unpacked(ours.data)[live], unpacked(data)[live].numpy(), "data")


def test_compressed_tensors_decodes_ours():
    """Weights quantized here, decoded there: packing, scale codes and values."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is an optional peer: pip install --no-deps")
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    x, _ = inputs.tensor("normal", 48, 128, 3, "bfloat16")
    x = x * torch.exp2(torch.arange(-24.0, 24.0))[:, None].bfloat16()
    q = bs.quantize(x, bs.MXFP4(), layout="linear")
    scale = decompress_mx_scale(q.rowwise.scale).float()
    values = unpack_fp4_from_uint8(q.rowwise.data, 48, 128, dtype=torch.float32) * scale.repeat_interleave(32, 1)
    assert values.ne(0).float().mean() > 0.3
    assert_same(q.dequantize(), values.numpy())


def test_modelopt():
    pytest.importorskip("modelopt.torch.quantization.qtensor", reason="ModelOpt is an optional peer: pip install --no-deps")
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    theirs, scale = MXFP4QTensor.quantize(x, 32)
    ours = bs.quantize(x, bs.MXFP4(), layout="linear")
    assert_same(ours.rowwise.scale, scale.view(64, 8).numpy(), "scale")
    scaled = x.float() / bs.formats.e8m0_decode(ours.rowwise.scale).repeat_interleave(32, 1)
    tie = torch.isin(scaled.abs(), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
    assert 0 < tie.sum() < 500
    back = theirs.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
    assert_same(ours.dequantize()[~tie].abs(), back[~tie].abs().numpy(), "values")
    rounded_up = (ours.dequantize()[tie].abs() > back[tie].abs()).sum()
    assert rounded_up > 0
