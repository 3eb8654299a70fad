"""The command line as a person and as a machine uses it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from blockscale.cli import app
from blockscale.formats import parse
from blockscale.recipes import parse_recipe
from blockscale.report import make_progress
from blockscale.train import CHOICES

_TINY = "--batch 4 --context 32 --width 32 --layers 2 --experts 4 --intermediate 32 --device cpu"
TINY = [*_TINY.split(), "--evaluate-every", "10", "--learning-rate", "0.005"]
COMMAND = [sys.executable, "-c", "from blockscale.cli import app; app()"]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"row {index % 7} = scale {index % 11} of block {index % 3}\n" for index in range(2000)))
    return str(path)


def blockscale(*arguments: str):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run of three recipes on the standard library."""
    out = tmp_path_factory.mktemp("finished") / "run"
    result = blockscale("train", *TINY, "--recipe", "bf16,mxfp8,fp8block", "--steps", 20, "--out", out)
    return out, result


def test_help_names_the_commands_and_their_options():
    assert {"train", "info"} <= set(re.findall(r"\w+", blockscale("--help").stdout))
    shown = blockscale("train", "--help").stdout
    for option in ("--data", "--recipe", "--steps", "--out", "--resume", "--seed", "--json"):
        assert option in shown


def test_info_tells_versions_devices_formats_recipes():
    found = json.loads(blockscale("info", "--json").stdout)
    assert found["versions"]["torch"] == torch.__version__
    assert "cpu" in found["devices"]
    assert "gemm" in found["backends"]["cpu"]
    assert "routing: reference (the only backend for the CPU" in found["backends"]["cpu"]
    assert found["formats"]["MXFP8"].startswith("mxfp8:element=e4m3:block=1x32")
    assert set(found["formats"]) == {"MXFP8", "MXFP4", "NVFP4", "FP8Tensor", "FP8Delayed", "FP8Block", "Hybrid"}
    assert {name: parse(spec).spec() for name, spec in found["formats"].items()} == found["formats"]
    assert {name: parse_recipe(spec) for name, spec in found["recipes"].items()} == {n: c.make() for n, c in CHOICES.items()}
    assert {"bf16", "mxfp8", "nvfp4", "fp8block", "fp8current", "fp8delayed", "w4a8", "planes"} <= set(found["recipes"])
    fast, _, served = found["quantizers"]["cpu"].partition("reference: ")
    assert "MXFP4 E2M1 1x32" in fast
    assert "NVFP4 E2M1 1x16 row_scaled" in fast
    assert "FP8Delayed E4M3" in served
    assert torch.__version__ in blockscale("info").stdout


def test_a_run_ends_with_table_verdicts_and_files(finished):
    out, result = finished
    assert result.exit_code == 0, result.output
    assert re.search(r"MXFP8 +\d\.\d{4} +\d\.\d{4} +[+-]\d\.\d\d % +0\.\d{4} ", result.stdout)
    assert re.search(r"FP8 block within 1 % of bf16: yes \([+-]0\.\d\d %\)", result.stdout)
    assert "MXFP8: step 20/20  loss" in result.stderr
    assert "tokens/s" in result.stderr
    assert " left" in result.stderr
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints", "curves.png", "report.html", "results.json"]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_results_json_holds_what_the_table_shows(finished):
    out, _ = finished
    results = json.loads((out / "results.json").read_text())
    base, low = results["recipes"]["bf16"], results["recipes"]["mxfp8"]
    assert base["losses"][0] > 5.5
    assert base["losses"][-1] < 4.7
    assert low["gap_percent"] == pytest.approx(100 * (low["validation_loss"] / base["validation_loss"] - 1), abs=1e-9)
    assert low["initial_weights_sha256"] == base["initial_weights_sha256"]
    assert low["batches_sha256"] == base["batches_sha256"]
    assert low["final_weights_sha256"] != base["final_weights_sha256"]
    assert len(results["data"]["sha256"]) == 64
    assert results["data"]["bytes"] > 3_000_000
    assert results["environment"]["torch"] == torch.__version__
    assert results["environment"]["threads"] == "1"
    assert results["config"]["training"]["steps"] == 20
    assert "saved_tensors_hooks" in results["methods"]["saved_bytes"]
    assert [verdict["holds"] for verdict in results["verdicts"]] == [True, True]


def test_the_html_report_stands_alone(finished):
    out, _ = finished
    page = (out / "report.html").read_text()
    results = json.loads((out / "results.json").read_text())
    assert not re.search(r"https?://|<script|<link|@import|\bsrc=|url\((?!#)", page)
    assert page.count('class="chart"') == 2
    assert page.count("<polyline") >= 8
    assert f"{results['recipes']['mxfp8']['validation_loss']:.4f}" in page
    assert results["data"]["sha256"] in page
    assert torch.__version__ in page
    assert "MXFP8 within 1 % of bf16: <b>yes</b>" in page
    for text in (page, (out / "results.json").read_text()):
        assert str(out) not in text
        assert sysconfig.get_paths()["stdlib"] not in text
        assert str(Path.home()) not in text


def test_a_finished_run_resumed_reports_the_same_again(finished):
    out, _ = finished
    before = json.loads((out / "results.json").read_text())
    result = blockscale("train", "--resume", "--out", out, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == before


def test_json_leaves_stdout_to_the_machine(text, tmp_path):
    result = blockscale("train", *TINY, "--data", text, "--recipe", "nvfp4", "--steps", 3, "--out", tmp_path / "o", "--json")
    results = json.loads(result.stdout)
    assert result.exit_code == 0
    assert results["data"]["source"] == text
    assert results["verdicts"] == []
    assert results["recipes"]["nvfp4"]["gap_percent"] is None


def test_without_matplotlib_the_rest_is_written(text, tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    result = blockscale("train", *TINY, "--data", text, "--recipe", "bf16", "--steps", 3, "--out", tmp_path / "o")
    assert result.exit_code == 0, result.output
    assert "curves.png was not written: matplotlib is missing; install it with: pip install 'blockscale[plot]'" in result.stderr
    assert not (tmp_path / "o" / "curves.png").exists()
    assert "<polyline" in (tmp_path / "o" / "report.html").read_text()


def test_a_gap_beyond_the_bound_is_a_finding(text, tmp_path, monkeypatch):
    monkeypatch.setattr("blockscale.train.job.JobResult.gap_percent", lambda self, recipe: 1.01 if recipe == "mxfp8" else None)
    result = blockscale("train", *TINY, "--data", text, "--recipe", "bf16,mxfp8", "--steps", 2, "--out", tmp_path / "o")
    assert result.exit_code == 1
    assert "MXFP8 within 1 % of bf16: no (+1.01 %)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "bf16,fp7"], "unknown recipe 'fp7'; choose from bf16, mxfp8, nvfp4, fp8block, fp8current"),
        (["--steps", "0"], "steps is 0; it must be 1 or more"),
        (["--data", "no/such/place"], "data 'no/such/place' does not exist: name a file or a folder"),
        (["--seed", "-1"], "seed is -1; it must be from 0 to 2147483647"),
        (["--device", "tpu9"], "device 'tpu9' is unknown; choose auto, cpu or cuda"),
        (["--top-k", "9"], "top-k is 9; it must be from 1 to experts = 8"),
        (["--resume"], "holds no run to resume; leave --resume out to start one"),
        (["--resume", "--overwrite"], "give one of them"),
    ],
)
def test_wrong_use_exits_2_and_says_what_is_legal(tmp_path, arguments, message):
    result = blockscale("train", "--out", tmp_path / "o", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "o").exists()


def test_a_folder_with_a_run_is_not_overwritten_by_accident(finished):
    out, _ = finished
    before = (out / "results.json").read_bytes()
    result = blockscale("train", *TINY, "--out", out)
    assert result.exit_code == 2
    assert "holds a run already: --resume goes on with it, --overwrite discards it" in result.stderr
    result = blockscale("train", "--resume", "--steps", 21, "--out", out)
    assert result.exit_code == 2
    assert f"--steps 21 differs from the run in {out}, which has 20" in result.stderr
    assert (out / "results.json").read_bytes() == before


def test_ctrl_c_saves_and_resume_ends_with_the_same_bits(text, tmp_path):
    """A real SIGINT to a real process, then the same command with --resume, against a run left alone."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    options = ["train", *TINY, "--data", text, "--recipe", "bf16,nvfp4", "--steps", "30", "--log-every", "1"]
    whole = subprocess.run([*COMMAND, *options, "--out", tmp_path / "whole", "--json"], env=environment, capture_output=True)
    stopped = subprocess.Popen([*COMMAND, *options, "--out", tmp_path / "o"], env=environment, stderr=subprocess.PIPE, text=True)
    assert stopped.stderr is not None
    seen = []
    for line in stopped.stderr:
        seen.append(line)
        if line.startswith("NVFP4: step 5/30"):
            stopped.send_signal(signal.SIGINT)
    assert stopped.wait(60) == 130, "".join(seen)
    said = "".join(seen)
    assert re.search(r"Stopped after step [5-9] of nvfp4; everything is saved in", said)
    assert f"Go on with: blockscale train --resume --out {tmp_path / 'o'}" in said
    assert not (tmp_path / "o" / "results.json").exists()
    again = subprocess.run([*COMMAND, "train", "--resume", "--out", tmp_path / "o", "--json"], env=environment, capture_output=True)
    expected, found = json.loads(whole.stdout), json.loads(again.stdout)
    for recipe in ("bf16", "nvfp4"):
        for key in ("losses", "validation", "final_weights_sha256", "batches_sha256", "gradient_error", "saved_bytes"):
            assert found["recipes"][recipe][key] == expected["recipes"][recipe][key], (recipe, key)
    assert b"bf16: step 30/30" in again.stderr
    assert b"step 1/30" not in again.stderr


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines():
    terminal = io.StringIO()
    with make_progress(Console(file=terminal, force_terminal=True, width=120), every=10) as progress:
        progress.start("MXFP8", 20)
        for step in range(1, 21):
            progress.update(step, loss="2.5")
        progress.finish("done")
    assert "MXFP8" in terminal.getvalue()
    assert "━" in terminal.getvalue()
    assert "20/20" in terminal.getvalue()
    pipe = io.StringIO()
    with make_progress(Console(file=pipe), every=10) as progress:
        progress.start("MXFP8", 20)
        for step in range(1, 21):
            progress.update(step, loss="2.5")
    lines = pipe.getvalue().splitlines()
    assert [line[:17].strip() for line in lines] == ["MXFP8: step 0/20", "MXFP8: step 10/20", "MXFP8: step 20/20"]
    assert re.search(r"loss 2\.5  \d+\.\d s left", lines[1])
