"""On a GPU the same operators give the CPU's bits; only sums in matrix products may differ, within a bound."""

import copy

import pytest
import torch

import blockscale as bs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FORMATS = [
    bs.MXFP8(),
    bs.MXFP8("e5m2", (32, 32), "floor"),
    bs.MXFP8(nan="ignore"),
    bs.NVFP4(),
    bs.NVFP4((16, 16)),
    bs.NVFP4(hadamard=True, stochastic=True),
    bs.FP8Tensor(),
    bs.FP8Tensor("e5m2", power_of_two=True),
    bs.FP8Block(),
    bs.FP8Block(block=(128, 128), power_of_two=False),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def same(cpu, gpu):
    assert gpu.device.type == "cuda"
    if cpu.dtype == torch.uint8:
        assert torch.equal(cpu, gpu.cpu())
    else:
        a, b = cpu.float(), gpu.cpu().float()
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(7.0).view(torch.int32), b.nan_to_num(7.0).view(torch.int32))


def wide(M, K, dtype):
    generator = torch.Generator().manual_seed(M * K)
    x = torch.randn(M, K, generator=generator)
    x = (x * torch.exp2(torch.randint(-20, 12, (M, K), generator=generator).float())).to(dtype)
    x.view(-1)[::7] = 0
    x[0, 0], x[-1, -1] = float("nan"), float("inf")
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (200, 464), (257, 1504)])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.label)
def test_quantize(fmt, shape, dtype):
    x, rng = wide(*shape, dtype), torch.tensor([123456789123, 3])
    M = shape[0]
    offsets = torch.tensor([0, M // 3, M // 3, M - M // 5])
    for layout in ("compact", "swizzled") if fmt.has_codes else ("compact",):
        options = {"columnwise": True, "layout": layout}
        pairs = [
            (bs.quantize(x, fmt, rng=rng, **options), bs.quantize(x.cuda(), fmt, rng=rng.cuda(), **options)),
            (
                bs.quantize_grouped(x, offsets, fmt, rng=rng, **options),
                bs.quantize_grouped(x.cuda(), offsets.cuda(), fmt, rng=rng.cuda(), **options),
            ),
        ]
        for cpu, gpu in pairs:
            for name, plane in cpu.planes.items():
                for a, b in zip(plane.tensors(), gpu.plane(name).tensors(), strict=True):
                    same(a, b)
                same(cpu.dequantize(plane=name), gpu.dequantize(plane=name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ["swiglu", "clamped_swiglu", "squared_relu", "situ"])
def test_activation(act, dtype):
    generator = torch.Generator().manual_seed(0)
    h = (torch.randn(300, 512, generator=generator) * 4).to(dtype)
    h[0, :4], h[1, :4] = float("nan"), float("inf")
    probs = torch.rand(300, generator=generator)
    dy = torch.randn(300, 512 if act == "squared_relu" else 256, generator=generator).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        leaf = h.clone().to(device).requires_grad_()
        y = bs.activation(leaf, act, probs=probs.to(device))
        y.backward(dy.to(device))
        results.append((y.detach(), leaf.grad))
    for cpu, gpu in zip(*results, strict=True):
        same(cpu, gpu)


@pytest.mark.parametrize(
    "recipe", [bs.recipes.BF16(), bs.recipes.MXFP8Training(), bs.recipes.NVFP4Training()], ids=lambda r: r.name
)
def test_mlp(recipe):
    generator = torch.Generator().manual_seed(0)
    mlp = bs.nn.GroupedMLP(4, 96, 160, bias=True)
    x, probs = torch.randn(300, 96, generator=generator), torch.rand(300, generator=generator)
    offsets = bs.offsets_from_sizes(torch.tensor([50, 0, 129, 100]))
    results = []
    for device in ("cpu", "cuda"):
        m = copy.deepcopy(mlp).to(device)
        leaf = x.clone().to(device).requires_grad_()
        y = bs.grouped_mlp(
            leaf,
            m.fc1.weight,
            m.fc2.weight,
            offsets.to(device),
            probs=probs.to(device),
            b1=m.fc1.bias,
            b2=m.fc2.bias,
            recipe=recipe,
            rng=torch.tensor([5, 0], device=device),
        )
        y.square().sum().backward()
        results.append([t.detach().cpu().double() for t in (y, leaf.grad, m.fc1.weight.grad, m.fc2.weight.grad)])
    for cpu, gpu in zip(*results, strict=True):
        assert (cpu - gpu).norm() <= 2e-6 * cpu.norm()
        assert cpu.norm() > 0
