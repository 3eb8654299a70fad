"""MXFP8, NVFP4 (dynamic, static, four over six) and FP8 against ModelOpt 0.47, by bits where its arithmetic is exact.

Known differences, left out here: ModelOpt divides by rounded scales where we multiply by the reciprocal, as Transformer
Engine does. Both are exact, and the same, for scales that are powers of two; for the others an element that lies on, or
within an ulp of, the middle between two codes may fall to either side, so elements that close are counted and left out.
It keeps block scales above 2^-9 and gives zeros no sign. MXFP4 is in test_mxfp4.py.
"""

from types import SimpleNamespace

import pytest
import torch
from oracle import codes, inputs
from oracle.check import assert_same
from support import normal

import blockscale as bs

pytest.importorskip("modelopt.torch.quantization.qtensor", reason="ModelOpt is an optional peer: pip install nvidia-modelopt")
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
from modelopt.torch.quantization.tensor_quant import fp8_eager

MIDDLES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def with_amax(x: torch.Tensor, amax: float) -> torch.Tensor:
    """x cut to amax, which one element is."""
    x = x.clamp(-amax, amax)
    x[0, 0] = amax
    return x


@pytest.mark.parametrize("kind", ["normal", "wide", "blocks"])
def test_mxfp8(kind):
    for seed in range(5):
        x, _ = inputs.tensor(kind, 64, 256, seed, "bfloat16")
        theirs, scale = MXFP8QTensor.quantize(x)
        ours = bs.quantize(x, bs.MXFP8(), layout="linear")
        assert_same(ours.rowwise.scale, scale.numpy(), "scale")
        live = ((scale > 0) & (scale < 254)).repeat_interleave(32, 1)  # their 2^-127 is 0
        assert live.float().mean() > 0.4
        assert_same(ours.rowwise.data[live], theirs._quantized_data.view(torch.uint8)[live].numpy(), "data")


def compare_nvfp4(x: torch.Tensor, fmt: bs.NVFP4, amax: float, scale: torch.Tensor, data: torch.Tensor) -> float:
    """Bits of scales and codes; returns the share of elements that were too close to a middle to compare."""
    ours = bs.quantize(x, fmt, layout="linear").rowwise
    assert_same(ours.scale, scale.view(torch.uint8).numpy(), "scale")
    step = scale.float() * (torch.tensor(amax) / fmt.range)
    scaled = (x.float() / step.repeat_interleave(16, 1)).abs()
    close = ((scaled[..., None] - MIDDLES).abs() <= 1e-6 * MIDDLES).any(-1)
    got, want = (torch.from_numpy(codes.unpack_e2m1(t.numpy()).copy()) for t in (ours.data, data))
    got = torch.where(got == 8, 0, got)  # the sign of zero
    want = torch.where(want == 8, 0, want)
    assert_same(got[~close], want[~close].numpy(), "codes")
    distance = (got[close].int() & 7) - (want[close].int() & 7)
    assert (distance.abs() <= 1).all()
    assert got.unique().numel() == 15
    return float(close.float().mean())


@pytest.mark.parametrize("amax", [2688.0, 2688.0 * 2**-9, 3.7, 0.013])
def test_nvfp4_dynamic(amax):
    for seed in range(5):
        x = with_amax(normal(64, 256, seed=seed, spread=0.5) * amax / 16, amax)
        theirs, scale, double_scale = NVFP4QTensor.quantize(x.clone(), 16)
        close = compare_nvfp4(x, bs.NVFP4(), amax, scale, theirs._quantized_data)
        assert close < 0.01
        q = bs.quantize(x, bs.NVFP4(), layout="linear")
        packed = NVFP4QTensor(x.shape, x.dtype, q.rowwise.data)
        values = {"scale": q.rowwise.scale.view(torch.float8_e4m3fn), "double_scale": double_scale, "block_sizes": {-1: 16}}
        back = packed.dequantize(torch.float32, **values)
        if amax > 4:  # 2688 * 2^k: their global scale is exact
            assert_same(q.dequantize() + 0.0, (back + 0.0).numpy(), "values decoded there")  # it has no -0
        else:
            torch.testing.assert_close(q.dequantize(), back, rtol=3e-7, atol=0)


def test_nvfp4_static():
    """A weight with a given global amax (ours: ``amax=``), larger than its own, and block amaxes stored beforehand."""
    x, amax = normal(64, 256, seed=3, spread=0.5), 42.0
    quantizer = SimpleNamespace(block_sizes={-1: 16}, global_amax=torch.tensor(amax), _amax=x.view(-1, 16).abs().amax(1))
    scale, double_scale = NVFP4QTensor.get_weights_scaling_factor_from_quantizer(quantizer, x)
    theirs, _, _ = NVFP4QTensor.quantize(x.clone(), 16, scale, double_scale)
    ours = bs.quantize(x, bs.NVFP4(), layout="linear", amax=torch.tensor([amax])).rowwise
    assert_same(ours.scale, scale.view(torch.uint8).numpy(), "scale")
    assert scale.view(torch.uint8).unique().numel() > 20
    assert (ours.data != theirs._quantized_data).float().mean() < 0.01  # zeros without a sign, and middles


@pytest.mark.parametrize("metric", ["mse", "mae"])
@pytest.mark.parametrize("amax", [1536.0, 6.0, 3.7])
def test_nvfp4_four_over_six(metric, amax):
    """Its scheme keeps the choice in the stored block amax, times 1.5 for a 4, with scales up to 256: given our choices, the
    scales and codes are ours; and no block would be better off with the other choice, measured on its own values."""
    fmt = bs.NVFP4(four_over_six=metric, scale_max=256)
    x = with_amax(normal(64, 256, seed=5, spread=0.5) * amax / 16, amax)
    block_amax = x.view(-1, 16).abs().amax(1)

    def theirs(factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = {-1: 16, "four_over_six": True}
        quantizer = SimpleNamespace(block_sizes=sizes, global_amax=torch.tensor(amax), _amax=block_amax * factor)
        scale, double_scale = NVFP4QTensor.get_weights_scaling_factor_from_quantizer(quantizer, x)
        made, _, _ = NVFP4QTensor.quantize(x.clone(), 16, scale, double_scale)
        values = made.dequantize(torch.float32, scale=scale, double_scale=double_scale, block_sizes={-1: 16})
        return scale, made._quantized_data, values

    six, four = theirs(torch.ones_like(block_amax)), theirs(torch.full_like(block_amax, 1.5))
    ours = bs.quantize(x, fmt, layout="linear").rowwise
    took_four = (ours.scale != six[0].view(torch.uint8)).flatten()
    assert 0.2 < took_four.float().mean() < 0.8
    scale, data, _ = theirs(torch.where(took_four, 1.5, 1.0))
    assert compare_nvfp4(x, fmt, amax, scale, data) < 0.02
    errors = [(v - x).view(-1, 16).double().abs() ** (2 if metric == "mse" else 1) for _, _, v in (six, four)]
    best_four = errors[1].sum(1) < errors[0].sum(1)
    clear = (errors[1].sum(1) / errors[0].sum(1) - 1).abs() > 1e-5
    assert clear.float().mean() > 0.9
    differ = took_four[clear] != best_four[clear]
    assert not differ.any()


@pytest.mark.parametrize("power", [-20, 0, 9])
def test_fp8_tensor(power):
    """amax 448 * 2^k: their scale, amax / 448, and ours, 1 / (448 / amax), are both exact."""
    x = with_amax(normal(70, 90, seed=1, spread=3.0) * 2.0**power, 448 * 2.0**power)
    theirs, scale = FP8QTensor.quantize(x)
    ours = bs.quantize(x, bs.FP8Tensor()).rowwise
    assert_same(ours.scale, scale.reshape(1).numpy(), "scale")
    assert_same(ours.data, theirs._quantized_data.view(torch.uint8).numpy(), "data")
    assert ours.data.unique().numel() > 150


def test_fp8_tensor_decodes_there():
    x = normal(70, 90, seed=2, spread=3.0)
    q = bs.quantize(x, bs.FP8Tensor())
    made = FP8QTensor(x.shape, x.dtype, q.rowwise.data.view(torch.float8_e4m3fn))
    assert_same(made.dequantize(torch.float32, scale=q.rowwise.scale), q.dequantize().numpy())


def test_fp8_given_amax():
    """Static (calibrated) scaling there is ours with a given amax, or delayed scaling with a given scale."""
    x, amax = normal(70, 90, seed=3, spread=2.0), torch.tensor(3.5)
    want = fp8_eager(x, amax)
    assert_same(bs.quantize(x, bs.FP8Tensor(), amax=amax[None]).dequantize(), want.numpy())
    assert_same(bs.quantize(x, bs.FP8Delayed(), scale=448 / amax[None]).dequantize(), want.numpy())
    assert (want.abs() == 3.5).float().mean() > 0.01


@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
def test_fp8_block(block):
    """Scales of powers of two given to it: division there and multiplication here are both exact."""
    x = normal(256, 384, seed=4, spread=3.0)
    ours = bs.quantize(x, bs.FP8Block(block=block)).rowwise
    theirs, _ = FP8QTensor.quantize(x, scales=ours.scale, block_sizes={-1: block[1], -2: block[0]})
    assert_same(ours.data, theirs._quantized_data.view(torch.uint8).numpy(), "data")
    amax = x.view(256 // block[0], block[0], 3, 128).abs().amax((1, 3))
    assert (amax / ours.scale <= 448).all()
    assert (amax / ours.scale > 224).all()
