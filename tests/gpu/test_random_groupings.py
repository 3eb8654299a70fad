"""Random shapes and groupings on a GPU: every byte is the CPU's, whatever the outputs held before."""

import random

import pytest
import torch

import blockscale as bs
from blockscale.ops import backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FORMATS = [
    bs.MXFP8(),
    bs.MXFP8("e5m2", nan="ignore"),
    bs.MXFP8(block=(32, 32)),
    bs.NVFP4(),
    bs.NVFP4(hadamard=True, stochastic=True),
    bs.MXFP4(),
    bs.MXFP4(block=(32, 32), nan="ignore"),
    bs.FP8Tensor(),
    bs.FP8Tensor("e5m2", power_of_two=True),
    bs.FP8Block(),
    bs.FP8Block("e5m2", (128, 128), power_of_two=False),
]
LAYOUTS = ("compact", "swizzled")
SPECIAL = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-38, -1e-40, 3.3e38, 448.0, 2e-36, 6e4])


def tensor(rows, columns, dtype, generator):
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp2(torch.randint(-20, 20, (rows, 1), generator=generator).float())
    if x.numel():
        places = torch.randint(0, x.numel(), (1 + x.numel() // 97,), generator=generator)
        x.view(-1)[places] = SPECIAL[torch.randint(0, len(SPECIAL), places.shape, generator=generator)]
    return x.to(dtype)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.label)
def test_random_groupings(fmt):
    draw = random.Random(fmt.spec())
    for n in range(60):
        generator = torch.Generator().manual_seed(n)
        rows = draw.choice([0, 1, 31, 32, 33, 63, 127, 128, 129, 257, draw.randrange(1, 900)])
        columns = 16 * draw.choice([1, 2, 3, 29, 40, draw.randrange(1, 60)]) - draw.choice([0, 0, 0, 5])
        groups = draw.choice([0, 1, 2, 3, 8, 40, 130])
        ends = sorted(draw.randrange(rows + 1) for _ in range(groups))
        x, offsets = tensor(rows, columns, torch.bfloat16, generator), torch.tensor([0, *ends])
        x[int(offsets[-1]) :] = float("nan")
        rng = torch.tensor([draw.randrange(1 << 62), n]) if getattr(fmt, "stochastic", False) else None
        options = (fmt, True, True, draw.choice(LAYOUTS[: 1 + fmt.has_codes]), None)
        want = backend.quantize(x, offsets, *options, rng)
        poisoned = [torch.full_like(t, 0x7F if t.dtype == torch.uint8 else float("nan"), device="cuda") for t in want]
        got = backend.quantize(x.cuda(), offsets.cuda(), *options, None if rng is None else rng.cuda(), poisoned)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)), (n, rows, columns, ends)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.label)
def test_captured_and_replayed_with_other_groups(fmt):
    generator = torch.Generator().manual_seed(0)
    x = tensor(300, 256, torch.bfloat16, generator).cuda()
    offsets = torch.tensor([0, 10, 200, 300], device="cuda")
    rng = torch.tensor([5, 6], device="cuda")
    options = (fmt, True, True, LAYOUTS[fmt.has_codes], None, rng)
    out = [torch.empty_like(t) for t in backend.quantize(x, offsets, *options)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.quantize(x, offsets, *options, out)
    for ends in ([0, 10, 200, 300], [0, 0, 0, 0], [0, 299, 299, 300], [0, 1, 2, 130]):
        offsets.copy_(torch.tensor(ends))
        graph.replay()
        for a, b in zip(out, backend.quantize(x, offsets, *options), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.label)
def test_explain_says_which_kernel(fmt):
    told = bs.explain(bs.quantize, torch.empty(64, 64, device="cuda"), fmt)
    assert {s.choice.backend for s in told.stages} == {"triton"}
