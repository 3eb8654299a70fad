"""The activation kernels on a GPU: what they give in the interpreter, and on larger tensors."""

import pytest
import torch
from kernels import interpreted_activation as small

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CASES = list(small.cases())
LARGE = [(700, [0, 0, 129, 300, 301, 690]), (257, [0, 257])]


@pytest.mark.parametrize("n", range(len(CASES)))
def test_small(n):
    small.compare(*CASES[n], "cuda")


@pytest.mark.parametrize("rows", LARGE, ids=["many", "one"])
@pytest.mark.parametrize("act", small.ACTS, ids=str)
def test_large(act, rows):
    kind, interleave, width = act
    for n, fmt in enumerate(small.FORMATS):
        act = (kind, interleave, width * 6)
        small.compare(n, act, rows, small.DTYPES[n % 3], fmt, small.PLANES[n % 3], ("compact", "swizzled")[n % 2], n != 2, "cuda")
