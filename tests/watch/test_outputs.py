"""What a watch leaves: log, table, heat maps; limits that stop; what is refused."""

from __future__ import annotations

import json
import math
import os
import xml.etree.ElementTree as ET

import pytest
import torch
from support import RECIPES, normal
from torch import nn
from typer.testing import CliRunner

import blockscale as bs
from blockscale.cli import app
from blockscale.report import HeatMap, PlottingUnavailableError
from blockscale.report.heatmap import render_heatmap_svg, shade
from blockscale.watching import read_log
from blockscale.watching.history import History
from blockscale.watching.log import Log, ranked


def mlp_steps(watch, mlp, steps, scale=lambda k: 1.0):
    sizes = torch.tensor([30, 0, 34])
    for k in range(steps):
        x = normal(64, 32, seed=k, spread=1.0) * scale(k)
        mlp(x.requires_grad_(), sizes).square().mean().backward()
        watch.step()


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    return bs.nn.GroupedMLP(3, 32, 64, recipe=RECIPES["mxfp8"])


def test_log(mlp, tmp_path):
    path = tmp_path / "new" / "w.jsonl"
    with bs.watch(mlp, every=2, log=path, first_step=5) as watch:
        mlp_steps(watch, mlp, 4, lambda k: math.nan if k == 2 else 1.0)
    events = read_log(path)
    assert [e["event"] for e in events] == ["start", "step", "step", "finding", "step", "step", "end"]
    assert events[0]["layers"] == ["(GroupedMLP)"]
    steps = [e for e in events if e["event"] == "step"]
    assert [(e["step"], e["full"]) for e in steps] == [(5, True), (6, True), (7, False), (8, True)]
    first = {t["role"]: t for t in steps[0]["tensors"]}
    assert len(first) == 12
    assert first["input"]["nan"] == 0
    assert first["input"]["spread"] >= 0
    assert "spread" not in first["hidden"]
    bad = {t["role"]: t for t in steps[2]["tensors"]}
    assert bad["input"]["nan"] == 64 * 32
    assert bad["input"]["experts"] == [0, 2]
    assert events[3]["finding"]["step"] == 7
    assert events[3]["text"] == str(watch.first_nan)


def test_log_goes_on_after_a_torn_line(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_text('{"event": "step", "step": 1}\n{"event": "st')
    log = Log(path)
    log.write("step", step=2)
    log.close()
    assert [e["step"] for e in read_log(path)] == [1, 2]
    assert json.loads(path.read_text().splitlines()[-1])["event"] == "step"
    assert ranked("a/w.jsonl", 3, 8).name == "w.rank3.jsonl"
    assert ranked("a/w.jsonl", 0, 1).name == "w.jsonl"


@pytest.mark.parametrize(
    ("stop", "scale", "kind"),
    [("nan", math.nan, "nan"), (("nan", "inf"), math.inf, "inf"), ({"amax": 50.0}, 100.0, "amax")],
)
def test_stop(mlp, stop, scale, kind):
    watch = bs.watch(mlp, every=1, stop=stop)
    with pytest.raises(bs.WatchStop, match=r"step 2, layer \(GroupedMLP\), role input, expert 0 \(and 2\) of 3") as e:
        mlp_steps(watch, mlp, 4, lambda k: scale if k == 2 else 1.0)
    assert (e.value.finding.step, e.value.finding.role) == (2, "input")
    assert e.value.finding.kind == kind
    assert len(watch._history.columns) == 3


def test_underflow_stops(mlp):
    watch = bs.watch(mlp, every=1, stop={"underflow": 0.2})
    sizes = torch.tensor([30, 0, 34])
    x = normal(64, 32, seed=1, spread=1.0)
    x[30:, ::2] *= 1e-7
    mlp(x, sizes)
    with pytest.raises(bs.WatchStop, match=r"first underflow: step 0, layer .* role input, expert 2 of 3: 0\.5, limit 0\.2"):
        watch.step()


def test_table_and_heatmaps(mlp, tmp_path):
    watch = bs.watch(mlp, every=1)
    mlp_steps(watch, mlp, 5, lambda k: math.nan if k == 3 else 1.0)
    text = watch.text(roles=["input", "da"])
    assert text.count("(GroupedMLP)") == 2
    assert "MXFP8 E4M3 1x32" in text
    page = watch.heatmap(tmp_path / "w.html").read_text()
    assert page.count("<svg") == 6
    assert "first NaN: step 3, layer (GroupedMLP), role input, expert 0 (and 2) of 3" in page
    assert "<title>(GroupedMLP), 3: 8192</title>" in page  # the pre-activation: 64 x 128
    pytest.importorskip("matplotlib")
    data = watch.heatmap(tmp_path / "w.png", metric="amax", role="activation").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match=r"ends in '\.pdf'; \.png or \.html"):
        watch.heatmap(tmp_path / "w.pdf")
    with pytest.raises(ValueError, match="metric='x' is not one of"):
        watch.heatmap(tmp_path / "w.html", metric="x")
    with pytest.raises(ValueError, match="role='x' was not seen; seen: activation, da"):
        watch.heatmap(tmp_path / "w.html", role="x")


def test_no_matplotlib(mlp, tmp_path, monkeypatch):
    watch = bs.watch(mlp)
    mlp_steps(watch, mlp, 1)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(PlottingUnavailableError, match=r"blockscale\[plot\]"):
        watch.heatmap(tmp_path / "w.png")
    assert os.listdir(tmp_path) == []


def test_heatmap_drawing():
    heat = HeatMap("h", "t <1>", ["a", "b"], ["0", "1", "2"], [[0.0, 0.0, 4.0], [None, 2.0, math.inf]], low=0.0)
    tree = ET.fromstring(render_heatmap_svg(heat))
    boxes = [(float(r.get("width")), r.get("fill"), r[0].text) for r in tree.iter("rect") if len(r)]
    assert [text for _, _, text in boxes] == ["a, 0 to 1: 0", "a, 2: 4", "b, 1: 2", "b, 2: inf"]
    assert boxes[0][0] == pytest.approx(2 * boxes[1][0], abs=0.02)
    assert boxes[1][1] == boxes[3][1] == shade(9.0, 0.0, 4.0, False)
    assert len({color for _, color, _ in boxes}) == 3
    assert shade(1.0, 0, 1, True) != shade(0.0, 0, 1, True)
    with pytest.raises(ValueError, match="not 1 rows of 2 columns"):
        HeatMap("h", "t", ["a"], ["0", "1"], [[0.0]])


def test_history_is_bounded_and_loses_nothing_bad():
    history = History(4)
    for step in range(100):
        values = torch.zeros(2, 6, dtype=torch.float64)
        values[1, 0] = float(step == 37)
        history.add(step, True, [("a", "x"), ("b", "x")], values)
        assert len(history.columns) <= 4
    grid = history.grid("nan")
    assert grid[0].sum() == 0
    (index,) = grid[1].nonzero()[:, 0].tolist()
    assert history.columns[index].first <= 37 <= history.columns[index].last
    assert history.columns[0].first == 0
    assert history.columns[-1].last == 99


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "every=0 is not legal"),
        ({"filter": "nothing*"}, ValueError, r"filter='nothing\*' passes none"),
        ({"stop": "all"}, ValueError, "stop names 'all'; legal: nan, inf, saturated"),
        ({"stop": "underflow"}, ValueError, "underflow needs a limit"),
        ({"stop": {"nan": 3}}, ValueError, "0 is the only limit"),
        ({"stop": {"amax": "x"}}, TypeError, "a number is needed"),
        ({"stop": 3}, ValueError, "stop names '3'"),
        ({"first_step": -1}, ValueError, "first_step=-1"),
    ],
)
def test_refused(mlp, options, error, message):
    with pytest.raises(error, match=message):
        bs.watch(mlp, **options)
    assert mlp.tap is None
    with pytest.raises(TypeError, match="model is int"):
        bs.watch(3)


def test_other_outputs_than_tensors():
    class Many(nn.Module):
        def forward(self, x):
            return {"a": x * 2, "b": (x.double(), torch.arange(3), None)}, x[:0]

    module = Many()
    watch = bs.watch(module)
    x = normal(4, 8, seed=1)
    x[0, 0] = math.nan
    module(x)
    watch.step()
    assert watch.first_nan.role == "input"
    assert watch._latest["(Many)", "output"].measured[0] == 2


def test_train_command(tmp_path):
    data = tmp_path / "text"
    data.write_text("alpha = beta + gamma\n" * 3000)
    small = ["--batch=2", "--context=32", "--layers=1", "--width=32", "--experts=4", "--intermediate=32"]
    small += ["--recipe=bf16,mxfp8", "--steps=4"]
    command = ["train", "--watch", "--data", str(data), "--out", str(tmp_path / "out"), *small]
    result = CliRunner().invoke(app, command)
    assert result.exit_code in (0, 1), result.output
    watched = tmp_path / "out" / "watch"
    assert {p.name for p in watched.iterdir()} >= {"bf16.html", "bf16.jsonl", "mxfp8.html", "mxfp8.jsonl"}
    events = read_log(watched / "mxfp8.jsonl")
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2, 3, 4]
    assert any(t["role"] == "activation" and t["layer"] == "blocks.0.experts.moe.experts" for t in events[1]["tensors"])
    without = CliRunner().invoke(app, ["train", "--json", "--data", str(data), "--out", str(tmp_path / "plain"), *small])
    hashes = [
        {n: r["final_weights_sha256"] for n, r in json.loads(text)["recipes"].items()}
        for text in (without.stdout, (tmp_path / "out" / "results.json").read_text())
    ]
    assert hashes[0] == hashes[1]
