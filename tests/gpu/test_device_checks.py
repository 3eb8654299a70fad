"""Offsets that are not legal, read on the device: nothing outside the buffers is touched, and the next call says what was wrong."""

import pytest
import torch

import blockscale as bs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WRONG = {
    (0, 5, 3, 20): r"offsets decrease at group 1: offsets\[1\]=5, offsets\[2\]=3",
    (2, 5, 6, 20): r"offsets\[0\]=2; offsets start at 0",
    (0, 5, 5, 40): r"offsets\[3\]=40: the sizes sum to more than the 32 rows",
    (0, 5, 10**12, 20): r"offsets\[2\]=1000000000000",
}


@pytest.mark.parametrize("offsets", WRONG)
@pytest.mark.parametrize("fmt", [bs.MXFP8(), bs.NVFP4()], ids=["mxfp8", "nvfp4"])
def test_wrong_offsets(fmt, offsets):
    x = torch.randn(32, 64, device="cuda")
    bs.quantize_grouped(x, torch.tensor(offsets, device="cuda"), fmt, columnwise=True)
    with pytest.raises(bs.DeviceCheckError, match=WRONG[offsets]):
        bs.check()
    bs.quantize_grouped(x, torch.tensor(offsets, device="cuda"), fmt)
    torch.cuda.synchronize()
    with pytest.raises(bs.DeviceCheckError, match=WRONG[offsets]):
        bs.quantize(x, fmt)
    bs.check()


def test_in_a_graph():
    x, offsets = torch.randn(256, 64, device="cuda"), torch.tensor([0, 100, 256], device="cuda")
    bs.quantize_grouped(x, offsets, bs.MXFP8())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bs.quantize_grouped(x, offsets, bs.MXFP8())
    graph.replay()
    bs.check()
    offsets[1] = 300
    graph.replay()
    with pytest.raises(bs.DeviceCheckError, match=r"offsets\[1\]=300"):
        bs.check()
