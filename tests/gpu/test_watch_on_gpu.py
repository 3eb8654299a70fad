"""On a GPU a watch counts what it counts on the CPU, and waits for nothing until somebody reads."""

import pytest
import torch
from support import RECIPES, normal

import blockscale as bs
from blockscale.ops import stages
from blockscale.ops.tap import Seen
from blockscale.watching.slots import Slots

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def no_sync():
    yield lambda mode: torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4", "fp8_current", "fp8_block"])
def test_counters_are_the_cpus_and_need_no_sync(recipe, no_sync):
    fmt, offsets = RECIPES[recipe].input, torch.tensor([0, 5, 5, 140, 300])
    x = normal(320, 256, seed=1, spread=6.0).to(torch.bfloat16)
    x[7, 3], x[150, 2], x[300:] = torch.nan, torch.inf, torch.nan
    totals = []
    for device in ("cpu", "cuda"):
        slots, xd, od = Slots(), x.to(device), offsets.to(device)
        q = stages.quantize(xd, od, fmt, rowwise=True, columnwise=False)
        for _ in range(2):  # the first one allocates
            slots.add("a", Seen("input", xd, q), od, True)
            slots.add("a", Seen("plain", xd), None, True)
        if device == "cuda":
            slots.take(0, True).wait()
            no_sync("error")
            for _ in range(2):
                slots.add("a", Seen("input", xd, q), od, True)
                slots.add("a", Seen("plain", xd), None, True)
        snapshot = slots.take(1, True)
        no_sync("default")
        snapshot.wait()
        totals.append((snapshot.totals(), snapshot.rows(snapshot.slots[0][0])))
    assert torch.equal(totals[0][0], totals[1][0])
    assert torch.equal(totals[0][1], totals[1][1])


def test_the_first_nan_is_named():
    mlp = bs.nn.GroupedMLP(4, 32, 64, recipe=RECIPES["mxfp8"], device="cuda")
    sizes, watch = torch.tensor([10, 0, 20, 30], device="cuda"), bs.watch(mlp, every=3)
    for k in range(4):
        x = normal(60, 32, seed=k).cuda()
        if k == 2:
            x[12, 7] = torch.nan
        mlp(x.requires_grad_(), sizes).sum().backward()
        watch.step()
    assert "first NaN: step 2, layer (GroupedMLP), role input, expert 2 of 4: 1 of 1,920 elements" in watch.report()
