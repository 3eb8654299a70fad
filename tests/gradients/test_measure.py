"""The checks of this folder fail where they must: zeros, swapped groups, a doubled group, E5M2 read as E4M3, NaN."""

import dataclasses
import itertools
import math

import pytest
import torch
from support import GEMM_BOUND, calc_diff, gemm64, normal, offsets_of, worst_group

import blockscale as bs

SIZES, CAPACITY = [64, 64, 0, 37], 180
OFFSETS = offsets_of(SIZES)
ROLES = ("forward", "dgrad", "wgrad")


def make(role):
    """(operands, result, float64 result, offsets that split it)."""
    x, w, dy = normal(CAPACITY, 70, seed=1), normal(4, 45, 70, seed=2), normal(CAPACITY, 45, seed=3)
    x, w = (bs.quantize_grouped(t, o, bs.MXFP8(), columnwise=True) for t, o in ((x, OFFSETS), (w, None)))
    dy = bs.quantize_grouped(dy, OFFSETS, bs.MXFP8("e5m2"), columnwise=True)
    a, b = {"forward": (x, w), "dgrad": (dy, w), "wgrad": (dy, x)}[role]
    got = bs.grouped_gemm(a, b, role=role, offsets=OFFSETS)
    return (a, b), got, gemm64(a, b, role, OFFSETS, CAPACITY), None if role == "wgrad" else OFFSETS


def groups(result, split):
    return list(result) if split is None else [result[a:b] for a, b in itertools.pairwise(split)]


def swapped(result, split):
    result = result.clone()
    first, second = groups(result, split)[:2]
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    return result


def doubled(result, split):
    result = result.clone()
    groups(result, split)[3].mul_(2)
    return result


def one_nan(result, split):
    result = result.clone()
    groups(result, split)[0][5, 3] = math.nan
    return result


def dead_row(result, split):
    result = result.clone()
    result[-1 if split is not None else 2] += 1e-30  # a row past the offsets; an empty group
    return result


MUTATIONS = {
    "all_zero": lambda result, split: torch.zeros_like(result),
    "two_groups_swapped": swapped,
    "one_group_doubled": doubled,
    "scaled_by_1.00001": lambda result, split: result * 1.00001,
    "one_nan": one_nan,
    "written_outside": dead_row,
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_measure_refuses(mutation, role):
    _, got, expected, split = make(role)
    assert worst_group(got, expected, split) <= GEMM_BOUND
    wrong = MUTATIONS[mutation](got, split)
    assert wrong.shape == got.shape
    assert worst_group(wrong, expected, split) > 4 * GEMM_BOUND


@pytest.mark.parametrize("role", ["dgrad", "wgrad"])
def test_the_measure_refuses_e5m2_read_as_e4m3(role):
    (dy, b), got, expected, split = make(role)
    assert worst_group(got, expected, split) <= GEMM_BOUND
    assert dy.format == bs.MXFP8("e5m2")
    misread = dataclasses.replace(dy, format=bs.MXFP8("e4m3"))
    wrong = bs.grouped_gemm(misread, b, role=role, offsets=OFFSETS)
    assert worst_group(wrong, expected, split) > 0.5
    assert worst_group(wrong.nan_to_num(nan=0.0), expected, split) > 0.5
    # and the other way round: an E4M3 input read as E5M2
    (x, w), _, expected, split = make("forward")
    wrong = bs.grouped_gemm(dataclasses.replace(x, format=bs.MXFP8("e5m2")), w)
    assert worst_group(wrong.nan_to_num(nan=0.0), expected, split) > 0.5


@pytest.mark.parametrize("role", ROLES)
def test_the_measure_refuses_swapped_operands_and_scales(role):
    """Groups of an operand exchanged before the product, and the scales of another group."""
    (a, b), _, expected, split = make(role)
    plane = a.columnwise if role == "wgrad" else a.rowwise
    data = plane.data.clone()
    data[0:64], data[64:128] = plane.data[64:128], plane.data[0:64]
    mutated = dataclasses.replace(plane, data=data)
    which = "columnwise" if role == "wgrad" else "rowwise"
    wrong = bs.grouped_gemm(dataclasses.replace(a, **{which: mutated}), b, role=role, offsets=OFFSETS)
    assert worst_group(wrong, expected, split) > 0.5
    scale = plane.scale.clone()
    scale[0] += 1
    mutated = dataclasses.replace(plane, scale=scale)
    wrong = bs.grouped_gemm(dataclasses.replace(a, **{which: mutated}), b, role=role, offsets=OFFSETS)
    assert worst_group(wrong, expected, split) > 0.01


def test_the_measure_itself():
    x = torch.tensor([3.0, 4.0])
    assert calc_diff(x, x) == 0.0
    assert calc_diff(x * 2, x) == 1.0
    assert calc_diff(torch.zeros(2), x) == 1.0
    assert calc_diff(torch.zeros(2), torch.zeros(2)) == 0.0
    assert calc_diff(torch.tensor([1e-30, 0.0]), torch.zeros(2)) == math.inf
    assert calc_diff(torch.tensor([3.0, math.nan]), x) == math.inf
    # one small group that is wrong is not hidden by a large one
    got, expected = torch.tensor([[1e6, 1e6], [0.0, 0.0]]), torch.tensor([[1e6, 1e6], [1.0, 1.0]])
    assert calc_diff(got, expected) < GEMM_BOUND < worst_group(got, expected) == 1.0
    with pytest.raises(AssertionError, match="shape"):
        calc_diff(torch.zeros(2), torch.zeros(3))
