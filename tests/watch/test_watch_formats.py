"""Watching layers of every recipe: hybrid planes and delayed scaling are counted in the format of the row plane."""

import pytest
import torch
from layers import make, step
from support import LATER_RECIPES, normal, offsets_of

import blockscale as bs
from blockscale.ops import backend, stages
from blockscale.tensors.counters import fresh


@pytest.mark.parametrize("recipe", LATER_RECIPES)
def test_watching_changes_no_bits(recipe):
    plain, module = make("mlp", LATER_RECIPES[recipe]), make("mlp", LATER_RECIPES[recipe])
    watch = bs.watch(module)
    for n in range(2):
        want, got = step(plain, n), step(module, n)
        assert all(torch.equal(t, got[name]) for name, t in want.items())
    watch.close()


@pytest.mark.parametrize(
    ("fmt", "same"),
    [
        (bs.Hybrid(bs.NVFP4(), bs.MXFP8()), bs.NVFP4()),
        (bs.MXFP8(columnwise_source="rowwise_dequantized"), bs.MXFP8()),
        (bs.FP8Delayed(), bs.FP8Tensor()),
    ],
    ids=lambda f: f.label,
)
def test_counts_are_those_of_the_row_plane(fmt, same):
    x, offsets = normal(300, 40, seed=1, spread=8.0), offsets_of([5, 0, 135, 160])
    scale = 448 / torch.stack([x[a:b].abs().amax() if b > a else torch.tensor(448.0) for a, b in offsets.unfold(0, 2, 1).tolist()])
    tables = []
    for f in (fmt, same):
        own = scale if isinstance(f, bs.FP8Delayed) else None
        q = stages.quantize(x, offsets, f, rowwise=True, columnwise=f is fmt, scale=own)
        tables.append(fresh(4, x.device))
        backend.count_into(tables[-1], x, offsets, q, 1)
    assert torch.equal(tables[0], tables[1])
    assert tables[0].count_nonzero() > 20
