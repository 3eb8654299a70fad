"""The compiled CPU kernels are made on first use: what happens without a compiler or a cache, and with many processes at once."""

import os
import subprocess
import sys
import time

import pytest
import torch

import blockscale as bs
from blockscale.kernels.cpu import build
from blockscale.nn import QuantizedGroupedMLP
from blockscale.ops import backend

CPU = torch.device("cpu")
#: a process of its own: quantizes and prints which backend did it, why, and a number that shows that it did
PROGRAM = """
import torch, blockscale as bs
x = torch.arange(4096.0).view(64, 64)
q = bs.quantize(x, bs.MXFP8())
choice = bs.explain(bs.quantize, x, bs.MXFP8()).stages[0].choice
print(choice.backend, "|", choice.why, "|", int(q.rowwise.data.sum()))
"""


def start(program=PROGRAM, **environment):
    kept = {name: value for name, value in os.environ.items() if name != "CXX"}
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, env={**kept, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert "Traceback" not in error
    return [part.strip() for part in out.split("|")]


def slow_compiler(folder):
    """The real compiler, which waits before it compiles, notes each compilation and does not optimise."""
    real = next(path for name in build.COMPILERS if (path := build.shutil.which(name)))
    wrapper = folder / "slow-c++"
    wrapper.write_text(f'#!/bin/sh\n[ "$1" = --version ] || {{ echo x >> {folder}/compiled; sleep 1; }}\nexec {real} "$@" -O0\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def test_processes_at_once_build_one_library(tmp_path):
    """The reference's number from each, one compilation, nothing left over."""
    environment = {"CXX": slow_compiler(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = [answer(process) for process in [start(**environment) for _ in range(3)]]
    with backend.only_reference():
        total = int(bs.quantize(torch.arange(4096.0).view(64, 64), bs.MXFP8()).rowwise.data.sum())
    assert found == [["cpu", "compiled by slow-c++ for this processor; the bits of the reference", str(total)]] * 3
    assert (tmp_path / "compiled").read_text().split() == ["x"]
    names = sorted(file.name for file in (tmp_path / "cache" / "blockscale").iterdir())
    assert len(names) == 2
    assert names[1] == "lock"
    assert names[0].startswith("cpu-")


def test_a_builder_that_dies_does_not_stop_the_next(tmp_path):
    """It leaves its folder and its lock file; neither is taken for a library."""
    environment = {"CXX": slow_compiler(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    first = start(**environment)
    while not (tmp_path / "compiled").exists():
        assert first.poll() is None
        time.sleep(0.05)
    first.kill()
    first.communicate()
    assert answer(start(**environment))[0] == "cpu"


def test_no_compiler(tmp_path):
    backend_name, why, total = answer(start(PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path)))
    assert backend_name == "reference"
    assert "no C++ compiler found (looked for c++, g++, clang++)" in why
    assert int(total) > 0
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("a file where the cache would be a folder")
    backend_name, why, total = answer(start(XDG_CACHE_HOME=str(tmp_path / "file")))
    assert backend_name == "reference"
    assert "could not be built" in why
    assert str(tmp_path / "file") in why
    assert int(total) > 0


def test_a_compiler_that_fails_leaves_the_reference(monkeypatch, tmp_path):
    compiler = tmp_path / "broken-c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho no such header >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = build.load.__wrapped__()
    assert found.library is None
    assert "no such header" in found.why
    assert [file.name for file in (tmp_path / "cache" / "blockscale").iterdir()] == ["lock"]


def test_another_users_cache_is_not_loaded(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build.os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    found = build.load.__wrapped__()
    assert found.library is None
    assert "belongs to another user" in found.why


def test_without_the_library_everything_runs_in_the_reference(monkeypatch):
    monkeypatch.setattr(backend, "load", lambda: build.Loaded(None, "no C++ compiler found"))
    x = torch.randn(64, 64)
    for stage in ("quantize", "gemm", "activation", "reduce"):
        choice = backend.choose(stage, CPU)
        assert choice.backend == "reference"
        assert "no C++ compiler found" in choice.why
    assert bs.quantize(x, bs.MXFP8()).rowwise.data.any()
    assert bs.activation(x, "swiglu").any()


def test_explain_names_the_backend_of_each_stage():
    """What no kernel covers is the reference's, and so is a product with it; the rest stays compiled."""
    x, sizes = torch.randn(64, 64), torch.tensor([40, 24])
    mlp = bs.nn.GroupedMLP(2, 64, 64, bias=True, recipe=bs.recipes.MXFP8Training())
    stages = bs.explain(mlp, x, sizes).stages
    assert {s.choice.backend for s in stages} == {"cpu"}
    assert {s.choice.kernel.rpartition(".")[2] for s in stages} == {"quantize", "gemm", "activation", "reduce"}
    with backend.only_reference():
        assert {s.choice.backend for s in bs.explain(mlp, x, sizes).stages} == {"reference"}


def test_explain_and_choice_agree_on_formats_without_a_kernel(monkeypatch):
    monkeypatch.setattr(backend.cpu_quantize, "covers", lambda fmt: not isinstance(fmt, bs.MXFP4))
    x, sizes = torch.randn(64, 64), torch.tensor([40, 24])
    recipe = bs.recipes.Recipe(bs.MXFP8(), bs.MXFP4(), bs.MXFP8())
    by_what = {s.what: s.choice for s in bs.explain(bs.nn.GroupedMLP(2, 64, 64, recipe=recipe), x, sizes).stages}
    refused = {what for what, choice in by_what.items() if choice.backend == "reference"}
    assert refused == {
        "w1 to MXFP4 E2M1 1x32, rowwise", "w2 to MXFP4 E2M1 1x32, rowwise", "h = x W1^T", "y = a W2^T",
        "w1 to MXFP4 E2M1 1x32, columnwise", "w2 to MXFP4 E2M1 1x32, columnwise", "da = dy W2", "dx = dh W1",
    }  # fmt: skip
    assert all("no code for MXFP4 E2M1 1x32" in by_what[what].why for what in refused)
    assert not backend.fast("gemm", CPU, x, bs.MXFP4())
    assert backend.fast("gemm", CPU, x, bs.MXFP8())
    weight = bs.quantize_grouped(torch.randn(2, 32, 64), None, bs.MXFP4())
    assert bs.explain(bs.grouped_gemm, x, weight, offsets=torch.tensor([0, 40, 64])).stages[0].choice.backend == "reference"
    assert bs.explain(bs.quantize, x, bs.MXFP4()).stages[0].choice.backend == "reference"


def test_explain_may_come_first():
    """Before anything ran: the products' library is tried on plain memory, tensors being fake just then."""
    program = """
import torch, blockscale as bs
x = torch.randn(64, 64)
print(bs.explain(bs.grouped_gemm, x, torch.randn(1, 32, 64), offsets=torch.tensor([0, 64])).stages[0].choice.backend)
"""
    process = start(program)
    assert answer(process) == ["cpu"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_uses_the_library():
    x = torch.randn(300, 600)
    want = bs.quantize(x, bs.MXFP8()).rowwise.data
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(bs.quantize(x, bs.MXFP8()).rowwise.data, want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_explain_knows_the_formats_of_frozen_weights(monkeypatch):
    monkeypatch.setattr(backend.cpu_quantize, "covers", lambda fmt: not isinstance(fmt, bs.MXFP4))
    x, offsets = torch.randn(64, 64).requires_grad_(), torch.tensor([0, 40, 64])
    mlp = QuantizedGroupedMLP(2, 64, 64, bs.MXFP4(), recipe=bs.recipes.MXFP8Training(), recompute=True)
    mlp.add_lora(4)
    stages = bs.explain(mlp, x, None, offsets=offsets).stages
    refused = {s.what for s in stages if s.choice.backend == "reference"}
    assert refused == {"h = x W1^T", "h = x W1^T, again", "y = a W2^T", "da = dy W2", "dx = dh W1"}
    assert "t1 = x A1^T, again" in {s.what for s in stages if s.choice.backend == "cpu"}
