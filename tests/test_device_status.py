"""What kernels leave in the status words is raised by the next operator, in words, once."""

import pytest
import torch

import blockscale as bs
from blockscale.ops import device_status


@pytest.fixture
def words():
    words = device_status.words(torch.device("cpu"))
    yield words
    words.zero_()


def test_nothing_is_wrong(words):
    bs.check()
    assert words.tolist() == [0] * device_status.WORDS
    assert device_status.words(torch.device("cpu")) is words


@pytest.mark.parametrize(
    ("left", "message"),
    [
        ((1, 0, 2, 5, 32), r"quantize_mxfp8 on cpu: offsets\[0\]=2; offsets start at 0"),
        ((2, 1, 5, 3, 32), r"quantize_nvfp4 on cpu: offsets decrease at group 1: offsets\[1\]=5, offsets\[2\]=3"),
        ((1, 2, 5, 40, 32), r"offsets\[3\]=40: the sizes sum to more than the 32 rows of the buffer"),
    ],
)
def test_the_next_operator_raises(words, left, message):
    x = torch.ones(4, 32)
    words[:5] = torch.tensor(left)
    with pytest.raises(bs.DeviceCheckError, match=message):
        bs.quantize(x, bs.MXFP8())
    assert bs.quantize(x, bs.MXFP8()).rowwise.data.shape == (4, 32)
    bs.check()
