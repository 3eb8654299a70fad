"""Stochastic rounding of NVFP4: the random bits, their counters, and that the rounding has no bias."""

import numpy as np
import pytest
import torch
from oracle import codes, formats, inputs, philox
from oracle.check import assert_same
from oracle.formats import PLANES, Format
from test_quantize import compare

import blockscale as bs

F32 = np.float32
FMT = Format("NVFP4", {"stochastic": True})


def row_values(y: float, rows: int, blocks: int, rng: tuple[int, int]) -> torch.Tensor:
    """Many copies of y, stochastically rounded at scale 1 (amax 2688, a 6 in the first place of each block)."""
    x = torch.full((rows, blocks, 16), y)
    x[:, :, 0] = 6.0
    given = {"rng": torch.tensor(rng, dtype=torch.int64), "amax": torch.tensor([2688.0])}
    q = bs.quantize(x.reshape(rows, -1), bs.NVFP4(stochastic=True), **given)
    assert (q.rowwise.scale[:rows, :blocks] == 0x38).all()
    return q.dequantize().reshape(rows, blocks, 16)[:, :, 1:]


@pytest.mark.parametrize("rng", [(0, 0), (-1, 0), (2**63 - 1, 2**31 - 1), (-(2**63), 1), (0x123456789ABCDEF0, 77)])
def test_the_bits_are_those_of_the_counters(rng):
    x, exact = inputs.tensor("wide", 45, 70, 1)
    compare(x, exact, FMT, rng=rng)


def test_each_decision_follows_its_random_bits():
    """At 0.25, half a step: up exactly where r < 32767.5, r worked from the known-answer generator."""
    up = row_values(0.25, 9, 7, (42, 5)) == 0.5
    r = philox.block_bits(9, 7, (42, 5), 0, 0)[:, :, 1:]
    assert np.array_equal(up.numpy(), r < 32768)
    assert philox.block_bits(1, 1, (0, 0), 0, 0)[0, 0, :2].tolist() == [0xE8D5, 0x27E8]


def test_the_zero_counter_known_answer_through_quantize():
    """Key 0, counter 0: words 6627e8d5 e169c58d bc57ac4c 9b00dbd8 decide the first block."""
    r = [0xE8D5, 0x27E8, 0x6627, 0xD566, 0xC58D, 0x69C5, 0xE169, 0x8DE1, 0xAC4C, 0x57AC, 0xBC57, 0x4CBC, 0xDBD8, 0x00DB]
    up = row_values(0.25, 1, 1, (0, 0)).flatten() == 0.5
    assert up[:13].tolist() == [value < 32768 for value in r[1:]]


@pytest.mark.parametrize("y", [0.1, 0.25, 0.49, 1.2, 1.75, 2.1, 2.5, 3.3, 4.2, 5.0, 5.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_mean_is_the_value(y, sign):
    values = row_values(sign * y, 400, 40, (int(y * 10), 9)).double()
    low, high = values.min(), values.max()
    assert low < sign * y < high
    assert values.unique().numel() == 2
    deviation = float(values.std() / values.numel() ** 0.5)
    assert abs(float(values.mean()) - float(F32(sign * y))) < 4.5 * deviation + float(high - low) * 2**-17


def test_grid_values_never_move():
    for code in range(1, 8):
        y = float(codes.decode(np.array([code]), "e2m1")[0])
        for signed in (y, -y):
            assert (row_values(signed, 50, 20, (code, 0)) == signed).all()


def test_same_bits_twice_and_others_for_another_seed_offset_or_plane():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    x = (x + x.t()) / 2

    def data(seed, offset):
        rng = torch.tensor([seed, offset])
        q = bs.quantize(x, bs.NVFP4(stochastic=True), columnwise=True, rng=rng)
        return q.rowwise.data, q.columnwise.data

    row, column = data(3, 4)
    assert torch.equal(row, data(3, 4)[0])
    assert torch.equal(column, data(3, 4)[1])
    for other in (data(4, 4)[0], data(3, 5)[0], column):
        assert 0.05 < (row != other).float().mean() < 0.95


def test_a_generator_gives_the_same_bits_again():
    x = torch.randn(40, 48, generator=torch.Generator().manual_seed(1))
    first, again = (
        bs.quantize(x, bs.NVFP4(stochastic=True), generator=torch.Generator().manual_seed(9)).rowwise.data for _ in "12"
    )
    generator = torch.Generator().manual_seed(9)
    one, two = (bs.quantize(x, bs.NVFP4(stochastic=True), generator=generator).rowwise.data for _ in "12")
    assert torch.equal(first, again)
    assert torch.equal(first, one)
    assert not torch.equal(one, two)


def test_counters_of_a_group_start_at_its_first_row():
    """Group 0 rounds as a plain tensor; group 1, of the same rows, by its own counters, as the oracle says."""
    x, exact = inputs.tensor("normal", 33, 64, 2)
    q = bs.quantize_grouped(
        torch.cat([x, x]),
        torch.tensor([0, 33, 66]),
        bs.NVFP4(stochastic=True),
        columnwise=True,
        rng=torch.tensor([8, 1]),
    )
    plain = bs.quantize(x, bs.NVFP4(stochastic=True), columnwise=True, rng=torch.tensor([8, 1]))
    for which in PLANES:
        first, second = (getattr(q.group(g), which).data for g in (0, 1))
        assert torch.equal(first, getattr(plain, which).data)
        assert not torch.equal(first, second)
        assert_same(second, formats.quantize(exact, FMT, rng=(8, 1), group=1)[which].data)
