"""FP8Delayed against the oracle by bits: planes of a given scale, and the scale of the next step."""

import numpy as np
import pytest
import torch
from oracle import codes, fp8, inputs
from oracle.check import assert_same
from support import normal, offsets_of

import blockscale as bs
from blockscale.reference.delayed import next_scale, record

F32 = np.float32
SCALES = (1.0, 117.3, 2.0**-90, 3e38, 1.5e-42)
OPTIONS = [(e, s) for e in ("e4m3", "e5m2") for s in ("original", "rowwise_dequantized")]


def check(plane, want, what):
    for part in ("data", "scale", "amax"):
        assert_same(getattr(plane, part), getattr(want, part), f"{what} {part}")


@pytest.mark.parametrize("kind", inputs.KINDS)
@pytest.mark.parametrize(("element", "source"), OPTIONS)
def test_planes_of_a_given_scale(element, source, kind):
    for seed, value in enumerate(SCALES):
        x, exact = inputs.tensor(kind, 37, 70, seed, ("float32", "bfloat16", "float16")[seed % 3])
        fmt = bs.FP8Delayed(element, columnwise_source=source)
        q = bs.quantize(x, fmt, columnwise=True, scale=torch.tensor([value]))
        with np.errstate(all="ignore"):
            want = fp8.quantize_delayed(exact, np.array([value], dtype=F32), element, source)
        for which in ("rowwise", "columnwise"):
            check(q.planes[which], want[which], f"{value} {which}")
            values = fp8.dequantize_tensor(want[which], which, exact.shape, element)
            assert_same(q.dequantize(plane=which), values, f"{value} {which} values")


@pytest.mark.parametrize(("element", "source"), OPTIONS)
def test_groups_have_scales_of_their_own(element, source):
    offsets, scales = offsets_of([37, 0, 128, 1]), torch.tensor([3.0, 5.0, 0.25, 1e4])
    x = normal(190, 70, seed=1, spread=3.0)
    x[166:] = torch.nan  # dead rows
    fmt = bs.FP8Delayed(element, columnwise_source=source)
    q = bs.quantize_grouped(x, offsets, fmt, columnwise=True, scale=scales)
    for g in range(4):
        want = fp8.quantize_delayed(x[offsets[g] : offsets[g + 1]].numpy(), scales[g : g + 1].numpy(), element, source)
        for which in ("rowwise", "columnwise"):
            check(q.group(g).planes[which], want[which], f"group {g} {which}")
    assert not q.rowwise.data[166:].any()
    assert bs.formats.parse(fmt.spec()) == fmt
    same = bs.quantize_grouped(x, offsets, bs.FP8Tensor(element), columnwise=True)
    assert [t.shape for t in q.rowwise.tensors()] == [t.shape for t in same.rowwise.tensors()]
    assert [t.shape for t in q.columnwise.tensors()] == [t.shape for t in same.columnwise.tensors()]


AMAXES = (0.0, 1.0, 3.3, 448.0, 1e-30, 1e-40, 1e38, float("inf"), 0.1, 57344.0)


@pytest.mark.parametrize("margin", [0, 1, -2, 64, -64])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_the_next_scale(element, length, algorithm, margin):
    """Thirty steps of ten tensors with amaxes of every sort: scales and histories are the oracle's after each."""
    fmt = bs.FP8Delayed(element, length, algorithm, margin)
    scale, history = torch.ones(10), torch.zeros(length, 10)
    want_scale, want_history = [F32(1)] * 10, [[F32(0)] * 10 for _ in range(length)]
    rng = np.random.default_rng(7)
    for step in range(30):
        for _ in range(1 + step % 2):  # one microbatch or two
            amax = [F32(AMAXES[i]) for i in (rng.integers(0, 10, 10) if step % 3 else rng.choice([0, 1, 2, 8], 10))]
            record(history, torch.tensor(np.array(amax)))
            want_history[0] = [max(a, b) for a, b in zip(want_history[0], amax, strict=True)]
        assert_same(history, np.array(want_history, dtype=F32), f"step {step} recorded")
        scale, history = next_scale(scale, history, fmt)
        want_scale, want_history = fp8.next_scale(want_scale, want_history, element, algorithm, margin)
        assert_same(scale, np.array(want_scale, dtype=F32), f"step {step} scale")
        assert_same(history, np.array(want_history, dtype=F32), f"step {step} history")
    assert len(set(scale.tolist())) > 2


def test_the_next_scale_by_hand():
    fmt = bs.FP8Delayed(history=3, margin=1)
    scale, history = torch.tensor([1.0, 8.0, 2.0, 2.0]), torch.tensor([[7.0, 0, 1, 1e-38], [3.5, 0, 5, 0], [14.0, 0, torch.inf, 0]])
    scale, history = next_scale(scale, history, fmt)
    assert scale.tolist() == [16.0, 8.0, 2.0, float(codes.FLT_MAX)]
    assert history.tolist()[0] == [0, 0, 0, 0]
    assert history[1].tolist() == [14.0, 0, torch.inf, 0]
    assert history[2, :3].tolist() == [7.0, 0, 1]
