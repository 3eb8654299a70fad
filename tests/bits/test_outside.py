"""Law 3: what lies outside is outside. Padding never reaches a value, and is written whatever a buffer held before."""

import numpy as np
import pytest
import torch
from oracle import cases, formats, grouped, inputs, layouts
from oracle.check import assert_same
from oracle.formats import PLANES
from test_quantize import make

import blockscale as bs

POISONS = (0x7F, 0xFF, 0x3C)
OFFSETS = np.array([0, 33, 33, 162, 180], dtype=np.int64)
ROUNDED = [f for f in cases.FEW if not f.option("stochastic", False)]


def poison(tensor: torch.Tensor, dead: np.ndarray | None = None, byte: int = 0xFF) -> None:
    """Fill the dead entries (all by default): bytes, or NaN in float32 scales."""
    where = torch.ones_like(tensor, dtype=torch.bool) if dead is None else torch.from_numpy(dead)
    tensor[where] = float("nan") if tensor.dtype == torch.float32 else byte


def poison_everything(q) -> None:
    for which in PLANES:
        plane = getattr(q, which)
        for part in (plane.data, plane.scale, plane.amax):
            if part is not None:
                poison(part)


@pytest.mark.parametrize("layout", ["compact", "swizzled", "swizzled_8x4", "linear"])
@pytest.mark.parametrize("fmt", ROUNDED, ids=str)
def test_out_buffers_are_overwritten_to_the_last_byte(fmt, layout):
    layout = layout if fmt.has_codes else "compact"
    x, exact = inputs.tensor("wide", 130, 70, 1)
    q = bs.quantize(x, make(fmt), columnwise=True, layout=layout)
    poison_everything(q)
    bs.quantize(x, make(fmt), columnwise=True, layout=layout, out=q)
    for which, want in formats.quantize(exact, fmt).items():
        plane = getattr(q, which)
        assert_same(plane.data, want.data, which)
        assert_same(plane.scale, formats.scale_buffer(want, fmt, which, layout), which)
        if want.amax is not None:
            assert_same(plane.amax, want.amax, which)


@pytest.mark.parametrize("layout", ["compact", "swizzled"])
@pytest.mark.parametrize("fmt", ROUNDED, ids=str)
def test_grouped_out_buffers_are_overwritten_to_the_last_byte(fmt, layout):
    layout = layout if fmt.has_codes else "compact"
    x, exact = inputs.tensor("wide", 250, 70, 2)
    q = bs.quantize_grouped(x, torch.from_numpy(OFFSETS), make(fmt), columnwise=True, layout=layout)
    poison_everything(q)
    bs.quantize_grouped(x, torch.from_numpy(OFFSETS), make(fmt), columnwise=True, layout=layout, out=q)
    for which, want in grouped.quantize(exact, OFFSETS, fmt, layout).items():
        plane = getattr(q, which)
        assert_same(plane.data, want.data, which)
        assert_same(plane.scale, want.scale, which)
        if want.amax is not None:
            assert_same(plane.amax, want.amax, which)


@pytest.mark.parametrize("byte", POISONS)
@pytest.mark.parametrize("layout", ["compact", "swizzled", "swizzled_8x4"])
@pytest.mark.parametrize("fmt", [f for f in ROUNDED if f.has_codes], ids=str)
def test_scale_padding_never_reaches_a_value(fmt, layout, byte):
    x, exact = inputs.tensor("wide", 33, 70, 3)
    q = bs.quantize(x, make(fmt), columnwise=True, layout=layout)
    for which, want in formats.quantize(exact, fmt).items():
        marks = layouts.arrange(np.ones_like(want.scale), layout, fmt.mx and which == "columnwise")
        assert (marks == 0).any()
        poison(getattr(q, which).scale, marks == 0, byte)
        assert_same(q.dequantize(plane=which), formats.dequantize(want, fmt, which, exact.shape), which)


@pytest.mark.parametrize("byte", POISONS)
@pytest.mark.parametrize("layout", ["compact", "swizzled"])
@pytest.mark.parametrize("fmt", ROUNDED, ids=str)
def test_grouped_padding_never_reaches_a_value(fmt, layout, byte):
    """Dead rows, the padding of transposed data and of scales, all poisoned: values and groups as before."""
    layout = layout if fmt.has_codes else "compact"
    x, exact = inputs.tensor("wide", 250, 70, 4)
    q = bs.quantize_grouped(x, torch.from_numpy(OFFSETS), make(fmt), columnwise=True, layout=layout)
    for which, marks in grouped.live(OFFSETS, 250, 70, fmt, layout).items():
        plane = getattr(q, which)
        assert not marks.data.all()
        poison(plane.data, ~marks.data, byte)
        poison(plane.scale, ~marks.scale, byte)
        assert_same(q.dequantize(plane=which), grouped.dequantize(exact, OFFSETS, fmt, which), which)
        for g in (0, 2, 3):
            rows = exact[OFFSETS[g] : OFFSETS[g + 1]]
            want = formats.quantize(rows, fmt)[which]
            one = q.group(g)
            assert_same(getattr(one, which).data, want.data, (g, which))
            assert_same(one.dequantize(plane=which), formats.dequantize(want, fmt, which, rows.shape), (g, which))
