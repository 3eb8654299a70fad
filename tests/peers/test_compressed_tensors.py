"""The packing of E2M1 codes against compressed-tensors: two per byte, the even element in the low nibble."""

import pytest
import torch
from oracle.check import assert_same

import blockscale as bs

pytest.importorskip("compressed_tensors", reason="compressed-tensors is an optional peer: pip install --no-deps")
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8


def codes_of(x: torch.Tensor) -> torch.Tensor:
    """NVFP4 data of x with scale 1 in every block: amax 2688, a 6 in each block."""
    quantized = bs.quantize(x, bs.NVFP4(), amax=torch.tensor([2688.0])).rowwise
    assert (quantized.scale[: x.shape[0], : x.shape[1] // 16] == 0x38).all()
    return quantized.data


def grid(rows: int, columns: int) -> torch.Tensor:
    """Random E2M1 values, both signs of zero included, the first of each block of 16 being 6."""
    generator = torch.Generator().manual_seed(rows)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[torch.randint(0, 8, (rows, columns), generator=generator)]
    values = torch.where(torch.rand(rows, columns, generator=generator) < 0.5, -values, values)
    values[:, ::16] = 6.0
    return values


def test_packing():
    x = grid(64, 256)
    packed = codes_of(x)
    assert packed.unique().numel() > 200
    assert_same(packed, pack_fp4_to_uint8(x).numpy())


def test_unpacking():
    x = grid(33, 64)
    assert torch.equal(unpack_fp4_from_uint8(codes_of(x), 33, 64, dtype=torch.float32), x)
