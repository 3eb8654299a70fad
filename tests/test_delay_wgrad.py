"""delay_wgrad: backward leaves dW, backward_dw() computes it, to the bits of the plain path."""

import copy

import pytest
import torch
from layers import KINDS, grads, make, step, weights
from support import RECIPES, assert_all_same, assert_same

import blockscale as bs
from blockscale.ops.wgrad_queue import WgradQueue

DELAYED = ["bf16", "mxfp8", "nvfp4", "fp8_current", "fp8_block"]


def queues(module):
    return [m.wgrad_queue for m in module.modules() if getattr(m, "wgrad_queue", None) is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", DELAYED)
@pytest.mark.parametrize("kind", KINDS)
def test_three_microbatches(kind, recipe, dtype):
    plain, late = (make(kind, RECIPES[recipe], dtype, delay_wgrad=d) for d in (False, True))
    for m in range(3):
        assert_all_same(step(late, m), step(plain, m), m)
    assert all(len(q) == 3 and q.nbytes > 0 for q in queues(late))
    assert all(p.grad is None for p in weights(late).values())
    late.backward_dw()
    assert all(len(q) == q.nbytes == 0 for q in queues(late))
    got, want = grads(late), grads(plain)
    assert_all_same(got, want, kind)
    assert all(t.any() for t in want.values())


@pytest.mark.parametrize("kind", KINDS)
def test_one_microbatch_at_a_time_in_the_order_of_backward(kind):
    late = make(kind, RECIPES["mxfp8"], delay_wgrad=True)
    for m in range(3):
        step(late, m)
    for m in range(3):
        late.zero_grad()
        late.backward_dw(microbatches=1)
        alone = make(kind, RECIPES["mxfp8"])
        step(alone, m)
        for n in weights(late):
            assert_same(late.get_parameter(n).grad, alone.get_parameter(n).grad, (m, n))
    with pytest.raises(RuntimeError, match=r"backward_dw\(\) has nothing to do"):
        late.backward_dw()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", KINDS)
def test_into_main_grad(kind, recipe):
    layers = [make(kind, RECIPES[recipe], torch.bfloat16, accumulate_into_main_grad=True, delay_wgrad=d) for d in (False, True)]
    for module in layers:
        for p in weights(module).values():
            p.main_grad = torch.full(p.shape, 0.5)
        for m in range(2):
            step(module, m)
    assert all((p.main_grad == 0.5).all() for p in weights(layers[1]).values())
    layers[1].backward_dw()
    plain, late = ({n: p.main_grad for n, p in weights(module).items()} for module in layers)
    assert_all_same(late, plain, kind)
    assert all((t != 0.5).any() for t in plain.values())
    assert all(p.grad is None for p in weights(layers[1]).values())


def test_hooks_of_the_weight_run_when_the_gradient_is_there():
    module, seen, summed = make("mlp", RECIPES["mxfp8"], delay_wgrad=True), [], []
    module.fc1.weight.register_hook(lambda g: summed.append(g.abs().sum().item()))
    module.fc1.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    step(module)
    assert seen == summed == []
    module.backward_dw()
    assert seen == [module.fc1.weight.grad]
    assert summed == [module.fc1.weight.grad.abs().sum().item()]


def test_frozen_weights_leave_nothing():
    module = make("mlp", RECIPES["mxfp8"], delay_wgrad=True)
    module.fc1.weight.requires_grad_(False)
    step(module)
    module.backward_dw()
    assert module.fc1.weight.grad is None
    plain = make("mlp", RECIPES["mxfp8"])
    step(plain)
    assert_same(module.fc2.weight.grad, plain.fc2.weight.grad)
    module.fc2.weight.requires_grad_(False)
    step(module)
    assert len(module.wgrad_queue) == 0


def test_nothing_of_a_weight_is_multiplied_in_backward(monkeypatch):
    calls = []
    real = bs.ops.backend.wgrad
    monkeypatch.setattr(bs.ops.backend, "wgrad", lambda *a: calls.append(1) or real(*a))
    module = make("mlp", RECIPES["mxfp8"], delay_wgrad=True)
    step(module)
    assert calls == []
    module.backward_dw()
    assert len(calls) == 2


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind, recipe):
    torch._dynamo.reset()
    plain, late = (make(kind, RECIPES[recipe], delay_wgrad=d) for d in (False, True))
    compiled = torch.compile(late, fullgraph=True, backend="aot_eager")
    for m in range(2):
        assert_all_same(step(late, m, compiled), step(plain, m), m)
    assert [len(q) for q in queues(late)] == [2] * len(queues(late))
    late.backward_dw()
    assert_all_same(grads(late), grads(plain), kind)


def test_compiled_by_inductor_the_operands_are_safe():
    """Between the passes other graphs run, which would overwrite memory that the queue does not own."""
    torch._dynamo.reset()
    plain, late = (make("mlp", RECIPES["mxfp8"], delay_wgrad=d) for d in (False, True))
    compiled = torch.compile(late, fullgraph=True)
    for m in range(3):
        assert_all_same(step(late, m, compiled), step(plain, m), m)
    late.backward_dw()
    assert_all_same(grads(late), grads(plain))


def test_copies_have_queues_of_their_own():
    module = make("linear", RECIPES["mxfp8"], delay_wgrad=True)
    step(module)
    twin = copy.deepcopy(module)
    assert len(twin.wgrad_queue) == 0
    step(twin, 1)
    assert len(module.wgrad_queue) == len(twin.wgrad_queue) == 1
    assert "wgrad" not in "".join(module.state_dict())


def test_explain_says_when():
    explained = bs.explain(
        make("mlp", RECIPES["mxfp8"], delay_wgrad=True), torch.ones(40, 20, requires_grad=True), torch.ones(3).int()
    )
    assert [s.what for s in explained.stages if s.what.startswith("dW")] == [
        "dW2 = dy^T a, in backward_dw()",
        "dW1 = dh^T x, in backward_dw()",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_errors(kind):
    with pytest.raises(RuntimeError, match=r"backward_dw\(\) needs delay_wgrad=True"):
        make(kind, None).backward_dw()
    module = make(kind, None, delay_wgrad=True)
    with pytest.raises(RuntimeError, match="nothing to do: no backward pass"):
        module.backward_dw()
    step(module)
    for wrong in (0, 2, -1):
        with pytest.raises(ValueError, match=rf"microbatches={wrong} is not legal; 1 wait"):
            module.backward_dw(wrong)
    module.backward_dw(1)


def test_a_queue_that_is_gone():
    ticket = WgradQueue().ticket
    x, w = torch.ones(4, 8), torch.ones(1, 8, 8)
    args = (
        x,
        x,
        [],
        w,
        torch.tensor([0, 4]),
        None,
        None,
        None,
        [],
        None,
        ticket,
        [],
        [],
        "bf16|bf16|bf16",
        False,
        [False, True, False, False],
        None,
    )
    with pytest.raises(ValueError, match="no living WgradQueue"):
        torch.ops.blockscale.grouped_linear_backward(*args)
