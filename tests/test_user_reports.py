"""What a first user found: each was a silent wrong result, a crash or a misleading message."""

import json
import os
import stat
import subprocess
import sys
import threading

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import blockscale as bs

RECIPES = [bs.recipes.BF16(), bs.recipes.MXFP8Training(), bs.recipes.NVFP4Training(), bs.recipes.FP8CurrentTraining()]
SIZES = torch.tensor([20, 44])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
@pytest.mark.parametrize("layer", [bs.nn.GroupedLinear, bs.nn.GroupedMLP])
def test_a_second_derivative_is_an_error_not_a_wrong_number(layer, recipe):
    module, x = layer(2, 64, 32, recipe=recipe), torch.randn(64, 64, requires_grad=True)
    y = module(x, SIZES).square().sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (y + g.square().sum()).backward()


def test_the_first_derivative_is_the_same_with_create_graph():
    module, x = bs.nn.GroupedMLP(2, 64, 32, recipe=bs.recipes.MXFP8Training()), torch.randn(64, 64, requires_grad=True)
    plain = torch.autograd.grad(module(x, SIZES).square().sum(), x)[0]
    graphed = torch.autograd.grad(module(x, SIZES).square().sum(), x, create_graph=True)[0]
    assert plain.norm() > 0
    assert torch.equal(plain, graphed)


@pytest.mark.parametrize("fmt", [bs.MXFP8(), bs.NVFP4(), bs.FP8Tensor(), bs.FP8Block()], ids=lambda f: f.kind)
def test_quantized_tensors_never_require_grad(fmt):
    x = torch.randn(64, 64, requires_grad=True)
    w = torch.randn(2, 32, 64, requires_grad=True)
    q = bs.quantize_grouped(x, bs.offsets_from_sizes(SIZES), fmt, columnwise=True)
    tensors = [t for p in q.planes.values() for t in p.tensors()]
    tensors += [q.dequantize(), bs.grouped_gemm(q, bs.quantize_grouped(w, None, fmt)), bs.quantize(x, fmt).dequantize()]
    tensors += [bs.grouped_gemm(x, w, offsets=q.offsets)]
    assert not any(t.requires_grad for t in tensors)


def test_autocast_belongs_to_its_thread():
    seen = {}
    entered, leave = threading.Event(), threading.Event()

    def other():
        seen["start"] = bs.recipes.current_recipe(None).name
        with bs.autocast(bs.recipes.NVFP4Training()):
            entered.set()
            leave.wait(10)
            seen["inside"] = bs.recipes.current_recipe(None).name

    with bs.autocast(bs.recipes.MXFP8Training()):
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(10)
        assert bs.recipes.current_recipe(None).name == "mxfp8"
    leave.set()
    thread.join()
    assert seen == {"start": "bf16", "inside": "nvfp4"}
    assert bs.recipes.current_recipe(None).name == "bf16"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_with_the_layers_own_recipe_changes_no_bit(reentrant):
    moe = bs.nn.MoE(64, 32, 4, 2, recipe=bs.recipes.MXFP8Training())
    x = torch.randn(40, 64, requires_grad=True)
    moe(x)[0].square().sum().backward()
    expected, x.grad = x.grad, None
    torch.utils.checkpoint.checkpoint(moe, x, use_reentrant=reentrant)[0].square().sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.skipif(os.system("g++ --version > /dev/null 2>&1") != 0, reason="inductor needs a C++ compiler")
def test_a_shared_expert_compiles_for_a_second_number_of_tokens():
    moe = bs.nn.MoE(64, 32, 4, 2, shared_intermediate=32)
    compiled = torch.compile(moe, fullgraph=True)
    for tokens in (16, 40):
        x = torch.randn(tokens, 64)
        assert torch.equal(compiled(x)[0], moe(x)[0])


def test_a_meta_moe_has_a_meta_result():
    moe = bs.nn.MoE(64, 32, 4, 2, device="meta", recipe=bs.recipes.MXFP8Training())
    assert moe(torch.empty(3, 64, device="meta"))[0].shape == (3, 64)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_an_impossible_amax_is_refused(value):
    with pytest.raises(ValueError, match=r"amax holds (-1.0|nan); .*>= 0"):
        bs.quantize(torch.ones(4, 32), bs.NVFP4(), amax=torch.tensor([value]))


def test_a_dtype_is_no_device():
    with pytest.raises((TypeError, RuntimeError)):
        bs.quantize(torch.ones(4, 32), bs.MXFP8()).to(torch.float32)


def _damage(path, change):
    with safe_open(path, framework="pt") as f:
        header = json.loads(f.metadata()["blockscale"])
        tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118
    change(header, tensors)
    save_file(tensors, path, metadata={"blockscale": json.dumps(header)})


DAMAGE = {
    "shape": lambda h, t: h["g"].update(shape=[640, 64]),
    "cut data": lambda h, t: t.update({"g.rowwise.data": t["g.rowwise.data"][:3].clone()}),
    "no offsets": lambda h, t: t.pop("g.offsets"),
    "no scale": lambda h, t: t.pop("g.rowwise.scale"),
    "no amax": lambda h, t: t.pop("g.rowwise.amax"),
    "no layouts": lambda h, t: h["g"].pop("layouts"),
    "offsets too far": lambda h, t: t["g.offsets"].mul_(100),
    "format": lambda h, t: h["g"].update(format="mxfp8"),
    "float data": lambda h, t: t.update({"g.rowwise.data": t["g.rowwise.data"].float()}),
    "a list": lambda h, t: h.update(g=[1]),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_refused_by_name(tmp_path, what):
    path = tmp_path / "q.safetensors"
    bs.save({"g": bs.quantize_grouped(torch.randn(64, 64), bs.offsets_from_sizes(SIZES), bs.NVFP4())}, path)
    assert bs.load(path, torch.device("cpu"))["g"].capacity == 64
    _damage(path, DAMAGE[what])
    with pytest.raises(ValueError, match=r"q\.safetensors.*damaged at tensor 'g'"):
        bs.load(path)


def test_saving_respects_umask_and_special_files(tmp_path):
    q = bs.quantize(torch.randn(4, 32), bs.MXFP8())
    old = os.umask(0o022)
    try:
        bs.save({"q": q}, tmp_path / "q.safetensors")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "q.safetensors").stat().st_mode) == 0o644
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no regular file"):
        bs.save({"q": q}, tmp_path / "pipe")
    with pytest.raises(FileNotFoundError, match="nodir/q"):
        bs.save({"q": q}, tmp_path / "nodir" / "q")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pipe", "q.safetensors"]


def test_module_and_version_from_the_shell():
    run = subprocess.run([sys.executable, "-m", "blockscale", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == bs.__version__


def test_help_shows_defaults():
    run = subprocess.run([sys.executable, "-m", "blockscale", "train", "--help"], capture_output=True, text=True, check=True)
    assert "(default: 100)" in " ".join(run.stdout.split()).replace("│ │ ", "")


@pytest.mark.parametrize("out", ["/dev/null/x", "/proc/nothing"])
def test_a_folder_that_cannot_be_written_is_wrong_use(out):
    command = [sys.executable, "-m", "blockscale", "train", "--steps", "1", "--layers", "1", "--out", out]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert out in run.stderr
    assert "Traceback" not in run.stderr
