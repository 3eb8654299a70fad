"""A router with a capacity: what is dropped, by slow oracles; permute and unpermute around it; a MoE against float64."""

import math

import pytest
import torch
from support import calc_diff, normal, seeded

import blockscale as bs
from blockscale.nn.router import Router, capacity_mask, expert_counts

E, H = 12, 16


def make(**options):
    torch.manual_seed(0)
    return Router(H, E, 3, **options)


def slow_mask(ids, probs, capacity, drop):
    """Choices kept, expert by expert."""
    T, k = ids.shape
    kept = torch.zeros(T, k, dtype=torch.bool)
    for e in range(E):
        mine = [(t, j) for t in range(T) for j in range(k) if ids[t, j] == e]
        if drop == "probs":
            value = {c: -1.0 if math.isnan(probs[c]) else float(probs[c]) for c in mine}
            mine.sort(key=lambda c: (-value[c], c))
        for c in mine[:capacity]:
            kept[c] = True
    return kept


@pytest.mark.parametrize("drop", ["probs", "position"])
@pytest.mark.parametrize("capacity", [1, 4, 7, 1000])
def test_capacity_against_a_slow_oracle(drop, capacity):
    for seed in range(4):
        ids = torch.rand(30, E, generator=seeded(seed)).argsort(1)[:, :3]
        probs = torch.rand(30, 3, generator=seeded(seed + 10))
        probs[:15] = (probs[:15] * 3).round()  # ties
        probs[7, 1] = math.nan
        kept = capacity_mask(ids, probs, E, capacity, drop)
        assert torch.equal(kept, slow_mask(ids, probs, capacity, drop))
        assert kept.all() == (capacity == 1000)
    assert capacity_mask(ids[:0], probs[:0], E, capacity, drop).shape == (0, 3)


@pytest.mark.parametrize("drop", ["probs", "position"])
def test_a_router_with_a_capacity(drop):
    free, tight = make(), make(capacity_factor=0.75, drop=drop)
    x = normal(40, H, seed=1)
    want, got = free(x), tight(x)
    capacity = math.ceil(0.75 * 40 * 3 / E)
    kept = slow_mask(want.ids, want.probs.detach(), capacity, drop)
    assert 0 < (~kept).sum() < kept.numel() / 2
    assert torch.equal(got.ids, want.ids.masked_fill(~kept, -1))
    assert torch.equal(got.probs, want.probs.masked_fill(~kept, 0))
    assert torch.equal(got.aux_loss, want.aux_loss)
    assert expert_counts(got.ids, E).max() == capacity
    assert make(capacity_factor=100.0, drop=drop)(x).ids.tolist() == want.ids.tolist()


def test_permute_leaves_dropped_choices_out():
    x = torch.tensor([[1.0], [2.0], [3.0]]).requires_grad_()
    ids, probs = torch.tensor([[1, -1], [-1, -1], [0, 1]]), torch.tensor([[0.5, 9.0], [9.0, 9.0], [2.0, 3.0]]).requires_grad_()
    out = bs.permute(x, ids, 3, probs)
    assert out.x.flatten().tolist() == [3, 1, 3, 0, 0, 0]
    assert out.probs.tolist() == [2.0, 0.5, 3.0, 0, 0, 0]
    assert out.offsets.tolist() == [0, 1, 3, 3]
    assert out.row_map.tolist() == [[1, -1], [-1, -1], [0, 2]]
    y = torch.tensor([[10.0], [20.0], [30.0], [math.nan], [math.nan], [math.nan]]).requires_grad_()
    assert bs.unpermute(y, out.row_map).flatten().tolist() == [20, 0, 40]
    z = bs.unpermute(y, out.row_map, probs)
    assert z.flatten().tolist() == [10, 0, 110]
    (z.sum() + (out.x * torch.arange(6.0)[:, None]).sum() + out.probs.sum()).backward()
    assert x.grad.flatten().tolist() == [1, 0, 2]
    assert probs.grad.tolist() == [[21, 0], [0, 0], [11, 31]]
    assert y.grad.flatten().tolist() == [2, 0.5, 3, 0, 0, 0]
    nothing = bs.permute(x, torch.full((3, 2), -1), 3)
    assert nothing.offsets.tolist() == [0, 0, 0, 0]
    assert (bs.unpermute(nothing.x, nothing.row_map) == 0).all()
    assert (bs.unpermute(torch.ones(0, 1), nothing.row_map) == 0).all()


def test_moe_with_a_capacity():
    """A token whose choices are all dropped is zero and has no gradient; the others are as their kept choices say."""
    torch.manual_seed(0)
    moe = bs.nn.MoE(32, 48, 4, 2, router_options={"capacity_factor": 0.4, "z_loss_coef": 0.01})
    with torch.no_grad():
        moe.router.weight[:2] *= 5
    x = normal(60, 32, seed=1).requires_grad_()
    y, loss = moe(x)
    routing = moe.router(x)
    assert loss.item() == routing.z_loss.item() > 0
    y.sum().backward()
    lost = (routing.ids < 0).all(1)
    assert 0 < lost.sum() < 40
    assert (y[lost] == 0).all()
    assert (x.grad[lost] == 0).all()
    assert (x.grad[~lost] != 0).any(1).all()
    weights = [
        (w.detach().double(), v.detach().double()) for w, v in zip(moe.experts.fc1.weight, moe.experts.fc2.weight, strict=True)
    ]
    want = torch.zeros(60, 32, dtype=torch.float64)
    for t, j in (routing.ids >= 0).nonzero().tolist():
        w1, w2 = weights[int(routing.ids[t, j])]
        a, b = (w1 @ x[t].detach().double()).chunk(2)
        want[t] += routing.probs[t, j].item() * (w2 @ (a * torch.sigmoid(a) * b))
    assert calc_diff(y, want) < 0.01
