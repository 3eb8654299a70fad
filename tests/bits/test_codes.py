"""Element and scale codes against the oracle: every 16-bit input, every midpoint and its neighbours, every code."""

import numpy as np
import pytest
import torch
from oracle import codes
from oracle.check import as_numpy, assert_same

import blockscale as bs

F32 = np.float32
ELEMENTS = ("e4m3", "e5m2", "e2m1")
COUNT = {"e4m3": 0x7F, "e5m2": 0x7C, "e2m1": 8}


def compare_encode(values: np.ndarray, element: str) -> None:
    got = bs.formats.encode(torch.from_numpy(np.ascontiguousarray(values)), element)
    assert_same(got, codes.encode(values, element), element)


def around_midpoints(element: str) -> np.ndarray:
    """Codes, the midpoints between neighbours, and both float32 neighbours of each; both signs."""
    table = codes.decode(np.arange(COUNT[element]), element)
    step_past = table[-1] + (table[-1] - table[-2])
    points = np.concatenate([table, (table[1:] + table[:-1]) / 2, [(table[-1] + step_past) / 2, step_past]]).astype(F32)
    points = np.concatenate([points, np.nextafter(points, F32(np.inf)), np.nextafter(points, F32(-np.inf))])
    return np.concatenate([points, -points])


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_encode_every_16_bit_input(element, dtype):
    pattern = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    compare_encode(pattern.view(dtype).float().numpy(), element)


@pytest.mark.parametrize("element", ELEMENTS)
def test_encode_every_midpoint_and_its_neighbours(element):
    compare_encode(around_midpoints(element), element)


@pytest.mark.parametrize("element", ELEMENTS)
def test_encode_random_float32_patterns(element):
    rng = np.random.default_rng(1)
    compare_encode(codes.floats(rng.integers(0, 2**32, 400_000, dtype=np.uint32)), element)
    near = np.ldexp(rng.uniform(1, 2, 400_000), rng.integers(-20, 18, 400_000)) * rng.choice([-1, 1], 400_000)
    compare_encode(near.astype(F32), element)


@pytest.mark.parametrize("element", ELEMENTS)
def test_encode_float32_specials(element):
    tiny = codes.floats(np.arange(0, 1000, dtype=np.uint32))
    edge = codes.floats(np.arange(0x7F7FFF00, 0x7F800100, dtype=np.uint32))
    values = np.concatenate([tiny, edge, codes.floats(0x7F800000 + 2 ** np.arange(23, dtype=np.uint32))])
    compare_encode(np.concatenate([values, -values]), element)


@pytest.mark.slow
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("low", [0x00, 0x01, 0x7F, 0x80, 0x81, 0xFF])
def test_encode_every_upper_24_bits(element, low):
    """All rounding decisions lie in the upper 24 bits and in whether anything is set below them."""
    for start in range(0, 2**24, 2**22):
        upper = np.arange(start, start + 2**22, dtype=np.uint32) << np.uint32(8)
        compare_encode(codes.floats(upper | np.uint32(low)), element)


@pytest.mark.parametrize("element", ELEMENTS)
def test_decode_every_code(element):
    every = np.arange(16 if element == "e2m1" else 256, dtype=np.uint8)
    got = bs.formats.decode(torch.from_numpy(every), element)
    assert_same(got, codes.decode(every, element), element)
    finite = every[~np.isnan(as_numpy(got)) & ~np.isinf(as_numpy(got))]
    again = bs.formats.encode(got[torch.from_numpy(finite).long()], element)
    assert_same(again, finite, "a code survives a decode and an encode")


def test_encode_keeps_shape_and_strides_apart():
    values = np.random.default_rng(2).standard_normal((3, 5, 8)).astype(F32)
    got = bs.formats.encode(torch.from_numpy(values).transpose(0, 2), "e4m3")
    assert_same(got, codes.encode(values, "e4m3").transpose(2, 1, 0))


def e8m0_inputs() -> np.ndarray:
    exponents = np.arange(0, 255, dtype=np.uint32) << np.uint32(23)
    mantissas = np.array([0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x600000, 0x7FFFFF], dtype=np.uint32)
    random = np.random.default_rng(3).integers(0, 0x7F800001, 200_000, dtype=np.uint32)
    special = np.array([0x7F800000, 0x7FC00000, 0xFFC00000, 0x7F800001], dtype=np.uint32)
    return codes.floats(np.concatenate([(exponents[:, None] | mantissas).reshape(-1), random, special]))


def test_e8m0_ceil():
    values = e8m0_inputs()
    assert_same(bs.formats.e8m0_ceil(torch.from_numpy(values)), codes.e8m0_ceil(values))


@pytest.mark.parametrize("emax", [2, 8, 15])
def test_e8m0_floor(emax):
    values = e8m0_inputs()
    assert_same(bs.formats.e8m0_floor(torch.from_numpy(values), emax), codes.e8m0_floor(values, emax))


@pytest.mark.slow
def test_e8m0_every_upper_24_bits():
    for low in (0x00, 0x01, 0xFF):
        values = codes.floats((np.arange(0x7F8001, dtype=np.uint32) << np.uint32(8)) | np.uint32(low))
        assert_same(bs.formats.e8m0_ceil(torch.from_numpy(values)), codes.e8m0_ceil(values))
        assert_same(bs.formats.e8m0_floor(torch.from_numpy(values), 8), codes.e8m0_floor(values, 8))


def test_e8m0_decode_every_code():
    every = np.arange(256, dtype=np.uint8)
    got = bs.formats.e8m0_decode(torch.from_numpy(every))
    assert_same(got, codes.e8m0_decode(every))
    assert_same(bs.formats.e8m0_ceil(got), every, "ceil of a decoded code is the code")
