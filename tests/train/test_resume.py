"""Stopping and going on gives the bits of never having stopped; a broken write loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from train_helpers import Quiet, never, tiny_config

from blockscale.train import CheckpointError, DataError, Interrupted, Job, JobError, saved_config
from blockscale.train.checkpoint import newest, publish

# nvfp4 draws from torch's generator for stochastic rounding, so its random state must come back too.
RECIPES = ("bf16", "nvfp4")


def stop_after(calls: int):
    """Becomes true at the given call, and stays so."""
    made = iter(range(10**9))
    return lambda: next(made) >= calls


def outcome(result):
    return [(state.losses, state.validation, state.batches_sha256, state.final_sha256) for state in result.states]


@pytest.fixture(scope="module")
def uninterrupted(text_file, tmp_path_factory):
    torch.set_num_threads(1)
    return outcome(Job(tiny_config(text_file, RECIPES, steps=20), tmp_path_factory.mktemp("whole")).run(Quiet(), never))


def test_stopped_and_resumed_is_bit_identical(text_file, tmp_path, uninterrupted):
    config = tiny_config(text_file, RECIPES, steps=20)
    stops = []
    for calls in (5, 10, 12):
        with pytest.raises(Interrupted) as stopped:
            Job(config, tmp_path).run(Quiet(), stop_after(calls))
        stops.append((stopped.value.recipe, stopped.value.step))
        torch.manual_seed(999)
    assert stops == [("bf16", 5), ("bf16", 15), ("nvfp4", 7)]
    watcher = Quiet()
    assert outcome(Job(config, tmp_path).run(watcher, never)) == uninterrupted
    assert watcher.steps[:2] == [("bf16", 20), ("nvfp4", 7)]
    assert watcher.steps[2] == ("nvfp4", 8)
    assert saved_config(tmp_path) == config


def test_delayed_scaling_goes_on_where_it_was(text_file, tmp_path):
    """Scales and histories come back with the weights, into a model that has none before its first step."""
    config = tiny_config(text_file, ("fp8delayed",), steps=20)
    whole = outcome(Job(config, tmp_path / "whole").run(Quiet(), never))
    with pytest.raises(Interrupted):
        Job(config, tmp_path / "parts").run(Quiet(), stop_after(11))
    assert outcome(Job(config, tmp_path / "parts").run(Quiet(), never)) == whole


def test_a_write_that_fails_leaves_the_previous_checkpoint(text_file, tmp_path, monkeypatch, uninterrupted):
    config = tiny_config(text_file, RECIPES, steps=20)
    rename = Path.rename

    def failing(self, target):
        if "step-000016" in str(target):
            raise OSError("disk full")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="disk full"):
        Job(config, tmp_path).run(Quiet(), never)
    folder = tmp_path / "checkpoints" / "bf16"
    assert newest(folder).name == "step-000008"
    assert any(path.name.endswith(".tmp") for path in folder.iterdir())
    monkeypatch.setattr(Path, "rename", rename)
    assert outcome(Job(config, tmp_path).run(Quiet(), never)) == uninterrupted
    assert [path.name for path in folder.iterdir()] == ["step-000020"]


def test_publish_keeps_the_newest_alone_and_never_rewrites_it(tmp_path):
    publish(tmp_path, 9, {"a": b"nine"})
    publish(tmp_path, 1000, {"a": b"thousand"})
    publish(tmp_path, 1000, {"a": b"other"})
    assert [path.name for path in tmp_path.iterdir()] == ["step-001000"]
    assert (newest(tmp_path) / "a").read_bytes() == b"thousand"


def test_other_data_is_refused(text_file, tmp_path):
    copy = tmp_path / "text.txt"
    copy.write_bytes(text_file.read_bytes())
    config = tiny_config(copy, ("bf16",), steps=20)
    with pytest.raises(Interrupted):
        Job(config, tmp_path / "run").run(Quiet(), stop_after(2))
    copy.write_bytes(text_file.read_bytes()[::-1])
    with pytest.raises(JobError, match=r"the data is not what .*step-000002 was trained on"):
        Job(config, tmp_path / "run").run(Quiet(), never)
    copy.unlink()
    with pytest.raises(DataError, match="does not exist"):
        Job(config, tmp_path / "run")


@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "optimizer.pt"])
def test_a_damaged_checkpoint_is_named(text_file, tmp_path, name):
    config = tiny_config(text_file, ("bf16",), steps=20)
    with pytest.raises(Interrupted):
        Job(config, tmp_path).run(Quiet(), stop_after(2))
    path = tmp_path / "checkpoints" / "bf16" / "step-000002" / name
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointError, match=r"step-000002 cannot be .*remove it to start that recipe again"):
        Job(config, tmp_path).run(Quiet(), never)


def test_other_threads_are_remarked(text_file, tmp_path):
    config = tiny_config(text_file, ("bf16",), steps=4)
    with pytest.raises(Interrupted):
        Job(config, tmp_path).run(Quiet(), stop_after(2))
    state = tmp_path / "checkpoints" / "bf16" / "step-000002" / "state.json"
    content = json.loads(state.read_text())
    content["training"]["threads"] = 7
    state.write_text(json.dumps(content))
    watcher = Quiet()
    Job(config, tmp_path).run(watcher, never)
    assert watcher.notes == ["bf16: threads was 7, is 1: the last bits may differ"]
