"""Run the kernels in Triton's interpreter on small tensors and compare every byte with the reference.

A script of its own because TRITON_INTERPRET is read where kernels are defined: ``python interpreted.py FIRST STEP``.
"""

import sys

import pytest
import torch

import blockscale as bs
from blockscale.ops.launch import quantize as launch
from blockscale.reference import quantize as reference

FORMATS = [
    bs.MXFP8(),
    bs.MXFP8("e5m2", nan="ignore"),
    bs.MXFP8(block=(32, 32)),
    bs.MXFP8("e5m2", (32, 32), "floor"),
    bs.MXFP8(scale_rounding="floor"),
    bs.NVFP4(),
    bs.NVFP4((16, 16), nan="ignore"),
    bs.NVFP4(hadamard=True, stochastic=True),
]
#: rows, columns, offsets (None: a plain tensor), dtype, layout
CASES = [
    (33, 48, None, torch.bfloat16, "compact"),
    (20, 130, None, torch.float32, "linear"),
    (16, 64, None, torch.float16, "swizzled_8x4"),
    (70, 40, [0, 0, 33, 34, 60], torch.bfloat16, "swizzled"),
    (24, 33, [0, 5, 21], torch.float32, "compact"),
]
SPECIAL = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-38, -1e-40, 3.3e38, 448.0, 2e-36, 6e4])


def tensor(rows, columns, dtype):
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp2(torch.randint(-20, 20, (rows, 1), generator=generator).float())
    places = torch.randint(0, rows * columns, (rows * columns // 60,), generator=generator)
    x.view(-1)[places] = SPECIAL[torch.randint(0, len(SPECIAL), places.shape, generator=generator)]
    return x.to(dtype)


def compare(fmt, case, rowwise, columnwise):
    rows, columns, offsets, dtype, layout = case
    x = tensor(rows, columns, dtype)
    rng = torch.tensor([12345678901, 7]) if getattr(fmt, "stochastic", False) else None
    options = (fmt, rowwise, columnwise, layout, None, rng)
    if offsets is not None:
        offsets = torch.tensor(offsets)
        x[offsets[-1] :] = float("nan")
        want = reference.quantize_grouped(x, offsets, *options)
    else:
        want = reference.quantize(x, *options)
    poisoned = [torch.full_like(t, 0x7F if t.dtype == torch.uint8 else float("nan")) for t in want]
    for got, expected in zip(launch.quantize(x, offsets, *options, poisoned), want, strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), (fmt.spec(), case, rowwise, columnwise)


#: offsets that are not legal for 32 rows, and what is said of them
WRONG = {
    (0, 5, 3, 20): "offsets decrease at group 1: offsets[1]=5, offsets[2]=3",
    (2, 5, 6, 20): "offsets[0]=2; offsets start at 0",
    (0, 5, 5, 40): "offsets[3]=40: the sizes sum to more than the 32 rows",
    (-3, 5, 7, 9): "offsets[0]=-3; offsets start at 0",
    (0, *[7] * 40, 6): "offsets decrease at group 40: offsets[40]=7, offsets[41]=6",
}


def check_offsets(fmt):
    """A kernel says which offsets are wrong, and of right ones nothing."""
    x = torch.randn(32, 64)
    launch.quantize(x, torch.tensor([0, 5, 5, 20]), fmt, True, True, "swizzled", None, None)
    bs.check()
    for offsets, message in WRONG.items():
        launch.quantize(x, torch.tensor(offsets), fmt, True, True, "swizzled", None, None)
        with pytest.raises(bs.DeviceCheckError) as error:
            bs.check()
        assert message in str(error.value)


def main():
    first, step = map(int, sys.argv[1:])
    planes = [(True, True), (True, False), (False, True)]
    every = [(f, c, planes[(i + j) % 3]) for i, f in enumerate(FORMATS) for j, c in enumerate(CASES)]
    for fmt, case, asked in every[first::step]:
        compare(fmt, case, *asked)
    check_offsets(FORMATS[(0, 5)[first % 2]])
    print(len(every[first::step]))


if __name__ == "__main__":
    main()
