"""Layers whose weights exist only in quantized form: their bits are those of layers that quantize, their memory is not."""

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import RECIPES, assert_all_same, assert_same, normal, offsets_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import blockscale as bs
from blockscale.nn import GroupedLinear, GroupedMLP, QuantizedGroupedLinear, QuantizedGroupedMLP

G, H, INTERMEDIATE = 3, 40, 72
SIZES, ROWS = [10, 0, 25], 38
OFFSETS = offsets_of(SIZES)
FORMATS = {
    "mxfp8": bs.MXFP8(),
    "mxfp8_square": bs.MXFP8(block=(32, 32)),
    "mxfp4": bs.MXFP4(),
    "nvfp4": bs.NVFP4(),
    "nvfp4_square": bs.NVFP4((16, 16)),
    "nvfp4_rows": bs.NVFP4(row_scaled=True, four_over_six="mse"),
    "fp8_tensor": bs.FP8Tensor(),
    "fp8_block": bs.FP8Block(),
    "fp8_square": bs.FP8Block(block=(128, 128)),
}
QUANTIZED = {name: r for name, r in RECIPES.items() if r.weight is not None}


def planes(q):
    return {f"{which} {n}": t for which, p in q.planes.items() for n, t in enumerate(p.tensors())}


def problem(seed=1):
    x, probs = normal(ROWS, H, seed=seed), torch.rand(ROWS, generator=torch.Generator().manual_seed(seed))
    x[OFFSETS[-1] :] = float("nan")  # outside
    return x.requires_grad_(), probs.requires_grad_(), normal(ROWS, H, seed=seed + 1)


def step(mlp, seed=1):
    x, probs, dy = problem(seed)
    torch.manual_seed(5)
    y = mlp(x, None, probs, offsets=OFFSETS)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad}


def pair(recipe, fmt, **options):
    """A GroupedMLP and the same with quantized weights."""
    torch.manual_seed(0)
    mlp = GroupedMLP(G, H, INTERMEDIATE, recipe=recipe, bias=True, glu_interleave=8, **options)
    return mlp, QuantizedGroupedMLP.from_mlp(mlp, fmt)


# bits


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("n", [70, 256])
def test_the_weight_is_that_of_a_layer_quantized_at_once(fmt, n):
    torch.manual_seed(3)
    plain = GroupedLinear(G, H, n, bias=True)
    torch.manual_seed(3)
    made = QuantizedGroupedLinear(G, H, n, fmt, bias=True)  # on the CPU draws do not depend on how many come at once
    want = bs.quantize_grouped(plain.weight.detach(), None, fmt, columnwise=True)
    for layer in (made, QuantizedGroupedLinear.from_linear(plain, fmt)):
        assert_all_same(planes(layer.weight.tensor()), planes(want), fmt)
        assert_same(layer.weight.dequantize(), want.dequantize().view(G, n, H))
        for g in range(G):
            assert_all_same(planes(layer.weight.group(g).group(0)), planes(want.group(g)), g)
    assert_same(QuantizedGroupedLinear.from_linear(plain, fmt).bias, plain.bias.detach())
    assert 0 < made.bias.abs().max() <= 1 / H**0.5


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_step_has_the_bits_of_a_layer_that_quantizes(recipe):
    r = QUANTIZED[recipe]
    plain, frozen = pair(r, r.weight)
    want, got = step(plain), step(frozen)
    assert_all_same(got, want, recipe)
    assert all(t[: OFFSETS[-1]].any() for t in got.values())
    assert (got["y"][OFFSETS[-1] :] == 0).all()
    frozen.recompute = True
    assert_all_same(step(frozen), want, recipe)

    x, _, _ = problem()
    dh = normal(ROWS, 2 * INTERMEDIATE, seed=9)
    torch.manual_seed(5)
    y = plain.fc1(x, offsets=OFFSETS)
    y.backward(dh)
    dx, x.grad = x.grad, None
    torch.manual_seed(5)
    other = frozen.fc1(x, offsets=OFFSETS)
    other.backward(dh)
    assert_same(other, y)
    assert_same(x.grad, dx)


def test_weight_only():
    """Without a recipe, operands are bfloat16: MXFP8 values are such, so a layer with those values computes the same."""
    plain, frozen = pair(None, bs.MXFP8(block=(32, 32)))
    with torch.no_grad():
        for name in ("fc1", "fc2"):
            getattr(plain, name).weight.copy_(getattr(frozen, name).weight.dequantize())
    want = step(plain)
    assert_all_same(step(frozen), want)
    with bs.autocast(RECIPES["mxfp8"]):
        inside = step(frozen)
    frozen.recipe = RECIPES["mxfp8"]
    assert_all_same(step(frozen), inside)
    assert (inside["y"] != want["y"]).any()


def test_mixed_formats():
    """4-bit weights with MXFP8 activations."""
    plain, frozen = pair(RECIPES["mxfp8"], bs.MXFP4(block=(32, 32)))
    x, _, _ = problem()
    q = bs.quantize_grouped(x.detach(), OFFSETS, bs.MXFP8())
    w = bs.quantize_grouped(plain.fc1.weight.detach(), None, bs.MXFP4(block=(32, 32)))
    want = bs.grouped_gemm(q, w, bias=plain.fc1.bias.detach(), out_dtype=torch.float32)
    assert_same(frozen.fc1(x, offsets=OFFSETS), want)


# memory


class Largest(TorchDispatchMode):
    """The most elements of a floating-point tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.is_floating_point() and not t.is_meta]
        self.elements = max([self.elements, *made])
        return result


def test_never_more_than_one_group_in_high_precision():
    groups, n = 16, 64
    with Largest() as largest:
        layer = QuantizedGroupedLinear(groups, H, n, bs.NVFP4())
    assert largest.elements == n * H
    layer.add_lora(2)
    with Largest() as largest:
        layer.merge_lora()
        layer.unmerge_lora()
    assert largest.elements <= 128 * 48 < groups * n * H / 6  # one group, padded to whole tiles and blocks
    state = {"weight": normal(groups, n, H, seed=1)[:, :, ::1]}
    target = QuantizedGroupedLinear(groups, H, n, bs.NVFP4(), initialize=False)
    assert all((t == 0).all() for t in target.buffers())

    class OnlyGroups(torch.Tensor):
        """Breaks when it is read but through an index."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func in (torch.Tensor.__getitem__, torch.Tensor.shape.__get__, torch.Tensor.dim):
                with torch._C.DisableTorchFunctionSubclass():
                    return (
                        func(*args, **(kwargs or {})).as_subclass(torch.Tensor) if func is torch.Tensor.__getitem__ else func(*args)
                    )
            raise AssertionError(f"{func} of the whole weight")

    target._load_from_state_dict({"weight": state["weight"].as_subclass(OnlyGroups)}, "", {}, True, [], [], [])
    assert_all_same(
        planes(target.weight.tensor()), planes(bs.quantize_grouped(state["weight"], None, bs.NVFP4(), columnwise=True)), "loaded"
    )


def test_bytes():
    bf16 = 8 * 256 * 128 * 2
    for fmt, share in ((bs.MXFP8(), 0.52), (bs.NVFP4(), 0.285), (bs.FP8Block(block=(128, 128)), 0.51)):
        layer = QuantizedGroupedLinear(8, 128, 256, fmt, backward=False)
        one = QuantizedGroupedLinear(8, 128, 256, fmt).weight.nbytes
        assert layer.weight.nbytes / bf16 == pytest.approx(share, abs=0.03)  # NVFP4 and MXFP8: spare tiles of scales
        assert 1.9 < one / layer.weight.nbytes < 2.7


# state dicts


def test_round_trip(tmp_path):
    _, frozen = pair(RECIPES["mxfp8"], bs.NVFP4())
    frozen.add_lora(4)
    torch.nn.init.normal_(frozen.fc2.lora_b)
    want, state = step(frozen), frozen.state_dict()
    parts = [f"{plane}_{part}" for plane in ("rowwise", "columnwise") for part in ("data", "scale", "amax")]
    inner = [*(f"weight.{p}" for p in parts), "weight._extra_state", "bias", "lora_a", "lora_b"]
    assert sorted(state) == sorted(f"{fc}.{name}" for fc in ("fc1", "fc2") for name in inner)
    save_file(state, tmp_path / "state.safetensors")
    for device in ("cpu", "meta"):
        other = QuantizedGroupedMLP(
            G, H, INTERMEDIATE, bs.NVFP4(), recipe=RECIPES["mxfp8"], bias=True, glu_interleave=8, device=device
        )
        other.add_lora(4)
        if device == "meta":
            other.to_empty(device="cpu")
        other.load_state_dict(load_file(tmp_path / "state.safetensors"))
        assert_all_same(step(other), want, device)
    assert_all_same(step(copy.deepcopy(frozen)), want)


def test_a_state_of_another_format_is_refused_before_anything_changes():
    _, frozen = pair(None, bs.MXFP8())
    _, other = pair(None, bs.MXFP8("e5m2"))
    before = {n: t.clone() for n, t in frozen.fc1.weight.state_dict().items()}
    with pytest.raises(ValueError, match=r"weight is mxfp8:element=e5m2.* in the state dict; this layer holds mxfp8:element=e4m3"):
        frozen.fc1.load_state_dict(other.fc1.state_dict())
    assert_all_same(frozen.fc1.weight.state_dict(), before)
    with pytest.raises(RuntimeError, match=r"size mismatch for weight\.rowwise_data"):
        frozen.fc1.load_state_dict(QuantizedGroupedLinear(G, H, 10, bs.MXFP8(), bias=True).state_dict())


def test_a_high_precision_state_dict_is_quantized():
    plain, frozen = pair(None, bs.NVFP4())
    want = step(frozen)
    other = QuantizedGroupedMLP(G, H, INTERMEDIATE, bs.NVFP4(), bias=True, glu_interleave=8, device="meta")
    other.to_empty(device="cpu")
    for t in other.buffers():
        t.fill_(77)
    assert not other.load_state_dict(plain.state_dict()).missing_keys
    assert_all_same(step(other), want)
    assert_all_same(dict(other.state_dict()), dict(frozen.state_dict()))
    with pytest.raises(ValueError, match=r"weight has shape \(2, 5, 40\); \(3, 144, 40\)"):
        frozen.fc1.load_state_dict({"weight": torch.zeros(2, 5, H), "bias": frozen.fc1.bias})


@pytest.mark.parametrize("fmt", [bs.NVFP4(), bs.FP8Tensor(), bs.FP8Block(power_of_two=False)], ids=["nvfp4", "tensor", "block"])
def test_conversions_leave_the_planes_alone(fmt):
    _, frozen = pair(None, fmt)
    before = {n: t.clone() for n, t in frozen.fc1.weight.named_buffers()}
    assert any(t.dtype == torch.float32 for t in before.values())
    frozen.to(torch.bfloat16)
    assert_all_same(dict(frozen.fc1.weight.named_buffers()), before)
    assert frozen.fc1.bias.dtype == torch.bfloat16
    frozen.half().double().float()
    assert_all_same(dict(frozen.fc1.weight.named_buffers()), before)
    assert all(t.is_meta for t in frozen.to("meta").buffers())


# in place of a GroupedMLP; arguments


def test_in_a_moe():
    torch.manual_seed(0)
    moe = bs.nn.MoE(H, INTERMEDIATE, 4, 2, recipe=RECIPES["mxfp8"], router_options={"capacity_factor": 1.0})
    x = normal(30, H, seed=1)
    want, _ = moe(x)
    moe.experts = QuantizedGroupedMLP.from_mlp(moe.experts, bs.MXFP8())
    assert_same(moe(x)[0], want)
    assert [n for n, _ in moe.named_parameters()] == ["router.weight"]
    assert list(bs.explain(moe, x).stages)


def test_without_a_columnwise_plane():
    torch.manual_seed(0)
    mlp = GroupedMLP(G, H, INTERMEDIATE)
    serving = QuantizedGroupedMLP.from_mlp(mlp, bs.MXFP8(), backward=False)
    full = QuantizedGroupedMLP.from_mlp(mlp, bs.MXFP8())
    x, _, _ = problem()
    assert_same(serving(x.detach(), offsets=OFFSETS), full(x.detach(), offsets=OFFSETS))
    with torch.no_grad():
        assert serving(x, offsets=OFFSETS).any()
    with pytest.raises(ValueError, match=r"w1 has no columnwise plane, which the gradient of its input needs.*backward=True"):
        serving(x, offsets=OFFSETS)
    with pytest.raises(ValueError, match=r"weight has no columnwise plane"):
        serving.fc1(x, offsets=OFFSETS)
    serving.fc2.add_lora(2)  # needs nothing below the second linear
    serving(x.detach(), offsets=OFFSETS).sum().backward()
    assert serving.fc2.lora_b.grad.any()
    serving.fc1.add_lora(2)
    with pytest.raises(ValueError, match=r"w2 has no columnwise plane"):
        serving(x.detach(), offsets=OFFSETS)


X, W = torch.ones(12, 8), torch.ones(3, 6, 8)
WQ = bs.quantize_grouped(W, None, bs.MXFP8(), columnwise=True)
OFF = offsets_of([4, 3, 5])


def test_layouts():
    swizzled = WQ.with_layout("swizzled")
    x = normal(12, 8, seed=1)
    assert_same(bs.frozen_linear(x, swizzled, OFF), bs.frozen_linear(x, WQ, OFF))
    mixed = replace(WQ, columnwise=swizzled.columnwise)
    with pytest.raises(ValueError, match=r"the planes of a weight have the layouts 'compact' and 'swizzled'; one is needed"):
        bs.frozen_linear(x, mixed, OFF)


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (TypeError, lambda: bs.frozen_linear(X, W, OFF), r"weight is Tensor; a GroupedTensor from quantize_grouped"),
        (
            ValueError,
            lambda: bs.frozen_linear(X, bs.quantize_grouped(X, OFF, bs.MXFP8()), OFF),
            r"weight was quantized with offsets",
        ),
        (ValueError, lambda: bs.frozen_linear(X[:, :5], WQ, OFF), r"weight has K=8 inputs but its input has 5 columns"),
        (ValueError, lambda: bs.frozen_linear(X, WQ, OFF[:3]), r"offsets has shape \(3,\); \(4,\) is needed for 3 groups"),
        (ValueError, lambda: bs.frozen_linear(X, WQ, torch.tensor([0, 4, 3, 5])), r"offsets decrease at group 1"),
        (ValueError, lambda: bs.frozen_linear(X, WQ, OFF, torch.ones(6)), r"bias has shape \(6,\); \(3, 6\)"),
        (
            ValueError,
            lambda: bs.frozen_linear(X, WQ, OFF, torch.ones(3, 6).requires_grad_()),
            r"bias requires a gradient but is frozen",
        ),
        (TypeError, lambda: bs.frozen_linear(X, WQ, OFF, lora=(1, 2)), r"lora is tuple; a LowRank or None"),
        (
            ValueError,
            lambda: bs.frozen_linear(X, WQ, OFF, lora=bs.LowRank(torch.ones(3, 2, 7), torch.ones(3, 6, 2))),
            r"lora.a has shape \(3, 2, 7\); \(3, 2, 8\)",
        ),
        (
            ValueError,
            lambda: bs.frozen_linear(X, WQ, OFF, lora=bs.LowRank(torch.ones(3, 2, 8), torch.ones(3, 6, 3))),
            r"lora.b has shape \(3, 6, 3\); \(3, 6, 2\)",
        ),
        (TypeError, lambda: bs.frozen_linear(X, WQ, OFF, recipe="mxfp8"), r"recipe is str"),
        (ValueError, lambda: bs.frozen_mlp(X, WQ, WQ, OFF), r"w2 has K=8 inputs but its input has 3 columns"),
        (ValueError, lambda: bs.frozen_mlp(X, WQ, WQ, OFF, probs=torch.ones(3)), r"w2 has K=8"),
        (TypeError, lambda: QuantizedGroupedLinear(3, 8, 6, "mxfp8"), r"fmt is str; a format such as MXFP8\(\)"),
        (TypeError, lambda: QuantizedGroupedLinear(3.0, 8, 6, bs.MXFP8()), r"num_groups=3.0 is float"),
        (TypeError, lambda: QuantizedGroupedLinear(3, 8, 6, bs.MXFP8(), dtype=torch.float64), r"dtype=torch.float64; legal"),
        (TypeError, lambda: QuantizedGroupedLinear(3, 8, 6, bs.MXFP8(), recipe="mxfp8"), r"recipe is str"),
        (
            TypeError,
            lambda: QuantizedGroupedLinear.from_linear(torch.nn.Linear(2, 2), bs.MXFP8()),
            r"linear is Linear; a GroupedLinear",
        ),
        (TypeError, lambda: QuantizedGroupedMLP.from_mlp(torch.nn.Linear(2, 2), bs.MXFP8()), r"mlp is Linear; a GroupedMLP"),
        (TypeError, lambda: QuantizedGroupedMLP(3, 8, 6.0, bs.MXFP8()), r"intermediate=6.0 is float"),
        (
            IndexError,
            lambda: QuantizedGroupedLinear(3, 8, 6, bs.MXFP8()).weight.group(3),
            r"index=3 is not a group; legal are 0..2",
        ),
        (
            ValueError,
            lambda: QuantizedGroupedLinear(3, 8, 6, bs.MXFP8()).weight.set_group(0, torch.ones(8, 6)),
            r"w has shape \(8, 6\); \(6, 8\)",
        ),
    ],
)
def test_errors(error, call, message):
    with pytest.raises(error, match=message):
        call()
